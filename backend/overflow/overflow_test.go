// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/alivpc"
	"github.com/flanneld/flanneld/backend/awsvpc"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/gce"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/tencentvpc"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// create returns the backend for a Backend object, as the daemon creates it.
func create(t *testing.T, kind, raw string) (backend.Backend, []string, error) {
	t.Helper()
	r, err := backend.NewRegistry(
		backend.Entry{Type: awsvpc.Type, Factory: awsvpc.New}, backend.Entry{Type: gce.Type, Factory: gce.New},
		backend.Entry{Type: alivpc.Type, Factory: alivpc.New}, backend.Entry{Type: tencentvpc.Type, Factory: tencentvpc.New},
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New, ProbesMTU: true, Overflows: true},
	)
	if err != nil {
		t.Fatal(err)
	}
	env := backendtest.Env(9001, prefix.IPv4)
	env.Config.BackendType, env.Config.Backend = kind, json.RawMessage(raw)
	r.Combine = New
	return r.New(env)
}

func TestConfigurations(t *testing.T) {
	for _, kind := range []string{awsvpc.Type, gce.Type, alivpc.Type, tencentvpc.Type} {
		for raw, want := range map[string]struct {
			device       string // empty: there is no tunnel
			port, mtu    int
			warning, err string
		}{
			`{}`:                            {"", 0, 9001, "", ""},
			`{"Overflow":null}`:             {"", 0, 9001, "", ""},
			`{"Overflow":"VXLAN"}`:          {"flannel.1", 8472, 8951, "", ""},
			`{"Overflow":{"Type":"vxlan"}}`: {"flannel.1", 8472, 8951, "", ""},
			`{"overflow":{"Type":"vxlan","VNI":7,"Port":4789,"MTU":1500}}`: {"flannel.7", 4789, 1450, "", ""},
			`{"Overflow":{"Type":"vxlan","MTU":"probe"}}`:                  {"flannel.1", 8472, 8951, "", ""},
			`{"Overflow":{"Type":"vxlan","VIN":7}}`:                        {"flannel.1", 8472, 8951, `Overflow: unknown key "VIN" is ignored, the nearest known key is "VNI"`, ""},
			`{"Overflow":"vxlan","VNI":7}`:                                 {"flannel.1", 8472, 8951, `unknown key "VNI" is ignored`, ""},
			`{"Overflow":{"Type":"vxlan","VNI":-1}}`:                       {"", 0, 0, "", "Overflow: Backend.VNI is -1: want 0 to"},
			`{"Overflow":"host-gw"}`:                                       {"", 0, 0, "", `Backend.Overflow is "host-gw": want one of vxlan, or an object with this Type and its keys`},
			`{"Overflow":"aws-vpc"}`:                                       {"", 0, 0, "", `Backend.Overflow is "aws-vpc": want one of vxlan`},
			`{"Overflow":{"VNI":7}}`:                                       {"", 0, 0, "", `Backend.Overflow is "": want one of vxlan, or an object with this Type and its keys`},
			`{"Overflow":true}`:                                            {"", 0, 0, "", `Backend.Overflow is "": want one of vxlan, or an object with this Type and its keys`},
			`{"Overflow":""}`:                                              {"", 0, 0, "", `Backend.Overflow is "": want one of vxlan`},
		} {
			b, warnings, err := create(t, kind, raw)
			if want.err != "" {
				if err == nil || !strings.Contains(err.Error(), want.err) {
					t.Errorf("%s %s: error %v, want %q", kind, raw, err, want.err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s %s: %v", kind, raw, err)
				continue
			}
			var devices []string
			var ports []int
			if want.device != "" {
				devices, ports = []string{want.device}, []int{want.port}
			}
			if !slices.Equal(b.Describe().Scope.Devices, devices) || !slices.Equal(b.Describe().AllPorts(), ports) || b.Describe().MTU != want.mtu {
				t.Errorf("%s %s: devices %v, ports %v, MTU %d, want %+v", kind, raw, b.Describe().Scope.Devices, b.Describe().AllPorts(), b.Describe().MTU, want)
			}
			if strings.Join(warnings, " ") != want.warning && (want.warning == "" || len(warnings) != 1 || !strings.Contains(warnings[0], want.warning)) {
				t.Errorf("%s %s: warnings %q, want %q", kind, raw, warnings, want.warning)
			}
		}
	}
}

// TestClaimKeepsData checks claims of a host that has published another claim before. The host must
// keep the MAC address of its device, even if the former backend was vxlan. It must also keep what
// it has published about its routes, unless its public address has changed.
func TestClaimKeepsData(t *testing.T) {
	const mac = `{"VNI":1,"VtepMAC":"02:00:00:00:00:07"}`
	for name, tt := range map[string]struct{ kind, before, want string }{
		"the same":        {"", `{"Table":"rtb-1","Routed":["rtb-1"],"Overflow":` + mac + `}`, `{"Table":"rtb-1","Routed":["rtb-1"],"Overflow":` + mac + `}`},
		"vxlan":           {"vxlan", mac, `{"Overflow":` + mac + `}`},
		"text":            {"", `"text"`, ""},
		"the cloud alone": {"", ``, ""},
		"another backend": {"host-gw", ``, ""},
	} {
		b := newBed(t)
		prev := lease(t, 1, data{}).Claim()
		prev.BackendType, prev.Endpoints[0].Data = tt.kind, json.RawMessage(tt.before)
		claim, err := b.backend().Claim(t.Context(), prev)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := string(claim.Endpoints[0].Data)
		if claim.BackendType != "" || claim.NextType != "" || claim.Endpoints[0].Subnet != subnetOf(1) || tt.want != "" && got != tt.want {
			t.Errorf("%s: claim %+v with %s, want %s", name, claim, got, tt.want)
		}
		if d, known, err := decode(claim.Endpoints[0].Data); err != nil || !known || d.Overflow == nil {
			t.Errorf("%s: claim with %s, want data for the tunnel", name, got)
		}
	}
	moved := lease(t, 1, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: json.RawMessage(mac)}).Claim()
	moved.Endpoints[0].PublicIP = netip.MustParseAddr("192.168.77.99")
	if claim, err := newBed(t).backend().Claim(t.Context(), moved); err != nil || string(claim.Endpoints[0].Data) != `{"Overflow":`+mac+`}` {
		t.Errorf("with another address: claim %+v, error %v, want no routes, which lead to the former address", claim, err)
	}
	if s := backend.NewSide(newBed(t).backend(), "aws-vpc"); s.LeaseType != "" {
		t.Errorf("leases have the type %q, want none, as with flannel", s.LeaseType)
	}
}
