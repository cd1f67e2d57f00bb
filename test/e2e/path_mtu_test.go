// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// probing returns backendConfig(backend) with "MTU":"probe", so that hosts find the MTUs of paths.
func probing(t *testing.T, backend string) string {
	t.Helper()
	var keys map[string]any
	if err := json.Unmarshal([]byte(backendConfig(backend)), &keys); err != nil {
		t.Fatal(err)
	}
	keys["MTU"] = "probe"
	text, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// narrowRouter makes paths between segments narrow: only packets of up to mtu bytes pass. The router sends no ICMP
// errors about larger ones, and hosts drop the fragments that it makes of IPv4 packets. If hosts are given, only
// the paths to them are narrow, and otherwise all paths between segments. With mtu 0, narrowRouter undoes that for
// the same hosts.
func narrowRouter(t *testing.T, l *lab.Lab, mtu int, hosts ...*lab.Host) {
	t.Helper()
	if len(hosts) == 0 {
		hosts = l.Hosts()
	}
	if mtu > 0 { // before the paths become narrow, because a host remembers an ICMP error for ten minutes
		nft(t, l.Underlay(), `table inet silent { chain out { type filter hook output priority 0;
			icmp type { destination-unreachable, time-exceeded, parameter-problem } drop;
			icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem } drop; } ; }`)
	}
	for _, h := range hosts {
		for _, f := range l.Families() {
			args := []string{"-" + map[prefix.Family]string{prefix.IPv4: "4", prefix.IPv6: "6"}[f], "route", "del", prefix.Host(h.Addr(f)).String()}
			if mtu > 0 {
				args = []string{args[0], "route", "replace", args[3], "dev", fmt.Sprintf("l2-%d", h.Segment()+1), "mtu", "lock", fmt.Sprint(mtu)}
			}
			if out, err := l.Underlay().Exec(testContext(t), "ip", args...); err != nil {
				t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
			}
		}
		if mtu > 0 {
			nft(t, h.Namespace, "table netdev whole { chain in { type filter hook ingress device eth0 priority 0; ip frag-off & 0x3fff != 0 drop; } ; }")
		} else {
			nft(t, h.Namespace, "delete table netdev whole")
		}
	}
	if mtu == 0 {
		nft(t, l.Underlay(), "delete table inet silent")
	}
}

// pathStream is a TCP connection from one pod to another, through which data is sent all the time. It is an
// io.Writer that counts the received bytes.
type pathStream struct {
	name     string
	received atomic.Int64
}

// startPathStream opens a TCP connection between two pods. It sends data from the first pod to the second one
// until the test ends.
func startPathStream(t *testing.T, from, to *lab.Pod, f prefix.Family) *pathStream {
	t.Helper()
	ctx := testContext(t)
	l, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(to.Addr(f), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := from.Dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	s := &pathStream{name: fmt.Sprintf("%s to %s by %s", from.Name(), to.Name(), f)}
	go func() {
		tick := time.NewTicker(20 * time.Millisecond) // limits the rate, so that a small machine is not busy
		defer tick.Stop()
		for chunk := make([]byte, 1<<13); ; <-tick.C {
			if _, err := near.Write(chunk); err != nil {
				return
			}
		}
	}()
	go func() { _, _ = io.Copy(s, struct{ net.Conn }{far}) }()
	return s
}

// Write counts the bytes and implements io.Writer. It returns no error.
func (s *pathStream) Write(b []byte) (int, error) {
	s.received.Add(int64(len(b)))
	return len(b), nil
}

// expectProgress waits until every stream has received another 128 KiB.
func expectProgress(t *testing.T, when string, streams []*pathStream) {
	t.Helper()
	before := map[*pathStream]int64{}
	for _, s := range streams {
		before[s] = s.received.Load()
	}
	within(t, patience, "streams go on "+when, func() error {
		for _, s := range streams {
			if n := s.received.Load() - before[s]; n < 1<<17 {
				return fmt.Errorf("%s: %d bytes", s.name, n)
			}
		}
		return nil
	})
}

// narrowPath describes a lab whose paths a test makes narrow.
type narrowPath struct {
	backend  string
	families []prefix.Family
	mtu      int           // bytes, on the narrow paths between hosts
	overhead [2]int        // bytes that the backend adds to a packet, for IPv4 and IPv6
	pad      int           // the tunnel makes the size of each packet a multiple of this number of bytes
	restart  time.Duration // the longest time after a restart until the daemon knows the MTUs again
}

// TestPathMTU narrows the paths between two segments as narrowRouter does. The hosts must find the MTU of each
// path, so that existing TCP connections go on. A restarted daemon must know these MTUs again. When the paths
// are wide again, the hosts must raise the MTU. The MTU of paths inside of a segment and subnet.env must not
// change.
//
//stages:rest the MTU is raised after half a minute
func TestPathMTU(t *testing.T) {
	t.Parallel()
	testPathMTU(t, []narrowPath{
		{"vxlan", v4, 1300, [2]int{50}, 1, time.Second},
		{"vxlan", dual, 1400, [2]int{50, 70}, 1, time.Second},
		{"udp", dual, 1400, [2]int{28, 48}, 1, 20 * time.Second}, // long, because the device and its routes end with the process
		{userspace, dual, 1400, [2]int{60, 80}, 16, 20 * time.Second},
	})
}

// TestVMIPIPPathMTU is TestPathMTU with ipip.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPPathMTU(t *testing.T) {
	testPathMTU(t, []narrowPath{{"ipip", dual, 1400, [2]int{20, 40}, 1, time.Second}})
}

// TestVMWireGuardPathMTU is TestPathMTU with the kernel's WireGuard.
//
//stages:long TestPathMTU has WireGuard in user space, and TestVMIPIPPathMTU a tunnel of the kernel
func TestVMWireGuardPathMTU(t *testing.T) {
	testPathMTU(t, []narrowPath{{"wireguard", dual, 1400, [2]int{60, 80}, 16, time.Second}})
}

func testPathMTU(t *testing.T, cases []narrowPath) {
	t.Helper()
	for _, tc := range cases {
		t.Run(tc.backend+" "+familiesName(tc.families), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Segments: 2, Families: tc.families}, probing(t, tc.backend))
			startAll(t, l, lab.FlanneldOptions{Args: []string{"--probe"}})
			expectConverged(t, l)
			a, b := l.Host(1), l.Host(2)
			file := func() string {
				out, err := a.Exec(testContext(t), "cat", "/run/flannel/subnet.env")
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				return string(out)
			}
			env := file()
			var streams []*pathStream
			for _, f := range tc.families {
				streams = append(streams, startPathStream(t, a.Pods()[0], b.Pods()[0], f), startPathStream(t, b.Pods()[0], a.Pods()[0], f))
			}
			expectProgress(t, "before", streams)
			wide := map[netip.Prefix]int{}
			expectSizes := func(when string, limit time.Duration, h *lab.Host, want map[netip.Prefix]int) {
				t.Helper()
				within(t, limit, when, func() error {
					have := map[netip.Prefix]int{}
					for _, p := range statusOf(t, h).Peers {
						maps.Copy(have, p.PathMTU)
					}
					if fmt.Sprint(have) != fmt.Sprint(want) {
						return fmt.Errorf("%s has the MTUs %v, want %v", h.Name(), have, want)
					}
					return nil
				})
			}
			expectSizes("the paths are wide", patience, a, wide) // a delayed packet on a busy machine may have made a path look narrow

			begin := time.Now()
			narrowRouter(t, l, tc.mtu)
			narrow := map[netip.Prefix]int{}
			for _, s := range statusOf(t, b).Lease.Subnets {
				overhead := tc.overhead[0]
				if s.Addr().Is6() {
					overhead = tc.overhead[1]
				}
				narrow[s] = (tc.mtu - overhead) / tc.pad * tc.pad
			}
			expectSizes("the paths are found to be narrow", patience, a, narrow)
			t.Logf("found after %s", time.Since(begin))
			expectProgress(t, "through the narrow path", streams)
			t.Logf("the streams go on after %s", time.Since(begin))
			for s, mtu := range narrow {
				expectInOutput(t, a, "ip -"+map[bool]string{true: "4", false: "6"}[s.Addr().Is4()]+" route show "+s.String(), fmt.Sprint(mtu))
				expectFlannelctl(t, a, []string{"status"}, "narrow paths", s.String())
			}
			expectLog(t, a.Daemons()[0], `"the path to a peer carries only smaller packets: the MTU of its route is lowered"`)
			if n := metric(t, a, "flannel_narrow_paths"); n != float64(len(narrow)) {
				t.Errorf("flannel_narrow_paths is %v, want %d", n, len(narrow))
			}
			if now := file(); now != env {
				t.Errorf("subnet.env is\n%s\nwas\n%s", now, env)
			}
			expectFlannelctl(t, a, []string{"check"}, "ok")

			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := a.Daemons()[0].Stop(ctx); err != nil {
				t.Fatal(err)
			}
			startOne(t, a, lab.FlanneldOptions{Args: []string{"--probe"}})
			expectSizes("the sizes are those from before the restart", tc.restart, a, narrow)
			expectProgress(t, "after a restart", streams)

			narrowRouter(t, l, 0)
			expectSizes("the paths are found to be wide", patience, a, wide)
			expectProgress(t, "through the wide path", streams)
			for s := range narrow {
				out, err := a.Exec(testContext(t), "ip", "route", "show", s.String())
				if err != nil || strings.Contains(string(out), "mtu") {
					t.Errorf("route to %s: %v: %s, want no MTU", s, err, out)
				}
			}
		})
	}
}

// TestPathMTUThroughMigration migrates a network from vxlan to udp while a path is narrow. Each backend must find
// its own MTU of the path, and TCP connections must go on.
//
//stages:rest a search may have to wait for probes of the migration
func TestPathMTUThroughMigration(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Segments: 2, Families: v4}, probing(t, "vxlan"))
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	a, b := l.Host(1), l.Host(2)
	streams := []*pathStream{startPathStream(t, a.Pods()[0], b.Pods()[0], prefix.IPv4), startPathStream(t, b.Pods()[0], a.Pods()[0], prefix.IPv4)}
	narrowRouter(t, l, 1300)
	expectSize := func(want int) {
		t.Helper()
		expectPathMTU(t, a, want)
		expectPathMTU(t, b, want)
	}
	expectSize(1250)
	expectProgress(t, "by the present backend", streams)
	putConfig(t, l, probing(t, "vxlan")+`,"NextBackend":`+probing(t, "udp"))
	eventuallyCarriedBy(t, a, "udp", b)
	eventuallyCarriedBy(t, b, "udp", a)
	expectProgress(t, "by the next backend", streams)
	expectSize(1250) // the smaller one of the MTUs of both backends
	putConfig(t, l, probing(t, "udp"))
	expectSize(1272)
	expectProgress(t, "after the migration", streams)
}

// expectPathMTU waits until a host reports the MTU want for the path to the first subnet of each peer. If want
// is 0, these paths must have the full MTU.
func expectPathMTU(t *testing.T, h *lab.Host, want int) {
	t.Helper()
	within(t, patience, fmt.Sprintf("%s finds the MTU %d", h.Name(), want), func() error {
		for _, p := range statusOf(t, h).Peers {
			if have := p.PathMTU[p.Subnets[0]]; have != want {
				return fmt.Errorf("it is %d", have)
			}
		}
		return nil
	})
}

// TestPathMTUOneWay narrows one direction of a path. The host that sends in this direction must find the MTU. The
// other host must keep the full MTU.
//
//stages:rest it waits for some seconds to see that no MTU changes
func TestPathMTUOneWay(t *testing.T) {
	t.Parallel()
	for _, f := range [][]prefix.Family{v4, v6} {
		t.Run(familiesName(f), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Segments: 2, Families: f}, probing(t, "vxlan"))
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			a, b := l.Host(1), l.Host(2)
			narrowRouter(t, l, 1400, b)
			want := 1350
			if f[0] == prefix.IPv6 {
				want = 1330
			}
			expectPathMTU(t, a, want)
			expectPathMTU(t, b, 0)
			pause(t, 5*time.Second)
			expectPathMTU(t, a, want)
			expectPathMTU(t, b, 0)
		})
	}
}

// TestKubePathMTUEvent narrows the path between two hosts. The Node of each must get an Event that names the peer
// and the size of packets that pass.
//
//stages:rest other tests narrow paths with all backends
func TestKubePathMTUEvent(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2, Segments: 2, Families: v4}, probing(t, "vxlan"))
	c.startDaemons()
	expectConverged(t, c.Lab)
	narrowRouter(t, c.Lab, 1300)
	for n := 1; n <= 2; n++ {
		peer := 3 - n
		begin := fmt.Sprintf("FlannelPathMTU: %s at %s carries packets of up to 1250 bytes, before ", c.podCIDRs(peer)[0], c.Host(peer).Addr(prefix.IPv4))
		end := ", of 1450: " + nodeName(peer)
		eventually(t, "an Event on the Node "+nodeName(n), func() error {
			all := c.events(n)
			if !slices.ContainsFunc(all, func(s string) bool { return strings.HasPrefix(s, begin) && strings.HasSuffix(s, end) }) {
				return fmt.Errorf("the Events are %q, want one that begins with %q and ends with %q", all, begin, end)
			}
			return nil
		})
	}
}
