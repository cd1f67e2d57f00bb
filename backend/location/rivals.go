// SPDX-License-Identifier: Apache-2.0

package location

import (
	"fmt"
	"maps"
	"slices"

	"github.com/flanneld/flanneld/subnet"
)

// candidate is what a host publishes for the backend inside of the location of this host.
type candidate struct {
	lease      *subnet.Lease // as that backend uses it; nil if it cannot be used
	identities []string      // identities that only one host may have, such as VTEP MACs
	why        string        // reason why the lease cannot be used; empty if it can, or if the host is not at the location
}

// rivals finds hosts with the same identity for the backend inside, such as a VTEP MAC. The backend
// inside serves none of these hosts, because it could send packets for one to another. The backend
// between locations continues to serve them, because it does not use these identities.
type rivals struct {
	candidates map[string]candidate // by key of the lease
	holders    map[string][]string  // keys by identity
}

func newRivals() rivals {
	return rivals{map[string]candidate{}, map[string][]string{}}
}

// change examines these keys again. It returns all keys for which decide may now return another result.
func (r *rivals) change(keys []string, examine func(key string) candidate) []string {
	affected := map[string]struct{}{}
	for _, key := range keys {
		affected[key] = struct{}{}
		r.addRivals(affected, key)
		r.set(key, examine(key))
		r.addRivals(affected, key)
	}
	return slices.Collect(maps.Keys(affected))
}

// addRivals adds the keys of all hosts that have an identity in common with a host, including its own.
func (r *rivals) addRivals(to map[string]struct{}, key string) {
	for _, id := range r.candidates[key].identities {
		for _, other := range r.holders[id] {
			to[other] = struct{}{}
		}
	}
}

// set replaces the candidate of a host. A zero candidate removes the host.
func (r *rivals) set(key string, c candidate) {
	for _, id := range r.candidates[key].identities {
		r.holders[id] = slices.DeleteFunc(r.holders[id], func(k string) bool { return k == key })
		if len(r.holders[id]) == 0 {
			delete(r.holders, id)
		}
	}
	delete(r.candidates, key)

	if c.lease == nil && c.why == "" && len(c.identities) == 0 {
		return
	}

	r.candidates[key] = c
	for _, id := range c.identities {
		r.holders[id] = append(r.holders[id], key)
	}
}

// decide returns the lease with which the backend inside serves a host, or nil if the backend between
// locations serves it. why says what keeps a host at this location from being served inside.
func (r *rivals) decide(key string) (_ *subnet.Lease, why string) {
	c := r.candidates[key]
	for _, id := range c.identities {
		for _, other := range slices.Sorted(slices.Values(r.holders[id])) {
			if other != key {
				return nil, fmt.Sprintf("its %s is also that of %s", id, other)
			}
		}
	}
	return c.lease, c.why
}
