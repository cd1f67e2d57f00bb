// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"slices"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// lastKnown is the last known state: the leases at one revision of a store, and enough to recognize
// that store.
type lastKnown struct {
	store   subnet.StoreID
	own     string            // key of this host's lease; empty: none
	created int64             // revision at which this host's lease was created
	entries map[string]*entry // of other nodes, by key, without values
	count   int64             // number of all keys of leases in the store
}

// newLastKnown returns the last known state in cfg, or nil if it cannot be used because it has no
// valid mark or revision, a lease that does not match its key or lacks its revision or etcd lease, as in states of
// earlier versions, or this host's lease among the peers.
func newLastKnown(cfg Config) *lastKnown {
	k := &lastKnown{store: cfg.Known.Store, own: cfg.Own.Key, created: int64(cfg.Own.Order), entries: make(map[string]*entry, len(cfg.Known.Peers))}
	count, _, _ := strings.Cut(k.store.Mark, " ") // earlier versions have more in it
	var err error
	if k.count, err = strconv.ParseInt(count, 10, 64); err != nil || k.store.Revision < 1 {
		return nil
	}

	for i := range cfg.Known.Peers {
		p := &cfg.Known.Peers[i]
		if !p.HeldUntil.IsZero() { // the store did not have the held peer
			continue
		}

		e := &entry{
			key: p.Lease.Key, lease: p.Lease, subnets: p.Lease.Subnets(), leaseID: clientv3.LeaseID(p.Lease.LeaseID),
			createRevision: int64(p.Lease.Order), modRevision: int64(p.Lease.Claimed),
		}
		named, err := codec.ParseKey(e.key)
		if err != nil || !slices.Equal(named, e.subnets) || e.key == k.own || e.modRevision == 0 || e.leased() == p.Lease.Permanent {
			return nil
		}
		k.entries[e.key] = e
	}
	return k
}

// survivesIn reports whether l has one of the last known leases, or there were none. If it reports
// false, the store was replaced or emptied. The revision does not always show that: it may be later
// than the last known one, and the history of the store may not go back to the last known state.
func (k *lastKnown) survivesIn(l listing) bool {
	return k.own == "" && len(k.entries) == 0 || slices.ContainsFunc(l.entries, func(e entry) bool {
		known := k.entries[e.key]
		return known != nil && known.createRevision == e.createRevision || e.key == k.own && e.createRevision == k.created
	})
}
