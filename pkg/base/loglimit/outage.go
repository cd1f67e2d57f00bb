// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"context"
	"errors"
	"slices"
	"sync"

	"k8s.io/klog/v2"
)

// Failure is an error of the service or of the connection to it. Any other error comes
// from a service that answers, and so does not count as an outage.
type Failure interface {
	error
	// Kind names the failure in one or two words. During an outage the tracker logs each
	// kind once.
	Kind() string
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

// Report records the outcome of an activity. It ignores the outcome if ctx has ended,
// because the end of ctx may be the cause of the error.
func (t *Outage) Report(ctx context.Context, activity string, err error) {
	if ctx.Err() != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	log := klog.FromContext(ctx)
	if failure, ok := errors.AsType[Failure](err); ok {
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
