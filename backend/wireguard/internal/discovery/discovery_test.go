// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestBroadcastAddressesAreNotTried checks that a host does not send handshakes to the broadcast address of
// a network that it belongs to, although another host shares it as the endpoint of a peer.
func TestBroadcastAddressesAreNotTried(t *testing.T) {
	d := New(Config{Interval: time.Minute, Devices: [][]prefix.Family{both}, Broadcasts: func() []netip.Addr {
		return []netip.Addr{netip.MustParseAddr("198.51.100.127")}
	}}, nil, 0)
	for endpoint, want := range map[string]int{"198.51.100.127:1": 0, "198.51.100.255:1": 1, "[fd00:77::ffff]:1": 1} {
		d.others = map[string]Endpoints{"another": sharing(t, "2 "+endpoint)}
		d.index = nil
		if got := d.candidates(0, 0, Peer{Key: key(2)}); len(got) != 1+want {
			t.Errorf("the candidates with %s are %v, want %d beside that of the lease", endpoint, got, want)
		}
	}
}

// TestMostSharedEndpoints checks that a host which sees too many peers keeps the endpoints that
// it shares already.
func TestMostSharedEndpoints(t *testing.T) {
	d := New(Config{Interval: time.Minute, Devices: [][]prefix.Family{both}}, sharing(t, "90 203.0.113.2:90"), 0)
	d.devices[0].read.Steady = time.Hour
	for i := range byte(100) {
		at := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.2"), uint16(i)+1)
		d.devices[0].peers[key(i+1)] = &peer{seen: sighting{endpoint: at, last: time.Hour}}
	}
	got := d.wanted()
	if _, kept := got[Of{key(90), prefix.IPv4}]; len(got) != maxShared || !kept {
		t.Errorf("it shares %v, want %d endpoints with that of peer 90", got, maxShared)
	}
}

// TestTwoDevices checks that a host with a device for each family shares what it sees with each, and
// keeps what it knows of the device that cannot be read.
func TestTwoDevices(t *testing.T) {
	d := New(Config{
		Interval: time.Minute, Devices: [][]prefix.Family{{prefix.IPv4}, {prefix.IPv6}},
		Reachable: func(netip.Addr) bool { return true }, Random: func(time.Duration) time.Duration { return 0 },
		Public: func(f prefix.Family) netip.Addr {
			return map[prefix.Family]netip.Addr{prefix.IPv4: netip.MustParseAddr("203.0.113.1"), prefix.IPv6: netip.MustParseAddr("2001:db8::1")}[f]
		},
	}, Endpoints{}, 0)
	observe := func(device int, now Instant, seen, lease string) {
		at := netip.MustParseAddrPort(seen)
		have := wgtypes.Peer{PublicKey: key(2), Endpoint: net.UDPAddrFromAddrPort(at), LastHandshakeTime: now.Wall}
		d.Observe(now, device, []wgtypes.Peer{have}, Peers{key(2): {Key: key(2), Endpoint: netip.MustParseAddrPort(lease)}}, true)
	}
	for i := range 4 {
		now := Instant{time.Unix(1_000_000_000, 0).Add(time.Duration(i) * time.Minute), time.Hour + time.Duration(i)*time.Minute}
		d.Publish(now.Steady)
		observe(0, now, "198.51.100.2:4", "192.168.77.2:51820")
		if i == 1 { // the other device cannot be read
			continue
		}
		observe(1, now, "[2001:db8::2]:6", "[fd00::2]:51820")
		d.Plan(now.Steady, true, false, true)
	}
	if want := sharing(t, "2 198.51.100.2:4", "2 [2001:db8::2]:6"); !maps.Equal(d.shared, want) {
		t.Errorf("it shares %v, want %v", d.shared, want)
	}
}

// TestUsable checks that many addresses of one family leave room for the other, and that the order of the
// answer does not matter.
func TestUsable(t *testing.T) {
	var addrs, want []netip.Addr
	for _, a := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8::4"} {
		want = append(want, netip.MustParseAddr(a))
	}
	for _, a := range []string{"::ffff:10.0.0.5", "10.0.0.4", "10.0.0.3", "10.0.0.2", "10.0.0.1", "10.0.0.2", "2001:db8::5", "2001:db8::4", "2001:db8::3", "2001:db8::2", "2001:db8::1"} {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	if got := Usable(addrs); !slices.Equal(got, want) {
		t.Errorf("%v are usable, want %v", got, want)
	}
}
