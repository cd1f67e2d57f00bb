// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// subnetOf returns the IPv4 subnet number n, for 0 <= n < 65536.
func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), 0}), 24)
}

// TestAnnouncementIsSmall announces many hosts with long reasons. It expects that the announcement fits into an
// annotation of Kubernetes, that equal states have equal texts, and that each host without a route gets a reason.
func TestAnnouncementIsSmall(t *testing.T) {
	var r Report
	for n := range 2000 {
		r.Routed = append(r.Routed, subnetOf(n))
		r.Unrouted = append(r.Unrouted, Unrouted{subnetOf(10000 + n), fmt.Sprintf("%d %s", n, strings.Repeat("é", 500)), "failed"})
	}
	text, omitted, err := announce(r, errors.New(strings.Repeat("x", 1000)), false)
	if err != nil || len(text) > mostText || omitted != "" {
		t.Fatalf("%d bytes without %q, error %v", len(text), omitted, err)
	}
	slices.Reverse(r.Routed)
	slices.Reverse(r.Unrouted)
	if again, _, _ := announce(r, errors.New(strings.Repeat("x", 1000)), false); string(again) != string(text) {
		t.Error("equal states have different texts")
	}
	var a announcement
	if err := json.Unmarshal(text, &a); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int]string{10000: "says the leader one: 0 é", 11999: "says the leader one: " + otherReason, 5000: "cannot write: xxx"} {
		if err := a.check([]netip.Prefix{subnetOf(n)}, "one"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", subnetOf(n), err, want)
		}
	}
	if err := a.check([]netip.Prefix{subnetOf(0), subnetOf(1999)}, "one"); err != nil {
		t.Error(err)
	}
}

// hostOf returns the subnets of the dual-stack host number n, from 0. Their texts are as long as texts of subnets
// can be.
func hostOf(n int) []netip.Prefix {
	v4 := netip.AddrFrom4([4]byte{200, 100 + byte(n>>7), 100 + byte(n&127), 0})
	v6 := netip.AddrFrom16([16]byte{0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xc0 | byte(n>>8), byte(n)})
	return []netip.Prefix{netip.PrefixFrom(v4, 24), netip.PrefixFrom(v6, 64)}
}

// TestLargeAnnouncement announces so many hosts that the complete text comes near to the limit, or exceeds it. It
// expects that the text fits, that omitted names the part that was left out, and that hosts learn the rest.
func TestLargeAnnouncement(t *testing.T) {
	const (
		waits         = "has not put the route"
		reason        = "says the leader one: 1 "
		toldElsewhere = "says the leader one: " + otherReason
		tooMany       = "too many subnets"
	)
	for name, tt := range map[string]struct {
		routed, unrouted int    // number of hosts with a route, and without
		reason           string // text of the reasons, after a number below 100
		omitted          string // the beginning of the expected omitted
		first, second    string // expected errors of the first host with a route, and of the second one without; empty for no error
		other            string // expected error of a host that the leader does not know; empty for no error
	}{
		"5,000 hosts with a route":            {5000, 2, " a quota", "", "", reason, waits},
		"100 long reasons":                    {3000, 200, strings.Repeat("<", 500), "the reasons", "", toldElsewhere, waits}, // JSON has six bytes for <
		"8,000 hosts with a route":            {8000, 2, " a quota", "the subnets with a route", "", reason, ""},
		"8,000 with a route, long reasons":    {8000, 2000, strings.Repeat("<", 500), "the reasons, and the subnets with a route", "", toldElsewhere, ""},
		"8,000 hosts without a route":         {100, 8000, " a quota", "the subnets without a route", "", waits, waits},
		"8,000 hosts with, and 8,000 without": {8000, 8000, " a quota", "all subnets", tooMany, tooMany, tooMany},
	} {
		t.Run(name, func(t *testing.T) {
			var r Report
			for n := range tt.routed {
				r.Routed = append(r.Routed, hostOf(n)...)
			}
			for n := range tt.unrouted {
				for _, dst := range hostOf(tt.routed + n) {
					r.Unrouted = append(r.Unrouted, Unrouted{dst, fmt.Sprint(n%100) + tt.reason, "quota"})
				}
			}
			text, omitted, err := announce(r, nil, false)
			if err != nil || len(text) > mostText || !strings.HasPrefix(omitted, tt.omitted) || tt.omitted == "" && omitted != "" {
				t.Fatalf("%d bytes without %q, error %v, want at most %d without %q", len(text), omitted, err, mostText, tt.omitted)
			}
			var a announcement
			if err := json.Unmarshal(text, &a); err != nil {
				t.Fatal(err)
			}
			for n, want := range map[int]string{0: tt.first, tt.routed + 1: tt.second, tt.routed + tt.unrouted: tt.other} {
				if err := a.check(hostOf(n), "one"); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
					t.Errorf("host %d: error %v, want %q", n, err, want)
				}
			}
		})
	}
}

// TestAnnouncementIsOneLine expects that an error shows texts of an announcement in one short line, even if another
// program has written them.
func TestAnnouncementIsOneLine(t *testing.T) {
	dirty := "a\nb\x1b[31m" + strings.Repeat("c", 1000)
	for _, a := range []announcement{{Unrouted: []unrouted{{dirty, "quota", []netip.Prefix{subnetOf(1)}}}}, {Error: dirty}} {
		err := a.check([]netip.Prefix{subnetOf(1)}, "one")
		if text := fmt.Sprint(err); !strings.Contains(text, "a b [31mccc") || len(text) > 400 {
			t.Errorf("error %q, want one short line", text)
		}
	}
}

// TestTablesInAnnouncement expects that hosts with a tunnel learn the tables if these fit into the announcement, and
// which of their routes the tables had when the leader read them.
func TestTablesInAnnouncement(t *testing.T) {
	for name, tt := range map[string]struct {
		hosts   int
		reason  string
		omitted string // the beginning of the expected omitted
		known   bool   // the announcement must have the tables
	}{
		"few hosts":    {10, " a quota", "", true},
		"3,400 hosts":  {3400, " a quota", "", true},
		"long reasons": {3400, strings.Repeat("<", 500), "the reasons", true},
		"4,500 hosts":  {4500, " a quota", "the reasons, and the route tables", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := Report{Tables: []TableReport{{Name: "rtb-z"}, {Name: "rtb-a"}}}
			for n := range tt.hosts {
				both, table := hostOf(n), &r.Tables[n%2]
				table.Hosts = append(table.Hosts, both[0])
				if n%10 == 9 {
					for _, dst := range both {
						r.Unrouted = append(r.Unrouted, Unrouted{dst, fmt.Sprint(n%100) + tt.reason, "quota"})
					}
					r.Tables[0].Seen = append(r.Tables[0].Seen, both[0]) // only this table has the route
					continue
				}
				r.Routed = append(r.Routed, both...)
				r.Tables[0].Seen = append(r.Tables[0].Seen, both...)
				if n%10 != 8 { // for host 8, 18 and so on, the route was just put into the other table
					r.Tables[1].Seen = append(r.Tables[1].Seen, both...)
				}
			}
			text, omitted, err := announce(r, nil, true)
			if err != nil || len(text) > mostText || !strings.HasPrefix(omitted, tt.omitted) || tt.omitted == "" && omitted != "" {
				t.Fatalf("%d bytes without %q, error %v, want at most %d without %q", len(text), omitted, err, mostText, tt.omitted)
			}
			slices.Reverse(r.Routed)
			slices.Reverse(r.Tables)
			slices.Reverse(r.Tables[0].Hosts)
			if again, _, _ := announce(r, nil, true); string(again) != string(text) {
				t.Error("equal states have different texts")
			}
			var a announcement
			if err := json.Unmarshal(text, &a); err != nil {
				t.Fatal(err)
			}
			if (a.Tables != nil) != tt.known {
				t.Fatalf("the tables are %+v, want them to be known: %v", a.Tables, tt.known)
			}
			if !tt.known {
				return
			}
			for n, want := range map[int]struct {
				own                               string
				a0, a1, z0, z1, complete, inPlace bool // a0 is set if rtb-a had the route to the first subnet, z1 if rtb-z had that to the second
			}{
				0:        {"rtb-z", true, true, true, true, true, true},
				8:        {"rtb-z", false, false, true, true, false, true},
				9:        {"rtb-a", false, false, true, false, false, false},
				tt.hosts: {"", false, false, false, false, false, false},
			} {
				tables, routes, complete := a.tables(hostOf(n))
				own := Report{Tables: tables}.followed()
				if len(routes) != 4 || own != want.own || routes[0].Seen != want.a0 || routes[1].Seen != want.a1 || routes[2].Seen != want.z0 || routes[3].Seen != want.z1 || complete != want.complete || routes[0].Present != want.inPlace {
					t.Errorf("host %d: table %q, routes %+v, complete %v, want %+v", n, own, routes, complete, want)
				}
			}
		})
	}
}

// TestTooManyTables expects that a host refuses an announcement with too many tables, or with a table whose name is
// too long, because the host publishes these names.
func TestTooManyTables(t *testing.T) {
	for name, tt := range map[string]struct {
		tables int
		name   string
		want   string
	}{
		"the most":         {mostTables, strings.Repeat("x", mostName), "<nil>"},
		"too many":         {mostTables + 1, "x", "101 tables, more than 100"},
		"a name too large": {1, strings.Repeat("x", mostName+1), "the name of a table has 101 bytes, more than 100"},
	} {
		text, err := json.Marshal(announcement{Tables: slices.Repeat([]routerTable{{Name: tt.name}}, tt.tables)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parse(text); fmt.Sprint(err) != tt.want {
			t.Errorf("%s: error %v, want %s", name, err, tt.want)
		}
	}
}

// FuzzAnnouncement lets a host read announcements that any program with access to the store may have written. It
// expects that errors and names of tables are one short line, and that the host reports only routes to itself.
func FuzzAnnouncement(f *testing.F) {
	f.Add([]byte(`{"routed":["10.5.2.0/24"],"tables":[{"name":"a\nb","hosts":["10.5.2.0/24"],"less":["10.5.2.0/24"],"more":["fd00::/64"]}],"unrouted":[{"reason":"a\u0000","kind":"x","subnets":["10.5.2.0/24"]}],"error":"\n"}`))
	f.Add([]byte(`{"routed":[],"rest":true,"tables":[{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		own := []netip.Prefix{subnetOf(2), netip.MustParsePrefix("fd00::/64")}
		for _, tunnel := range []bool{false, true} {
			e := NewElected(ElectedConfig{KeeperConfig: KeeperConfig{Own: Host{Subnets: own}, Compared: func() {}, Tunnel: tunnel}})
			e.follow("leader", text, nil)
			r := e.Report()
			for _, shown := range []string{errorText(e.err), r.followed()} {
				if strings.ContainsAny(shown, "\n\x00\x1b") || len(shown) > 1000 {
					t.Errorf("%q is not one short line", shown)
				}
			}
			for _, one := range r.Routes {
				if one.Seen && !one.Present || !slices.Contains(own, one.Dst) {
					t.Errorf("the route %+v is seen and not there, or not of this host", one)
				}
			}
		}
	})
}
