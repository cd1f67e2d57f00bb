// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/prefix"
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
}

// Arbiter decides which leases may be programmed into the kernel, and gives the reasons why it
// refuses the rest. If two leases contradict each other, the own lease wins, otherwise the one
// that came into the store first, otherwise the one with the lower key. So all nodes decide alike
// between two leases of other nodes. The arbiter validates each family by itself: it may accept
// one family of a lease and refuse the other. It silently drops endpoints of families that the
// configuration does not enable. Several leases may have the same public address, because the
// arbiter cannot know which host has it now. An Arbiter is not safe for concurrent use.
type Arbiter struct {
	cfg Config
	own Claimant

	prefixes     *prefixTable      // of accepted leases: subnets, and public addresses as prefixes of full length; no two overlap
	shared       sharedPublicIPs   // public addresses that several accepted leases have
	identities   map[string]string // key of the accepted lease, by identity
	accepted     map[string]*Lease
	identitiesOf map[string][]string // of accepted leases, by key
	contested    map[string]Claimant // leases refused, as a whole or in one family, because of another lease; by key
	refused      map[string][]string // reasons, by key
}

// NewArbiter returns an arbiter that knows only the own lease.
func NewArbiter(cfg Config, own Claimant) *Arbiter {
	a := &Arbiter{cfg: cfg, own: own, shared: newSharedPublicIPs()}
	a.Reset(nil)
	return a
}

// Reset replaces all claimants and decides about each of them.
func (a *Arbiter) Reset(all []Claimant) {
	a.admitAll(all)
	if len(a.contested) == 0 { // no leases contradict each other, so their order does not matter
		return
	}
	a.admitAll(slices.SortedFunc(slices.Values(all), func(x, y Claimant) int { return compareAge(x.Lease, y.Lease) }))
}

// admitAll discards all decisions and admits or refuses the claimants in their order.
func (a *Arbiter) admitAll(all []Claimant) {
	n, marked := len(all), 0
	for _, c := range all {
		marked += len(c.Identities)
	}
	a.prefixes, a.identities = new(prefixTable), make(map[string]string, marked)
	a.shared.reset()
	a.accepted, a.identitiesOf = make(map[string]*Lease, n), make(map[string][]string, min(n, marked))
	a.contested, a.refused = map[string]Claimant{}, map[string][]string{}
	for _, c := range all {
		a.admit(c)
	}
}

// Change decides again about the lease of c. If c has no endpoints, Change only removes the lease. The
// cost depends on the number of contested leases, not on the number of leases. Change returns false if
// it cannot decide without other leases: c contradicts another lease, or a contested lease contradicts
// c or the former version of its lease. The caller must then call Reset with all leases.
func (a *Arbiter) Change(c Claimant) bool {
	key := c.Lease.Key
	lease, had := a.accepted[key]
	old := Claimant{lease, a.identitiesOf[key]}
	if had {
		a.withdraw(old)
	}
	delete(a.contested, key)
	delete(a.refused, key)
	for _, other := range a.contested {
		if had && conflicts(old, other) || conflicts(c, other) {
			return false
		}
	}
	if len(c.Lease.Endpoints) > 0 {
		a.admit(c)
	}
	_, contested := a.contested[key]
	return !contested
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

// SharedChanges returns the public addresses that several accepted leases have begun to share, or
// share no longer, since the last call. Its cost depends on the number of these addresses.
func (a *Arbiter) SharedChanges() []SharedPublicIP { return a.shared.changes() }

// Shared returns the public addresses that several accepted leases have, sorted by address.
func (a *Arbiter) Shared() []SharedPublicIP { return a.shared.all() }

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

// admit accepts or refuses c, as a whole or in each family, given the leases that were accepted
// before.
func (a *Arbiter) admit(c Claimant) {
	if i := slices.IndexFunc(c.Identities, func(id string) bool { return slices.Contains(a.own.Identities, id) }); i >= 0 {
		a.refuse(c, fmt.Sprintf("its %s is that of this node", c.Identities[i]), "")
		return
	}
	var room [2]Endpoint // one for each family
	kept, enabled := room[:0], false
	for _, e := range c.Lease.Endpoints {
		n, ok := a.cfg.Network(e.Family())
		if !ok {
			continue
		}
		enabled = true
		if reason, by := a.validate(n, e); reason != "" {
			a.refuse(c, reason, by)
		} else {
			kept = append(kept, e)
		}
	}
	if !enabled {
		a.refuse(c, "has no subnet of an enabled address family", "")
	}
	if len(kept) == 0 {
		return
	}
	for _, id := range c.Identities {
		if by, taken := a.identities[id]; taken {
			a.refuse(c, fmt.Sprintf("its %s is that of %s", id, by), by)
			return
		}
	}
	if len(kept) < len(c.Lease.Endpoints) {
		less := *c.Lease
		less.Endpoints = slices.Clone(kept)
		c.Lease = &less
	}
	a.accept(c)
}

// refuse records a reason. If another lease is the reason, by is its key, and the end of that lease
// removes the reason. Otherwise by is empty.
func (a *Arbiter) refuse(c Claimant, reason, by string) {
	a.refused[c.Lease.Key] = append(a.refused[c.Lease.Key], reason)
	if by != "" {
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
		a.prefixes.add(e.Subnet, prefixOwner{lease: c.Lease, family: e.Family()})
		host := prefixOwner{lease: c.Lease, family: e.Family(), public: true}
		if other, taken := a.prefixes.get(prefix.Host(e.PublicIP)); taken {
			host.lease = a.shared.add(e.PublicIP, other.lease, c.Lease)
		}
		a.prefixes.add(prefix.Host(e.PublicIP), host)
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
		a.prefixes.remove(e.Subnet)
		if left := a.shared.remove(e.PublicIP, c.Lease); left != nil {
			a.prefixes.add(prefix.Host(e.PublicIP), prefixOwner{lease: left, family: e.Family(), public: true})
		} else {
			a.prefixes.remove(prefix.Host(e.PublicIP))
		}
	}
	for _, id := range c.Identities {
		delete(a.identities, id)
	}
}

// validate returns the reason why e may not be programmed, or an empty string. n is the network of
// e's family. If the reason is an accepted lease that e contradicts, by is the key of that lease.
func (a *Arbiter) validate(n Network, e Endpoint) (reason, by string) {
	s, public := e.Subnet, e.PublicIP
	if !prefix.Contains(n.Prefix, s) {
		return fmt.Sprintf("%s is outside the Network %s", s, n.Prefix), ""
	}
	for _, r := range reserved() {
		if r.Overlaps(s) {
			return fmt.Sprintf("%s overlaps %s, which is not for pods", s, r), ""
		}
	}
	if why := unusable(e); why != "" {
		return why, ""
	}
	if why := a.conflictWithOwn(e); why != "" {
		return why, ""
	}
	if h, found := a.prefixes.find(prefix.Host(public)); found && !h.public {
		return fmt.Sprintf("%s has public IP %s, which lies in %s, which was there first", s, public, h), h.lease.Key
	}
	switch h, found := a.prefixes.find(s); {
	case found && h.public:
		return fmt.Sprintf("%s contains the public IP of %s, which was there first", s, h), h.lease.Key
	case found:
		return fmt.Sprintf("%s overlaps %s, which was there first", s, h), h.lease.Key
	}
	return "", ""
}

// conflictWithOwn returns how e contradicts the own lease, or an empty string.
func (a *Arbiter) conflictWithOwn(e Endpoint) string {
	for _, own := range a.own.Lease.Endpoints {
		switch s, public := e.Subnet, e.PublicIP; {
		case public == own.PublicIP:
			return fmt.Sprintf("%s has public IP %s, which is our own", s, public)
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
	s, public := e.Subnet, e.PublicIP
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

// reserved returns the prefixes that no subnet may overlap: loopback and multicast.
func reserved() [4]netip.Prefix {
	return [...]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8),
		netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
		prefix.Host(netip.IPv6Loopback()),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
	}
}
