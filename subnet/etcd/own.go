// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"hash/maphash"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// ownLease is this host's lease, as this manager last wrote it or found it in the store. The zero
// ownLease means that there is none.
type ownLease struct {
	key      string
	claim    subnet.Claim // as published
	value    []byte
	create   int64 // revision at which the key was created
	revision int64 // revision of the last write of the key
	grant    grant // the etcd lease of the key; zero: the key is a reservation
}

// grant is an etcd lease. The zero grant means that there is none.
type grant struct {
	id      clientv3.LeaseID
	ttl     time.Duration // zero: the store has not answered the request for it
	expires time.Time
	early   float64 // the part, from 0 to 0.1, by which the time until the renewal is shortened
}

// newGrant returns a grant that the store has made or renewed, with the time at which the request
// began as start. The field early is random, so that hosts that got their grants at the same time
// renew them at different times.
func newGrant(id clientv3.LeaseID, start time.Time, ttl time.Duration) grant {
	return grant{id, ttl, start.Add(ttl), rand.Float64() / 10}
}

// claimOn returns an own lease that publishes c with these subnets. Its revisions and grant are zero.
func claimOn(key string, subnets []netip.Prefix, c subnet.Claim) (ownLease, error) {
	own := ownLease{key: key, claim: subnet.Claim{BackendType: c.BackendType, NextType: c.NextType}}
	for _, s := range subnets {
		e, _ := c.Endpoint(prefix.FamilyOf(s.Addr()))
		e.Subnet = s
		own.claim.Endpoints = append(own.claim.Endpoints, e)
	}
	var err error
	own.value, err = codec.Encode(own.claim)
	return own, err
}

// exists reports whether there is an own lease.
func (o ownLease) exists() bool { return o.key != "" }

// isNewerThan reports whether e was created before this host's lease. The result is also right for an
// entry of a restored backup, because it has a lower revision than an own lease that was created
// after the backup.
func (o ownLease) isNewerThan(e *entry) bool { return e.createRevision < o.create }

// leaves reports whether a write of o leaves the key, value and etcd lease of e.
func (o ownLease) leaves(e *entry) bool {
	return o.key == e.key && o.grant.id == e.leaseID && o.sum() == e.sum
}

// sum returns the entry.sum of the value.
func (o ownLease) sum() uint64 { return maphash.Bytes(seed, o.value) }

// reservedBy reports whether e is a reservation of the subnets of o. It ignores a family that only
// one of the two has, because IPv6 may have been enabled or disabled after the reservation.
func (o ownLease) reservedBy(e *entry) bool {
	same := 0
	for _, own := range o.claim.Endpoints {
		if slices.Contains(e.subnets, own.Subnet) {
			same++
		}
	}
	return e.leaseID == 0 && same > 0 && same == min(len(e.subnets), len(o.claim.Endpoints))
}

func (o ownLease) lease() subnet.Lease {
	l := subnet.Lease{
		Key: o.key, Order: uint64(o.create), BackendType: o.claim.BackendType, NextType: o.claim.NextType, Endpoints: o.claim.Endpoints,
		Permanent: o.grant.id == 0, LeaseID: int64(o.grant.id),
	}
	if !l.Permanent {
		l.Expires = o.grant.expires
	}
	return l
}
