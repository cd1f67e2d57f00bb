// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// natHost is the network of host 1 with a clock that only the test moves.
type natHost struct {
	*network
	device *fakeControl
	clock  discovery.Instant
	asks   bool // to publish its lease
}

// newNATHost returns host 1 as it is when its daemon has just started. own is the lease of host 1
// before the start. The network takes over the shared endpoints that own contains.
func newNATHost(t *testing.T, own *subnet.Lease) *natHost {
	t.Helper()
	n, _, c := start(t)
	h := &natHost{network: n, device: c, clock: discovery.Instant{Wall: time.Unix(1_000_000, 0), Steady: time.Hour}}
	n.now = func() discovery.Instant { return h.clock }
	restart(n, own)
	return h
}

// restart gives n the discovery of a new start, with own as the last lease of the host.
func restart(n *network, own *subnet.Lease) {
	n.Backend.published.Store(nil) // the last start has set it
	n.devices = nil
	n.startDiscovery(*own)
}

// sync lets the time d pass on the clock of the test. It makes one pass at once, and then a pass
// whenever the network asks for one. leases are those of the other hosts. It returns the number of
// passes.
func (h *natHost) sync(t *testing.T, d time.Duration, leases ...*subnet.Lease) (passes int) {
	t.Helper()
	s, end := set(nil, leases...), h.clock.Steady+d
	for {
		passes++
		o, err := h.Sync(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		h.asks = h.asks || o.Republish
		if o.Again == 0 || h.clock.Steady+o.Again > end {
			h.pass(end - h.clock.Steady)
			return passes
		}
		h.pass(o.Again)
		s.All, s.Changed = false, nil
	}
}

// pass moves the clock of the test by d.
func (h *natHost) pass(d time.Duration) {
	h.clock.Steady += d
	h.clock.Wall = h.clock.Wall.Add(d)
}

// session gives host i a new session with host 1 at endpoint, on the IPv4 device, and one received
// byte. It also counts one more byte sent to each peer of the device.
func (h *natHost) session(i byte, endpoint string) { h.sessionOn("flannel-wg", i, endpoint) }

// sessionOn does what session does, on the device with that name.
func (h *natHost) sessionOn(device string, i byte, endpoint string) {
	for k, p := range h.device.peers[device] {
		if p.TransmitBytes++; k == key(i) {
			p.Endpoint, p.LastHandshakeTime = netUDP(endpoint), h.clock.Wall
			p.ReceiveBytes++
		}
		h.device.peers[device][k] = p
	}
}

// endpoint returns the endpoint of host i on the IPv4 device of host 1.
func (h *natHost) endpoint(i byte) string {
	return discovery.EndpointOf(h.device.peers["flannel-wg"][key(i)]).String()
}

// published returns the endpoints in the lease that the host would publish now.
func (h *natHost) published(t *testing.T) discovery.Endpoints {
	t.Helper()
	claim, err := h.Claim(t.Context(), host(t, 1, 1).Claim())
	if err != nil {
		t.Fatal(err)
	}
	return discovery.SharedIn(subnet.Lease{Endpoints: claim.Endpoints}, h.env.Reachable)
}

// asked reports whether the network has asked to publish its lease since the last call.
func (h *natHost) asked() (asked bool) {
	asked = h.asks
	h.asks = false
	return asked
}

// hostThatShares returns the lease of host i, which shares endpoints. sharing describes the
// form of entries.
func hostThatShares(t *testing.T, i byte, entries ...string) *subnet.Lease {
	t.Helper()
	l, shared := host(t, i, int(i)), sharing(t, entries...)
	for j, e := range l.Endpoints {
		l.Endpoints[j].Data = encodeData(leaseData{PublicKey: text(key(i)), Port: 51820, PeerEndpoints: shared.Encode(e.Family())})
	}
	return l
}

func netUDP(endpoint string) *net.UDPAddr {
	return net.UDPAddrFromAddrPort(netip.MustParseAddrPort(endpoint))
}

// TestShareTheEndpointOfAPeer checks that a host writes its lease once to share the endpoint of a
// peer behind NAT that keeps a session, that the endpoint stays in the lease after a restart, and
// that it leaves the lease long after the last session.
func TestShareTheEndpointOfAPeer(t *testing.T) {
	const seen = "192.168.78.7:40002"
	h := newNATHost(t, host(t, 1, 1))
	two, three := host(t, 2, 2), host(t, 3, 3)
	h.sync(t, time.Second, two, three)
	asked := 0
	for range 20 {
		h.session(2, seen)
		h.sync(t, 30*time.Second, two, three)
		if h.asked() {
			asked++
		}
	}
	if got := h.published(t); asked != 1 || len(got) != 1 || got[discovery.Of{Peer: key(2), Family: prefix.IPv4}].String() != seen {
		t.Errorf("after %d requests to publish it the lease has %v, want one request and %s", asked, got, seen)
	}

	again := newNATHost(t, hostThatShares(t, 1, "2 "+seen))
	for range 20 {
		again.sync(t, 30*time.Second, two, three)
		again.session(2, seen)
	}
	if got := again.published(t); again.asked() || len(got) != 1 {
		t.Errorf("after a restart the lease has %v, want it unchanged", got)
	}
	again.sync(t, 20*time.Minute, two, three)
	if got := again.published(t); !again.asked() || len(got) != 0 {
		t.Errorf("long after the last session the lease has %v, want nothing", got)
	}
}

// TestPeersWithoutNATCostNothing checks that the network asks for only one pass after the first
// one, to read its devices, and for none if EndpointSharingInterval is 0.
func TestPeersWithoutNATCostNothing(t *testing.T) {
	h := newNATHost(t, host(t, 1, 1))
	if passes := h.sync(t, time.Hour, host(t, 2, 2), host(t, 3, 3)); passes != 2 {
		t.Errorf("%d passes in an hour, want 2", passes)
	}
	off, _, c := start(t)
	off.config.EndpointSharingInterval = 0
	restart(off, host(t, 1, 1))
	o, err := off.Sync(t.Context(), set(nil, host(t, 2, 2), hostThatShares(t, 3, "2 192.168.78.7:40002")))
	if err != nil || o.Again != 0 {
		t.Errorf("with interval 0: another pass after %s, %v, want none", o.Again, err)
	}
	c.expect(t, "flannel-wg", "192.168.77.2:51820 10.5.2.0/24", "192.168.77.3:51820 10.5.3.0/24")
}

// TestTryTheEndpointsOfOthers checks that a host tries the endpoint that another host shares
// for a peer, while there is no session with that peer. It must not try that endpoint for other
// peers.
func TestTryTheEndpointsOfOthers(t *testing.T) {
	const shared, other = "192.168.78.7:40002", "192.168.78.9:9"
	h := newNATHost(t, host(t, 1, 1))
	two, three := host(t, 2, 2), host(t, 3, 3)
	sync := func(d time.Duration, leases ...*subnet.Lease) {
		t.Helper()
		for end := h.clock.Steady + d; h.clock.Steady < end; {
			h.session(3, "192.168.77.3:51820")
			h.sync(t, 5*time.Second, leases...)
		}
	}
	sync(10*time.Minute, two, three)
	if got := h.endpoint(2); got != "192.168.77.2:51820" {
		t.Errorf("without a session the endpoint is %s, want that of the lease", got)
	}
	three = hostThatShares(t, 3, "2 "+shared, "3 "+other, "4 "+other)
	sync(10*time.Second, two, three)
	if got := h.endpoint(2); got != shared {
		t.Errorf("the endpoint is %s, want the shared one, %s", got, shared)
	}
	if got := h.endpoint(3); got != "192.168.77.3:51820" {
		t.Errorf("a peer with a session has endpoint %s, want the one that works", got)
	}
	if len(h.device.peers["flannel-wg"]) != 2 {
		t.Errorf("the device has peers %v, want only those with a lease", h.device.peers["flannel-wg"])
	}

	// The peer answers from the shared endpoint. While there is a session, another shared endpoint
	// has no effect.
	h.session(2, shared)
	three = hostThatShares(t, 3, "2 "+other)
	sync(2*time.Minute, two, three)
	if got := h.endpoint(2); got != shared {
		t.Errorf("with a session the endpoint is %s, want %s", got, shared)
	}
	sync(2*time.Minute, two, three)
	if got := h.endpoint(2); got != other && got != "192.168.77.2:51820" {
		t.Errorf("after the session the endpoint is %s, want another one", got)
	}
	sync(time.Minute, two, host(t, 3, 3))
	if got := h.endpoint(2); got != "192.168.77.2:51820" {
		t.Errorf("when nothing is shared any more the endpoint is %s, want that of the lease", got)
	}
}

// TestAMovedLeaseIsTriedAtOnce checks that a host sends to the new address of a lease at once,
// whether or not the pass reads the device.
func TestAMovedLeaseIsTriedAtOnce(t *testing.T) {
	for _, changed := range [][]string{{"host2"}, nil} {
		h := newNATHost(t, host(t, 1, 1))
		three := hostThatShares(t, 3, "2 192.168.78.7:40002")
		h.sync(t, time.Minute, host(t, 2, 2), three)
		if _, err := h.Sync(t.Context(), set(changed, host(t, 2, 9), three)); err != nil {
			t.Fatal(err)
		}
		if got := h.endpoint(2); got != "192.168.77.9:51820" {
			t.Errorf("after a pass with the changes %q the endpoint is %s, want the new one of the lease", changed, got)
		}
	}
}

// TestSharedEndpointsAreTriedSoon checks that the network asks for another pass after 10 seconds
// when a host begins to share endpoints.
func TestSharedEndpointsAreTriedSoon(t *testing.T) {
	h := newNATHost(t, host(t, 1, 1))
	two := host(t, 2, 2)
	h.sync(t, time.Hour, two, host(t, 3, 3))
	o, err := h.Sync(t.Context(), set([]string{"host3"}, two, hostThatShares(t, 3, "2 192.168.78.7:40002")))
	if err != nil || o.Again != 10*time.Second {
		t.Errorf("another pass after %s, %v, want 10s", o.Again, err)
	}
}

// TestNothingSharedIsLost checks that the pass after a failed one visits all leases, because the
// failed one may not have visited its changes.
func TestNothingSharedIsLost(t *testing.T) {
	h := newNATHost(t, host(t, 1, 1))
	h.failed = true
	if _, err := h.Sync(t.Context(), set([]string{"host2"}, host(t, 2, 2), hostThatShares(t, 3, "2 192.168.78.7:40002"))); err != nil {
		t.Fatal(err)
	}
	h.sync(t, time.Minute, host(t, 2, 2), hostThatShares(t, 3, "2 192.168.78.7:40002"))
	if got := h.endpoint(2); got != "192.168.78.7:40002" {
		t.Errorf("the endpoint is %s, and not what a host has begun to share during a failed pass", got)
	}
}

// sharing returns shared endpoints. An entry such as "2 203.0.113.2:1" contains the number of
// the peer's key, as for key, and the endpoint.
func sharing(t *testing.T, entries ...string) discovery.Endpoints {
	t.Helper()
	s := discovery.Endpoints{}
	for _, e := range entries {
		var n byte
		number, text, _ := strings.Cut(e, " ")
		if _, err := fmt.Sscan(number, &n); err != nil {
			t.Fatal(err)
		}
		at := netip.MustParseAddrPort(text)
		s[discovery.Of{Peer: key(n), Family: prefix.FamilyOf(at.Addr())}] = at
	}
	return s
}

// backendFor returns the backend that the Backend object raw describes, on a host with both
// families.
func backendFor(t *testing.T, raw string) *Backend {
	t.Helper()
	b, _, err := NewHost().New(json.RawMessage(raw), backendtest.Env(1500, prefix.IPv4, prefix.IPv6))
	if err != nil {
		t.Fatal(err)
	}
	return b.(*Backend)
}
