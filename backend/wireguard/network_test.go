// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// fakeControl implements control in memory. It changes peers by the rules of the kernel: a subnet
// belongs to one peer, and a change with UpdateOnly adds no peer.
type fakeControl struct {
	peers map[string]map[wgtypes.Key]wgtypes.Peer // peers by device
	fail  string                                  // name of a device that cannot be written
	reads int                                     // number of times that a device was read
	// writes contains the changes of peers, in the order of the writes
	writes []wgtypes.PeerConfig
}

func (*fakeControl) Index(string) (int, error) { return 7, nil }
func (*fakeControl) Close() error              { return nil }

func (f *fakeControl) Device(name string) (*wgtypes.Device, error) {
	f.reads++
	d := &wgtypes.Device{Name: name} // its settings never match, so that they are always written
	for _, p := range f.peers[name] {
		d.Peers = append(d.Peers, p)
	}
	return d, nil
}

func (f *fakeControl) ConfigureDevice(name string, c wgtypes.Config) error {
	if name == f.fail {
		return syscall.ENOBUFS
	}
	for _, p := range c.Peers {
		f.writes = append(f.writes, p)
		have, there := f.peers[name][p.PublicKey]
		switch {
		case p.Remove:
			delete(f.peers[name], p.PublicKey)
			continue
		case p.UpdateOnly && !there:
			continue
		}
		have.PublicKey = p.PublicKey
		if p.Endpoint != nil {
			have.Endpoint = p.Endpoint
		}
		if p.PersistentKeepaliveInterval != nil {
			have.PersistentKeepaliveInterval = *p.PersistentKeepaliveInterval
		}
		if p.ReplaceAllowedIPs {
			have.AllowedIPs = nil
		}
		if f.peers[name] == nil {
			f.peers[name] = map[wgtypes.Key]wgtypes.Peer{}
		}
		for _, n := range p.AllowedIPs { // a subnet moves from the peer that has it
			for k, other := range f.peers[name] {
				same := func(o net.IPNet) bool { return o.String() == n.String() }
				if k != p.PublicKey && slices.ContainsFunc(other.AllowedIPs, same) {
					other.AllowedIPs = slices.DeleteFunc(slices.Clone(other.AllowedIPs), same)
					f.peers[name][k] = other
				}
			}
		}
		have.AllowedIPs = append(have.AllowedIPs, p.AllowedIPs...)
		f.peers[name][p.PublicKey] = have
	}
	return nil
}

// handshake starts a session with a peer.
func (f *fakeControl) handshake(device string, of wgtypes.Key) {
	p := f.peers[device][of]
	p.LastHandshakeTime = time.Now()
	f.peers[device][of] = p
}

// expect fails the test unless the device has exactly these peers, each with its endpoint and
// subnets. want is sorted.
func (f *fakeControl) expect(t *testing.T, device string, want ...string) {
	t.Helper()
	var got []string
	for _, p := range f.peers[device] {
		line := discovery.EndpointOf(p).String()
		for _, n := range p.AllowedIPs {
			line += " " + n.String()
		}
		got = append(got, line)
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("peers of %s (-want +got):\n%s", device, diff)
	}
}

// host returns the lease of host i, with the lease key "host<i>" and the public key key(i). Its
// public addresses, one for each family, end in at.
func host(t *testing.T, i byte, at int) *subnet.Lease {
	t.Helper()
	l := &subnet.Lease{Key: fmt.Sprintf("host%d", i), BackendType: Type}
	for _, e := range [][2]string{{"10.5.%d.0/24", "192.168.77.%d"}, {"fd00:10:5:%d::/64", "fd00:77::%d"}} {
		data := encodeData(leaseData{PublicKey: text(key(i)), Port: 51820})
		l.Endpoints = append(l.Endpoints, subnet.Endpoint{
			Subnet: netip.MustParsePrefix(fmt.Sprintf(e[0], i)), PublicIP: netip.MustParseAddr(fmt.Sprintf(e[1], at)), Data: data,
		})
	}
	return l
}

// start returns the network of host 1, dual-stack with a device for each family. The Spy is its
// kernel, which has the links already. The fakeControl contains the peers of the devices; there are
// none yet.
func start(t *testing.T) (*network, *dataplanetest.Spy, *fakeControl) {
	t.Helper()
	k := dataplanetest.New()
	spy := &dataplanetest.Spy{Kernel: k}
	env := backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	env.Kernel = spy
	b, _, err := NewHost().New(json.RawMessage(`{}`), env)
	if err != nil {
		t.Fatal(err)
	}
	p, err := env.Programmer(t.Context(), b.Describe().Scope)
	if err != nil {
		t.Fatal(err)
	}
	c := &fakeControl{peers: map[string]map[wgtypes.Key]wgtypes.Peer{}}
	n := &network{
		Backend: b.(*Backend), key: key(1), control: c, now: currentInstant, Programmer: p,
	}
	n.Base = n.base(*host(t, 1, 1), dataplane.KindWireGuard)
	for _, l := range n.Base.Links { // the links exist already
		if err := k.Append(l); err != nil {
			t.Fatal(err)
		}
	}
	n.lookups = newLookups(n.Notifier, func(context.Context, string) ([]netip.Addr, error) { return nil, nil })
	n.startDiscovery(*host(t, 1, 1))
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n, spy, c
}

// set returns a complete set of these leases. changed contains the keys of the leases that have
// changed. If changed is nil, any lease may have changed.
func set(changed []string, leases ...*subnet.Lease) backend.Set {
	s := backend.Set{Leases: map[string]*subnet.Lease{}, Changed: changed, All: changed == nil, Complete: true}
	for _, l := range leases {
		s.Leases[l.Key] = l
	}
	return s
}

// TestOneFamilyFails checks that a failure of one family does not affect the peers of the other
// family, and that Sync returns the error.
func TestOneFamilyFails(t *testing.T) {
	const four, six = "192.168.77.2:51820 10.5.2.0/24", "[fd00:77::2]:51820 fd00:10:5:2::/64"
	t.Run("IPv6 is switched off", func(t *testing.T) {
		n, spy, c := start(t)
		spy.Fail = func(op dataplane.Op) error {
			if a, ok := op.Object.(dataplane.Addr); ok && a.Prefix.Addr().Is6() {
				return syscall.EACCES
			}
			return nil
		}
		if _, err := n.Sync(t.Context(), set(nil, host(t, 2, 2))); !errors.Is(err, syscall.EACCES) {
			t.Errorf("error %v, want that of the address", err)
		}
		c.expect(t, "flannel-wg", four)
	})
	t.Run("the first device cannot be written", func(t *testing.T) {
		n, _, c := start(t)
		c.fail = "flannel-wg"
		if _, err := n.Sync(t.Context(), set(nil, host(t, 2, 2))); !errors.Is(err, syscall.ENOBUFS) {
			t.Errorf("error %v, want that of the device", err)
		}
		c.expect(t, "flannel-wg-v6", six)
	})
}

// TestChangesOfAFailedPass checks that the pass after a failed pass also makes the changes that the
// failed pass should have made.
func TestChangesOfAFailedPass(t *testing.T) {
	n, _, c := start(t)
	sync := func(fail bool, s backend.Set) {
		t.Helper()
		c.fail = ""
		if fail {
			c.fail = "flannel-wg"
		}
		if _, err := n.Sync(t.Context(), s); (err != nil) != fail {
			t.Fatalf("error %v, want one: %v", err, fail)
		}
	}
	two, three, four := host(t, 2, 2), host(t, 3, 3), host(t, 4, 4)
	sync(false, set(nil, two))
	sync(true, set([]string{"host3"}, two, three))
	sync(false, set([]string{"host4"}, two, three, four))
	c.expect(t, "flannel-wg", "192.168.77.2:51820 10.5.2.0/24", "192.168.77.3:51820 10.5.3.0/24", "192.168.77.4:51820 10.5.4.0/24")

	// A peer with a session gets the new address of its lease.
	c.handshake("flannel-wg", key(2))
	two = host(t, 2, 9)
	sync(true, set([]string{"host2"}, two, three, four))
	sync(false, set([]string{"host3", "host4"}, two))
	c.expect(t, "flannel-wg", "192.168.77.9:51820 10.5.2.0/24")
}

// TestNamedPeersAreNotRead checks that a pass which names peers as changed reads no device, even if their
// leases are the same as before. During a migration there is such a pass for each answer to a probe.
func TestNamedPeersAreNotRead(t *testing.T) {
	n, _, c := start(t)
	two, three := host(t, 2, 2), host(t, 3, 3)
	for _, tt := range []struct {
		set   backend.Set
		reads int
	}{
		{set(nil, two, three), 2},
		{set([]string{"host2"}, two, three), 0},
		{set([]string{}, two, three), 2},
	} {
		c.reads = 0
		if _, err := n.Sync(t.Context(), tt.set); err != nil {
			t.Fatal(err)
		}
		if c.reads != tt.reads {
			t.Errorf("with all %v, changed %q: %d devices were read, want %d", tt.set.All, tt.set.Changed, c.reads, tt.reads)
		}
	}
}

// TestPeerRemovedByHand checks that a peer gets the new address of its lease even if another
// program has removed the peer from the device.
func TestPeerRemovedByHand(t *testing.T) {
	n, _, c := start(t)
	for _, s := range []backend.Set{set(nil, host(t, 2, 2)), set([]string{"host2"}, host(t, 2, 9))} {
		delete(c.peers["flannel-wg"], key(2))
		if _, err := n.Sync(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	c.expect(t, "flannel-wg", "192.168.77.9:51820 10.5.2.0/24")
}

// TestRelaysOfEarlierVersions starts a host whose former version reached host 2 through a relay, host 3. The
// leases of all three still have the keys of that version. Each peer must get its own subnets back, and
// this host must publish none of the keys.
func TestRelaysOfEarlierVersions(t *testing.T) {
	n, _, c := start(t)
	own, two, relay := host(t, 1, 1), host(t, 2, 2), host(t, 3, 3)
	with := func(l *subnet.Lease, more string) {
		for i, e := range l.Endpoints {
			l.Endpoints[i].Data = json.RawMessage(strings.TrimSuffix(string(e.Data), "}") + more + "}")
		}
	}
	with(own, `,"Unreachable":["`+text(key(2))+`"],"Relays":["`+text(key(3))+`"]`)
	with(two, `,"Unreachable":["`+text(key(1))+`"],"Relays":["`+text(key(3))+`"]`)
	with(relay, `,"Relay":true`)
	c.peers["flannel-wg"] = map[wgtypes.Key]wgtypes.Peer{
		key(2): {PublicKey: key(2), Endpoint: netUDP("192.168.77.2:51820")},
		key(3): {PublicKey: key(3), Endpoint: netUDP("192.168.77.3:51820"), AllowedIPs: ipNets([]netip.Prefix{netip.MustParsePrefix("10.5.3.0/24"), netip.MustParsePrefix("10.5.2.0/24")})},
	}

	for _, l := range []*subnet.Lease{two, relay} {
		if _, err := n.Check(*l); err != nil {
			t.Errorf("the lease of %s is refused: %v", l.Key, err)
		}
	}
	if _, err := n.Sync(t.Context(), set(nil, two, relay)); err != nil {
		t.Fatal(err)
	}
	c.expect(t, "flannel-wg", "192.168.77.2:51820 10.5.2.0/24", "192.168.77.3:51820 10.5.3.0/24")

	claim, err := n.Claim(t.Context(), own.Claim())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range claim.Endpoints {
		if strings.Contains(string(e.Data), "Unreachable") || strings.Contains(string(e.Data), "Relay") {
			t.Errorf("the host publishes %s", e.Data)
		}
	}
}

// steppedClock contains a wall clock that a test can step, and a steady clock.
type steppedClock struct {
	passed time.Duration
	step   time.Duration
}

func (c *steppedClock) now() discovery.Instant {
	return discovery.Instant{Wall: time.Unix(1_000_000_000, 0).Add(c.passed + c.step), Steady: time.Hour + c.passed}
}

// TestClockStep checks that the learned endpoint of a peer survives a step of the clock, with and
// without a pass between the handshake and the step, and that the endpoint of the lease replaces it
// when the session ends.
func TestClockStep(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 24 * time.Hour, "a little forward": 200 * time.Second, "back": -24 * time.Hour} {
		for _, passBetween := range []bool{true, false} {
			n, _, c := start(t)
			clock := steppedClock{}
			n.now = clock.now
			pass := func(after time.Duration) {
				t.Helper()
				clock.passed += after
				if _, err := n.Sync(t.Context(), set(nil, host(t, 2, 2))); err != nil {
					t.Fatal(err)
				}
			}
			const learnt, leased = "192.168.77.222:40000 10.5.2.0/24", "192.168.77.2:51820 10.5.2.0/24"
			learn := func() {
				p := c.peers["flannel-wg"][key(2)]
				p.LastHandshakeTime = clock.now().Wall
				p.Endpoint.IP, p.Endpoint.Port = []byte{192, 168, 77, 222}, 40000
				c.peers["flannel-wg"][key(2)] = p
			}
			pass(0)
			c.expect(t, "flannel-wg", leased)
			clock.passed += time.Minute
			learn()
			if passBetween {
				pass(time.Minute)
			}
			clock.step = step
			pass(time.Minute)
			c.expect(t, "flannel-wg", learnt)
			learn() // by the new clock
			pass(2 * time.Minute)
			c.expect(t, "flannel-wg", learnt)
			pass(2 * time.Minute)
			c.expect(t, "flannel-wg", leased)
			if t.Failed() {
				t.Fatalf("clock stepped %s, a pass between handshake and step: %v", name, passBetween)
			}
		}
	}
}
