// SPDX-License-Identifier: Apache-2.0

package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/dataplanetest"
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
		return s.HasRoute(theirs)
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
