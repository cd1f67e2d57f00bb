// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Scope defines the part of the kernel's state that flanneld may change.
type Scope struct {
	// Devices are the names of the devices that flanneld owns. The devices and their FDB
	// entries belong to the scope. Their addresses, neighbours and routes belong to it if
	// they lie in Networks, even if another program created them.
	Devices []string
	// Shared are the names of other devices that flanneld's routes use.
	Shared []string
	// Networks limits the scope: an address, a neighbour or a route outside of these
	// networks never belongs to the scope. The only exception is a detour.
	Networks []netip.Prefix
	// TxChecksum makes Read fill in Link.TxChecksum.
	TxChecksum bool
	// Connected makes Read skip the routing table, which may contain a million routes.
	// Instead Read returns one directly connected route for each address of the host, on
	// any device, whose network lies in Networks.
	Connected bool
}

func (s Scope) device(name string) bool { return slices.Contains(s.Devices, name) }

// InNetworks reports whether one of the networks of s contains p.
func (s Scope) InNetworks(p netip.Prefix) bool {
	return slices.ContainsFunc(s.Networks, func(n netip.Prefix) bool { return prefix.Contains(n, p) })
}

// Shows reports whether Read returns r for the scope s. It does if the destination lies in
// the networks of s. It also does if r is a detour on a device of s, with any destination.
func (s Scope) Shows(r Route) bool { return s.InNetworks(r.Dst) || s.isDetour(r) }

// isDetour reports whether r is a detour that was left behind. Only on the devices of s do all routes
// with flanneld's protocol number come from the reconciler of s.
func (s Scope) isDetour(r Route) bool { return r.IsDetour() && s.device(r.Dev) }

// Covers reports whether s includes all devices and networks of other. It does not compare
// Shared.
func (s Scope) Covers(other Scope) bool {
	return !slices.ContainsFunc(other.Devices, func(name string) bool { return !s.device(name) }) &&
		!slices.ContainsFunc(other.Networks, func(n netip.Prefix) bool { return !s.InNetworks(n) })
}

func (l Link) belongsTo(s Scope) bool { return s.device(l.Name) }
func (a Addr) belongsTo(s Scope) bool {
	return s.device(a.Dev) && s.InNetworks(prefix.Host(a.Prefix.Addr()))
}
func (n Neigh) belongsTo(s Scope) bool { return s.device(n.Dev) && s.InNetworks(prefix.Host(n.IP)) }
func (f FDB) belongsTo(s Scope) bool   { return s.device(f.Dev) }
func (r Route) belongsTo(s Scope) bool { return s.Shows(r) }
