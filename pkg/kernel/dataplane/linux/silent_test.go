// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// secondInterface returns a world with the device eth1, and the function disturb. disturb
// runs all steps twice, and checks after each step that a Reconciler restores its wanted
// state, which contains routes. That Reconciler reads the kernel again only if an
// announcement requires it.
func secondInterface(t *testing.T, routes ...dataplane.Object) (w *world, disturb func(what string, steps ...func() error)) {
	t.Helper()
	w = newWorld(t)
	err := w.Append(dataplane.Link{Name: "eth1", Kind: "veth", Up: true},
		dataplane.Addr{Dev: "eth1", Prefix: netip.MustParsePrefix("192.168.88.1/24")},
		dataplane.Addr{Dev: "eth1", Prefix: netip.MustParsePrefix("fd00:88::1/64")})
	if err != nil {
		t.Fatal(err)
	}
	want := dataplanetest.Base()
	want.Add(routes...)
	var r *dataplane.Reconciler
	for _, k := range []*Kernel{w.Kernel, w.daemon(t)} { // the second one finds existing routes
		r = dataplanetest.NewReconciler(t, k, time.Hour)
		if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
			t.Fatal(err)
		}
	}
	return w, func(what string, steps ...func() error) {
		t.Helper()
		for _, step := range slices.Concat(steps, steps) { // the first time may discard what the monitor knows
			if err := step(); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if _, err := r.Update(silentContext(t), nil, nil, true); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			have, err := w.Read(silentContext(t), dataplanetest.Scope())
			if err != nil {
				t.Fatal(err)
			}
			if ops := dataplane.Plan(have, want, dataplanetest.Scope(), nil, true).Ops; len(ops) > 0 {
				t.Errorf("%s: %d changes remain, the first %s", what, len(ops), ops[0])
			}
		}
	}
}

// TestKernelQuietIPv6 checks that the Reconciler restores IPv6 routes that the kernel has
// deleted without an announcement. A sysctl makes the kernel do that, as it always does with
// IPv4 routes.
func TestKernelQuietIPv6(t *testing.T) {
	w, disturb := secondInterface(t, dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5:3::/64"), netip.MustParseAddr("fd00:88::9"), "eth1", false))
	set := func(name, value string) {
		t.Helper()
		if err := os.WriteFile("/proc/sys/net/ipv6/"+name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	set("route/skip_notify_on_dev_down", "1")
	restore := func() error {
		return w.Append(dataplane.Addr{Dev: "eth1", Prefix: netip.MustParsePrefix("fd00:88::1/64")})
	}
	disturb("the interface goes down", func() error {
		if err := w.SetUp("eth1", false); err != nil {
			return err
		}
		if err := w.SetUp("eth1", true); err != nil {
			return err
		}
		return restore()
	})
	disturb("IPv6 is switched off", func() error {
		set("conf/eth1/disable_ipv6", "1")
		set("conf/eth1/disable_ipv6", "0")
		return restore()
	})
}

// TestKernelSourceAddressGoes checks that the Reconciler restores a route after its source
// address, which is on another device, was deleted. The kernel deletes the route together with
// the address. Older kernels do not announce that.
func TestKernelSourceAddressGoes(t *testing.T) {
	route := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("192.168.77.9"), "eth0", false)
	source := dataplane.Addr{Dev: "lo", Prefix: netip.MustParsePrefix("192.0.2.7/32")}
	w, disturb := secondInterface(t, route)
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	theirs := route
	theirs.Protocol = unix.RTPROT_STATIC
	disturb("the source address", func() error {
		if err := w.Append(source); err != nil {
			return err
		}
		return w.request(func(m *message) {
			encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, theirs, eth0)
			m.addr(unix.RTA_PREFSRC, source.Prefix.Addr())
		})
	}, func() error { return w.Remove(source) })
}

// TestVMSourceAddressGoes is TestKernelSourceAddressGoes on the kernel of the VM.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMSourceAddressGoes(t *testing.T) { TestKernelSourceAddressGoes(t) }

// countdown is a context that ends after a number of calls of its method Err.
type countdown struct {
	context.Context
	left int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// TestKernelDetourCutOff checks that neither a detour nor a copy of a route is left behind if the context
// ends during Apply, at any of the points where Apply checks the context.
func TestKernelDetourCutOff(t *testing.T) {
	const peers = 150
	w := newWorld(t)
	direct, tunnel := dataplanetest.Base(), dataplanetest.Peers(peers)
	for r := range tunnel.AllRoutes() {
		if r.Dst.Addr().Is6() {
			direct.Add(dataplane.NewRoute(r.Dst, netip.MustParseAddr("fd00:77::9"), "eth0", false))
		}
	}
	everywhere := dataplane.Scope{Devices: dataplanetest.Scope().Devices, Networks: []netip.Prefix{netip.MustParsePrefix("::/0")}}
	for left := 0; ; left++ {
		if _, err := dataplanetest.NewReconciler(t, w, 0).Reconcile(silentContext(t), direct, true); err != nil {
			t.Fatal(err)
		}
		var ops []dataplane.Op
		gateway := netip.MustParseAddr("fd00:77::1:0")
		for r := range tunnel.AllRoutes() {
			if r.Dst.Addr().Is6() {
				gateway = gateway.Next()
				outside := r // the gateway is not in the destination
				outside.Dst, outside.Gateway = netip.PrefixFrom(r.Dst.Addr(), r.Dst.Bits()+1), gateway
				ops = append(ops, dataplane.Op{Object: r}, dataplane.Op{Object: outside})
			}
		}
		failed := w.Apply(&countdown{silentContext(t), left}, ops)
		have, err := w.Read(silentContext(t), everywhere)
		if err != nil {
			t.Fatal(err)
		}
		for r := range have.AllRoutes() {
			if r.Dst.IsSingleIP() && r.Protocol == dataplane.Protocol {
				t.Errorf("context ended after %d calls: %s was left behind", left, r)
			}
		}
		if len(failed) == 0 {
			t.Logf("%d calls of the context", left)
			return
		}
		if t.Failed() || left > peers {
			t.Fatalf("%d failures, the first %v", len(failed), failed[0])
		}
	}
}
