// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/wait"
)

// leastConfirm is the first pause after a write before the tables are read again: a cloud may accept
// a call and show its result later. The pause grows while every comparison finds something to write.
// Otherwise two programs that want different routes would use up the calls that the cloud allows for
// all hosts together.
const leastConfirm = 5 * time.Second

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
// stay because of its target. The pause begins with the resync period and doubles: a look may take a call
// for each target, and such routes may stay for years.
const mostLook = 6 * time.Hour

// leastRest is the shortest pause between two comparisons of the routes to all hosts.
const leastRest = 2 * time.Second

// leastLasting is the first pause after an error that needs an operator. The pause doubles up to
// the resync period, because all hosts may have the same error and make calls.
const leastLasting = time.Second

// errUnanswered means that a route to a wanted destination leads to another host, and that the keeper
// leaves it. The keeper replaces such a route only while the store is connected and has told its
// leases, because the store may have given the subnet to that host.
var errUnanswered = errors.New("the store has not answered, and may have given the subnet to another host")

// joinError is an error of Cloud.Join. A host cannot write any route before Join succeeds.
type joinError struct{ error }

func (e *joinError) Unwrap() error { return e.error }

// Peers are the other hosts that have a lease.
type Peers struct {
	Hosts    []Host
	Complete bool // the store has answered: hosts that are not in Hosts are gone, unless Unreadable is set
	// Unreadable is set if the store has leases that cannot be read.
	Unreadable bool
}

// equal reports whether p and o are equal. The order of the hosts does not count.
func (p Peers) equal(o Peers) bool {
	sorted := func(hosts []Host) []string {
		names := make([]string, len(hosts))
		for i, h := range hosts {
			names[i] = fmt.Sprint(h)
		}
		slices.Sort(names)
		return names
	}
	return p.Complete == o.Complete && p.Unreadable == o.Unreadable && slices.Equal(sorted(p.Hosts), sorted(o.Hosts))
}

// KeeperConfig configures a Keeper. All fields are required except All and AtOnce.
type KeeperConfig struct {
	Cloud    Cloud
	Own      Host
	All      bool           // the keeper writes the routes to all hosts, and not only to this one
	Networks []netip.Prefix // removals are limited to routes in them
	Resync   time.Duration  // time between two comparisons if nothing happens
	AtOnce   int            // limit of calls of Cloud.Put at the same time; 0 means 1
	// Connected returns the time since which the store is connected; zero if it is not.
	Connected func() time.Time
	// Compared is called after each comparison, and when the report changes during a long one. It must
	// not block.
	Compared func()
}

// Keeper puts the routes to the own subnets, or to the subnets of all hosts, into the tables of a cloud.
// It removes the routes of hosts that are gone.
type Keeper struct {
	KeeperConfig
	loop    *loop.Loop
	first   chan struct{}   // closed after the first comparison
	factor  float64         // multiplies the grace periods
	confirm wait.Backoff    // pauses after writes, before the tables are read again
	lasting wait.Backoff    // pauses after errors that are not transient
	idle    map[Route]*idle // routes that no lease needs
	right   map[Route]bool  // wanted routes that the tables had when they were last read
	targets targets         // of other hosts

	mu            sync.Mutex
	peers         Peers
	read          bool      // a comparison has used peers
	completeSince time.Time // since when peers has contained all leases of the store; zero if it does not
	report        Report
	repaired      int   // routes repaired since the last call of Last
	err           error // of the routes to this host, from the last comparison
}

// idle is the state of a route that no lease needs.
type idle struct {
	since  time.Time // when this host found that no lease needs the route
	looked time.Time // the last look at the target of the route
	next   time.Time // the earliest time of the next look
	pause  wait.Backoff
}

// NewKeeper returns a Keeper. The caller runs it.
func NewKeeper(c KeeperConfig) *Keeper {
	k := &Keeper{KeeperConfig: c, first: make(chan struct{}), factor: 1 + 2*rand.Float64()}
	k.report.Writer, k.report.Leading = k.writer(), k.All
	k.confirm = wait.Backoff{Least: min(leastConfirm, c.Resync), Most: c.Resync}
	k.lasting = wait.Backoff{Least: min(leastLasting, c.Resync), Most: c.Resync}
	done := sync.OnceFunc(func() { close(k.first) })
	k.loop = loop.New(c.Resync, func(ctx context.Context) error {
		again, own, all := k.compare(ctx)
		if ctx.Err() != nil {
			return nil
		}
		k.mu.Lock()
		k.err = own
		k.report.Dropped = k.report.Dropped || dropped(own)
		k.mu.Unlock()
		done()
		k.Compared()
		k.rest(ctx)
		return k.next(all, again)
	})
	return k
}

// rest pauses after a comparison of the routes to all hosts, so that hosts that start together cause
// only a few comparisons. It does not pause if the keeper writes only the own routes.
func (k *Keeper) rest(ctx context.Context) {
	if k.All {
		_ = wait.For(ctx, leastRest) // the end of ctx ends the loop
	}
}

// next returns the result of one step of the loop, which makes the loop compare again after the right pause. err
// is the error of the comparison. again is the time after which the comparison asks for the next one; 0 means that
// it asks for none.
func (k *Keeper) next(err error, again time.Duration) error {
	if err != nil && (Transient(err) || errors.Is(err, errUnanswered)) {
		return err
	}
	if err != nil {
		again = earlier(k.lasting.Next(), again)
	} else {
		k.lasting.Reset()
	}
	if again > 0 {
		return loop.After(again)
	}
	return nil
}

// Run compares until ctx ends: at once, after each resync period, and with growing pauses after writes and
// failures.
func (k *Keeper) Run(ctx context.Context) { _ = k.loop.Run(ctx) }

// SetPeers sets the other hosts that have a lease. If the keeper writes the routes to all hosts, a difference from
// the earlier hosts causes a comparison. Most changes of leases make no difference to a Host.
func (k *Keeper) SetPeers(p Peers) {
	k.mu.Lock()
	defer k.mu.Unlock()
	changed := !p.equal(k.peers)
	if k.peers = p; changed && k.read {
		k.read = false
		k.loop.Wake()
	}
	switch {
	case !p.Complete || p.Unreadable:
		k.completeSince = time.Time{}
	case k.completeSince.IsZero():
		k.completeSince = time.Now()
	}
}

// answered reports whether the store has told its leases and is connected.
func (k *Keeper) answered() bool {
	connected := !k.Connected().IsZero()
	k.mu.Lock()
	defer k.mu.Unlock()
	return connected && k.peers.Complete
}

// hosts returns all hosts that have a lease, including this one. since is the time from which on this host has
// learned of each new lease. If there may be leases that this host does not know, since is zero and all is nil.
func (k *Keeper) hosts() (all []Host, since time.Time) {
	connected := k.Connected()
	k.mu.Lock()
	defer k.mu.Unlock()
	if connected.IsZero() || k.completeSince.IsZero() {
		return nil, time.Time{}
	}
	if since = k.completeSince; connected.After(since) {
		since = connected
	}
	return append(slices.Clone(k.peers.Hosts), k.Own), since
}

// Result returns why the routes to this host were not in order after the last comparison, or nil.
// repaired is the number of routes that were repaired since the last call. Result waits for the first
// comparison, and returns an error if ctx ends before.
func (k *Keeper) Result(ctx context.Context) (repaired int, err error) {
	select {
	case <-k.first:
	case <-ctx.Done():
		return 0, errors.New("the routes of the cloud are not compared yet")
	}
	repaired, _, err = k.Last()
	return repaired, err
}

// Last is Result without waiting. It also sets the number of repaired routes back to zero. compared is false before the first comparison.
func (k *Keeper) Last() (repaired int, compared bool, err error) {
	select {
	case <-k.first:
	default:
		return 0, false, nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	repaired, k.repaired = k.repaired, 0
	return repaired, true, k.err
}

// compare makes one comparison and the calls that it needs. again is the time after which the next
// comparison should begin; 0 if the resync period is soon enough. own is the error of the routes to this
// host, and all is the error of the routes to all hosts. Each is nil if these routes are in order.
func (k *Keeper) compare(ctx context.Context) (again time.Duration, own, all error) {
	target, err := k.Cloud.Join(ctx)
	if err != nil {
		err = &joinError{fmt.Errorf("find this host in the cloud: %w", err)}
		return 0, err, err
	}
	tables, err := k.Cloud.Tables(ctx)
	if err != nil {
		err = fmt.Errorf("read the route tables: %w", err)
		return 0, err, err
	}
	p, unknown := k.plan(ctx, tables, target)
	wrote, stopped := k.put(ctx, tables, p)
	after, swept := k.sweep(ctx, tables)
	general := oneline.Join(unknown, stopped, swept)
	own = oneline.Join(p.problems.of(k.Own.Subnets), general)
	k.note(tables, p, own)
	all = oneline.Join(p.problems.of(nil), general)
	if wrote == 0 {
		k.confirm.Reset()
		return after, own, all
	}
	return earlier(k.confirm.Next(), after), own, all
}

// earlier returns the shorter one of two times to wait. The value 0 means for ever.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// sweep removes the routes of hosts that are gone. It removes a route only if the route has had no lease for the
// grace period, and the store has been connected for that time. again is the time until sweep has more to do,
// because the grace period of a route ends or many routes are left; 0 if there is nothing.
func (k *Keeper) sweep(ctx context.Context, tables []Table) (again time.Duration, err error) {
	hosts, known := k.hosts()
	if known.IsZero() {
		k.idle = nil
		return 0, nil
	}
	now, before := time.Now(), k.idle
	k.idle = map[Route]*idle{}
	var due []Route
	for _, r := range k.leaseless(tables, hosts) {
		one := before[r]
		if one == nil || one.since.Before(known) {
			one = &idle{since: now, pause: wait.Backoff{Least: k.Resync, Most: max(mostLook, k.Resync)}}
		}
		k.idle[r] = one
		if rest := k.grace(r) - now.Sub(one.since); rest > 0 {
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
	slices.SortStableFunc(due, func(a, b Route) int { return k.idle[a].looked.Compare(k.idle[b].looked) })
	more, err := k.remove(ctx, tables, due)
	if more {
		again = earlier(again, k.confirm.Least)
	}
	return again, err
}

// grace returns the time for which r stays without a lease.
func (k *Keeper) grace(r Route) time.Duration {
	least := grace
	if r.Lost {
		least = min(k.Resync, mostLostGrace)
	}
	return time.Duration(float64(least) * k.factor)
}

// leaseless returns the routes that no lease of hosts needs. It returns only routes with the prefix length
// of a subnet, to spare routes of an operator.
func (k *Keeper) leaseless(tables []Table, hosts []Host) []Route {
	routes := unclaimed(tables, k.Networks, func(dst netip.Prefix) bool { return leased(hosts, dst) })
	return slices.DeleteFunc(routes, func(r Route) bool {
		return !slices.ContainsFunc(k.Own.Subnets, func(own netip.Prefix) bool {
			return own.Addr().BitLen() == r.Dst.Addr().BitLen() && own.Bits() == r.Dst.Bits()
		})
	})
}

// leased reports whether a host has a subnet that overlaps dst.
func leased(hosts []Host, dst netip.Prefix) bool {
	return slices.ContainsFunc(hosts, func(h Host) bool { return slices.ContainsFunc(h.Subnets, dst.Overlaps) })
}

// remove removes those routes in due that are lost, or that lead to a host without a lease. Routes to unknown
// targets stay. remove also removes the routes from tables. more is set if it has not looked at all routes in due,
// and the keeper should soon go on.
func (k *Keeper) remove(ctx context.Context, tables []Table, due []Route) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, removalTime)
	defer cancel()
	if len(due) > mostRemovals {
		due, more = due[:mostRemovals], true
	}
	addresses, err := k.addresses(ctx, due)
	if err != nil {
		return false, fmt.Errorf("find the hosts of routes without a lease: %w", err)
	}
	var errs []error
	for _, r := range due {
		hosts, known := k.hosts() // again for each route, because a call takes time
		if known.IsZero() {
			break
		}
		if ctx.Err() != nil {
			more = true
			break
		}
		one := k.idle[r]
		one.looked = time.Now()
		present := func(a netip.Addr) bool {
			return slices.ContainsFunc(hosts, func(h Host) bool { return slices.Contains(h.Addresses, a) })
		}
		if leased(hosts, r.Dst) || len(hostless([]Route{r}, addresses, present)) == 0 {
			one.next = one.looked.Add(one.pause.Next())
			continue
		}
		if err := k.Cloud.Remove(ctx, r); err != nil {
			errs = append(errs, fmt.Errorf("remove route %s: %w", r, err))
			if Transient(err) {
				break // the next call would fail as well
			}
			continue
		}
		klog.FromContext(ctx).Info("removed a route of the cloud whose lease and host are gone", "route", r.String())
		delete(k.idle, r)
		for i := range tables {
			tables[i].Routes = slices.DeleteFunc(tables[i].Routes, func(have Route) bool { return have == r })
		}
	}
	return more && len(errs) == 0, oneline.Join(errs...)
}

// addresses returns the addresses of the hosts to which routes lead, by target. It leaves out lost routes.
func (k *Keeper) addresses(ctx context.Context, routes []Route) (map[string][]netip.Addr, error) {
	var targets []string
	for _, r := range routes {
		if !r.Lost && !slices.Contains(targets, r.Target) {
			targets = append(targets, r.Target)
		}
	}
	if len(targets) == 0 {
		return nil, nil
	}
	return k.Cloud.Addresses(ctx, targets)
}
