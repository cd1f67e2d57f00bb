// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// resumption is a session on the last known state, or the attempt to start one.
type resumption struct {
	// endTries prevents new attempts and waits for one in progress.
	endTries func()
	// stop ends the session or the attempt, and waits for its end.
	stop func()
}

// absence is how long a host must lack its external interface before the last known state is used
// without it. A clone of another host's disk usually has its own address earlier, and so does not give
// pods the subnet of the other host.
const absence = 5 * time.Second

// resume starts a session on the last known state and lets it run until it is stopped. It
// does so only if the state belongs to this host and its lease has not expired. Pods then
// keep their network while the store is unavailable. resume returns after the first
// attempt. If that fails, for example because an address is missing at boot, a goroutine
// repeats it. If the external interface is missing for longer, the session serves only the pods of
// this host until the interface is there. The session follows the external interface by work, and keeps its state in
// the state store.
func (r *runner) resume(ctx context.Context) *resumption {
	last := r.past
	if len(last.Own.Endpoints) == 0 || errors.Is(last.Usable(time.Now()), lastknown.ErrExpired) {
		return &resumption{endTries: func() {}, stop: func() {}}
	}
	choice := r.underlayOptions(last.Config, last)
	ctx, cancel := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancel(ctx)
	tried := make(chan struct{})
	decided := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s, err := r.recall(ctx, waiting, last, choice, sync.OnceFunc(func() { close(tried) }))
		close(decided)
		if err != nil { // the start was cancelled, or the lease has expired
			return
		}
		klog.FromContext(ctx).Info("going on from the last known state until the store answers", "lease", last.Own.Key)
		r.carryOn(ctx, s, choice)
	})

	<-tried
	return &resumption{
		endTries: func() {
			giveUp()
			<-decided
		},
		stop: func() {
			cancel()
			wg.Wait()
		},
	}
}

// recall starts a session on the last known state, which lasts until ctx ends. It repeats
// the start until waiting ends or the lease expires, and calls tried after each attempt.
func (r *runner) recall(ctx, waiting context.Context, last lastknown.State, choice underlay.Options, tried func()) (s *session, err error) {
	begin := time.Now()
	err = retry(waiting, "the last known state cannot be used yet", func() (err error) {
		defer tried()
		s, err = r.serveLast(ctx, last, choice, time.Since(begin) >= absence)
		return err
	})
	return s, err
}

// serveLast starts a session on the last known state, if the state belongs to this host. If there is no
// external interface and without is set, the session serves only the pods of this host.
func (r *runner) serveLast(ctx context.Context, last lastknown.State, choice underlay.Options, without bool) (*session, error) {
	if err := last.Usable(time.Now()); err != nil {
		return nil, err
	}
	iface, err := r.chooseUplink(ctx, choice, 0)
	there := err == nil
	if there {
		err = ofHost(last, iface)
	}
	if err != nil {
		// Another interface than usual may be there, or the usual one with another address.
		if !without || there && !hasHardware(last.Interface.Hardware) {
			return nil, err
		}
		klog.FromContext(ctx).Error(err, "only the pods of this host have a network until there is an external interface")
		iface = last.Interface
		iface.Index = 0
	}
	last.Interface = iface
	last.Recalled = true
	env := r.env(iface, last.Config)
	env.Recalled = true
	be, _, err := r.catalog.New(env)
	if err != nil {
		return nil, err
	}
	last.Former = r.leftBehind(last, be)
	return r.serve(ctx, be, 0, func(now *lastknown.State) { *now = last })
}

// ofHost returns an error unless last is surely the state of the host that has interface now. Cloned hosts
// have the same disk, but other addresses.
func ofHost(last lastknown.State, now underlay.Interface) error {
	if !lastknown.SameHost(last.Interface, now) {
		return fmt.Errorf("it is of a host with %v, this one has %v", describe(last.Interface), describe(now))
	}
	return nil
}

// carryOn runs s without the store until ctx ends, and then stops the session that is present by then.
func (r *runner) carryOn(ctx context.Context, s *session, choice underlay.Options) {
	changed := make(chan underlay.Interface, 1)
	defer r.stopServing()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.watchInterface(ctx, choice, s.begin.Load().Interface, changed); err != nil {
			klog.FromContext(ctx).Error(err, "cannot follow the external interface until the store answers")
		}
	})
	wg.Go(func() { _, _, _ = r.work(ctx, ctx, unanswered{r.store}, s, changed) }) // only the store can fail
	wg.Wait()
}

// unanswered is a store that has not answered yet. Its calls wait until ctx ends.
type unanswered struct{ Store }

// Watch implements subnet.Manager.
func (unanswered) Watch(ctx context.Context, _ func(subnet.Update)) error {
	<-ctx.Done()
	return ctx.Err()
}

// Acquire implements subnet.Manager.
func (unanswered) Acquire(ctx context.Context, _ subnet.Config, _ subnet.Claim) (subnet.Lease, error) {
	<-ctx.Done()
	return subnet.Lease{}, ctx.Err()
}

// unconnected is the network of a host whose external interface is not there yet. It serves the pods of
// this host: the traffic rules and the subnet file need no peers. It does not change the kernel's objects,
// which an earlier process may have left.
type unconnected struct{ mtu int }

// unconnectedMTU returns the MTU that the network of be has as soon as interface i is there.
func unconnectedMTU(be backend.Backend, i underlay.Interface) int {
	if sized, ok := be.(backend.Sized); ok {
		return sized.MTU()
	}
	return i.MTU
}

// MTU implements backend.Network.
func (n unconnected) MTU() int { return n.mtu }

// Check implements backend.Network.
func (unconnected) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Sync implements backend.Network.
func (unconnected) Sync(context.Context, backend.Set) (backend.Outcome, error) {
	return backend.Outcome{}, nil
}

// Changed implements backend.Network.
func (unconnected) Changed() <-chan struct{} { return nil }

// Close implements backend.Network.
func (unconnected) Close() error { return nil }
