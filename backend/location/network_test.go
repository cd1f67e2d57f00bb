// SPDX-License-Identifier: Apache-2.0

package location

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// encrypted is a backend in place of wireguard, because the kernel in memory has no wireguard
// devices. It has one route to the whole network.
type encrypted struct {
	env  backend.Env
	same backend.Inner
}

const device = "flannel-wg"

func (e *encrypted) Describe() backend.Description {
	return backend.Description{Scope: e.env.Scope(device), LeaseType: "wireguard", MTU: 1440, SameLocation: e.same}
}

func (e *encrypted) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	c := e.env.Claim("wireguard", prev)
	for i := range c.Endpoints {
		c.Endpoints[i].Data = json.RawMessage(`{"PublicKey":"k"}`)
	}
	return c, nil
}

func (e *encrypted) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	p, err := e.env.Programmer(ctx, e.env.Scope(device))
	if err != nil {
		return nil, err
	}
	base := e.env.TunnelBase(own)
	link := dataplane.Link{Name: device, Kind: dataplane.KindVXLAN, MAC: dataplane.MAC{2}, MTU: 1440, Up: true} // the kernel in memory has no other kind of tunnel device
	link.VXLAN = dataplane.VXLAN{VNI: 99, Port: 51820, Local: e.env.Underlay.Addrs[0].Local, Underlay: "eth0"}
	base.Add(link,
		dataplane.Addr{Dev: device, Prefix: prefix.Host(own.Endpoints[0].Subnet.Addr())},
		dataplane.NewRoute(e.env.Config.Networks[0].Prefix, netip.Addr{}, device, false))
	p.Base = base
	n := &encryptedNetwork{encrypted: e, Programmer: p}
	return n, n.SetUp(ctx)
}

type encryptedNetwork struct {
	*encrypted
	*backend.Programmer
	failing   error
	republish bool
}

func (*encryptedNetwork) Check(l subnet.Lease) ([]string, error) {
	return []string{"key of " + l.Key}, nil
}

func (n *encryptedNetwork) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	out, err := n.Programmer.Sync(ctx, set)
	if err == nil {
		err = n.failing
	}
	out.Republish = n.republish
	return out, err
}

// bed is host 1 on a kernel in memory.
type bed struct {
	testing.TB
	kernel *dataplanetest.Kernel
	env    backend.Env
	same   backend.Inner
	net    *network
	leases map[string]*subnet.Lease
}

func newBed(t testing.TB, location string) *bed {
	t.Helper()
	b := &bed{TB: t, kernel: dataplanetest.New(), env: backendtest.Env(1500, prefix.IPv4), same: backend.Inner{Type: vxlan.Type}, leases: map[string]*subnet.Lease{}}
	b.env.Kernel, b.env.Resync, b.env.Location, b.env.Config.BackendType = b.kernel, time.Hour, location, "wireguard"
	b.env.Underlay.Addrs[0].Public = netip.MustParseAddr("203.0.113.1") // behind NAT
	return b
}

func (b *bed) backend() *Backend {
	b.Helper()
	between := func(env backend.Env) (backend.Backend, []string, error) { return &encrypted{env, b.same}, nil, nil }
	inside := func(env backend.Env) (backend.Backend, []string, error) {
		if b.same.Type == hostgw.Type {
			return hostgw.New(b.same.Raw, env)
		}
		return vxlan.New(b.same.Raw, env)
	}
	be, _, err := New(b.env, between, inside)
	if err != nil {
		b.Fatal(err)
	}
	return be.(*Backend)
}

func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24)
}

func addrOf(n int) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, 77, byte(n)}) }

// lease returns the lease of host n at a location. If location is empty, the host has none. change
// may change the data of the location; it may be nil. b is the backend of any host with the same
// configuration.
func lease(t testing.TB, b *Backend, n int, location string, change func(*data)) *subnet.Lease {
	t.Helper()
	d := data{Name: location, Type: b.sides.inside.Type, Config: b.digest, Address: addrOf(n)}
	if d.Type == vxlan.Type {
		d.Data = json.RawMessage(fmt.Sprintf(`{"VNI":1,"VtepMAC":"02:00:00:00:00:%02x"}`, n))
	}
	if change != nil {
		change(&d)
	}
	raw := json.RawMessage(`{"PublicKey":"k"}`)
	if location != "" {
		var err error
		if raw, err = d.addTo(raw); err != nil {
			t.Fatal(err)
		}
	}
	return &subnet.Lease{Key: fmt.Sprintf("host%d", n), BackendType: "wireguard", Endpoints: []subnet.Endpoint{{
		Subnet: subnetOf(n), PublicIP: netip.AddrFrom4([4]byte{203, 0, 113, byte(n)}), Data: raw,
	}}}
}

// start starts the network of host 1. prev is the claim that the host has published before; zero
// for a new host.
func (b *bed) start(prev subnet.Claim) {
	b.Helper()
	be := b.backend()
	own := subnet.Lease{Key: "host1", BackendType: "wireguard", Endpoints: slices.Clone(prev.Endpoints)}
	if len(own.Endpoints) == 0 {
		claim, err := be.Claim(b.Context(), prev)
		if err != nil {
			b.Fatal(err)
		}
		own.Endpoints = claim.Endpoints
	}
	own.Endpoints[0].Subnet = subnetOf(1)
	n, err := be.Start(b.Context(), own)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = n.Close() })
	b.net = n.(*network)
}

func (b *bed) sync(set backend.Set) backend.Outcome {
	b.Helper()
	set.Leases = b.leases
	out, err := b.net.Sync(b.Context(), set)
	if err != nil {
		b.Fatal(err)
	}
	return out
}

// expectInside checks that the kernel has routes inside to exactly the peers with the keys want,
// and that the route to the network exists.
func (b *bed) expectInside(what string, want ...string) {
	b.Helper()
	have, err := b.kernel.Read(b.Context(), b.net.Describe().Scope)
	if err != nil {
		b.Fatal(err)
	}
	var got []string
	for n := 2; n < 10; n++ {
		for _, r := range have.Routes[subnetOf(n)] {
			got = append(got, fmt.Sprintf("host%d", n))
			if direct := b.same.Type == hostgw.Type; direct && (r.Dev != "eth0" || r.Gateway != addrOf(n)) || !direct && r.Dev != "flannel.1" {
				b.Errorf("%s: host%d has the route %s", what, n, r)
			}
		}
	}
	if !slices.Equal(got, want) {
		b.Errorf("%s: inside are %v, want %v", what, got, want)
	}
	network := b.env.Config.Networks[0].Prefix
	if wide := have.Routes[network]; len(wide) != 2 || wide[0].Dev != device || wide[1] != dataplane.NewUnreachable(network) {
		b.Errorf("%s: the routes to the network are %v", what, wide)
	}
	if b.same.Type == vxlan.Type && (len(have.FDB) != len(want) || len(have.Neighs) != len(want)) {
		b.Errorf("%s: %d FDB entries and %d neighbours for %v", what, len(have.FDB), len(have.Neighs), want)
	}
}

// TestChoice checks that only a peer at the location of this host, with usable data, is served
// inside. It has peers at this location, at other locations, and with unusable data.
func TestChoice(t *testing.T) {
	for _, kind := range []string{vxlan.Type, hostgw.Type} {
		t.Run(kind, func(t *testing.T) {
			b := newBed(t, "east")
			b.same.Type = kind
			be := b.backend()
			for n, l := range map[int]*subnet.Lease{
				2: lease(t, be, 2, "east", nil),
				3: lease(t, be, 3, "west", nil),
				4: lease(t, be, 4, "", nil),
				5: lease(t, be, 5, "East", nil),
				6: lease(t, be, 6, "east", func(d *data) { d.Type = "ipip" }),
				7: lease(t, be, 7, "east", func(d *data) { d.Config = "0" }),
				8: lease(t, be, 8, "east", func(d *data) { d.Address = netip.MustParseAddr("10.5.8.1") }),
			} {
				b.leases[fmt.Sprintf("host%d", n)] = l
			}
			b.start(subnet.Claim{})
			b.sync(backend.Set{All: true, Complete: true})
			b.expectInside("at the first set", "host2")
			for key, want := range map[string]backend.Choice{
				"host2": {Backend: kind}, "host3": {Backend: "wireguard"}, "host4": {Backend: "wireguard"}, "host5": {Backend: "wireguard"},
				"host6": {Backend: "wireguard", Waiting: `it publishes data for "ipip", and not for ` + kind},
				"host7": {Backend: "wireguard", Waiting: "it has another SameLocation in its network configuration"},
				"host8": {Backend: "wireguard", Waiting: `its address "10.5.8.1" at the location is not one of another host`},
				"host9": {},
			} {
				if got := b.net.choice(key); got != want {
					t.Errorf("%s: %+v, want %+v", key, got, want)
				}
			}
			if r := b.net.Report().Location; *r != (status.Location{Name: "east", Inside: kind, Between: "wireguard", ByInside: 1, ByBetween: 6}) {
				t.Errorf("report %+v", *r)
			}
			if mtu := b.net.Describe().MTU; mtu != 1440 {
				t.Errorf("MTU %d, want the smaller one", mtu)
			}

			b.leases["host2"], b.leases["host3"] = lease(t, be, 2, "west", nil), lease(t, be, 3, "east", nil)
			b.sync(backend.Set{Changed: []string{"host2", "host3"}, Complete: true})
			b.expectInside("after two moves", "host3")
			delete(b.leases, "host3")
			b.sync(backend.Set{Changed: []string{"host3"}, Complete: true})
			b.expectInside("after a host has gone")
		})
	}
}

// TestHostileData checks a peer whose data or address for vxlan is unusable. The backend between
// locations must serve it, and the reason must be one short line.
func TestHostileData(t *testing.T) {
	b := newBed(t, "east")
	be := b.backend()
	b.start(subnet.Claim{})
	for i, raw := range []string{`null`, `7`, `{}`, `{"VtepMAC":"ff:ff:ff:ff:ff:ff"}`, `{"VtepMAC":"x\ny"}`} {
		l := lease(t, be, 2, "east", func(d *data) { d.Data = json.RawMessage(raw) })
		if ids, err := b.net.Check(*l); err != nil || !slices.Equal(ids, []string{"key of host2"}) {
			t.Errorf("%s: Check = %v, %v, want the identity of the other backend", raw, ids, err)
		}
		b.leases["host2"] = l
		b.sync(backend.Set{All: i == 0, Changed: []string{"host2"}, Complete: true})
		b.expectInside(raw)
		if c := b.net.choice("host2"); c.Backend != "wireguard" || !strings.Contains(c.Waiting, "its data for vxlan cannot be used") || strings.Contains(c.Waiting, "\n") {
			t.Errorf("%s: %+v, want the reason in one line", raw, c)
		}
	}
	for _, address := range []string{"fe80::1%\x1b[31m\n", "fe80::1%" + strings.Repeat("x", 1000), "::ffff:192.168.77.2", "2001:db8::2"} {
		b.leases["host2"] = lease(t, be, 2, "east", func(d *data) { d.Address = netip.MustParseAddr(address) })
		b.sync(backend.Set{Changed: []string{"host2"}, Complete: true})
		b.expectInside(address)
		if c := b.net.choice("host2"); c.Backend != "wireguard" || !strings.Contains(c.Waiting, "at the location is not one of another host") || strings.ContainsAny(c.Waiting, "\x1b\n") || len(c.Waiting) > 200 {
			t.Errorf("%q: %+v, want the reason in one short line", address, c)
		}
	}
}

// TestZone checks that an IPv6 peer whose address has a zone is not served inside, and that the
// reason quotes the escape sequences in the zone.
func TestZone(t *testing.T) {
	b := newBed(t, "east")
	be := b.backend()
	raw, err := data{Name: "east", Type: vxlan.Type, Config: be.digest, Address: netip.MustParseAddr("2001:db8::2%\x1b[31m"), Data: json.RawMessage(`{}`)}.addTo(json.RawMessage(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	inside, why := be.asInside(&subnet.Lease{Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix("fd00:2::/64"), Data: raw}}})
	if inside != nil || !strings.Contains(why, `its address "2001:db8::2%\x1b[31m" at the location`) {
		t.Errorf("the peer is served inside: %v, reason %s", inside != nil, why)
	}
}

// TestSharedIdentity checks peers that have the VTEP MAC of another host. The backend between
// locations must serve them until only one host has that MAC, because vxlan could send the packets
// for one host to another.
func TestSharedIdentity(t *testing.T) {
	b := newBed(t, "east")
	be := b.backend()
	b.start(subnet.Claim{})
	claim, err := b.net.Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	own, _ := decode(claim.Endpoints[0].Data)
	like := func(n, other int, location string) *subnet.Lease {
		there, _ := decode(lease(t, be, other, "east", nil).Endpoints[0].Data)
		return lease(t, be, n, location, func(d *data) { d.Data = there.Data })
	}
	b.leases["host2"], b.leases["host3"], b.leases["host4"] = lease(t, be, 2, "east", nil), like(3, 2, "east"), like(4, 2, "west")
	b.leases["host5"] = lease(t, be, 5, "east", func(d *data) { d.Data = own.Data })
	for key, l := range b.leases {
		if ids, err := b.net.Check(*l); err != nil || !slices.Equal(ids, []string{"key of " + key}) {
			t.Errorf("Check = %v, %v, want the identity of the other backend", ids, err)
		}
	}
	b.sync(backend.Set{All: true, Complete: true})
	b.expectInside("two hosts have one VTEP MAC")
	for key, want := range map[string]string{"host2": "VTEP MAC 02:00:00:00:00:02 is also that of host3", "host3": "is also that of host2", "host4": "", "host5": "is also that of host1"} {
		if c := b.net.choice(key); c.Backend != "wireguard" || !strings.Contains(c.Waiting, want) || (c.Waiting == "") != (want == "") {
			t.Errorf("%s: %+v, want the reason %q", key, c, want)
		}
	}
	b.leases["host3"] = lease(t, be, 3, "east", nil)
	b.sync(backend.Set{Changed: []string{"host3"}, Complete: true})
	b.expectInside("one host has another VTEP MAC", "host2", "host3")
	b.leases["host3"] = like(3, 2, "east")
	b.sync(backend.Set{Changed: []string{"host3"}, Complete: true})
	b.expectInside("two hosts have one VTEP MAC again")
	delete(b.leases, "host3")
	b.sync(backend.Set{Changed: []string{"host3"}, Complete: true})
	b.expectInside("one host has gone", "host2")
}

// TestRestartWithAnotherText restarts a host while the store is unavailable. Peers must be served
// inside although the last known state has the configuration in another form.
func TestRestartWithAnotherText(t *testing.T) {
	b := newBed(t, "east")
	const stored = `{"Backend": {"SameLocation": { "VNI": 1, "Type": "vxlan" } }}`
	decode := func(text []byte) {
		t.Helper()
		var object struct {
			Backend struct{ SameLocation backend.Inner }
		}
		if err := json.Unmarshal(text, &object); err != nil {
			t.Fatal(err)
		}
		b.same = object.Backend.SameLocation
	}
	decode([]byte(stored))
	b.leases["host2"] = lease(t, b.backend(), 2, "east", nil)
	kept, err := json.Marshal(json.RawMessage(stored)) // as in the last known state
	if err != nil || string(kept) == stored {
		t.Fatal(string(kept), err)
	}
	decode(kept)
	b.start(subnet.Claim{})
	b.sync(backend.Set{All: true})
	b.expectInside("with the last known state", "host2")
}

// TestUnreachableInside checks a peer that the kernel cannot reach by host-gw. The backend between
// locations must serve it, without an error or a refusal.
func TestUnreachableInside(t *testing.T) {
	b := newBed(t, "east")
	b.same.Type = hostgw.Type
	be := b.backend()
	far := lease(t, be, 3, "east", func(d *data) { d.Address = netip.MustParseAddr("198.51.100.3") })
	b.leases["host2"], b.leases["host3"] = lease(t, be, 2, "east", nil), far
	b.start(subnet.Claim{})
	out := b.sync(backend.Set{All: true, Complete: true})
	if len(out.Refused) > 0 {
		t.Errorf("refused: %v, want none", out.Refused)
	}
	b.expectInside("one host is far", "host2")
	if c := b.net.choice("host3"); c.Backend != "wireguard" || c.Waiting == "" {
		t.Errorf("%+v, want a reason", c)
	}
	if r := b.net.Report().Location; r.ByInside != 1 || r.ByBetween != 1 {
		t.Errorf("report %+v", *r)
	}
	for _, o := range b.net.Report().Objects("host3") {
		if !o.Present {
			t.Errorf("%s counts as missing", o.Text)
		}
	}
}

// TestOtherLocationAtOnce restarts a host at another location, or without a location, while the store
// is unavailable. Packets to a known peer at the former location must not go on in clear text. The
// route to a peer that is not known yet must stay until the store has answered.
func TestOtherLocationAtOnce(t *testing.T) {
	for _, kind := range []string{vxlan.Type, hostgw.Type} {
		for _, location := range []string{"west", ""} {
			t.Run(kind+" to "+location, func(t *testing.T) {
				b := newBed(t, "east")
				b.same.Type = kind
				be := b.backend()
				b.leases["host2"], b.leases["host3"] = lease(t, be, 2, "east", nil), lease(t, be, 3, "east", nil)
				b.start(subnet.Claim{})
				b.sync(backend.Set{All: true, Complete: true})
				claim, err := b.net.Claim(t.Context(), subnet.Claim{})
				if err != nil {
					t.Fatal(err)
				}
				if err := b.net.Close(); err != nil {
					t.Fatal(err)
				}
				b.env.Location = location
				b.start(claim)
				delete(b.leases, "host3")
				b.sync(backend.Set{All: true})
				have, err := b.kernel.Read(t.Context(), b.net.Describe().Scope)
				if err != nil {
					t.Fatal(err)
				}
				if r := have.Routes[subnetOf(2)]; len(r) > 0 {
					t.Errorf("packets to a known peer at another location follow %v", r)
				}
				if r := have.Routes[subnetOf(3)]; len(r) != 1 {
					t.Errorf("routes to an unknown peer: %v, want the former one", r)
				}
				b.sync(backend.Set{Complete: true})
				b.expectInside("when the store has answered")
			})
		}
	}
}

// TestRestartKeepsRoutes checks that a restarted host changes nothing in the kernel, so that the routes
// inside stay: neither before the store has answered, nor when it gets the same peers from the store.
func TestRestartKeepsRoutes(t *testing.T) {
	b := newBed(t, "east")
	be := b.backend()
	b.leases["host2"] = lease(t, be, 2, "east", nil)
	b.start(subnet.Claim{})
	b.sync(backend.Set{All: true, Complete: true})
	claim, err := b.net.Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.net.Close(); err != nil {
		t.Fatal(err)
	}
	spy := &dataplanetest.Spy{Kernel: b.kernel}
	b.env.Kernel = spy
	b.start(claim)
	peers := b.leases
	for _, pass := range []struct {
		what     string
		leases   map[string]*subnet.Lease
		complete bool
	}{
		{"no answer of the store", nil, false},
		{"the first peers", peers, false},
		{"all peers", peers, true},
	} {
		b.leases = pass.leases
		b.sync(backend.Set{All: true, Complete: pass.complete})
		for _, op := range spy.Take() {
			t.Errorf("a pass with %s makes the change %s", pass.what, op)
		}
		b.expectInside(pass.what, "host2")
	}
}

// TestStartWithoutData starts a host that had no location when it published its lease. The device
// of the backend inside must have the MAC address that the host publishes next.
func TestStartWithoutData(t *testing.T) {
	b := newBed(t, "")
	prev, err := b.backend().Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := decode(prev.Endpoints[0].Data); ok {
		t.Errorf("a host without a location publishes %s", prev.Endpoints[0].Data)
	}
	b.env.Location = "east"
	b.start(prev)
	have, err := b.kernel.Read(t.Context(), b.net.Describe().Scope)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if prev, err = b.net.Claim(t.Context(), prev); err != nil {
			t.Fatal(err)
		}
		d, ok := decode(prev.Endpoints[0].Data)
		mac := have.Links["flannel.1"].MAC.String()
		if !ok || d.Name != "east" || d.Address != addrOf(1) || !strings.Contains(string(d.Data), mac) || prev.Endpoints[0].PublicIP == addrOf(1) {
			t.Errorf("the device has the address %s, and the host publishes %+v at %s", mac, d, prev.Endpoints[0].PublicIP)
		}
	}
}

// TestRebootKeepsTheData checks that a host without a device publishes the data for the backend inside that
// it has published before, and none that was for another backend. A host without a location publishes none.
func TestRebootKeepsTheData(t *testing.T) {
	b := newBed(t, "east")
	first, err := b.backend().Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	if without, err := newBed(t, "").backend().Claim(t.Context(), first); err != nil || string(without.Endpoints[0].Data) != `{"PublicKey":"k"}` {
		t.Errorf("without a location: %s, %v", without.Endpoints[0].Data, err)
	}
	for name, change := range map[string]func(*data){
		"the same": nil, "for another backend": func(d *data) { d.Type = "ipip" },
	} {
		prev := first
		prev.Endpoints = slices.Clone(first.Endpoints)
		if change != nil {
			d, _ := decode(prev.Endpoints[0].Data)
			change(&d)
			if prev.Endpoints[0].Data, err = d.addTo(json.RawMessage(`{"PublicKey":"k"}`)); err != nil {
				t.Fatal(err)
			}
		}
		again, err := b.backend().Claim(t.Context(), prev)
		if err != nil {
			t.Fatal(err)
		}
		if same := string(again.Endpoints[0].Data) == string(first.Endpoints[0].Data); same != (change == nil) {
			t.Errorf("%s: %s after %s", name, again.Endpoints[0].Data, first.Endpoints[0].Data)
		}
	}
}

// TestBackendBetweenPublishes checks that the network wants to publish other data if the backend between locations
// does.
func TestBackendBetweenPublishes(t *testing.T) {
	b := newBed(t, "east")
	b.start(subnet.Claim{})
	b.net.running.between.(*encryptedNetwork).republish = true
	if out := b.sync(backend.Set{All: true}); !out.Republish {
		t.Error("the network publishes nothing")
	}
}

// TestFailureBetween moves a peer to another location in a pass in which Sync of the backend between
// locations fails. The route inside must be deleted all the same, so that packets to the peer do not
// go on in clear text.
func TestFailureBetween(t *testing.T) {
	b := newBed(t, "east")
	be := b.backend()
	b.leases["host2"] = lease(t, be, 2, "east", nil)
	b.start(subnet.Claim{})
	b.sync(backend.Set{All: true, Complete: true})
	b.net.running.between.(*encryptedNetwork).failing = context.DeadlineExceeded
	b.leases["host2"] = lease(t, be, 2, "west", nil)
	if _, err := b.net.Sync(t.Context(), backend.Set{Leases: b.leases, Changed: []string{"host2"}, Complete: true}); err == nil {
		t.Error("the failure is no error")
	}
	b.expectInside("after the move")
}
