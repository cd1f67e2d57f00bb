// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// listenPort is the UDP port on which the receiving pod listens. packetFrom also uses it as the
// source port.
const listenPort = 9999

// packetFromOutside returns an IP packet with a UDP datagram that contains text, to listenPort of
// a pod. Its source address is outside the pods' network.
func packetFromOutside(to netip.Addr, text string) []byte {
	return packetFrom(netip.MustParseAddr("203.0.113.9"), to, text)
}

// packetFrom returns an IP packet with a UDP datagram that contains text, to listenPort of a pod,
// with the given source address.
func packetFrom(from, to netip.Addr, text string) []byte {
	udp := make([]byte, 8, 8+len(text))
	binary.BigEndian.PutUint16(udp, listenPort)
	binary.BigEndian.PutUint16(udp[2:], listenPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(text)))
	udp = append(udp, text...)
	ip := slices.Concat([]byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), to.AsSlice())
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(udp)))
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	return append(ip, udp...)
}

// encapsulateVXLAN returns the payload of a UDP datagram that carries an IPv4 packet to the device
// flannel.1 of h.
func encapsulateVXLAN(t *testing.T, h *lab.Host, packet []byte) []byte {
	t.Helper()
	var mac net.HardwareAddr
	err := h.Netlink(testContext(t), func(n *netlink.Handle) error {
		link, err := n.LinkByName("flannel.1")
		if err == nil {
			mac = link.Attrs().HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat([]byte{8, 0, 0, 0, 0, 0, 1, 0}, mac, []byte{2, 0, 0, 0, 0, 9, 8, 0}, packet)
}

// sendFrom sends a UDP datagram with the payload b from a port in a namespace. If port is 0, the
// kernel chooses one.
func sendFrom(t *testing.T, n *lab.Namespace, port int, to netip.AddrPort, b []byte) {
	t.Helper()
	err := n.Do(testContext(t), func() error {
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: port})
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.WriteToUDPAddrPort(b, to)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// sendProtocol sends an IP packet with the payload b and this protocol number from a namespace, as
// a pod with CAP_NET_RAW can.
func sendProtocol(t *testing.T, n *lab.Namespace, protocol int, to netip.Addr, b []byte) {
	t.Helper()
	err := n.Do(testContext(t), func() error {
		conn, err := net.ListenPacket(fmt.Sprintf("ip4:%d", protocol), "0.0.0.0")
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.WriteTo(b, &net.IPAddr{IP: to.AsSlice()})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// listenInPod makes pod listen for texts. arrived returns the texts that have arrived since its last
// call, sorted and without duplicates. To know that all earlier texts have arrived, arrived first
// makes the pod other send a text in the allowed way, and waits for this text. arrived does not
// return the texts of the pod other.
func listenInPod(t *testing.T, pod, other *lab.Pod) (arrived func() []string) {
	t.Helper()
	var conn *net.UDPConn
	if err := pod.Do(testContext(t), func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: listenPort})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	number := 0
	return func() (texts []string) {
		t.Helper()
		pause(t, 200*time.Millisecond) // earlier packets may take a slower path
		number++
		last := fmt.Sprintf("last of %d", number)
		eventually(t, "a datagram from the other pod arrives", func() error {
			sendFrom(t, other.Namespace, 0, netip.AddrPortFrom(pod.Addr(prefix.IPv4), listenPort), []byte(last))
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			for b := make([]byte, 100); ; {
				n, err := conn.Read(b)
				switch {
				case err != nil:
					return err
				case string(b[:n]) == last:
					return nil
				case !strings.HasPrefix(string(b[:n]), "last of"):
					texts = append(texts, string(b[:n]))
				}
			}
		})
		slices.Sort(texts)
		return slices.Compact(texts)
	}
}

// firstPods returns the first pod of each of the two hosts.
func firstPods(l *lab.Lab) []*lab.Pod { return []*lab.Pod{l.Host(1).Pods()[0], l.Host(2).Pods()[0]} }

// newGuardLab returns a lab of two hosts with two pods each. The guard (--guard-tunnel) of its
// daemons is on. restart restarts the first host's daemon with additional arguments, and waits until
// pods reach each other.
func newGuardLab(t *testing.T, backend string, f flavour) (l *lab.Lab, restart func(args ...string)) {
	t.Helper()
	l = newLab(t, lab.Config{Hosts: 2}, backend)
	env := newPrograms(t, f).env
	options := func(args ...string) lab.FlanneldOptions {
		return lab.FlanneldOptions{Args: slices.Concat(f.args, []string{"--ip-masq"}, args), Env: []string{env}}
	}
	startAll(t, l, options())
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
	return l, func(args ...string) {
		t.Helper()
		expectStop(t, l.Host(1).Daemon())
		startOne(t, l.Host(1), options(args...))
		expectMatrix(t, l)
	}
}

// expectArrived fails the test unless exactly the texts in want have arrived. when describes the
// options of the daemon.
func expectArrived(t *testing.T, when string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q arrived, want %q", when, got, want)
	}
}

// TestGuardUDP checks that a pod cannot send packets into the network inside of datagrams that look
// like those of the backend udp. The guard, a firewall rule (--guard-tunnel), drops these datagrams
// on the pod's host. Without the guard they reach the other host, which accepts only the source port
// of the backend. Masquerading usually changes the source port, so that the other host drops the
// datagrams. If masquerading keeps the port and the pod sends from the port of the backend, the
// packets enter the network.
func TestGuardUDP(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l, restart := newGuardLab(t, `{"Type":"udp"}`, f)
			pods, host := firstPods(l), l.Host(2)
			arrived := listenInPod(t, pods[1], pods[0])
			shell(t, l.Host(1).Namespace, "sysctl -w net.netfilter.nf_conntrack_udp_timeout=1 net.netfilter.nf_conntrack_udp_timeout_stream=1")
			send := func() {
				pause(t, 3*time.Second) // until conntrack has forgotten the hosts' own datagrams; before that, masquerading cannot keep the port
				to := netip.AddrPortFrom(host.Addr(prefix.IPv4), 8285)
				sendFrom(t, pods[0].Namespace, 0, to, packetFromOutside(pods[1].Addr(prefix.IPv4), "from any port"))
				sendFrom(t, pods[0].Namespace, 8285, to, packetFromOutside(pods[1].Addr(prefix.IPv4), "from the hosts' port"))
			}
			refused := func() float64 { return metric(t, host, `flannel_udp_dropped_packets_total{reason="wrong_port"}`) }
			send()
			expectArrived(t, "with the guard", arrived(), nil)
			restart("--ip-masq-fully-random-disable")
			send()
			expectArrived(t, "with the guard, the pod's port kept", arrived(), nil)
			if n := refused(); n != 0 {
				t.Errorf("with the guard the other host dropped %v datagrams for their port, want 0, as none may arrive", n)
			}
			restart("--guard-tunnel=false")
			send()
			expectArrived(t, "without the guard", arrived(), nil)
			if n := refused(); n != 2 {
				t.Errorf("without the guard the other host dropped %v datagrams for their port, want 2", n)
			}
			// The check of the port alone does not protect, because masquerading may keep the
			// pod's port.
			restart("--guard-tunnel=false", "--ip-masq-fully-random-disable")
			send()
			expectArrived(t, "without the guard, the pod's port kept", arrived(), []string{"from the hosts' port"})
		})
	}
}

// TestGuardVXLAN checks that a pod cannot send packets into the network inside of VXLAN datagrams
// that it sends to a host. The datagrams go to the public address of the host and to the address of
// its VXLAN device. A pod may still have a VXLAN tunnel to another pod.
func TestGuardVXLAN(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l, restart := newGuardLab(t, `{"Type":"vxlan"}`, f)
			pods := firstPods(l)
			to := pods[1].Addr(prefix.IPv4)
			arrived := listenInPod(t, pods[1], pods[0])
			send := func() {
				for i, h := range l.Hosts() {
					for name, a := range map[string]netip.Addr{"public": h.Addr(prefix.IPv4), "own": podSubnet(t, h, prefix.IPv4).Addr()} {
						what := fmt.Sprintf("to the %s address of host %d", name, i+1)
						sendFrom(t, pods[0].Namespace, 0, netip.AddrPortFrom(a, 8472), encapsulateVXLAN(t, h, packetFromOutside(to, what)))
					}
				}
			}
			send()
			expectArrived(t, "with the guard", arrived(), nil)

			var tunnel *net.UDPConn
			if err := pods[1].Do(testContext(t), func() (err error) {
				tunnel, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 8472})
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer tunnel.Close()
			sendFrom(t, pods[0].Namespace, 8472, netip.AddrPortFrom(to, 8472), []byte("x"))
			_ = tunnel.SetReadDeadline(time.Now().Add(patience))
			if _, err := tunnel.Read(make([]byte, 10)); err != nil {
				t.Errorf("a datagram of the pods' own tunnel does not arrive: %v", err)
			}

			restart("--guard-tunnel=false")
			send() // host 2 still drops datagrams from a pod's address to the address of its VXLAN device
			expectArrived(t, "without the guard on host 1", arrived(), []string{
				"to the own address of host 1", "to the public address of host 1", "to the public address of host 2",
			})
		})
	}
}

// TestGuardBeforePort checks that a running daemon guards the new port of the tunnel before it opens it.
func TestGuardBeforePort(t *testing.T) {
	t.Parallel()
	f := flavours()[1]
	p := newPrograms(t, f)
	for _, name := range []string{"iptables-restore", "iptables-nft-restore"} {
		p.write(t, name, fmt.Sprintf(`rules=$(cat)
case "$rules" in
*8473*) ip -details link show flannel.1 | grep -o 'dstport [0-9]*' >>%s/opened ;;
esac
echo "$rules" | exec /usr/sbin/iptables-nft-restore "$@"`, p.dir))
	}
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{Args: f.args, Env: []string{p.env}})
	putConfig(t, l, `{"Type":"vxlan","Port":8473}`)
	eventually(t, "the port is guarded", func() error {
		opened, err := os.ReadFile(filepath.Join(p.dir, "opened"))
		if err == nil && len(opened) == 0 { // the shell creates the file before ip has started
			return errors.New("the port of the device is not known yet")
		}
		if err == nil && !strings.HasPrefix(string(opened), "dstport 8472\n") {
			t.Fatalf("when the rules for port 8473 were written, the device had the %s", opened)
		}
		return err
	})
	eventually(t, "the port is open", func() error {
		out, err := l.Host(1).Exec(testContext(t), "ip", "-details", "link", "show", "flannel.1")
		if err == nil && !strings.Contains(string(out), "dstport 8473") {
			err = fmt.Errorf("it is not: %s", out)
		}
		return err
	})
}

// TestVMGuardIPIP checks that a pod with CAP_NET_RAW cannot send packets into the network by
// sending IPIP packets to a host.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMGuardIPIP(t *testing.T) {
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			l, restart := newGuardLab(t, `{"Type":"ipip"}`, f)
			pods := firstPods(l)
			arrived := listenInPod(t, pods[1], pods[0])
			send := func() {
				for i, h := range l.Hosts() {
					sendProtocol(t, pods[0].Namespace, unix.IPPROTO_IPIP, h.Addr(prefix.IPv4), packetFromOutside(pods[1].Addr(prefix.IPv4), fmt.Sprintf("to host %d", i+1)))
				}
			}
			send()
			expectArrived(t, "with the guard", arrived(), nil)
			restart("--guard-tunnel=false")
			send()
			// The packets to host 2 do not arrive. Masquerading would give them the same addresses as the
			// hosts' own IPIP packets, which conntrack already knows. IPIP has no ports, so masquerading
			// cannot make them differ, and drops the packets.
			expectArrived(t, "without the guard", arrived(), []string{"to host 1"})
		})
	}
}
