// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

const (
	// progress is the number of written routes after which a leader renews its report during a comparison,
	// because the calls for all hosts may take minutes.
	progress = 20
	// removalTime limits the removals of one comparison, because a comparison puts the wanted routes before it
	// removes others, and can put them again only after all removals.
	removalTime = time.Minute
)

// actor makes the calls of a keeper.
type actor struct {
	KeeperConfig
	leases   *leases
	reporter *reporter
	right    map[Route]bool // plan.right of the last comparison
}

// act is the calls of one comparison. Several calls of Put may be in progress, but only the goroutine that runs act
// changes the fields.
type act struct {
	*actor
	view    view
	planned *plan
	before  map[Route]bool  // wanted routes that the tables had at the comparison before this one
	full    map[place]error // errors of full quotas
	missing map[place]int   // routes without a place
	results chan putResult
	running int   // calls in progress
	wrote   int   // calls that have succeeded
	more    bool  // removals are left for the next comparison
	stopped bool  // further calls would fail as well
	reason  error // why stopped is set; nil if an own route has failed
	removed error // errors of removals
}

// putResult is the result of the call for a step.
type putResult struct {
	step
	err error
}

// compared is what the calls of a comparison have achieved.
type compared struct {
	wrote int                 // calls that have succeeded
	since map[Route]time.Time // for the next view
	again time.Duration       // when to compare again; 0 if the resync period is soon enough
	err   error               // not about a single wanted route
}

// run decides by v, and makes the calls. If a table has no place for a route, it decides again, because routes of
// instances that are gone then go first. It sets planned.right and planned.problems, and updates the tables of v.
func (a *actor) run(ctx context.Context, v view, planned *plan) compared {
	s := &act{actor: a, view: v, planned: planned, before: a.right, results: make(chan putResult)}
	planned.right = present(v.tables, planned.wanted)
	a.right = planned.right
	found := slices.Clone(planned.problems)

	steps, since, again := decide(v)
	s.make(ctx, steps, since)
	if len(s.missing) > 0 && !s.stopped {
		s.view.full = s.missing
		s.view.since = since
		s.view.now = time.Now()
		steps, since, again = decide(s.view)
		if steps[0].verb == remove && s.view.full[placeOf(steps[0].Route)] > 0 {
			planned.problems = found
			s.full = nil
			s.missing = nil
		} else {
			steps = slices.DeleteFunc(steps, func(one step) bool { return one.verb != remove })
		}
		s.make(ctx, steps, since)
	}

	if s.more {
		again = earlier(again, min(leastConfirm, a.Resync))
	}
	return compared{s.wrote, since, again, oneline.Join(s.reason, s.removed)}
}

// make makes the calls of steps. It makes no removals after it has found a quota full for the first time, because
// removals then depend on that.
func (s *act) make(ctx context.Context, steps []step, since map[Route]time.Time) {
	limited, cancel := context.WithTimeout(ctx, removalTime)
	defer cancel()
	for _, one := range steps {
		switch one.verb {
		case refuse:
			s.planned.problems.add(one.Dst, "leave route "+one.was.String(), one.reason)
		case remove:
			s.wait(ctx)
			if s.stopped || len(s.missing) > 0 && s.view.full == nil {
				return
			}
			s.remove(limited, one, since)
		case create, replace:
			if s.running == max(s.AtOnce, 1) {
				s.finish(ctx)
			}
			if s.stopped {
				s.wait(ctx)
				return
			}
			s.begin(ctx, one)
		}
	}
	s.wait(ctx)
}

// wait waits for the calls of Put in progress.
func (s *act) wait(ctx context.Context) {
	for s.running > 0 {
		s.finish(ctx)
	}
}

// begin begins the call for a step. It makes no call, and adds a problem, if the store has gone away since the
// decision, or if the quota is full and the step replaces no route.
func (s *act) begin(ctx context.Context, one step) {
	if one.verb == replace && one.serves(one.was) && !s.leases.answered() {
		s.planned.problems.add(one.Dst, "leave route "+one.was.String(), errUnanswered)
		return
	}
	if full := s.full[placeOf(one.Route)]; full != nil && one.verb == create {
		s.missing[placeOf(one.Route)]++
		s.planned.problems.add(one.Dst, "put route "+one.Route.String(), full)
		return
	}
	s.running++
	go func() { s.results <- putResult{one, s.Cloud.Put(ctx, one.Route, one.verb == replace)} }()
}

// finish waits until one of the calls in progress has ended, and records its result. After some calls, a
// leader also renews its report.
func (s *act) finish(ctx context.Context) {
	r := <-s.results
	s.running--
	if r.err != nil {
		s.fail(r.step, explainQuota(r.err, r.Route, s.view.tables))
		return
	}
	s.wrote++
	if s.before[r.Route] {
		s.reporter.repair()
	}
	for i := range s.view.tables {
		if t := &s.view.tables[i]; t.ID == r.Table {
			t.Routes = slices.DeleteFunc(t.Routes, func(have Route) bool { return have.Dst == r.Dst && have.ours() })
			t.Routes = append(t.Routes, r.Route)
		}
	}
	if log := klog.FromContext(ctx); r.verb == replace {
		log.Info("replaced a route of the cloud", "route", r.Route.String(), "was", r.was.String())
	} else {
		log.Info("added a route to the cloud", "route", r.Route.String())
	}
	if s.All && s.wrote%progress == 0 {
		s.reporter.note(s.view.tables, s.planned, errors.New("the comparison is in progress"))
		s.Compared()
	}
}

// fail records the error of the call for a step. It stops further calls if err is transient or, when
// All is set, if it is Hopeless.
func (s *act) fail(one step, err error) {
	if _, ok := errors.AsType[*QuotaError](err); ok && one.verb == create {
		if s.full == nil {
			s.full = map[place]error{}
			s.missing = map[place]int{}
		}
		s.full[placeOf(one.Route)] = err
		s.missing[placeOf(one.Route)]++
	}
	s.planned.problems.add(one.Dst, "put route "+one.Route.String(), err)
	if errors.Is(err, ErrExists) || !Transient(err) && (!s.All || !Hopeless(err)) {
		return
	}
	s.stopped = true
	if s.reason == nil && !slices.Contains(s.Own.Subnets, one.Dst) { // problems.of returns an error of an own subnet anyway
		s.reason = fmt.Errorf("put route %s: %w", one.Route, err)
	}
}

// remove removes a route. It asks first whether the reason is still true, because the calls before it take time. A
// removed route is deleted from the tables and from since.
func (s *act) remove(ctx context.Context, one step, since map[Route]time.Time) {
	if ctx.Err() != nil {
		s.more = true
		return
	}
	s.view.hosts, s.view.known = s.leases.hosts()
	if why, _, _ := s.view.useless(one.Route); why == "" && one.why != whyGone {
		return
	}
	if err := s.Cloud.Remove(ctx, one.Route); err != nil {
		s.removed = oneline.Join(s.removed, fmt.Errorf("remove route %s: %w", one.Route, err))
		s.stopped = s.stopped || Transient(err) // the next call would fail as well
		return
	}
	klog.FromContext(ctx).Info("removed a route of the cloud", "route", one.Route.String(), "reason", one.why)
	delete(since, one.Route)
	for i := range s.view.tables {
		t := &s.view.tables[i]
		t.Routes = slices.DeleteFunc(t.Routes, func(have Route) bool { return have == one.Route })
	}
}

// explainQuota sets the limit in a QuotaError without a limit: the number of routes that the table
// has in the family of r. It returns other errors as they are.
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
