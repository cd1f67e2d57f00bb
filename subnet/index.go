package subnet

import (
	"fmt"
	"net/netip"

	"flanneld/pkg/prefix"
)

// holder is who has a prefix.
type holder struct {
	subnet netip.Prefix
	key    string // of the lease; empty for our own
}

func (h holder) String() string {
	if h.key == "" {
		return fmt.Sprintf("our own %s", h.subnet)
	}
	return fmt.Sprintf("%s of %s", h.subnet, h.key)
}

// first is String for a sentence that ends with who was first.
func (h holder) first() string {
	if h.key == "" {
		return h.String()
	}
	return h.String() + ", which was there first"
}

// lengths is the set of prefix lengths in use: [0] for IPv4, [1] for IPv6.
type lengths [2][129]bool

func (l *lengths) of(p netip.Prefix) *[129]bool {
	if p.Addr().Is4() {
		return &l[0]
	}
	return &l[1]
}

func (l *lengths) add(lease Lease) {
	for _, e := range lease.Endpoints {
		if e.Subnet.IsValid() {
			l.of(e.Subnet)[e.Subnet.Bits()] = true
		}
		if e.PublicIP.IsValid() {
			p := prefix.Host(e.PublicIP)
			l.of(p)[p.Bits()] = true
		}
	}
}

// index finds overlapping prefixes. Prefixes either nest or are disjoint, so
// that one look-up for each length in use is enough.
type index struct {
	lengths lengths
	exact   map[netip.Prefix]holder
	within  map[netip.Prefix]holder // by prefixes that contain an exact one
}

// newIndex returns an index for prefixes whose length is in l, those that are
// looked up included.
func newIndex(l lengths) *index {
	return &index{l, map[netip.Prefix]holder{}, map[netip.Prefix]holder{}}
}

func (x *index) add(p netip.Prefix, h holder) {
	p = p.Masked()
	x.exact[p] = h
	for bits, used := range x.lengths.of(p)[:p.Bits()] {
		if used {
			x.within[netip.PrefixFrom(p.Addr(), bits).Masked()] = h
		}
	}
}

// find returns one holder of a prefix that overlaps p.
func (x *index) find(p netip.Prefix) (h holder, found bool) {
	p = p.Masked()
	for bits, used := range x.lengths.of(p)[:p.Bits()+1] {
		if !used {
			continue
		}
		if h, found = x.exact[netip.PrefixFrom(p.Addr(), bits).Masked()]; found {
			return h, true
		}
	}
	h, found = x.within[p]
	return h, found
}
