// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// TestConflictWithRouteOfAllPeers checks SetUp and Sync if a device is directly connected to the
// network of all peers. They must return an error if another program owns the device, because the
// device receives the packets to all peers. They must return no error if the device is the
// backend's own, because it carries the packets.
func TestConflictWithRouteOfAllPeers(t *testing.T) {
	network := netip.MustParsePrefix("10.5.0.0/16")
	ours := dataplane.Link{Name: "flannel-wg", Kind: dataplane.KindWireGuard, MTU: 1440, Up: true}
	bridge := dataplane.Link{Name: "br0", Kind: "bridge", Up: true}
	for _, tt := range []struct {
		dev  string
		want string // expected error; empty for none
	}{
		{bridge.Name, "put route 10.5.0.0/16 dev flannel-wg: 10.5.0.0/16 is directly connected to br0"},
		{ours.Name, ""},
	} {
		t.Run(tt.dev, func(t *testing.T) {
			kernel := dataplanetest.New()
			if err := kernel.Append(ours, bridge); err != nil {
				t.Fatal(err)
			}
			scope := dataplane.Scope{Devices: []string{ours.Name}, Networks: []netip.Prefix{network}}
			p := newProgrammer(t, kernel, scope, time.Hour)
			p.Base.Add(ours, dataplane.NewRoute(network, netip.Addr{}, ours.Name, false))
			expect := func(what, want string, o backend.Outcome, err error) {
				t.Helper()
				if len(o.Refused) > 0 {
					t.Errorf("%s: refused %v, want none, because the route belongs to no peer", what, o.Refused)
				}
				if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%s: error %v, want %q", what, err, want)
				}
			}
			sync := func(what, want string, all bool) {
				t.Helper()
				o, err := p.Sync(t.Context(), backend.Set{All: all, Complete: true})
				expect(what, want, o, err)
			}

			sync("no conflict", "", true)
			at := dataplane.Addr{Dev: tt.dev, Prefix: netip.MustParsePrefix("10.5.255.254/16")}
			if err := kernel.Append(at); err != nil {
				t.Fatal(err)
			}
			expect("at the start", tt.want, backend.Outcome{}, p.SetUp(t.Context()))
			sync("a pass over all", tt.want, true)
			sync("a pass over changes", tt.want, false)
			if err := kernel.Remove(at); err != nil {
				t.Fatal(err)
			}
			sync("the conflict is over", "", false)
			if !p.Has(dataplane.NewRoute(network, netip.Addr{}, ours.Name, false)) {
				t.Error("the route is missing")
			}
		})
	}
}

// TestVolatileCallsDesiredAgain changes a route of the host, and the next passes are for a changed
// lease. Until volatilePause has passed, they must call Desired only for that lease, and ask
// for another pass. The first pass after that must call Desired once for each peer.
func TestVolatileCallsDesiredAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kernel := dataplanetest.New()
		p := programmer(t, kernel, time.Hour)
		calls, desired := 0, p.Desired
		p.Volatile = true
		p.Desired = func(ctx context.Context, l subnet.Lease) ([]dataplane.Object, error) {
			calls++
			return desired(ctx, l)
		}
		leases := map[string]*subnet.Lease{}
		for i := range 5 {
			l := lease(2+i, "")
			leases[l.Key] = &l
		}
		ways := 0
		reroute := func() {
			t.Helper()
			ways++
			way := dataplane.NewRoute(netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(ways), 0}), 24), netip.MustParseAddr("192.168.77.9"), "eth0", false)
			if err := kernel.Append(way); err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []struct {
			name  string
			do    func()
			set   backend.Set
			calls int
			again bool
		}{
			{"at first", func() {}, backend.Set{All: true}, 5, false},
			{"a lease", func() {}, backend.Set{Changed: []string{"host2"}}, 1, false},
			{"a lease and a route", reroute, backend.Set{Changed: []string{"host3"}}, 1, true},
			{"a lease", func() {}, backend.Set{Changed: []string{"host4"}}, 1, true},
			{"a lease, when it is time", func() { advance(time.Second) }, backend.Set{Changed: []string{"host4"}}, 5, false},
			{"a lease", func() { advance(time.Second) }, backend.Set{Changed: []string{"host4"}}, 1, false},
			{"no lease", func() {}, backend.Set{}, 5, false},
			{"no lease so soon again", func() {}, backend.Set{}, 0, true},
			{"all leases and a route", reroute, backend.Set{All: true}, 5, true},
			{"a lease, because of that route", func() { advance(time.Second) }, backend.Set{Changed: []string{"host4"}}, 5, false},
			{"no lease, and only leases matter", func() { p.Volatile = false; advance(time.Second) }, backend.Set{}, 0, false},
			{"a route, and only leases matter", reroute, backend.Set{Changed: []string{"host4"}}, 1, false},
			{"all leases and a route, and only leases matter", reroute, backend.Set{All: true}, 5, false},
		} {
			calls = 0
			step.do()
			step.set.Leases, step.set.Complete = leases, true
			o, err := p.Sync(t.Context(), step.set)
			if err != nil || calls != step.calls || o.Again > 0 != step.again || o.Again > time.Second {
				t.Errorf("%s: %d calls of Desired, again after %s (%v); want %d, again %t", step.name, calls, o.Again, err, step.calls, step.again)
			}
		}
	})
}

// TestDesiredFails checks that Sync writes nothing while it does not know what a peer needs, and everything
// afterwards.
func TestDesiredFails(t *testing.T) {
	p := programmer(t, dataplanetest.New(), time.Hour)
	desired := p.Desired
	var failing string
	p.Desired = func(ctx context.Context, l subnet.Lease) ([]dataplane.Object, error) {
		if l.Key == failing {
			return nil, errors.New("cannot look up its route")
		}
		return desired(ctx, l)
	}
	leases := map[string]*subnet.Lease{}
	for i := range 3 {
		l := lease(2+i, "")
		leases[l.Key] = &l
	}
	moved := lease(2, "")
	moved.Endpoints[0].Subnet = netip.MustParsePrefix("10.5.9.0/24")
	for i, step := range []struct {
		name, failing string
		set           backend.Set
		want          int // number of peers whose routes exist
	}{
		{"all leases", "host3", backend.Set{All: true}, 0},
		{"none, after an error", "", backend.Set{}, 3},
		{"two leases, one of which has another subnet", "host3", backend.Set{Changed: []string{"host2", "host3"}}, 2},
		{"none, after an error", "", backend.Set{}, 3},
	} {
		failing = step.failing
		step.set.Leases, step.set.Complete = leases, true
		_, err := p.Sync(t.Context(), step.set)
		if step.failing != "" && (err == nil || err.Error() != "lease host3: cannot look up its route") || step.failing == "" && err != nil {
			t.Errorf("%s: error %v", step.name, err)
		}
		have := 0
		for _, l := range leases {
			if p.Has(dataplane.NewRoute(l.Endpoints[0].Subnet, l.Endpoints[0].PublicIP, "eth0", false)) {
				have++
			}
		}
		if have != step.want {
			t.Errorf("%s: %d peers have a route, want %d", step.name, have, step.want)
		}
		if i == 1 {
			leases["host2"] = &moved
		}
	}
}

// TestRefusalNamesThePeer checks that a refused route is reported as one of the peer that needs it now.
func TestRefusalNamesThePeer(t *testing.T) {
	kernel := dataplanetest.New()
	for i := range 2 {
		bridge := dataplane.Link{Name: fmt.Sprintf("br%d", i), Kind: "bridge", Up: true}
		at := dataplane.Addr{Dev: bridge.Name, Prefix: netip.MustParsePrefix(fmt.Sprintf("10.5.%d.1/24", 2+2*i))}
		if err := kernel.Append(bridge, at); err != nil {
			t.Fatal(err)
		}
	}
	p := programmer(t, kernel, time.Hour)
	leases := map[string]*subnet.Lease{}
	put := func(key string, n int) {
		l := lease(n, "")
		l.Key = key
		leases[key] = &l
	}
	put("host2", 2)
	put("host3", 3)
	for _, step := range []struct {
		name    string
		do      func()
		changed []string // nil if any lease may differ
		want    []string
	}{
		{"at first", func() {}, nil, []string{"host2"}},
		{"another one comes", func() { put("host4", 4) }, []string{"host4"}, []string{"host2", "host4"}},
		{"another host has the subnet", func() { delete(leases, "host2"); put("host5", 2) }, []string{"host2", "host5"}, []string{"host4", "host5"}},
		{"in the other order", func() { delete(leases, "host5"); put("host6", 2) }, []string{"host6", "host5"}, []string{"host4", "host6"}},
		{"it is gone", func() { delete(leases, "host6") }, []string{"host6"}, []string{"host4"}},
	} {
		step.do()
		o, err := p.Sync(t.Context(), backend.Set{Leases: leases, Changed: step.changed, All: step.changed == nil, Complete: true})
		var got []string
		for _, r := range o.Refused {
			got = append(got, r.Key)
		}
		slices.Sort(got)
		if err != nil || !slices.Equal(got, step.want) {
			t.Errorf("%s: refused %v, %v, want %v", step.name, o.Refused, err, step.want)
		}
	}
}

// TestResyncReads checks that without announcements the kernel is read at the interval of
// --resync, with a deviation of at most a fifth.
func TestResyncReads(t *testing.T) {
	const resync = 5 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		var reads []time.Time
		spy := &dataplanetest.Spy{Kernel: dataplanetest.New(), ReadError: func() error {
			reads = append(reads, time.Now())
			return nil
		}}
		p := programmer(t, spy, resync)
		s := backend.NewSyncer(backend.SyncerConfig{
			Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}},
			Own:    lease(1, "one"), Network: p, Sides: testSides, Ledger: &subnet.Ledger{}, Resync: resync,
		})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		advance(200 * resync)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if n := len(reads); n < 160 || n > 255 {
			t.Errorf("%d reads in 200 periods", n)
		}
		for i, at := range reads[1:] {
			if gap := at.Sub(reads[i]); gap < resync*4/5 || gap > resync*6/5 {
				t.Fatalf("gap %d between reads is %s with a resync of %s", i, gap, resync)
			}
		}
	})
}

// programmer returns a Programmer with one plain route through eth0 for each peer. resync is the
// interval at which it reads the whole kernel.
func programmer(t *testing.T, k dataplane.Kernel, resync time.Duration) *backend.Programmer {
	t.Helper()
	scope := dataplane.Scope{Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}, Shared: []string{"eth0"}}
	p := newProgrammer(t, k, scope, resync)
	p.Desired = func(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
		e := l.Endpoints[0]
		return []dataplane.Object{dataplane.NewRoute(e.Subnet, e.PublicIP, "eth0", false)}, nil
	}
	return p
}

// newProgrammer returns a Programmer that wants nothing yet.
func newProgrammer(t *testing.T, k dataplane.Kernel, scope dataplane.Scope, resync time.Duration) *backend.Programmer {
	t.Helper()
	p, err := backend.Env{Kernel: k, Resync: resync}.Programmer(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}
