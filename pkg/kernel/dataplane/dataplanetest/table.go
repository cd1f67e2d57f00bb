// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"net/netip"
	"slices"
	"syscall"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

const protoKernel = 2

// table is a routing table. Routes to one destination are in the order in which the
// kernel visits them: by metric, then by age. Other than the kernel, the table tells IPv6
// routes with the same metric and different gateways apart, and its routes through nexthop
// objects are like any others.
type table []dataplane.Route

func (t *table) insert(r dataplane.Route) {
	i := slices.IndexFunc(*t, func(have dataplane.Route) bool { return have.Dst == r.Dst && have.Priority > r.Priority })
	if i < 0 {
		i = len(*t)
	}
	*t = slices.Insert(*t, i, r)
}

// append adds r after the routes with the same key. It returns EEXIST if an equal route exists.
func (t *table) append(r dataplane.Route) error {
	if slices.Contains(*t, r) {
		return syscall.EEXIST
	}
	t.insert(r)
	return nil
}

// sameKey reports whether a put of b can replace a. The kernel ignores the type.
func sameKey(a, b dataplane.Route) bool {
	return a.Dst == b.Dst && a.Priority == b.Priority && a.TOS == b.TOS
}

// replace replaces the first of the routes with r's key by r, or adds r if there is none.
// It does nothing if an equal route exists.
func (t *table) replace(r dataplane.Route) {
	i := slices.IndexFunc(*t, func(have dataplane.Route) bool { return sameKey(have, r) })
	switch {
	case slices.Contains(*t, r):
	case i < 0:
		t.insert(r)
	default:
		(*t)[i] = r
	}
}

func (t *table) remove(r dataplane.Route) {
	*t = slices.DeleteFunc(*t, func(have dataplane.Route) bool { return have == r })
}

func (t *table) removeDev(dev string) {
	*t = slices.DeleteFunc(*t, func(r dataplane.Route) bool { return r.Dev == dev })
}

// reaches reports whether the table has a route to ip through dev without a gateway.
func (t table) reaches(dev string, ip netip.Addr) bool {
	return slices.ContainsFunc(t, func(r dataplane.Route) bool {
		return r.Dev == dev && !r.Gateway.IsValid() && r.Type == dataplane.Unicast && r.Dst.Contains(ip)
	})
}
