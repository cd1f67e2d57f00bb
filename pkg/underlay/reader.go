// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"context"
	"fmt"
	"sync"

	"github.com/flanneld/flanneld/pkg/wait"
)

// Reader reads the facts about the host for several networks, which all follow the same interfaces.
// They share one subscription to changes, and the reads that begin at the same time. The options
// that name an interface must be the same in all of them. A Reader is used in one network
// namespace. A nil Reader shares nothing.
type Reader struct {
	facts map[string]*wait.Batch[gathered] // by families; guarded by mu

	mu        sync.Mutex
	listeners map[wait.Signal]bool
	stop      func() // ends the subscription; nil if there is none
}

// gathered is the result of Gather.
type gathered struct {
	facts Facts
	err   error
}

// NewReader returns a Reader.
func NewReader() *Reader {
	return &Reader{facts: map[string]*wait.Batch[gathered]{}, listeners: map[wait.Signal]bool{}}
}

// gather does what Gather does. The Facts belong to several callers, who must not change them.
func (r *Reader) gather(ctx context.Context, o Options) (Facts, error) {
	if r == nil {
		return Gather(ctx, o)
	}
	r.mu.Lock()
	key := fmt.Sprint(o.Families)
	b, known := r.facts[key]
	if !known {
		b = &wait.Batch[gathered]{}
		r.facts[key] = b
	}
	r.mu.Unlock()
	g := b.Do(ctx, func(ctx context.Context) gathered {
		f, err := Gather(ctx, o)
		return gathered{f, err}
	})
	return g.facts, g.err
}

// subscribe returns a channel that becomes readable after a change of anything that Gather
// reads. No change after the return is missed. stop ends that.
func (r *Reader) subscribe(o Options) (changed <-chan struct{}, stop func(), err error) {
	own := wait.NewSignal()
	if r == nil {
		stop, err := subscribe(o, own.Send)
		return own, stop, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop == nil {
		if r.stop, err = subscribe(o, r.wake); err != nil {
			return nil, nil, err
		}
	}
	r.listeners[own] = true
	return own, func() { r.leave(own) }, nil
}

// wake wakes all listeners.
func (r *Reader) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range r.listeners {
		l.Send()
	}
}

// leave removes a listener. The last one ends the subscription.
func (r *Reader) leave(l wait.Signal) {
	r.mu.Lock()
	delete(r.listeners, l)
	var stop func()
	if len(r.listeners) == 0 {
		stop, r.stop = r.stop, nil
	}
	r.mu.Unlock()
	if stop != nil {
		stop() // it waits for wake
	}
}
