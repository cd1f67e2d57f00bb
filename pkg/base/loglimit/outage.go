// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Failure is an error of the service or of the connection to it, after which a caller tries again. Any other error
// comes from a service that answers, and so does not count as an outage.
type Failure interface {
	error
	// Kind names the failure in one or two words. During an outage the tracker logs each
	// kind once. It ignores a failure without a name.
	Kind() string
	// RetryAfter returns the time for which the service has asked to wait, usually zero.
	RetryAfter() time.Duration
}

// Again is a failure that is no fault of the service: of a connection that was closed on purpose, or of a request that
// has to be made in another way.
type Again struct {
	Text     string
	Answered bool // whether the service has answered, which ends an outage
}

// Error implements error.
func (a Again) Error() string { return a.Text }

// Kind implements Failure.
func (Again) Kind() string { return "" }

// RetryAfter implements Failure.
func (Again) RetryAfter() time.Duration { return 0 }

// Passes reports whether err is a Failure.
func Passes(err error) bool {
	_, ok := errors.AsType[Failure](err)
	return ok
}

// Outage follows several activities that use one service. The service counts as usable
// while none of them fails. Outage logs and reports only changes. It is safe for
// concurrent use.
type Outage struct {
	name     string
	onStatus func(error)

	mu      sync.Mutex
	failing map[string]bool
	known   bool     // whether onStatus was called before
	kinds   []string // kinds of the errors logged since the service was last usable
}

// NewOutage returns a tracker for the service called name. The tracker calls onStatus with nil
// at the first success, and whenever the service is usable again. It calls onStatus with
// the reason when the service becomes unusable, and for each new kind of failure after
// that. onStatus may be nil. It must not call the tracker.
func NewOutage(name string, onStatus func(error)) *Outage {
	if onStatus == nil {
		onStatus = func(error) {}
	}
	return &Outage{name: name, onStatus: onStatus, failing: map[string]bool{}}
}

// Retry runs f until it succeeds, or fails with an error that is no Failure, or ctx ends. It returns
// the last error of f, or the error of ctx. It reports each result as the outcome of the activity.
func (t *Outage) Retry(ctx context.Context, activity string, b *wait.Backoff, f func() error) error {
	defer t.Forget(activity)
	for {
		err := f()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		t.Report(ctx, activity, err)
		failure, passes := errors.AsType[Failure](err)
		if !passes {
			return err
		}
		if err := b.Wait(ctx, failure.RetryAfter()); err != nil {
			return err
		}
	}
}

// Report records the outcome of an activity. It ignores the outcome if ctx or that of the error has ended,
// because that may be the cause of the error, and a Failure without a Kind unless the service has answered.
func (t *Outage) Report(ctx context.Context, activity string, err error) {
	failure, failed := errors.AsType[Failure](err)
	if again, ok := errors.AsType[Again](err); ok && again.Answered {
		failed = false
	}
	if ctx.Err() != nil || errors.Is(err, context.Canceled) || failed && failure.Kind() == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	log := klog.FromContext(ctx)
	if failed {
		t.failing[activity] = true
		if !slices.Contains(t.kinds, failure.Kind()) { // kinds may alternate
			t.kinds = append(t.kinds, failure.Kind())
			log.Error(err, t.name+" is not usable, retrying")
			t.notify(err)
		}
		return
	}

	delete(t.failing, activity)
	switch {
	case len(t.failing) > 0:
	case t.kinds != nil:
		t.kinds = nil
		log.Info(t.name + " is usable again")
		t.notify(nil)
	case !t.known:
		t.notify(nil)
	}
}

// Forget removes an activity that has ended, so that its last failure no longer counts. If
// no other activity fails, the next success counts as the end of the outage.
func (t *Outage) Forget(activity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.failing, activity)
}

func (t *Outage) notify(err error) {
	t.known = true
	t.onStatus(err)
}
