// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestKernelTwins checks that another host with an address of this one is found, and that other interfaces of this host and
// hosts with other addresses are not.
func TestKernelTwins(t *testing.T) {
	enterNamespace(t)
	shell(t, `ip link add eth0 type bridge && ip link set eth0 up && ip addr add 192.0.2.1/24 dev eth0
		ip link add own type veth peer name own0 && ip link set own up && ip link set own0 master eth0 up
		ip link add first type veth peer name first0 && ip link set first0 master eth0 up
		ip link add second type veth peer name second0 && ip link set second0 master eth0 up`)
	r := status.Report{Interface: status.Interface{Name: "eth0", Addresses: []status.Address{{Local: netip.MustParseAddr("192.0.2.1")}, {Local: netip.MustParseAddr("2001:db8::1")}}}}
	expect := func(when string, want ...doctor.Twin) {
		t.Helper()
		if have := ownTwins(t.Context(), r); !slices.Equal(have, want) {
			t.Errorf("%s: %v, want %v", when, have, want)
		}
	}
	expectTwins := func(when, want string) {
		t.Helper()
		if have := Twins(t.Context(), netip.MustParseAddr("192.0.2.2")); (have == "") != (want == "") || !strings.Contains(have, want) {
			t.Errorf("%s: %q, want %q", when, have, want)
		}
	}

	elsewhere(t, "first", "ip addr add 192.0.2.2/24 dev first && ip link set first address 02:00:00:00:00:01 up")
	expect("no other host has the address")
	expectTwins("one host has the address of a peer", "")

	elsewhere(t, "second", "ip addr add 192.0.2.1/24 dev second && ip addr add 192.0.2.2/24 dev second && ip link set second address 02:00:00:00:00:02 up")
	expect("another host has the address", doctor.Twin{Dev: "eth0", Addr: r.Interface.Addresses[0].Local, MAC: "02:00:00:00:00:02"})
	expectTwins("two hosts have the address of a peer", "02:00:00:00:00:01 and 02:00:00:00:00:02 answer on eth0 for 192.0.2.2")

	shell(t, "ip route add default via 192.0.2.254 && ip neigh replace 192.0.2.254 lladdr 02:00:00:00:00:02 dev eth0")
	expect("the default gateway answers for the address")

	r.Interface.Name = "lo"
	expect("an interface without ARP")
}

// elsewhere moves a device to a network namespace of its own, which exists until the test ends, and runs a script there.
func elsewhere(t *testing.T, device, script string) {
	t.Helper()
	link, err := netlink.LinkByName(device)
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	there, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = there.Close() })

	enter := func(namespace *os.File) {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Fatal(err)
		}
	}
	enter(here)
	if err := netlink.LinkSetNsFd(link, int(there.Fd())); err != nil {
		t.Fatal(err)
	}
	enter(there)
	shell(t, script)
	enter(here)

	// The bridge forwards to its port as soon as the kernel has noticed the carrier, which may take a second.
	waittest.Until(t, 10*time.Second, "the port of "+device+" is up", func() bool {
		port, err := netlink.LinkByName(device + "0")
		return err == nil && port.Attrs().OperState == netlink.OperUp
	})
}
