// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
)

// After a write the tables are read again, because a cloud may accept a call and show its result
// later. The pause grows while every pass finds something to write, so that two programs that
// want different routes do not use up the calls of all hosts.
const leastConfirm = 5 * time.Second

// mostGrace limits the time for which a route without a lease stays. The lease of a host that
// has just started may arrive here later than its route.
const mostGrace = time.Minute

// Host is a host of the network, as its lease describes it.
type Host struct {
	Subnets   []netip.Prefix
	Addresses []netip.Addr
}

// KeeperConfig configures a Keeper. All fields are required.
type KeeperConfig struct {
	Cloud    Cloud
	Own      Host
	Networks []netip.Prefix // removals are limited to routes in them
	Resync   time.Duration  // time between two comparisons if nothing happens
	// Compared is called after each comparison, and must not block.
	Compared func()
}

// Keeper makes the tables of a cloud have the routes to the own subnets, and removes the routes
// of hosts that are gone.
type Keeper struct {
	KeeperConfig
	loop    *loop.Loop
	first   chan struct{} // closed after the first comparison
	grace   time.Duration
	confirm wait.Backoff
	idle    map[Route]time.Time // routes that no lease needs, and since when that is known

	mu       sync.Mutex
	peers    []Host
	complete bool // peers has all hosts that the store knows
	report   Report
	repaired int
	err      error
}

// NewKeeper returns a Keeper. The caller runs it.
func NewKeeper(c KeeperConfig) *Keeper {
	k := &Keeper{KeeperConfig: c, first: make(chan struct{}), grace: min(c.Resync, mostGrace)}
	k.report.Writer = WriterHost
	k.confirm = wait.Backoff{Least: min(leastConfirm, c.Resync), Most: c.Resync}
	done := sync.OnceFunc(func() { close(k.first) })
	k.loop = loop.New(c.Resync, func(ctx context.Context) error {
		again, err := k.compare(ctx)
		if ctx.Err() != nil {
			return nil
		}
		k.mu.Lock()
		k.err = err
		k.mu.Unlock()
		done()
		k.Compared()
		if err == nil && again > 0 {
			return loop.After(again)
		}
		return err
	})
	return k
}

// Run compares until ctx ends: at once, after each resync period, and after each failure with
// growing pauses.
func (k *Keeper) Run(ctx context.Context) { _ = k.loop.Run(ctx) }

// SetPeers sets the other hosts that have a lease. If complete is set, the store has answered,
// and hosts that are not in peers are gone.
func (k *Keeper) SetPeers(peers []Host, complete bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.peers, k.complete = peers, complete
}

// Result returns the error of the last comparison, and the number of routes that were repaired
// since the last call. It waits for the first comparison, and returns an error if ctx ends before.
func (k *Keeper) Result(ctx context.Context) (repaired int, err error) {
	select {
	case <-k.first:
	case <-ctx.Done():
		return 0, errors.New("the routes of the cloud are not compared yet")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	repaired, k.repaired = k.repaired, 0
	return repaired, k.err
}

// compare makes one comparison and the calls that it needs. It returns after which time there
// should be another one.
func (k *Keeper) compare(ctx context.Context) (again time.Duration, err error) {
	target, err := k.Cloud.Join(ctx)
	if err != nil {
		return 0, fmt.Errorf("find this host in the cloud: %w", err)
	}
	tables, err := k.Cloud.Tables(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the route tables: %w", err)
	}
	wrote, failed := k.put(ctx, tables, target)
	after, err := k.sweep(ctx, tables)
	err = oneline.Join(failed, err)
	k.note(tables, target, err)
	if wrote == 0 {
		k.confirm.Reset()
		return after, err
	}
	return earlier(k.confirm.Next(), after), err
}

// earlier returns the earlier one of two times to wait, of which 0 means never.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// put makes the calls for the own subnets. It updates tables. A table that refuses a route does
// not affect the others.
func (k *Keeper) put(ctx context.Context, tables []Table, target string) (wrote int, err error) {
	var errs []error
	known := k.right()
	for _, c := range changes(tables, k.Own.Subnets, target) {
		if err := k.Cloud.Put(ctx, c.Route, c.replaces()); err != nil {
			errs = append(errs, fmt.Errorf("put route %s: %w", c.Route, explainQuota(err, c.Route, tables)))
			if Transient(err) {
				break // the next call would fail as well
			}
			continue
		}
		wrote++
		if known[c.Route] {
			k.mu.Lock()
			k.repaired++
			k.mu.Unlock()
		}
		update(tables, c)
		if log := klog.FromContext(ctx); c.replaces() {
			log.Info("replaced a route of the cloud", "route", c.Route.String(), "was", c.was.String())
		} else {
			log.Info("added a route to the cloud", "route", c.Route.String())
		}
	}
	return wrote, oneline.Join(errs...)
}

// right returns the routes that were in place after the last comparison.
func (k *Keeper) right() map[Route]bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := map[Route]bool{}
	for _, r := range k.report.Routes {
		known[r.Route] = r.Present
	}
	return known
}

// explainQuota adds the number of routes that the table has in the family of r to an error about
// its quota.
func explainQuota(err error, r Route, tables []Table) error {
	quota, ok := errors.AsType[*QuotaError](err)
	if !ok || quota.Limit > 0 {
		return err
	}
	for _, t := range tables {
		if t.ID == quota.Table {
			return &QuotaError{Table: t.ID, Limit: t.Count(prefix.FamilyOf(r.Dst.Addr()))}
		}
	}
	return err
}

// update makes a change in the copy of the tables.
func update(tables []Table, c change) {
	for i := range tables {
		t := &tables[i]
		if t.ID != c.Table {
			continue
		}
		t.Routes = slices.DeleteFunc(t.Routes, func(r Route) bool { return c.replaces() && r == c.was })
		t.Routes = append(t.Routes, c.Route)
	}
}

// sweep removes the routes of hosts that are gone. A route must be without a lease for the grace
// period. sweep returns when that has passed for the next one.
func (k *Keeper) sweep(ctx context.Context, tables []Table) (again time.Duration, err error) {
	k.mu.Lock()
	peers, complete := k.peers, k.complete
	k.mu.Unlock()
	if !complete {
		k.idle = nil
		return 0, nil
	}
	hosts := append(slices.Clone(peers), k.Own)
	now, idle := time.Now(), map[Route]time.Time{}
	var due []Route
	for _, r := range k.leaseless(tables, hosts) {
		since, ok := k.idle[r]
		if !ok {
			since = now
		}
		idle[r] = since
		if rest := k.grace - now.Sub(since); rest > 0 {
			again = earlier(again, rest)
		} else {
			due = append(due, r)
		}
	}
	k.idle = idle
	if len(due) == 0 {
		return again, nil
	}
	return again, k.remove(ctx, tables, due, hosts)
}

// leaseless returns the routes that no lease of hosts needs. They must have the size of a subnet,
// which the route of an operator does not have by accident.
func (k *Keeper) leaseless(tables []Table, hosts []Host) []Route {
	routes := unclaimed(tables, k.Networks, func(dst netip.Prefix) bool {
		return slices.ContainsFunc(hosts, func(h Host) bool { return slices.ContainsFunc(h.Subnets, dst.Overlaps) })
	})
	return slices.DeleteFunc(routes, func(r Route) bool {
		return !slices.ContainsFunc(k.Own.Subnets, func(own netip.Prefix) bool {
			return own.Addr().BitLen() == r.Dst.Addr().BitLen() && own.Bits() == r.Dst.Bits()
		})
	})
}

// remove removes those of the routes in due that do not lead to one of hosts. It updates tables.
func (k *Keeper) remove(ctx context.Context, tables []Table, due []Route, hosts []Host) error {
	var targets []string
	for _, r := range due {
		if !r.Lost && !slices.Contains(targets, r.Target) {
			targets = append(targets, r.Target)
		}
	}
	addresses := map[string][]netip.Addr{}
	if len(targets) > 0 {
		var err error
		if addresses, err = k.Cloud.Addresses(ctx, targets); err != nil {
			return fmt.Errorf("find the hosts of routes without a lease: %w", err)
		}
	}
	present := func(a netip.Addr) bool {
		return slices.ContainsFunc(hosts, func(h Host) bool { return slices.Contains(h.Addresses, a) })
	}
	for _, r := range hostless(due, addresses, present) {
		if err := k.Cloud.Remove(ctx, r); err != nil {
			return fmt.Errorf("remove route %s: %w", r, err)
		}
		klog.FromContext(ctx).Info("removed a route of the cloud whose lease and host are gone", "route", r.String())
		delete(k.idle, r)
		for i := range tables {
			tables[i].Routes = slices.DeleteFunc(tables[i].Routes, func(have Route) bool { return have == r })
		}
	}
	return nil
}
