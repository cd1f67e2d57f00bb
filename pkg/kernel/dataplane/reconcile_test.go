// SPDX-License-Identifier: Apache-2.0

package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func silentContext(t testing.TB) context.Context { return klog.NewContext(t.Context(), klog.Logger{}) }

func TestReconcileErrors(t *testing.T) {
	spy := &dataplanetest.Spy{Kernel: dataplanetest.New()}
	r := dataplanetest.NewReconciler(t, spy, 0)
	want := dataplanetest.Peers(3)

	spy.ReadError = func() error { return syscall.EINTR }
	if _, err := r.Reconcile(silentContext(t), want, true); !errors.Is(err, syscall.EINTR) || len(spy.Take()) > 0 {
		t.Errorf("error %v, want the error of the read, and no change", err)
	}
	spy.ReadError = nil

	spy.Fail = func(op dataplane.Op) error {
		if _, ok := op.Object.(dataplane.FDB); ok {
			return syscall.EBUSY
		}
		return nil
	}
	_, err := r.Reconcile(silentContext(t), want, true)
	if !errors.Is(err, syscall.EBUSY) || !suffixed(err, "; and 3 more") {
		t.Errorf("error %v, want the first three of six", err)
	}
	spy.Fail = func(op dataplane.Op) error {
		if e, ok := op.Object.(dataplane.FDB); ok && e.Dst.Is4() {
			return syscall.EBUSY
		}
		return nil
	}
	if _, err = r.Reconcile(silentContext(t), want, true); !errors.Is(err, syscall.EBUSY) || strings.Contains(err.Error(), "more") {
		t.Errorf("error %v, want all three", err)
	}
	spy.Fail = nil
	if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
		t.Errorf("after the failures: %v", err)
	}
}

func suffixed(err error, s string) bool {
	text := err.Error()
	return len(text) > len(s) && text[len(text)-len(s):] == s
}

// ignoringKernel is a kernel that acknowledges changes and ignores them.
type ignoringKernel struct{ dataplane.Kernel }

func (ignoringKernel) Apply(context.Context, []dataplane.Op) []dataplane.OpError { return nil }

func TestReconcileDoesNotSettle(t *testing.T) {
	r := dataplanetest.NewReconciler(t, ignoringKernel{dataplanetest.New()}, 0)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err == nil {
		t.Error("no error, want one")
	}
}

// TestRefusal checks which failures of a route count as a refusal that concerns one peer.
func TestRefusal(t *testing.T) {
	through := other
	through.NexthopID = 7
	plain := other
	plain.Gateway = netip.Addr{}
	for _, tc := range []struct {
		name    string
		route   dataplane.Route
		delete  bool
		err     error
		refused bool
	}{
		{"network unreachable", other, false, syscall.ENETUNREACH, true},
		{"host unreachable", other, false, syscall.EHOSTUNREACH, true},
		{"invalid", other, false, syscall.EINVAL, true},
		{"link down", other, false, syscall.ENETDOWN, false},
		{"a nexthop object that may be gone", through, false, syscall.EINVAL, false},
		{"no gateway", plain, false, syscall.EINVAL, false},
		{"a delete", other, true, syscall.EINVAL, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k := dataplanetest.New()
			want := stateOf(tc.route)
			if tc.delete {
				want = stateOf()
				if err := k.Append(tc.route); err != nil {
					t.Fatal(err)
				}
			}
			r := dataplanetest.NewReconciler(t, &dataplanetest.Spy{Kernel: k, Fail: func(dataplane.Op) error { return tc.err }}, 0)
			report, err := r.Reconcile(silentContext(t), want, true)
			if refused := err == nil && report.Unreachable && len(report.Refused) == 1; refused != tc.refused || !refused && !errors.Is(err, tc.err) {
				t.Errorf("refused %v, error %v; want refused: %t", report.Refused, err, tc.refused)
			}
		})
	}
}

// TestAdopted checks that the Reconciler deletes an unwanted route of another program only with sweep, and
// only if it has adopted the route before. After the delete, the route counts as one that was not adopted.
func TestAdopted(t *testing.T) {
	k := dataplanetest.New()
	theirs := other
	theirs.Protocol = 3
	if err := k.Append(theirs); err != nil {
		t.Fatal(err)
	}
	r := dataplanetest.NewReconciler(t, k, 0)
	there := func() bool {
		s, err := k.Read(t.Context(), dataplanetest.Scope())
		if err != nil {
			t.Fatal(err)
		}
		return s.Has(theirs)
	}
	for i, step := range []struct {
		want         dataplane.State
		sweep, there bool
	}{
		{stateOf(), true, true}, // the Reconciler has not wanted it yet
		{stateOf(other), true, true},
		{stateOf(), false, true},
		{stateOf(), true, false}, // the second step has adopted it
	} {
		if _, err := r.Reconcile(silentContext(t), step.want, step.sweep); err != nil {
			t.Fatal(err)
		}
		if there() != step.there {
			t.Fatalf("after step %d: there %t, want %t", i, there(), step.there)
		}
	}
	if err := k.Append(theirs); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Reconcile(silentContext(t), stateOf(), true); err != nil || !there() {
		t.Errorf("there %t (%v), want the new route to stay, because it was not adopted", there(), err)
	}
}

// TestAdoptedOnce checks that Reconcile without sweep and Update adopt a route of another program. A sweep
// deletes the route when it is not wanted any more, and forgets that it was adopted.
func TestAdoptedOnce(t *testing.T) {
	theirs := with(other, func(r *dataplane.Route) { r.Protocol, r.MTU = 3, 1300 })
	for name, pass := range map[string]struct {
		want, forget func(*dataplane.Reconciler) error
	}{
		"Reconcile": {
			func(r *dataplane.Reconciler) error {
				_, err := r.Reconcile(silentContext(t), stateOf(other.AsPlain()), false)
				return err
			},
			func(r *dataplane.Reconciler) error {
				_, err := r.Reconcile(silentContext(t), stateOf(), true)
				return err
			},
		},
		"Update": {
			func(r *dataplane.Reconciler) error {
				_, err := r.Update(silentContext(t), nil, []dataplane.Object{other}, true)
				return err
			},
			func(r *dataplane.Reconciler) error {
				_, err := r.Update(silentContext(t), []dataplane.Object{other}, nil, true)
				return err
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := dataplanetest.New()
			r := dataplanetest.NewReconciler(t, k, time.Hour)
			there := func() bool {
				s, err := k.Read(t.Context(), dataplanetest.Scope())
				return err == nil && s.Has(theirs)
			}
			if _, err := r.Reconcile(silentContext(t), stateOf(), true); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(k.Append(theirs), pass.want(r)); err != nil || !there() {
				t.Fatalf("there %t (%v), want the route to stay while it is wanted", there(), err)
			}
			if err := pass.forget(r); err != nil || there() {
				t.Fatalf("there %t (%v), want the adopted route to be deleted", there(), err)
			}
			if err := k.Append(theirs); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Update(silentContext(t), nil, nil, true); err != nil || !there() {
				t.Errorf("there %t (%v), want the new route to stay, because it was not adopted", there(), err)
			}
		})
	}
}

// TestUpdateKeepsAdopted checks that a route stays adopted if Update removes it and adds it again, and if
// Update removes it without sweep.
func TestUpdateKeepsAdopted(t *testing.T) {
	k := dataplanetest.New()
	theirs := with(other, func(r *dataplane.Route) { r.Protocol = 3 })
	if err := k.Append(theirs); err != nil {
		t.Fatal(err)
	}
	r := dataplanetest.NewReconciler(t, k, time.Hour)
	for _, step := range []struct {
		removed, added []dataplane.Object
		sweep          bool
	}{
		{nil, []dataplane.Object{other}, true},
		{[]dataplane.Object{other}, []dataplane.Object{other}, true},
		{[]dataplane.Object{other}, nil, false},
		{nil, nil, true},
	} {
		if _, err := r.Update(silentContext(t), step.removed, step.added, step.sweep); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := k.Read(t.Context(), dataplanetest.Scope()); err != nil || s.Has(theirs) {
		t.Errorf("the adopted route is there (%v), want it deleted", err)
	}
}

// TestSweepAt checks that SweepAt deletes the unwanted objects with the given keys in one pass without
// sweep, and no others. A pass that fails leaves this to the next one.
func TestSweepAt(t *testing.T) {
	k := dataplanetest.New()
	spy := &dataplanetest.Spy{Kernel: k}
	r := dataplanetest.NewReconciler(t, spy, time.Hour)
	update := func() error {
		_, err := r.Update(silentContext(t), nil, nil, false)
		return err
	}
	expect := func(want dataplane.State) {
		t.Helper()
		have, err := k.Read(t.Context(), dataplanetest.Scope())
		if err != nil {
			t.Fatal(err)
		}
		if ops := dataplane.Plan(have, want, dataplanetest.Scope(), nil, true).Ops; len(ops) > 0 {
			t.Errorf("%d changes remain, the first is %s", len(ops), ops[0])
		}
	}
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Peers(3), false); err != nil {
		t.Fatal(err)
	}
	gone := slices.Concat(dataplanetest.Peer(3, 0), dataplanetest.Peer(4, 0))
	if _, err := r.Update(silentContext(t), gone, nil, false); err != nil {
		t.Fatal(err)
	}
	expect(dataplanetest.Peers(3)) // nothing was deleted

	spy.Fail = func(dataplane.Op) error { return syscall.EBUSY }
	r.SweepAt(slices.Concat(dataplanetest.Peer(2, 0), dataplanetest.Peer(3, 0))...)
	if err := update(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("error %v, want the error of the deletes", err)
	}
	spy.Fail = nil
	spy.Take()
	if report, err := r.Update(silentContext(t), nil, nil, false); err != nil || report.Repaired > 0 {
		t.Errorf("%d repairs (%v), want none, because SweepAt has asked for the deletes", report.Repaired, err)
	}
	if ops := spy.Take(); len(ops) != 6 {
		t.Errorf("changes %v, want only the six deletes for peer 3", ops)
	}
	want := dataplanetest.Peers(3)
	want.Remove(dataplanetest.Peer(3, 0)...)
	expect(want)

	if err := errors.Join(k.Append(dataplanetest.Peer(3, 0)...), update()); err != nil {
		t.Fatal(err)
	}
	expect(dataplanetest.Peers(3)) // only one pass sweeps

	duplicate := with(dataplanetest.Peer(2, 0)[2].(dataplane.Route), func(r *dataplane.Route) { r.Priority = 9 })
	if err := k.Append(duplicate); err != nil {
		t.Fatal(err)
	}
	spy.Take()
	r.SweepAt(duplicate)
	if err := update(); err != nil || len(spy.Take()) != 1 {
		t.Errorf("error %v, want one delete of the duplicate", err)
	}
	if _, err := r.Update(silentContext(t), nil, nil, true); err != nil {
		t.Fatal(err)
	}
	expect(dataplanetest.Peers(1)) // a sweep compares everything after passes without sweep
}

// silentKernel is a kernel whose monitors announce nothing while it is silent.
type silentKernel struct {
	*dataplanetest.Kernel
	silent bool
	events []dataplane.Event // to be announced
	reads  int
	err    error // of reads
}

type silentMonitor struct {
	dataplane.Monitor
	kernel *silentKernel
}

func (k *silentKernel) Read(ctx context.Context, s dataplane.Scope) (dataplane.State, error) {
	k.reads++
	if k.err != nil {
		return dataplane.State{}, k.err
	}
	return k.Kernel.Read(ctx, s)
}

func (k *silentKernel) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	m, err := k.Kernel.Monitor(s, changed)
	return silentMonitor{m, k}, err
}

func (m silentMonitor) Drain() (events []dataplane.Event, rerouted, lost bool) {
	if events, rerouted, lost = m.Monitor.Drain(); m.kernel.silent {
		return nil, false, false
	}
	events = append(events, m.kernel.events...)
	m.kernel.events = nil
	return events, rerouted, lost
}

// TestResync checks that the Reconciler reads the whole state after four fifths of Resync, and finds changes
// that were not announced. If that read fails, the next pass reads again. Before, no announcement of a
// nexthop object that no route uses makes it read.
func TestResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &silentKernel{Kernel: dataplanetest.New()}
		r := dataplanetest.NewReconciler(t, k, time.Hour)
		if _, err := r.Reconcile(silentContext(t), stateOf(link, addr, neigh, fdb, route), true); err != nil {
			t.Fatal(err)
		}
		k.silent = true
		if err := k.Remove(neigh); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Update(silentContext(t), nil, nil, true); err != nil {
			t.Fatal(err)
		}
		k.silent = false
		k.reads = 0
		k.events = []dataplane.Event{{Nexthop: 99}}
		if report, err := r.Update(silentContext(t), nil, nil, true); err != nil || report.Puts > 0 || k.reads > 0 {
			t.Errorf("%d puts after %d reads (%v), want none", report.Puts, k.reads, err)
		}

		time.Sleep(time.Hour * 4 / 5)
		k.err = syscall.EINTR
		if _, err := r.Update(silentContext(t), nil, nil, true); !errors.Is(err, k.err) {
			t.Errorf("error %v, want the error of the read", err)
		}
		k.err = nil
		if err := k.Append(dataplanetest.Peer(2, 0)[0]); err != nil { // its announcement must not reach the cache
			t.Fatal(err)
		}
		if report, err := r.Update(silentContext(t), nil, nil, true); err != nil || report.Puts != 1 || report.Deletes != 1 || k.reads != 2 {
			t.Errorf("%d puts, %d deletes after %d reads (%v), want 1, 1 and 2", report.Puts, report.Deletes, k.reads, err)
		}
	})
}

// TestRepaired checks which changes count as repairs: those of an object that another program has
// changed, but not those that the caller has asked for.
func TestRepaired(t *testing.T) {
	k := dataplanetest.New()
	r := dataplanetest.NewReconciler(t, k, time.Hour)
	expect := func(name string, report dataplane.Report, err error, want int) {
		t.Helper()
		if err != nil || report.Repaired != want {
			t.Errorf("%s: %d repairs of %d puts and %d deletes (%v), want %d", name, report.Repaired, report.Puts, report.Deletes, err, want)
		}
	}
	report, err := r.Reconcile(silentContext(t), stateOf(link), true)
	expect("a new device", report, err, 0)
	objects := []dataplane.Object{addr, neigh, fdb, route}
	for _, o := range objects {
		report, err = r.Update(silentContext(t), nil, []dataplane.Object{o}, false)
		expect("adding "+o.String(), report, err, 0)
	}
	want := stateOf(append(objects, link)...)
	for _, o := range objects[1:] { // not the address, because of which the fake reports lost announcements
		if err := k.Remove(o); err != nil {
			t.Fatal(err)
		}
		report, err = r.Reconcile(silentContext(t), want, false)
		expect("Reconcile after the loss of "+o.String(), report, err, 1)
	}
	for _, o := range objects {
		if err := k.Remove(o); err != nil {
			t.Fatal(err)
		}
		report, err = r.Update(silentContext(t), nil, nil, false)
		expect("Update after the loss of "+o.String(), report, err, 1)
	}
	report, err = r.Update(silentContext(t), objects, nil, true)
	expect("removing objects", report, err, 0)
	report, err = r.Update(silentContext(t), []dataplane.Object{link}, []dataplane.Object{with(link, func(l *dataplane.Link) { l.MTU-- })}, true)
	expect("changing a device", report, err, 0)
}

// TestRefusedRouteGoes checks that a refusal ends with an Update that removes the route.
func TestRefusedRouteGoes(t *testing.T) {
	k := dataplanetest.New()
	bridge := dataplane.Link{Name: "cni0", Kind: "bridge", Up: true}
	if err := k.Append(bridge, dataplane.Addr{Dev: "cni0", Prefix: netip.MustParsePrefix("10.5.3.1/24")}); err != nil {
		t.Fatal(err)
	}
	r := dataplanetest.NewReconciler(t, k, time.Hour)
	for i, step := range []struct {
		removed, added []dataplane.Object
		refused        int
	}{
		{nil, []dataplane.Object{link, route}, 1},
		{nil, []dataplane.Object{other}, 1},
		{[]dataplane.Object{route}, nil, 0},
	} {
		report, err := r.Update(silentContext(t), step.removed, step.added, true)
		if err != nil || len(report.Refused) != step.refused {
			t.Errorf("step %d: refused %v (%v), want %d routes", i, report.Refused, err, step.refused)
		}
	}
}

// TestRerouted checks that a Report says once that routes of other programs have changed, even if the
// first call after the change fails.
func TestRerouted(t *testing.T) {
	k := dataplanetest.New()
	spy := &dataplanetest.Spy{Kernel: k}
	r := dataplanetest.NewReconciler(t, spy, time.Hour)
	if _, err := r.Reconcile(silentContext(t), stateOf(link), true); err != nil {
		t.Fatal(err)
	}
	if err := k.Append(dataplane.NewRoute(netip.MustParsePrefix("198.51.100.0/24"), other.Gateway, "eth0", false)); err != nil {
		t.Fatal(err)
	}
	spy.Fail = func(dataplane.Op) error { return syscall.EBUSY }
	if report, err := r.Update(silentContext(t), nil, []dataplane.Object{neigh}, true); err == nil || report.Rerouted {
		t.Errorf("rerouted %t (%v), want an error and false", report.Rerouted, err)
	}
	spy.Fail = nil
	for _, want := range []bool{true, false} {
		if report, err := r.Update(silentContext(t), nil, nil, true); err != nil || report.Rerouted != want {
			t.Errorf("rerouted %t (%v), want %t", report.Rerouted, err, want)
		}
	}
}

// monitoredKernel is a kernel that fails to start a monitor, or counts the monitors that are open.
type monitoredKernel struct {
	dataplane.Kernel
	err error

	open, started int
}

type countedMonitor struct {
	dataplane.Monitor
	kernel *monitoredKernel
}

func (k *monitoredKernel) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	if k.err != nil {
		return nil, k.err
	}
	k.open++
	k.started++
	m, err := k.Kernel.Monitor(s, changed)
	return countedMonitor{m, k}, err
}

func (m countedMonitor) Close() error {
	m.kernel.open--
	return m.Monitor.Close()
}

// TestMonitorOfReconciler checks that a Reconciler has a monitor from its start on, another one after the
// many writes of a start, and none after Close, and that it returns the error of a start.
func TestMonitorOfReconciler(t *testing.T) {
	k := &monitoredKernel{Kernel: dataplanetest.New()}
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: dataplanetest.Scope(), Resync: time.Hour})
	if err != nil || k.open != 1 || k.started != 1 {
		t.Fatalf("%d of %d monitors are open (%v), want one", k.open, k.started, err)
	}
	if report, err := r.Reconcile(silentContext(t), dataplanetest.Peers(300), true); err != nil || !report.Rerouted || k.open != 1 || k.started != 2 {
		t.Errorf("%d of %d monitors are open (%v), rerouted %t; want one of two, and rerouted", k.open, k.started, err, report.Rerouted)
	}
	if err := r.Close(); err != nil || k.open != 0 {
		t.Errorf("%d monitors after Close (%v), want none", k.open, err)
	}
	k.err = syscall.EMFILE
	if _, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: dataplanetest.Scope(), Resync: time.Hour}); !errors.Is(err, k.err) {
		t.Errorf("error %v, want the monitor's", err)
	}
}

// TestRetireErrors checks that Retire returns the error of the read, and of each change that fails. It
// still makes the other changes.
func TestRetireErrors(t *testing.T) {
	spy := &dataplanetest.Spy{Kernel: dataplanetest.New(), ReadError: func() error { return syscall.EINTR }}
	if removed, err := dataplane.Retire(silentContext(t), spy, dataplanetest.Scope(), dataplane.Scope{}); !errors.Is(err, syscall.EINTR) || removed != 0 {
		t.Errorf("removed %d (%v), want the error of the read", removed, err)
	}
	if ops, err := dataplane.PlanRetire(silentContext(t), spy, dataplanetest.Scope(), dataplane.Scope{}); !errors.Is(err, syscall.EINTR) {
		t.Errorf("planned %v (%v), want the error of the read", ops, err)
	}

	spy.ReadError = nil
	r := dataplanetest.NewReconciler(t, spy, 0)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Peers(1), true); err != nil {
		t.Fatal(err)
	}
	spy.Fail = func(op dataplane.Op) error {
		if op.Object.String() == link.String() {
			return syscall.EBUSY
		}
		return nil
	}
	if removed, err := dataplane.Retire(silentContext(t), spy, dataplanetest.Scope(), dataplane.Scope{}); !errors.Is(err, syscall.EBUSY) || removed != 1 {
		t.Errorf("removed %d (%v), want the other device, and the error of the first", removed, err)
	}
}

// TestTakenIsLoggedOnceAMinute checks that the Reconciler logs the routes of a program at most
// once a minute, if the program restores them each second.
func TestTakenIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		k := dataplanetest.New()
		r := dataplanetest.NewReconciler(t, k, 0)
		fight := func(passes int, protocol uint8) {
			t.Helper()
			theirs := with(other, func(r *dataplane.Route) { r.Priority, r.Protocol = 5, protocol })
			for range passes {
				if err := k.Append(theirs); err != nil {
					t.Fatal(err)
				}
				if _, err := r.Reconcile(ctx, stateOf(other), true); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
			}
		}
		fight(100, 42) // logged at 0 and 60 s
		fight(10, 43)
		fight(1, 42)
		if got := strings.Count(log.String(), "taking over"); got != 3 {
			t.Errorf("%d lines, want two about the first program and one about the second:\n%s", got, &log)
		}
	})
}

// TestCounts checks that Counts and Has do not count a link with a wrong attribute as
// present.
func TestCounts(t *testing.T) {
	k := dataplanetest.New()
	if err := k.Append(with(link, func(l *dataplane.Link) { l.MTU-- })); err != nil {
		t.Fatal(err)
	}
	spy := &dataplanetest.Spy{Kernel: k, Fail: func(dataplane.Op) error { return syscall.EBUSY }}
	r := dataplanetest.NewReconciler(t, spy, 0)
	expect := func(present int) {
		t.Helper()
		want := map[string]dataplane.Count{"link": {Wanted: 1, Present: present}}
		if got := r.Counts(); !maps.Equal(got, want) || r.Has(link) != (present == 1) {
			t.Errorf("counts are %v, Has is %t; want %v", got, r.Has(link), want)
		}
	}
	if _, err := r.Reconcile(silentContext(t), stateOf(link), true); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("error %v, want the error of the put", err)
	}
	expect(0)
	spy.Fail = nil
	if _, err := r.Reconcile(silentContext(t), stateOf(link), true); err != nil {
		t.Fatal(err)
	}
	expect(1)
}

// TestHas checks that Has and Counts see each kind of object, and that a link may have any checksum offload
// if none is wanted.
func TestHas(t *testing.T) {
	k := dataplanetest.New()
	scope := dataplanetest.Scope()
	scope.TxChecksum = true
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: scope})
	if err != nil {
		t.Fatal(err)
	}
	objects := []dataplane.Object{link, addr, neigh, fdb, route}
	if _, err := r.Reconcile(silentContext(t), stateOf(objects...), true); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if !r.Has(o) {
			t.Errorf("Has(%s) is false, want true", o)
		}
	}
	want := map[string]dataplane.Count{}
	for _, kind := range []string{"link", "address", "neighbour", "fdb", "route"} {
		want[kind] = dataplane.Count{Wanted: 1, Present: 1}
	}
	if got := r.Counts(); !maps.Equal(got, want) {
		t.Errorf("counts are %v, want %v", got, want)
	}
	for offload, want := range map[dataplane.Offload]bool{dataplane.OffloadOn: true, dataplane.OffloadOff: false} {
		if got := r.Has(with(link, func(l *dataplane.Link) { l.TxChecksum = offload })); got != want {
			t.Errorf("Has with offload %d is %t, want %t", offload, got, want)
		}
	}

	if _, err := r.Update(silentContext(t), objects, nil, true); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects[1:] {
		if r.Has(o) {
			t.Errorf("Has(%s) is true after it was removed, want false", o)
		}
	}
	if got := r.Counts(); len(got) > 0 {
		t.Errorf("counts are %v, want none, because nothing is wanted", got)
	}
}

func TestReport(t *testing.T) {
	r := dataplanetest.NewReconciler(t, dataplanetest.New(), 0)
	want := dataplanetest.Peers(3)
	for _, tc := range []struct {
		want          dataplane.State
		puts, deletes int
	}{{want, 2 + 2 + 3*6, 0}, {want, 0, 0}, {dataplanetest.Base(), 0, 3 * 6}} {
		report, err := r.Reconcile(silentContext(t), tc.want, true)
		if err != nil || report.Puts != tc.puts || report.Deletes != tc.deletes {
			t.Errorf("%d puts, %d deletes (%v); want %d and %d", report.Puts, report.Deletes, err, tc.puts, tc.deletes)
		}
	}
}

// TestDriftBeforeTheFirstRoute checks that the Reconciler compares everything after a failed
// write, also if the bulk start, which waits for the first route, reads the kernel's state.
func TestDriftBeforeTheFirstRoute(t *testing.T) {
	kernel := dataplanetest.New()
	spy := &dataplanetest.Spy{Kernel: kernel}
	r := dataplanetest.NewReconciler(t, spy, time.Hour)
	want, neigh := dataplanetest.Base(), dataplanetest.Peer(2, 0)[0]
	want.Add(neigh)
	if _, err := r.Reconcile(silentContext(t), want, false); err != nil {
		t.Fatal(err)
	}
	spy.Fail = func(dataplane.Op) error { return syscall.EBUSY }
	if _, err := r.Update(silentContext(t), nil, dataplanetest.Peer(3, 0)[:1], false); !errors.Is(err, syscall.EBUSY) {
		t.Fatalf("error %v, want the error of the write", err)
	}
	spy.Fail = nil
	if failed := kernel.Apply(silentContext(t), []dataplane.Op{{Object: neigh, Delete: true}}); len(failed) > 0 {
		t.Fatal(failed)
	}
	if _, err := r.Update(silentContext(t), nil, nil, false); err != nil {
		t.Fatal(err)
	}
	if !r.Has(neigh) {
		t.Errorf("%s is missing after another program has deleted it", neigh)
	}
}

func BenchmarkReconcile5000(b *testing.B) {
	have, want := dataplanetest.Base(), dataplanetest.Peers(5000)
	b.Run("plan all", func(b *testing.B) {
		for b.Loop() {
			dataplane.Plan(have, want, dataplanetest.Scope(), nil, true)
		}
	})
	b.Run("plan nothing", func(b *testing.B) {
		for b.Loop() {
			dataplane.Plan(want, want, dataplanetest.Scope(), nil, true)
		}
	})
}
