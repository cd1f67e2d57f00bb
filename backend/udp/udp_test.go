// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

func TestConfig(t *testing.T) {
	v4, dual := backendtest.Env(1500, prefix.IPv4), backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	for _, tc := range []struct {
		name    string
		env     backend.Env
		raw     string
		want    config
		err     string
		warning string // start of the only warning
	}{
		{name: "nothing", env: v4, want: config{8285, "userspace"}},
		{name: "defaults", env: dual, raw: `{"Type":"udp"}`, want: config{8285, "userspace"}},
		{name: "userspace", env: v4, raw: `{"mode":"UserSpace","port":1}`, want: config{1, "userspace"}},
		{name: "empty mode", env: v4, raw: `{"Mode":""}`, want: config{8285, "userspace"}},
		{name: "auto", env: v4, raw: `{"Mode":"Auto"}`, want: config{8285, "userspace"}, warning: `Backend.Mode is "auto", which means userspace`},
		{name: "kernel", env: dual, raw: `{"Mode":"Kernel"}`, want: config{8285, "userspace"}, warning: `Backend.Mode is "kernel", which means userspace`},
		{name: "another mode", env: v4, raw: `{"Mode":"warp"}`, err: `Backend.Mode is "warp": want userspace`},
		{name: "port 0", env: v4, raw: `{"Port":0}`, err: "Backend.Port is 0: want 1 to 65535"},
		{name: "port too big", env: v4, raw: `{"Port":65536}`, err: "Backend.Port is 65536"},
		{name: "port not a number", env: v4, raw: `{"Port":"x"}`, err: "Port: want a whole number"},
		{name: "link too small", env: backendtest.Env(1327, prefix.IPv6), raw: `{}`, err: "eth0 has an MTU of 1327, which leaves 1279 bytes inside udp: IPv6 needs 1280"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, warnings, err := parseConfig(json.RawMessage(tc.raw), tc.env)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error %v, want one with %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			if text := strings.Join(warnings, "\n"); (text == "") != (tc.warning == "") || !strings.HasPrefix(text, tc.warning) {
				t.Errorf("warnings %q, want one that begins with %q", warnings, tc.warning)
			}
		})
	}
}

func TestMTU(t *testing.T) {
	backendtest.MTU{
		New:      NewHost(Settings{}).New,
		Overhead: map[prefix.Family]int{prefix.IPv4: 28, prefix.IPv6: 48},
	}.Run(t)
}

func TestBase(t *testing.T) {
	const refused4, refused6 = "route unreachable 10.5.0.0/16 metric 1073741824", "route unreachable fd00:10:5::/48 metric 1073741824"
	for _, tc := range []struct {
		families []prefix.Family
		want     []string
	}{
		{[]prefix.Family{prefix.IPv4}, []string{"address 10.5.7.0/32 dev flannel0", "route 10.5.0.0/16 dev flannel0", refused4}},
		{[]prefix.Family{prefix.IPv6}, []string{"address fd00:10:5:7::/128 dev flannel0", "route fd00:10:5::/48 dev flannel0", refused6}},
		{[]prefix.Family{prefix.IPv4, prefix.IPv6}, []string{
			"address 10.5.7.0/32 dev flannel0", "address fd00:10:5:7::/128 dev flannel0",
			"route 10.5.0.0/16 dev flannel0", "route fd00:10:5::/48 dev flannel0", refused4, refused6,
		}},
	} {
		b := &Backend{env: backendtest.Env(1500, tc.families...)}
		var own subnet.Lease
		for _, f := range tc.families {
			s := "10.5.7.0/24"
			if f == prefix.IPv6 {
				s = "fd00:10:5:7::/64"
			}
			own.Endpoints = append(own.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix(s)})
		}
		state := b.base(own)
		var got []string
		for a := range state.Addrs {
			got = append(got, a.String())
		}
		for r := range state.AllRoutes() {
			got = append(got, r.String())
		}
		slices.Sort(got)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Error(diff)
		}
		if l := state.Links["flannel0"]; !l.Up || l.MTU != mtu(b.env) {
			t.Errorf("link %+v, want MTU %d", l, mtu(b.env))
		}
	}
}

func lease(key, s, public string) subnet.Lease {
	return subnet.Lease{Key: key, Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix(s), PublicIP: netip.MustParseAddr(public)}}}
}

func setOf(all, complete bool, changed []string, leases ...subnet.Lease) backend.Set {
	s := backend.Set{Leases: map[string]*subnet.Lease{}, All: all, Complete: complete, Changed: changed}
	for _, l := range leases {
		s.Leases[l.Key] = &l
	}
	return s
}

// TestEntries goes through the sets of several networks that use one table after another. The sets
// name the same host by several lease keys.
func TestEntries(t *testing.T) {
	const four, six = "10.5.2.0/24", "fd00:10:5:2::/64"
	v4 := lease("10.5.2.0-24", four, "192.168.77.2")
	v6 := lease("fd00:10:5:2::-64", six, "fd00:77::2")
	dual := subnet.Lease{Key: "10.5.2.0-24&fd00:10:5:2::-64", Endpoints: slices.Concat(v4.Endpoints, v6.Endpoints)}
	other := lease("10.5.3.0-24", "10.5.3.0/24", "192.168.77.3")
	moved := lease(other.Key, "10.5.3.0/24", "192.168.77.33")
	swapped := []subnet.Lease{lease(v4.Key, four, "192.168.77.3"), lease(other.Key, "10.5.3.0/24", "192.168.77.2")}
	table := map[netip.Prefix]netip.Addr{}
	for _, step := range []struct {
		name string
		set  backend.Set
		want []subnet.Lease
	}{
		{"IPv4", setOf(true, true, nil, v4, other), []subnet.Lease{v4, other}},
		{"IPv4 and IPv6, not complete", setOf(true, false, nil, dual), []subnet.Lease{dual, other}},
		{"IPv4 and IPv6", setOf(true, true, []string{v4.Key, other.Key}, dual), []subnet.Lease{dual}},
		{"IPv6, not complete", setOf(true, false, nil, v6), []subnet.Lease{dual}},
		{"IPv6", setOf(false, true, []string{dual.Key}, v6), []subnet.Lease{v6}},
		{"IPv4 and IPv6 again, not complete", setOf(true, false, nil, v6, dual), []subnet.Lease{dual}},
		{"IPv4 and IPv6 again", setOf(false, true, []string{v6.Key}, dual), []subnet.Lease{dual}},
		{"IPv4 again, not complete", setOf(true, false, nil, v4), []subnet.Lease{dual}},
		{"IPv4 again", setOf(false, true, []string{dual.Key}, v4), []subnet.Lease{v4}},
		{"another host", setOf(false, true, []string{other.Key}, v4, other), []subnet.Lease{v4, other}},
		{"it moves, not complete", setOf(false, false, []string{other.Key}, moved), []subnet.Lease{v4, moved}},
		{"hosts swap their addresses", setOf(false, true, []string{v4.Key, other.Key}, swapped...), swapped},
		{"nobody", setOf(true, true, nil), nil},
	} {
		table = entries(step.set, table)
		want := map[netip.Prefix]netip.Addr{}
		for _, l := range step.want {
			for _, e := range l.Endpoints {
				want[e.Subnet] = e.PublicIP
			}
		}
		if !maps.Equal(table, want) {
			t.Errorf("%s: %v, want %v", step.name, table, want)
		}
	}
}

func TestCheck(t *testing.T) {
	for raw, ok := range map[string]bool{"": true, "null": true, `{"VNI":1}`: false, "{}": false} {
		l := lease("a", "10.5.1.0/24", "192.168.77.1")
		l.Endpoints[0].Data = json.RawMessage(raw)
		if _, err := (&network{}).Check(l); (err == nil) != ok {
			t.Errorf("data %q: %v", raw, err)
		}
	}
}

// TestClaim checks that a claim has neither a type nor data, like the leases of other
// daemons.
func TestClaim(t *testing.T) {
	b := &Backend{env: backendtest.Env(1500, prefix.IPv4)}
	prev := subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{{
		Subnet: netip.MustParsePrefix("10.5.7.0/24"), PublicIP: netip.MustParseAddr("192.168.77.1"), Data: json.RawMessage(`{"VNI":1}`),
	}}}
	c, err := b.Claim(t.Context(), prev)
	if err != nil || c.BackendType != "" || len(c.Endpoints) != 1 || c.Endpoints[0].Data != nil || c.Endpoints[0].Subnet != prev.Endpoints[0].Subnet {
		t.Errorf("%+v, %v", c, err)
	}
}
