// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
)

// promise lets m begin to use what it wants. If another network has claimed or was promised a part of it, promise
// records only that m asks for it. The caller holds m.mu.
func (m *member) promise(wanted claims) error {
	if err := m.clash(wanted); err != nil {
		m.asked = &wanted
		return err
	}
	defer m.announce(m.prefixes())
	m.promised = &wanted
	m.asked = nil
	return nil
}

// claim implements network.Config.Claims.
func (m *member) claim(all []network.Claimed) error {
	var wanted []claims
	for _, c := range all {
		wanted = append(wanted, claimsOf(c.Config, c.Description))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.replace(wanted)
}

// replace replaces what m has claimed. It returns an error if another network has a part of what is new: a promise
// may have been withdrawn after the network began to prepare the configuration. The caller holds m.mu.
func (m *member) replace(all []claims) error {
	defer m.news.Send() // another network may wait for something that this one releases
	has := slices.Clone(m.claimed)
	if m.promised != nil {
		has = append(has, *m.promised)
	}
	for _, c := range all {
		if err := m.clash(c.beyond(has)); err != nil {
			return err
		}
	}
	defer m.announce(m.prefixes())
	m.claimed = all
	return nil
}

// clash says which other network has claimed or was promised a part of what m wants. The caller holds m.mu.
func (m *member) clash(wanted claims) error {
	for _, o := range m.members {
		if o == m {
			continue
		}
		if o.promised != nil {
			if why := wanted.clash(*o.promised); why != "" {
				return fmt.Errorf("it clashes with network %s, which was there first: %s", o.name, why)
			}
		}

		for i, has := range o.claimed {
			why := wanted.clash(has)
			if why == "" {
				continue
			}
			if i > 0 {
				return fmt.Errorf("it waits until network %s has removed what a former configuration left: %s", o.name, why)
			}
			if o.asked != nil && wanted.clash(*o.asked) == "" {
				return fmt.Errorf("it waits until network %s, which has another configuration now, has released this: %s", o.name, why)
			}
			return fmt.Errorf("it clashes with network %s, which was there first: %s", o.name, why)
		}
	}
	return nil
}

// knot returns the network that must release what it has claimed, because networks wait for each other in
// a cycle, or nil. The caller holds f.mu.
func (f *fleet) knot() (last *member) {
	waiting := slices.DeleteFunc(slices.Clone(f.members), func(m *member) bool { return m.asked == nil || len(m.claimed) == 0 })

	// Each turn removes networks for which no other one in waiting waits, and networks that wait for others, which would go on
	// to wait if a cycle were broken.
	for before := -1; before != len(waiting); {
		before = len(waiting)
		waiting = slices.DeleteFunc(waiting, func(m *member) bool {
			needed := slices.ContainsFunc(waiting, func(o *member) bool { return o != m && o.asked.clash(m.claimed[0]) != "" })
			return !needed || slices.ContainsFunc(f.members, func(o *member) bool { return o != m && m.waitsFor(o, slices.Contains(waiting, o)) })
		})
	}

	for _, m := range waiting { // the last name, so that all hosts choose the same network
		if last == nil || m.name > last.name {
			last = m
		}
	}
	return last
}

// waitsFor reports whether network o keeps m from getting what m asks for. releases is set if o releases what
// it has. Of two that ask for the same, the one with the first name gets it.
func (m *member) waitsFor(o *member, releases bool) bool {
	if releases {
		return o.name < m.name && m.asked.clash(*o.asked) != ""
	}
	return o.promised != nil && m.asked.clash(*o.promised) != "" || slices.ContainsFunc(o.claimed, func(c claims) bool { return m.asked.clash(c) != "" })
}

// others implements network.Config.Others.
func (m *member) others() (prefixes []netip.Prefix, moved <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.members {
		if o != m {
			prefixes = append(prefixes, o.prefixes()...)
		}
	}
	return prefix.Merge(prefixes), m.moved.Changed()
}

// prefixes returns as few prefixes as possible. The caller holds m.mu.
func (m *member) prefixes() []netip.Prefix {
	var all []netip.Prefix
	if m.promised != nil {
		all = append(all, m.promised.networks...)
	}
	for _, c := range m.claimed {
		all = append(all, c.networks...)
	}
	return prefix.Merge(all)
}

// announce wakes those who use others if m has other prefixes than before.
func (m *member) announce(before []netip.Prefix) {
	if !slices.Equal(before, m.prefixes()) {
		m.moved.Send()
	}
}
