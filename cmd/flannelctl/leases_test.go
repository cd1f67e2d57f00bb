// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// TestClaim checks that the reservation contains all given subnets and addresses, and that
// arguments that do not match each other are refused.
func TestClaim(t *testing.T) {
	const four, six = "10.5.7.0/24", "fd00:5:0:7::/64"
	for _, tc := range []struct{ subnets, addresses, want string }{
		{four, "192.0.2.1", "10.5.7.0/24 192.0.2.1"},
		{six + "," + four, "192.0.2.1,2001:db8::1", "10.5.7.0/24 192.0.2.1 fd00:5:0:7::/64 2001:db8::1"},
		{four, "192.0.2.1,192.0.2.2", "192.0.2.1 and 192.0.2.2: expected one public address of each family at most"},
		{four, "192.0.2.1,2001:db8::1", "2001:db8::1 needs an IPv6 subnet beside it"},
		{six, "2001:db8::1,192.0.2.1", "192.0.2.1 needs an IPv4 subnet beside it"},
		{four + "," + six, "192.0.2.1", "fd00:5:0:7::/64 needs a public IPv6 address beside it"},
		{four + ",10.5.8.0/24", "192.0.2.1", "expected one subnet of each family at most"},
		{four, "host1", `"host1" is not an IP address`},
		{"10.5.7.1/24", "192.0.2.1", `"10.5.7.1/24" is not a subnet such as 10.5.7.0/24`},
	} {
		c, err := claim(tc.subnets, tc.addresses)
		var got []string
		for _, e := range c.Endpoints {
			got = append(got, e.Subnet.String(), e.PublicIP.String())
		}
		if err != nil {
			got = []string{err.Error()}
		}
		if got := strings.Join(got, " "); got != tc.want {
			t.Errorf("%s for %s: %s; want %s", tc.subnets, tc.addresses, got, tc.want)
		}
	}
}

// TestEmptyLists checks that an empty list is [] in JSON and not null, which jq does not
// accept.
func TestEmptyLists(t *testing.T) {
	text, err := json.Marshal(newLease(subnet.Entry{Lease: subnet.Lease{Key: "10.5.7.0-24"}, Err: errors.New("rubbish")}))
	if want := `{"key":"10.5.7.0-24","subnets":[],"publicIPs":[],"error":"rubbish"}`; err != nil || string(text) != want {
		t.Errorf("an unreadable lease: %s, %v; want %s", text, err, want)
	}
	var out bytes.Buffer
	cmd := newCheckCommand(thisHost())
	cmd.SetOut(&out)
	cmd.SetContext(t.Context())
	if err := check(cmd, status.Report{}, nil, false, output{format: "json"}); err == nil || out.String() != "[]\n" {
		t.Errorf("without a peer check prints %s, %v; want [] and an error", &out, err)
	}
}

// TestCheckExplainsUnknown checks that the help of flannelctl check gives the exit code for a path that cannot
// be judged.
func TestCheckExplainsUnknown(t *testing.T) {
	if help := newCheckCommand(thisHost()).Long; !strings.Contains(help, "result is unknown: the exit code stays 0") {
		t.Errorf("the help does not explain the result unknown:\n%s", help)
	}
}

// TestWatchedLeases checks the line that is printed for each change of a lease. A lease that becomes
// unreadable must count as changed, and not as deleted.
func TestWatchedLeases(t *testing.T) {
	lease := func(key, ip string) *subnet.Lease {
		return &subnet.Lease{Key: key, BackendType: "vxlan", Endpoints: []subnet.Endpoint{{PublicIP: netip.MustParseAddr(ip)}}}
	}
	a, b := lease("a", "192.0.2.1"), lease("b", "192.0.2.2")
	for _, tc := range []struct {
		name  string
		steps []subnet.Snapshot
		want  []string
	}{
		{"added, changed and deleted", []subnet.Snapshot{
			{Leases: []*subnet.Lease{b, a}}, {Leases: []*subnet.Lease{a, b}}, {Leases: []*subnet.Lease{lease("a", "192.0.2.9"), b}}, {Leases: []*subnet.Lease{b}},
		}, []string{"+ a 192.0.2.1 vxlan", "+ b 192.0.2.2 vxlan", "~ a 192.0.2.9 vxlan", "- a 192.0.2.9 vxlan"}},
		{"damaged and repaired", []subnet.Snapshot{
			{Leases: []*subnet.Lease{a}}, {Undecodable: []string{"a"}}, {Undecodable: []string{"a"}}, {Leases: []*subnet.Lease{a}},
		}, []string{"+ a 192.0.2.1 vxlan", "! a cannot be read", "~ a 192.0.2.1 vxlan"}},
		{"damaged from the beginning, then deleted", []subnet.Snapshot{
			{Leases: []*subnet.Lease{b}, Undecodable: []string{"c", "a"}}, {Leases: []*subnet.Lease{b}, Undecodable: []string{"a"}}, {},
		}, []string{"! a cannot be read", "+ b 192.0.2.2 vxlan", "! c cannot be read", "- c - -", "- a - -", "- b 192.0.2.2 vxlan"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			err := watchLeases(t.Context(), &out, func(_ context.Context, sink func(subnet.Update)) error {
				for _, s := range tc.steps {
					sink(subnet.Update{Snapshot: func() subnet.Snapshot { return s }})
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for line := range strings.Lines(out.String()) {
				_, line, _ = strings.Cut(strings.TrimSpace(line), " ") // the time
				got = append(got, line)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("lines differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOwnSubnets checks that hosts keep the subnets of their leases, that others get the first free ones,
// and that the commands quote keys.
func TestOwnSubnets(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/22","SubnetLen":24,"EnableIPv6":true,"IPv6Network":"fd00:5::/48"}`))
	if err != nil {
		t.Fatal(err)
	}
	lease := func(subnets ...string) (e subnet.Entry) {
		for _, s := range subnets {
			e.Lease.Endpoints = append(e.Lease.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix(s)})
		}
		return e
	}
	entries := []subnet.Entry{lease("10.5.2.0/24", "fd00:5:0:1::/64"), lease("10.6.1.0/24", "fd00:5:0:9::/64"), lease("10.5.3.0/24"), {Err: errors.New("rubbish")}}
	own, err := ownSubnets(cfg, entries, 2)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	printRoles(&out, "/coreos.com/network", own)
	for _, want := range []string{
		"grant-permission flannel-10.5.2.0-24 readwrite '/coreos.com/network/subnets/10.5.2.0-24&fd00:5:0:1::-64'\n",
		"grant-permission flannel-10.5.1.0-24 readwrite '/coreos.com/network/subnets/10.5.1.0-24&fd00:5:0:2::-64'\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the commands lack %q:\n%s", want, &out)
		}
	}
	if _, err := ownSubnets(cfg, entries, 9); err == nil || err.Error() != "10.5.1.0/24 to 10.5.3.0/24 has 3 subnets, want 9" {
		t.Errorf("for 9 hosts the error is %v", err)
	}
}
