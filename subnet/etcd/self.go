// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// self is the part of the store that may be this host's. All its keys use one etcd lease as long as that
// lives. The host chooses the random id of the etcd lease before it writes a key, and the id is in
// its last known state. So a key that it has written is recognized even if the answer was lost, the
// process was killed, or the key has no address in common with the present configuration. A self
// does not change.
type self struct {
	keys   []string // of this host's lease, and of a write that was not answered yet
	grants []clientv3.LeaseID
}

// has reports whether this host has written e, or has not noticed yet that e belongs to another one.
func (s *self) has(e *entry) bool { return s.granted(e) || slices.Contains(s.keys, e.key) }

// granted reports whether e uses an etcd lease of this host.
func (s *self) granted(e *entry) bool { return e.leased() && slices.Contains(s.grants, e.leaseID) }

// claimKeys sets the keys that may be this host's. Watch must know them before it sees them in the store. The
// caller holds the lock, because only Watch reads self without it.
func (m *Manager) claimKeys(keys ...string) { m.self.Store(&self{keys, m.self.Load().grants}) }

// claimGrant adds the id of an etcd lease of this host. The caller holds the lock.
func (m *Manager) claimGrant(id clientv3.LeaseID) {
	s := m.self.Load()
	m.self.Store(&self{s.keys, append(slices.Clip(s.grants), id)})
}

// Resumed implements subnet.Resumer.
func (m *Manager) Resumed(own subnet.Lease) {
	m.resumed.Store(&own)
	if own.LeaseID != 0 {
		_ = m.writing.Acquire(context.Background(), 1) // this context does not end
		m.claimGrant(clientv3.LeaseID(own.LeaseID))
		m.writing.Release(1)
	}
}

// isResumed reports whether e is the lease that was passed to Resumed: it has the same key,
// creation revision and public address. Its other data may have changed. If both have an etcd lease, that is compared
// instead: a new host that has got the address has taken the lease over with its own one.
func (m *Manager) isResumed(e *entry) bool {
	l := m.resumed.Load()
	return l != nil && e.err == nil && e.key == l.Key && uint64(e.createRevision) == l.Order && samePublicIP(e.lease.Endpoints, l.Endpoints) &&
		(l.LeaseID == 0 || !e.leased() || int64(e.leaseID) == l.LeaseID)
}

// lastGrant returns the id of the etcd lease that a new key of this host uses, if it still exists.
func (m *Manager) lastGrant() clientv3.LeaseID {
	if id := m.own.grant.id; id != 0 {
		return id
	}
	if l := m.resumed.Load(); l != nil {
		return clientv3.LeaseID(l.LeaseID)
	}
	return 0
}

// relation says how an entry belongs to this host.
type relation int

const (
	foreign relation = iota
	likely           // it has the address or an identity of this host, which may have written it before it lost its state
	proven           // this host has written it
)

// relationTo returns a function that returns the relation of an entry to this host, which wants to
// publish c. Another host can put the address of this one into its own lease. So an entry is foreign
// if may does not permit to write its key, or if its key is one of others: see the method others.
func (m *Manager) relationTo(c subnet.Claim, may *rights, others []string) func(*entry) relation {
	var identities []string
	if m.resumed.Load() != nil {
		identities = codec.Identities(c.Endpoints)
	}
	return func(e *entry) relation {
		switch {
		case !may.permits(e.key), slices.Contains(others, e.key):
			return foreign
		case m.self.Load().granted(e), m.isOwn(e), m.isResumed(e):
			return proven
		case e.err == nil && (samePublicIP(e.lease.Endpoints, c.Endpoints) || codec.HasIdentity(e.lease.Endpoints, identities)):
			return likely
		}
		return foreign
	}
}

// others returns the keys of those entries that have the public address of this host, which wants to
// publish c, and the data of another host. These are
//
//   - with a last known state, leases and reservations with an identity that is not in it;
//
//   - if the store has a lease that this host has written, other leases, because the hosts that have written them had
//     this address before;
//
//   - without a last known state, leases that were created for another address:
//
//     PUT 10.5.2.0-24 {"PublicIP":"192.0.2.2",…}   host 2 joins
//     PUT 10.5.2.0-24 {"PublicIP":"192.0.2.1",…}   host 2 names the address of host 1, which has not joined yet
//
// If this host was installed again, its lease was created for its address. That is how flannel finds it, so
// such a lease is not in the result. Neither is an entry without data, which the operator has written, a
// subnet that this host had, or a lease whose history was compacted. Every host can write leases with the
// address of this one, so others reads the first value only of the oldest ones, and counts the rest as those
// of other hosts.
func (m *Manager) others(ctx context.Context, c subnet.Claim, entries []*entry) (keys []string, err error) {
	relationOf := m.relationTo(c, nil, nil)
	written := slices.ContainsFunc(entries, func(e *entry) bool { return relationOf(e) == proven })
	var known []string
	if own := m.resumed.Load(); own != nil {
		known = codec.Identities(own.Endpoints)
	}

	ours := slices.Concat(known, codec.Identities(c.Endpoints))
	var doubtful []*entry

	for _, e := range entries {
		switch {
		case relationOf(e) != likely || codec.HasIdentity(e.lease.Endpoints, ours) || overlap(e.subnets, m.previous(c)):
		case written && e.leased():
			keys = append(keys, e.key)
		case e.lease.BackendType == "":
		case len(known) > 0 && len(codec.Identities(e.lease.Endpoints)) > 0:
			keys = append(keys, e.key)
		case e.leased() && e.createRevision != e.modRevision:
			doubtful = append(doubtful, e)
		}
	}

	slices.SortFunc(doubtful, func(x, y *entry) int { return cmp.Compare(x.createRevision, y.createRevision) })
	for i, e := range doubtful {
		if i >= mostFirstValues {
			keys = append(keys, e.key)
			continue
		}

		created, _, err := m.read(ctx, e.key, clientv3.WithRev(e.createRevision))
		switch {
		case errors.Is(err, rpctypes.ErrCompacted), errors.Is(err, rpctypes.ErrFutureRev): // the store does not know any more
		case err != nil:
			return nil, fmt.Errorf("read the first value of %s: %w", e.key, err)
		case created != nil && created.err == nil && !samePublicIP(created.lease.Endpoints, c.Endpoints):
			keys = append(keys, e.key)
		}
	}
	return keys, nil
}

// mostFirstValues is the largest number of leases of which others reads the first value.
const mostFirstValues = 8

// samePublicIP reports whether two lists of endpoints have the same public address in the first family in which both
// have one. Hosts behind one NAT may have the same address in the second family.
func samePublicIP(have, want []subnet.Endpoint) bool {
	for i := range have { // by index: a start compares thousands of leases
		a := have[i].PublicIP
		for j := range want {
			if b := want[j].PublicIP; a.Is4() == b.Is4() && isAddress(a) && isAddress(b) {
				return a == b
			}
		}
	}
	return false
}
