// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

func TestParse(t *testing.T) {
	full := parse(nil)
	if full.quick {
		t.Errorf("without flags: %+v", full)
	}
	quick := parse([]string{"-quick", "-n", "300", "-rounds", "2", "-only", "cold"})
	if quick.rounds != 2 || quick.large != 300 || !cmp.Equal(quick.cold, []int{300}) || quick.only != "cold" {
		t.Errorf("got %+v", quick)
	}
	if quick.atRest >= full.atRest || quick.restarts >= full.restarts {
		t.Error("a quick run is as long as a full one")
	}
	for _, args := range [][]string{{"surplus"}, {"-rounds", "x"}, {"-unknown"}, {"-only", "cold", "-page", "page.md"}} {
		if err := must.Catch(func() { parse(args) }); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}

func TestQuantile(t *testing.T) {
	for _, tc := range []struct {
		values  []float64
		q, want float64
	}{
		{[]float64{7}, 0.5, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 2, 3}, 0.5, 2.5},
		{[]float64{1, 2, 3}, 0, 1},
		{[]float64{1, 2, 3}, 1, 3},
		{[]float64{0, 100}, 0.99, 99},
	} {
		if got := quantile(tc.values, tc.q); math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("quantile(%v, %v) = %v, want %v", tc.values, tc.q, got, tc.want)
		}
	}
	if got := quantile(nil, 0.5); !math.IsNaN(got) {
		t.Errorf("quantile of no values is %v", got)
	}
}

func testReport() *report {
	r := &report{Date: time.Unix(0, 0), Commit: "abc"}
	for _, v := range []float64{9, 1, 2} { // met, because only the median must meet a target above zero
		r.add("one", "fast", 10, "ms", v, 3)
	}
	r.add("two", "size", -1, "MB", 36, 35)
	for _, v := range []float64{0, 0, 1} { // not met, because every round must meet a target of zero
		r.add("two", "lost", -1, "", v, 0)
	}
	r.add("one", "fast", 5, "ms", 1)
	return r
}

func TestReport(t *testing.T) {
	r := testReport()
	if got, want := r.verdict(), "1 of 3 targets met"; got != want {
		t.Errorf("verdict %q, want %q", got, want)
	}
	if diff := cmp.Diff([]int{10, 5}, r.sizes("one", "fast")); diff != "" {
		t.Errorf("sizes (-want +got):\n%s", diff)
	}
	if r.find("one", "fast", 7) != nil || r.find("one", "slow", 10) != nil {
		t.Error("finds a metric that was not measured")
	}
}

// TestMarkdown checks the tables: a row for each measure, a column for each size. Long tables have only the measures with
// a target.
func TestMarkdown(t *testing.T) {
	r := testReport()
	r.add("two", "files", -1, "", 7)
	const long, files = 2, "| files | 7.00 |\n"
	want := `one

| measure | N=5 | N=10 |
|---|---|---|
| fast, ms | 1.00 | 2.00 (1.00–9.00) ≤3.00 |

### two

| measure | value |
|---|---|
| size, MB | 36.0 ≤35.0 missed |
| lost | 0.00 (0.00–1.00) ≤0.00 missed |
`
	for size, want := range map[int]string{long: want, allMeasures: want + files} {
		var page strings.Builder
		r.markdown(&page, size)
		_, tables, _ := strings.Cut(page.String(), "### ")
		if diff := cmp.Diff(want, tables); diff != "" {
			t.Errorf("tables of %d measures (-want +got):\n%s", size, diff)
		}
	}
}

// TestSave checks that save writes the results and removes a chart for which this run has no data.
func TestSave(t *testing.T) {
	dir := t.TempDir()
	old := filepath.Join(dir, "old.svg")
	if err := os.WriteFile(old, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	testReport().save(options{out: dir})
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the old chart: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "results.json")); err != nil {
		t.Error(err)
	}
}

// TestEntries checks which kernel objects are those of two peers: none may be missing, wrong or for
// another peer.
func TestEntries(t *testing.T) {
	vxlan, hostGW := objectsOf("vxlan"), objectsOf("host-gw")
	of := func(peers []peer, kinds objects) entries {
		e := newEntries()
		for _, p := range peers {
			e.routes[p.subnet] = p.gateway(kinds)
			if kinds.vtep {
				e.neighs[p.subnet.Addr()], e.fdb[p.mac] = p.mac, p.ip
			}
		}
		return e
	}
	two, third := makePeers(2), makePeer(2)
	for _, tt := range []struct {
		name   string
		kinds  objects
		change func(entries)
		want   string // part of the error; empty: no error
	}{
		{"vxlan", vxlan, func(entries) {}, ""},
		{"host-gw", hostGW, func(entries) {}, ""},
		{"a daemon", vxlan, func(e entries) {
			a := netip.MustParseAddr(ownSubnets)
			e.routes[netip.PrefixFrom(a, 24)], e.neighs[a], e.fdb[[6]byte{2}] = a, [6]byte{2}, netip.MustParseAddr("192.168.77.2")
		}, ""},
		{"network of the hosts", hostGW, func(e entries) { e.routes[netip.MustParsePrefix(peerNetwork)] = netip.Addr{} }, ""},
		{"no route", vxlan, func(e entries) { delete(e.routes, two[1].subnet) }, "wrong entries"},
		{"wrong gateway", hostGW, func(e entries) { e.routes[two[1].subnet] = two[0].ip }, "wrong entries"},
		{"wrong neighbour", vxlan, func(e entries) { e.neighs[two[1].subnet.Addr()] = two[0].mac }, "wrong entries"},
		{"wrong FDB entry", vxlan, func(e entries) { e.fdb[two[1].mac] = two[0].ip }, "wrong entries"},
		{"surplus route", vxlan, func(e entries) { e.routes[third.subnet] = third.subnet.Addr() }, "3 routes, 2 neighbours and 2 FDB entries for 2 peers"},
		{"surplus route of host-gw", hostGW, func(e entries) { e.routes[third.subnet] = third.ip }, "3 routes"},
		{"surplus neighbour", vxlan, func(e entries) { e.neighs[third.subnet.Addr()] = third.mac }, "3 neighbours"},
		{"surplus FDB entry", vxlan, func(e entries) { e.fdb[third.mac] = third.ip }, "3 FDB entries"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := of(two, tt.kinds)
			tt.change(e)
			err := e.check(two, tt.kinds)
			if (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// TestPeers checks that no two peers have the same subnet, address, MAC, key or nexthop id, and that
// all are in their ranges. It also checks the lease value and the gateway of one peer, with vxlan
// and with host-gw.
func TestPeers(t *testing.T) {
	network, underlay := netip.MustParsePrefix(podNetwork), netip.MustParsePrefix(peerNetwork)
	seen, own := map[any]bool{}, netip.MustParseAddr(ownSubnets)
	for _, p := range makePeers(20_000) {
		for _, identity := range []any{p.subnet, p.ip, p.mac, p.key(), p.nexthop()} {
			if seen[identity] {
				t.Fatalf("peer %d shares %v", p.i, identity)
			}
			seen[identity] = true
		}
		if !network.Contains(p.subnet.Addr()) || !network.Contains(own) || own.Compare(p.subnet.Addr()) <= 0 || p.subnet.Bits() != 24 || p.subnet != p.subnet.Masked() || !underlay.Contains(p.ip) || p.mac[0]&1 != 0 {
			t.Fatalf("peer %d is not one: %+v", p.i, p)
		}
	}
	p := makePeer(0)
	value := p.value("vxlan", "")
	if !strings.Contains(value, `"VtepMAC":"02:be:00:00:00:01"`) || !strings.Contains(value, `"PublicIP":"`+p.ip.String()+`"`) {
		t.Errorf("value %s", value)
	}
	if value := p.value("host-gw", ""); strings.Contains(value, "BackendData") {
		t.Errorf("value %s", value)
	}
	if got := p.gateway(objectsOf("vxlan")); got != p.subnet.Addr() {
		t.Errorf("gateway is %s", got)
	}
	if got := p.gateway(objectsOf("host-gw")); got != p.ip {
		t.Errorf("gateway is %s", got)
	}
}

// TestConcerned checks that concerned names the object that a message announces. It must return ""
// if the object belongs to another peer or another device.
func TestConcerned(t *testing.T) {
	const device = 7
	p, other := makePeer(3), makePeer(4)
	for _, tc := range []struct {
		name, want string
		build      func(*rtnl)
	}{
		{"its neighbour", "neighbour", func(r *rtnl) { r.putNeigh(device, p.subnet.Addr(), p.mac) }},
		{"its FDB entry", "FDB entry", func(r *rtnl) { r.putFDB(device, p.mac, p.ip) }},
		{"its route", "route", func(r *rtnl) { r.putRoute(p.subnet, device, p.subnet.Addr(), 0) }},
		{"a route of other length", "", func(r *rtnl) { r.putRoute(netip.PrefixFrom(p.subnet.Addr(), 25), device, p.ip, 0) }},
		{"another's neighbour", "", func(r *rtnl) { r.putNeigh(device, other.subnet.Addr(), other.mac) }},
		{"another's FDB entry", "", func(r *rtnl) { r.putFDB(device, other.mac, other.ip) }},
		{"another's route", "", func(r *rtnl) { r.putRoute(other.subnet, device, other.subnet.Addr(), 0) }},
		{"another device", "", func(r *rtnl) { r.putNeigh(device+1, p.subnet.Addr(), p.mac) }},
	} {
		var r rtnl
		tc.build(&r)
		message := r.out
		typ, payload := binary.NativeEndian.Uint16(message[4:]), message[unix.NLMSG_HDRLEN:]
		if got := p.concerned(typ, payload, device, false); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
		if got := p.concerned(typ, payload, device, true); got != "" {
			t.Errorf("%s: created, but reported as deleted: %q", tc.name, got)
		}
		if got := p.concerned(typ, nil, device, false); got != "" {
			t.Errorf("%s: an unrelated message is %q", tc.name, got)
		}
	}
}

func TestFigure(t *testing.T) {
	const page = "# HELP a_b x\n# TYPE a_b gauge\na_b_c 1\na_b 2.5e+06\na_b{x=\"y\"} 3\n"
	if got := figure(page, "a_b"); got != 2.5e6 {
		t.Errorf("got %v", got)
	}
	if err := must.Catch(func() { figure(page, "a") }); err == nil {
		t.Error("a metric that does not exist has a value")
	}
}
