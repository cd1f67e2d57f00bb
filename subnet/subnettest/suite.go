// SPDX-License-Identifier: Apache-2.0

package subnettest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
)

// Run checks that managers fulfil the contract of subnet.Manager. It calls newBacking for
// each test.
func Run(t *testing.T, newBacking func(t *testing.T) Backing) {
	t.Run("config", func(t *testing.T) { testConfig(t, newBacking(t)) })
	t.Run("acquire", func(t *testing.T) {
		for name, config := range map[string]string{"IPv4": configV4, "IPv6": configV6, "dual": configDual} {
			t.Run(name, func(t *testing.T) { testAcquire(t, newBacking(t), config) })
		}
	})

	t.Run("acquire by another configuration than the store's", func(t *testing.T) { testAcquireByOwnConfig(t, newBacking(t)) })
	t.Run("watch", func(t *testing.T) { testWatch(t, newBacking(t)) })
	t.Run("migration", func(t *testing.T) { testMigration(t, newBacking(t)) })
	t.Run("keep", func(t *testing.T) { testKeep(t, newBacking(t)) })
	t.Run("cancel", func(t *testing.T) { testCancel(t, newBacking(t)) })
	if !newBacking(t).Allocates() {
		return
	}
	t.Run("previous subnet", func(t *testing.T) { testPrevious(t, newBacking(t)) })
	t.Run("no subnets left", func(t *testing.T) { testNoSubnets(t, newBacking(t)) })
}

func testConfig(t *testing.T, b Backing) {
	m := b.Manager(t, 1)
	if _, err := m.Config(t.Context()); !errors.Is(err, subnet.ErrNoConfig) {
		t.Errorf("without a configuration the error is %v, want ErrNoConfig", err)
	}
	b.SetConfig(t, `{"Network":"nonsense"}`)
	if _, err := m.Config(t.Context()); !errors.Is(err, subnet.ErrInvalidConfig) {
		t.Errorf("with a bad configuration the error is %v, want ErrInvalidConfig", err)
	}
	b.SetConfig(t, configV4)
	cfg, err := m.Config(t.Context())
	if err != nil || len(cfg.Networks) != 1 || cfg.Networks[0].Prefix != netip.MustParsePrefix("10.5.0.0/16") || cfg.BackendType != "vxlan" {
		t.Errorf("got %+v, %v", cfg, err)
	}
}

func testAcquire(t *testing.T, b Backing, config string) {
	b.SetConfig(t, config)
	const nodes = 8
	leases := make([]subnet.Lease, nodes+1)
	var wg sync.WaitGroup
	for n := 1; n <= nodes; n++ {
		m := b.Manager(t, n)
		wg.Go(func() {
			var err error
			if leases[n], err = Acquire(t.Context(), m, claim(config, n)); err != nil {
				t.Errorf("node %d: %v", n, err)
			}
		})
	}

	wg.Wait()
	if t.Failed() {
		return
	}

	for n, l := range leases[1:] {
		checkLease(t, config, n+1, l)
		if b.Allocates() == l.Permanent || b.Allocates() && time.Until(l.Expires) < time.Second {
			t.Errorf("node %d has %+v, want one that expires: %v", n+1, l, b.Allocates())
		}
		for _, other := range leases[1 : n+1] {
			if slices.ContainsFunc(l.Subnets(), func(s netip.Prefix) bool { return slices.ContainsFunc(other.Subnets(), s.Overlaps) }) {
				t.Errorf("%v and %v overlap", l, other)
			}
		}
	}

	again := b.Manager(t, 3)
	recalled, err := again.Recall(t.Context(), claim(config, 3))
	if err != nil || recalled.BackendType != "vxlan" || !sameEndpoints(recalled.Endpoints, leases[3].Endpoints) {
		t.Errorf("recalled %v, %v, want %v", recalled, err, leases[3].Endpoints)
	}
	if none, err := b.Manager(t, 99).Recall(t.Context(), claim(config, 99)); err != nil || len(none.Endpoints) > 0 {
		t.Errorf("a node that was never there recalls %v, %v", none, err)
	}
	l, err := Acquire(t.Context(), again, claim(config, 3))
	if err != nil || l.Key != leases[3].Key || l.Order != leases[3].Order {
		t.Errorf("after a restart the lease is %+v, %v, want %+v", l, err, leases[3])
	}
}

// testAcquireByOwnConfig checks that a running node keeps its subnet if its address changes while
// the store contains another configuration, or none.
func testAcquireByOwnConfig(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	m := b.Manager(t, 1)
	cfg, err := m.Config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own, err := m.Acquire(t.Context(), cfg, claim(configV4, 1))
	if err != nil {
		t.Fatal(err)
	}

	for _, now := range []string{`{"Network":"10.6.0.0/16"}`, configDual, ""} {
		b.SetConfig(t, now)
		c := claim(configV4, 1)
		c.Endpoints[0].Subnet = own.Endpoints[0].Subnet
		c.Endpoints[0].PublicIP = own.Endpoints[0].PublicIP.Next()
		next, err := m.Acquire(t.Context(), cfg, c)
		if err != nil || next.Key != own.Key || next.Endpoints[0].PublicIP != c.Endpoints[0].PublicIP {
			t.Fatalf("with configuration %q in the store the lease is %+v, %v, want %s for %s", now, next, err, own.Key, c.Endpoints[0].PublicIP)
		}
		own = next
	}
}

// acquired returns the lease that a node acquires. The test ends if it gets none.
func acquired(t *testing.T, m subnet.Manager, c subnet.Claim) subnet.Lease {
	t.Helper()
	l, err := Acquire(t.Context(), m, c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// parsed returns a configuration, which must be valid.
func parsed(t *testing.T, config string) subnet.Config {
	t.Helper()
	cfg, err := subnet.ParseConfig([]byte(config))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func checkLease(t *testing.T, config string, n int, l subnet.Lease) {
	t.Helper()
	pools, err := parsed(t, config).Pools()
	if err != nil {
		t.Fatal(err)
	}
	want := claim(config, n)
	if !slices.EqualFunc(pools, l.Subnets(), subnet.Pool.Contains) || l.BackendType != want.BackendType || !sameData(l.Endpoints, want.Endpoints) {
		t.Errorf("node %d has %+v, want one for %+v in %v", n, l, want, pools)
	}
	if l.Key == "" || l.Order == 0 {
		t.Errorf("node %d has %+v, want a key and an order", n, l)
	}
}

func sameEndpoints(a, b []subnet.Endpoint) bool {
	return sameData(a, b) && slices.EqualFunc(a, b, func(a, b subnet.Endpoint) bool { return a.Subnet == b.Subnet })
}

func testPrevious(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	want := netip.MustParsePrefix("10.5.77.0/24")
	first, err := Acquire(t.Context(), b.Manager(t, 1, want), claim(configV4, 1))
	if err != nil || first.Endpoints[0].Subnet != want {
		t.Fatalf("got %v, %v, want the previous subnet", first, err)
	}
	second, err := Acquire(t.Context(), b.Manager(t, 2, want), claim(configV4, 2))
	if err != nil || second.Endpoints[0].Subnet == want {
		t.Errorf("got %v, %v, want another subnet than the one that is taken", second, err)
	}
	c := claim(configV4, 3)
	c.Endpoints[0].Subnet = netip.MustParsePrefix("10.5.78.0/24")
	if second.Endpoints[0].Subnet == c.Endpoints[0].Subnet {
		c.Endpoints[0].Subnet = netip.MustParsePrefix("10.5.79.0/24")
	}

	third, err := Acquire(t.Context(), b.Manager(t, 3), c)
	if err != nil || third.Endpoints[0].Subnet != c.Endpoints[0].Subnet {
		t.Errorf("got %v, %v, want the subnet that is claimed", third, err)
	}
}

// testNoSubnets expects that a node gets ErrNoSubnets while no subnet is free, and that it keeps its
// lease of an earlier configuration until a subnet is free.
func testNoSubnets(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	had := acquired(t, b.Manager(t, 4), claim(configV4, 4))
	b.SetConfig(t, `{"Network":"10.5.0.0/28"}`)
	var last subnet.Lease
	for n := 1; n <= 3; n++ {
		last = acquired(t, b.Manager(t, n), claim(configV4, n))
	}

	m := b.Manager(t, 4)
	if l, err := Acquire(t.Context(), m, claim(configV4, 4)); !errors.Is(err, subnet.ErrNoSubnets) {
		t.Fatalf("got %v, %v, want ErrNoSubnets", l, err)
	}
	if has, err := m.Recall(t.Context(), claim(configV4, 4)); err != nil || !sameEndpoints(has.Endpoints, had.Endpoints) {
		t.Errorf("the node has %v, %v, want %v, which it had", has, err, had)
	}
	b.Delete(t, last.Key)
	if l, err := Acquire(t.Context(), m, claim(configV4, 4)); err != nil || l.Key != last.Key {
		t.Errorf("got %v, %v, want the only subnet that is free: %v", l, err, last)
	}
}

func testWatch(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	m := b.Manager(t, 1)
	own := acquired(t, m, claim(configV4, 1))
	peer := acquired(t, b.Manager(t, 2), claim(configV4, 2))
	w := Watch(t, m)
	snap := w.Until(t, "the peer and not ourselves", Has(peer.Key))
	if len(snap.Leases) != 1 || !sameEndpoints(snap.Leases[0].Endpoints, peer.Endpoints) || snap.Leases[0].Order != peer.Order {
		t.Errorf("first snapshot has %+v, want %+v alone", snap.Leases, peer)
	}
	if snap.Store.ID == "" || snap.Store.Revision <= 0 {
		t.Errorf("snapshot comes from %+v", snap.Store)
	}

	other := acquired(t, b.Manager(t, 3), claim(configV4, 3))
	w.Until(t, "a new peer", Has(peer.Key, other.Key))

	moved := claim(configV4, 2)
	moved.Endpoints[0].Data = json.RawMessage(`{"VNI":1,"VtepMAC":"02:00:00:00:00:ff"}`)
	acquired(t, b.Manager(t, 2), moved)
	find := func(s subnet.Snapshot, key string) *subnet.Lease {
		i := slices.IndexFunc(s.Leases, func(l *subnet.Lease) bool { return l.Key == key })
		if i < 0 {
			return &subnet.Lease{}
		}
		return s.Leases[i]
	}

	snap = w.Until(t, "the peer's new data", func(s subnet.Snapshot) bool {
		l := find(s, peer.Key)
		return len(l.Endpoints) > 0 && string(l.Endpoints[0].Data) == string(moved.Endpoints[0].Data)
	})
	if now, before := find(snap, peer.Key).Claimed, find(snap, other.Key).Claimed; now <= before {
		t.Errorf("the lease that was written last has Claimed %d, the one before it %d", now, before)
	}

	b.Break(t, other.Key)
	snap = w.Until(t, "an unreadable peer", func(s subnet.Snapshot) bool { return slices.Equal(s.Undecodable, []string{other.Key}) })
	if !Has(peer.Key)(snap) {
		t.Errorf("with one lease unreadable the others are %v", snap.Leases)
	}

	b.Delete(t, other.Key)
	w.Until(t, "the unreadable peer gone", func(s subnet.Snapshot) bool { return len(s.Undecodable) == 0 && Has(peer.Key)(s) })
	b.Delete(t, peer.Key)
	last := w.Until(t, "nobody", Has())
	if last.Store.ID != snap.Store.ID || last.Store.Revision <= snap.Store.Revision {
		t.Errorf("store went from %+v to %+v", snap.Store, last.Store)
	}
	if own.Key == peer.Key {
		t.Errorf("both nodes have %s", own.Key)
	}
}

// testMigration checks that a node can publish the data of two backends, that peers and a
// later start see both, and that the data of the next backend disappears when the migration ends.
func testMigration(t *testing.T, b Backing) {
	b.SetConfig(t, configDual)
	onlooker := b.Manager(t, 9)
	acquired(t, onlooker, claim(configDual, 9))
	w := Watch(t, onlooker)
	migrating := claim(configDual, 1)
	migrating.NextType = "wireguard"
	for i := range migrating.Endpoints {
		migrating.Endpoints[i].NextData = json.RawMessage(fmt.Sprintf(`{"PublicKey":"key%d"}`, i))
	}

	finished := claim(configDual, 1)
	for _, step := range []struct {
		name  string
		claim subnet.Claim
	}{{"before", claim(configDual, 1)}, {"in the migration", migrating}, {"after it", finished}} {
		own, err := Acquire(t.Context(), b.Manager(t, 1), step.claim)
		if err != nil || own.NextType != step.claim.NextType || !sameData(own.Endpoints, step.claim.Endpoints) {
			t.Fatalf("%s: this host's lease is %+v, %v, want one for %+v", step.name, own, err, step.claim)
		}
		w.Until(t, "the lease "+step.name, func(s subnet.Snapshot) bool {
			return slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool {
				return l.Key == own.Key && l.BackendType == own.BackendType && l.NextType == own.NextType && sameEndpoints(l.Endpoints, own.Endpoints)
			})
		})

		recalled, err := b.Manager(t, 1).Recall(t.Context(), claim(configDual, 1))
		if err != nil || recalled.NextType != own.NextType || !sameEndpoints(recalled.Endpoints, own.Endpoints) {
			t.Errorf("%s: recalled %+v, %v, want %+v", step.name, recalled, err, own)
		}
	}
}

// sameData reports whether a and b have the same addresses and data. It ignores their subnets.
func sameData(a, b []subnet.Endpoint) bool {
	return slices.EqualFunc(a, b, func(a, b subnet.Endpoint) bool {
		return a.PublicIP == b.PublicIP && string(a.Data) == string(b.Data) && string(a.NextData) == string(b.NextData)
	})
}

func testKeep(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	m := b.Manager(t, 1)
	onlooker := b.Manager(t, 9)
	own := acquired(t, m, claim(configV4, 1))
	w := Watch(t, onlooker)
	before := w.Until(t, "our lease", Has(own.Key))
	done := make(chan error, 1)
	go func() { done <- m.Keep(t.Context(), own) }()

	// A snapshot may skip intermediate states, so the revision shows that the lease was
	// gone.
	restored := func(s subnet.Snapshot) bool {
		return s.Store.Revision >= before.Store.Revision+2 && len(s.Leases) == 1 && s.Leases[0].Key == own.Key &&
			sameEndpoints(s.Leases[0].Endpoints, own.Endpoints)
	}

	b.Withdraw(t, own.Key)
	before = w.Until(t, "our lease taken again", restored)
	b.Break(t, own.Key)
	w.Until(t, "our lease written again", restored)
	thief := netip.MustParseAddr("192.0.2.66")
	b.Take(t, own, thief)

	select {
	case err := <-done:
		if !errors.Is(err, subnet.ErrLeaseLost) {
			t.Errorf("Keep returned %v, want ErrLeaseLost", err)
		}
	case <-time.After(patience):
		t.Error("Keep did not notice that another node has our subnet")
	}

	w.Until(t, "the new owner's lease", func(s subnet.Snapshot) bool {
		return Has(own.Key)(s) && s.Leases[0].Endpoints[0].PublicIP == thief
	})
}

func testCancel(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	m := b.Manager(t, 1)
	own := acquired(t, m, claim(configV4, 1))
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan struct{}, 1)
	done := make(chan error, 2)
	go func() {
		done <- m.Watch(ctx, func(subnet.Update) {
			select {
			case first <- struct{}{}:
			default:
			}
		})
	}()

	go func() { done <- m.Keep(ctx, own) }()
	waittest.Receive(t, patience, "the first leases", first)
	cancel()
	for range 2 {
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error is %v, want that of the context", err)
			}
		case <-time.After(2 * time.Second):
			t.Error("a method goes on after its context has ended")
		}
	}

	for name, call := range map[string]func() error{
		"Config":  func() error { _, err := m.Config(ctx); return err },
		"Recall":  func() error { _, err := m.Recall(ctx, claim(configV4, 1)); return err },
		"Acquire": func() error { _, err := m.Acquire(ctx, parsed(t, configV4), claim(configV4, 1)); return err },
	} {
		if err := call(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: error is %v, want that of the context", name, err)
		}
	}
}
