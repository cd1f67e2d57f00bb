// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestViolations checks that violations finds each broken promise, and nothing in a
// history in which all are kept.
func TestViolations(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	one, two := netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("10.5.2.0/24")
	addr := map[string]netip.Addr{"host1": netip.MustParseAddr("192.0.2.1"), "host2": netip.MustParseAddr("192.0.2.2")}
	// sound returns a run of 100 s in which both hosts keep their subnets.
	sound := func() *history {
		return &history{
			start: start, hosts: addr, faults: []fault{{name: "kill", from: at(10), to: at(20)}},
			serves: []serving{{"host1", one, at(0), at(100)}, {"host2", two, at(0), at(100)}},
			store:  []change{{5, at(0), one, addr["host1"]}, {6, at(0), two, addr["host2"]}, {9, at(50), two, addr["host2"]}},
		}
	}
	tests := map[string]struct {
		change func(*history)
		want   string // part of the violations; empty: there are none
	}{
		"sound": {change: func(*history) {}},
		"two hosts with one subnet": {
			change: func(h *history) { h.serves = append(h.serves, serving{"host2", one, at(30), at(40)}) },
			want:   "host1 and host2 served 10.5.1.0/24 at the same time, 30s to 40s",
		},
		"overlapping subnets": {
			change: func(h *history) {
				h.serves = append(h.serves, serving{"host2", netip.MustParsePrefix("10.5.0.0/16"), at(30), at(40)})
				h.serves = h.serves[:1:1]
				h.serves = append(h.serves, serving{"host2", netip.MustParsePrefix("10.5.0.0/16"), at(30), at(100)})
			},
			want: "at the same time",
		},
		"one after the other": {
			change: func(h *history) {
				h.serves = []serving{{"host1", one, at(0), at(40)}, {"host1", two, at(41), at(100)}, {"host2", one, at(45), at(100)}}
				h.store = append(h.store, change{7, at(39), one, netip.Addr{}})
			},
		},
		"route to a host that is there": {
			change: func(h *history) { h.routes = append(h.routes, routeLoss{"host1", two, at(60)}) },
			want:   "host1 removed the route to 10.5.2.0/24 of host2 at 1m0s",
		},
		"route to a subnet that was left": {
			change: func(h *history) {
				h.serves[1].to = at(50)
				h.store = append(h.store, change{10, at(49), two, netip.Addr{}})
				h.routes = append(h.routes, routeLoss{"host1", two, at(51)})
			},
		},
		"own route": {change: func(h *history) { h.routes = append(h.routes, routeLoss{"host2", two, at(60)}) }},
		"subnet left with the lease": {
			change: func(h *history) { h.serves[1].to = at(60) },
			want:   "host2 left 10.5.2.0/24 at 1m0s although it had the lease",
		},
		"subnet left without the lease": {
			change: func(h *history) {
				h.serves[1].to = at(60)
				h.store = append(h.store, change{10, at(58), two, netip.Addr{}})
			},
		},
		"lease deleted right after": {
			change: func(h *history) {
				h.serves[1].to = at(60)
				h.store = append(h.store, change{10, at(61), two, netip.Addr{}})
			},
		},
		"changes out of order": {
			change: func(h *history) {
				h.serves[1].to = at(60)
				h.store = append(h.store, change{10, at(55), two, netip.Addr{}}, change{8, at(57), two, addr["host2"]})
			},
		},
		"line repeated": {
			change: func(h *history) {
				h.countLines("host1", strings.Repeat("E1124 10:00:00.123456 7 x.go:12] no answer from 192.0.2.1:2379 within 5s\n", 21))
			},
			want: "host1 logged 21 times, more than 20: no answer from # within #s",
		},
		"lines of different kinds": {
			change: func(h *history) {
				h.countLines("host1", strings.Repeat("E1124 10:00:00.1 7 x.go:12] a\n", 20)+strings.Repeat("I1124 10:00:00.1 7 x.go:12] b\n", 20))
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := sound()
			test.change(h)
			got := strings.Join(h.violations(), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
