// SPDX-License-Identifier: Apache-2.0

package vxlan

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestConfig(t *testing.T) {
	v4, dual := backendtest.Env(1500, prefix.IPv4), backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	for _, tc := range []struct {
		name string
		env  backend.Env
		raw  string
		want config
		err  string
	}{
		{name: "defaults", env: v4, raw: `{"Type":"vxlan"}`, want: config{VNI: 1, Port: 8472, ChecksumOffload: "auto"}},
		{name: "keys in any case", env: v4, raw: `{"type":"VXLAN","vni":42,"port":4789,"mtu":9000,"gbp":true,"learning":true,"directrouting":true}`,
			want: config{VNI: 42, Port: 4789, MTU: 9000, GBP: true, Learning: true, DirectRouting: true, ChecksumOffload: "auto"}},
		{name: "checksum offload", env: v4, raw: `{"ChecksumOffload":"Off"}`, want: config{VNI: 1, Port: 8472, ChecksumOffload: "Off"}},
		{name: "checksum offload unknown", env: v4, raw: `{"ChecksumOffload":"no"}`, err: `Backend.ChecksumOffload is "no": want auto, on or off`},
		{name: "checksum offload not a string", env: v4, raw: `{"ChecksumOffload":false}`, err: "ChecksumOffload"},
		{name: "longest name for IPv4", env: v4, raw: `{"VNI":9999999}`, want: config{VNI: 9999999, Port: 8472, ChecksumOffload: "auto"}},
		{name: "name too long for IPv4", env: v4, raw: `{"VNI":10000000}`,
			err: "Backend.VNI is 10000000: the device for IPv4 would be flannel.10000000, and a name has at most 15 characters"},
		{name: "longest name for IPv6", env: dual, raw: `{"VNI":9999}`, want: config{VNI: 9999, Port: 8472, ChecksumOffload: "auto"}},
		{name: "name too long for IPv6", env: dual, raw: `{"VNI":10000}`,
			err: "Backend.VNI is 10000: the device for IPv6 would be flannel-v6.10000, and a name has at most 15 characters"},
		{name: "VNI too big", env: v4, raw: `{"VNI":16777216}`, err: "Backend.VNI is 16777216: want 0 to 16777215 (24 bits)"},
		{name: "VNI negative", env: v4, raw: `{"VNI":-1}`, err: "Backend.VNI is -1"},
		{name: "port 0", env: v4, raw: `{"Port":0}`, want: config{VNI: 1, Port: 8472, ChecksumOffload: "auto"}},
		{name: "port negative", env: v4, raw: `{"Port":-1}`, err: "Backend.Port is -1: want 0 (8472) to 65535"},
		{name: "port too big", env: v4, raw: `{"Port":65536}`, err: "Backend.Port is 65536"},
		{name: "MTU negative", env: v4, raw: `{"MTU":-1}`, err: "Backend.MTU is -1"},
		{name: "MTU too small", env: v4, raw: `{"MTU":117}`, err: "the underlay MTU 117 (Backend.MTU 117, eth0 1500) leaves 67 bytes inside vxlan: IPv4 needs 68"},
		{name: "wrong type", env: v4, raw: `{"VNI":"one"}`, err: "VNI"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, _, err := parseConfig(json.RawMessage(tc.raw), tc.env)
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
		})
	}
}

func TestUnknownKeyIsAWarning(t *testing.T) {
	_, warnings, err := parseConfig(json.RawMessage(`{"Type":"vxlan","DirectRoutng":true,"MacPrefix":"0E-2A"}`), backendtest.Env(1500, prefix.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], `"DirectRoutng"`) || !strings.Contains(warnings[0], "DirectRouting") {
		t.Errorf("warnings %q, want one that names the key and the nearest known", warnings)
	}
}

func TestMTU(t *testing.T) {
	backendtest.MTU{
		New:      New,
		Overhead: map[prefix.Family]int{prefix.IPv4: 50, prefix.IPv6: 70}, Key: true,
	}.Run(t)
}

func TestVtepMAC(t *testing.T) {
	subnettest.CheckLeaseData(t, "vxlan", leaseData{}, func(raw json.RawMessage) error {
		mac, err := vtepMAC(raw)
		if err == nil && mac.String() != "72:8d:4e:56:a5:33" {
			t.Errorf("%s: %s", raw, mac)
		}
		return err
	})
	if _, err := vtepMAC(nil); err == nil || !strings.Contains(err.Error(), "no backend data") {
		t.Errorf("no data: %v", err)
	}
}

// TestRandomMAC checks that each random MAC is a new local unicast address. Most random
// values are not local unicast addresses.
func TestRandomMAC(t *testing.T) {
	seen := map[dataplane.MAC]bool{}
	for range 100 {
		mac := randomMAC()
		if !mac.IsUnicast() || mac[0]&2 == 0 || seen[mac] {
			t.Errorf("%s (seen: %v), want a new local unicast address", mac, seen[mac])
		}
		seen[mac] = true
	}
}

// FuzzData checks that decodePlain and encoding/json give the same result for data that
// decodePlain accepts.
func FuzzData(f *testing.F) {
	for _, s := range []string{
		`{"VNI":1,"VtepMAC":"72:8d:4e:56:a5:33"}`, `{"VtepMAC":"72:8d:4e:56:a5:33"}`, `{"VNI":1,"VNI":2}`, `{"VNI":0,"VtepMAC":""}`, `{"vni":7}`, `{}`,
	} {
		f.Add([]byte(s))
	}
	if _, ok := decodePlain([]byte(`{"VNI":1,"VtepMAC":"72:8d:4e:56:a5:33"}`)); !ok {
		f.Error("flannel's form is not decoded by decodePlain")
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		fast, ok := decodePlain(raw)
		if !ok {
			return
		}
		var slow leaseData
		if err := json.Unmarshal(raw, &slow); err != nil || slow != fast {
			t.Errorf("%q: got %+v, want %+v, %v", raw, fast, slow, err)
		}
	})
}

// TestEncodeData checks that encodeData returns the bytes that other flannel daemons write
// and read.
func TestEncodeData(t *testing.T) {
	raw := encodeData(1, dataplane.MAC{0x72, 0x8d, 0x4e, 0x56, 0xa5, 0x33})
	if string(raw) != `{"VNI":1,"VtepMAC":"72:8d:4e:56:a5:33"}` {
		t.Errorf("%s", raw)
	}
}

func TestDesired(t *testing.T) {
	for _, tc := range []struct {
		name   string
		e      subnet.Endpoint
		direct string
		want   []string
	}{
		{
			name: "IPv4",
			e:    subnet.Endpoint{Subnet: netip.MustParsePrefix("10.5.26.0/24"), PublicIP: netip.MustParseAddr("192.168.77.2"), Data: json.RawMessage(`{"VtepMAC":"72:8d:4e:56:a5:33"}`)},
			want: []string{
				"neighbour 10.5.26.0 lladdr 72:8d:4e:56:a5:33 dev flannel.7",
				"FDB entry 72:8d:4e:56:a5:33 dst 192.168.77.2 dev flannel.7",
				"route 10.5.26.0/24 via 10.5.26.0 dev flannel.7",
			},
		},
		{
			name: "IPv6",
			e:    subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:10:5:2a::/64"), PublicIP: netip.MustParseAddr("fd00:77::2"), Data: json.RawMessage(`{"VtepMAC":"96:64:94:34:01:51"}`)},
			want: []string{
				"neighbour fd00:10:5:2a:: lladdr 96:64:94:34:01:51 dev flannel-v6.7",
				"FDB entry 96:64:94:34:01:51 dst fd00:77::2 dev flannel-v6.7",
				"route fd00:10:5:2a::/64 via fd00:10:5:2a:: dev flannel-v6.7",
			},
		},
		{
			name:   "direct",
			e:      subnet.Endpoint{Subnet: netip.MustParsePrefix("10.5.14.0/24"), PublicIP: netip.MustParseAddr("192.168.77.2")},
			direct: "eth0",
			want:   []string{"route 10.5.14.0/24 via 192.168.77.2 dev eth0"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			objects, err := desired(nil, tc.e, config{VNI: 7}.deviceName(tc.e.Family()), tc.direct)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, o := range objects {
				got = append(got, o.String())
				if r, ok := o.(dataplane.Route); ok && r.OnLink != (tc.direct == "") {
					t.Errorf("%s: onlink %v", r, r.OnLink)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestThousandsOfPeers checks the numbers of objects and of refusals for so many peers that
// several CPUs compute the objects. The race detector then finds data races between them.
func TestThousandsOfPeers(t *testing.T) {
	env := backendtest.Env(1500, prefix.IPv4)
	env.Kernel, env.Config.BackendType, env.Resync = dataplanetest.New(), Type, time.Hour
	be, _, err := New(nil, env)
	if err != nil {
		t.Fatal(err)
	}
	peer := func(i int, data string) subnet.Lease {
		s := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(i >> 4), byte(i << 4)}), 28)
		public := netip.AddrFrom4([4]byte{192, 168, 80 + byte(i>>8), byte(i)})
		return subnet.Lease{Key: s.String(), BackendType: Type, Endpoints: []subnet.Endpoint{{Subnet: s, PublicIP: public, Data: json.RawMessage(data)}}}
	}
	own := peer(0, `{"VtepMAC":"02:00:00:00:00:01"}`)
	n, err := be.Start(t.Context(), own)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	const good, bad = 3000, 10
	var leases []subnet.Lease
	for i := 1; i <= good; i++ {
		leases = append(leases, peer(i, fmt.Sprintf(`{"VtepMAC":"02:00:00:01:%02x:%02x"}`, i>>8, i&0xff)))
	}
	for i := good + 1; i <= good+bad; i++ {
		leases = append(leases, peer(i, `{"VtepMAC":"none"}`))
	}
	synced := make(chan backend.Pass, 10)
	s := backend.NewSyncer(backend.SyncerConfig{
		Config: env.Config, Own: own, Network: n, Sides: []backend.Side{{Type: Type, LeaseType: Type}}, Ledger: &subnet.Ledger{}, Resync: time.Hour,
		OnSync: func(p backend.Pass) { synced <- p },
	})
	s.Publish(subnet.Update{Snapshot: func() subnet.Snapshot { return subnet.Snapshot{Leases: subnettest.Pointers(leases...)} }})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	p := <-synced
	in, err := s.Inspect(t.Context(), false)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	refused := 0
	for _, r := range in.Peers {
		if r.Refused != "" {
			refused++
		}
	}
	all := dataplane.Count{Wanted: good, Present: good}
	routes := dataplane.Count{Wanted: good + 1, Present: good + 1} // one is the unreachable route
	if p.Err != nil || err != nil || refused != bad || in.Counts["route"] != routes || in.Counts["neighbour"] != all || in.Counts["fdb"] != all {
		t.Errorf("%d refused, %v in the kernel (%v, %v); want %d refused and %d of each", refused, in.Counts, p.Err, err, bad, good)
	}
}
