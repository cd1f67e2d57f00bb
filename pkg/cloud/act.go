// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// removalTime limits the removals of one comparison, because a comparison puts the wanted routes before it
// removes others, and can put them again only after all removals.
const removalTime = time.Minute

// actor makes the calls of a keeper, and act those of one comparison.
type actor struct {
	KeeperConfig
	leases   *leases
	reporter *reporter
	right    map[Route]bool // plan.right of the last comparison
}

type act struct {
	*actor
	view    view
	planned *plan
	before  map[Route]bool  // wanted routes that the tables had at the comparison before this one
	full    map[place]error // errors of full quotas
	missing map[place]int   // routes without a place
	wrote   int             // calls that have succeeded
	more    bool            // removals are left for the next comparison
	stopped bool            // further calls would fail as well
	removed error           // errors of removals
}

// compared is what the calls of a comparison have achieved.
type compared struct {
	wrote int                 // calls that have succeeded
	since map[Route]time.Time // for the next view
	again time.Duration       // when to compare again; 0 if the resync period is soon enough
	err   error               // not about a single wanted route
}

// run decides by v, and makes the calls. It sets planned.right and planned.problems, and updates the
// tables of v.
func (a *actor) run(ctx context.Context, v view, planned *plan) compared {
	s := &act{actor: a, view: v, planned: planned, before: a.right, full: map[place]error{}, missing: map[place]int{}}
	planned.right = present(v.tables, planned.wanted)
	a.right = planned.right

	steps, since, again := decide(v)
	s.make(ctx, steps, since)

	// A table has no place for a route. Decide again: routes of instances that are gone then go first.
	if len(s.missing) > 0 && !s.stopped {
		s.view.full = s.missing
		s.view.since = since
		s.view.now = time.Now()
		steps, since, again = decide(s.view)
		if steps[0].verb == remove && s.view.full[placeOf(steps[0].Route)] > 0 {
			planned.problems = nil
			s.full = map[place]error{}
			s.missing = map[place]int{}
		} else {
			steps = slices.DeleteFunc(steps, func(one step) bool { return one.verb != remove })
		}
		s.make(ctx, steps, since)
	}

	if s.more {
		again = earlier(again, min(leastConfirm, a.Resync))
	}
	return compared{s.wrote, since, again, s.removed}
}

func (s *act) make(ctx context.Context, steps []step, since map[Route]time.Time) {
	limited, cancel := context.WithTimeout(ctx, removalTime)
	defer cancel()
	for _, one := range steps {
		switch {
		case s.stopped:
			return
		case one.verb == refuse:
			s.planned.problems.add(one.Dst, "leave route "+one.was.String(), one.reason)
		case one.verb != remove:
			s.put(ctx, one)
		case len(s.missing) > 0 && s.view.full == nil: // run decides about removals again
			return
		default:
			s.remove(limited, one, since)
		}
	}
}

// put makes no call if the quota is known to be full.
func (s *act) put(ctx context.Context, one step) {
	at := placeOf(one.Route)
	err := s.full[at]
	if err == nil || one.verb == replace {
		err = explainQuota(s.Cloud.Put(ctx, one.Route, one.verb == replace), one.Route, s.view.tables)
	}
	if err != nil {
		if _, ok := errors.AsType[*QuotaError](err); ok && one.verb == create {
			s.full[at] = err
			s.missing[at]++
		}
		s.planned.problems.add(one.Dst, "put route "+one.Route.String(), err)
		s.stopped = Transient(err) && !errors.Is(err, ErrExists) // the next call would fail as well
		return
	}

	s.wrote++
	if s.before[one.Route] {
		s.reporter.repair()
	}
	for i := range s.view.tables {
		if t := &s.view.tables[i]; t.ID == one.Table {
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
func (s *act) remove(ctx context.Context, one step, since map[Route]time.Time) {
	if ctx.Err() != nil {
		s.more = true
		return
	}

	// The calls before this one took time. Is the reason still true?
	s.view.hosts, s.view.known = s.leases.hosts()
	if why, _, _ := s.view.useless(one.Route); why == "" && one.why != whyGone {
		return
	}

	if err := s.Cloud.Remove(ctx, one.Route); err != nil {
		s.removed = oneline.Join(s.removed, fmt.Errorf("remove route %s: %w", one.Route, err))
		s.stopped = Transient(err) // the next call would fail as well
		return
	}
	klog.FromContext(ctx).Info("removed a route of the cloud", "route", one.Route.String(), "reason", one.why)
	delete(since, one.Route)
	for i := range s.view.tables {
		t := &s.view.tables[i]
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
