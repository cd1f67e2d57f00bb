// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/prefix/prefixtest"
)

// byCall returns a route in table t1 that a call has made.
func byCall(dst, target string) Route {
	return Route{Table: "t1", Dst: netip.MustParsePrefix(dst), Target: target, ByCall: true}
}

// values returns the options with which cmp.Diff compares routes with ==.
func values() cmp.Option {
	return cmp.Options{cmp.Comparer(func(a, b Route) bool { return a == b }), cmp.AllowUnexported(change{}), cmpopts.EquateEmpty()}
}

func TestChanges(t *testing.T) {
	wanted := byCall("10.5.1.0/24", "me")
	lost := wanted
	lost.Lost = true
	other := byCall("10.5.1.0/24", "other")
	foreign := byCall("10.5.1.0/24", "other")
	foreign.Foreign = true
	learned := byCall("10.5.1.0/24", "gateway")
	learned.ByCall = false
	for name, test := range map[string]struct {
		have []Route
		want []change
	}{
		"missing":                          {nil, []change{{Route: wanted}}},
		"right":                            {[]Route{wanted}, nil},
		"to another host":                  {[]Route{other}, []change{{wanted, other}}},
		"to nowhere":                       {[]Route{lost}, []change{{wanted, lost}}},
		"to nowhere, and to another host":  {[]Route{lost, other}, []change{{wanted, other}}},
		"to another host, and to nowhere":  {[]Route{other, lost}, []change{{wanted, other}}},
		"to nowhere, beside the right one": {[]Route{lost, wanted}, []change{{wanted, lost}}},
		"a wrong one beside the right one": {[]Route{wanted, other}, []change{{wanted, other}}},
		"of another program":               {[]Route{foreign}, []change{{Route: wanted}}},
		"of another program, and right":    {[]Route{foreign, wanted}, nil},
		"learned from a gateway":           {[]Route{learned}, []change{{Route: wanted}}},
		"other destinations are left":      {[]Route{wanted, byCall("10.5.2.0/24", "me"), byCall("0.0.0.0/0", "gateway"), byCall("10.5.1.0/25", "x")}, nil},
		"a larger destination is no match": {[]Route{byCall("10.5.0.0/16", "me")}, []change{{Route: wanted}}},
	} {
		got := changes([]Table{{ID: "t1", Routes: test.have}}, []want{{Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: "me"}})
		if diff := cmp.Diff(test.want, got, values()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	two := changes([]Table{{ID: "t1"}, {ID: "t2"}}, []want{{Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: "me"}, {Dst: netip.MustParsePrefix("fd00:10:5:1::/64"), Target: "me"}})
	if len(two) != 4 {
		t.Errorf("%d calls for two subnets in two tables, want 4: %v", len(two), two)
	}
}

func TestOverlap(t *testing.T) {
	tables := []Table{{ID: "t0"}, {ID: "t1", Routes: []Route{byCall("10.5.1.0/24", "me"), byCall("192.168.0.0/16", "local"), byCall("fd00::/16", "local")}}}
	own := func(r Route) bool { return r.Target == "local" }
	for network, want := range map[string]string{
		"10.5.0.0/16": "", "192.168.7.0/24": "192.168.0.0/16", "192.0.0.0/8": "192.168.0.0/16", "fd00:10::/32": "fd00::/16",
	} {
		n, r, found := Overlap(tables, prefixtest.Parse("172.16.0.0/16", network), own)
		if found != (want != "") || found && (n.String() != network || r.Dst.String() != want) {
			t.Errorf("%s: %s overlaps %s (%v), want %q", network, n, r, found, want)
		}
	}
}

func TestUnclaimed(t *testing.T) {
	kept := byCall("10.5.9.0/24", "gone")
	kept.ByCall = false
	gone4, gone6 := byCall("10.5.3.0/24", "gone"), byCall("fd00:10:5:3::/64", "gone")
	tables := []Table{{ID: "t1", Routes: []Route{
		byCall("10.5.1.0/24", "me"), byCall("10.5.2.0/25", "peer"), byCall("10.6.1.0/24", "gone"), byCall("10.0.0.0/8", "gone"), byCall("0.0.0.0/0", "gone"), kept, gone4, gone6,
	}}}
	leases := prefixtest.Parse("10.5.1.0/24", "10.5.2.0/24", "fd00:10:5:1::/64")
	got := unclaimed(tables, prefixtest.Parse("10.5.0.0/16", "fd00:10:5::/48"), func(dst netip.Prefix) bool { return slices.ContainsFunc(leases, dst.Overlaps) })
	if want := []Route{gone4, gone6}; !slices.Equal(got, want) {
		t.Errorf("got %v, want only %v", got, want)
	}
}

func TestHostless(t *testing.T) {
	peer, stranger := netip.MustParseAddr("192.168.77.2"), netip.MustParseAddr("192.168.77.9")
	lost := byCall("10.5.3.0/24", "eni-gone")
	lost.Lost = true
	routes := []Route{lost, byCall("10.5.4.0/24", "eni-peer"), byCall("10.5.5.0/24", "eni-stranger"), byCall("10.5.6.0/24", "vpn")}
	addresses := map[string][]netip.Addr{"eni-peer": {stranger, peer}, "eni-stranger": {stranger}}
	got := hostless(routes, addresses, func(a netip.Addr) bool { return a == peer })
	if want := []Route{routes[0], routes[2]}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSecretKeys(t *testing.T) {
	got, err := SecretKeys([]byte(`{"Type":"a","AccessKeySecret":"b","accesskeyid":"c","SessionToken":"d","RouteTableID":["e"]}`))
	if err != nil || len(got) != 3 {
		t.Errorf("%d warnings, want 3: %q, error %v", len(got), got, err)
	}
}
