// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// progress is the number of written routes after which a leader renews its report during a comparison,
// because the calls for all hosts may take minutes.
const progress = 20

// errUnanswered means that a route to a wanted destination leads to another host, and must stay until
// the store answers, because the store may have given the subnet to that host.
var errUnanswered = errors.New("the store has not answered, and may have given the subnet to another host")

// putter puts the wanted routes of a keeper.
type putter struct {
	KeeperConfig
	leases   *leases
	reporter *reporter
	right    map[Route]bool // plan.right of the last comparison
}

// puts makes the calls of one comparison for the wanted routes. Several calls may be in progress, but
// only the goroutine that runs put changes the fields.
type puts struct {
	*putter
	tables  []Table
	planned *plan
	before  map[Route]bool   // wanted routes that the tables had at the comparison before this one
	full    map[string]error // errors of full quotas, by place
	results chan putResult
	running int   // calls in progress
	wrote   int   // calls that have succeeded
	stopped bool  // further calls would fail as well
	reason  error // why stopped is set; nil if an own route has failed
}

// putResult is the result of the call for a change.
type putResult struct {
	change
	err error
}

// put makes the calls for the wanted routes. It sets planned.right, updates tables, and adds each failure to
// the problems of planned. A table that refuses a route does not affect other tables. wrote is the number of
// calls that have succeeded. If an error has made put stop before all calls, err is this error; it is nil if
// the call was for an own route, because then the problems of planned are sufficient.
func (p *putter) put(ctx context.Context, tables []Table, planned *plan) (wrote int, err error) {
	s := &puts{putter: p, tables: tables, planned: planned, before: p.right, full: map[string]error{}, results: make(chan putResult)}
	planned.right = present(tables, planned.wanted)
	p.right = planned.right
	for _, c := range changes(tables, planned.wanted) {
		if s.running == max(p.AtOnce, 1) {
			s.finish(ctx)
		}
		if s.stopped {
			break
		}
		s.begin(ctx, c)
	}
	for s.running > 0 {
		s.finish(ctx)
	}
	return s.wrote, s.reason
}

// place returns the table and the family of a route as a key. Each place has a quota of its own.
func place(r Route) string { return r.Table + " " + prefix.FamilyOf(r.Dst.Addr()).String() }

// begin begins the call for a change. It makes no call, and adds a problem, if the change must wait for
// the store, or if the quota is full and the change replaces no route.
func (s *puts) begin(ctx context.Context, c change) {
	if c.replaces() && c.was.serves(c.Target) && !s.leases.answered() {
		s.planned.problems.add(c.Dst, "leave route "+c.was.String(), errUnanswered)
		return
	}
	if full := s.full[place(c.Route)]; full != nil && !c.replaces() {
		s.planned.problems.add(c.Dst, "put route "+c.Route.String(), full)
		return
	}
	s.running++
	go func() { s.results <- putResult{c, s.call(ctx, c)} }()
}

// finish waits until one of the calls in progress has ended, and records its result. After some calls, a
// leader also renews its report.
func (s *puts) finish(ctx context.Context) {
	r := <-s.results
	s.running--
	if r.err != nil {
		s.fail(r.change, explainQuota(r.err, r.Route, s.tables))
		return
	}
	s.wrote++
	if s.before[r.Route] {
		s.reporter.repair()
	}
	update(s.tables, r.change)
	if log := klog.FromContext(ctx); r.replaces() {
		log.Info("replaced a route of the cloud", "route", r.Route.String(), "was", r.was.String())
	} else {
		log.Info("added a route to the cloud", "route", r.Route.String())
	}
	if s.All && s.wrote%progress == 0 {
		s.reporter.note(s.tables, s.planned, errors.New("the comparison is in progress"))
		s.Compared()
	}
}

// fail records the error of the call for a change. It stops further calls if err is transient or, when
// All is set, if it is Hopeless.
func (s *puts) fail(c change, err error) {
	if quota, ok := errors.AsType[*QuotaError](err); ok && !c.replaces() {
		s.full[place(c.Route)] = quota
	}
	s.planned.problems.add(c.Dst, "put route "+c.Route.String(), err)
	if !Transient(err) && (!s.All || !Hopeless(err)) {
		return
	}
	s.stopped = true
	if s.reason == nil && !slices.Contains(s.Own.Subnets, c.Dst) { // problems.of returns an error of an own subnet anyway
		s.reason = fmt.Errorf("put route %s: %w", c.Route, err)
	}
}

// call makes the call for c. The cloud may have a route to the destination that the tables did not show,
// and that leads to another host. call replaces such a route only if the store has answered, like a route
// that the tables showed. Otherwise it returns errUnanswered.
func (p *putter) call(ctx context.Context, c change) error {
	err := p.Cloud.Put(ctx, c.Route, c.replaces())
	switch {
	case !errors.Is(err, ErrExists):
		return err
	case !p.leases.answered():
		return fmt.Errorf("%w: %w", err, errUnanswered)
	}
	return p.Cloud.Put(ctx, c.Route, true)
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

// update makes a change in tables, which are a copy of the cloud's.
func update(tables []Table, c change) {
	for i := range tables {
		t := &tables[i]
		if t.ID != c.Table {
			continue
		}
		t.Routes = slices.DeleteFunc(t.Routes, func(r Route) bool { return r.Dst == c.Dst && r.replaceable() })
		t.Routes = append(t.Routes, c.Route)
	}
}
