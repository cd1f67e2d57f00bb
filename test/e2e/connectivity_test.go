// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// TestEveryPodReachesEveryPod checks that all pods reach each other, and that the MTU is right,
// with vxlan, host-gw and udp in user space, and with each combination of address families.
func TestEveryPodReachesEveryPod(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw", "udp"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			testFamilies(t, backend, v4, v6, dual)
		})
	}
}

// testFamilies calls testEveryPodReachesEveryPod for several labs. Each element of labs contains
// the address families of one lab.
func testFamilies(t *testing.T, backend string, labs ...[]prefix.Family) {
	for _, families := range labs {
		t.Run(familiesName(families), func(t *testing.T) { testEveryPodReachesEveryPod(t, backend, families) })
	}
}

// testEveryPodReachesEveryPod checks that all pods of a lab reach each other and that the MTU is
// the underlay's minus the overhead of the backend. In a dual-stack lab, the overhead is that
// with IPv6.
func testEveryPodReachesEveryPod(t *testing.T, backend string, families []prefix.Family) {
	t.Parallel()
	l := newLab(t, lab.Config{Families: families}, backendConfig(backend))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	overhead := map[string][2]int{"vxlan": {50, 70}, "udp": {28, 48}, "ipip": {20, 40}, "wireguard": {60, 80}, userspace: {60, 80}}[backend]
	if slices.Contains(families, prefix.IPv6) {
		expectMTU(t, l, 1500-overhead[1])
	} else {
		expectMTU(t, l, 1500-overhead[0])
	}
	if backend == "ipip" {
		expectOnPage(t, "backends/ipip.md", "ip route", shell(t, l.Host(1).Namespace, "ip route"))
	}
}

// expectMTU checks that packets of mtu bytes pass between all pods of different hosts, and that a
// packet with one byte more is reported as too big.
func expectMTU(t *testing.T, l *lab.Lab, mtu int) {
	t.Helper()
	for _, from := range l.Pods() {
		for _, to := range l.Pods() {
			if from.Host() == to.Host() {
				continue
			}
			for _, a := range to.Addrs() {
				expectMTUTo(t, from, a, mtu)
			}
		}
	}
}

// expectMTUTo is expectMTU for packets from one pod to one address.
func expectMTUTo(t *testing.T, from *lab.Pod, to netip.Addr, mtu int) {
	t.Helper()
	fits := lab.Echo{Size: mtu, DontFragment: true}
	if emulated() {
		fits.Timeout = repairTimeout
	}
	if _, err := from.Ping(testContext(t), to, fits); err != nil {
		t.Errorf("%s to %s, %d bytes: %v", from.Name(), to, mtu, err)
	}
	if _, err := from.Ping(testContext(t), to, lab.Echo{Size: mtu + 1, DontFragment: true}); !errors.Is(err, ping.ErrTooBig) {
		t.Errorf("%s to %s, %d bytes: %v, want an error because it is too big", from.Name(), to, mtu+1, err)
	}
}

// TestVXLANAcrossSegments checks that vxlan connects pods of hosts in different subnets of the
// underlay.
//
//stages:rest TestDirectRouting has peers in other segments
func TestVXLANAcrossSegments(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 4, Segments: 2, Families: dual}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
}

// TestDirectRouting checks that DirectRouting uses plain routes to hosts in the same segment of
// the underlay, and routes through the vxlan device to other hosts.
func TestDirectRouting(t *testing.T) { testDirectRouting(t, "vxlan") }

// testDirectRouting checks the device of the route to each pod, in a lab of two segments with two
// hosts each.
func testDirectRouting(t *testing.T, backend string) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 4, Segments: 2, Families: dual}, fmt.Sprintf(`{"Type":%q,"DirectRouting":true}`, backend))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	for _, from := range l.Hosts() {
		routes, err := from.Routes(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range l.Hosts() {
			if from == to {
				continue
			}
			for _, dst := range to.Pods()[0].Addrs() {
				dev := deviceTo(routes, dst)
				if direct := from.Segment() == to.Segment(); direct != (dev == "eth0") || !direct && !strings.HasPrefix(dev, "flannel") {
					t.Errorf("%s reaches %s of %s through %q, want eth0 in the same segment and a device of flannel otherwise; same segment: %v", from.Name(), dst, to.Name(), dev, direct)
				}
			}
		}
	}
}

// deviceTo returns the device of the most specific route to a, or an empty string if there is no
// route.
func deviceTo(routes []lab.Route, a netip.Addr) string {
	var dev string
	bits := -1
	for _, r := range routes {
		if r.Dst.Contains(a) && r.Dst.Bits() > bits {
			dev, bits = r.Dev, r.Dst.Bits()
		}
	}
	return dev
}
