// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

const (
	lookupTimeout = 5 * time.Second
	// lookupRate and lookupsAtOnce limit the load of all names together.
	lookupRate    = 10 // per second
	lookupsAtOnce = 4
	// foundPause is the shortest time between two passes because of new addresses. Each pass reads the devices.
	foundPause = time.Second
)

// lookups looks up names in the background, so that no pass waits for one.
type lookups struct {
	*backend.Notifier
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	slots  *semaphore.Weighted
	limit  *rate.Limiter
	found  wait.Signal

	mu      sync.Mutex
	answers map[string][]netip.Addr // of lookups that have ended since the last call of take; nil if one failed
}

func newLookups(n *backend.Notifier, lookup func(ctx context.Context, host string) ([]netip.Addr, error)) *lookups {
	l := &lookups{
		Notifier: n, lookup: lookup, slots: semaphore.NewWeighted(lookupsAtOnce), limit: rate.NewLimiter(lookupRate, lookupsAtOnce),
		found: wait.NewSignal(), answers: map[string][]netip.Addr{},
	}

	n.Go(func(ctx context.Context) {
		for wait.For(ctx, foundPause) == nil {
			select {
			case <-l.found:
				n.Notify()
			case <-ctx.Done():
			}
		}
	})
	return l
}

// start looks up a name, and wants a pass if it has other addresses than the known ones.
func (l *lookups) start(host string, known []netip.Addr) {
	l.Go(func(ctx context.Context) {
		if l.slots.Acquire(ctx, 1) != nil {
			return
		}
		defer l.slots.Release(1)
		if l.limit.Wait(ctx) != nil {
			return
		}

		ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
		defer cancel()
		addrs, _ := l.lookup(ctx, host) // without an answer, the known addresses stay
		addrs = discovery.Usable(addrs)

		l.mu.Lock()
		defer l.mu.Unlock()
		l.answers[host] = addrs
		if len(addrs) > 0 && !slices.Equal(addrs, known) {
			l.found.Send()
		}
	})
}

func (l *lookups) take() map[string][]netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.answers
	l.answers = map[string][]netip.Addr{}
	return all
}

// lookup returns host itself if that is an address.
func lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}
