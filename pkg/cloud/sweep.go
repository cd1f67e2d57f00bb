// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/wait"
)

// A route without a lease stays for a grace period, because the lease of a host that has just
// started may arrive here later than its route. Each host multiplies the period by a random number
// from 1 to 3, so that usually only one host makes the calls.
const (
	// grace is longer than the time after which a store that sends nothing counts as
	// disconnected, which is 12 minutes.
	grace = 15 * time.Minute
	// mostLostGrace limits the grace period of a lost route, because this carries no packets.
	mostLostGrace = time.Minute
)

// A comparison puts the own routes before it removes others. It can put them again only after all removals, so the
// removals of one comparison are limited by number and time.
const (
	mostRemovals = 20 // routes without a lease that one comparison looks at
	removalTime  = time.Minute
)

// mostLook is the longest pause between two looks at the target of a route that has no lease, but must
// stay because of its target. The pause begins with the resync period and doubles, because a look may take a
// call for each target, and such routes may stay for years.
const mostLook = 6 * time.Hour

// sweeper removes the routes of hosts that are gone.
type sweeper struct {
	KeeperConfig
	leases *leases
	factor float64         // multiplies the grace periods
	idle   map[Route]*idle // routes that no lease needs
}

func newSweeper(c KeeperConfig, l *leases) sweeper {
	return sweeper{KeeperConfig: c, leases: l, factor: 1 + 2*rand.Float64()}
}

// idle is the state of a route that no lease needs.
type idle struct {
	since  time.Time // when this host found that no lease needs the route
	looked time.Time // the last look at the target of the route
	next   time.Time // the earliest time of the next look
	pause  wait.Backoff
}

// sweep removes the routes of hosts that are gone. It removes a route only if the route has had no lease for the
// grace period, and the store has been connected for that time. again is the time after which the next comparison
// should begin, because the grace period of a route ends or many routes are left; 0 if there is no such reason.
func (s *sweeper) sweep(ctx context.Context, tables []Table) (again time.Duration, err error) {
	hosts, known := s.leases.hosts()
	if known.IsZero() {
		s.idle = nil
		return 0, nil
	}
	now, before := time.Now(), s.idle
	s.idle = map[Route]*idle{}
	var due []Route
	for _, r := range s.leaseless(tables, hosts) {
		one := before[r]
		if one == nil || one.since.Before(known) {
			one = &idle{since: now, pause: wait.Backoff{Least: s.Resync, Most: max(mostLook, s.Resync)}}
		}
		s.idle[r] = one
		if rest := s.grace(r) - now.Sub(one.since); rest > 0 {
			again = earlier(again, rest)
		} else if !one.next.After(now) { // no comparison is made only for the next look
			due = append(due, r)
		}
	}
	if len(due) == 0 {
		return again, nil
	}
	// Begin with the routes that were looked at longest ago. Otherwise routes whose removal fails would
	// keep the others from being removed.
	slices.SortStableFunc(due, func(a, b Route) int { return s.idle[a].looked.Compare(s.idle[b].looked) })
	more, err := s.remove(ctx, tables, due)
	if more {
		again = earlier(again, min(leastConfirm, s.Resync))
	}
	return again, err
}

// grace returns the time for which r stays without a lease.
func (s *sweeper) grace(r Route) time.Duration {
	least := grace
	if r.Lost {
		least = min(s.Resync, mostLostGrace)
	}
	return time.Duration(float64(least) * s.factor)
}

// leaseless returns the routes that no lease of hosts needs. It returns only routes with the prefix length
// of this host's subnet of the same family, because others are probably routes of an operator.
func (s *sweeper) leaseless(tables []Table, hosts []Host) []Route {
	routes := unclaimed(tables, s.Networks, func(dst netip.Prefix) bool { return leased(hosts, dst) })
	return slices.DeleteFunc(routes, func(r Route) bool {
		return !slices.ContainsFunc(s.Own.Subnets, func(own netip.Prefix) bool {
			return own.Addr().BitLen() == r.Dst.Addr().BitLen() && own.Bits() == r.Dst.Bits()
		})
	})
}

// leased reports whether a host has a subnet that overlaps dst.
func leased(hosts []Host, dst netip.Prefix) bool {
	return slices.ContainsFunc(hosts, func(h Host) bool { return slices.ContainsFunc(h.Subnets, dst.Overlaps) })
}

// remove removes those routes in due that are lost, or that lead to a host without a lease. Routes to unknown
// targets stay. remove also removes the routes from tables. more is set if remove has not looked at all routes in
// due, and the next comparison should begin soon. It is not set if a call has failed.
func (s *sweeper) remove(ctx context.Context, tables []Table, due []Route) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, removalTime)
	defer cancel()
	if len(due) > mostRemovals {
		due, more = due[:mostRemovals], true
	}
	addresses, err := s.addresses(ctx, due)
	if err != nil {
		return false, fmt.Errorf("find the hosts of routes without a lease: %w", err)
	}
	var errs []error
	for _, r := range due {
		hosts, known := s.leases.hosts() // again for each route, because a call takes time
		if known.IsZero() {
			break
		}
		if ctx.Err() != nil {
			more = true
			break
		}
		one := s.idle[r]
		one.looked = time.Now()
		present := func(a netip.Addr) bool {
			return slices.ContainsFunc(hosts, func(h Host) bool { return slices.Contains(h.Addresses, a) })
		}
		if leased(hosts, r.Dst) || len(hostless([]Route{r}, addresses, present)) == 0 {
			one.next = one.looked.Add(one.pause.Next())
			continue
		}
		if err := s.Cloud.Remove(ctx, r); err != nil {
			errs = append(errs, fmt.Errorf("remove route %s: %w", r, err))
			if Transient(err) {
				break // the next call would fail as well
			}
			continue
		}
		klog.FromContext(ctx).Info("removed a route of the cloud whose lease and host are gone", "route", r.String())
		delete(s.idle, r)
		for i := range tables {
			tables[i].Routes = slices.DeleteFunc(tables[i].Routes, func(have Route) bool { return have == r })
		}
	}
	return more && len(errs) == 0, oneline.Join(errs...)
}

// addresses returns the addresses of the hosts to which routes lead, by target. It leaves out lost routes.
func (s *sweeper) addresses(ctx context.Context, routes []Route) (map[string][]netip.Addr, error) {
	var targets []string
	for _, r := range routes {
		if !r.Lost && !slices.Contains(targets, r.Target) {
			targets = append(targets, r.Target)
		}
	}
	if len(targets) == 0 {
		return nil, nil
	}
	return s.Cloud.Addresses(ctx, targets)
}

// earlier returns the shorter one of two times to wait. The value 0 means that there is nothing to wait for.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
