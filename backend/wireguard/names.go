// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/pkg/wait"
)

const (
	lookupTimeout = 5 * time.Second
	// While there is no session with a peer, its name is resolved again: first after leastLookupPause,
	// and then after longer and longer pauses, up to mostLookupPause.
	leastLookupPause = 30 * time.Second
	mostLookupPause  = 10 * time.Minute
	// lookupRate and lookups limit the load of all names together.
	lookupRate = 10 // per second
	lookups    = 4  // at the same time
	// foundPause is the shortest time between two calls of found. Each call makes the network read its devices.
	foundPause = time.Second
	// maxAddresses is the maximum number of addresses of a name that are used, for each family.
	maxAddresses = 4
)

// resolver finds the addresses of names in the background, so that no pass waits for a lookup.
type resolver struct {
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	found  func() // called when names have other addresses than before
	wake   wait.Signal
	limit  *rate.Limiter

	mu     sync.Mutex
	names  map[string]*name
	queue  []string  // names to resolve
	called time.Time // when found was called last, or will be called next
}

// name is a name with its addresses.
type name struct {
	addrs   []netip.Addr // sorted; the last good answer
	queued  bool
	next    time.Time // when it may be resolved again
	backoff wait.Backoff
}

func newResolver(lookup func(ctx context.Context, host string) ([]netip.Addr, error), found func()) *resolver {
	return &resolver{lookup: lookup, found: found, wake: wait.NewSignal(), limit: rate.NewLimiter(lookupRate, lookups), names: map[string]*name{}}
}

// addrs returns the known addresses of host, sorted; nil if there are none yet. The caller has no
// session with the host, so the known addresses may be out of date. That is why addrs also makes
// run resolve host again, unless host is in the queue or was resolved a short time ago.
func (r *resolver) addrs(host string) []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.names[host]
	if n == nil {
		n = &name{backoff: wait.Backoff{Least: leastLookupPause, Most: mostLookupPause}}
		r.names[host] = n
	}
	if now := time.Now(); !n.queued && now.After(n.next) {
		if now.Sub(n.next) > mostLookupPause { // addrs was not called for a long time, so there was a session
			n.backoff.Reset()
		}
		n.queued = true
		r.queue = append(r.queue, host)
		r.wake.Send()
	}
	return n.addrs
}

// retain forgets the names for which keep returns false.
func (r *resolver) retain(keep func(host string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for host := range r.names {
		if !keep(host) {
			delete(r.names, host)
		}
	}
	r.queue = slices.DeleteFunc(r.queue, func(host string) bool { return !keep(host) })
}

// run resolves names until ctx ends.
func (r *resolver) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	slots := make(chan struct{}, lookups)
	for {
		host, ok := r.pop()
		if !ok {
			select {
			case <-r.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		if r.limit.Wait(ctx) != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		running.Go(func() {
			defer func() { <-slots }()
			r.resolve(ctx, host)
		})
	}
}

// pop removes the next name from the queue and returns it. ok is false if the queue is empty.
func (r *resolver) pop() (host string, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return "", false
	}
	host, r.queue = r.queue[0], r.queue[1:]
	return host, true
}

// resolve resolves one name, stores its addresses, and calls tell if they have changed. If the
// lookup fails or has no result, the former addresses stay.
func (r *resolver) resolve(ctx context.Context, host string) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := r.lookup(ctx, host)
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.names[host]
	if n == nil { // retain has removed it
		return
	}
	n.queued, n.next = false, time.Now().Add(n.backoff.Next())
	if err != nil || len(addrs) == 0 {
		return
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	slices.SortFunc(addrs, netip.Addr.Compare) // servers change the order in their answers
	addrs = slices.Compact(addrs)
	six := slices.IndexFunc(addrs, netip.Addr.Is6) // IPv6 comes after all IPv4 addresses
	if six < 0 {
		six = len(addrs)
	}
	addrs = slices.Concat(addrs[:min(six, maxAddresses)], addrs[six:min(six+maxAddresses, len(addrs))])
	if !slices.Equal(addrs, n.addrs) {
		n.addrs = addrs
		r.tell()
	}
}

// tell calls found at once or, if foundPause has not passed since the last call of found, when it
// has passed. The caller holds r.mu.
func (r *resolver) tell() {
	now := time.Now()
	if r.called.After(now) { // a call is planned already
		return
	}
	if r.called = r.called.Add(foundPause); r.called.After(now) {
		time.AfterFunc(r.called.Sub(now), r.found)
		return
	}
	r.called = now
	r.found()
}

// resolve looks up the addresses of host, of both families. If host is an address, it returns that
// address.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}
