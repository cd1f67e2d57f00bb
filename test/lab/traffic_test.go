// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// TestKernelPingSeesPathMTU checks pings from a host. A large ping that must not be fragmented
// must fail and report the smaller MTU of the path. A ping to an address that no host has must
// fail without an answer.
func TestKernelPingSeesPathMTU(t *testing.T) {
	l := newLab(t, lab.Config{Families: dual, Hosts: 2, Segments: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	err := l.Underlay().Netlink(t.Context(), func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("l2-2")
		if err != nil {
			return err
		}
		return nl.LinkSetMTU(link, 1300)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range dual {
		_, err := l.Host(1).Ping(t.Context(), l.Host(2).Addr(f), lab.Echo{Size: 1400, DontFragment: true})
		if !errors.Is(err, ping.ErrTooBig) || !strings.Contains(err.Error(), "1300") {
			t.Errorf("%v: %v, want too big for 1300", f, err)
		}
		_, err = l.Host(1).Ping(t.Context(), netip.MustParsePrefix(map[prefix.Family]string{
			prefix.IPv4: "192.168.77.99/32", prefix.IPv6: "fd00:77::99/128"}[f]).Addr(), lab.Echo{Timeout: 50 * time.Millisecond})
		if err == nil || !strings.HasSuffix(err.Error(), "no answer") {
			t.Errorf("%v: %v, want no answer", f, err)
		}
	}
}

func TestKernelFlowCountsLoss(t *testing.T) {
	l := newLab(t, lab.Config{Families: dual, Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	addStaticNetwork(t, l, 1500)
	pods := l.Pods()
	flow, err := pods[0].StartFlow(t.Context(), pods[1], prefix.IPv4, 500)
	if err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "100 packets", func() bool { return flow.Stats().Answered >= 100 })
	if lost := flow.Stats().Lost; len(lost) > 2 { // two packets may not have come back yet
		t.Errorf("lost %v on a quiet link", lost)
	}
	setEth0 := func(up bool) {
		t.Helper()
		err := pods[1].Netlink(t.Context(), func(nl *netlink.Handle) error {
			link, err := nl.LinkByName("eth0")
			if err != nil {
				return err
			}
			if !up {
				return nl.LinkSetDown(link)
			}
			if err := nl.LinkSetUp(link); err != nil {
				return err
			}
			return nl.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: podSubnet(prefix.IPv4, 1).Addr().Next().AsSlice()})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	setEth0(false)
	waitUntil(t, "20 lost packets", func() bool { return len(flow.Stats().Lost) >= 20 })
	setEth0(true)
	before := flow.Stats().Answered
	waitUntil(t, "the flow to resume", func() bool { return flow.Stats().Answered > before+10 })
	s := flow.Stop()
	if s.Sent != s.Answered+len(s.Lost) || len(s.Lost) < 20 || s.Gap < 40*time.Millisecond {
		t.Errorf("sent %d, answered %d, lost %v, gap %v: want at least 20 lost, and their 40 ms", s.Sent, s.Answered, s.Lost, s.Gap)
	}
}

func waitUntil(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("no %s within 10 s", what)
		}
	}
}

func TestKernelShaping(t *testing.T) {
	cfg := lab.Config{Families: dual, Hosts: 2, Rate: 1_250_000, Etcd: lab.EtcdOptions{Disabled: true}}
	l := newLab(t, cfg)
	addStaticNetwork(t, l, 1500)
	expectTenMegabits(t, l)

	// If the kernel has no netem, the error must say so. TestVMShaping runs on a kernel with netem.
	cfg.Latency = 20 * time.Millisecond
	l, err := lab.New(t.Context(), cfg)
	if err == nil {
		l.Close()
	} else if want := "no netem queueing discipline"; !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestVMShaping checks links with latency and a rate limit, and links with loss.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMShaping(t *testing.T) {
	config := lab.Config{Families: dual, Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}}
	t.Run("latency and rate", func(t *testing.T) {
		cfg := config
		cfg.Latency, cfg.Rate = 50*time.Millisecond, 1_250_000
		l := newLab(t, cfg)
		addStaticNetwork(t, l, 1500)
		for _, f := range dual {
			// The machine adds delay, and resolving the neighbour may double the time of the
			// first round trip. But the shortest of five takes only a little longer than twice
			// the latency.
			if rtt := quickest(t, l, f); rtt < 100*time.Millisecond || rtt > 190*time.Millisecond {
				t.Errorf("%v: a round trip of %v, want 50 ms each way", f, rtt)
			}
		}
		expectTenMegabits(t, l)
	})
	t.Run("loss", func(t *testing.T) {
		cfg := config
		cfg.Loss = 20
		l := newLab(t, cfg)
		addStaticNetwork(t, l, 1500)
		for _, f := range dual {
			sent, lost := lostOf(t, l, f, 1000)
			if share := float64(lost) / float64(sent); share < 0.28 || share > 0.44 {
				t.Errorf("%v: %d of %d packets were lost both ways together, want 36%% for 20%% each way", f, lost, sent)
			}
		}
	})
}

// expectTenMegabits checks that a pod receives about ten megabits per second from the other one.
func expectTenMegabits(t *testing.T, l *lab.Lab) {
	t.Helper()
	pods := l.Pods()
	bps, err := pods[0].Throughput(t.Context(), pods[1], prefix.IPv6, 3*time.Second) // long, because a connection needs part of the first second to start
	if err != nil {
		t.Fatal(err)
	}
	least := 5e6
	if os.Getenv("EMULATED") != "" { // a busy machine emulates TCP so slowly that it does not reach the limit
		least = 2e6
	}
	if bps < least || bps > 15e6 {
		t.Errorf("%.1f Mbit/s through 10 Mbit/s", bps/1e6)
	}
}

// quickest returns the shortest of five round trips between the first two hosts.
func quickest(t *testing.T, l *lab.Lab, f prefix.Family) time.Duration {
	t.Helper()
	var rtts []time.Duration
	for range 5 {
		rtt, err := l.Host(1).Ping(t.Context(), l.Host(2).Addr(f), lab.Echo{})
		if err != nil {
			t.Fatalf("%v: %v", f, err)
		}
		rtts = append(rtts, rtt)
	}
	return slices.Min(rtts)
}

// lostOf starts a flow between two pods and waits for the first ten answers. Of the packets that
// it sends from then on, at least n, it returns how many were sent and how many did not come
// back.
func lostOf(t *testing.T, l *lab.Lab, f prefix.Family, n int) (sent, lost int) {
	t.Helper()
	pods := l.Pods()
	flow, err := pods[0].StartFlow(t.Context(), pods[1], f, 500)
	if err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "first answers", func() bool { return flow.Stats().Answered >= 10 })
	before := flow.Stats().Sent
	waitUntil(t, fmt.Sprintf("%d packets", n), func() bool { return flow.Stats().Sent >= before+n })
	s := flow.Stop()
	first, _ := slices.BinarySearch(s.Lost, before)
	return s.Sent - before, len(s.Lost) - first
}
