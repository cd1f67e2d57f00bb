// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/subnet"
)

// TestKernelManyPeers moves many peers of both families to the next backend and back, on the real
// kernel with nexthop objects. After each step the best route to each peer must be that of the
// wanted backend, the route of the other backend must stand by, and another pass must change
// nothing.
func TestKernelManyPeers(t *testing.T) {
	const peers = 600
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	if out, err := exec.Command("sh", "-ec", `ip link set lo up
		ip link add eth0 type veth peer name far; ip link set eth0 up; ip link set far up
		ip addr add 192.168.77.1/16 dev eth0; ip addr add fd00:77::1/64 dev eth0 nodad`).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	k, err := linux.Open(linux.Options{NexthopObjects: true})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	env := newEnv(nil, vni1, hostGW)
	spy := &dataplanetest.Spy{Kernel: k}
	env.Kernel = spy
	v6 := subnet.Network{Prefix: netip.MustParsePrefix("fd00:5::/48")}
	env.Config.Networks = append(env.Config.Networks, v6)
	env.Underlay.Addrs = append(env.Underlay.Addrs, env.Underlay.Addrs[0])
	env.Underlay.Addrs[1].Local, env.Underlay.Addrs[1].Public = netip.MustParseAddr("fd00:77::1"), netip.MustParseAddr("fd00:77::1")
	b, err := newBackend(t, env)
	if err != nil {
		t.Fatal(err)
	}
	node := func(n int) *subnet.Lease {
		hi, lo := byte(n>>8), byte(n)
		return &subnet.Lease{Key: fmt.Sprintf("host%d", n), BackendType: "vxlan", NextType: "host-gw", Endpoints: []subnet.Endpoint{
			{
				Subnet:   netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, hi<<6 | lo>>2, lo << 6}), 26),
				PublicIP: netip.AddrFrom4([4]byte{192, 168, 80 + hi, lo}),
				Data:     fmt.Appendf(nil, `{"VNI":1,"VtepMAC":"02:00:00:00:%02x:%02x"}`, hi, lo),
			},
			{
				Subnet:   netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%x::/64", n)),
				PublicIP: netip.MustParseAddr(fmt.Sprintf("fd00:77::1:%x", n)),
				Data:     fmt.Appendf(nil, `{"VNI":1,"VtepMAC":"02:00:00:06:%02x:%02x"}`, hi, lo),
			},
		}}
	}
	own := node(1)
	own.Endpoints[0].PublicIP, own.Endpoints[1].PublicIP = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	started, err := b.Start(t.Context(), *own)
	if err != nil {
		t.Fatal(err)
	}
	defer started.Close()
	n := started.(*network)
	leases, keys := map[string]*subnet.Lease{}, []string{}
	for i := 2; i < 2+peers; i++ {
		l := node(i)
		leases[l.Key], keys = l, append(keys, l.Key)
	}
	sync := func(when string, set backend.Set, best, standby func(prefix.Family) string) {
		t.Helper()
		set.Leases, set.Complete = leases, true
		begin := time.Now()
		if out, err := n.Sync(t.Context(), set); err != nil || len(out.Refused) > 0 {
			t.Fatalf("%s: %d refused, %v", when, len(out.Refused), err)
		}
		t.Logf("%s: %s", when, time.Since(begin))
		have, err := k.Read(t.Context(), b.Describe().Scope)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range leases {
			for _, e := range l.Endpoints {
				routes := have.Routes[e.Subnet]
				found := map[string]bool{}
				for _, r := range routes {
					name := r.Dev
					if r.Priority > 1024 {
						name += " standby"
					}
					found[name] = true
				}
				if len(routes) != 2 || !found[best(e.Family())] || !found[standby(e.Family())+" standby"] {
					t.Fatalf("%s: routes to %s are %v", when, e.Subnet, routes)
				}
			}
		}
		for _, e := range leases[keys[0]].Endpoints { // probes choose the device
			device, to := standby(e.Family()), e.Subnet.Addr().Next().String()
			out, err := exec.Command("ip", "route", "get", to, "oif", device).CombinedOutput()
			via := e.PublicIP.String() // the gateway of host-gw
			if device != "eth0" {
				via = e.Subnet.Addr().String()
			}
			if err != nil || !strings.Contains(string(out), " via "+via+" dev "+device) {
				t.Errorf("%s: a packet to %s through %s takes another route than via %s: %v, %s", when, to, device, via, err, out)
			}
		}
		spy.Take()
		if _, err := n.Sync(t.Context(), backend.Set{Leases: leases, All: true, Complete: true}); err != nil {
			t.Fatal(err)
		}
		if ops := spy.Take(); len(ops) > 0 {
			t.Fatalf("%s: another pass makes %d changes, first %s", when, len(ops), ops[0])
		}
	}
	vxlanOf := func(f prefix.Family) string {
		return map[prefix.Family]string{prefix.IPv4: "flannel.1", prefix.IPv6: "flannel-v6.1"}[f]
	}
	eth0 := func(prefix.Family) string { return "eth0" }
	sync("at first", backend.Set{All: true}, vxlanOf, eth0)
	answer(n, keys...)
	sync("after the probes", backend.Set{}, eth0, vxlanOf)
	for _, p := range n.peers { // as if each peer had withdrawn its data for the next backend for a moment
		p.decided = false
	}
	sync("back", backend.Set{Changed: keys}, vxlanOf, eth0)
}
