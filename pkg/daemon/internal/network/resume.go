// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// absence is how long a host must lack its external interface before the last known state is used
// without it. A clone of another host's disk usually has its own address earlier, and so does not give
// pods the subnet of the other host.
const absence = 5 * time.Second

// resume starts a session on the last known state and lets it run until stop is called. Pods then keep their network
// while the store is unavailable. resume returns after the first attempt. If that fails, for example because an address
// is missing at boot, a goroutine repeats it until the lease expires. If the external interface is missing for longer,
// the session serves only the pods of this host until the interface is there. endTries prevents new attempts and waits for
// one in progress. stop ends the session or the attempts, and waits for the end.
func (n *Network) resume(ctx context.Context, last lastknown.State) (endTries, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancel(ctx)
	tried := make(chan struct{})
	decided := make(chan struct{})
	over := make(chan struct{})
	go func() {
		defer close(over)
		begin := time.Now()
		first := sync.OnceFunc(func() { close(tried) })
		var s *session
		err := retry(waiting, "the last known state cannot be used yet", func() (err error) {
			defer first()
			s, err = n.serveLast(ctx, last, time.Since(begin) >= absence)
			return err
		})
		close(decided)
		if err != nil { // the start was cancelled, or the lease has expired
			return
		}

		defer n.stopServing()
		log := klog.FromContext(ctx)
		log.Info("going on from the last known state until the store answers", "lease", last.Own.Key)
		if err := n.follow(ctx, s); err != nil {
			log.Error(err, "cannot follow the external interface until the store answers")
			<-ctx.Done()
		}
	}()

	<-tried
	endTries = func() {
		giveUp()
		<-decided
	}
	stop = func() {
		cancel()
		<-over
	}
	return endTries, stop
}

// serveLast starts a session on the last known state, if the state belongs to this host. If there is no
// external interface and without is set, the session serves only the pods of this host.
func (n *Network) serveLast(ctx context.Context, last lastknown.State, without bool) (*session, error) {
	if err := last.Usable(time.Now()); err != nil {
		return nil, err
	}
	iface, err := n.chooseUplink(ctx, n.underlayOptions(last.Config, last.PublicIPs), 0)
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
	env := n.env(iface, last.Config)
	env.Recalled = true
	be, _, err := n.catalog.New(env)
	if err != nil {
		return nil, err
	}
	last.Former = n.leftBehind(last, be)
	return n.serve(ctx, be, func(now *lastknown.State) { *now = last })
}

// ofHost returns an error unless last is surely the state of the host that has interface now. Cloned hosts
// have the same disk, but other addresses.
func ofHost(last lastknown.State, now underlay.Interface) error {
	if !lastknown.SameHost(last.Interface, now) {
		return fmt.Errorf("it is of a host with %v, this one has %v", describe(last.Interface), describe(now))
	}
	return nil
}

// unconnected is the network of a host whose external interface is not there yet. It serves the pods of
// this host: the traffic rules and the subnet file need no peers. It does not change the kernel's objects,
// which an earlier process may have left.
type unconnected struct{}

// Check implements backend.Network.
func (unconnected) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Sync implements backend.Network.
func (unconnected) Sync(context.Context, backend.Set) (backend.Outcome, error) {
	return backend.Outcome{}, nil
}

// Report implements backend.Network.
func (unconnected) Report() backend.NetworkReport { return backend.NetworkReport{} }

// Changed implements backend.Network.
func (unconnected) Changed() <-chan struct{} { return nil }

// Close implements backend.Network.
func (unconnected) Close() error { return nil }
