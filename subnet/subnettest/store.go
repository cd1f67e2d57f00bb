// SPDX-License-Identifier: Apache-2.0

// Package subnettest contains a store in memory, with managers that behave like the real
// ones, and the conformance suite that every subnet.Manager must pass.
package subnettest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// Store is a store in memory. It is safe for concurrent use.
type Store struct {
	mu       sync.Mutex
	id       int
	revision int64
	config   string
	leases   map[string]storedLease
	changed  wait.Broadcast // sent at every change
}

type storedLease struct {
	lease  subnet.Lease
	broken bool
}

// NewStore returns an empty store without a configuration.
func NewStore() *Store {
	return &Store{id: 1, leases: map[string]storedLease{}}
}

// change runs f with the store locked, at a new revision.
func (s *Store) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	f()
	s.changed.Send()
}

// SetConfig replaces the configuration. An empty string means no configuration.
func (s *Store) SetConfig(raw string) { s.change(func() { s.config = raw }) }

// Put writes a lease, as another node or an operator would. If a lease with the same key exists, the
// store keeps its Order. Otherwise it sets an Order of zero to the current revision.
func (s *Store) Put(l subnet.Lease) { s.change(func() { s.put(l) }) }

func (s *Store) put(l subnet.Lease) {
	l.Claimed = uint64(s.revision)
	if old, exists := s.leases[l.Key]; exists {
		l.Order = old.lease.Order
	} else if l.Order == 0 {
		l.Order = uint64(s.revision)
	}
	s.leases[l.Key] = storedLease{lease: l}
}

// Break makes the lease with that key undecodable.
func (s *Store) Break(key string) {
	s.change(func() { s.leases[key] = storedLease{s.leases[key].lease, true} })
}

// Delete removes a lease.
func (s *Store) Delete(key string) { s.change(func() { delete(s.leases, key) }) }

// Wipe replaces the store by another one, with a new identity, the same configuration and
// no leases.
func (s *Store) Wipe() {
	s.change(func() {
		s.id++
		s.revision = 1
		clear(s.leases)
	})
}

// Leases returns all decodable leases, sorted by key.
func (s *Store) Leases() []*subnet.Lease { return s.snapshot("").Leases }

func (s *Store) snapshot(own string) subnet.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
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
func (s *Store) Manager(previous ...netip.Prefix) *Manager {
	return &Manager{store: s, previous: previous}
}

// Manager is a subnet.Manager that uses a Store.
type Manager struct {
	store    *Store
	previous []netip.Prefix

	mu  sync.Mutex
	own string
}

var _ subnet.Manager = (*Manager)(nil)

// Config returns the store's configuration. See subnet.Manager.
func (m *Manager) Config(ctx context.Context) (subnet.Config, error) {
	if ctx.Err() != nil {
		return subnet.Config{}, ctx.Err()
	}
	m.store.mu.Lock()
	defer m.store.mu.Unlock()
	if m.store.config == "" {
		return subnet.Config{}, fmt.Errorf("%w: the store is empty", subnet.ErrNoConfig)
	}
	cfg, err := subnet.ParseConfig([]byte(m.store.config))
	return cfg, err
}

// Recall finds the node's own lease by its public address. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	for _, l := range m.store.Leases() {
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
func (m *Manager) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	if ctx.Err() != nil {
		return subnet.Lease{}, ctx.Err()
	}
	pools, err := cfg.Pools()
	if err != nil {
		return subnet.Lease{}, err
	}
	var own subnet.Lease
	m.mu.Lock()
	defer m.mu.Unlock()
	m.store.change(func() { own, err = m.acquire(pools, c) })
	if err != nil {
		return subnet.Lease{}, err
	}
	m.own = own.Key
	return own, nil
}

func (m *Manager) acquire(pools []subnet.Pool, c subnet.Claim) (subnet.Lease, error) {
	var taken []netip.Prefix
	var stale []string
	for key, r := range m.store.leases {
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
			m.store.put(l)
			return m.store.leases[key].lease, nil
		}
		stale = append(stale, key)
	}

	subnets, err := subnet.Allocate(pools, append(c.Subnets(), m.previous...), taken)
	if err != nil {
		return subnet.Lease{}, err
	}

	for _, key := range stale {
		delete(m.store.leases, key)
	}
	l := leaseOn(subnets, c)
	l.Expires = time.Now().Add(subnet.TTL)
	m.store.put(l)
	return m.store.leases[l.Key].lease, nil
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
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	for {
		changed := m.store.changed.Changed()
		m.mu.Lock()
		own := m.own
		m.mu.Unlock()
		s := m.store.snapshot(own)
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
func (m *Manager) WatchConfig(ctx context.Context, sink func(text []byte)) error {
	for {
		changed := m.store.changed.Changed()
		m.store.mu.Lock()
		text := m.store.config
		m.store.mu.Unlock()
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
func (m *Manager) Keep(ctx context.Context, own subnet.Lease) error {
	for {
		changed := m.store.changed.Changed()
		m.mu.Lock()
		replaced := m.own != "" && m.own != own.Key // Acquire has taken another lease
		m.mu.Unlock()
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

func (m *Manager) ensure(own subnet.Lease) error {
	m.store.mu.Lock()
	found, exists := m.store.leases[own.Key]
	m.store.mu.Unlock()
	switch c := (subnet.Claim{Endpoints: own.Endpoints}); {
	case !exists || found.broken:
		m.store.Put(own)
	case !hasPublicIP(found.lease, c):
		return fmt.Errorf("%w: %s now belongs to %s", subnet.ErrLeaseLost, own.Key, found.lease.Endpoints[0].PublicIP)
	}
	return nil
}

// Pointers returns pointers to the given leases, without copying them, in the form that
// snapshots use.
func Pointers(leases ...subnet.Lease) []*subnet.Lease {
	all := make([]*subnet.Lease, len(leases))
	for i := range leases {
		all[i] = &leases[i]
	}
	return all
}
