// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Report is the state of the routes at the last comparison: of those to this host and, on the leader, of those
// to all hosts. Its slices are read-only.
type Report struct {
	Writer  string // the host or hosts that write the routes to this host: WriterHost or WriterLeader
	Leader  string // name of the leader; empty if there is none, or with WriterHost
	Leading bool   // this host is the leader
	Routes  []RouteReport
	Tables  []TableReport
	Good    time.Time // when the routes to this host were last found in order; zero if never
	Calls   []CallCount
	// Routed contains the destinations of all hosts to which each table has the right route, at the last
	// comparison that knew all hosts. Unrouted contains the other destinations for which a reason is known.
	// Both are nil before such a comparison, and if this host is not the leader.
	Routed   []netip.Prefix
	Unrouted []Unrouted
	// Dropped is set if a comparison has ended with a DroppedError since the tables were last read. On a host
	// with a tunnel it is also set if the last announcement has no tables and gives a lasting reason why there
	// is no route to this host.
	Dropped bool
}

// Unrouted is a destination to which no right route leads.
type Unrouted struct {
	Dst    netip.Prefix
	Reason string
	Kind   string // kind of the reason: see Kind
}

// RouteReport is a wanted route to this host, and whether the table has it. A host without a tunnel learns from
// the leader only whether each table has the route. Table and Target are then empty, and Seen is not set.
type RouteReport struct {
	Route
	Present bool
	// Seen is set if the tables had the route when they were read. Otherwise a call of this comparison
	// may have put it, and the routers of the cloud may not follow it yet.
	Seen bool
}

// TableReport is the state of a table. If it comes from an announcement, it has only ID, Name and Own, and ID is
// the name too.
type TableReport struct {
	ID    string
	Name  string                // see Table.Name
	Own   bool                  // see Table.Own
	Used  map[prefix.Family]int // number of routes that count towards the quota
	Quota map[prefix.Family]int // contains only the families whose quota is known
	// Hosts contains the first subnet of each host whose packets follow the table. Seen contains the
	// destinations to which the table had the right route when it was read. Both are from the last
	// comparison that knew all hosts. They are nil before it, and if this host is not the leader.
	Hosts, Seen []netip.Prefix
}

// followed returns the name of the table that packets of this host follow, or "" if it is not known.
func (r Report) followed() (name string) {
	for _, t := range r.Tables {
		if t.Own {
			name = t.Name
		}
	}
	return name
}

// reporter contains what a keeper reports. It is safe for concurrent use.
type reporter struct {
	all bool // KeeperConfig.All

	mu       sync.Mutex
	report   Report
	repaired int   // routes repaired since the last call of last
	err      error // of the routes to this host, from the last comparison
}

func newReporter(all bool) *reporter {
	r := &reporter{all: all}
	r.report.Writer, r.report.Leading = r.writer(), all
	return r
}

// writer returns the value of Report.Writer.
func (r *reporter) writer() string {
	if r.all {
		return WriterLeader
	}
	return WriterHost
}

// repair counts a route that was repaired.
func (r *reporter) repair() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.repaired++
}

// end records the error of the routes to this host, or nil, at the end of a comparison.
func (r *reporter) end(own error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = own
	r.report.Dropped = r.report.Dropped || dropped(own)
}

// last returns the number of routes that were repaired since its previous call, and sets the number back to zero.
// err is the error of the routes to this host from the last comparison.
func (r *reporter) last() (repaired int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	repaired, r.repaired = r.repaired, 0
	return repaired, r.err
}

// get returns the report.
func (r *reporter) get() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.report
}

// note stores the state of tables in the report, after a comparison and during a long one. err is the reason why
// the routes to this host are not in order, or nil.
func (r *reporter) note(tables []Table, p *plan, err error) {
	now := Report{Writer: r.writer(), Leading: r.all}
	right := present(tables, p.wanted)
	for _, t := range tables {
		var seen []netip.Prefix
		for _, w := range p.wanted {
			want := w.in(t.ID)
			if !w.Other {
				now.Routes = append(now.Routes, RouteReport{want, right[want], p.right[want]})
			}
			if p.right[want] {
				seen = append(seen, w.Dst)
			}
		}
		table := TableReport{
			ID: t.ID, Name: t.Name(), Own: t.Own,
			Used:  map[prefix.Family]int{prefix.IPv4: t.Count(prefix.IPv4), prefix.IPv6: t.Count(prefix.IPv6)},
			Quota: map[prefix.Family]int{},
		}
		for _, one := range p.problems {
			if quota, ok := errors.AsType[*QuotaError](one.err); ok && quota.Table == t.ID && quota.Limit > 0 {
				table.Quota[prefix.FamilyOf(one.dst.Addr())] = quota.Limit
			}
		}
		if p.all {
			table.Hosts, table.Seen = p.followers[t.ID], seen
		}
		now.Tables = append(now.Tables, table)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Routed, now.Unrouted = r.report.Routed, r.report.Unrouted; p.all {
		now.Routed, now.Unrouted = p.routed(tables)
	}
	for i := range now.Tables {
		now.Tables[i].recall(r.report.Tables, p.all)
	}
	if now.Good = r.report.Good; err == nil {
		now.Good = time.Now()
	}
	r.report = now
}

// routed returns the destinations to which each table has the right route, and those with a problem or
// a target that does not run. The slice routed is not nil, even if it is empty.
func (p *plan) routed(tables []Table) (routed []netip.Prefix, unrouted []Unrouted) {
	routed = []netip.Prefix{}
	right, named := present(tables, p.wanted), map[netip.Prefix]bool{}
	for _, one := range p.problems {
		if !named[one.dst] { // several tables may have the same problem
			unrouted = append(unrouted, Unrouted{one.dst, one.err.Error(), Kind(one.err)})
		}
		named[one.dst] = true
	}
	for _, w := range p.wanted {
		if !slices.ContainsFunc(tables, func(t Table) bool { return !right[w.in(t.ID)] }) {
			routed = append(routed, w.Dst)
		} else if !named[w.Dst] && slices.ContainsFunc(tables, func(t Table) bool {
			return slices.ContainsFunc(t.Routes, func(r Route) bool { return r.Lost() && r.fulfils(w) })
		}) {
			unrouted = append(unrouted, Unrouted{w.Dst, fmt.Sprintf("%s does not run, says the cloud", w.Target), "failed"})
		}
	}
	return routed, unrouted
}

// recall completes t from before, the tables of the earlier report. It sets the unknown quota of a
// family to the earlier one. It does not if the table has more routes of that family than the earlier quota
// permits, because then the quota has been raised. If all is not set, the comparison did not know all hosts, and
// recall also keeps the earlier Hosts and Seen.
func (t *TableReport) recall(before []TableReport, all bool) {
	i := slices.IndexFunc(before, func(b TableReport) bool { return b.ID == t.ID })
	if i < 0 {
		return
	}
	for f, quota := range before[i].Quota {
		if t.Quota[f] == 0 && t.Used[f] <= quota {
			t.Quota[f] = quota
		}
	}
	if !all {
		t.Hosts, t.Seen = before[i].Hosts, before[i].Seen
	}
}
