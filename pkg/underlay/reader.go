// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/wait"
)

// Reader lets several networks share one subscription to changes, and share reads of the facts about
// the host. Their options must select the interface in the same way. A Reader must be used in one
// network namespace only.
type Reader struct {
	facts map[string]*wait.Batch[gathered] // shared reads, see batch; guarded by mu

	mu      sync.Mutex
	changes wait.Shared
}

// gathered is the result of a read of the facts.
type gathered struct {
	facts Facts
	err   error
	cost  time.Duration // CPU time
}

// NewReader returns a Reader.
func NewReader() *Reader {
	return &Reader{facts: map[string]*wait.Batch[gathered]{}}
}

// batch returns the read that networks with this key share. The time between two such reads is at least rest.
func (r *Reader) batch(key string, rest time.Duration) *wait.Batch[gathered] {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, known := r.facts[key]
	if !known {
		b = &wait.Batch[gathered]{Rest: rest}
		r.facts[key] = b
	}
	return b
}
