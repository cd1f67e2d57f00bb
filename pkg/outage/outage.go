// Package outage tells a remote service that is away from one that is there,
// for those who talk to it and retry.
package outage

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Failure is an error of the service, or of the way to it. Other errors come
// from a service that answers.
type Failure interface {
	error
	// Kind is a word or two. Another kind is worth another line in the log.
	Kind() string
}

// Tracker follows several activities that use one service, which is there if
// none of them fails. It logs and reports changes only. It is safe for
// concurrent use.
type Tracker struct {
	name     string
	onStatus func(error)

	mu      sync.Mutex
	failing map[string]bool
	known   bool     // onStatus was called
	kinds   []string // of the errors logged since the service was usable last
}

// New returns a tracker for the service called name. onStatus is told when it
// becomes unusable, with the reason, and usable again, with nil; it may be nil,
// and must not call the tracker.
func New(name string, onStatus func(error)) *Tracker {
	if onStatus == nil {
		onStatus = func(error) {}
	}
	return &Tracker{name: name, onStatus: onStatus, failing: map[string]bool{}}
}

// Report takes the outcome of an activity in. What came of the end of ctx is
// no outcome.
func (t *Tracker) Report(ctx context.Context, activity string, err error) {
	if ctx.Err() != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	log := klog.FromContext(ctx)
	if failure, ok := errors.AsType[Failure](err); ok {
		t.failing[activity] = true
		if !slices.Contains(t.kinds, failure.Kind()) { // they may alternate
			t.kinds = append(t.kinds, failure.Kind())
			log.Error(err, t.name+" is not usable, retrying")
			t.tell(err)
		}
		return
	}
	delete(t.failing, activity)
	switch {
	case len(t.failing) > 0:
	case t.kinds != nil:
		t.kinds = nil
		log.Info(t.name + " is usable again")
		t.tell(nil)
	case !t.known:
		t.tell(nil)
	}
}

// Forget drops an activity that has ended.
func (t *Tracker) Forget(activity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.failing, activity)
}

func (t *Tracker) tell(err error) {
	t.known = true
	t.onStatus(err)
}

// Backoff is a pause that doubles from Least to Most each time, spread by half.
type Backoff struct {
	Least, Most time.Duration

	next time.Duration
}

// Reset makes the next pause the least again.
func (b *Backoff) Reset() { b.next = 0 }

// Wait blocks for the next pause, and no less than atLeast. Its only error is
// that of ctx.
func (b *Backoff) Wait(ctx context.Context, atLeast time.Duration) error {
	b.next = min(max(b.next, b.Least), b.Most)
	timer := time.NewTimer(atLeast + b.next/2 + rand.N(b.next))
	defer timer.Stop()
	b.next *= 2
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
