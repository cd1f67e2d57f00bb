package lab_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"flanneld/pkg/lab"
	"flanneld/pkg/ping"
	"flanneld/pkg/prefix"
)

// A smaller link on the way is reported to a pod that must not fragment.
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
		_, err := l.Host(1).Ping(t.Context(), l.Host(2).Addr(f), ping.Options{Size: 1400, DontFragment: true})
		if !errors.Is(err, ping.ErrTooBig) || !strings.Contains(err.Error(), "1300") {
			t.Errorf("%v: %v, want too big for 1300", f, err)
		}
		_, err = l.Host(1).Ping(t.Context(), netip.MustParsePrefix(map[prefix.Family]string{
			prefix.IPv4: "192.168.77.99/32", prefix.IPv6: "fd00:77::99/128"}[f]).Addr(), ping.Options{Timeout: 50 * time.Millisecond})
		if err == nil || !strings.HasSuffix(err.Error(), "no answer") {
			t.Errorf("%v: %v, want no answer", f, err)
		}
	}
}

func TestKernelFlowCountsLoss(t *testing.T) {
	l := newLab(t, lab.Config{Families: dual, Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	handMade(t, l, 1500)
	pods := l.Pods()
	flow, err := pods[0].StartFlow(t.Context(), pods[1], prefix.IPv4, 500)
	if err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "100 packets", func() bool { return flow.Stats().Answered >= 100 })
	if lost := flow.Stats().Lost; len(lost) > 2 { // two may be on their way
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
			return nl.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: podSubnet(prefix.IPv4, 1).Addr().AsSlice()})
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
	handMade(t, l, 1500)
	pods := l.Pods()
	bps, err := pods[0].Throughput(t.Context(), pods[1], prefix.IPv6, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if bps < 5e6 || bps > 15e6 {
		t.Errorf("%.1f Mbit/s through 10 Mbit/s", bps/1e6)
	}

	cfg.Latency = 20 * time.Millisecond
	l, err = lab.New(t.Context(), cfg)
	if err != nil {
		if want := "no netem queueing discipline"; !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		return
	}
	defer l.Close()
	rtt, err := l.Host(1).Ping(t.Context(), l.Host(2).Addr(prefix.IPv4), ping.Options{})
	if err != nil || rtt < 40*time.Millisecond {
		t.Errorf("round trip %v, %v: want 40 ms at least", rtt, err)
	}
}
