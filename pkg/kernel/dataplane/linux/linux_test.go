// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

func TestMain(m *testing.M) {
	// No test may run on the main thread, because the main thread does not end with its goroutine.
	runtime.LockOSThread()
	goleak.VerifyTestMain(m)
}

func silentContext(t testing.TB) context.Context { return klog.NewContext(t.Context(), klog.Logger{}) }

func TestKernelContract(t *testing.T) {
	contract(t, newContractWorld)
}

// TestVMContract runs the contract on the kernel of the VM.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMContract(t *testing.T) { TestKernelContract(t) }

func TestKernelRandomWalk(t *testing.T) {
	walkThrough(t, newWorld(t), 300, 0)
}

// TestKernelRandomWalkByAnnouncements checks the cache: it must be right when other
// programs change the kernel, the socket loses announcements and the cache is invalidated.
// Each time that the walk has reached the wanted state, packets must pass.
//
//stages:rest TestKernelRandomWalk does the same without announcements
func TestKernelRandomWalkByAnnouncements(t *testing.T) {
	walkThrough(t, newTrafficWorld(t), 1000, time.Hour)
}

// TestKernelRandomWalkByNexthopID is TestKernelRandomWalkByAnnouncements with a kernel that
// shows only the id of a route's nexthop object.
//
//stages:rest TestKernelRandomWalk does the same without nexthop IDs
func TestKernelRandomWalkByNexthopID(t *testing.T) {
	w := newTrafficWorld(t)
	w.nexthopCompat(t, false)
	walkThrough(t, w, 1000, time.Hour)
}

// listen returns a function that calls its parameter each with every announcement to the multicast groups
// since its last call. It returns when there was no announcement for 20 ms.
func listen(t *testing.T, groups ...int) func(each func(typ uint16, payload []byte)) {
	t.Helper()
	s, err := openSocket(&Buffers{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.close() })
	tv := unix.NsecToTimeval(20_000_000)
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			t.Fatal(err)
		}
	}
	return func(each func(typ uint16, payload []byte)) {
		_ = s.receive(func(h header, payload []byte) (done bool, err error) { // until the timeout
			each(h.Type, payload)
			return false, nil
		})
	}
}

// TestKernelTakeOverAnnounced checks that the kernel does not announce the deletion of a route to a wanted
// destination while the Reconciler replaces that route. At first the replaced route is one of another
// program, and then one of flanneld.
func TestKernelTakeOverAnnounced(t *testing.T) {
	w := newWorld(t)
	r := dataplanetest.NewReconciler(t, w, 0)
	tunnel, direct := dataplanetest.Peers(3), dataplanetest.Base()
	for _, o := range dataplanetest.Peer(3, 0) {
		if route, ok := o.(dataplane.Route); ok {
			gw := netip.MustParseAddr("192.168.77.9")
			if route.Gateway.Is6() {
				gw = netip.MustParseAddr("fd00:77::9")
			}
			direct.Add(dataplane.NewRoute(route.Dst, gw, "eth0", false))
		}
	}
	for route := range direct.AllRoutes() {
		route.Protocol = unix.RTPROT_BOOT
		if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
			t.Fatal(err)
		}
		if err := w.Append(route); err != nil {
			t.Fatal(err)
		}
	}
	announced := listen(t, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	for _, want := range []dataplane.State{tunnel, direct, tunnel} {
		if _, err := r.Reconcile(silentContext(t), want, false); err != nil {
			t.Fatal(err)
		}
		news := 0
		announced(func(typ uint16, payload []byte) {
			for route := range direct.AllRoutes() {
				switch {
				case parseRoute(payload).route.Dst != route.Dst:
				case typ == unix.RTM_DELROUTE:
					t.Errorf("%s was announced without a route", route.Dst)
				default:
					news++
				}
			}
		})
		if news < 2 {
			t.Errorf("%d new routes announced, want one of each family", news)
		}
	}
}

// TestKernelRoutesFromSource checks that the Reconciler ignores an IPv6 route for packets
// from certain sources.
func TestKernelRoutesFromSource(t *testing.T) {
	w := newWorld(t)
	r := dataplanetest.NewReconciler(t, w, 0)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	var route dataplane.Route
	for _, o := range dataplanetest.Peer(3, 0) {
		if o, ok := o.(dataplane.Route); ok && o.Gateway.Is6() {
			route = o
		}
	}
	index, err := w.index(route.Dev)
	if err != nil {
		t.Fatal(err)
	}
	fromSource := func(typ uint16) error {
		return w.request(func(m *message) {
			encodeRoute(m, typ, unix.NLM_F_CREATE, route, index)
			m.buf[m.start+unix.NLMSG_HDRLEN+2] = 48
			m.addr(unix.RTA_SRC, netip.MustParseAddr("fd00:1::"))
		})
	}
	if err := fromSource(unix.RTM_NEWROUTE); err != nil {
		t.Fatalf("make a route from a source: %v (this test needs CONFIG_IPV6_SUBTREES)", err)
	}
	want := dataplanetest.Peers(3)
	if report, err := r.Reconcile(silentContext(t), want, true); err != nil || report.Puts != 18 {
		t.Errorf("%d puts (%v), want 18", report.Puts, err)
	}
	if err := fromSource(unix.RTM_DELROUTE); err != nil {
		t.Errorf("the route from a source was deleted: %v", err)
	}
}

// TestKernelPortInUse checks that the error of Apply names the UDP port that another
// program uses.
func TestKernelPortInUse(t *testing.T) {
	w := newWorld(t)
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4zero, Port: 8472})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	failed := w.Apply(t.Context(), []dataplane.Op{{Object: dataplanetest.Base().Links["flannel.1"]}})
	if len(failed) != 1 || !errors.Is(failed[0], unix.EADDRINUSE) || !strings.Contains(failed[0].Error(), "UDP port 8472") {
		t.Errorf("failures %v, want one that names UDP port 8472", failed)
	}
}

// TestKernelOtherTables checks that Read ignores routes of other tables.
func TestKernelOtherTables(t *testing.T) {
	w := newWorld(t)
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for n, dst := range []string{"10.5.3.0/24", "fd00:10:5:3::/64"} {
		route := dataplane.NewRoute(netip.MustParsePrefix(dst), netip.Addr{}, "eth0", false)
		for _, table := range []uint32{100, 1000} {
			err := w.request(func(m *message) {
				encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, route, eth0)
				m.buf[m.start+unix.NLMSG_HDRLEN+4] = unix.RT_TABLE_UNSPEC
				m.attr(unix.RTA_TABLE, binary.NativeEndian.AppendUint32(nil, table))
			})
			if err != nil {
				t.Fatalf("route %d to table %d: %v", n, table, err)
			}
		}
	}
	have, err := w.Read(t.Context(), dataplanetest.Scope())
	if err != nil || len(have.Routes) > 0 {
		t.Errorf("routes %v (%v), want none", have.Routes, err)
	}
}

// TestKernelConcurrentCalls checks that several goroutines can use one Kernel.
func TestKernelConcurrentCalls(t *testing.T) {
	w := newWorld(t)
	if _, err := dataplanetest.NewReconciler(t, w, 0).Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 20 {
				for _, o := range dataplanetest.Peer(i+2, 0) {
					for _, failure := range w.Apply(t.Context(), []dataplane.Op{{Object: o}, {Delete: true, Object: o}, {Object: o}}) {
						t.Error(failure)
					}
				}
				if _, err := w.Read(t.Context(), dataplanetest.Scope()); err != nil {
					t.Error(err)
				}
				if dev, err := w.OnLink(t.Context(), netip.MustParseAddr("fd00:77::5"), "eth0"); err != nil || dev != "eth0" {
					t.Errorf("on-link device %q (%v), want eth0", dev, err)
				}
			}
		})
	}
	wg.Wait()
	have, err := w.Read(t.Context(), dataplanetest.Scope())
	if err != nil || len(have.Neighs) != 8 || len(have.FDB) != 8 {
		t.Errorf("%d neighbours and %d FDB entries (%v), want 8 of each", len(have.Neighs), len(have.FDB), err)
	}
}

// TestKernelVanishingDevices checks that a pass does not hang while another program deletes
// devices at any time. Such a pass may fail. A pass after that must succeed.
func TestKernelVanishingDevices(t *testing.T) {
	w := newWorld(t)
	want := dataplanetest.Peers(50)
	r := dataplanetest.NewReconciler(t, w, 0)
	ctx, cancel := context.WithCancel(silentContext(t))
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		for range 30 {
			for _, l := range want.Links {
				if err := w.Remove(l); err != nil {
					t.Error(err)
				}
			}
		}
	})
	passes := 0
	for ctx.Err() == nil {
		_, _ = r.Reconcile(ctx, want, true)
		passes++
	}
	wg.Wait()
	t.Logf("%d passes", passes)
	if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
		t.Fatal(err)
	}
	have, err := w.Read(t.Context(), dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	if diff := dataplane.Plan(have, want, dataplanetest.Scope(), nil, true).Ops; len(diff) > 0 {
		t.Errorf("%d changes remain, the first %s", len(diff), diff[0])
	}
}

func BenchmarkReconcile5000(b *testing.B) {
	w := newWorld(b)
	want := dataplanetest.Peers(5000)
	ctx := silentContext(b)
	r := dataplanetest.NewReconciler(b, w, 0)
	// Create the devices here and not in b.Run, whose goroutines are outside of the network namespace.
	if _, err := r.Reconcile(ctx, dataplanetest.Base(), true); err != nil {
		b.Fatal(err)
	}
	b.Run("apply all", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			if _, err := r.Reconcile(ctx, dataplanetest.Base(), true); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			if _, err := r.Reconcile(ctx, want, true); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("nothing to do", func(b *testing.B) {
		for b.Loop() {
			if _, err := r.Reconcile(ctx, want, true); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if _, err := w.Read(ctx, dataplanetest.Scope()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
