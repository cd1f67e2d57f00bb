// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// roster records what each of several networks claims on this host, in the order in which they
// have joined. It is safe for concurrent use.
type roster struct {
	mu      sync.Mutex
	entries []*entry
	moved   wait.Broadcast // sent when the prefixes of a network change
}

type entry struct {
	name     string
	promised *claims  // claims of the admitted configuration; nil if there is none
	wanted   *claims  // claims of the configuration that was refused because of another network; nil if there is none
	claimed  []claims // claims of the configuration in use, and then of former ones that have left something on this host
}

func newRoster() *roster { return &roster{} }

// join adds a network, unless it is there already.
func (r *roster) join(name string) { r.change(name, func(*entry) {}) }

// promise records what a network may begin to use, instead of an earlier promise. If another network has
// claimed or was promised a part of it, promise only records what was wanted.
func (r *roster) promise(name string, wanted claims) (err error) {
	r.change(name, func(e *entry) {
		if err = r.clash(name, wanted); err != nil {
			e.wanted = &wanted
			return
		}
		e.promised = &wanted
		e.wanted = nil
	})
	return err
}

// knot returns the network that must release what it has claimed, because networks wait for each other in
// a cycle, or "".
func (r *roster) knot() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var waiting []*entry
	for _, e := range r.entries {
		if e.wanted != nil && len(e.claimed) > 0 {
			waiting = append(waiting, e)
		}
	}

	// Each turn removes networks for which no other one in waiting waits, and networks that wait for others, which would go on
	// to wait if a cycle were broken.
	for before := -1; before != len(waiting); {
		before = len(waiting)
		waiting = slices.DeleteFunc(waiting, func(e *entry) bool {
			needed := slices.ContainsFunc(waiting, func(o *entry) bool { return o != e && o.wanted.clash(e.claimed[0]) != "" })
			return !needed || slices.ContainsFunc(r.entries, func(o *entry) bool { return o != e && e.waitsFor(o, slices.Contains(waiting, o)) })
		})
	}

	name := "" // the last one, so that all hosts choose the same network
	for _, e := range waiting {
		name = max(name, e.name)
	}
	return name
}

// waitsFor reports whether network o keeps e from getting what e wants. releases is set if o releases what
// it has. Of two that want the same, the one with the first name gets it.
func (e *entry) waitsFor(o *entry, releases bool) bool {
	if releases {
		return o.name < e.name && e.wanted.clash(*o.wanted) != ""
	}
	return o.promised != nil && e.wanted.clash(*o.promised) != "" || slices.ContainsFunc(o.claimed, func(c claims) bool { return e.wanted.clash(c) != "" })
}

func (r *roster) withdraw(name string) {
	r.change(name, func(e *entry) {
		e.promised = nil
		e.wanted = nil
	})
}

// begin turns the promise to a network into a claim.
func (r *roster) begin(name string) {
	r.change(name, func(e *entry) {
		if p := e.promised; p != nil && !slices.ContainsFunc(e.claimed, func(c claims) bool { return reflect.DeepEqual(c, *p) }) {
			e.claimed = slices.Insert(e.claimed, 0, *p)
		}
	})
}

// recall records what a network has claimed in the last process, as in entry.claimed.
func (r *roster) recall(name string, all ...claims) {
	r.change(name, func(e *entry) { e.claimed = all })
}

// claim replaces what a network has claimed. It returns an error if another network has a part of what is
// new. A promise may have been withdrawn after the network began to prepare the configuration.
func (r *roster) claim(name string, all ...claims) (err error) {
	r.change(name, func(e *entry) {
		has := slices.Clone(e.claimed)
		if e.promised != nil {
			has = append(has, *e.promised)
		}
		for _, c := range all {
			if err = r.clash(name, c.beyond(has)); err != nil {
				return
			}
		}
		e.claimed = all
	})
	return err
}

// others returns the prefixes of all other networks, and a channel that is closed after a change.
func (r *roster) others(name string) (prefixes []netip.Prefix, moved <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.entries {
		if e.name != name {
			prefixes = append(prefixes, e.prefixes()...)
		}
	}
	return prefix.Merge(prefixes), r.moved.Changed()
}

// change calls f with the entry of a network, which it adds if there is none.
func (r *roster) change(name string, f func(*entry)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.entries, func(e *entry) bool { return e.name == name })
	if i < 0 {
		i = len(r.entries)
		r.entries = append(r.entries, &entry{name: name})
	}

	e := r.entries[i]
	before := e.prefixes()
	f(e)
	if !slices.Equal(before, e.prefixes()) {
		r.moved.Send()
	}
}

// clash says which other network has claimed or was promised a part of what the network wants. The caller
// holds r.mu.
func (r *roster) clash(name string, wanted claims) error {
	for _, e := range r.entries {
		if e.name == name {
			continue
		}
		if e.promised != nil {
			if why := wanted.clash(*e.promised); why != "" {
				return fmt.Errorf("it clashes with network %s, which was there first: %s", e.name, why)
			}
		}

		for i, has := range e.claimed {
			why := wanted.clash(has)
			if why == "" {
				continue
			}
			if i > 0 {
				return fmt.Errorf("it waits until network %s has removed what a former configuration left: %s", e.name, why)
			}
			if e.wanted != nil && wanted.clash(*e.wanted) == "" {
				return fmt.Errorf("it waits until network %s, which has another configuration now, has released this: %s", e.name, why)
			}
			return fmt.Errorf("it clashes with network %s, which was there first: %s", e.name, why)
		}
	}
	return nil
}

// prefixes returns as few prefixes as possible.
func (e *entry) prefixes() []netip.Prefix {
	var all []netip.Prefix
	if e.promised != nil {
		all = append(all, e.promised.networks...)
	}
	for _, c := range e.claimed {
		all = append(all, c.networks...)
	}
	return prefix.Merge(all)
}
