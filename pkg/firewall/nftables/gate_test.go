package nftables

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"flanneld/pkg/firewall/firewalltest"
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

// TestKernelGate follows peers, and puts right what others change.
func TestKernelGate(t *testing.T) {
	firewalltest.Enter(t)
	g := NewGate("flannel0", netip.MustParseAddrPort("192.168.77.1:8285"))
	if former, err := g.Shut(); former || err != nil {
		t.Fatal(former, err)
	}
	all := peerAddrs(5000)
	for _, step := range []struct {
		removed, added []netip.Addr
		want           int
	}{
		{nil, all[:3], 3},
		{nil, all, 5000},
		{all[:3], nil, 5000}, // they were added twice
		{all[:4000], nil, 1000},
		{all[4000:4001], all[4000:4001], 1000},
		{all[4002:], all[:1], 3},
	} {
		if err := g.Update(step.removed, step.added); err != nil {
			t.Fatal(err)
		}
		if got := admitted(t); got != step.want {
			t.Errorf("%d peers are admitted, want %d", got, step.want)
		}
		if repaired, err := g.Check(); repaired || err != nil {
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
		udp dport 8285 ip daddr 192.168.77.1 ip saddr != @peers counter packets 0 bytes 0 drop
		udp dport 8285 ip daddr 192.168.77.1 meta priority set 66:6c75
	}

	chain tunnel {
		type filter hook prerouting priority -150; policy accept;
		iifname "flannel0" meta priority != 66:6c75 counter packets 0 bytes 0 drop
	}
}
`
	healthy := func(when string) {
		t.Helper()
		if diff := cmp.Diff(want, firewalltest.Shell(t, "nft -n list table ip flannel-udp")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	healthy("at first")
	for _, script := range []string{
		"nft delete table ip flannel-udp", "nft flush chain ip flannel-udp input", "nft flush set ip flannel-udp peers",
		"nft insert rule ip flannel-udp input accept", "nft insert rule ip flannel-udp tunnel accept", "nft add element ip flannel-udp peers '{ 10.9.9.9 }'",
		"nft chain ip flannel-udp input '{ policy drop; }'", "nft chain ip flannel-udp tunnel '{ policy drop; }'",
		"nft add table ip flannel-udp '{ flags dormant; }'", "nft flush ruleset",
	} {
		firewalltest.Shell(t, script)
		if repaired, err := g.Check(); !repaired || err != nil {
			t.Errorf("%s: repaired %v, %v", script, repaired, err)
		}
		healthy(script)
	}
	// A change finds out as well.
	firewalltest.Shell(t, "nft delete table ip flannel-udp")
	if err := g.Update(nil, all[7:8]); err != nil || admitted(t) != 4 {
		t.Errorf("%v, %d peers", err, admitted(t))
	}
	// The next process leaves it as it is until it knows the peers.
	next := NewGate("flannel0", netip.MustParseAddrPort("192.168.77.1:8285"))
	if former, err := next.Shut(); !former || err != nil || admitted(t) != 4 {
		t.Errorf("%v, %v, %d peers", former, err, admitted(t))
	}
	if err := next.Update(nil, all[:2]); err != nil || admitted(t) != 2 {
		t.Errorf("%v, %d peers", err, admitted(t))
	}
	// One that lets everybody in is none.
	firewalltest.Shell(t, "nft add table ip flannel-udp '{ flags dormant; }'")
	last := NewGate("flannel0", netip.MustParseAddrPort("192.168.77.1:8285"))
	if former, err := last.Shut(); former || err != nil || admitted(t) != 0 {
		t.Errorf("%v, %v, %d peers", former, err, admitted(t))
	}
	for range 2 {
		if err := RemoveGate(); err != nil {
			t.Fatal(err)
		}
	}
	if left := firewalltest.Shell(t, "nft list ruleset"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// TestKernelGateCounts: strangers are dropped and counted, peers pass, and a
// gate that is made anew keeps its count.
func TestKernelGateCounts(t *testing.T) {
	firewalltest.Enter(t)
	firewalltest.Shell(t, "ip link set lo up")
	g := NewGate("flannel0", netip.MustParseAddrPort("127.0.0.1:8285"))
	if err := g.Update(nil, []netip.Addr{netip.MustParseAddr("127.0.0.2")}); err != nil {
		t.Fatal(err)
	}
	conn := listenUDP(t, "127.0.0.1:8285")
	for _, from := range []string{"127.0.0.3", "127.0.0.2", "127.0.0.3"} {
		sendUDP(t, from, "127.0.0.1:8285")
	}
	if from := receiveUDP(t, conn); from != "127.0.0.2" {
		t.Errorf("a datagram from %s arrives", from)
	}
	if n := g.Dropped(); n != 2 {
		t.Errorf("%d are dropped, want 2", n)
	}
	firewalltest.Shell(t, "nft flush chain ip flannel-udp tunnel")
	if repaired, err := g.Check(); !repaired || err != nil {
		t.Error(repaired, err)
	}
	sendUDP(t, "127.0.0.3", "127.0.0.1:8285")
	if n := g.Dropped(); n != 3 {
		t.Errorf("%d are dropped, want 3", n)
	}
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
	conn := listenUDP(t, from+":0")
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
	return from.Addr().String()
}

// TestKernelGateOfManyPeers has as many as a /8 of /24 subnets can have, all at once.
func TestKernelGateOfManyPeers(t *testing.T) {
	firewalltest.Enter(t)
	g := NewGate("flannel0", netip.MustParseAddrPort("192.168.77.1:8285"))
	if err := g.Update(nil, peerAddrs(65000)); err != nil {
		t.Fatal(err)
	}
	firewalltest.Shell(t, "nft delete table ip flannel-udp")
	for _, repairs := range []bool{true, false} {
		if repaired, err := g.Check(); repaired != repairs || err != nil {
			t.Errorf("repaired %v, %v", repaired, err)
		}
	}
}
