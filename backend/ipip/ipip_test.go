// SPDX-License-Identifier: Apache-2.0

package ipip

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

var (
	endpoint4 = subnet.Endpoint{Subnet: netip.MustParsePrefix("10.5.26.0/24"), PublicIP: netip.MustParseAddr("192.168.77.2")}
	endpoint6 = subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:10:5:2a::/64"), PublicIP: netip.MustParseAddr("fd00:77::2")}
)

func TestNew(t *testing.T) {
	for _, tt := range []struct {
		name     string
		env      backend.Env
		raw      string
		warnings int
		err      string
	}{
		{name: "keys in any case", env: backendtest.Env(1500, prefix.IPv4, prefix.IPv6), raw: `{"type":"IPIP","directrouting":true}`},
		{name: "unknown key", env: backendtest.Env(1500, prefix.IPv4), raw: `{"Port":1}`, warnings: 1},
		{name: "no boolean", env: backendtest.Env(1500, prefix.IPv4), raw: `{"DirectRouting":"yes"}`, err: "DirectRouting"},
		{name: "link too small", env: backendtest.Env(1319, prefix.IPv6), raw: `{}`, err: "eth0 has an MTU of 1319, which leaves 1279 bytes inside the tunnel: IPv6 needs 1280"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, warnings, err := New(json.RawMessage(tt.raw), tt.env)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if err != nil || len(warnings) != tt.warnings {
				t.Fatalf("error %v, warnings %q, want %d", err, warnings, tt.warnings)
			}
		})
	}
}

func TestMTU(t *testing.T) {
	backendtest.MTU{
		New:      New,
		Overhead: map[prefix.Family]int{prefix.IPv4: 20, prefix.IPv6: 40},
	}.Run(t)
}

func TestDesired(t *testing.T) {
	for _, tt := range []struct {
		name   string
		e      subnet.Endpoint
		direct string
		want   dataplane.Route
	}{
		{"IPv4", endpoint4, "", dataplane.NewRoute(endpoint4.Subnet, endpoint4.PublicIP, "flannel.ipip", true)},
		{"IPv6", endpoint6, "", dataplane.NewRoute(endpoint6.Subnet, endpoint6.PublicIP, "flannel-v6.ipip", true)},
		{"direct", endpoint4, "eth0", dataplane.NewRoute(endpoint4.Subnet, endpoint4.PublicIP, "eth0", false)},
	} {
		if got := desired(tt.e, tt.direct); got != tt.want {
			t.Errorf("%s: %s (onlink %v), want %s", tt.name, got, got.OnLink, tt.want)
		}
	}
}

func TestBase(t *testing.T) {
	b := &Backend{env: backendtest.Env(1500, prefix.IPv4, prefix.IPv6)}
	got, err := b.base(subnet.Lease{Endpoints: []subnet.Endpoint{
		{Subnet: netip.MustParsePrefix("10.5.1.0/24")}, {Subnet: netip.MustParsePrefix("fd00:10:5:1::/64")},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := dataplane.NewState()
	want.Add(
		dataplane.Link{Name: "flannel.ipip", Kind: "ipip", MTU: 1480, Up: true, Tunnel: dataplane.Tunnel{Local: netip.MustParseAddr("192.168.77.1")}},
		dataplane.Link{Name: "flannel-v6.ipip", Kind: "ip6tnl", MTU: 1460, Up: true, Tunnel: dataplane.Tunnel{Local: netip.MustParseAddr("fd00:77::1")}},
		dataplane.Addr{Dev: "flannel.ipip", Prefix: netip.MustParsePrefix("10.5.1.0/32")},
		dataplane.Addr{Dev: "flannel-v6.ipip", Prefix: netip.MustParsePrefix("fd00:10:5:1::/128")},
		dataplane.NewUnreachable(netip.MustParsePrefix("10.5.0.0/16")),
		dataplane.NewUnreachable(netip.MustParsePrefix("fd00:10:5::/48")))
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

// TestForeignDevice checks that Start refuses a bridge that has the name of the
// device.
func TestForeignDevice(t *testing.T) {
	k := dataplanetest.New()
	if err := k.Append(dataplane.Link{Name: "flannel.ipip", Kind: "bridge"}); err != nil {
		t.Fatal(err)
	}
	e := backendtest.Env(1500, prefix.IPv4)
	e.Kernel = k
	b, _, err := New(nil, e)
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.Start(t.Context(), subnet.Lease{Endpoints: []subnet.Endpoint{endpoint4}})
	if err == nil || !strings.Contains(err.Error(), "flannel.ipip is of type bridge, want ipip: remove it") {
		t.Errorf("error %v, want that the device is in the way", err)
	}
}
