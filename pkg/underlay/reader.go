// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/wait"
)

// Reader reads the facts about the host for several networks. These share one subscription to
// changes, and share reads. Their options must select the interface in the same way. A Reader must
// be used in one network namespace only. A nil Reader shares nothing.
type Reader struct {
	facts map[string]*wait.Batch[gathered] // shared reads, by families and rest; guarded by mu

	mu      sync.Mutex
	changes wait.Shared
}

// gathered is the result of Gather.
type gathered struct {
	facts Facts
	err   error
	cost  time.Duration // CPU time
}

// NewReader returns a Reader.
func NewReader() *Reader {
	return &Reader{facts: map[string]*wait.Batch[gathered]{}}
}

// gather calls Gather. Several callers may get the same Facts, so they must not change them. The time
// between two reads with the same rest is at least rest, unless r is nil.
func (r *Reader) gather(ctx context.Context, o Options, rest time.Duration) gathered {
	read := func(ctx context.Context) gathered {
		start := spent()
		f, err := Gather(ctx, o)
		return gathered{f, err, spent() - start}
	}
	if r == nil {
		return read(ctx)
	}
	r.mu.Lock()
	key := fmt.Sprint(o.Families, rest)
	b, known := r.facts[key]
	if !known {
		b = &wait.Batch[gathered]{Rest: rest}
		r.facts[key] = b
	}
	r.mu.Unlock()
	return b.Do(ctx, read)
}

// subscribe returns a channel that becomes readable after a change of anything that Gather
// reads. No change after the return of subscribe is missed. stop ends the subscription.
func (r *Reader) subscribe(o Options) (changed <-chan struct{}, stop func(), err error) {
	changes := &wait.Shared{}
	if r != nil {
		changes = &r.changes
	}
	own, _, err := changes.Join(func(wake func()) (stop func(), err error) { return subscribe(o, wake) })
	if err != nil {
		return nil, nil, err
	}
	return own, func() { changes.Leave(own) }, nil
}
