// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// mtuRegistry returns a registry of two backends: tunnel finds MTUs, and plain does not. Their
// factories store the configuration that they get in got, and Env.ProbesMTU in probes. They return
// any Backend.
func mtuRegistry(t testing.TB, got *string, probes *bool) backend.Registry {
	t.Helper()
	factory := func(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
		*got, *probes = string(raw), env.ProbesMTU
		return &cloudnet.Backend{}, nil, nil
	}
	r, err := backend.NewRegistry(backend.Entry{Type: "tunnel", Factory: factory, ProbesMTU: true}, backend.Entry{Type: "plain", Factory: factory})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestMTUProbe checks that Backend.MTU "probe" sets ProbesMTU and is not passed to the backend, or
// is an error if the backend does not find MTUs. Another text must be an error only if the backend
// finds MTUs. All other values must reach the backend unchanged.
func TestMTUProbe(t *testing.T) {
	for _, tc := range []struct {
		kind, raw, want string
		probes          bool
		err             string
	}{
		{kind: "tunnel", raw: `{"Type":"tunnel","MTU":"probe"}`, want: `{"Type":"tunnel"}`, probes: true},
		{kind: "tunnel", raw: `{"type":"tunnel","mtu":"PROBE","VNI":7}`, want: `{"type":"tunnel","VNI":7}`, probes: true},
		{kind: "tunnel", raw: `{"mtu":1400,"vni":7,"VNI":8,"MTU":"probe"}`, want: `{"vni":7,"VNI":8}`, probes: true},
		{kind: "tunnel", raw: `{"MTU":"probe","mtu":1400}`, want: `{"MTU":"probe","mtu":1400}`},
		{kind: "tunnel", raw: `{"Type":"tunnel","MTU":1400}`, want: `{"Type":"tunnel","MTU":1400}`},
		{kind: "tunnel", raw: `{"Type":"tunnel","MTU":null}`, want: `{"Type":"tunnel","MTU":null}`},
		{kind: "tunnel", raw: `{"Type":"tunnel","MTU":{}}`, want: `{"Type":"tunnel","MTU":{}}`},
		{kind: "tunnel", raw: `{"Type":"tunnel"}`, want: `{"Type":"tunnel"}`},
		{kind: "tunnel", raw: `[`, want: `[`},
		{kind: "tunnel", raw: `{"Type":"tunnel","MTU":"1400"}`, err: `Backend.MTU is "1400": want "probe" or a number of bytes`},
		{kind: "plain", raw: `{"Type":"plain","MTU":"probe"}`, err: `Backend.MTU is "probe", which the backend plain does not know: want one of tunnel as Backend.Type`},
		{kind: "plain", raw: `{"Type":"plain","MTU":"1400"}`, want: `{"Type":"plain","MTU":"1400"}`},
	} {
		var got string
		var probes bool
		_, _, err := mtuRegistry(t, &got, &probes).New(backend.Env{Config: subnet.Config{BackendType: tc.kind, Backend: json.RawMessage(tc.raw)}})
		if tc.err != "" {
			if err == nil || err.Error() != tc.err {
				t.Errorf("%s: error %v, want %s", tc.raw, err, tc.err)
			}
			continue
		}
		if err != nil || got != tc.want || probes != tc.probes {
			t.Errorf("%s: the backend gets %s, probes %v, %v; want %s, %v", tc.raw, got, probes, err, tc.want, tc.probes)
		}
	}
}

// FuzzMTUProbe checks that an error has one line, that a configuration from which the key MTU was
// removed is valid JSON, and that any other configuration reaches the backend unchanged.
func FuzzMTUProbe(f *testing.F) {
	for _, raw := range []string{`{"MTU":"probe"}`, `{"MTU":"x"}`, `{"mtu":"probe","MTU":7}`, `{"MTU":"\n"}`, `null`, `""`, `{`} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, kind := range []string{"tunnel", "plain"} {
			var got string
			var probes bool
			_, _, err := mtuRegistry(t, &got, &probes).New(backend.Env{Config: subnet.Config{BackendType: kind, Backend: raw}})
			switch {
			case err != nil && strings.ContainsAny(err.Error(), "\n\r"):
				t.Errorf("%q: the error has several lines: %v", raw, err)
			case err == nil && probes && !json.Valid([]byte(got)):
				t.Errorf("%q: the backend gets %q", raw, got)
			case err == nil && !probes && got != string(raw):
				t.Errorf("%q: the backend gets %q, want the same", raw, got)
			}
		}
	})
}

// TestAdoptsPathMTUs checks that a network adopts the MTU that an earlier process has given to a
// route, and changes no route of flanneld when it starts. It tests a backend with a route to each
// peer, and one with a single route to the network. When a peer goes, its route must be deleted.
// The MTU of another program's route must not be adopted.
func TestAdoptsPathMTUs(t *testing.T) {
	network := netip.MustParsePrefix("10.5.0.0/16")
	device := dataplane.Link{Name: "flannel.1", Kind: "vxlan", MAC: dataplane.MAC{2, 1}, MTU: 1450, Up: true,
		VXLAN: dataplane.VXLAN{VNI: 1, Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"}}
	lease := func(i byte) *subnet.Lease {
		s := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, i, 0}), 24)
		return &subnet.Lease{Key: s.String(), Endpoints: []subnet.Endpoint{{Subnet: s, PublicIP: netip.AddrFrom4([4]byte{192, 168, 77, i})}}}
	}
	leases := map[string]*subnet.Lease{}
	for i := byte(2); i < 5; i++ {
		leases[lease(i).Key] = lease(i)
	}
	for _, wide := range []bool{false, true} {
		t.Run(map[bool]string{false: "a route to each peer", true: "a route to the network"}[wide], func(t *testing.T) {
			kernel := dataplanetest.New()
			spy := &dataplanetest.Spy{Kernel: kernel}
			env := backend.Env{
				Kernel: spy, Resync: time.Hour, ProbesMTU: true, PathLimit: rate.NewLimiter(0, 0), // sends nothing
			}
			route := func(l subnet.Lease) dataplane.Route {
				if wide {
					return dataplane.NewRoute(l.Endpoints[0].Subnet, netip.Addr{}, device.Name, false)
				}
				return dataplane.NewRoute(l.Endpoints[0].Subnet, l.Endpoints[0].Subnet.Addr(), device.Name, true)
			}
			scope := dataplane.Scope{Devices: []string{device.Name}, Networks: []netip.Prefix{network}}
			start := func() *backend.Programmer {
				p, err := env.Programmer(t.Context(), scope)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = p.Close() })
				p.Base.Add(device, dataplane.Addr{Dev: device.Name, Prefix: netip.MustParsePrefix("10.5.1.0/32")})
				if wide {
					p.Base.Add(dataplane.NewRoute(network, netip.Addr{}, device.Name, false))
				} else {
					p.Desired = func(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
						return []dataplane.Object{route(l)}, nil
					}
				}
				if err := p.SetUp(t.Context()); err != nil {
					t.Fatal(err)
				}
				return p
			}
			sync := func(p *backend.Programmer, set backend.Set) []dataplane.Op {
				t.Helper()
				spy.Take()
				set.Complete = true
				if _, err := p.Sync(t.Context(), set); err != nil {
					t.Fatal(err)
				}
				return spy.Take()
			}
			sync(start(), backend.Set{Leases: leases, All: true})
			narrow, foreign := route(*lease(2)), route(*lease(3))
			narrow.MTU, foreign.MTU, foreign.Protocol = 1300, 1200, 3
			for _, r := range []dataplane.Route{narrow, foreign} {
				was := r
				was.MTU, was.Protocol = 0, dataplane.Protocol
				if err := kernel.Remove(was); err != nil {
					t.Fatal(err)
				}
				if err := kernel.Append(r); err != nil {
					t.Fatal(err)
				}
			}

			p := start()
			ops := sync(p, backend.Set{Leases: leases, All: true})
			for _, op := range ops {
				if r, ok := op.Object.(dataplane.Route); !wide || !ok || r.Dst != foreign.Dst || !op.Delete {
					t.Errorf("%s, want no change", op)
				}
			}
			for i, want := range map[byte]int{2: 1300, 3: 0, 4: 0} {
				if got := p.PathMTU(lease(i).Endpoints[0].Subnet); got != want {
					t.Errorf("peer %d: MTU %d, want %d", i, got, want)
				}
			}
			left := maps.Clone(leases)
			gone := lease(2)
			delete(left, gone.Key)
			ops = sync(p, backend.Set{Leases: left, Changed: []string{gone.Key}})
			if !slices.ContainsFunc(ops, func(op dataplane.Op) bool { return op.Delete && op.Object == dataplane.Object(narrow) }) {
				t.Errorf("a peer has gone: %v, want a delete of its route", ops)
			}
		})
	}
}
