// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// memoryStore is a store in memory, with managers that behave like the real ones. It is safe for concurrent use.
type memoryStore struct {
	guard    sync.Mutex
	id       int
	revision int64
	config   string
	leases   map[string]memoryLease
	changed  wait.Broadcast // sent at every change
}

type memoryLease struct {
	lease  subnet.Lease
	broken bool
}

// newMemoryStore returns an empty store without a configuration.
func newMemoryStore() *memoryStore {
	return &memoryStore{id: 1, leases: map[string]memoryLease{}}
}

// change runs f with the store locked, at a new revision.
func (s *memoryStore) change(f func()) {
	s.guard.Lock()
	defer s.guard.Unlock()
	s.revision++
	f()
	s.changed.Send()
}

// SetConfig replaces the configuration. An empty string means no configuration.
func (s *memoryStore) SetConfig(raw string) { s.change(func() { s.config = raw }) }

// Put writes a lease, as another node or an operator would. If a lease with the same key exists, the
// store keeps its Order. Otherwise it sets an Order of zero to the current revision.
func (s *memoryStore) Put(l subnet.Lease) { s.change(func() { s.put(l) }) }

func (s *memoryStore) put(l subnet.Lease) {
	l.Claimed = uint64(s.revision)
	if old, exists := s.leases[l.Key]; exists {
		l.Order = old.lease.Order
	} else if l.Order == 0 {
		l.Order = uint64(s.revision)
	}
	s.leases[l.Key] = memoryLease{lease: l}
}

// Break makes the lease with that key undecodable.
func (s *memoryStore) Break(key string) {
	s.change(func() { s.leases[key] = memoryLease{s.leases[key].lease, true} })
}

// Delete removes a lease.
func (s *memoryStore) Delete(key string) { s.change(func() { delete(s.leases, key) }) }

// Wipe replaces the store by another one, with a new identity, the same configuration and
// no leases.
func (s *memoryStore) Wipe() {
	s.change(func() {
		s.id++
		s.revision = 1
		clear(s.leases)
	})
}

// Leases returns all decodable leases, sorted by key.
func (s *memoryStore) Leases() []*subnet.Lease { return s.snapshot("").Leases }

func (s *memoryStore) snapshot(own string) subnet.Snapshot {
	s.guard.Lock()
	defer s.guard.Unlock()
	snap := subnet.Snapshot{Store: subnet.StoreID{ID: fmt.Sprint(s.id), Revision: s.revision}}
	for key, r := range s.leases {
		switch {
		case key == own:
		case r.broken:
			snap.Undecodable = append(snap.Undecodable, key)
		default:
			snap.Leases = append(snap.Leases, &r.lease)
		}
	}

	slices.Sort(snap.Undecodable)
	slices.SortFunc(snap.Leases, func(a, b *subnet.Lease) int { return strings.Compare(a.Key, b.Key) })
	return snap
}

// Manager returns a manager for one node. previous are the subnets that the node had
// before.
func (s *memoryStore) Manager(previous ...netip.Prefix) *memoryManager {
	return &memoryManager{in: s, previous: previous}
}

// plainStore has the methods of a subnet.Manager whose store knows hosts only by their leases.
type plainStore struct{}

func (plainStore) Warn(string, string)                             {}
func (plainStore) PublicIPs(context.Context) ([]netip.Addr, error) { return nil, nil }
func (plainStore) NodeIPs() []netip.Addr                           { return nil }
func (plainStore) Location(context.Context) (string, error)        { return "", nil }
func (plainStore) Release(context.Context, subnet.Lease) error     { return nil }

func (plainStore) Observe(context.Context, subnet.Lease) (subnet.Observation, error) {
	return subnet.Observation{}, nil
}

// memoryManager is a subnet.Manager that uses a memoryStore.
type memoryManager struct {
	plainStore
	in       *memoryStore
	previous []netip.Prefix

	guard sync.Mutex
	own   string
}

var _ subnet.Manager = (*memoryManager)(nil)

// Config returns the store's configuration. See subnet.Manager.
func (m *memoryManager) Config(ctx context.Context) (subnet.Config, error) {
	if ctx.Err() != nil {
		return subnet.Config{}, ctx.Err()
	}
	m.in.guard.Lock()
	defer m.in.guard.Unlock()
	if m.in.config == "" {
		return subnet.Config{}, fmt.Errorf("%w: the store is empty", subnet.ErrNoConfig)
	}
	cfg, err := subnet.ParseConfig([]byte(m.in.config))
	return cfg, err
}

// Recall finds the node's own lease by its public address. See subnet.Manager.
func (m *memoryManager) Recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	for _, l := range m.in.Leases() {
		if hasPublicIP(*l, own) {
			return l.Claim(), ctx.Err()
		}
	}
	return subnet.Claim{}, ctx.Err()
}

// hasPublicIP reports whether l contains the first public address of c.
func hasPublicIP(l subnet.Lease, c subnet.Claim) bool {
	return len(c.Endpoints) > 0 && slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool {
		return e.PublicIP == c.Endpoints[0].PublicIP
	})
}

// Acquire takes or renews the node's own lease. See subnet.Manager.
func (m *memoryManager) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	if ctx.Err() != nil {
		return subnet.Lease{}, ctx.Err()
	}
	pools, err := cfg.Pools()
	if err != nil {
		return subnet.Lease{}, err
	}
	var own subnet.Lease
	m.guard.Lock()
	defer m.guard.Unlock()
	m.in.change(func() { own, err = m.acquire(pools, c) })
	if err != nil {
		return subnet.Lease{}, err
	}
	m.own = own.Key
	return own, nil
}

func (m *memoryManager) acquire(pools []subnet.Pool, c subnet.Claim) (subnet.Lease, error) {
	var taken []netip.Prefix
	var stale []string
	for key, r := range m.in.leases {
		subnets := r.lease.Subnets()
		if r.broken || !hasPublicIP(r.lease, c) && key != m.own {
			taken = append(taken, subnets...)
			continue
		}
		if slices.EqualFunc(pools, subnets, subnet.Pool.Contains) {
			l := leaseOn(subnets, c)
			if l.Permanent = r.lease.Permanent; !l.Permanent {
				l.Expires = time.Now().Add(subnet.TTL)
			}
			m.in.put(l)
			return m.in.leases[key].lease, nil
		}
		stale = append(stale, key)
	}

	subnets, err := subnet.Allocate(pools, append(c.Subnets(), m.previous...), taken)
	if err != nil {
		return subnet.Lease{}, err
	}

	for _, key := range stale {
		delete(m.in.leases, key)
	}
	l := leaseOn(subnets, c)
	l.Expires = time.Now().Add(subnet.TTL)
	m.in.put(l)
	return m.in.leases[l.Key].lease, nil
}

func leaseOn(subnets []netip.Prefix, c subnet.Claim) subnet.Lease {
	l := subnet.Lease{BackendType: c.BackendType, NextType: c.NextType}
	var key []string
	for _, s := range subnets {
		e, _ := c.Endpoint(prefix.FamilyOf(s.Addr()))
		e.Subnet = s
		l.Endpoints = append(l.Endpoints, e)
		key = append(key, s.String())
	}
	l.Key = strings.Join(key, " ")
	return l
}

// Watch publishes the leases of other nodes at once, and after every change of the store.
// Its updates do not say which leases have changed. See subnet.Manager.
func (m *memoryManager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	for {
		changed := m.in.changed.Changed()
		m.guard.Lock()
		own := m.own
		m.guard.Unlock()
		s := m.in.snapshot(own)
		sink(subnet.Update{Store: s.Store, Snapshot: func() subnet.Snapshot { return s }})
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// WatchConfig implements subnet.ConfigWatcher. It calls sink after every change of the store, even if the
// configuration is the same.
func (m *memoryManager) WatchConfig(ctx context.Context, sink func(text []byte)) error {
	for {
		changed := m.in.changed.Changed()
		m.in.guard.Lock()
		text := m.in.config
		m.in.guard.Unlock()
		if text == "" {
			sink(nil)
		} else {
			sink([]byte(text))
		}

		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Keep writes the node's own lease again if it is gone or undecodable. See subnet.Manager.
func (m *memoryManager) Keep(ctx context.Context, own subnet.Lease) error {
	for {
		changed := m.in.changed.Changed()
		m.guard.Lock()
		replaced := m.own != "" && m.own != own.Key // Acquire has taken another lease
		m.guard.Unlock()
		if !replaced {
			if err := m.ensure(own); err != nil {
				return err
			}
		}

		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (m *memoryManager) ensure(own subnet.Lease) error {
	m.in.guard.Lock()
	found, exists := m.in.leases[own.Key]
	m.in.guard.Unlock()
	switch c := (subnet.Claim{Endpoints: own.Endpoints}); {
	case !exists || found.broken:
		m.in.Put(own)
	case !hasPublicIP(found.lease, c):
		return fmt.Errorf("%w: %s now belongs to %s", subnet.ErrLeaseLost, own.Key, found.lease.Endpoints[0].PublicIP)
	}
	return nil
}

// backing adapts a memoryStore to the suite.
type backing struct{ *memoryStore }

func (b backing) SetConfig(_ *testing.T, raw string) { b.memoryStore.SetConfig(raw) }
func (b backing) Break(_ *testing.T, key string)     { b.memoryStore.Break(key) }
func (b backing) Delete(_ *testing.T, key string)    { b.memoryStore.Delete(key) }

func (b backing) Withdraw(_ *testing.T, key string) { b.memoryStore.Delete(key) }
func (b backing) Allocates() bool                   { return true }

func (b backing) Manager(_ *testing.T, _ int, previous ...netip.Prefix) subnet.Manager {
	return b.memoryStore.Manager(previous...)
}

func (b backing) Take(_ *testing.T, own subnet.Lease, by netip.Addr) {
	b.Put(subnet.Lease{Key: own.Key, Endpoints: []subnet.Endpoint{{Subnet: own.Endpoints[0].Subnet, PublicIP: by}}})
}

func TestMemoryStore(t *testing.T) {
	subnettest.Run(t, func(*testing.T) subnettest.Backing { return backing{newMemoryStore()} })
}
