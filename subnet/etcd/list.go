// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/parallel"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// entry is one key below subnets/.
type entry struct {
	key                         string         // last component
	subnets                     []netip.Prefix // from the key; nil if the key cannot be read
	lease                       subnet.Lease   // if err is nil
	err                         error          // why the lease cannot be read
	value                       []byte
	createRevision, modRevision int64
	leaseID                     clientv3.LeaseID // zero: a reservation
}

// keyOf returns the last component of the key of a lease.
func (m *Manager) keyOf(kv *mvccpb.KeyValue) string {
	return string(bytes.TrimPrefix(kv.Key, []byte(m.dir)))
}

func (m *Manager) entry(kv *mvccpb.KeyValue) entry {
	e := entry{
		key:            m.keyOf(kv),
		value:          kv.Value,
		createRevision: kv.CreateRevision,
		modRevision:    kv.ModRevision,
		leaseID:        clientv3.LeaseID(kv.Lease),
	}
	if e.subnets, e.err = codec.ParseKey(e.key); e.err != nil {
		return e
	}
	e.lease = subnet.Lease{Key: e.key, Order: uint64(kv.CreateRevision), Permanent: kv.Lease == 0}
	var c subnet.Claim
	c, e.err = codec.Decode(e.subnets, kv.Value)
	e.lease.BackendType, e.lease.NextType, e.lease.Endpoints = c.BackendType, c.NextType, c.Endpoints
	return e
}

// listing contains all leases at one revision, sorted by key, or the last known state brought up to
// date.
type listing struct {
	entries []entry
	store   subnet.StoreID
	read    time.Time
	// restored is not zero if the listing comes from the last known state: see leaseCache.restored.
	restored int64
}

// pageSize is the maximum number of leases in one answer, of some 350 bytes each. etcd keeps an
// answer in memory for each host that lists, and the answer has to arrive within the deadline.
const pageSize = 1000

// list reads all leases at one revision, in pages with a deadline each. On a slow link, or for many
// hosts on one link, a whole list of thousands of leases can take longer than any deadline that
// detects a hung server.
func (m *Manager) list(ctx context.Context) (listing, error) { return m.listAt(ctx, 0, 0) }

// listAt reads all leases as they were at a revision, or as they are now if it is zero, with pauses
// between the pages. Later pages are serializable reads, because the member that has answered the
// first page has their revision.
//
// When all hosts boot at the same moment, the store is overloaded, and even small requests take
// long. On a slow link small requests are fast. So a host whose last small request took long waits
// for its turn after the first page, which contains the number of hosts. Meanwhile the store has
// time for writes of leases and for its other users.
func (m *Manager) listAt(ctx context.Context, revision int64, pause time.Duration) (listing, error) {
	var l listing
	var decoding sync.WaitGroup
	defer decoding.Wait()
	options := []clientv3.OpOption{clientv3.WithRange(clientv3.GetPrefixRangeEnd(m.dir)), clientv3.WithLimit(pageSize), clientv3.WithRev(revision)}
	for from := m.dir; ; {
		var page *clientv3.GetResponse
		err := m.callWithin(ctx, m.timing.page, func(ctx context.Context, c *clientv3.Client) (err error) {
			page, err = c.Get(ctx, from, options...)
			return err
		})
		if err != nil {
			return listing{}, fmt.Errorf("list leases: %w", err)
		}
		if l.entries == nil {
			l = listing{entries: make([]entry, 0, page.Count), store: storeID(page.Header), read: time.Now()}
			if revision != 0 {
				l.store.Revision = revision
			}
			options = append(options, clientv3.WithRev(l.store.Revision), clientv3.WithSerializable())
			m.client.hosts.Store(page.Count)
		}
		first := len(l.entries)
		l.entries = append(l.entries, make([]entry, len(page.Kvs))...)
		entries := l.entries[first:]
		decoding.Go(func() {
			parallel.For(len(entries), func(i int) { entries[i] = m.entry(page.Kvs[i]) })
		})
		if !page.More || len(page.Kvs) == 0 {
			decoding.Wait()
			return l, nil
		}
		from = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
		if first == 0 && m.slow.Load() {
			if err := m.client.turn(ctx); err != nil {
				return listing{}, err
			}
		}
		if pause > 0 {
			if err := wait.For(ctx, wait.Vary(pause, 0.5)); err != nil {
				return listing{}, err
			}
		}
	}
}

// stash contains a listing that one method has just read, for the next method that needs one. A
// start needs three listings, and thousands of leases take time. If the leases have changed since
// the listing, a compare-and-swap fails or the watch brings the change.
type stash struct{ atomic.Pointer[listing] }

// stashTime is the maximum age of a listing that is used again. It is long because a start may be
// slow: on a slow host, or with a store that all hosts use at once, which a second list would make
// slower.
const stashTime = time.Minute

func (s *stash) put(l listing) { s.Store(&l) }

// listOr returns the first of these that is available: the listing in s if it is not too old, the
// last known state brought up to date, or a new list. s is empty afterwards. If a new list has none
// of the last known leases, listOr sets m.replaced.
func (m *Manager) listOr(ctx context.Context, s *stash) (listing, error) {
	if l := s.Swap(nil); l != nil && time.Since(l.read) < stashTime {
		return *l, nil
	}
	l, ok, err := m.restore(ctx)
	if ok || err != nil {
		return l, err
	}
	if l, err = m.list(ctx); err != nil {
		return l, err
	}
	if k := m.known.Swap(nil); k != nil && !k.survivesIn(l) {
		m.replaced.Store(true)
	}
	return l, nil
}

func storeID(h *pb.ResponseHeader) subnet.StoreID {
	return subnet.StoreID{ID: fmt.Sprintf("%x", h.ClusterId), Revision: h.Revision}
}

// identity returns the address by which a node recognizes its own leases: its public IPv4 address
// if it has one, otherwise its public IPv6 address. It is invalid if c has neither.
func identity(c subnet.Claim) netip.Addr {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if e, ok := c.Endpoint(f); ok && e.PublicIP.IsValid() && !e.PublicIP.IsUnspecified() {
			return e.PublicIP
		}
	}
	return netip.Addr{}
}

// hasPublicIP reports whether l has the public address who, and so belongs to the node with that
// identity.
func hasPublicIP(l subnet.Lease, who netip.Addr) bool {
	return slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool { return e.PublicIP == who })
}

// previous returns the subnets that the node had before, best first: those of c, then
// Config.Previous.
func (m *Manager) previous(c subnet.Claim) []netip.Prefix {
	var subnets []netip.Prefix
	for _, e := range c.Endpoints {
		if e.Subnet.IsValid() {
			subnets = append(subnets, e.Subnet.Masked())
		}
	}
	for _, s := range m.cfg.Previous {
		subnets = append(subnets, s.Masked())
	}
	return subnets
}

func overlap(a, b []netip.Prefix) bool {
	return slices.ContainsFunc(a, func(s netip.Prefix) bool { return slices.ContainsFunc(b, s.Overlaps) })
}

// recalled returns the first own entry that overlaps one of before, the subnets that the node had.
// If none does, it returns the first own entry, or nil if there is none. ours reports whether an
// entry is an own one.
func recalled(entries []entry, ours func(entry) bool, before []netip.Prefix) *entry {
	var found *entry
	for i, e := range entries {
		if ours(e) && (found == nil || !overlap(found.subnets, before) && overlap(e.subnets, before)) {
			found = &entries[i]
		}
	}
	return found
}

// Recall finds the own lease by the public address or Resumed. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	defer m.outage.Forget(sourceLease)
	var l listing
	err := m.retry(ctx, sourceLease, func() (err error) {
		l, err = m.listOr(ctx, &stash{})
		return err
	})
	if err != nil {
		return subnet.Claim{}, err
	}
	m.forAcquire.put(l)
	who := identity(own)
	ours := func(e entry) bool { return e.err == nil && hasPublicIP(e.lease, who) || m.isResumed(e) }
	found := recalled(l.entries, ours, m.previous(own))
	if found == nil {
		return subnet.Claim{}, nil
	}
	if _, pools, err := m.config(ctx); err == nil {
		unlock, err := m.lock(ctx)
		if err != nil {
			return subnet.Claim{}, err
		}
		defer unlock()
		// If another node with the same address may have made the lease, Acquire does not use it,
		// but takes the subnet that this node had. The data in that lease is not this node's.
		if p, err := choose(pools, m.previous(own), m.own, ours, l.entries); err == nil && p.other {
			return subnet.Claim{}, nil
		}
	}
	return found.lease.Claim(), nil
}
