// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// TestHostBehindNAT checks that pods of all hosts reach each other if one host has a
// private address behind a NAT and publishes the NAT's address. The router drops packets
// that other hosts send to the private address itself.
func TestHostBehindNAT(t *testing.T) {
	t.Parallel()
	const public = "192.0.2.3"
	l := newLab(t, lab.Config{Segments: 3}, `{"Type":"vxlan"}`)
	private := l.Host(1).Addr(prefix.IPv4).String()
	nft(t, l.Underlay(), strings.NewReplacer("PUBLIC", public, "PRIVATE", private).Replace(`table ip nat {
		chain bypass {
			type filter hook prerouting priority raw
			iifname != "l2-1" ip daddr PRIVATE drop
		}
		chain in {
			type nat hook prerouting priority dstnat
			ip daddr PUBLIC dnat to PRIVATE
		}
		chain out {
			type nat hook postrouting priority srcnat
			ip saddr PRIVATE snat to PUBLIC
		}
	}`))
	for _, h := range l.Hosts() {
		// The kernel leaves checksums of packets between namespaces incomplete, and the
		// NAT cannot complete them. On a real wire they are complete.
		if out, err := h.Exec(testContext(t), "ethtool", "-K", "eth0", "tx", "off"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	startOne(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--public-ip=" + public}})
	for _, h := range l.Hosts()[1:] {
		startOne(t, h, lab.FlanneldOptions{})
	}
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)

	own := l.Host(1).Pods()[0].Addr(prefix.IPv4)
	published := ""
	for _, one := range leases(t, l) {
		if strings.HasPrefix(one.Key, own.String()[:strings.LastIndexByte(own.String(), '.')]+".0-") {
			published = one.PublicIP
		}
	}
	if published != public {
		t.Errorf("%s publishes %q, want %s", l.Host(1).Name(), published, public)
	}
	err := l.Host(1).Netlink(testContext(t), func(h *netlink.Handle) error {
		dev, err := h.LinkByName("flannel.1")
		if err != nil {
			return err
		}
		if v, ok := dev.(*netlink.Vxlan); !ok || v.SrcAddr.String() != private {
			return fmt.Errorf("device %+v, want local address %s", dev, private)
		}
		return nil
	})
	if err != nil {
		t.Errorf("flannel.1 of %s: %v", l.Host(1).Name(), err)
	}
}

// TestPodsWithTheMTUOfAnotherDaemon checks pods whose MTU is right for IPv4 and too large
// for IPv6, as if another daemon had created them. The host must answer IPv6 packets that
// are too big by ICMP, and TCP must still transfer data.
func TestPodsWithTheMTUOfAnotherDaemon(t *testing.T) {
	t.Parallel()
	const theirs, ours = 1450, 1430
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	ctx, pod, far := testContext(t), l.Host(1).Pods()[0], l.Host(2).Pods()[0]
	if pod.MTU() != ours || far.MTU() != ours {
		t.Fatalf("pods have MTU %d and %d, want %d", pod.MTU(), far.MTU(), ours)
	}
	for n, devices := range map[*lab.Namespace][]string{
		pod.Namespace:       {"eth0"},
		l.Host(1).Namespace: {"pod1", lab.PodBridge},
	} {
		for _, dev := range devices {
			if out, err := n.Exec(ctx, "ip", "link", "set", dev, "mtu", fmt.Sprint(theirs)); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
	}
	_, err := pod.Ping(ctx, far.Addr(prefix.IPv6), lab.Echo{Size: theirs, DontFragment: true})
	if !errors.Is(err, ping.ErrTooBig) || !strings.Contains(err.Error(), fmt.Sprintf("a router reported an MTU of %d", ours)) {
		t.Errorf("a packet of %d bytes: %v, want a router to report that it is too big", theirs, err)
	}
	if _, err := pod.Ping(ctx, far.Addr(prefix.IPv6), lab.Echo{Size: ours, DontFragment: true}); err != nil {
		t.Errorf("a packet of %d bytes: %v, want an answer", ours, err)
	}
	const least = 1e6 // bits per second
	for _, f := range dual {
		for _, way := range [][2]*lab.Pod{{pod, far}, {far, pod}} {
			bps, err := way[0].Throughput(ctx, way[1], f, 500*time.Millisecond)
			if err != nil || bps < least {
				t.Errorf("%s to %s by %s: %.0f bits per second, %v, want at least 1e6", way[0].Name(), way[1].Name(), f, bps, err)
			}
		}
	}
	expectMatrix(t, l)
}
