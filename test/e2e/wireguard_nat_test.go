// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// natKind is the way in which a NAT treats the packets of WireGuard. The names are those of
// RFC 3489.
type natKind string

const (
	// fullCone gives a host one port for all destinations. It lets in packets from everywhere to this port.
	fullCone natKind = "full cone"
	// portRestricted gives a host one port for all destinations. It lets in packets only from an address
	// and port to which the host has sent.
	portRestricted natKind = "port-restricted"
	// symmetric gives a host another port for each destination. It lets in packets to such a port only from
	// this destination.
	symmetric natKind = "symmetric"
)

// rules returns the nftables rules of a NAT with the address outside, for the host with the address inside.
// Packets of the host's WireGuard leave the NAT from port, or from random ports if k is symmetric.
func (k natKind) rules(inside, outside netip.Addr, port int) string {
	mapped, forward := fmt.Sprintf(":%d", port), ""
	if k == symmetric {
		mapped = ":41000-60999 fully-random"
	}
	if k == fullCone {
		forward = fmt.Sprintf("udp dport %d dnat to %s:51820", port, inside)
	}
	return strings.NewReplacer("INSIDE", inside.String(), "OUTSIDE", outside.String(), "MAPPED", mapped, "FORWARD", forward).Replace(`
		table ip nat
		flush table ip nat
		table ip nat {
			chain in { type nat hook prerouting priority dstnat; ip daddr OUTSIDE FORWARD; }
			chain out {
				type nat hook postrouting priority srcnat
				ip saddr INSIDE udp sport 51820 snat to OUTSIDEMAPPED
				ip saddr INSIDE snat to OUTSIDE
			}
			chain self { type filter hook input priority filter; udp dport 40000-60999 drop; }
		}`)
}

// gateway is a host of a lab that is the NAT for another host, or for another NAT. inside is the address of
// the host behind it, and outside is its own address.
type gateway struct {
	*lab.Host
	inside, outside netip.Addr
}

// set makes the gateway a NAT of the kind k that uses port for WireGuard. It also deletes the connections
// that the gateway knows. See rules.
func (g gateway) set(t *testing.T, k natKind, port int) {
	t.Helper()
	nft(t, g.Namespace, k.rules(g.inside, g.outside, port))
	err := g.Netlink(testContext(t), func(h *netlink.Handle) error { return h.ConntrackTableFlush(netlink.ConntrackTable) })
	if err != nil {
		t.Fatal(err)
	}
}

// hide puts h behind the NAT router and returns the gateway. All hosts are in one segment, but h then has
// only an address of the private range 10.99.n.0/24, to which only router has a route, and sends everything
// to router. The caller must call set of the gateway.
func hide(t *testing.T, h, router *lab.Host, n int) gateway {
	t.Helper()
	inside := netip.AddrFrom4([4]byte{10, 99, byte(n), 2})
	inner := netip.AddrFrom4([4]byte{10, 99, byte(n), 1})
	shell(t, router.Namespace, fmt.Sprintf("sysctl -qw net.ipv4.conf.all.send_redirects=0 net.ipv4.conf.eth0.send_redirects=0; ip addr add %s/24 dev eth0", inner))
	shell(t, h.Namespace, fmt.Sprintf("ip addr flush dev eth0 scope global; ip addr add %s/24 dev eth0; ip route add default via %s", inside, inner))
	for _, one := range []*lab.Host{h, router} {
		shell(t, one.Namespace, "ethtool -K eth0 tx off >/dev/null") // a NAT cannot complete checksums that the kernel leaves to the network card
	}
	return gateway{router, inside, router.Addr(prefix.IPv4)}
}

// natLab is a lab with an open host and two hidden hosts, each behind a NAT of its own.
type natLab struct {
	*lab.Lab
	open   *lab.Host
	hidden [2]*lab.Host
	nats   [2]gateway
}

func newNATLab(t *testing.T, backend string, kinds [2]natKind) natLab {
	t.Helper()
	config := strings.TrimSuffix(backendConfig(backend), "}") + `,"PersistentKeepaliveInterval":1,"EndpointSharingInterval":1}`
	l := natLab{Lab: newLab(t, lab.Config{Hosts: 6}, config)}
	l.open = l.Host(1)
	for i := range l.hidden {
		l.hidden[i] = l.Host(2 + i)
		l.nats[i] = hide(t, l.hidden[i], l.Host(4+i), i)
		l.nats[i].set(t, kinds[i], 40002+i)
	}
	return l
}

// start starts a daemon and a pod on the open host and on the hidden hosts.
func (l natLab) start(t *testing.T) {
	t.Helper()
	for _, h := range []*lab.Host{l.open, l.hidden[0], l.hidden[1]} {
		startOne(t, h, lab.FlanneldOptions{})
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
}

// reaches returns an error unless the first pod of the host from gets an answer from the first pod of the
// host to within a second.
func reaches(t *testing.T, from, to *lab.Host) error {
	t.Helper()
	_, err := from.Pods()[0].Ping(testContext(t), to.Pods()[0].Addr(prefix.IPv4), lab.Echo{Timeout: time.Second})
	return err
}

// expectAllReached waits until the pods of the open host and of the hidden hosts reach each other.
func (l natLab) expectAllReached(t *testing.T) {
	t.Helper()
	eventually(t, "all pods reach each other", func() error {
		for _, pair := range [][2]*lab.Host{{l.open, l.hidden[0]}, {l.open, l.hidden[1]}, {l.hidden[0], l.hidden[1]}, {l.hidden[1], l.hidden[0]}} {
			if err := reaches(t, pair[0], pair[1]); err != nil {
				return err
			}
		}
		return nil
	})
}

// expectDirect checks that each hidden host sends to the NAT of the other one, and not to the address in
// the other's lease.
func (l natLab) expectDirect(t *testing.T) {
	t.Helper()
	for i, h := range l.hidden {
		other := wg(t, l.hidden[1-i], "show", "flannel-wg", "public-key")
		want := other + "\t" + l.nats[1-i].outside.String() + ":"
		if got := wg(t, h, "show", "flannel-wg", "endpoints"); !strings.Contains(got, want) {
			t.Errorf("%s has endpoints %q, want %q", h.Name(), got, want)
		}
	}
}

// sharedIn returns the shared endpoints in the lease of h, by the public keys of the peers. The test fails
// if h has no lease.
func sharedIn(t *testing.T, l *lab.Lab, h *lab.Host) map[string]string {
	t.Helper()
	for _, one := range leases(t, l) {
		var value struct {
			PublicIP    string
			BackendData struct{ PeerEndpoints map[string]string }
		}
		if json.Unmarshal([]byte(one.Value), &value) == nil && value.PublicIP == h.Addr(prefix.IPv4).String() {
			return value.BackendData.PeerEndpoints
		}
	}
	t.Fatalf("no lease has the address of %s", h.Name())
	return nil
}

// TestUserspaceWireGuardBetweenNATs checks that two hosts behind port-restricted NATs reach each other,
// because an open host shares their endpoints.
func TestUserspaceWireGuardBetweenNATs(t *testing.T) {
	testBetweenNATs(t, userspace, [2]natKind{portRestricted, portRestricted})
}

// TestVMWireGuardBetweenNATs is TestUserspaceWireGuardBetweenNATs with the WireGuard of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardBetweenNATs(t *testing.T) {
	testBetweenNATs(t, "wireguard", [2]natKind{portRestricted, portRestricted})
}

// TestUserspaceWireGuardBetweenOtherNATs is TestUserspaceWireGuardBetweenNATs with other NATs: one is a
// full cone, which lets in every host, and the other one is of any kind.
//
//stages:rest TestUserspaceWireGuardBetweenNATs does the same with the most frequent kind
func TestUserspaceWireGuardBetweenOtherNATs(t *testing.T) {
	t.Parallel()
	for _, kinds := range [][2]natKind{{fullCone, fullCone}, {fullCone, portRestricted}, {fullCone, symmetric}} {
		t.Run(string(kinds[0]+" and "+kinds[1]), func(t *testing.T) { testBetweenNATs(t, userspace, kinds) })
	}
}

func testBetweenNATs(t *testing.T, backend string, kinds [2]natKind) {
	t.Parallel()
	l := newNATLab(t, backend, kinds)
	l.start(t)
	l.expectAllReached(t)
	l.expectDirect(t)
	eventually(t, "the lease of "+l.open.Name()+" shares the endpoints of both hidden hosts", func() error { // wait for both, because with some NATs one shared endpoint is enough
		if shared := sharedIn(t, l.Lab, l.open); len(shared) != 2 {
			return fmt.Errorf("it shares %v", shared)
		}
		return nil
	})
}

// TestUserspaceWireGuardDoubleNAT checks that a host behind two NATs, of which one is behind the other,
// reaches a host behind a single NAT.
//
//stages:rest TestUserspaceWireGuardBetweenNATs does the same with one NAT for each host
func TestUserspaceWireGuardDoubleNAT(t *testing.T) {
	t.Parallel()
	l := newNATLab(t, userspace, [2]natKind{portRestricted, portRestricted})
	// Put the first NAT behind host 6.
	inner, outer := l.nats[0], l.Host(6)
	second := hide(t, inner.Host, outer, 7)
	shell(t, inner.Namespace, "ip addr add 10.99.0.1/24 dev eth0")
	inner.outside = second.inside
	inner.set(t, portRestricted, 51820)
	second.set(t, portRestricted, 40002)
	l.nats[0] = second
	l.start(t)
	l.expectAllReached(t)
	l.expectDirect(t)
}

// TestUserspaceWireGuardNATsWithoutAWay checks two hosts behind NATs that never let each other in. While
// the two try shared endpoints in vain, the open host must still reach both.
//
//stages:rest it waits for what must not happen
func TestUserspaceWireGuardNATsWithoutAWay(t *testing.T) {
	t.Parallel()
	for _, kinds := range [][2]natKind{{symmetric, symmetric}, {symmetric, portRestricted}} {
		t.Run(string(kinds[0]+" and "+kinds[1]), func(t *testing.T) {
			t.Parallel()
			l := newNATLab(t, userspace, kinds)
			l.start(t)
			eventually(t, "the hidden hosts reach the open one", func() error {
				for _, h := range l.hidden {
					if err := reaches(t, h, l.open); err != nil {
						return err
					}
				}
				return nil
			})
			for range 20 {
				pause(t, time.Second)
				if err := reaches(t, l.hidden[0], l.hidden[1]); err == nil {
					t.Fatal("the hidden hosts reach each other, so the NATs are not what they should be")
				}
				for _, h := range l.hidden {
					if err := reaches(t, l.open, h); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// TestUserspaceWireGuardNATChangesMapping changes the port that a NAT gives a host while packets flow. The
// open host must share the new port, and may miss packets for five seconds. The hidden hosts must reach
// each other again: within 30 seconds if the other NAT is a full cone, and otherwise when their WireGuard
// session has ended.
//
//stages:rest a session ends after three minutes
func TestUserspaceWireGuardNATChangesMapping(t *testing.T) {
	t.Parallel()
	for kind, limit := range map[natKind]time.Duration{fullCone: 30 * time.Second, portRestricted: 5 * time.Minute} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			l := newNATLab(t, userspace, [2]natKind{portRestricted, kind})
			l.start(t)
			l.expectAllReached(t)
			var flows []*lab.Flow
			for _, to := range []*lab.Host{l.open, l.hidden[1]} {
				f, err := l.hidden[0].Pods()[0].StartFlow(testContext(t), to.Pods()[0], prefix.IPv4, 100)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { f.Stop() })
				flows = append(flows, f)
			}
			l.nats[0].set(t, portRestricted, 40012)
			begin := time.Now()
			var err error
			for time.Since(begin) < limit {
				if err = reaches(t, l.hidden[1], l.hidden[0]); err == nil {
					break
				}
			}
			if err != nil {
				t.Fatalf("the hidden hosts do not reach each other %v after the change: %v", limit, err)
			}
			t.Logf("the hidden hosts reach each other again after %v", time.Since(begin))
			key := wg(t, l.hidden[0], "show", "flannel-wg", "public-key")
			eventually(t, "the lease of the open host has the new port", func() error {
				if got := sharedIn(t, l.Lab, l.open)[key]; !strings.HasSuffix(got, ":40012") {
					return fmt.Errorf("it has %q", got)
				}
				return nil
			})
			l.expectAllReached(t)
			if s := flows[0].Stop(); s.Gap > 5*time.Second {
				t.Errorf("a gap of %v to the open host, want at most 5s", s.Gap)
			}
		})
	}
}

// setHosts makes text the content of /etc/hosts for the programs on h.
func setHosts(t *testing.T, h *lab.Host, text string) {
	t.Helper()
	shell(t, h.Namespace, fmt.Sprintf("mountpoint -q /etc/hosts || { touch /run/hosts; mount --bind /run/hosts /etc/hosts; }; echo %q >/run/hosts", text))
}

// TestUserspaceWireGuardPublicEndpoint checks that an open host reaches a host behind a NAT by the name and
// port that the hidden host publishes. The NAT forwards this port. The open host has to send first.
func TestUserspaceWireGuardPublicEndpoint(t *testing.T) {
	testPublicEndpoint(t, "192.168.77.3")
}

// TestUserspaceWireGuardPublicEndpointChanges is TestUserspaceWireGuardPublicEndpoint with a name that
// first has another address than that of the NAT.
//
//stages:rest a name is resolved again after half a minute
func TestUserspaceWireGuardPublicEndpointChanges(t *testing.T) {
	testPublicEndpoint(t, "192.168.77.99")
}

// testPublicEndpoint checks the endpoint that a hidden host publishes with a name. On the open host this
// name has the address in first until WireGuard uses it, and then the address of the NAT.
func testPublicEndpoint(t *testing.T, first string) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, backendConfig(userspace))
	open, hidden := l.Host(1), l.Host(2)
	nat := hide(t, hidden, l.Host(3), 0)
	nat.set(t, fullCone, 40002)
	setHosts(t, open, first+" node2.example.org")
	for _, h := range []*lab.Host{open, hidden} {
		if h == hidden {
			// Drop what the hidden host sends to others before it has received something from them, so that
			// the open host must send first.
			nft(t, hidden.Namespace, "table ip filter { chain out { type filter hook output priority filter; udp dport 51820 ct state new drop; }; }")
			startOne(t, h, lab.FlanneldOptions{Args: []string{"--public-endpoint=node2.example.org:40002"}})
		} else {
			startOne(t, h, lab.FlanneldOptions{})
		}
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the open host tries the first address of the name", func() error {
		if got := wg(t, open, "show", "flannel-wg", "endpoints"); !strings.HasSuffix(got, first+":40002") {
			return fmt.Errorf("it sends to %q", got)
		}
		return nil
	})
	setHosts(t, open, nat.outside.String()+" node2.example.org")
	// The open host resolves the name again when half a minute has passed without an answer.
	within(t, 3*time.Minute, "the open host reaches the hidden one", func() error { return reaches(t, open, hidden) })
	if err := reaches(t, hidden, open); err != nil {
		t.Error(err)
	}
}

// TestPublicEndpointNeedsWireGuard checks that a daemon with --public-endpoint ends with the reason if the
// backend is not wireguard.
func TestPublicEndpointNeedsWireGuard(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--public-endpoint=node1.example.org"}}),
		"--public-endpoint node1.example.org cannot be used: the backend vxlan does not send to names: expected wireguard as Backend.Type")
}
