package subnet

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Refusal says why a lease, or one address family of it, is not followed.
type Refusal struct {
	Key    string // the lease's
	Reason string // one line
}

// Claimant is a lease, and the identities that go with it: VTEP MACs, public
// keys, what else only one node may have.
type Claimant struct {
	Lease      *Lease   // read-only
	Identities []string // as they are to be shown
}

// Arbiter says which leases may be programmed, and why others may not. Where
// leases contradict each other the order is total, so that all nodes decide
// alike: own first, then the one first in the store, then by key. Families are
// judged one by one: a lease can be accepted with one and refused with the
// other. Endpoints of families that the configuration does not enable are
// dropped without a word. Several leases may have one public address: packets to
// each of them arrive, and which host is there now is not to be told from here.
type Arbiter struct {
	cfg Config
	own Claimant

	claimed    *index            // subnets, and public addresses as prefixes of full length; no two overlap
	sharing    sharing           // of public addresses, by accepted leases
	identities map[string]string // key of who has it
	accepted   map[string]*Lease
	carried    map[string][]string // identities of accepted ones, by key
	contested  map[string]Claimant // refused because of another lease
	refused    map[string][]string // reasons
}

// NewArbiter returns an arbiter that knows no leases but the own one.
func NewArbiter(cfg Config, own Claimant) *Arbiter {
	a := &Arbiter{cfg: cfg, own: own, sharing: newSharing()}
	a.Reset(nil)
	return a
}

// Reset judges all claimants anew.
func (a *Arbiter) Reset(all []Claimant) {
	a.settleAll(all)
	if len(a.contested) == 0 { // nobody is in anybody's way, and so the order makes no difference
		return
	}
	a.settleAll(slices.SortedFunc(slices.Values(all), func(x, y Claimant) int { return compareAge(x.Lease, y.Lease) }))
}

// compareAge orders leases: first the one that was first in the store.
func compareAge(x, y *Lease) int {
	return cmp.Or(cmp.Compare(x.Order, y.Order), cmp.Compare(x.Key, y.Key))
}

// settleAll forgets what was and settles all, in their order.
func (a *Arbiter) settleAll(all []Claimant) {
	n, marked := len(all), 0
	for _, c := range all {
		marked += len(c.Identities)
	}
	a.claimed, a.identities = new(index), make(map[string]string, marked)
	a.sharing.reset()
	a.accepted, a.carried = make(map[string]*Lease, n), make(map[string][]string, min(n, marked))
	a.contested, a.refused = map[string]Claimant{}, map[string][]string{}
	for _, c := range all {
		a.settle(c)
	}
}

// Change judges one lease anew, which is gone if its lease has no endpoints.
// It costs the same however many there are. It reports false if that is not
// for one lease alone to say, because others are contested: the caller has to
// Reset then.
func (a *Arbiter) Change(c Claimant) bool {
	key := c.Lease.Key
	lease, had := a.accepted[key]
	old := Claimant{lease, a.carried[key]}
	if had {
		a.release(old)
	}
	delete(a.contested, key)
	delete(a.refused, key)
	for _, other := range a.contested {
		if had && touch(old, other) || touch(c, other) {
			return false
		}
	}
	if len(c.Lease.Endpoints) > 0 {
		a.settle(c)
	}
	_, contested := a.contested[key]
	return !contested
}

// touch reports whether what x claims could keep y from its own.
func touch(x, y Claimant) bool {
	for _, e := range x.Lease.Endpoints {
		for _, f := range y.Lease.Endpoints {
			if e.Subnet.Overlaps(f.Subnet) || e.Subnet.Contains(f.PublicIP) || f.Subnet.Contains(e.PublicIP) {
				return true
			}
		}
	}
	return slices.ContainsFunc(x.Identities, func(id string) bool { return slices.Contains(y.Identities, id) })
}

// Accepted returns the leases that may be programmed, by key, each with the
// endpoints that may be. It is read-only, follows Change, and shares its data with
// what was claimed.
func (a *Arbiter) Accepted() map[string]*Lease { return a.accepted }

// SharingNews returns the public addresses that several accepted leases have come
// to share, or have ceased to, since it was last called. It costs as much as there
// are.
func (a *Arbiter) SharingNews() []Shared { return a.sharing.news() }

// Refused returns why the lease, or a family of it, may not be programmed;
// nil if nothing is wrong with it.
func (a *Arbiter) Refused(key string) []string { return a.refused[key] }

// AllRefused returns every refusal, by key.
func (a *Arbiter) AllRefused() []Refusal {
	var all []Refusal
	for _, key := range slices.Sorted(maps.Keys(a.refused)) {
		for _, reason := range a.refused[key] {
			all = append(all, Refusal{key, reason})
		}
	}
	return all
}

// settle accepts or refuses c, given all that is claimed so far.
func (a *Arbiter) settle(c Claimant) {
	if i := slices.IndexFunc(c.Identities, func(id string) bool { return slices.Contains(a.own.Identities, id) }); i >= 0 {
		a.refuse(c, fmt.Sprintf("its %s is that of this node", c.Identities[i]), "")
		return
	}
	var room [2]Endpoint // one for each family
	kept, judged := room[:0], false
	for _, e := range c.Lease.Endpoints {
		n, enabled := a.cfg.Network(e.Family())
		if !enabled {
			continue
		}
		judged = true
		if reason, by := a.judge(n, e); reason != "" {
			a.refuse(c, reason, by)
		} else {
			kept = append(kept, e)
		}
	}
	if !judged {
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
	a.claim(c)
}

// refuse notes a reason, and that it would pass if the lease called by went.
func (a *Arbiter) refuse(c Claimant, reason, by string) {
	a.refused[c.Lease.Key] = append(a.refused[c.Lease.Key], reason)
	if by != "" {
		a.contested[c.Lease.Key] = c
	}
}

func (a *Arbiter) claim(c Claimant) {
	key := c.Lease.Key
	a.accepted[key] = c.Lease
	if len(c.Identities) > 0 {
		a.carried[key] = c.Identities
	}
	for _, e := range c.Lease.Endpoints {
		a.claimed.add(e.Subnet, holder{lease: c.Lease, family: e.Family()})
		host := holder{lease: c.Lease, family: e.Family(), public: true}
		if other, taken := a.claimed.get(prefix.Host(e.PublicIP)); taken {
			host.lease = a.sharing.join(e.PublicIP, other.lease, c.Lease)
		}
		a.claimed.add(prefix.Host(e.PublicIP), host)
	}
	for _, id := range c.Identities {
		a.identities[id] = key
	}
}

func (a *Arbiter) release(c Claimant) {
	delete(a.accepted, c.Lease.Key)
	delete(a.carried, c.Lease.Key)
	for _, e := range c.Lease.Endpoints {
		a.claimed.remove(e.Subnet)
		if left := a.sharing.leave(e.PublicIP, c.Lease); left != nil {
			a.claimed.add(prefix.Host(e.PublicIP), holder{lease: left, family: e.Family(), public: true})
		} else {
			a.claimed.remove(prefix.Host(e.PublicIP))
		}
	}
	for _, id := range c.Identities {
		delete(a.identities, id)
	}
}

// judge returns why e may not be programmed, or nothing; and the key of the
// lease that is in its way, if it is one.
func (a *Arbiter) judge(n Network, e Endpoint) (reason, by string) {
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
	if why := a.judgeByOwn(e); why != "" {
		return why, ""
	}
	if h, found := a.claimed.find(prefix.Host(public)); found && !h.public {
		return fmt.Sprintf("%s has public IP %s, which lies in %s, which was there first", s, public, h), h.lease.Key
	}
	switch h, found := a.claimed.find(s); {
	case found && h.public:
		return fmt.Sprintf("%s contains the public IP of %s, which was there first", s, h), h.lease.Key
	case found:
		return fmt.Sprintf("%s overlaps %s, which was there first", s, h), h.lease.Key
	}
	return "", ""
}

// judgeByOwn returns what the own lease says against e, or nothing.
func (a *Arbiter) judgeByOwn(e Endpoint) string {
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

// unusable returns why peers cannot be sent to, or nothing.
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

// IsHost reports whether a can be the address of one host, so that peers can send to
// it.
func IsHost(a netip.Addr) bool {
	broadcast := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != broadcast
}

// reserved lists what no route may ever cover.
func reserved() [4]netip.Prefix {
	return [...]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8),
		netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
		prefix.Host(netip.IPv6Loopback()),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
	}
}
