// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
)

// TestHost checks which devices a network takes over from the network before, and which devices
// are closed.
func TestHost(t *testing.T) {
	h := NewHost()
	here := underlay.Interface{Index: 2, MTU: 1500, Addrs: []underlay.Address{{Local: netip.MustParseAddr("192.168.77.1")}}}
	v4, v6 := []prefix.Family{prefix.IPv4}, []prefix.Family{prefix.IPv6}
	four, six := tunnel{name: "flannel-wg", port: 51820, outer: v4}, tunnel{name: "flannel-wg-v6", port: 51821, outer: v6}
	take := func(of tunnel, i underlay.Interface) *userspaceDevice {
		t.Helper()
		d, err := h.take(of, 1440, i)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	expect := func(when string, want ...string) {
		t.Helper()
		if got := slices.Sorted(maps.Keys(h.devices)); !slices.Equal(got, want) {
			t.Errorf("%s: the devices are %q, want %q", when, got, want)
		}
	}
	closeUnused := func() {
		t.Helper()
		if err := h.CloseUnused(); err != nil {
			t.Error(err)
		}
	}
	one, two := take(four, here), take(six, here)
	closeUnused()
	expect("in use", "flannel-wg", "flannel-wg-v6")
	h.leave(one)
	h.leave(two)
	expect("after the end of the network", "flannel-wg", "flannel-wg-v6")
	other := here // with IPv6, and a smaller MTU
	other.MTU, other.Addrs = 1400, append(slices.Clone(here.Addrs), underlay.Address{Local: netip.MustParseAddr("fd00:77::1")})
	if take(four, other) != one {
		t.Error("the next network gets another device")
	}
	closeUnused()
	expect("when the next network uses one of them", "flannel-wg")
	for _, port := range []int{six.port, four.port} {
		if err := h.FreePorts([]int{port}); err != nil {
			t.Error(err)
		}
	}
	expect("when the port of a used device is needed", "flannel-wg")
	two = take(six, here)
	h.leave(one)
	h.leave(two)
	if err := h.FreePorts([]int{six.port, 8285}); err != nil {
		t.Error(err)
	}
	expect("when the port of one unused device is needed", "flannel-wg")
	take(tunnel{name: "flannel-wg-v6", port: four.port}, here)
	expect("when another device needs the port", "flannel-wg-v6")
	if err := h.closeNamed([]string{"flannel-wg-v6"}); err != nil {
		t.Error(err)
	}
	expect("when the kernel has the device")
}

// TestHostReplacesAfterAMove checks that take returns a new device if the address of the host
// has changed, because the old device remembers the old address.
func TestHostReplacesAfterAMove(t *testing.T) {
	h := NewHost()
	var before *userspaceDevice
	for i, addr := range []string{"192.168.77.1", "192.168.77.1", "192.168.77.2"} {
		d, err := h.take(tunnel{name: "flannel-wg", outer: []prefix.Family{prefix.IPv4}}, 1440, underlay.Interface{Addrs: []underlay.Address{{Local: netip.MustParseAddr(addr)}}})
		if err != nil {
			t.Fatal(err)
		}
		if same := d == before; same != (i == 1) {
			t.Errorf("step %d: the same device: %v", i, same)
		}
		before = d
		h.leave(d)
	}
}
