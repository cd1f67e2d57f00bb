// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
)

// byCall returns a route in table t1 that a call has made.
func byCall(dst, target string) Route {
	return Route{Table: "t1", Dst: netip.MustParsePrefix(dst), Target: target, ByCall: true}
}

// in returns r in another state.
func (r Route) in(s State) Route {
	r.State = s
	return r
}

// foreign returns r as a route of another program.
func foreign(r Route) Route {
	r.Foreign = "which leads to no host"
	return r
}

// learned returns r as a route that a gateway has learned.
func learned(r Route) Route {
	r.ByCall = false
	return r
}

const (
	own  = "10.5.1.0/24"
	peer = "10.5.2.0/24"
	free = "10.5.3.0/24"
)

// TestDecide checks the whole life of a route for the host "me" with the subnet own. The host "peer" has the subnet
// peer. The store has answered long ago, and each route has been there for age. A step is described by its verb, its
// route, and the other route or the reason.
func TestDecide(t *testing.T) {
	const long = 10 * time.Hour
	right := byCall(own, "me")
	full := map[place]int{{"t1", prefix.IPv4}: 1}
	for name, test := range map[string]struct {
		have   []Route
		age    time.Duration
		change func(*view)
		want   []string
		again  time.Duration
	}{
		// The wanted route.
		"missing":                           {want: []string{"create 10.5.1.0/24 to me"}},
		"right":                             {have: []Route{right}},
		"to another host":                   {have: []Route{byCall(own, "peer")}, want: []string{"replace 10.5.1.0/24 to peer"}},
		"stopped":                           {have: []Route{right.in(Idle)}, want: []string{"replace 10.5.1.0/24 to me"}},
		"to nowhere":                        {have: []Route{byCall(own, "old").in(Gone)}, want: []string{"replace 10.5.1.0/24 to old"}},
		"to nowhere, and to another host":   {have: []Route{byCall(own, "old").in(Gone), byCall(own, "peer")}, want: []string{"replace 10.5.1.0/24 to peer"}},
		"a wrong one beside the right one":  {have: []Route{right, byCall(own, "peer")}, want: []string{"replace 10.5.1.0/24 to peer"}},
		"a larger destination is no match":  {have: []Route{byCall("10.5.0.0/16", "me")}, want: []string{"create 10.5.1.0/24 to me"}},
		"learned from a gateway":            {have: []Route{learned(byCall(own, "vgw"))}, want: []string{"create 10.5.1.0/24 to me"}},
		"being changed":                     {have: []Route{right.in(Changing)}, want: []string{"refuse 10.5.1.0/24 to me: " + errChanging.Error()}},
		"being deleted":                     {have: []Route{byCall(own, "peer").in(Changing)}, want: []string{"refuse 10.5.1.0/24 to peer: " + errChanging.Error()}},
		"of another program":                {have: []Route{foreign(byCall(own, "tgw"))}, want: []string{"refuse 10.5.1.0/24 to tgw: " + errForeign.Error()}},
		"of another program, to nowhere":    {have: []Route{foreign(byCall(own, "tgw").in(Gone))}, want: []string{"refuse 10.5.1.0/24 to tgw: " + errForeign.Error()}},
		"of another program, beside it":     {have: []Route{foreign(byCall(own, "tgw").in(Idle))}, change: several, want: []string{"create 10.5.1.0/24 to me"}},
		"of another program, instead of it": {have: []Route{foreign(byCall(own, "tgw")), right.in(Idle)}, change: several, want: []string{"refuse 10.5.1.0/24 to tgw: " + errForeign.Error()}},
		"to another host, no store":         {have: []Route{byCall(own, "peer")}, change: unanswered, want: []string{"refuse 10.5.1.0/24 to peer: " + errUnanswered.Error()}},
		"to nowhere, no store":              {have: []Route{byCall(own, "old").in(Gone)}, change: unanswered, want: []string{"replace 10.5.1.0/24 to old"}},
		"missing, no store":                 {change: unanswered, want: []string{"create 10.5.1.0/24 to me"}},
		// Routes of no use.
		"unleased, new":                        {have: []Route{right, byCall(free, "peer")}, age: 29 * time.Minute, again: time.Minute},
		"unleased, its target has a lease":     {have: []Route{right, byCall(free, "peer")}, age: 30 * time.Minute, want: []string{"remove 10.5.3.0/24 to peer: " + whyUnleased}},
		"unleased, its target is unknown":      {have: []Route{right, byCall(free, "old")}, age: long, want: []string{"remove 10.5.3.0/24 to old: " + whyUnleased}},
		"unleased, to nowhere, new":            {have: []Route{right, byCall(free, "old").in(Gone)}, age: time.Minute, again: time.Minute},
		"unleased, to nowhere":                 {have: []Route{right, byCall(free, "old").in(Gone)}, age: 2 * time.Minute, want: []string{"remove 10.5.3.0/24 to old: " + whyUnleased}},
		"unleased, stopped":                    {have: []Route{right, byCall(free, "old").in(Idle)}, age: 2 * time.Minute, want: []string{"remove 10.5.3.0/24 to old: " + whyUnleased}},
		"unleased, being changed":              {have: []Route{right, byCall(free, "old").in(Changing)}, age: long},
		"unleased, the store came back lately": {have: []Route{right, byCall(free, "old")}, age: long, change: func(v *view) { v.known = v.now.Add(-20 * time.Minute) }, again: 10 * time.Minute},
		"unleased, no store":                   {have: []Route{right, byCall(free, "old").in(Gone)}, age: long, change: unanswered},
		"leased, to another host":              {have: []Route{right, byCall(peer, "old")}, age: long},
		"leased, to nowhere":                   {have: []Route{right, byCall(peer, "peer").in(Gone)}, age: long},
		"a part of a lease":                    {have: []Route{right, byCall("10.5.2.0/25", "old")}, age: long},
		"unleased, of another size":            {have: []Route{right, byCall("10.5.3.0/25", "old")}, age: long},
		"unleased, outside":                    {have: []Route{right, byCall("10.6.3.0/24", "old"), byCall("0.0.0.0/0", "old")}, age: long},
		"unleased, of another program":         {have: []Route{right, foreign(byCall(free, "tgw")), learned(byCall("10.5.4.0/24", "vgw"))}, age: long},
		// Routes to this host.
		"a former subnet, new":         {have: []Route{right, byCall(free, "me")}, age: 14 * time.Minute, again: time.Minute},
		"a former subnet":              {have: []Route{right, byCall(free, "me")}, age: 15 * time.Minute, want: []string{"remove 10.5.3.0/24 to me: " + whyMine}},
		"a former subnet, no store":    {have: []Route{right, byCall(free, "me")}, age: 15 * time.Minute, change: unanswered, want: []string{"remove 10.5.3.0/24 to me: " + whyMine}},
		"a former subnet, another has": {have: []Route{right, byCall(peer, "me")}, age: 15 * time.Minute, want: []string{"remove 10.5.2.0/24 to me: " + whyMine}},
		// A full table.
		"full, nothing to remove":      {have: []Route{byCall(peer, "peer")}, age: long, change: fills(full), want: []string{"create 10.5.1.0/24 to me"}},
		"full, one is stopped":         {have: []Route{byCall(peer, "peer").in(Idle)}, age: long, change: fills(full), want: []string{"create 10.5.1.0/24 to me"}},
		"full, one is gone, new":       {have: []Route{byCall(peer, "peer").in(Gone)}, age: 40 * time.Second, change: fills(full), want: []string{"create 10.5.1.0/24 to me"}, again: 20 * time.Second},
		"full, one is gone":            {have: []Route{byCall(peer, "peer").in(Gone)}, age: time.Minute, change: fills(full), want: []string{"remove 10.5.2.0/24 to peer: " + whyGone, "create 10.5.1.0/24 to me"}},
		"full, one is gone, no store":  {have: []Route{byCall(peer, "peer").in(Gone)}, age: time.Minute, change: func(v *view) { unanswered(v); v.full = full }, want: []string{"remove 10.5.2.0/24 to peer: " + whyGone, "create 10.5.1.0/24 to me"}},
		"full, one is unleased":        {have: []Route{byCall(peer, "peer").in(Gone), byCall(free, "old")}, age: long, change: fills(full), want: []string{"remove 10.5.3.0/24 to old: " + whyUnleased, "create 10.5.1.0/24 to me"}},
		"full, two are gone":           {have: []Route{byCall(peer, "peer").in(Gone), byCall("10.5.2.0/24", "old").in(Gone)}, age: long, change: fills(full), want: []string{"remove 10.5.2.0/24 to peer: " + whyGone, "create 10.5.1.0/24 to me"}},
		"full, the gone one is theirs": {have: []Route{foreign(byCall(peer, "peer").in(Gone))}, age: long, change: fills(full), want: []string{"create 10.5.1.0/24 to me"}},
		"the other family is full":     {have: []Route{right, byCall(peer, "peer").in(Gone)}, age: long, change: fills(map[place]int{{"t1", prefix.IPv6}: 1})},
	} {
		now := time.Now()
		v := view{
			tables: []Table{{ID: "t1", Routes: test.have}}, networks: prefixtest.Parse("10.5.0.0/16"), subnets: prefixtest.Parse(own), self: "me",
			wanted: []want{{Dst: netip.MustParsePrefix(own), Target: "me"}},
			hosts:  []Host{{Subnets: prefixtest.Parse(own)}, {Subnets: prefixtest.Parse(peer)}}, known: now.Add(-24 * time.Hour), answered: true,
			since: map[Route]time.Time{}, now: now, resync: 5 * time.Minute, factor: 2,
		}
		for _, r := range test.have {
			v.since[r] = now.Add(-test.age)
		}
		if test.change != nil {
			test.change(&v)
		}
		steps, _, again := decide(v)
		var got []string
		for _, s := range steps {
			verb := [...]string{create: "create", replace: "replace", remove: "remove", refuse: "refuse"}[s.verb]
			about, reason := s.Route, ""
			if s.verb == replace || s.verb == refuse {
				about = s.was
			}
			if s.why != "" {
				reason = ": " + s.why
			}
			if s.reason != nil {
				reason = ": " + s.reason.Error()
			}
			got = append(got, fmt.Sprintf("%s %s to %s%s", verb, about.Dst, about.Target, reason))
		}
		if !slices.Equal(got, test.want) || again.Round(time.Second) != test.again {
			t.Errorf("%s: %q, again after %v, want %q, %v", name, got, again, test.want, test.again)
		}
	}
}

func several(v *view) { v.tables[0].Several = true }

func unanswered(v *view) {
	v.hosts = nil
	v.known = time.Time{}
	v.answered = false
}

func fills(full map[place]int) func(*view) { return func(v *view) { v.full = full } }

// TestDecideForEachTableAndFamily expects that each table gets the routes of both families.
func TestDecideForEachTableAndFamily(t *testing.T) {
	steps, _, _ := decide(view{
		tables: []Table{{ID: "t1"}, {ID: "t2"}},
		wanted: []want{{Dst: netip.MustParsePrefix(own), Target: "me"}, {Dst: netip.MustParsePrefix("fd00:10:5:1::/64"), Target: "me"}},
	})
	if len(steps) != 4 {
		t.Errorf("%d steps, want 4: %v", len(steps), steps)
	}
}

func TestUnreached(t *testing.T) {
	const foreignIdle = "10.5.4.0/24"
	hosts := []Host{{Subnets: prefixtest.Parse(own)}, {Subnets: prefixtest.Parse(peer)}, {Subnets: prefixtest.Parse(free)}, {Subnets: prefixtest.Parse(foreignIdle)}}
	tables := []Table{
		{ID: "t1", Own: true, Routes: []Route{byCall(own, "me"), byCall(peer, "peer").in(Idle), foreign(byCall(foreignIdle, "tgw").in(Idle))}},
		{ID: "t2", Routes: []Route{byCall(free, "other")}},
	}
	if got := unreached(tables, hosts); len(got) != 2 || got[0].Subnets[0].String() != free || got[1].Subnets[0].String() != foreignIdle {
		t.Errorf("unreached are %v, want the last two hosts", got)
	}
}
