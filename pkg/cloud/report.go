// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync"
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
}

// RouteReport is a wanted route, and whether the table has it.
type RouteReport struct {
	Route
	Present bool
}

// TableReport counts the routes of a table that count towards its quota.
type TableReport struct {
	ID    string
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
			now.Routes = append(now.Routes, RouteReport{want, slices.Contains(t.Routes, want)})
		}
		table := TableReport{ID: t.ID, Used: map[prefix.Family]int{prefix.IPv4: t.Count(prefix.IPv4), prefix.IPv6: t.Count(prefix.IPv6)}}
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

// Calls counts the calls of an API. The zero Calls is usable, and safe for concurrent use.
type Calls struct {
	mu sync.Mutex
	n  map[CallCount]uint64 // with N being zero
}

// CallCount is the number of calls with the same name and result.
type CallCount struct {
	Name   string // in the words of the cloud, such as CreateRoute
	Result string // ok, throttled, denied, quota, unavailable or failed
	N      uint64
}

// Count counts a call that ended with err.
func (c *Calls) Count(name string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[CallCount]uint64{}
	}
	c.n[CallCount{Name: name, Result: result(err)}]++
}

// Counts returns the numbers of calls, sorted by name and result.
func (c *Calls) Counts() []CallCount {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []CallCount
	for count, n := range c.n {
		count.N = n
		all = append(all, count)
	}
	slices.SortFunc(all, func(a, b CallCount) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Result, b.Result))
	})
	return all
}

func result(err error) string {
	var missing *MissingError
	var quota *QuotaError
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrThrottled):
		return "throttled"
	case errors.Is(err, ErrUnavailable):
		return "unavailable"
	case errors.As(err, &missing):
		return "denied"
	case errors.As(err, &quota):
		return "quota"
	}
	return "failed"
}
