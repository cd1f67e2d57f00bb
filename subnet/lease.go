// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TTL is the default time after which a lease expires in the store unless it is renewed. It is
// also the time for which a Ledger holds a peer.
const TTL = 24 * time.Hour

// Endpoint is one address family of a lease.
type Endpoint struct {
	Subnet   netip.Prefix
	PublicIP netip.Addr
	Data     json.RawMessage `json:",omitempty"` // of the backend, opaque here; nil if there is none
	// NextData is the data of the next backend, during a migration.
	NextData json.RawMessage `json:",omitempty"`
}

// Family returns the endpoint's address family.
func (e Endpoint) Family() prefix.Family { return prefix.FamilyOf(e.Subnet.Addr()) }

// Lease is one node's right to its subnets.
type Lease struct {
	Key   string // etcd key below subnets/, or name of the Node
	Order uint64 // time of its creation in the store: etcd's create revision, or the Node's creation time
	// Claimed is the revision of the store at which the lease was written last, or zero if no write is
	// known to be later than that of another lease. Order proves only when the subnet was taken: a host
	// may write another host's identity into an old lease.
	Claimed uint64 `json:",omitempty"`
	// Kept has the earlier revisions since which the lease has had an identity, by identity. Only the
	// host that saw them knows them. It is nil unless the lease was written again.
	Kept        map[string]uint64 `json:",omitempty"`
	BackendType string            // as stored; empty for backends that store none
	NextType    string            `json:",omitempty"` // type of the next backend in the configuration, during a migration; otherwise empty
	Endpoints   []Endpoint        // one for each family that the lease has, IPv4 first
	Permanent   bool              // it does not expire: a reservation, or this host's lease of a Kubernetes node
	Expires     time.Time         // known only of this host's lease; zero if Permanent
	LeaseID     int64             `json:",omitempty"` // of etcd's lease; zero if Permanent
}

// Endpoint returns the lease's endpoint of family f. ok is false if the lease has none.
func (l Lease) Endpoint(f prefix.Family) (e Endpoint, ok bool) {
	return find(l.Endpoints, func(e Endpoint) bool { return e.Family() == f })
}

// find returns the first of all for which is returns true.
func find[T any](all []T, is func(T) bool) (found T, ok bool) {
	if i := slices.IndexFunc(all, is); i >= 0 {
		return all[i], true
	}
	return found, false
}

// Reservation reports whether nothing in the lease tells that a host has taken it: it does not expire, and
// has neither a type nor data of a backend. The leases of hosts with udp or a cloud have neither, so one that
// does not expire looks the same.
func (l Lease) Reservation() bool {
	hasData := func(e Endpoint) bool { return e.Data != nil }
	return l.Permanent && l.BackendType == "" && !slices.ContainsFunc(l.Endpoints, hasData)
}

// Compare orders leases for people: by their subnets as numbers, and equal ones by key. A lease without
// subnets comes first.
func (l Lease) Compare(other Lease) int {
	return cmp.Or(slices.CompareFunc(l.Subnets(), other.Subnets(), netip.Prefix.Compare), cmp.Compare(l.Key, other.Key))
}

// Same reports whether l and other are equal, apart from the time at which they were written. One of them may come from
// the state file, which has JSON in another form.
func (l *Lease) Same(other *Lease) bool {
	return l.Key == other.Key && l.Order == other.Order &&
		l.BackendType == other.BackendType && l.NextType == other.NextType &&
		slices.EqualFunc(l.Endpoints, other.Endpoints, func(x, y Endpoint) bool {
			return x.Subnet == y.Subnet && x.PublicIP == y.PublicIP &&
				sameJSON(x.Data, y.Data) && sameJSON(x.NextData, y.NextData)
		})
}

func sameJSON(x, y json.RawMessage) bool {
	if bytes.Equal(x, y) {
		return true
	}
	var a, b any
	return json.Unmarshal(x, &a) == nil && json.Unmarshal(y, &b) == nil && reflect.DeepEqual(a, b)
}

// Claim returns the claim of a node that wants exactly the lease l: with its backend types and
// its endpoints.
func (l Lease) Claim() Claim {
	return Claim{BackendType: l.BackendType, NextType: l.NextType, Endpoints: l.Endpoints}
}

// For returns the lease that the node would have if it used only a backend with this type in leases, whose
// data in each endpoint is what data returns.
func (l Lease) For(backendType string, data func(Endpoint) json.RawMessage) Lease {
	l.BackendType = backendType
	l.NextType = ""
	l.Endpoints = slices.Clone(l.Endpoints)
	for i, e := range l.Endpoints {
		l.Endpoints[i].Data = data(e)
		l.Endpoints[i].NextData = nil
	}
	return l
}

// Subnets returns the subnets of all families.
func (l Lease) Subnets() []netip.Prefix { return l.Claim().Subnets() }

// Entry is a lease in the view of an operator.
type Entry struct {
	Lease Lease // its Key is always set
	// Err is why the rest of Lease cannot be read or, with Kubernetes, one family of it. It is nil if all
	// can be read.
	Err error
	TTL time.Duration // the time that is left; zero if it is over, not known, or was not requested, and for a reservation
}

// Claim contains the public addresses and backend data that a node wants to publish. A valid
// Subnet in an endpoint is the subnet that the node had before and wants again.
type Claim struct {
	BackendType string
	NextType    string     // see Lease.NextType
	Endpoints   []Endpoint // one for each enabled family, IPv4 first
}

// Endpoint returns the claim's endpoint whose public address is of family f, because a claim may have no
// subnet yet. ok is false if the claim has none.
func (c Claim) Endpoint(f prefix.Family) (e Endpoint, ok bool) {
	return find(c.Endpoints, func(e Endpoint) bool { return prefix.FamilyOf(e.PublicIP) == f })
}

// Subnets returns the subnets of all endpoints.
func (c Claim) Subnets() []netip.Prefix {
	var ps []netip.Prefix
	for _, e := range c.Endpoints {
		ps = append(ps, e.Subnet)
	}
	return ps
}

// Lease returns a lease whose Claim is c.
func (c Claim) Lease() Lease {
	return Lease{BackendType: c.BackendType, NextType: c.NextType, Endpoints: c.Endpoints}
}

// compareAge orders leases by the time at which they came into the store, and then by key.
func compareAge(x, y *Lease) int {
	return cmp.Or(cmp.Compare(x.Order, y.Order), cmp.Compare(x.Key, y.Key))
}

// claimed returns the revision at which the lease claimed an identity that it has.
func (l *Lease) claimed(identity string) uint64 {
	if kept, ok := l.Kept[identity]; ok {
		return kept
	}
	return l.Claimed
}

// compareClaims orders leases by the time at which they claimed an identity that both have.
func compareClaims(x, y *Lease, identity string) int {
	return cmp.Or(cmp.Compare(x.claimed(identity), y.claimed(identity)), compareAge(x, y))
}
