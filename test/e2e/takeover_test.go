// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"encoding/json"
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

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// fast is the rate in packets per second for tests that must notice a gap of a millisecond.
// startFlows may lower it.
const fast = 1000

// kernelMonitor receives the kernel's notifications about changes of links, addresses, routes, neighbours,
// FDB entries and nexthop objects on a host, whichever program makes the changes.
type kernelMonitor struct{ fd int }

func newKernelMonitor(t *testing.T, h *lab.Host) *kernelMonitor {
	t.Helper()
	const groupNexthop, buffer = 32, 8 << 20
	e := &kernelMonitor{}
	err := h.Do(testContext(t), func() (err error) {
		if e.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Close(e.fd) })
		if err := unix.Bind(e.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		for _, g := range []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, groupNexthop} {
			if err := unix.SetsockoptInt(e.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
				return err
			}
		}
		return unix.SetsockoptInt(e.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// notifications returns descriptions of the notifications since the last call, in their order. It
// does not wait for any. See describeNotification.
func (e *kernelMonitor) notifications(t *testing.T) []string {
	t.Helper()
	var all []string
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(e.fd, buf, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		for b := buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(b))
			if what := describeNotification(binary.NativeEndian.Uint16(b[4:]), b[unix.NLMSG_HDRLEN:size]); what != "" {
				all = append(all, what)
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// describeNotification returns the kind of the object and its number or address, such as "route
// 198.51.100.0", or "route gone 198.51.100.0" if it was deleted. For nexthop objects and default routes it
// returns no number or address. It returns an empty string for bridge ports, cached routes, and neighbours
// and FDB entries that are not permanent, because the kernel changes these by itself.
func describeNotification(typ uint16, payload []byte) string {
	const permanentAt, flagsAt = 8, 8
	kinds := map[uint16]string{
		unix.RTM_NEWLINK: "link", unix.RTM_DELLINK: "link gone", unix.RTM_NEWADDR: "address", unix.RTM_DELADDR: "address gone",
		unix.RTM_NEWROUTE: "route", unix.RTM_DELROUTE: "route gone", unix.RTM_NEWNEIGH: "neighbour", unix.RTM_DELNEIGH: "neighbour gone",
		104: "nexthop", 105: "nexthop gone",
	}
	kind := kinds[typ]
	header := 0
	switch typ {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if payload[0] == unix.AF_BRIDGE {
			return ""
		}
		return fmt.Sprintf("%s %d", kind, binary.NativeEndian.Uint32(payload[4:]))
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		header = unix.SizeofIfAddrmsg
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if binary.NativeEndian.Uint32(payload[flagsAt:])&unix.RTM_F_CLONED != 0 {
			return ""
		}
		header = unix.SizeofRtMsg
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if binary.NativeEndian.Uint16(payload[permanentAt:])&unix.NUD_PERMANENT == 0 {
			return ""
		}
		header = unix.SizeofNdMsg
	default:
		return kind
	}
	for b := payload[header:]; len(b) >= unix.SizeofRtAttr; {
		size, attr := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		if size < unix.SizeofRtAttr || size > len(b) {
			break
		}
		// In all these messages the attribute of type 1 is an address: that of the object, and of
		// an FDB entry the remote one.
		if a, ok := netip.AddrFromSlice(b[unix.SizeofRtAttr:size]); ok && attr == 1 {
			return kind + " " + a.String()
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return kind
}

// TestRestartsWriteNothing checks that a restarted daemon that finds everything in place changes
// nothing in the kernel, and that no packet is lost.
func TestRestartsWriteNothing(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual}, fmt.Sprintf(`{"Type":%q}`, backend))
			c := etcdClient(t, l)
			for i := 30; i < 50; i++ {
				putKey(t, c, fmt.Sprintf("%s10.5.%[2]d.0-24&fd00:5:0:%[2]d::-64", subnets, i), fmt.Sprintf(
					`{"PublicIP":"192.168.77.%[1]d","PublicIPv6":"fd00:77::%[1]d","BackendType":%[2]q,`+
						`"BackendData":{"VtepMAC":"02:00:00:00:00:%02[1]d"},"BackendV6Data":{"VtepMAC":"02:00:00:00:01:%02[1]d"}}`, i, backend))
			}
			startAll(t, l, lab.FlanneldOptions{})
			h := l.Host(1)
			routes, err := h.Routes(testContext(t))
			if err != nil || len(routes) < 42 {
				t.Fatalf("routes are %v, %v, want at least 42", routes, err)
			}
			flows := startFlows(t, l, fast)
			expectAddresses(t, l)
			e := newKernelMonitor(t, h)
			for i := range 20 {
				if i%2 == 0 {
					expectStop(t, h.Daemon())
				} else {
					h.Daemon().Kill()
				}
				startOne(t, h, lab.FlanneldOptions{})
				if changes := e.notifications(t); len(changes) > 0 {
					t.Errorf("restart %d changed the kernel: %q", i, changes)
				}
			}
			pause(t, time.Second)
			if changes := e.notifications(t); len(changes) > 0 {
				t.Errorf("the kernel changed after the restarts: %q", changes)
			}
			expectNothingLost(t, flows)
			// Make sure that the monitor really receives notifications.
			if out, err := h.Exec(testContext(t), "ip", "route", "add", "198.51.100.0/24", "dev", "eth0"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if changes := e.notifications(t); !slices.Equal(changes, []string{"route 198.51.100.0"}) {
				t.Errorf("notifications of a new route: %q, want one", changes)
			}
		})
	}
}

// node is a lease in the store as another flannel daemon reads it.
type node struct {
	subnets map[prefix.Family]netip.Prefix
	publics map[prefix.Family]netip.Addr
	macs    map[prefix.Family]string
	key     string
	value   string
}

// nodes returns all leases in the store.
func nodes(t *testing.T, l *lab.Lab) []node {
	t.Helper()
	all, err := l.Leases(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var ns []node
	for _, one := range all {
		var v struct {
			PublicIP, PublicIPv6       netip.Addr
			BackendData, BackendV6Data struct{ VtepMAC string }
		}
		if err := json.Unmarshal([]byte(one.Value), &v); err != nil {
			t.Fatal(err)
		}
		n := node{
			subnets: map[prefix.Family]netip.Prefix{},
			publics: map[prefix.Family]netip.Addr{prefix.IPv4: v.PublicIP, prefix.IPv6: v.PublicIPv6},
			macs:    map[prefix.Family]string{prefix.IPv4: v.BackendData.VtepMAC, prefix.IPv6: v.BackendV6Data.VtepMAC},
			key:     one.Key, value: one.Value,
		}
		for part := range strings.SplitSeq(one.Key, "&") {
			i := strings.LastIndex(part, "-")
			p := netip.MustParsePrefix(part[:i] + "/" + part[i+1:])
			if p.Bits() > 0 {
				n.subnets[prefix.FamilyOf(p.Addr())] = p
			}
		}
		ns = append(ns, n)
	}
	return ns
}

// publish puts a node's lease into the store as another flannel daemon does: it overwrites the
// key, with a new etcd lease of a day.
func (n node) publish(t *testing.T, c *clientv3.Client) {
	t.Helper()
	const day = 86400
	g, err := c.Grant(testContext(t), day)
	if err == nil {
		_, err = c.Put(testContext(t), subnets+n.key, n.value, clientv3.WithLease(g.ID))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// newNode returns a node as another flannel daemon would publish it, with the subnets 10.5.n.0/24
// and fd00:5:0:n::/64. public returns its public address of a family. newNode does not publish
// the node.
func newNode(t *testing.T, families []prefix.Family, backend string, n int, public func(prefix.Family) netip.Addr) node {
	one := node{subnets: map[prefix.Family]netip.Prefix{}, publics: map[prefix.Family]netip.Addr{}, macs: map[prefix.Family]string{}}
	type data struct {
		VNI     int
		VtepMAC string
	}
	value := struct {
		PublicIP      netip.Addr
		PublicIPv6    *netip.Addr
		BackendType   string
		BackendData   *data `json:",omitempty"`
		BackendV6Data *data `json:",omitempty"`
	}{PublicIP: netip.IPv4Unspecified(), BackendType: backend}
	key := "0.0.0.0-0"
	for _, f := range families {
		mac := net.HardwareAddr{0xae, 1, 2, 3, byte(f), byte(n)}.String()
		one.publics[f], one.macs[f] = public(f), mac
		var vtep *data
		if backend == "vxlan" {
			vtep = &data{1, mac}
		}
		if f == prefix.IPv4 {
			one.subnets[f] = netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", n))
			key = fmt.Sprintf("10.5.%d.0-24", n)
			value.PublicIP, value.BackendData = public(f), vtep
		} else {
			address := public(f)
			one.subnets[f] = netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%d::/64", n))
			key += fmt.Sprintf("&fd00:5:0:%d::-64", n)
			value.PublicIPv6, value.BackendV6Data = &address, vtep
		}
	}
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	one.key, one.value = key, string(text)
	return one
}

func device(f prefix.Family) string {
	if f == prefix.IPv6 {
		return "flannel-v6.1"
	}
	return "flannel.1"
}

// runOtherDaemon changes a host as another flannel daemon does when it starts. It creates missing devices,
// creates or replaces the entries of each of the peers, and writes the subnet file. It removes no devices,
// and no entries of hosts that are not among the peers.
func runOtherDaemon(t *testing.T, h *lab.Host, backend string, own node, peers []node) {
	t.Helper()
	var script strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&script, format+"\n", args...) }
	line("set -e")
	env := ""
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		s, enabled := own.subnets[f]
		if !enabled {
			continue
		}
		kind, network := "FLANNEL", "10.5.0.0/16"
		mtu, base := 1450, prefix.Host(s.Addr())
		if f == prefix.IPv6 {
			kind, network, mtu = "FLANNEL_IPV6", "fd00:5::/48", 1430
		}
		env += fmt.Sprintf("%s_NETWORK=%s\n%s_SUBNET=%s/%d\n", kind, network, kind, prefix.First(s), s.Bits())
		if backend == "vxlan" {
			dev := device(f)
			line(`ip link show %[1]s >/dev/null 2>&1 || {
				ip link add %[1]s address %[2]s mtu %[3]d txqueuelen 0 type vxlan id 1 dev eth0 local %[4]s dstport 8472 nolearning
				echo 0 > /proc/sys/net/ipv6/conf/%[1]s/accept_ra; }`, dev, own.macs[f], mtu, own.publics[f])
			line("ip addr replace %s dev %s", base, dev)
			line("ip link set %s up", dev)
		}
		for _, p := range peers {
			s, public, mac := p.subnets[f], p.publics[f], p.macs[f]
			if backend == "vxlan" {
				line("ip neigh replace %s lladdr %s dev %s nud permanent", s.Addr(), mac, device(f))
				line("bridge fdb replace %s dev %s dst %s self permanent", mac, device(f), public)
				line("ip route replace %s via %s dev %s onlink proto boot", s, s.Addr(), device(f))
				continue
			}
			// The other daemon compares destination, gateway and device of the first
			// route only.
			line(`ip route show %[1]s | head -n 1 | grep -q 'via %[2]s dev eth0 ' || { ip route del %[1]s 2>/dev/null || true; ip route add %[1]s via %[2]s dev eth0 proto boot; }`, s, public)
		}
	}
	text := strings.ReplaceAll(script.String(), "ip route show fd", "ip -6 route show fd")
	if out, err := h.Exec(testContext(t), "sh", "-c", text); err != nil {
		t.Fatalf("%v: %s\n%s", err, out, text)
	}
	mtu := map[string]int{"vxlan": 1450, "host-gw": 1500}[backend]
	file := h.Path(lab.SubnetFile)
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, fmt.Appendf(nil, "%sFLANNEL_MTU=%d\nFLANNEL_IPMASQ=false\n", env, mtu), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// runOtherDaemons publishes the lease of each host again, and calls runOtherDaemon for the host,
// with all other leases in the store as its peers.
func runOtherDaemons(t *testing.T, l *lab.Lab, backend string) {
	t.Helper()
	c := etcdClient(t, l)
	all := nodes(t, l)
	for _, h := range l.Hosts() {
		i := slices.IndexFunc(all, func(n node) bool {
			return n.publics[prefix.IPv4] == h.Addr(4) || n.publics[prefix.IPv6] == h.Addr(6)
		})
		if i < 0 {
			t.Fatalf("no lease of %s", h.Name())
		}
		all[i].publish(t, c)
		runOtherDaemon(t, h, backend, all[i], slices.Concat(all[:i], all[i+1:]))
	}
}

// expectAddresses waits until duplicate address detection has ended for all IPv6 addresses. When it
// ends for an address, the kernel sends another notification about that address. A kernelMonitor
// would take that notification for a change.
func expectAddresses(t *testing.T, l *lab.Lab) {
	t.Helper()
	eventually(t, "the end of duplicate address detection", func() error {
		for _, h := range l.Hosts() {
			if tentative := shell(t, h.Namespace, "ip -6 address show tentative"); tentative != "" {
				return errors.New(tentative)
			}
		}
		return nil
	})
}

// datapathOf returns the routes, neighbours and FDB entries of a host for a node's subnets, as
// sorted lines without duplicates. The lines contain the names of the devices.
func datapathOf(t *testing.T, h *lab.Host, n node) []string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(kernelObjects(t, h)) {
		for f, s := range n.subnets {
			if strings.HasPrefix(line, s.String()+" ") || strings.HasPrefix(line, s.Addr().String()+" ") || n.macs[f] != "" && strings.HasPrefix(line, n.macs[f]+" ") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

func deviceNumbers(t *testing.T, h *lab.Host) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "sh", "-c", "ip -o link show type vxlan | cut -d ' ' -f 1,2")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestTakeover checks that the daemon takes over the kernel objects of another flannel daemon,
// changes only what is wrong, and leaves objects with which the other daemon can go on. No packet
// may be lost.
func TestTakeover(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw"} {
		for _, families := range [][]prefix.Family{v4, v6, dual} {
			t.Run(backend+" "+familiesName(families), func(t *testing.T) {
				t.Parallel()
				testTakeover(t, families, backend)
			})
		}
	}
}

func testTakeover(t *testing.T, families []prefix.Family, backend string) {
	l := newLab(t, lab.Config{Hosts: 2, Families: families}, fmt.Sprintf(`{"Type":%q}`, backend))
	c := etcdClient(t, l)
	made := func(n, host int) node {
		return newNode(t, families, backend, n, func(f prefix.Family) netip.Addr {
			if f == prefix.IPv4 {
				return netip.AddrFrom4([4]byte{192, 168, 77, byte(host)})
			}
			return netip.MustParseAddr(fmt.Sprintf("fd00:77::%d", host))
		})
	}
	published := map[*lab.Host]node{}
	for i, h := range l.Hosts() {
		published[h] = newNode(t, families, backend, i+1, h.Addr)
		published[h].publish(t, c)
	}
	was, is, gone := made(50, 60), made(50, 61), made(99, 62)
	for f := range is.macs {
		is.macs[f] = "ae" + strings.Repeat(":05", 4) + fmt.Sprintf(":%02d", f)
		is.value = strings.ReplaceAll(is.value, was.macs[f], is.macs[f])
	}
	was.publish(t, c)
	gone.publish(t, c)
	runOtherDaemons(t, l, backend)
	is.publish(t, c) // the other daemon does not see this change and the next one
	removeKey(t, c, subnets+gone.key)
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	flows := startFlows(t, l, fast)
	expectAddresses(t, l)

	for i, h := range l.Hosts() {
		peer := published[l.Hosts()[1-i]]
		adopted, devices := datapathOf(t, h, peer), deviceNumbers(t, h)
		e := newKernelMonitor(t, h)
		startOne(t, h, lab.FlanneldOptions{})
		eventually(t, h.Name(), func() error {
			now, left := strings.Join(datapathOf(t, h, is), "\n"), datapathOf(t, h, gone)
			for f, s := range is.subnets {
				want := []string{s.String() + " via " + is.publics[f].String()}
				if backend == "vxlan" {
					want = []string{s.Addr().String() + " dev " + device(f) + " lladdr " + is.macs[f], is.macs[f] + " dev " + device(f) + " dst " + is.publics[f].String()}
				}
				for _, w := range want {
					if !strings.Contains(now, w) {
						return fmt.Errorf("no %q in:\n%s", w, now)
					}
				}
			}
			if backend == "vxlan" && len(left) > 0 {
				return fmt.Errorf("a node that is gone has left %q", left)
			}
			return nil
		})
		if after := datapathOf(t, h, peer); len(after) == 0 || !slices.Equal(after, adopted) {
			t.Errorf("%s has the entries %q for its peer, want %q as before", h.Name(), after, adopted)
		}
		if after := deviceNumbers(t, h); after != devices {
			t.Errorf("%s has the devices %q, want %q as before", h.Name(), after, devices)
		}
		for _, what := range e.notifications(t) {
			for f, s := range peer.subnets { // notifications of FDB entries contain the public address
				if strings.HasSuffix(what, " "+s.Addr().String()) || strings.HasSuffix(what, " "+peer.publics[f].String()) || strings.HasPrefix(what, "link gone") || strings.HasPrefix(what, "address") {
					t.Errorf("%s: %s, want no change of correct objects", h.Name(), what)
				}
			}
		}
		if own := nodes(t, l); !slices.ContainsFunc(own, func(n node) bool { return n.key == published[h].key && n.value == published[h].value }) {
			t.Errorf("%s: leases %v, want its own unchanged: %s", h.Name(), own, published[h].value)
		}
	}
	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
	}
	runOtherDaemons(t, l, backend)
	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestReturnFromOtherDaemon checks that another flannel daemon can take over the kernel objects
// of this daemon, and this daemon can take them back. The devices must stay the same, and no
// packet may be lost.
func TestReturnFromOtherDaemon(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw"} {
		for _, families := range [][]prefix.Family{v4, v6, dual} {
			t.Run(backend+" "+familiesName(families), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, lab.Config{Hosts: 2, Families: families}, fmt.Sprintf(`{"Type":%q}`, backend))
				startAll(t, l, lab.FlanneldOptions{})
				flows := startFlows(t, l, fast)
				before := map[*lab.Host]string{}
				for _, h := range l.Hosts() {
					expectStop(t, h.Daemon())
					before[h] = deviceNumbers(t, h)
					for _, f := range families {
						expectDeviceCompatible(t, h, backend, f)
					}
				}
				runOtherDaemons(t, l, backend)
				pause(t, 500*time.Millisecond)
				for _, h := range l.Hosts() {
					startOne(t, h, lab.FlanneldOptions{})
				}
				pause(t, 500*time.Millisecond)
				expectNothingLost(t, flows)
				for _, h := range l.Hosts() {
					if after := deviceNumbers(t, h); after != before[h] {
						t.Errorf("%s has the devices %q, want %q as before", h.Name(), after, before[h])
					}
				}
				expectMatrix(t, l)
			})
		}
	}
}

// expectDeviceCompatible fails the test unless another flannel daemon would keep this daemon's
// vxlan device. The other daemon compares these properties, and creates the device again if one
// differs. For other backends there is nothing to check.
func expectDeviceCompatible(t *testing.T, h *lab.Host, backend string, f prefix.Family) {
	t.Helper()
	if backend != "vxlan" {
		return
	}
	out, err := h.Exec(testContext(t), "ip", "-o", "-d", "link", "show", device(f))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"vxlan id 1 ", "local " + h.Addr(f).String() + " ", "dev eth0 ", "dstport 8472 ", "nolearning "} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s of %s is %s, want %q", device(f), h.Name(), out, want)
		}
	}
	for _, bad := range []string{"l2miss", "l3miss", "gbp", "group ff", "remote"} {
		if strings.Contains(string(out), bad) {
			t.Errorf("%s of %s is %s, want no %q", device(f), h.Name(), out, bad)
		}
	}
}
