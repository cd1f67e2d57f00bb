// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"errors"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Report is the state of the routes to this host at the last comparison. Its slices are
// read-only.
type Report struct {
	Writer string // the host or hosts that write the routes to this host: WriterHost
	Routes []RouteReport
	Tables []TableReport
	Good   time.Time // the last comparison after which everything was right; zero if there was none
	Calls  []CallCount
	// Dropped is set if the cloud has dropped packets of this host since the tables were read: see
	// DroppedError.
	Dropped bool
}

// RouteReport is a wanted route, and whether the table has it.
type RouteReport struct {
	Route
	Present bool
	// Seen is set if the tables had the route when they were read. Otherwise a call of this comparison
	// may have put it, and the routers of the cloud may not follow it yet.
	Seen bool
}

// TableReport counts the routes of a table that count towards its quota.
type TableReport struct {
	ID    string
	Name  string // see Table.Name
	Own   bool   // see Table.Own
	Used  map[prefix.Family]int
	Quota int // 0 if it is not known
}

// WriterHost is the Writer with which each host writes the routes to its own subnets.
const WriterHost = "host"

// note stores the state of the tables after a comparison that ended with err.
func (k *Keeper) note(tables []Table, target string, err error) {
	now := Report{Writer: WriterHost}
	for _, t := range tables {
		for _, dst := range k.Own.Subnets {
			want := Route{Table: t.ID, Dst: dst, Target: target, ByCall: true}
			now.Routes = append(now.Routes, RouteReport{want, slices.Contains(t.Routes, want), k.right[want]})
		}
		table := TableReport{
			ID: t.ID, Name: t.Name(), Own: t.Own,
			Used: map[prefix.Family]int{prefix.IPv4: t.Count(prefix.IPv4), prefix.IPv6: t.Count(prefix.IPv6)},
		}
		if quota, ok := errors.AsType[*QuotaError](err); ok && quota.Table == t.ID {
			table.Quota = quota.Limit
		}
		now.Tables = append(now.Tables, table)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range now.Tables {
		now.Tables[i].recall(k.report.Tables)
	}
	if now.Good = k.report.Good; err == nil {
		now.Good = time.Now()
	}
	k.report = now
}

// recall sets the quota to that of an earlier report. A table with more routes has a new quota.
func (t *TableReport) recall(before []TableReport) {
	i := slices.IndexFunc(before, func(b TableReport) bool { return b.ID == t.ID })
	if i >= 0 && t.Quota == 0 && max(t.Used[prefix.IPv4], t.Used[prefix.IPv6]) <= before[i].Quota {
		t.Quota = before[i].Quota
	}
}

// Report returns the state at the last comparison that could read the tables.
func (k *Keeper) Report() Report {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.report
}
