// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Refusal is the reason why a lease, or one address family of it, is not used.
type Refusal struct {
	Key    string // of the lease
	Reason string // one line
}

// Claimant is a lease with its identities: VTEP MACs, public keys, and anything else that only
// one node may have.
type Claimant struct {
	Lease      *Lease   // read-only
	Identities []string // in the form that messages show
	// Less is what remains if another lease has one of the identities: a lease of the same host without
	// the data of its next backend. Nil means that nothing remains.
	Less *Claimant
}

// Arbiter decides which leases may be programmed into the kernel, and gives the reasons why it
// refuses the rest. The lease of this host wins against any other. Between the leases of two other
// hosts, the store decides. So all hosts decide alike, and a host cannot harm another one by what it
// writes into its own lease:
//
//   - Of two subnets that overlap, the one that came into the store first stays. A subnet is part of
//     the key, so its host cannot change it afterwards.
//   - A public address in the subnet of another lease is refused, because a host can write any
//     address at any time. If hosts get no subnets from that part of the network, because it is
//     outside of SubnetMin and SubnetMax, the subnet is refused instead.
//   - An identity, such as a VTEP MAC, belongs to the lease that claimed it first. A lease that has an
//     identity of another one only for its next backend is used without that backend.
//
// The arbiter validates each family by itself: it may accept one family of a lease and refuse the
// other. It silently drops endpoints of families that the configuration does not enable. Several
// leases may have the same public address, because the arbiter cannot know which host has it now.
// An Arbiter is not safe for concurrent use.
type Arbiter struct {
	// Broadcasts are the broadcast addresses of the networks to which this host belongs. The kernel sends
	// packets to them by vxlan and ipip, which would then reach all hosts there.
	Broadcasts []netip.Addr

	cfg Config
	own Claimant

	// prefixes of accepted leases: subnets, and public addresses as prefixes of full length; no two overlap
	prefixes     *prefixTable
	shared       map[netip.Addr]int // number of accepted leases with a public address, if there are several
	identities   map[string]string  // key of the accepted lease, by identity
	accepted     map[string]*Lease
	identitiesOf map[string][]string // of accepted leases, by key
	contested    map[string]Claimant // leases refused, as a whole or in one family, because of another lease; by key
	refused      map[string][]string // reasons, by key
}

// NewArbiter returns an arbiter that knows only this host's lease.
func NewArbiter(cfg Config, own Claimant) *Arbiter {
	a := &Arbiter{cfg: cfg, own: own}
	a.Reset(nil)
	return a
}

// SetOwn replaces this host's lease. It does not decide again about others.
func (a *Arbiter) SetOwn(own Claimant) { a.own = own }

// Reset replaces all claimants and decides about each of them.
func (a *Arbiter) Reset(all []Claimant) {
	// In nearly all clusters no lease contradicts another one. Then their order has no effect.
	a.clear(all)
	if !slices.ContainsFunc(all, func(c Claimant) bool { return !a.admit(c) }) {
		return
	}

	all = slices.Clone(all)
	slices.SortFunc(all, func(x, y Claimant) int { return compareAge(x.Lease, y.Lease) })
	a.clear(all)
	a.settle(all)
}

// clear forgets all claimants, and makes room for new ones.
func (a *Arbiter) clear(all []Claimant) {
	a.prefixes = new(prefixTable)
	a.shared = map[netip.Addr]int{}
	a.identities = make(map[string]string, numIdentities(all))
	a.accepted = make(map[string]*Lease, len(all))
	a.identitiesOf = make(map[string][]string, numIdentities(all))
	a.contested = map[string]Claimant{}
	a.refused = map[string][]string{}
}

// settle decides about all claimants, of which some contradict each other. The oldest lease comes first in
// all. Each step gets only what the step before has not refused. So a lease that a step refuses takes
// nothing from others in a later one.
func (a *Arbiter) settle(all []Claimant) {
	addresses := new(prefixTable)
	for i, c := range all {
		all[i] = a.checkAlone(c)
		for _, e := range all[i].Lease.Endpoints {
			if _, known := addresses.Get(prefix.Host(e.PublicIP)); !known {
				addresses.Insert(prefix.Host(e.PublicIP), prefixOwner{lease: c.Lease, family: e.Family()})
			}
		}
	}

	subnets := a.settleSubnets(all, addresses)
	for i, c := range all {
		all[i] = a.keep(c, func(e Endpoint) (reason, by string) {
			if o, found := subnets.find(prefix.Host(e.PublicIP)); found {
				return fmt.Sprintf("%s has public IP %s, which lies in %s", e.Subnet, e.PublicIP, o), o.lease.Key
			}
			return "", ""
		})
	}

	a.settleIdentities(slices.DeleteFunc(all, func(c Claimant) bool { return len(c.Lease.Endpoints) == 0 }))
}

func numIdentities(all []Claimant) (n int) {
	for _, c := range all {
		n += len(c.Identities)
	}
	return n
}

// Change decides again about the lease of c. If c has no endpoints, Change only removes the lease. The
// cost depends on the number of contested leases, not on the number of leases. Change returns false if
// it cannot decide without other leases: c contradicts another lease, or a contested lease contradicts
// c or the former version of its lease. The caller must then call Reset with all leases.
func (a *Arbiter) Change(c Claimant) bool {
	key := c.Lease.Key

	var old Claimant
	l, had := a.accepted[key]
	if had {
		old = Claimant{Lease: l, Identities: a.identitiesOf[key]}
		a.withdraw(old)
	}

	// An endpoint that is refused may still be the reason why another one is.
	if c, contested := a.contested[key]; contested {
		old = c
		had = true
	}

	delete(a.contested, key)
	delete(a.refused, key)

	for _, other := range a.contested {
		if had && conflicts(old, other) || conflicts(c, other) {
			return false
		}
	}
	return len(c.Lease.Endpoints) == 0 || a.admit(c)
}

// conflicts reports whether x and y contradict each other: their subnets overlap, the subnet of one
// contains a public address of the other, or they have an identity in common.
func conflicts(x, y Claimant) bool {
	for _, e := range x.Lease.Endpoints {
		for _, f := range y.Lease.Endpoints {
			if e.Subnet.Overlaps(f.Subnet) || e.Subnet.Contains(f.PublicIP) || f.Subnet.Contains(e.PublicIP) {
				return true
			}
		}
	}
	return slices.ContainsFunc(x.Identities, func(id string) bool { return slices.Contains(y.Identities, id) })
}

// Accepted returns the leases that may be programmed, by key, each with the endpoints that may
// be programmed. The map is read-only. Later calls of Change update it, and Reset replaces it. It
// shares its leases with the claimants.
func (a *Arbiter) Accepted() map[string]*Lease { return a.accepted }

// Kept returns the identities of c that its accepted lease has had since an earlier revision than that
// of c, with these revisions; nil if there are none.
func (a *Arbiter) Kept(c Claimant) map[string]uint64 {
	accepted := a.accepted[c.Lease.Key]
	var kept map[string]uint64
	for _, id := range c.Identities {
		if a.identities[id] != c.Lease.Key || accepted.claimed(id) >= c.Lease.claimed(id) {
			continue
		}
		if kept == nil {
			kept = map[string]uint64{}
		}
		kept[id] = accepted.claimed(id)
	}
	return kept
}

// Refused returns the reasons why the lease, or a family of it, may not be programmed; nil if
// there is none.
func (a *Arbiter) Refused(key string) []string { return a.refused[key] }

// AllRefused returns every refusal, sorted by key.
func (a *Arbiter) AllRefused() []Refusal {
	var all []Refusal
	for _, key := range slices.Sorted(maps.Keys(a.refused)) {
		for _, reason := range a.refused[key] {
			all = append(all, Refusal{key, reason})
		}
	}
	return all
}

// admit accepts or refuses c. If c contradicts an accepted lease, admit does neither and returns false.
func (a *Arbiter) admit(c Claimant) bool {
	c = a.checkAlone(c)
	if len(c.Lease.Endpoints) == 0 {
		return true
	}

	for _, e := range c.Lease.Endpoints {
		if _, found := a.prefixes.find(e.Subnet); found {
			return false
		}
		if o, found := a.prefixes.find(prefix.Host(e.PublicIP)); found && o.lease != nil {
			return false
		}
	}

	for _, id := range c.Identities {
		if _, taken := a.identities[id]; taken {
			return false
		}
	}

	a.accept(c)
	return true
}

// settleSubnets refuses the subnets that overlap one of an older lease, and those that contain one of
// the public addresses although hosts get no subnets there. It returns a table of the others.
func (a *Arbiter) settleSubnets(all []Claimant, addresses *prefixTable) *prefixTable {
	subnets := new(prefixTable)
	for i, c := range all {
		c = a.keep(c, func(e Endpoint) (reason, by string) {
			if o, found := subnets.find(e.Subnet); found {
				return fmt.Sprintf("%s overlaps %s, which was there first", e.Subnet, o), o.lease.Key
			}
			n, _ := a.cfg.Network(e.Family())
			if o, found := addresses.find(e.Subnet); found && !n.gives(e.Subnet) {
				return fmt.Sprintf("%s contains the public IP of %s", e.Subnet, o), o.lease.Key
			}
			return "", ""
		})

		for _, e := range c.Lease.Endpoints {
			subnets.Insert(e.Subnet, prefixOwner{lease: c.Lease, family: e.Family()})
		}
		all[i] = c
	}
	return subnets
}

// settleIdentities refuses the leases with an identity that another lease claimed first, and accepts the
// others.
func (a *Arbiter) settleIdentities(all []Claimant) {
	holders := make(map[string]*Lease, numIdentities(all))
	for _, c := range all {
		for _, id := range c.Identities {
			if h := holders[id]; h == nil || compareClaims(c.Lease, h, id) < 0 {
				holders[id] = c.Lease
			}
		}
	}

	for _, c := range all {
		holds := c.Lease
		rest, ok := a.whatRemains(c, func(id string) (whose, by string) {
			if h := holders[id]; h != holds {
				return h.Key, h.Key
			}
			return "", ""
		})
		if ok {
			a.accept(rest)
		}
	}
}

// whatRemains returns c, or what remains of it without the identities of others. ok is false if nothing
// does. taken returns whose an identity is, with the key of that lease if it is not the own one; "" if it
// is not taken.
func (a *Arbiter) whatRemains(c Claimant, taken func(id string) (whose, by string)) (rest Claimant, ok bool) {
	lost := ""
	isTaken := func(id string) bool {
		whose, by := taken(id)
		if whose != "" && id != lost {
			a.refuse(c, fmt.Sprintf("its %s is that of %s", id, whose), by)
			lost = id
		}
		return whose != ""
	}

	for rest = c; slices.ContainsFunc(rest.Identities, isTaken); rest = rest.less() {
		if rest.Less == nil {
			return rest, false
		}
	}
	return rest, true
}

// less returns Less with the endpoints that c still has.
func (c Claimant) less() Claimant {
	return c.Less.without(func(e Endpoint) bool {
		return !slices.ContainsFunc(c.Lease.Endpoints, func(has Endpoint) bool { return has.Subnet == e.Subnet })
	})
}

// checkAlone returns c without the endpoints that are wrong even if there are no other leases, and records why.
func (a *Arbiter) checkAlone(c Claimant) Claimant {
	c, ok := a.whatRemains(c, func(id string) (whose, by string) {
		if slices.Contains(a.own.Identities, id) {
			return "this node", ""
		}
		return "", ""
	})
	if !ok {
		return c.without(func(Endpoint) bool { return true })
	}

	disabled := func(e Endpoint) bool {
		_, enabled := a.cfg.Network(e.Family())
		return !enabled
	}

	c = c.without(disabled)
	if len(c.Lease.Endpoints) == 0 {
		a.refuse(c, "has no subnet of an enabled address family", "")
	}
	return a.keep(c, func(e Endpoint) (reason, by string) {
		n, _ := a.cfg.Network(e.Family())
		return a.validate(n, c.Lease, e), ""
	})
}

// keep returns c without the endpoints for which check returns a reason, and records the reasons. If
// another lease is the reason, check also returns the key of that lease.
func (a *Arbiter) keep(c Claimant, check func(Endpoint) (reason, by string)) Claimant {
	return c.without(func(e Endpoint) bool {
		reason, by := check(e)
		if reason != "" {
			a.refuse(c, reason, by)
		}
		return reason != ""
	})
}

// without returns c without some endpoints. It does not change the lease, which is read-only.
func (c Claimant) without(drop func(Endpoint) bool) Claimant {
	kept := c.Lease.Endpoints
	for _, e := range c.Lease.Endpoints {
		if drop(e) {
			kept = slices.DeleteFunc(slices.Clone(kept), func(k Endpoint) bool { return k.Subnet == e.Subnet })
		}
	}

	if len(kept) < len(c.Lease.Endpoints) {
		less := *c.Lease
		less.Endpoints = kept
		c.Lease = &less
	}
	return c
}

// refuse records a reason. If another lease is the reason, by is its key, and the end of that lease
// removes the reason. Otherwise by is empty.
func (a *Arbiter) refuse(c Claimant, reason, by string) {
	a.refused[c.Lease.Key] = append(a.refused[c.Lease.Key], reason)
	if _, known := a.contested[c.Lease.Key]; by != "" && !known {
		a.contested[c.Lease.Key] = c
	}
}

// accept makes c an accepted lease.
func (a *Arbiter) accept(c Claimant) {
	key := c.Lease.Key
	a.accepted[key] = c.Lease
	if len(c.Identities) > 0 {
		a.identitiesOf[key] = c.Identities
	}

	for _, e := range c.Lease.Endpoints {
		a.prefixes.Insert(e.Subnet, prefixOwner{lease: c.Lease, family: e.Family()})
		if _, taken := a.prefixes.Get(prefix.Host(e.PublicIP)); taken {
			a.shared[e.PublicIP] = max(a.shared[e.PublicIP], 1) + 1
		}
		a.prefixes.Insert(prefix.Host(e.PublicIP), prefixOwner{})
	}

	for _, id := range c.Identities {
		a.identities[id] = key
	}
}

// withdraw reverses accept.
func (a *Arbiter) withdraw(c Claimant) {
	delete(a.accepted, c.Lease.Key)
	delete(a.identitiesOf, c.Lease.Key)
	for _, e := range c.Lease.Endpoints {
		a.prefixes.Delete(e.Subnet)
		switch a.shared[e.PublicIP] {
		case 0:
			a.prefixes.Delete(prefix.Host(e.PublicIP))
		case 2:
			delete(a.shared, e.PublicIP)
		default:
			a.shared[e.PublicIP]--
		}
	}

	for _, id := range c.Identities {
		delete(a.identities, id)
	}
}

// validate returns the reason why e, an endpoint of l, may not be programmed even if there are no other leases, or
// an empty string. n is the network of e's family.
func (a *Arbiter) validate(n Network, l *Lease, e Endpoint) string {
	s := e.Subnet
	if !prefix.Contains(n.Prefix, s) {
		return fmt.Sprintf("%s is outside the Network %s", s, n.Prefix)
	}

	for _, r := range unroutable {
		if r.Overlaps(s) {
			return fmt.Sprintf("%s overlaps %s, which is not for pods", s, r.Prefix)
		}
	}
	if slices.Contains(a.Broadcasts, e.PublicIP) {
		return fmt.Sprintf("%s has public IP %s, which is a broadcast address", s, e.PublicIP)
	}
	if why := unusable(e); why != "" {
		return why
	}
	return a.conflictWithOwn(l, e)
}

// conflictWithOwn returns how e, an endpoint of l, contradicts this host's lease, or an empty string.
func (a *Arbiter) conflictWithOwn(l *Lease, e Endpoint) string {
	for _, own := range a.own.Lease.Endpoints {
		switch s, public := e.Subnet, e.PublicIP; {
		case public == own.PublicIP:
			return fmt.Sprintf("%s has public IP %s, which is our own", s, public)
		case s == own.Subnet && compareAge(l, a.own.Lease) < 0:
			return fmt.Sprintf("%s overlaps our own %s, and was there first: other hosts prefer it", s, own.Subnet)
		case s.Overlaps(own.Subnet):
			return fmt.Sprintf("%s overlaps our own %s", s, own.Subnet)
		case s.Contains(own.PublicIP):
			return fmt.Sprintf("%s contains the public IP of our own %s", s, own.Subnet)
		case own.Subnet.Contains(public):
			return fmt.Sprintf("%s has public IP %s, which lies in our own %s", s, public, own.Subnet)
		}
	}
	return ""
}

// unusable returns the reason why packets cannot be sent to e, or an empty string.
func unusable(e Endpoint) string {
	s := e.Subnet
	public := e.PublicIP
	switch {
	case !public.IsValid() || public.IsUnspecified():
		return fmt.Sprintf("%s has no public %s address", s, e.Family())
	case !ofFamily(e.Family(), public):
		return fmt.Sprintf("%s has public IP %s, which is not an %s address", s, public, e.Family())
	case !IsHost(public):
		return fmt.Sprintf("%s has public IP %s, which is not the address of a host", s, public)
	case s.Contains(public):
		return fmt.Sprintf("%s contains its own public IP %s", s, public)
	}
	return ""
}

// IsHost reports whether a can be the address of one host, to which peers can send packets.
func IsHost(a netip.Addr) bool {
	broadcast := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != broadcast
}
