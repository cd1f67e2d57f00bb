// SPDX-License-Identifier: Apache-2.0

package hostgw

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

func env(local, public string) backend.Env {
	return backend.Env{Underlay: underlay.Interface{
		Name: "eth0", MTU: 1500,
		Addrs: []underlay.Address{{Local: netip.MustParseAddr(local), Public: netip.MustParseAddr(public)}},
	}}
}

func TestNewRefusesNAT(t *testing.T) {
	for _, tc := range []struct{ local, public, err string }{
		{"192.168.77.1", "192.168.77.1", ""},
		{"fd00:77::1", "fd00:77::1", ""},
		{"192.168.77.1", "203.0.113.9", "the public address 203.0.113.9 is not assigned to this host (eth0 has 192.168.77.1)"},
		{"fd00:77::1", "2001:db8::9", "the public address 2001:db8::9 is not assigned"},
	} {
		_, _, err := New(json.RawMessage(`{"Type":"host-gw"}`), env(tc.local, tc.public))
		if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("local %s, public %s: %v, want %q", tc.local, tc.public, err, tc.err)
		}
	}
}

func TestNewRefusesAVRF(t *testing.T) {
	e := env("192.168.77.1", "192.168.77.1")
	e.Underlay.VRF = "blue"
	_, _, err := New(json.RawMessage(`{"Type":"host-gw"}`), e)
	if want := "eth0 belongs to blue"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestUnknownKeyIsAWarning(t *testing.T) {
	_, warnings, err := New(json.RawMessage(`{"Type":"host-gw","DirectRouting":true}`), env("192.168.77.1", "192.168.77.1"))
	if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], `"DirectRouting"`) {
		t.Errorf("warnings %q, error %v", warnings, err)
	}
}

func TestDesired(t *testing.T) {
	b := &Backend{env("192.168.77.1", "192.168.77.1")}
	for subnetText, want := range map[string]struct {
		gateway, text string
		metric        int
	}{
		"10.5.20.0/24":      {"192.168.77.2", "route 10.5.20.0/24 via 192.168.77.2 dev eth0", 0},
		"fd00:10:5:26::/64": {"fd00:77::2", "route fd00:10:5:26::/64 via fd00:77::2 dev eth0", 1024},
	} {
		e := subnet.Endpoint{Subnet: netip.MustParsePrefix(subnetText), PublicIP: netip.MustParseAddr(want.gateway)}
		objects, err := b.desired(t.Context(), subnet.Lease{Endpoints: []subnet.Endpoint{e}})
		if err != nil || len(objects) != 1 {
			t.Fatalf("%v, %v; want one route", objects, err)
		}
		r := objects[0].(dataplane.Route)
		if r.String() != want.text || r.OnLink || r.Priority != want.metric {
			t.Errorf("%s, onlink %v, metric %d; want %s, not onlink, metric %d", r, r.OnLink, r.Priority, want.text, want.metric)
		}
	}
}
