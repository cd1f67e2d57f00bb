// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestNewestEntry writes and deletes leases at random. newestEntry must return the entry with the highest
// revision.
func TestNewestEntry(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, seed))
		c := leaseCache{entries: map[string]*entry{}}
		for revision := int64(1); revision < 2000; revision++ {
			key := fmt.Sprint(r.IntN(20))
			if r.IntN(2) == 0 {
				c.written(&entry{key: key, modRevision: revision})
			} else {
				delete(c.entries, key)
			}
			if r.IntN(3) == 0 {
				continue
			}
			var want int64
			for _, e := range c.entries {
				want = max(want, e.modRevision)
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
