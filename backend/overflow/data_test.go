// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestDecode(t *testing.T) {
	subnettest.CheckLeaseData(t, "overflow", data{}, func(raw json.RawMessage) error {
		_, _, err := decode(raw)
		return err
	})
}

// TestObstacle checks between which hosts the routers carry packets. Both hosts must come to the
// same result, because packets that travel by the cloud in only one direction may be dropped.
func TestObstacle(t *testing.T) {
	inside := data{Table: "rtb-1", Routed: []string{"rtb-1"}}
	full := data{Table: "rtb-1", Why: "quota"}
	for name, tt := range map[string]struct {
		own, peer data
		want      string // part of the obstacle; empty: the cloud carries the packets
	}{
		"both have a route in one table":           {inside, inside, ""},
		"the table is full for the peer":           {inside, full, `table "rtb-1" has no route to it: the quota of routes is used up`},
		"the table is full for this host":          {full, inside, `table "rtb-1", which its packets follow, has no route to this host: the quota of routes is used up`},
		"the table is full for both":               {full, full, `has no route to it: the quota`},
		"the peer has not put its route yet":       {inside, data{Table: "rtb-1"}, `table "rtb-1" has no route to it`},
		"the peer lacks the right":                 {inside, data{Table: "rtb-1", Why: "denied"}, "permissions are missing"},
		"a reason of a later version":              {inside, data{Table: "rtb-1", Why: "moon"}, `table "rtb-1" has no route to it`},
		"the peer is in another VPC":               {inside, data{Table: "rtb-9", Routed: []string{"rtb-9"}}, `table "rtb-1" has no route to it`},
		"the peer is outside of the cloud":         {inside, data{Why: "unavailable"}, `table "rtb-1" has no route to it: the cloud does not answer`},
		"this host is outside of the cloud":        {data{Why: "unavailable"}, inside, "this host has found no route table that its packets follow: the cloud does not answer"},
		"the cloud drops packets of this host":     {data{Why: "failed"}, inside, "this host has found no route table that its packets follow: another error"},
		"both are outside of the cloud":            {data{}, data{}, "this host has found no route table"},
		"two tables that both have both routes":    {data{"rtb-1", []string{"rtb-1", "rtb-2"}, "", nil}, data{"rtb-2", []string{"rtb-1", "rtb-2"}, "", nil}, ""},
		"two tables, one is full for the peer":     {data{"rtb-1", []string{"rtb-1", "rtb-2"}, "", nil}, data{"rtb-2", []string{"rtb-2"}, "quota", nil}, `table "rtb-1" has no route to it`},
		"two tables, one is full for this host":    {data{"rtb-1", []string{"rtb-1"}, "", nil}, data{"rtb-2", []string{"rtb-1", "rtb-2"}, "", nil}, `table "rtb-2", which its packets follow, has no route to this host`},
		"packets of the peer follow another table": {inside, data{Routed: []string{"rtb-1"}, Why: "denied"}, "it has found no route table that its packets follow: permissions are missing"},
	} {
		there, back := obstacle(tt.own, tt.peer), obstacle(tt.peer, tt.own)
		if tt.want == "" && there != "" || !strings.Contains(there, tt.want) {
			t.Errorf("%s: %q, want %q", name, there, tt.want)
		}
		if (there == "") != (back == "") {
			t.Errorf("%s: this host says %q, and the peer %q", name, there, back)
		}
	}
}

// TestAfter checks the data of a host after comparisons with the tables.
func TestAfter(t *testing.T) {
	dst := netip.MustParsePrefix("10.5.1.0/24")
	tables := func(routes ...cloud.RouteReport) cloud.Report {
		return cloud.Report{Tables: []cloud.TableReport{{ID: "b", Name: "rtb-b"}, {ID: "a", Name: "rtb-a", Own: true}}, Routes: routes}
	}
	route := func(table string, present, seen bool) cloud.RouteReport {
		return cloud.RouteReport{Route: cloud.Route{Table: table, Dst: dst}, Present: present, Seen: seen}
	}
	dropped := tables(route("a", true, true), route("b", true, true))
	dropped.Dropped = true
	quota := &cloud.QuotaError{Table: "a", Limit: 2}
	both := data{Table: "rtb-a", Routed: []string{"rtb-a", "rtb-b"}}
	for name, tt := range map[string]struct {
		before data
		report cloud.Report
		err    error
		want   data
	}{
		"both routes were seen":                        {data{}, tables(route("a", true, true), route("b", true, true)), nil, both},
		"both routes were just put":                    {data{}, tables(route("a", true, false), route("b", true, false)), nil, data{Table: "rtb-a"}},
		"lost routes were put back":                    {both, tables(route("a", true, false), route("b", true, false)), nil, both},
		"one table is full":                            {data{}, tables(route("a", false, false), route("b", true, true)), quota, data{"rtb-a", []string{"rtb-b"}, "quota", nil}},
		"another table is full":                        {data{}, tables(route("a", true, true), route("b", false, false)), quota, data{"rtb-a", []string{"rtb-a"}, "", nil}},
		"a lost route cannot be put back":              {both, tables(route("a", false, false), route("b", true, true)), quota, data{"rtb-a", []string{"rtb-b"}, "quota", nil}},
		"the table had place":                          {data{"rtb-a", nil, "quota", nil}, tables(route("a", true, true), route("b", true, true)), nil, both},
		"the cloud does not answer":                    {both, cloud.Report{}, cloud.ErrUnavailable, both},
		"a new host, the cloud does not answer":        {data{}, cloud.Report{}, cloud.ErrUnavailable, data{Why: "unavailable"}},
		"the table is full, the cloud does not answer": {data{"rtb-a", nil, "quota", nil}, cloud.Report{}, cloud.ErrThrottled, data{"rtb-a", nil, "quota", nil}},
		"the cloud drops the packets":                  {both, dropped, &cloud.DroppedError{Err: errors.New("canIpForward is off")}, data{Why: "failed"}},
		"the cloud drops them, and does not answer":    {data{Why: "failed"}, dropped, cloud.ErrUnavailable, data{Why: "failed"}},
		"a right is missing":                           {data{}, tables(route("a", false, false), route("b", false, false)), &cloud.MissingError{Permissions: []string{"x"}}, data{"rtb-a", nil, "denied", nil}},
		"another error":                                {data{Why: "quota"}, cloud.Report{}, errors.New("no interface"), data{Why: "failed"}},
		"a route of another family":                    {data{}, tables(cloud.RouteReport{Route: cloud.Route{Table: "a", Dst: netip.MustParsePrefix("fd00::/64")}, Present: true, Seen: true}), nil, data{Table: "rtb-a"}},
	} {
		tunnel := json.RawMessage(`{"VNI":1}`)
		tt.before.Overflow, tt.want.Overflow = tunnel, tunnel
		if diff := cmp.Diff(tt.want, tt.before.after(tt.report, dst, tt.err)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", name, diff)
		}
	}
}
