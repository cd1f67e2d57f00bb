// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// entry is one key below subnets/.
type entry struct {
	key                         string         // last component
	subnets                     []netip.Prefix // from the key; nil if the key cannot be read
	lease                       subnet.Lease   // without endpoints if it cannot be read
	err                         error          // why the lease cannot be read
	sum                         uint64         // hash of the value; zero: the entry comes from the last known state
	createRevision, modRevision int64
	leaseID                     clientv3.LeaseID // zero: a reservation
}

// leased reports whether e is a lease that expires, not a reservation.
func (e *entry) leased() bool { return e.leaseID != 0 }

// is reports whether e was written at that revision and with that etcd lease. Unlike a revision,
// the id of an etcd lease does not come again in a store that was emptied.
func (e *entry) is(modRevision int64, lease clientv3.LeaseID) bool {
	return e.modRevision == modRevision && e.leaseID == lease
}

// listing contains all leases at one revision, sorted by key.
type listing struct {
	entries []*entry
	store   subnet.StoreID
}

// identity returns the address by which a node recognizes its own leases: its public IPv4 address
// if it has one, otherwise its public IPv6 address. It is invalid if c has neither.
func identity(c subnet.Claim) netip.Addr {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if e, ok := c.Endpoint(f); ok && isAddress(e.PublicIP) {
			return e.PublicIP
		}
	}
	return netip.Addr{}
}

func isAddress(a netip.Addr) bool { return a.IsValid() && !a.IsUnspecified() }

// hasPublicIP reports whether l has the public address who, and so belongs to the node with that
// identity.
func hasPublicIP(l subnet.Lease, who netip.Addr) bool {
	return slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool { return e.PublicIP == who })
}

func overlap(a, b []netip.Prefix) bool {
	return slices.ContainsFunc(a, func(s netip.Prefix) bool { return slices.ContainsFunc(b, s.Overlaps) })
}
