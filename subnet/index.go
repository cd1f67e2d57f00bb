package subnet

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// holder is who has a prefix.
type holder struct {
	subnet netip.Prefix
	key    string // of the lease
}

func (h holder) String() string { return fmt.Sprintf("%s of %s", h.subnet, h.key) }

// lengths is the set of prefix lengths in use: [0] for IPv4, [1] for IPv6.
type lengths [2][129]bool

func (l *lengths) of(p netip.Prefix) *[129]bool {
	if p.Addr().Is4() {
		return &l[0]
	}
	return &l[1]
}

// has reports whether the lengths of lease are in use.
func (l *lengths) has(lease Lease) bool {
	with := *l
	with.add(lease)
	return with == *l
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
	within  map[netip.Prefix][]netip.Prefix // exact ones, by prefixes that contain them
}

// newIndex returns an index for some n prefixes whose length is in l.
func newIndex(l lengths, n int) *index {
	return &index{l, make(map[netip.Prefix]holder, n), map[netip.Prefix][]netip.Prefix{}}
}

func (x *index) add(p netip.Prefix, h holder) {
	p = p.Masked()
	x.exact[p] = h
	for outer := range x.outer(p) {
		x.within[outer] = append(x.within[outer], p)
	}
}

func (x *index) remove(p netip.Prefix) {
	p = p.Masked()
	delete(x.exact, p)
	for outer := range x.outer(p) {
		inner := x.within[outer]
		if i := slices.Index(inner, p); i >= 0 {
			x.within[outer] = slices.Delete(inner, i, i+1)
		}
		if len(x.within[outer]) == 0 {
			delete(x.within, outer)
		}
	}
}

// outer iterates over the prefixes around p of the lengths in use.
func (x *index) outer(p netip.Prefix) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for bits, used := range x.lengths.of(p)[:p.Bits()] {
			if used && !yield(netip.PrefixFrom(p.Addr(), bits).Masked()) {
				return
			}
		}
	}
}

// find returns the holder of a prefix that overlaps p; of several that lie in
// p, the lowest.
func (x *index) find(p netip.Prefix) (h holder, found bool) {
	p = p.Masked()
	if h, found = x.exact[p]; found {
		return h, true
	}
	for outer := range x.outer(p) {
		if h, found = x.exact[outer]; found {
			return h, true
		}
	}
	if inner := x.within[p]; len(inner) > 0 {
		return x.exact[slices.MinFunc(inner, netip.Prefix.Compare)], true
	}
	return holder{}, false
}
