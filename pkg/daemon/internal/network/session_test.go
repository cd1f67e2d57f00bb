// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// link returns an external interface with the given MTU and address.
func link(mtu int, addr string) underlay.Interface {
	a := netip.MustParseAddr(addr)
	return underlay.Interface{Name: "eth0", Index: 2, MTU: mtu, Addrs: []underlay.Address{{Local: a, Public: a}}}
}

// starter is a backend with a scripted Start, and the network that it starts.
type starter struct {
	env   backend.Env
	start func(backend.Env) error
	close func()
	scope func(backend.Env) dataplane.Scope // nil means an empty scope
	claim func()                            // called by Claim; may be nil
	sync  func(backend.Set)                 // called by Sync; may be nil
}

func (s starter) Describe() backend.Description {
	d := backend.Description{MTU: 1450}
	if s.scope != nil {
		d.Scope = s.scope(s.env)
	}
	return d
}

func (s starter) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	if s.claim != nil {
		s.claim()
	}
	return prev, nil
}

func (s starter) Start(context.Context, subnet.Lease) (backend.Network, error) {
	return s, s.start(s.env)
}

func (starter) Check(subnet.Lease) ([]string, error) { return nil, nil }

func (s starter) Sync(_ context.Context, set backend.Set) (backend.Outcome, error) {
	if s.sync != nil {
		s.sync(set)
	}
	return backend.Outcome{}, nil
}

func (starter) Report() backend.NetworkReport { return backend.NetworkReport{} }

func (starter) Changed() <-chan struct{} { return nil }

func (s starter) Close() error {
	s.close()
	return nil
}

// silent is a store that never answers. Its calls wait until ctx ends.
type silent struct{ Store }

func (silent) Watch(ctx context.Context, _ func(subnet.Update)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (silent) Keep(ctx context.Context, _ subnet.Lease) error {
	<-ctx.Done()
	return ctx.Err()
}

func (silent) Acquire(ctx context.Context, _ subnet.Config, _ subnet.Claim) (subnet.Lease, error) {
	<-ctx.Done()
	return subnet.Lease{}, ctx.Err()
}

func (silent) Reconnect() {}

// networkOn returns a network with a session on interface from. Each later session of the network starts be.
func networkOn(t *testing.T, be starter, from underlay.Interface) (*Network, *session) {
	t.Helper()
	registry, err := backend.NewRegistry(backend.Entry{
		Type: "scripted",
		Factory: func(_ json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
			be := be
			be.env = env
			return be, nil, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	o := options.Options{Resync: time.Minute, Firewall: options.FirewallIPTables, SubnetFile: filepath.Join(t.TempDir(), "subnet.env")}
	n := &Network{
		host: &Host{Tuner: &tune.Tuner{}, Firewall: keeper.NewHost(), Journal: status.NewJournal(1)}, devices: ownership.NewLocks(""),
		opts: o, catalog: backend.Catalog{Registry: registry}, store: silent{}, state: lastknown.NewStore(nil), config: &configWatch{follow: true},
		metrics: metrics.New("", false, nil), progress: &Progress{entered: drawn(t, PhaseServing)}, surroundings: realSurroundings(),
	}
	n.ready = newReadiness(o, n.state.LeaseEnd)
	n.rules = newRuleKeeper(n.host.Firewall, o, n.state, n.ready, n.metrics)
	n.progress.session, n.progress.last = PhaseServing, PhaseServing
	now := lastknown.State{Config: subnet.Config{BackendType: "scripted"}, Interface: from}
	n.state.Change(func(to *lastknown.State) { *to = now })
	ledger, done := &subnet.Ledger{}, make(chan struct{})
	syncer := backend.NewSyncer(backend.SyncerConfig{Config: now.Config, Network: be, Sides: backend.SidesOf(be, "scripted"), Ledger: ledger, Resync: o.Resync})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(done)
		_ = syncer.Run(ctx)
	}()
	s := &session{be: be, syncer: syncer, republish: wait.NewSignal(), cancel: cancel, done: done}
	n.serving.Store(s)
	return n, s
}

// followUplink is followUntilChange with an external interface whose changes are received from changed.
func followUplink(ctx context.Context, n *Network, s *session, changed <-chan underlay.Interface) (*change, error) {
	n.watchUplink = func(ctx context.Context, _ underlay.Options, _ underlay.Interface, send func(underlay.Interface), _ func(error)) error {
		for {
			select {
			case i := <-changed:
				send(i)
			case <-ctx.Done():
				return nil
			}
		}
	}
	return n.followUntilChange(ctx, s)
}

// drawn returns a function for Progress.entered after the phase last. It fails the test if the drawing has no way to a phase.
func drawn(t *testing.T, last Phase) func(Phase) {
	return func(now Phase) {
		if !follows(last, now) {
			t.Errorf("the drawing has no way from %q to %q", last, now)
		}
		last = now
	}
}

// TestStopWhileMoving stops the daemon while a session on another interface starts
// successfully. The session must have ended when stopServing returns.
func TestStopWhileMoving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		closing, closed := false, make(chan struct{})
		be := starter{
			start: func(backend.Env) error { cancel(); return nil },
			close: func() { closing = true; <-closed },
		}
		n, s := networkOn(t, be, link(1500, "192.0.2.1"))
		changed := make(chan underlay.Interface, 1)
		changed <- link(1400, "192.0.2.1")
		ended := make(chan error, 1)
		go func() {
			_, err := followUplink(ctx, n, s, changed)
			n.stopServing()
			ended <- err
		}()
		synctest.Wait()
		if !closing || len(ended) > 0 {
			t.Errorf("the network closes: %v, it has ended: %v", closing, len(ended) > 0)
		}
		close(closed)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestUplinkOfAnotherHost serves the pods of a host without an external interface, and then the interface
// appears. The backend must start if the interface has the addresses of the last known state. Otherwise
// the state may be that of another host, whose disk was cloned.
func TestUplinkOfAnotherHost(t *testing.T) {
	for addr, want := range map[string]bool{"192.0.2.1": true, "192.0.2.9": false} {
		t.Run(addr, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				started := false
				be := starter{close: func() {}, start: func(backend.Env) error {
					started = true
					cancel() // so that the session ends before it changes this host
					return nil
				}}
				absent := link(1500, "192.0.2.1")
				absent.Index = 0
				n, s := networkOn(t, be, absent)
				n.state.Update(func(now *lastknown.State) { now.Recalled = true })
				changed := make(chan underlay.Interface, 1)
				changed <- link(1500, addr)
				done := make(chan struct{})
				go func() {
					defer close(done)
					_, _ = followUplink(ctx, n, s, changed)
					n.stopServing()
				}()
				synctest.Wait()
				if started != want {
					t.Errorf("the backend has started: %v, want %v", started, want)
				}
				cancel()
				<-done
			})
		})
	}
}

// TestRenewalWhileMoving renews this host's lease, and records an observation of the configuration, while a
// session on another interface begins. The state must have both.
func TestRenewalWhileMoving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end, seen := time.Now().Add(time.Hour), subnet.Observation{Revision: 7}
		var n *Network
		be := starter{start: func(backend.Env) error { return nil }, close: func() {}, claim: func() {
			n.state.Update(func(now *lastknown.State) {
				now.Renewed(subnet.Lease{Expires: end})
				now.Seen = seen
			})
		}}
		n, s := networkOn(t, be, link(1500, "192.0.2.1"))
		s.stop()
		if _, err := n.serveOn(t.Context(), link(1400, "192.0.2.9")); err != nil {
			t.Fatal(err)
		}
		n.stopServing()
		now, _ := n.state.Get()
		if !now.Own.Expires.Equal(end) || now.Stored == nil || !now.Stored.Expires.Equal(end) || now.Seen != seen || now.Interface.MTU != 1400 {
			t.Errorf("the state is %+v, want the new end of the lease, the observation and the new interface", now)
		}
	})
}

// late is a store whose first Acquire returns another lease, but not before the request was cancelled.
type late struct {
	silent
	asked  func()
	leases []subnet.Lease
}

func (l *late) Acquire(ctx context.Context, _ subnet.Config, _ subnet.Claim) (subnet.Lease, error) {
	if len(l.leases) == 0 {
		<-ctx.Done()
		return subnet.Lease{}, ctx.Err()
	}
	l.asked()
	<-ctx.Done()
	own := l.leases[0]
	l.leases = nil
	return own, nil
}

// TestMoveWhileAChangeIsPrepared changes the external interface while the network gets a lease for
// another configuration. The network must move with the former configuration, record the lease that the
// store has, and release the device of the other configuration.
func TestMoveWhileAChangeIsPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		const device = "flannel.2"
		be := starter{close: func() {},
			scope: func(env backend.Env) (s dataplane.Scope) {
				if len(env.Config.Networks) > 0 {
					s.Devices = []string{device}
				}
				return s
			},
			start: func(backend.Env) error { cancel(); return nil },
		}
		n, s := networkOn(t, be, link(1500, "192.0.2.1"))
		dir := t.TempDir()
		n.devices = ownership.NewLocks(dir)
		former := n.last().Config
		other := former
		other.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix("10.6.0.0/16")}}
		n.opts.Iface = []string{"127.0.0.1"}
		n.config.use(former)
		n.config.validate = func([]byte) (subnet.Config, error) { return other, nil }
		n.config.apply(ctx, []byte("other"))
		changed := make(chan underlay.Interface, 1)
		n.store = &late{asked: func() { changed <- link(1400, "192.0.2.1") }, leases: []subnet.Lease{{Key: "10.6.1.0-24"}}}
		if next, err := followUplink(ctx, n, s, changed); next != nil || err != nil {
			t.Errorf("the network returns %v, %v", next, err)
		}
		n.stopServing()
		now, _ := n.state.Get()
		if now.Stored == nil || now.Stored.Key != "10.6.1.0-24" || now.Interface.MTU != 1400 || len(subnet.Changes(now.Config, former)) > 0 {
			t.Errorf("the state is %+v, want the former configuration on the new interface, and the lease that the store has", now)
		}
		if err := ownership.NewLocks(dir).Take(device); err != nil {
			t.Errorf("another daemon cannot have %s: %v", device, err)
		}
	})
}

// TestValuesOfABusySession reads the metrics of a session that does not answer. They must not say that
// there are no peers.
func TestValuesOfABusySession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, s := networkOn(t, starter{close: func() {}}, link(1500, "192.0.2.1"))
		synctest.Wait()
		if v := n.values(t.Context()); v.Peers == nil {
			t.Errorf("got %+v, want a number of peers", v)
		}
		s.stop() // from now on no pass ends
		if v := n.values(t.Context()); v.Peers != nil || v.Network.Pool != nil || v.Network.BackendType != "scripted" {
			t.Errorf("got %+v, want the backend, and no number of peers or subnets", v)
		}
	})
}

// TestStatusWhileMoving reads the status of a network whose interface has changed to an
// unusable one. The status must have the peers of the last session, whose objects are still
// in the kernel, and the reason why no session starts.
func TestStatusWhileMoving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		be := starter{start: func(backend.Env) error { return errors.New("MTU 1300 is too small") }, close: func() {}}
		n, s := networkOn(t, be, link(1500, "192.0.2.1"))
		s.syncer.Publish(subnet.Update{Snapshot: func() subnet.Snapshot {
			return subnet.Snapshot{Leases: []*subnet.Lease{{Key: "10.5.2.0-24"}}}
		}})
		synctest.Wait()

		changed := make(chan underlay.Interface, 1)
		changed <- link(1300, "192.0.2.1")
		ended := make(chan error, 1)
		go func() {
			_, err := followUplink(ctx, n, s, changed)
			n.stopServing()
			ended <- err
		}()
		synctest.Wait()
		begin := time.Now()
		_, in, _ := n.inspect(ctx, true)
		if took := time.Since(begin); took != 0 || len(in.Peers) != 1 || in.LastSync.IsZero() || in.Err == nil || !strings.Contains(in.Err.Error(), "MTU 1300") {
			t.Errorf("after %v: %+v, want the peer, and the reason why there is no session", took, in)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestEndTries calls endTries while a session on the last known state is starting, as the regular
// start does when it continues. endTries must return only after that session has started. After that no
// other session may start on the last known state.
func TestEndTries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		begun, proceed, tries := make(chan struct{}), make(chan struct{}), 0
		n, s := networkOn(t, starter{close: func() {}, start: func(backend.Env) error {
			if tries++; tries == 1 {
				return errors.New("not yet")
			}
			close(begun)
			<-proceed
			cancel() // so that the session ends before it changes this host
			return nil
		}}, link(1500, "192.0.2.1"))
		s.stop()
		n.opts.Iface = []string{"127.0.0.1"}
		last := lastknown.State{
			Config: subnet.Config{BackendType: "scripted", Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}},
			Own:    subnet.Lease{Endpoints: make([]subnet.Endpoint, 1), Permanent: true},
		}
		var err error
		if last.Interface, err = underlay.Wait(ctx, n.underlayOptions(last.Config, nil), 0); err != nil {
			t.Fatal(err)
		}
		n.progress = &Progress{entered: drawn(t, "")}
		n.progress.waitFor(PhaseNoConfiguration)
		n.past = last
		endTries, stop := n.resume(ctx, last)
		<-begun
		moved := make(chan struct{})
		go func() {
			defer close(moved)
			endTries()
		}()
		synctest.Wait()
		select {
		case <-moved:
			t.Error("endTries does not wait until the session has begun")
		default:
		}
		close(proceed)
		<-moved
		stop()
		if tries != 2 {
			t.Errorf("%d tries, want 2", tries)
		}
	})
}

// otherSubnet is a store that returns another subnet for this host under the same key.
type otherSubnet struct{ Store }

func (otherSubnet) Acquire(_ context.Context, _ subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	return subnet.Lease{Key: "node1", Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix("10.5.2.0/24"), PublicIP: c.Endpoints[0].PublicIP}}}, nil
}

// TestPublishOnAnotherSubnet checks that publish notices another subnet under the same key.
// In Kubernetes a lease always has the key of its node.
func TestPublishOnAnotherSubnet(t *testing.T) {
	own := subnet.Lease{Key: "node1", Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1")}}}
	var s session
	n := &Network{store: otherSubnet{}, state: lastknown.NewStore(nil)}
	n.state.Change(func(now *lastknown.State) { now.Own = own })
	err := n.publish(t.Context(), &s)
	if !errors.Is(err, subnet.ErrLeaseLost) || !strings.Contains(err.Error(), "10.5.1.0/24") || !strings.Contains(err.Error(), "10.5.2.0/24") {
		t.Errorf("got %v, want ErrLeaseLost with both subnets", err)
	}
}

// TestPublishAfterTheFirstPass checks that a lease with a next backend is published only after the first
// pass with the leases of the store, which removes what an earlier use of that backend has left. A lease
// without a next backend is published at once.
func TestPublishAfterTheFirstPass(t *testing.T) {
	for _, next := range []string{"", "scripted"} {
		t.Run(fmt.Sprintf("next backend %q", next), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, former := networkOn(t, starter{}, link(1500, "192.0.2.1"))
				former.stop()
				be := starter{start: func(backend.Env) error { return nil }, close: func() {}}
				s, err := n.serve(t.Context(), be, func(now *lastknown.State) {
					now.Own = subnet.Lease{Key: "own", NextType: next, Endpoints: []subnet.Endpoint{{Data: json.RawMessage(`1`)}}}
				})
				if err != nil {
					t.Fatal(err)
				}
				defer s.stop()
				store := recorder{key: "own"}
				n.store = &store
				published := make(chan error, 1)
				go func() { published <- n.publish(t.Context(), s) }()
				synctest.Wait()
				if waits := len(store.written) == 0; waits != (next != "") {
					t.Errorf("before the first pass the store has %q", store.written)
				}
				s.syncer.Publish(subnet.Update{Snapshot: func() subnet.Snapshot { return subnet.Snapshot{} }})
				if err := <-published; err != nil || len(store.written) != 1 {
					t.Errorf("publish returns %v, and the store has %q, want this host's lease once", err, store.written)
				}
			})
		})
	}
}

// TestStartBackendWaitsForPort checks that startBackend waits only for a port in use, and how long.
func TestStartBackendWaitsForPort(t *testing.T) {
	inUse := fmt.Errorf("listen on UDP: %w", os.NewSyscallError("bind", unix.EADDRINUSE))
	for name, test := range map[string]struct {
		errs  []error // results of the first calls of Start; the last one is also that of all later calls
		want  error
		waits bool
	}{
		"free":          {errs: []error{nil}},
		"soon free":     {errs: []error{inUse, inUse, nil}, waits: true},
		"never free":    {errs: []error{inUse}, want: unix.EADDRINUSE, waits: true},
		"another error": {errs: []error{unix.EPERM}, want: unix.EPERM},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				errs, began := test.errs, time.Now()
				be := starter{start: func(backend.Env) error {
					err := errs[0]
					errs = errs[min(1, len(errs)-1):]
					return err
				}}
				freed := 0
				_, err := startBackend(t.Context(), be, subnet.Lease{}, func([]int) error { freed++; return nil })
				if (freed > 0) != test.waits {
					t.Errorf("ports were freed %d times", freed)
				}
				if !errors.Is(err, test.want) {
					t.Errorf("error %v, want %v", err, test.want)
				}
				if waited := time.Since(began); waited > 2*wait.InUseLimit || (waited > 0) != test.waits {
					t.Errorf("it waited %s", waited)
				}
			})
		})
	}
}
