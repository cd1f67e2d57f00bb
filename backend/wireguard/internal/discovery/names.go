// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"net/netip"
	"slices"
	"time"
)

const (
	// While there is no session with a peer, its name is looked up again: first after leastLookup, and then
	// after longer and longer pauses, up to mostLookup.
	leastLookup = 30 * time.Second
	mostLookup  = 10 * time.Minute
	// maxAddresses is the maximum number of addresses of a name that are used, for each family.
	maxAddresses = 4
)

// name is a name of a peer with its addresses.
type name struct {
	addrs  []netip.Addr // as Usable returns them; the last good answer
	asked  bool         // a lookup has not been answered yet
	next   time.Duration
	pause  time.Duration // between the last lookup and the next one
	wanted time.Duration // last reading in which a wanted peer had the name
}

func (d *Discovery) name(host string) *name {
	if host == "" {
		return nil
	}
	if d.names[host] == nil {
		d.names[host] = &name{}
	}
	return d.names[host]
}

// ask returns the known addresses of host, with which there is no session. They may be out of date, so
// ask also has the name looked up again, unless that was done a short time ago. host may be empty.
func (d *Discovery) ask(now time.Duration, host string) []netip.Addr {
	n := d.name(host)
	if n == nil {
		return nil
	}
	if n.asked || now < n.next {
		return n.addrs
	}
	if now-n.next > mostLookup { // nothing has asked for a long time, so there was a session
		n.pause = 0
	}

	n.asked = true
	d.lookups[host] = n.addrs
	return n.addrs
}

// Lookups returns the names to look up since the last call, with their known addresses. Each must be
// answered by Answer.
func (d *Discovery) Lookups() map[string][]netip.Addr {
	all := d.lookups
	d.lookups = map[string][]netip.Addr{}
	return all
}

// Answer takes the addresses of a name, as Usable returns them. If there are none, the former ones stay.
func (d *Discovery) Answer(now time.Duration, host string, addrs []netip.Addr) {
	n := d.names[host]
	if n == nil {
		return
	}
	n.pause = min(max(2*n.pause, leastLookup), mostLookup)
	n.next = now + n.pause*4/5 + d.config.Random(n.pause*2/5) // hosts that started together do not ask together
	n.asked = false
	if len(addrs) > 0 {
		n.addrs = addrs
	}
}

// Usable returns the addresses to try of those that a name has. They are sorted, because servers change
// their order, and IPv4 comes first.
func Usable(addrs []netip.Addr) []netip.Addr {
	var all []netip.Addr
	for _, a := range addrs {
		all = append(all, a.Unmap())
	}
	slices.SortFunc(all, netip.Addr.Compare)

	kept := map[bool]int{} // by whether it is IPv4
	return slices.DeleteFunc(slices.Compact(all), func(a netip.Addr) bool {
		kept[a.Is4()]++
		return kept[a.Is4()] > maxAddresses
	})
}
