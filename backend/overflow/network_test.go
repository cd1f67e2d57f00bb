// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// bed is host 1 on a cloud and a kernel in memory.
type bed struct {
	*testing.T
	*cloudtest.Memory
	kernel *dataplanetest.Kernel
	env    backend.Env
	net    *network
	leases map[string]*subnet.Lease
	warned []string
	asked  bool // the host asks to publish its claim
	claims int  // number of claims that were published
}

func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24)
}

func tunnelData(n int) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"VNI":1,"VtepMAC":"02:00:00:00:00:%02x"}`, n))
}

// lease returns the lease of host n with that data.
func lease(t *testing.T, n int, d data) *subnet.Lease {
	t.Helper()
	raw := d.encode()
	return &subnet.Lease{Key: fmt.Sprintf("host%d", n), Endpoints: []subnet.Endpoint{{
		Subnet: subnetOf(n), PublicIP: netip.AddrFrom4([4]byte{192, 168, 77, byte(n)}), Data: raw,
	}}}
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{T: t, kernel: dataplanetest.New(), env: backendtest.Env(1500, prefix.IPv4), leases: map[string]*subnet.Lease{}}
	b.Memory = &cloudtest.Memory{
		Self: "eni-1", Hosts: map[string][]netip.Addr{"eni-1": {netip.MustParseAddr("192.168.77.1")}},
		Tabs: []cloud.Table{{ID: "rtb-1", Own: true}},
	}
	now := time.Now()
	b.env.Kernel, b.env.Resync, b.env.Connected = b.kernel, 20*time.Millisecond, func() time.Time { return now }
	b.env.Warn = func(reason, message string) { b.warned = append(b.warned, reason+": "+message) }
	return b
}

func (b *bed) backend() backend.Backend {
	b.Helper()
	be, _, err := New(b.env, func(env backend.Env) (backend.Backend, []string, error) {
		return &cloudnet.Backend{Type: "aws-vpc", Env: env, Cloud: b.Memory, Calls: &cloud.Calls{}, Overflow: backend.Inner{Type: "vxlan"}}, nil, nil
	}, func(env backend.Env) (backend.Backend, []string, error) { return vxlan.New(nil, env) })
	if err != nil {
		b.Fatal(err)
	}
	return be
}

// start starts the network of host 1. prev is the claim that the host has published before; zero
// for a new host.
func (b *bed) start(prev subnet.Claim) {
	b.Helper()
	be := b.backend()
	claim, err := be.Claim(b.Context(), prev)
	if err != nil {
		b.Fatal(err)
	}
	claim.Endpoints[0].Subnet = subnetOf(1)
	n, err := be.Start(b.Context(), subnet.Lease{Key: "host1", BackendType: claim.BackendType, Endpoints: claim.Endpoints})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = n.Close() })
	b.net = n.(*network)
	b.sync()
}

func (b *bed) sync() backend.Outcome {
	b.Helper()
	return b.syncAfter(nil)
}

// syncAfter is sync after the publication of a claim.
func (b *bed) syncAfter(published *subnet.Claim) backend.Outcome {
	b.Helper()
	out, err := b.net.Sync(b.Context(), backend.Set{Leases: b.leases, All: true, Complete: true, Published: published})
	if err != nil {
		b.Fatal(err)
	}
	b.asked = b.asked || out.Republish
	return out
}

// expectClaim makes passes, and publishes the claims that the host asks to publish, until the
// published data is want. It ignores the data for the tunnel.
func (b *bed) expectClaim(what string, want data) {
	b.Helper()
	deadline := time.After(10 * time.Second)
	var last string
	for {
		if b.asked {
			b.asked = false
			claim, err := b.net.Claim(b.Context(), b.net.own.Claim())
			if err != nil {
				b.Fatal(err)
			}
			b.claims++
			b.syncAfter(&claim)
			d, known, err := decode(claim.Endpoints[0].Data)
			if err != nil || !known || d.Overflow == nil {
				b.Fatalf("%s: the host publishes %s", what, claim.Endpoints[0].Data)
			}
			d.Overflow = nil
			if last = cmp.Diff(want, d); last == "" {
				return
			}
			continue
		}

		select {
		case <-b.net.Changed():
			b.sync()
		case <-deadline:
			b.Fatalf("%s: the host does not publish the wanted data (-want +got):\n%s", what, last)
		}
	}
}

// byTunnel returns the keys of the peers to which the kernel has a route. It checks that the kernel
// has one FDB entry and one neighbour for each of them.
func (b *bed) byTunnel() (keys []string) {
	b.Helper()
	have, err := b.kernel.Read(b.Context(), b.net.Describe().Scope)
	if err != nil {
		b.Fatal(err)
	}
	for _, key := range []string{"host2", "host3", "host4", "host5", "host6"} {
		l := b.leases[key]
		if l == nil || len(have.Routes[l.Endpoints[0].Subnet]) == 0 {
			continue
		}
		keys = append(keys, key)
		if r := have.Routes[l.Endpoints[0].Subnet][0]; r.Dev != "flannel.1" || r.Type != dataplane.Unicast {
			b.Errorf("%s has the route %s", key, r)
		}
	}
	if len(have.FDB) != len(keys) || len(have.Neighs) != len(keys) {
		b.Errorf("%d FDB entries and %d neighbours for %v", len(have.FDB), len(have.Neighs), keys)
	}
	return keys
}

func (b *bed) expectByTunnel(what string, want ...string) {
	b.Helper()
	if got := b.byTunnel(); !slices.Equal(got, want) {
		b.Errorf("%s: the tunnel has %v, want %v", what, got, want)
	}
}

// TestChoice checks which peers use the tunnel, and what the host publishes, after its first route,
// with a full table, and after the quota was raised.
func TestChoice(t *testing.T) {
	b := newBed(t)
	inside := data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: tunnelData(2)}
	b.leases["host2"] = lease(t, 2, inside)
	b.leases["host3"] = lease(t, 3, data{Table: "rtb-1", Why: "quota", Overflow: tunnelData(3)})
	b.leases["host4"] = lease(t, 4, data{Overflow: tunnelData(4)})
	b.leases["host5"] = lease(t, 5, data{Table: "rtb-1"})
	b.leases["host6"] = lease(t, 6, inside)
	b.leases["host6"].Endpoints[0].Data = nil // as a host with flannel publishes
	b.start(subnet.Claim{})
	if mtu := b.net.Describe().MTU; mtu != 1450 {
		t.Errorf("MTU %d, want that of the tunnel", mtu)
	}
	b.expectClaim("a new host", inside.without())
	if b.claims != 1 {
		t.Errorf("a new host has published its data %d times, want once", b.claims)
	}
	b.expectByTunnel("with a route", "host3", "host4")
	for key, want := range map[string]backend.Choice{
		"host2": {Backend: "aws-vpc"},
		"host3": {Backend: "vxlan", Waiting: `table "rtb-1" has no route to it: the quota of routes is used up`},
		"host4": {Backend: "vxlan", Waiting: `table "rtb-1" has no route to it`},
		"host5": {}, // refused
		"host6": {Backend: "aws-vpc"},
		"host9": {},
	} {
		if got := b.net.choice(key); got != want {
			t.Errorf("%s: %+v, want %+v", key, got, want)
		}
	}
	out := b.sync()
	if len(out.Refused) != 1 || out.Refused[0].Key != "host5" || !strings.Contains(out.Refused[0].Reason, `it publishes no data for vxlan, and the cloud does not carry the packets: table "rtb-1" has no route to it`) {
		t.Errorf("refused %v, want host5 with the reason", out.Refused)
	}

	b.Do(func() {
		b.DeleteByHand("rtb-1", subnetOf(1))
		b.Tabs[0].Routes = append(b.Tabs[0].Routes, cloud.Route{Table: "rtb-1", Dst: subnetOf(9), Target: "eni-1", ByCall: true})
		b.Quota = 1
	})
	b.expectClaim("a full table", data{Table: "rtb-1", Why: "quota"})
	b.expectByTunnel("a full table", "host2", "host3", "host4")
	want := "table rtb-1 has reached its limit of 1 routes"
	if r := b.net.Report().Overflow; r.Tunnel != "vxlan" || r.ByTunnel != 3 || !strings.Contains(r.Problem, "vxlan carries the packets of this host") || !strings.Contains(r.Problem, want) {
		t.Errorf("report %+v, want the tunnel and the reason", r)
	}
	if len(b.warned) != 1 || !strings.Contains(b.warned[0], "FlannelOverflow: ") || !strings.Contains(b.warned[0], want) {
		t.Errorf("warned of %q, want the full table once", b.warned)
	}

	b.Do(func() { b.Quota = 10 })
	for !b.asked {
		<-b.net.Changed()
		b.sync()
	}
	b.expectByTunnel("a higher quota, and the store is away", "host2", "host3", "host4")
	b.expectClaim("a higher quota", inside.without())
	b.expectByTunnel("a higher quota", "host3", "host4")
	if r := b.net.Report().Overflow; r.Problem != "" || r.ByTunnel != 2 || r.ByCloud != 2 {
		t.Errorf("report %+v, want nothing wrong", r)
	}
}

// without returns d without data for the tunnel.
func (d data) without() data {
	d.Overflow = nil
	return d
}

// TestRestart starts a host again while the cloud does not answer. The host must go on to publish
// the same data as before, including the MAC address of its device, and the cloud must still carry
// the packets to the peer.
func TestRestart(t *testing.T) {
	b := newBed(t)
	b.leases["host2"] = lease(t, 2, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: tunnelData(2)})
	own := lease(t, 1, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: tunnelData(1)})
	b.Fails = cloud.ErrUnavailable
	b.start(own.Claim())
	for !b.net.compared {
		<-b.net.Changed()
		b.sync()
	}
	b.expectByTunnel("after a restart")
	if b.asked {
		t.Error("the host wants to publish something")
	}
	if got := string(b.net.own.Endpoints[0].Data); got != string(own.Endpoints[0].Data) {
		t.Errorf("the host publishes %s, want %s", got, own.Endpoints[0].Data)
	}
	if r := b.net.Report().Overflow; !strings.Contains(r.Problem, "go on to carry the packets of this host") || !strings.Contains(r.Problem, "the cloud does not answer") {
		t.Errorf("report %+v, want the reason", r)
	}
}

// TestDropped checks a host while the cloud drops its packets, and then does not answer or gives a
// wrong answer. The data of the host must contain no routes, although the host has read some
// before.
func TestDropped(t *testing.T) {
	b := newBed(t)
	b.start(subnet.Claim{})
	b.expectClaim("a new host", data{Table: "rtb-1", Routed: []string{"rtb-1"}})
	b.Do(func() { b.Fails = &cloud.DroppedError{Err: errors.New("canIpForward is off")} })
	b.expectClaim("the cloud drops packets", data{Why: "failed"})
	for _, err := range []error{cloud.ErrUnavailable, errors.New("the answer is no XML")} {
		b.Do(func() { b.Fails = err })
		for !errors.Is(b.net.failed, err) {
			<-b.net.Changed()
			b.sync()
		}
		if d := b.net.data[prefix.IPv4]; d.Table != "" || len(d.Routed) > 0 {
			t.Errorf("after %v, the host has the data %+v, want no route", err, d)
		}
	}
	b.Do(func() { b.Fails = nil })
	b.expectClaim("the cloud passes packets", data{Table: "rtb-1", Routed: []string{"rtb-1"}})
}

// TestOutside checks a host that is outside of the cloud, so that the cloud does not answer. The
// host must publish a claim, and use the tunnel for its peer. It must warn once, with the reason.
func TestOutside(t *testing.T) {
	b := newBed(t)
	b.leases["host2"] = lease(t, 2, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: tunnelData(2)})
	b.Fails = cloud.ErrUnavailable
	b.start(subnet.Claim{})
	b.expectClaim("without a cloud", data{Why: "unavailable"})
	b.expectByTunnel("without a cloud", "host2")
	if len(b.warned) != 1 || !strings.Contains(b.warned[0], "vxlan carries the packets of this host: find this host in the cloud: the cloud does not answer") {
		t.Errorf("warned of %q, want the reason", b.warned)
	}
}

// TestPeersWithoutData checks a new host among hosts with flannel, which publish no data. It must
// not refuse these peers while its route is not seen or published yet. It must refuse them if the
// route cannot be put.
func TestPeersWithoutData(t *testing.T) {
	b := newBed(t)
	b.leases["host6"] = lease(t, 6, data{})
	b.leases["host6"].Endpoints[0].Data = nil
	b.env.Resync = time.Hour // the route is seen after 5 seconds
	b.start(subnet.Claim{})
	for !b.net.compared {
		<-b.net.Changed()
		if out := b.sync(); len(out.Refused) > 0 {
			t.Errorf("refused %v although there is a route", out.Refused)
		}
	}

	b.Do(func() {
		b.Tabs[0].Routes, b.Quota = []cloud.Route{{Table: "rtb-1", Dst: subnetOf(9), Target: "eni-1", ByCall: true}}, 1
	})
	b.start(subnet.Claim{})
	for !b.net.compared {
		<-b.net.Changed()
		b.sync()
	}
	if out := b.sync(); len(out.Refused) != 1 || !strings.Contains(out.Refused[0].Reason, "it publishes no data for vxlan") {
		t.Errorf("refused %v, want host6 because the table is full", out.Refused)
	}
	b.leases = map[string]*subnet.Lease{}
	if out := b.sync(); len(out.Refused) > 0 {
		t.Errorf("refused %v, which has gone", out.Refused)
	}
}

// TestUnusableData checks peers whose data for the tunnel is unusable. Only a peer that needs the
// tunnel must be refused.
func TestUnusableData(t *testing.T) {
	b := newBed(t)
	bad := json.RawMessage(`{"VtepMAC":"none"}`)
	b.leases["host2"] = lease(t, 2, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: bad})
	b.leases["host3"] = lease(t, 3, data{Overflow: bad})
	b.start(subnet.Claim{})
	b.expectClaim("a new host", data{Table: "rtb-1", Routed: []string{"rtb-1"}})
	for key, l := range b.leases {
		if ids, err := b.net.Check(*l); err != nil || len(ids) > 0 {
			t.Errorf("%s: identities %v, error %v", key, ids, err)
		}
	}
	if out := b.sync(); len(out.Refused) != 1 || out.Refused[0].Key != "host3" || !strings.Contains(out.Refused[0].Reason, "its data for vxlan cannot be used: ") {
		t.Errorf("refused %v, want host3", out.Refused)
	}
	good := lease(t, 4, data{Overflow: tunnelData(4)})
	if ids, err := b.net.Check(*good); err != nil || len(ids) != 1 || !strings.Contains(ids[0], "02:00:00:00:00:04") {
		t.Errorf("identities %v, error %v, want the MAC", ids, err)
	}
	good.Endpoints[0].Data = json.RawMessage(`"text"`)
	if _, err := b.net.Check(*good); err == nil {
		t.Error("data that is no object is accepted")
	}
}

// TestChangedHint checks passes that name one changed lease. The result must be that of a pass over
// all leases.
func TestChangedHint(t *testing.T) {
	b := newBed(t)
	b.start(subnet.Claim{})
	b.expectClaim("a new host", data{Table: "rtb-1", Routed: []string{"rtb-1"}})
	full := lease(t, 2, data{Table: "rtb-1", Why: "quota", Overflow: tunnelData(2)})
	routed := lease(t, 2, data{Table: "rtb-1", Routed: []string{"rtb-1"}, Overflow: tunnelData(2)})
	for i, step := range []*subnet.Lease{full, routed, full, nil, routed, nil} {
		delete(b.leases, "host2")
		var want []string
		if step != nil {
			b.leases["host2"] = step
		}
		if step == full {
			want = []string{"host2"}
		}
		if _, err := b.net.Sync(t.Context(), backend.Set{Leases: b.leases, Changed: []string{"host2"}, Complete: true}); err != nil {
			t.Fatal(err)
		}
		b.expectByTunnel(fmt.Sprintf("step %d", i), want...)
	}
}
