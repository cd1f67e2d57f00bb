// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/firewall/firewalltest"
)

func peerAddrs(n int) []netip.Addr {
	addrs := make([]netip.Addr, n)
	a := netip.MustParseAddr("10.200.0.0")
	for i := range addrs {
		a = a.Next()
		addrs[i] = a
	}
	return addrs
}

func admitted(t *testing.T) int {
	t.Helper()
	return strings.Count(firewalltest.Shell(t, "nft list set ip flannel-udp peers"), "10.200.")
}

// TestKernelSenderFilter checks the number of admitted peers and the listing of the table, that
// repair undoes changes by other programs, and when the filter of a next process keeps the table.
func TestKernelSenderFilter(t *testing.T) {
	firewalltest.Enter(t)
	f := newSenderFilter(netip.MustParseAddrPort("192.168.77.1:8285"), false)
	if existed, err := f.start(); existed || err != nil {
		t.Fatal(existed, err)
	}
	all := peerAddrs(5000)
	for _, step := range []struct {
		admitted []netip.Addr
		want     int
	}{
		{all[:3], 3},
		{slices.Concat(all, all[:3]), 5000}, // several peers may have one address
		{all, 5000},
		{all[4000:], 1000},
		{slices.Concat(all[:1], all[4000:4002]), 3},
	} {
		if err := f.admit(step.admitted); err != nil {
			t.Fatal(err)
		}
		if got := admitted(t); got != step.want {
			t.Errorf("%d peers are admitted, want %d", got, step.want)
		}
		if repaired, err := f.repair(); repaired || err != nil {
			t.Errorf("check: %v, %v, want nothing to repair", repaired, err)
		}
	}
	const want = `table ip flannel-udp {
	set peers {
		type ipv4_addr
		elements = { 10.200.0.1, 10.200.15.161,
			     10.200.15.162 }
	}

	chain input {
		type filter hook input priority -150; policy accept;
		udp dport 8285 ip daddr 192.168.77.1 ip saddr != @peers counter packets 0 bytes 0 drop comment "unknown_peer"
		udp dport 8285 ip daddr 192.168.77.1 udp sport != 8285 counter packets 0 bytes 0 drop comment "wrong_port"
		udp dport 8285 ip daddr 192.168.77.1 meta priority set 66:6c75
	}

	chain tunnel {
		type filter hook prerouting priority -150; policy accept;
		iifname "flannel0" meta priority != 66:6c75 counter packets 0 bytes 0 drop comment "unknown_peer"
		iifname "flannel0" ip saddr { 0.0.0.0, 127.0.0.0/8, 224.0.0.0/4, 255.255.255.255 } counter packets 0 bytes 0 drop comment "wrong_source"
		iifname "flannel0" ip daddr { 0.0.0.0, 127.0.0.0/8, 224.0.0.0/4, 255.255.255.255 } counter packets 0 bytes 0 drop comment "wrong_destination"
	}
}
`
	expectIntact := func(when string) {
		t.Helper()
		if diff := cmp.Diff(want, firewalltest.Shell(t, "nft -n list table ip flannel-udp")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	expectIntact("at first")
	for _, script := range []string{
		"nft delete table ip flannel-udp", "nft flush chain ip flannel-udp input", "nft flush set ip flannel-udp peers",
		"nft insert rule ip flannel-udp input accept", "nft insert rule ip flannel-udp tunnel accept", "nft add element ip flannel-udp peers '{ 10.9.9.9 }'",
		"nft chain ip flannel-udp input '{ policy drop; }'", "nft chain ip flannel-udp tunnel '{ policy drop; }'",
		"nft add table ip flannel-udp '{ flags dormant; }'", "nft flush ruleset",
	} {
		firewalltest.Shell(t, script)
		if repaired, err := f.repair(); !repaired || err != nil {
			t.Errorf("%s: repaired %v, %v", script, repaired, err)
		}
		expectIntact(script)
	}
	// admit repairs the table, too.
	firewalltest.Shell(t, "nft delete table ip flannel-udp")
	if err := f.admit(slices.Concat(all[:1], all[7:8], all[4000:4002])); err != nil || admitted(t) != 4 {
		t.Errorf("%v, %d peers", err, admitted(t))
	}
	// The next process keeps the table until it knows the peers.
	next := newSenderFilter(netip.MustParseAddrPort("192.168.77.1:8285"), false)
	if existed, err := next.start(); !existed || err != nil || admitted(t) != 4 {
		t.Errorf("%v, %v, %d peers", existed, err, admitted(t))
	}
	if err := next.admit(all[:2]); err != nil || admitted(t) != 2 {
		t.Errorf("%v, %d peers", err, admitted(t))
	}
	// A dormant table admits every sender, so it counts as missing.
	firewalltest.Shell(t, "nft add table ip flannel-udp '{ flags dormant; }'")
	last := newSenderFilter(netip.MustParseAddrPort("192.168.77.1:8285"), false)
	if existed, err := last.start(); existed || err != nil || admitted(t) != 0 {
		t.Errorf("%v, %v, %d peers", existed, err, admitted(t))
	}
	for range 2 {
		if err := removeFilter(); err != nil {
			t.Fatal(err)
		}
	}
	if left := firewalltest.Shell(t, "nft list ruleset"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// TestKernelSenderFilterCountsDrops checks that datagrams of other senders are dropped and
// counted, that peers are admitted, and that a table that is created again keeps its
// counts.
func TestKernelSenderFilterCountsDrops(t *testing.T) {
	firewalltest.Enter(t)
	firewalltest.Shell(t, "ip link set lo up")
	f := newSenderFilter(netip.MustParseAddrPort("127.0.0.1:8285"), false)
	if err := f.admit([]netip.Addr{netip.MustParseAddr("127.0.0.2")}); err != nil {
		t.Fatal(err)
	}
	conn := listenUDP(t, "127.0.0.1:8285")
	for _, from := range []string{"127.0.0.3:8285", "127.0.0.2:8286", "127.0.0.2:8285", "127.0.0.3:1024"} {
		sendUDP(t, from, "127.0.0.1:8285")
	}
	if from := receiveUDP(t, conn); from != "127.0.0.2:8285" {
		t.Errorf("a datagram from %s was received", from)
	}
	expect := func(unknownPeers uint64) {
		t.Helper()
		want := map[string]uint64{"unknown_peer": unknownPeers, "wrong_port": 1, "wrong_source": 0, "wrong_destination": 0}
		if diff := cmp.Diff(want, f.dropped()); diff != "" {
			t.Errorf("dropped (-want +got):\n%s", diff)
		}
	}
	expect(2)
	firewalltest.Shell(t, "nft flush chain ip flannel-udp tunnel")
	if repaired, err := f.repair(); !repaired || err != nil {
		t.Error(repaired, err)
	}
	sendUDP(t, "127.0.0.3:8285", "127.0.0.1:8285")
	expect(3)
	impossible := []netip.Addr{netip.IPv6Loopback()} // the set has IPv4 addresses only
	for range 2 {
		if err := f.admit(impossible); err == nil {
			t.Error("the table has an address that does not fit")
		}
		expect(3)
	}
	if err := f.admit(nil); err != nil {
		t.Error(err)
	}
	expect(3)
}

// TestKernelFilterForAnySender checks that a filter without the source check admits every
// sender, and drops packets with addresses that no host can have. The device is that of a
// veth pair, because this kernel may not support ipip.
func TestKernelFilterForAnySender(t *testing.T) {
	firewalltest.Enter(t)
	firewalltest.Shell(t, `ip link set lo up
		ip link add flannel0 up type veth peer name far
		ip addr add 10.5.1.0/32 dev flannel0
		sysctl -qw net.ipv4.conf.all.route_localnet=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.flannel0.rp_filter=0 net.ipv4.conf.flannel0.accept_local=1
		ip route add 10.5.2.0/24 dev flannel0
		ip link set far up`)
	f := newSenderFilter(netip.MustParseAddrPort("192.168.77.1:8285"), true)
	if existed, err := f.start(); existed || err != nil {
		t.Fatal(existed, err)
	}
	if err := f.admit(peerAddrs(3)); err != nil || admitted(t) != 0 {
		t.Errorf("%v, %d peers in the set, want none", err, admitted(t))
	}
	conn := listenUDP(t, "0.0.0.0:9999")
	for _, a := range [][2]string{
		{"10.5.2.7", "127.0.0.1"}, {"127.0.0.1", "127.0.0.1"}, {"127.0.0.1", "10.5.1.0"}, {"10.5.2.7", "224.0.0.1"},
		{"10.5.2.7", "255.255.255.255"}, {"0.0.0.0", "255.255.255.255"}, {"10.5.2.7", "10.5.1.0"},
	} {
		sendFrame(t, "far", "flannel0", netip.MustParseAddr(a[0]), netip.MustParseAddr(a[1]), 9999)
	}
	if from := receiveUDP(t, conn); from != "10.5.2.7:9999" {
		t.Errorf("a datagram from %s was received", from)
	}
	want := map[string]uint64{"unknown_peer": 0, "wrong_port": 0, "wrong_source": 3, "wrong_destination": 3}
	if diff := cmp.Diff(want, f.dropped()); diff != "" {
		t.Errorf("dropped (-want +got):\n%s", diff)
	}
	firewalltest.Shell(t, "nft flush chain ip flannel-udp tunnel")
	for _, repairs := range []bool{true, false} {
		if repaired, err := f.repair(); repaired != repairs || err != nil {
			t.Errorf("repaired %v, %v", repaired, err)
		}
	}
}

// sendFrame sends a UDP datagram in an Ethernet frame from a device to its veth peer. port is the source and
// the destination port.
func sendFrame(t *testing.T, device, peer string, from, to netip.Addr, port uint16) {
	t.Helper()
	out, err := net.InterfaceByName(device)
	if err != nil {
		t.Fatal(err)
	}
	in, err := net.InterfaceByName(peer)
	if err != nil {
		t.Fatal(err)
	}
	ip := slices.Concat([]byte{0x45, 0, 0, 29, 0, 0, 0, 0, 9, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), to.AsSlice())
	binary.BigEndian.PutUint16(ip[10:], headerChecksum(ip))
	udp := []byte{0, 0, 0, 0, 0, 9, 0, 0, 'x'}
	binary.BigEndian.PutUint16(udp, port)
	binary.BigEndian.PutUint16(udp[2:], port)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	frame := slices.Concat(in.HardwareAddr, out.HardwareAddr, []byte{8, 0}, ip, udp)
	if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: out.Index, Halen: 6}); err != nil {
		t.Fatal(err)
	}
}

func headerChecksum(b []byte) uint16 {
	var s uint32
	for i := 0; i < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

func listenUDP(t *testing.T, at string) *net.UDPConn {
	t.Helper()
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func sendUDP(t *testing.T, from, to string) {
	t.Helper()
	conn := listenUDP(t, from)
	defer conn.Close()
	if _, err := conn.WriteToUDPAddrPort([]byte("x"), netip.MustParseAddrPort(to)); err != nil {
		t.Fatal(err)
	}
}

func receiveUDP(t *testing.T, conn *net.UDPConn) string {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	_, from, err := conn.ReadFromUDPAddrPort(make([]byte, 10))
	if err != nil {
		t.Fatal(err)
	}
	return from.String()
}

// TestKernelSenderFilterOfManyPeers checks that one call can admit 65,000 peers, nearly as many as
// a /8 has /24 subnets, and that repair restores them.
func TestKernelSenderFilterOfManyPeers(t *testing.T) {
	firewalltest.Enter(t)
	f := newSenderFilter(netip.MustParseAddrPort("192.168.77.1:8285"), false)
	if err := f.admit(peerAddrs(65000)); err != nil {
		t.Fatal(err)
	}
	firewalltest.Shell(t, "nft delete table ip flannel-udp")
	for _, repairs := range []bool{true, false} {
		if repaired, err := f.repair(); repaired != repairs || err != nil {
			t.Errorf("repaired %v, %v", repaired, err)
		}
	}
}
