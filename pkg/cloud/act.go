// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// removalTime limits the removals of one comparison, because a comparison puts the wanted routes before it
// removes others, and can put them again only after all removals.
const removalTime = time.Minute

// comparison compares the tables with the wanted routes, and makes the calls.
type comparison struct {
	*Keeper
	view     view
	right    map[Route]bool  // wanted routes that the tables had when they were read
	before   map[Route]bool  // those that they had at the comparison before this one
	problems []problem       // why there are no right routes to some destinations
	full     map[place]error // errors of full quotas
	missing  map[place]int   // routes without a place
	wrote    int             // calls that have succeeded
	more     bool            // removals are left for the next comparison
	stopped  bool            // further calls would fail as well
	removed  error           // errors of removals
}

// run decides by the view, and makes the calls. It updates the tables of the view. For since and again see decide.
func (c *comparison) run(ctx context.Context) (since map[Route]time.Time, again time.Duration) {
	c.full = map[place]error{}
	c.missing = map[place]int{}
	steps, since, again := decide(c.view)
	c.make(ctx, steps, since)

	// A table has no place for a route. Decide again: routes of instances that are gone then go first.
	if len(c.missing) > 0 && !c.stopped {
		c.view.full = c.missing
		c.view.since = since
		c.view.now = time.Now()
		steps, since, again = decide(c.view)
		if steps[0].verb == remove && c.view.full[placeOf(steps[0].Route)] > 0 {
			c.problems = nil
			c.full = map[place]error{}
			c.missing = map[place]int{}
		} else {
			steps = slices.DeleteFunc(steps, func(one step) bool { return one.verb != remove })
		}
		c.make(ctx, steps, since)
	}

	if c.more {
		again = least.Of(again, min(leastConfirm, c.Resync))
	}
	return since, again
}

func (c *comparison) make(ctx context.Context, steps []step, since map[Route]time.Time) {
	limited, cancel := context.WithTimeout(ctx, removalTime)
	defer cancel()
	for _, one := range steps {
		switch {
		case c.stopped:
			return
		case one.verb == refuse:
			c.problems = append(c.problems, problem{one.Dst, fmt.Errorf("leave route %s: %w", one.was, one.reason)})
		case one.verb != remove:
			c.put(ctx, one)
		case len(c.missing) > 0 && c.view.full == nil: // run decides about removals again
			return
		default:
			c.remove(limited, one, since)
		}
	}
}

// put makes no call if the quota is known to be full.
func (c *comparison) put(ctx context.Context, one step) {
	at := placeOf(one.Route)
	err := c.full[at]
	if err == nil || one.verb == replace {
		err = explainQuota(c.Cloud.Put(ctx, one.Route, one.verb == replace), one.Route, c.view.tables)
	}
	if err != nil {
		if _, ok := errors.AsType[*QuotaError](err); ok && one.verb == create {
			c.full[at] = err
			c.missing[at]++
		}
		c.problems = append(c.problems, problem{one.Dst, fmt.Errorf("put route %s: %w", one.Route, err)})
		c.stopped = Transient(err) && !errors.Is(err, ErrExists) // the next call would fail as well
		return
	}

	c.wrote++
	if c.before[one.Route] {
		c.reporter.repair()
	}
	for i := range c.view.tables {
		if t := &c.view.tables[i]; t.ID == one.Table {
			t.Routes = slices.DeleteFunc(t.Routes, func(have Route) bool { return have.Dst == one.Dst && have.ours() })
			t.Routes = append(t.Routes, one.Route)
		}
	}
	if log := klog.FromContext(ctx); one.verb == replace {
		log.Info("replaced a route of the cloud", "route", one.Route.String(), "was", one.was.String())
	} else {
		log.Info("added a route to the cloud", "route", one.Route.String())
	}
}

// remove removes a route, also from the tables and from since.
func (c *comparison) remove(ctx context.Context, one step, since map[Route]time.Time) {
	if ctx.Err() != nil {
		c.more = true
		return
	}

	// The calls before this one took time. Is the reason still true?
	c.view.hosts, c.view.known, _ = c.leases.hosts()
	if why, _, _ := c.view.useless(one.Route); why == "" && one.why != whyGone {
		return
	}

	if err := c.Cloud.Remove(ctx, one.Route); err != nil {
		c.removed = oneline.Join(c.removed, fmt.Errorf("remove route %s: %w", one.Route, err))
		c.stopped = Transient(err) // the next call would fail as well
		return
	}
	klog.FromContext(ctx).Info("removed a route of the cloud", "route", one.Route.String(), "reason", one.why)
	delete(since, one.Route)
	for i := range c.view.tables {
		t := &c.view.tables[i]
		t.Routes = slices.DeleteFunc(t.Routes, func(have Route) bool { return have == one.Route })
	}
}

// explainQuota sets the limit in a QuotaError without one: the number of routes that the table has in
// the family of r.
func explainQuota(err error, r Route, tables []Table) error {
	quota, ok := errors.AsType[*QuotaError](err)
	if !ok || quota.Limit > 0 {
		return err
	}
	for _, t := range tables {
		if t.ID == quota.Table {
			return &QuotaError{Table: t.ID, Limit: t.Count(prefix.FamilyOf(r.Dst.Addr())), Quota: quota.Quota}
		}
	}
	return err
}

// problem is the error of the action that should have led to a right route to dst.
type problem struct {
	dst netip.Prefix
	err error
}

func present(tables []Table, wanted []want) map[Route]bool {
	right := map[Route]bool{}
	for _, t := range tables {
		for _, r := range t.Routes {
			if slices.ContainsFunc(wanted, r.fulfils) {
				right[r] = true
			}
		}
	}
	return right
}
