// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/test/lab"
)

// udpKernel is the argument of backendConfig for udp in the kernel.
const udpKernel = "udp in the kernel"

// loadFOU loads the module fou, as an administrator must: the kernel does not load it by
// itself.
func loadFOU(t *testing.T) {
	t.Helper()
	if out, err := exec.CommandContext(testContext(t), "modprobe", "fou").CombinedOutput(); err != nil {
		t.Fatalf("modprobe fou: %v: %s", err, out)
	}
}

// kernelPath returns what exists of the kernel objects of the backend udp on a host, in one
// line: the type of its device, the FOU port, the nftables table and the routes.
func kernelPath(t *testing.T, h *lab.Host) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "sh", "-c", `
		ip -o -d link show flannel0 2>/dev/null | grep -o 'encap fou\|tun type tun'
		ip fou show 2>/dev/null
		nft list tables | grep flannel-udp
		ip route show proto 98; true`)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.Join(strings.Fields(string(out)), " ")
}

// startSinglePacketPeer starts a peer that receives and sends each packet separately, without
// offloads. conn is its socket, with the address and port in the parameter at, which exists
// until the test ends. The peer answers every echo request that it receives, as if its pods had
// done so. The caller must publish its lease.
func startSinglePacketPeer(t *testing.T, n *lab.Namespace, at string) (conn *net.UDPConn) {
	t.Helper()
	err := n.Do(testContext(t), func() (err error) {
		conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		b := make([]byte, 2000)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if n < 28 || b[0] != 0x45 || b[9] != 1 || b[20] != 8 {
				continue
			}
			var src [4]byte
			copy(src[:], b[12:16])
			copy(b[12:16], b[16:20])
			copy(b[16:20], src[:])
			b[20] = 0 // turns the request into an echo reply
			sum := uint32(binary.BigEndian.Uint16(b[22:])) + 0x800
			binary.BigEndian.PutUint16(b[22:], uint16(sum+sum>>16))
			_, _ = conn.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return conn
}

// sendFromUnknownHost sends two packets to a host from an address that no lease has: one in a
// UDP datagram, as peers do, and one directly in an IP packet.
func sendFromUnknownHost(t *testing.T, l *lab.Lab, to netip.Addr) {
	t.Helper()
	const stranger = "192.168.77.199"
	if out, err := l.Underlay().Exec(testContext(t), "ip", "addr", "replace", stranger+"/32", "dev", "lo"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	inner := []byte{0x45, 0, 0, 28, 0, 1, 0, 0, 64, 1, 0x9e, 0xcc, 10, 5, 199, 9, 10, 5, 1, 1, 8, 0, 0xf7, 0xff, 0, 0, 0, 0}
	for network, at := range map[string]string{"udp4": fmt.Sprintf("%s:8285", to), "ip4:4": to.String()} {
		from := stranger
		if network == "udp4" {
			from += ":8285"
		}
		err := l.Underlay().Do(testContext(t), func() error {
			conn, err := (&net.ListenConfig{}).ListenPacket(testContext(t), network, from)
			if err != nil {
				return err
			}
			defer conn.Close()
			var dst net.Addr = &net.IPAddr{IP: net.IP(to.AsSlice())}
			if network == "udp4" {
				dst = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at))
			}
			_, err = conn.WriteTo(inner, dst)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestVMUDPKernelPath checks that different hosts reach each other in one network: two whose
// kernels carry the packets, one whose daemon does, and a peer that sends every packet
// separately. Packets of unknown senders, and packets with loopback addresses, must be dropped
// and counted.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelPath(t *testing.T) {
	loadFOU(t)
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"udp"}`)
	for i, h := range l.Hosts() {
		o, log := lab.FlanneldOptions{}, "the kernel carries the packets"
		if i == 2 {
			o, log = lab.FlanneldOptions{Args: []string{"--udp-source-check=strict"}}, "packets go through user space"
		}
		expectOnce(t, startOne(t, h, o), log)
	}
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
	expectMTU(t, l, 1472)

	d := l.Host(1).Daemon()
	sendFromUnknownHost(t, l, l.Host(1).Addr(prefix.IPv4))
	eventually(t, "packets of unknown senders are dropped and counted", func() error {
		_, text, err := d.Get(testContext(t), "/metrics")
		for _, line := range []string{`flannel_udp_dropped_packets_total{reason="unknown_peer"} 2`, `flannel_backend_info{mode="kernel",type="udp"} 1`} {
			if err == nil && !strings.Contains(text, line+"\n") {
				err = fmt.Errorf("no line %s in %q", line, linesOf(text, "flannel_udp"))
			}
		}
		return err
	})

	peer := startSinglePacketPeer(t, l.Underlay(), "192.168.77.254:8285")
	putKey(t, etcdClient(t, l), lab.Prefix+"/subnets/10.5.201.0-24", `{"PublicIP":"192.168.77.254"}`)
	simple := netip.MustParseAddr("10.5.201.9")
	eventually(t, "all pods reach the peer without offloads", func() error {
		var errs []error
		for _, p := range l.Pods() {
			_, err := p.Ping(testContext(t), simple, ping.Options{})
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	for _, p := range l.Pods() {
		expectMTUTo(t, p, simple, 1472)
	}
	expectNoLoopback(t, l, peer, 1)
	expectStop(t, d)
	startOne(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--udp-source-check=off"}})
	expectNoLoopback(t, l, peer, 0)
}

// expectNoLoopback makes a peer send packets with a loopback address as source or destination.
// Host 1 must count them as dropped, and they must not reach a service that listens on all its
// addresses. One more packet comes from another port of the peer than that of its tunnel.
// wrongPort is 1 if host 1 must drop this packet, and 0 if it does not check the source.
func expectNoLoopback(t *testing.T, l *lab.Lab, peer *net.UDPConn, wrongPort float64) {
	t.Helper()
	h := l.Host(1)
	expectLog(t, h.Daemon(), "the kernel carries the packets")
	shell(t, h.Namespace, "sysctl -w net.ipv4.conf.all.route_localnet=1 net.ipv4.conf.all.accept_local=1")
	var service *net.UDPConn
	err := h.Do(testContext(t), func() (err error) {
		service, err = net.ListenUDP("udp4", &net.UDPAddr{Port: listenPort})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	to := netip.AddrPortFrom(h.Addr(prefix.IPv4), 8285)
	own, far, loopback := podSubnet(t, h, prefix.IPv4).Addr(), netip.MustParseAddr("10.5.201.9"), netip.MustParseAddr("127.0.0.1")
	sendFrom(t, l.Underlay(), 8286, to, packetFrom(far, own, "from another port"))
	for _, p := range [][]byte{
		packetFrom(far, loopback, "to loopback"), packetFrom(loopback, own, "from loopback"), packetFrom(loopback, loopback, "both"),
		packetFrom(far, own, "last"),
	} {
		if _, err := peer.WriteToUDPAddrPort(p, to); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"from another port", "last"}[int(wrongPort):]
	var got []string
	for !slices.Contains(got, "last") {
		b := make([]byte, 100)
		_ = service.SetReadDeadline(time.Now().Add(patience))
		n, err := service.Read(b)
		if err != nil {
			t.Fatalf("%q arrived, but not the last packet: %v", got, err)
		}
		got = append(got, string(b[:n]))
	}
	if !slices.Equal(got, want) {
		t.Errorf("packets %q arrived, want %q", got, want)
	}
	for reason, want := range map[string]float64{"wrong_port": wrongPort, "wrong_source": 2, "wrong_destination": 1} {
		if n := metric(t, h, fmt.Sprintf("flannel_udp_dropped_packets_total{reason=%q}", reason)); n != want {
			t.Errorf("%v packets were dropped as %s, want %v", n, reason, want)
		}
	}
}

// TestVMUDPKernelHealing damages the kernel objects of the kernel path, one after the other,
// and checks that the daemon repairs them.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelHealing(t *testing.T) {
	loadFOU(t)
	newDamagedHost(t, udpKernel, v4).testAllRepairs(t)
}

// TestVMUDPKernelPortTaken checks that the daemon follows changed leases while another program
// uses its port, and takes the port again when it is free.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelPortTaken(t *testing.T) {
	loadFOU(t)
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig(udpKernel))
	startAll(t, l, lab.FlanneldOptions{})
	h, c := l.Host(1), etcdClient(t, l)
	const leaves, joins = lab.Prefix + "/subnets/10.5.201.0-24", lab.Prefix + "/subnets/10.5.202.0-24"
	putKey(t, c, leaves, `{"PublicIP":"192.168.77.201"}`)
	expectPeers(t, h, "192.168.77.2", "192.168.77.201")
	program := occupyFOUPort(t, h, "192.168.77.1:8285")
	expectLog(t, h.Daemon(), "another program uses the port")
	putKey(t, c, joins, `{"PublicIP":"192.168.77.202"}`)
	removeKey(t, c, leaves)
	expectPeers(t, h, "192.168.77.2", "192.168.77.202")
	if err := program.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the FOU port is there again", func() error {
		if now := kernelPath(t, h); !strings.Contains(now, "port 8285 ipproto 4 local 192.168.77.1") {
			return errors.New(now)
		}
		return nil
	})
	expectPeers(t, h, "192.168.77.2", "192.168.77.202")
	expectMatrix(t, l)
}

// expectPeers waits until a host whose kernel carries the packets accepts packets from exactly
// the peers want and has routes to exactly these. want contains the public addresses in
// alphabetical order.
func expectPeers(t *testing.T, h *lab.Host, want ...string) {
	t.Helper()
	address := regexp.MustCompile(`192\.168\.77\.\d+`)
	for _, command := range []string{"nft list set ip flannel-udp peers", "ip route show proto 98 dev flannel0"} {
		eventually(t, fmt.Sprintf("%q in %q", want, command), func() error {
			out, err := h.Exec(testContext(t), "sh", "-c", command)
			have := address.FindAllString(string(out), -1)
			if slices.Sort(have); err == nil && !slices.Equal(have, want) {
				err = fmt.Errorf("%q", have)
			}
			return err
		})
	}
}

// occupyFOUPort closes the FOU port with the address and port in the parameter at, and opens a
// socket there instead, as another program would. The socket exists until the test ends or the
// caller closes it.
func occupyFOUPort(t *testing.T, h *lab.Host, at string) (conn net.PacketConn) {
	t.Helper()
	where := netip.MustParseAddrPort(at)
	eventually(t, "a socket on the port", func() error { // the daemon may be faster and open the port again first
		out, err := h.Exec(testContext(t), "ip", "fou", "del", "port", fmt.Sprint(where.Port()), "local", where.Addr().String())
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return h.Do(testContext(t), func() (err error) {
			conn, err = (&net.ListenConfig{}).ListenPacket(testContext(t), "udp4", at)
			return err
		})
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestVMUDPKernelForeignDevice checks a start beside a TUN device with the name of the daemon's
// device. If another program has the TUN device open, the daemon must exit and leave the
// device. If no program has it open, the daemon must replace it.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelForeignDevice(t *testing.T) {
	loadFOU(t)
	for _, mode := range []string{"kernel", "auto"} {
		t.Run(mode, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"udp","Mode":"`+mode+`"}`)
			h := l.Host(1)
			var foreign *tunnel.Device
			if err := h.Do(testContext(t), func() (err error) { foreign, err = tunnel.OpenDevice("flannel0"); return err }); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = foreign.Close() }()
			expectFailure(t, start(t, h, lab.FlanneldOptions{}), "flannel0", "another program has it open")
			if !foreign.Alive() {
				t.Error("the other program's device was removed")
			}
			if err := foreign.Persist(true); err != nil {
				t.Fatal(err)
			}
			if err := foreign.Close(); err != nil {
				t.Fatal(err)
			}
			startOne(t, h, lab.FlanneldOptions{})
			if now := kernelPath(t, h); !strings.HasPrefix(now, "encap fou") {
				t.Errorf("kernel objects %q, want a device with encap fou", now)
			}
		})
	}
}

// TestVMUDPModes changes between the kernel path and user space, after stops and kills, with
// and without --udp-persist. No objects of the former mode may be left after the start.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPModes(t *testing.T) {
	loadFOU(t)
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"udp"}`)
	startAll(t, l, lab.FlanneldOptions{})
	h, peer := l.Host(1), podSubnet(t, l.Host(2), prefix.IPv4)
	kernel := fmt.Sprintf("encap fou port 8285 ipproto 4 local 192.168.77.1 table ip flannel-udp %s via 192.168.77.2 dev flannel0 onlink", peer)
	process := "tun type tun 10.5.0.0/16 dev flannel0"
	keep, strict := []string{"--udp-persist"}, []string{"--udp-persist", "--udp-source-check=strict"}
	stop := func() { expectStop(t, h.Daemon()) }
	kill := func() { h.Daemon().Kill() }
	for _, step := range []struct {
		name       string
		end        func()
		left       string
		args       []string
		want, note string
	}{
		{"kernel, stopped", stop, "", []string{"--udp-source-check=strict"}, process, "user space"},
		{"user space, stopped", stop, "", nil, kernel, "the kernel carries"},
		{"kernel, killed", kill, kernel, strict, process, "user space"},
		{"persistent user space, killed", kill, process, keep, kernel, "the kernel carries"},
		{"persistent kernel, stopped", stop, kernel, keep, kernel, "the kernel carries"},
		{"persistent kernel, stopped again", stop, kernel, strict, process, "user space"},
		{"persistent user space, stopped", stop, process, nil, kernel, "the kernel carries"},
		{"kernel, stopped again", stop, "", nil, kernel, "the kernel carries"},
	} {
		t.Run(step.name, func(t *testing.T) {
			step.end()
			left := strings.ReplaceAll(kernelPath(t, h), " linkdown", "")
			if left != step.left {
				t.Errorf("objects after the end of the daemon: %q, want %q", left, step.left)
			}
			startOne(t, h, lab.FlanneldOptions{Args: step.args})
			eventually(t, step.note, func() error {
				if now := kernelPath(t, h); now != step.want {
					return fmt.Errorf("%q, want %q", now, step.want)
				}
				return nil
			})
			expectMatrix(t, l)
		})
	}
}

// TestVMUDPKernelPathRemovedAfterChange kills the daemons, changes the port or the backend in
// the configuration, and starts them again. They must remove the FOU port and the rules of the
// kernel path that they need no longer.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelPathRemovedAfterChange(t *testing.T) {
	loadFOU(t)
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig(udpKernel))
	startAll(t, l, lab.FlanneldOptions{})
	routes := podSubnet(t, l.Host(2), prefix.IPv4).String() + " via "
	for _, step := range []struct{ config, want string }{
		{`{"Type":"udp","Mode":"kernel","Port":9285}`, "encap fou port 9285 ipproto 4 local 192.168.77.1 table ip flannel-udp " + routes},
		{`{"Type":"host-gw"}`, routes},
	} {
		for _, h := range l.Hosts() {
			h.Daemon().Kill()
		}
		putKey(t, etcdClient(t, l), lab.Prefix+"/config", `{"Network":"10.5.0.0/16","Backend":`+step.config+`}`)
		startAll(t, l, lab.FlanneldOptions{})
		eventually(t, "the kernel objects of "+step.config+" and no others", func() error {
			now := kernelPath(t, l.Host(1))
			if !strings.HasPrefix(now, step.want) || strings.Count(now, "via") != 1 {
				return fmt.Errorf("%q, want %q", now, step.want)
			}
			return nil
		})
		expectMatrix(t, l)
	}
}

// TestVMUDPKernelRestarts checks that the kernel carries packets without loss while daemons
// with --udp-persist are killed, stopped and started again.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPKernelRestarts(t *testing.T) {
	loadFOU(t)
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig(udpKernel))
	o := lab.FlanneldOptions{Args: []string{"--udp-persist"}}
	startAll(t, l, o)
	flows := startFlows(t, l, 100)
	for _, h := range l.Hosts() {
		for _, end := range []func(){func() { h.Daemon().Kill() }, func() { expectStop(t, h.Daemon()) }} {
			end()
			pause(t, 200*time.Millisecond)
			startOne(t, h, o)
		}
	}
	expectNothingLost(t, flows)
}

// linesOf returns the lines of text that begin with the text start.
func linesOf(text, start string) (found []string) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, start) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}
