// SPDX-License-Identifier: Apache-2.0

package cloudtest

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// Memory is a Cloud in memory, for tests of the users of a Cloud. It passes the suite. Tests must use
// its fields only in Do.
type Memory struct {
	mu sync.Mutex

	Self      string
	Tabs      []cloud.Table
	Hosts     map[string][]netip.Addr // addresses of the hosts that exist, by target
	Quota     int                     // routes of one family in a table; 0 means no limit
	Fails     error                   // result of all calls, if not nil
	Lost      int                     // number of the next changes whose answers are lost
	Throttled int                     // number of the next calls that are refused because there were too many
	Denied    map[string]bool         // rights that are missing: join, read, put or remove
	Writes    []string                // calls of Put and Remove that were not refused
	Compared  int                     // number of calls of Tables
	Sought    int                     // number of hosts in all calls of Followed
	Stopped   map[string]bool         // targets of hosts that do not run
	Changing  map[netip.Prefix]bool   // destinations of routes that the cloud is still changing
	Refused   int                     // number of calls of Put that the quota has refused
	Denials   int                     // number of calls that were refused because of Denied
	Follow    map[string]string       // tables that packets of hosts follow, by target; missing hosts follow the first table
	Slow      time.Duration           // time that Remove takes
	Appears   func()                  // called by Put before it looks at the table; may be nil
	Removed   func(left int)          // called by Remove with the number of routes left in the table; may be nil
}

// Do runs f while no call is in progress.
func (m *Memory) Do(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func (m *Memory) fail(right string) error {
	if m.Fails != nil {
		return m.Fails
	}
	if m.Throttled > 0 {
		m.Throttled--
		return cloud.ErrThrottled
	}
	if m.Denied[right] {
		m.Denials++
		return &cloud.MissingError{Permissions: []string{"memory:" + right}, Page: "page.md"}
	}
	return nil
}

// answer returns the result of a call that has made a change: ErrUnavailable if its answer is lost, otherwise nil.
func (m *Memory) answer() error {
	if m.Lost == 0 {
		return nil
	}
	m.Lost--
	return cloud.ErrUnavailable
}

// Join implements cloud.Cloud.
func (m *Memory) Join(context.Context) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Self, m.fail("join")
}

// Tables implements cloud.Cloud.
func (m *Memory) Tables(context.Context) ([]cloud.Table, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Compared++
	if err := m.fail("read"); err != nil {
		return nil, err
	}
	var tables []cloud.Table
	for _, t := range m.Tabs {
		t.Routes = slices.Clone(t.Routes)
		for i := range t.Routes {
			r := &t.Routes[i]
			_, exists := m.Hosts[r.Target]
			switch {
			case !r.ByCall || r.Foreign != "":
			case m.Changing[r.Dst]:
				r.State = cloud.Changing
			case !exists:
				r.State = cloud.Gone
			case m.Stopped[r.Target]:
				r.State = cloud.Idle
			}
		}
		tables = append(tables, t)
	}
	return tables, nil
}

// Put implements cloud.Cloud.
func (m *Memory) Put(_ context.Context, r cloud.Route, replace bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("put"); err != nil {
		return err
	}
	t := m.table(r.Table)
	if m.Appears != nil {
		m.Appears()
	}

	same := func(have cloud.Route) bool { return have.Dst == r.Dst && have.ByCall }
	exists := slices.ContainsFunc(t.Routes, same)
	foreign := slices.ContainsFunc(t.Routes, func(have cloud.Route) bool { return same(have) && have.Foreign != "" })
	if exists && !replace || foreign {
		return cloud.ErrExists
	}
	if !exists && m.Quota > 0 && t.Count(prefix.FamilyOf(r.Dst.Addr())) >= m.Quota {
		m.Refused++
		return &cloud.QuotaError{Table: r.Table}
	}

	m.DeleteByHand(r.Table, r.Dst)
	t.Routes = append(t.Routes, cloud.Route{Table: r.Table, Dst: r.Dst, Target: r.Target, ByCall: true})
	m.Writes = append(m.Writes, "put "+r.String())
	return m.answer()
}

// Remove implements cloud.Cloud.
func (m *Memory) Remove(ctx context.Context, r cloud.Route) error {
	if m.Slow > 0 && wait.For(ctx, m.Slow) != nil {
		return cloud.ErrUnavailable
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("remove"); err != nil {
		return err
	}
	t := m.table(r.Table)
	t.Routes = slices.DeleteFunc(t.Routes, func(have cloud.Route) bool {
		return have.Dst == r.Dst && have.Target == r.Target && have.ByCall && have.Foreign == ""
	})

	m.Writes = append(m.Writes, "remove "+r.String())
	if m.Removed != nil {
		m.Removed(len(m.table(r.Table).Routes))
	}
	return m.answer()
}

// Followed implements cloud.Cloud.
func (m *Memory) Followed(_ context.Context, hosts []cloud.Host) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Sought += len(hosts)
	if err := m.fail("read"); err != nil {
		return nil, err
	}

	// A fleet that lives a month asks millions of times.
	targets := map[netip.Addr]string{}
	for target, addresses := range m.Hosts {
		for _, a := range addresses {
			targets[a] = target
		}
	}

	tables := make([]string, len(hosts))
	for n, h := range hosts {
		if i := slices.IndexFunc(h.Addresses, func(a netip.Addr) bool { return targets[a] != "" }); i >= 0 {
			tables[n] = cmp.Or(m.Follow[targets[h.Addresses[i]]], m.Tabs[0].ID)
		}
	}
	return tables, nil
}

// Check implements cloud.Cloud.
func (m *Memory) Check(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, right := range []string{"read", "put", "remove"} {
		if err := m.fail(right); err != nil {
			return err
		}
	}
	return nil
}

// DeleteByHand deletes a route that a call has made. Tests use it in Do.
func (m *Memory) DeleteByHand(table string, dst netip.Prefix) {
	t := m.table(table)
	t.Routes = slices.DeleteFunc(t.Routes, func(have cloud.Route) bool { return have.Dst == dst && have.ByCall })
}

func (m *Memory) table(id string) *cloud.Table {
	for i := range m.Tabs {
		if m.Tabs[i].ID == id {
			return &m.Tabs[i]
		}
	}
	m.Tabs = append(m.Tabs, cloud.Table{ID: id})
	return &m.Tabs[len(m.Tabs)-1]
}
