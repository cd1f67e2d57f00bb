package subnet

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Refusal says why a lease, or one address family of it, is not followed.
type Refusal struct {
	Key    string // the lease's
	Reason string // one line
}

// Arbitrate returns the leases that may be programmed, in the order of their
// age, and says why others may not. Where leases contradict each other the
// order is total, so that all nodes decide alike: own first, then the one
// first in the store, then by key. Families are judged one by one: a lease can
// be accepted with one and appear in refused for the other. Endpoints of
// families that cfg does not enable are dropped without a word. The arguments
// are not changed; accepted leases share their data.
func Arbitrate(cfg Config, own Lease, leases []Lease) (accepted []Lease, refused []Refusal) {
	a := newArbiter(own, leases)
	for _, e := range own.Endpoints {
		a.add("", e)
	}
	leases = slices.Clone(leases)
	slices.SortFunc(leases, func(x, y Lease) int {
		return cmp.Or(cmp.Compare(x.Order, y.Order), cmp.Compare(x.Key, y.Key))
	})
	for _, l := range leases {
		var kept []Endpoint
		judged := false
		for _, e := range l.Endpoints {
			n, enabled := cfg.Network(e.Family())
			if !enabled {
				continue
			}
			judged = true
			if reason := a.judge(n, e); reason != "" {
				refused = append(refused, Refusal{l.Key, reason})
				continue
			}
			a.add(l.Key, e)
			kept = append(kept, e)
		}
		if len(kept) > 0 {
			l.Endpoints = kept
			accepted = append(accepted, l)
		} else if !judged {
			refused = append(refused, Refusal{l.Key, "has no subnet of an enabled address family"})
		}
	}
	return accepted, refused
}

// arbiter knows what is taken so far.
type arbiter struct {
	subnets *index
	publics *index // public addresses, as prefixes of full length
}

func newArbiter(own Lease, leases []Lease) arbiter {
	var l lengths
	l.add(own)
	for _, lease := range leases {
		l.add(lease)
	}
	return arbiter{newIndex(l), newIndex(l)}
}

func (a arbiter) add(key string, e Endpoint) {
	if e.Subnet.IsValid() {
		a.subnets.add(e.Subnet, holder{e.Subnet, key})
	}
	if e.PublicIP.IsValid() {
		a.publics.add(prefix.Host(e.PublicIP), holder{e.Subnet, key})
	}
}

// judge returns why e may not be programmed, or nothing.
func (a arbiter) judge(n Network, e Endpoint) string {
	s, public := e.Subnet, e.PublicIP
	if !prefix.Contains(n.Prefix, s) {
		return fmt.Sprintf("%s is outside the Network %s", s, n.Prefix)
	}
	for _, r := range reserved() {
		if r.Overlaps(s) {
			return fmt.Sprintf("%s overlaps %s, which is not for pods", s, r)
		}
	}
	if why := unusable(e); why != "" {
		return why
	}
	if h, found := a.publics.find(prefix.Host(public)); found {
		if h.key == "" {
			return fmt.Sprintf("%s has public IP %s, which is our own", s, public)
		}
		return fmt.Sprintf("%s has public IP %s, as has %s, which was there first", s, public, h)
	}
	if h, found := a.subnets.find(s); found {
		return fmt.Sprintf("%s overlaps %s", s, h.first())
	}
	if h, found := a.publics.find(s); found {
		return fmt.Sprintf("%s contains the public IP of %s", s, h.first())
	}
	if h, found := a.subnets.find(prefix.Host(public)); found {
		return fmt.Sprintf("%s has public IP %s, which lies in %s", s, public, h.first())
	}
	return ""
}

// unusable returns why peers cannot be sent to, or nothing.
func unusable(e Endpoint) string {
	s, public := e.Subnet, e.PublicIP
	switch {
	case !public.IsValid() || public.IsUnspecified():
		return fmt.Sprintf("%s has no public %s address", s, e.Family())
	case !ofFamily(e.Family(), public):
		return fmt.Sprintf("%s has public IP %s, which is not an %s address", s, public, e.Family())
	case public.IsMulticast() || public.IsLoopback() || public == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Sprintf("%s has public IP %s, which is not the address of a host", s, public)
	case s.Contains(public):
		return fmt.Sprintf("%s contains its own public IP %s", s, public)
	}
	return ""
}

// reserved lists what no route may ever cover.
func reserved() []netip.Prefix {
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8),
		netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
		prefix.Host(netip.IPv6Loopback()),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
	}
}
