// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestNewestEntry writes, deletes and retains leases at random. newestEntry must return
// the entry with the highest revision of all that are not retained.
func TestNewestEntry(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, seed))
		c := leaseCache{entries: map[string]*entry{}, gracePeriod: gracePeriod{expiring: map[string]struct{}{}}}
		for revision := int64(1); revision < 2000; revision++ {
			key := fmt.Sprint(r.IntN(20))
			switch r.IntN(5) {
			case 0, 1:
				c.written(&entry{key: key, modRevision: revision})
				delete(c.expiring, key)
			case 2, 3:
				delete(c.entries, key)
				delete(c.expiring, key)
			default:
				if c.entries[key] != nil {
					c.expiring[key] = struct{}{}
				}
			}
			if r.IntN(3) == 0 {
				continue
			}
			var want int64
			for key, e := range c.entries {
				if _, expiring := c.expiring[key]; !expiring {
					want = max(want, e.modRevision)
				}
			}
			var got int64
			if newest := c.newestEntry(); newest != nil {
				got = newest.modRevision
			}
			if got != want {
				t.Fatalf("seed %d: the newest entry is of revision %d, want %d", seed, got, want)
			}
		}
	}
}
