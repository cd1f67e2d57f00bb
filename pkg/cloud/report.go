// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"errors"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Report is the state of the routes to this host at the last comparison. Its slices are read-only.
type Report struct {
	Routes []RouteReport
	Tables []TableReport
	Good   time.Time // when the routes to this host were last found in order; zero if never
	Calls  []CallCount
	// Dropped is set if a comparison has ended with a DroppedError since the tables were last read.
	Dropped bool
}

// RouteReport is a wanted route to this host, and whether the table has it.
type RouteReport struct {
	Route
	Present bool
	// Seen is set if the tables had the route when they were read. Otherwise a call of this comparison
	// may have put it, and the routers of the cloud may not follow it yet.
	Seen bool
}

// TableReport is the state of a table.
type TableReport struct {
	ID    string
	Name  string                // see Table.Name
	Own   bool                  // see Table.Own
	Used  map[prefix.Family]int // number of routes that count towards the quota
	Quota map[prefix.Family]int // contains only the families whose quota is known
}

// reporter contains what a keeper reports. It is safe for concurrent use.
type reporter struct {
	mu       sync.Mutex
	report   Report
	repaired int   // routes repaired since the last call of last
	err      error // of the routes to this host, from the last comparison
}

func (r *reporter) repair() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.repaired++
}

// end records the error of a comparison, or nil.
func (r *reporter) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
	_, dropped := errors.AsType[*DroppedError](err)
	r.report.Dropped = r.report.Dropped || dropped
}

// last sets the number of repaired routes back to zero.
func (r *reporter) last() (repaired int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	repaired = r.repaired
	r.repaired = 0
	return repaired, r.err
}

func (r *reporter) get() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.report
}

// note stores the state of the tables after a comparison, which err has ended.
func (r *reporter) note(c *comparison, err error) {
	var now Report
	right := present(c.view.tables, c.view.wanted)
	for _, t := range c.view.tables {
		for _, w := range c.view.wanted {
			want := w.in(t.ID)
			now.Routes = append(now.Routes, RouteReport{want, right[want], c.right[want]})
		}

		table := TableReport{
			ID: t.ID, Name: t.Name(), Own: t.Own,
			Used:  map[prefix.Family]int{prefix.IPv4: t.Count(prefix.IPv4), prefix.IPv6: t.Count(prefix.IPv6)},
			Quota: map[prefix.Family]int{},
		}
		for _, one := range c.problems {
			if quota, ok := errors.AsType[*QuotaError](one.err); ok && quota.Table == t.ID && quota.Limit > 0 {
				table.Quota[prefix.FamilyOf(one.dst.Addr())] = quota.Limit
			}
		}
		now.Tables = append(now.Tables, table)
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range now.Tables {
		now.Tables[i].recall(r.report.Tables)
	}

	now.Good = r.report.Good
	if err == nil {
		now.Good = time.Now()
	}
	r.report = now
}

// recall takes unknown quotas from the tables of the earlier report.
func (t *TableReport) recall(before []TableReport) {
	for _, b := range before {
		for f, quota := range b.Quota {
			// If more routes are there than it permits, it has been raised.
			if b.ID == t.ID && t.Quota[f] == 0 && t.Used[f] <= quota {
				t.Quota[f] = quota
			}
		}
	}
}
