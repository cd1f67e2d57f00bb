// SPDX-License-Identifier: Apache-2.0

package location

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/ipip"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/backend/wireguard"
	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// create returns the backend for a Backend object, as the daemon creates it.
func create(t *testing.T, kind, raw string) (backend.Backend, []string, error) {
	t.Helper()
	r, err := backend.NewRegistry(
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New, Inside: true},
		backend.Entry{Type: ipip.Type, Factory: ipip.New, ProbesMTU: true},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New, ProbesMTU: true, Inside: true},
		backend.Entry{Type: wireguard.Type, Factory: wireguard.NewHost().New, ProbesMTU: true},
	)
	if err != nil {
		t.Fatal(err)
	}
	env := backendtest.Env(1500, prefix.IPv4)
	env.Config.BackendType, env.Config.Backend = kind, json.RawMessage(raw)
	r.Locate = New
	return r.New(env)
}

func TestConfigurations(t *testing.T) {
	for raw, want := range map[string]struct {
		devices      []string
		ports        []int
		mtu          int
		warning, err string
	}{
		`{}`:                         {[]string{"flannel-wg"}, []int{51820}, 1440, "", ""},
		`{"SameLocation":null}`:      {[]string{"flannel-wg"}, []int{51820}, 1440, "", ""},
		`{"SameLocation":"VXLAN"}`:   {[]string{"flannel-wg", "flannel.1"}, []int{8472, 51820}, 1440, "", ""},
		`{"SameLocation":"host-gw"}`: {[]string{"flannel-wg"}, []int{51820}, 1440, "", ""},
		`{"MTU":"probe"}`:            {[]string{"flannel-wg"}, []int{51820}, 1440, "", ""},
		`{"samelocation":{"Type":"vxlan","VNI":7,"Port":4789,"MTU":1400}}`: {[]string{"flannel-wg", "flannel.7"}, []int{4789, 51820}, 1350, "", ""},
		`{"SameLocation":{"Type":"vxlan","VIN":7}}`:                        {[]string{"flannel-wg", "flannel.1"}, []int{8472, 51820}, 1440, `SameLocation: unknown key "VIN" is ignored, the nearest known key is "VNI"`, ""},
		`{"SameLocation":{"Type":"vxlan","VNI":-1}}`:                       {nil, nil, 0, "", "SameLocation: Backend.VNI is -1: want 0 to"},
		`{"SameLocation":{"Type":"vxlan","Port":51820}}`:                   {nil, nil, 0, "", "SameLocation has UDP port 51820, which wireguard also has: want another one"},
		`{"SameLocation":"ipip"}`:                                          {nil, nil, 0, "", `Backend.SameLocation is "ipip": want one of host-gw, vxlan, or an object with this Type and its keys`},
		`{"SameLocation":"wireguard"}`:                                     {nil, nil, 0, "", `Backend.SameLocation is "wireguard": want one of host-gw, vxlan`},
		`{"SameLocation":{"VNI":7}}`:                                       {nil, nil, 0, "", `Backend.SameLocation is "": want one of host-gw, vxlan, or an object with this Type and its keys`},
		`{"SameLocation":7}`:                                               {nil, nil, 0, "", `Backend.SameLocation is "": want one of host-gw, vxlan`},
		`{"SameLocation":""}`:                                              {nil, nil, 0, "", `Backend.SameLocation is "": want one of host-gw, vxlan`},
		`{"SameLocation":"vxlan","MTU":"probe"}`:                           {nil, nil, 0, "", `Backend has both MTU "probe" and SameLocation, which do not work together: remove one of them`},
		`{"SameLocation":{"Type":"vxlan","MTU":"probe"}}`:                  {nil, nil, 0, "", `Backend has both MTU "probe" and SameLocation, which do not work together: remove one of them`},
		`{"SameLocation":{"Type":"host-gw","MTU":"probe"}}`:                {nil, nil, 0, "", `SameLocation: Backend.MTU is "probe", which the backend host-gw does not know`},
	} {
		b, warnings, err := create(t, wireguard.Type, raw)
		if want.err != "" {
			if err == nil || !strings.Contains(err.Error(), want.err) {
				t.Errorf("%s: error %v, want %q", raw, err, want.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if !slices.Equal(b.Describe().Scope.Devices, want.devices) || !slices.Equal(b.Describe().AllPorts(), want.ports) || b.Describe().MTU != want.mtu {
			t.Errorf("%s: devices %v, ports %v, MTU %d, want %+v", raw, b.Describe().Scope.Devices, b.Describe().AllPorts(), b.Describe().MTU, want)
		}
		if strings.Join(warnings, " ") != want.warning {
			t.Errorf("%s: warnings %q, want %q", raw, warnings, want.warning)
		}
		named := strings.Contains(strings.ToLower(raw), "samelocation") && !strings.Contains(raw, "null")
		if has := backend.CheckLocations(b, wireguard.Type) == nil; has != named {
			t.Errorf("%s: it has locations: %v, want %v", raw, has, named)
		}
	}
	if _, warnings, _ := create(t, ipip.Type, `{"SameLocation":"vxlan"}`); len(warnings) != 1 || !strings.Contains(warnings[0], `unknown key "SameLocation" is ignored`) {
		t.Errorf("ipip: warnings %q, want one about the key", warnings)
	}
	b, _, err := create(t, vxlan.Type, `{}`)
	if err != nil {
		t.Fatal(err)
	}
	if err := backend.CheckLocations(b, vxlan.Type); err == nil || err.Error() != "the backend vxlan has no locations: expected wireguard with SameLocation as Backend" {
		t.Errorf("vxlan: %v", err)
	}
}

// TestForwards checks that the Backend has the tunnel packets and the ports of both
// backends, and that it accepts names as endpoints and has the type in leases like
// wireguard, the backend between locations.
func TestForwards(t *testing.T) {
	b, _, err := create(t, wireguard.Type, `{"SameLocation":"vxlan"}`)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.Describe().Tunnels[prefix.IPv4]; !slices.Equal(got, []firewall.Payload{{Protocol: firewall.UDP, Port: 8472}}) {
		t.Errorf("pods must not send %v, want the packets of vxlan", got)
	}
	if got := b.Describe().Ports; len(got) != 2 || !slices.Equal(got[vxlan.Type], []int{8472}) || !slices.Equal(got[wireguard.Type], []int{51820}) {
		t.Errorf("ports %v", got)
	}
	if err := backend.CheckPublicEndpoint(b, wireguard.Type, endpoint.Named{Host: "a.example.org"}); err != nil {
		t.Errorf("a name is refused: %v", err)
	}
	if s := backend.NewSide(b, wireguard.Type); s.LeaseType != wireguard.Type {
		t.Errorf("leases have the type %q", s.LeaseType)
	}
}
