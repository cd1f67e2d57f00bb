// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

const router = 254 // the router's number on every segment, in place of a host number

// segmentAddr counts segments from 0 and hosts from 1. The host may be router.
func segmentAddr(f prefix.Family, segment, host int) netip.Prefix {
	if f == prefix.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(77 + segment), byte(host)}), 24)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x77, 5: byte(segment), 15: byte(host)}), 64)
}

// RouterAddr returns the router's address of family f on the first segment. The router has this
// address only if the lab uses that family.
func (l *Lab) RouterAddr(f prefix.Family) netip.Addr { return segmentAddr(f, 0, router).Addr() }

func (l *Lab) endpointAddrs() []netip.Addr {
	var addrs []netip.Addr
	for s := range l.cfg.Segments {
		for _, f := range l.cfg.Families {
			addrs = append(addrs, segmentAddr(f, s, router).Addr())
		}
	}
	return addrs
}

func (l *Lab) buildSegments(ctx context.Context) error {
	if err := l.underlay.boot(ctx); err != nil {
		return err
	}
	return l.underlay.Netlink(ctx, func(h *netlink.Handle) error {
		for s := range l.cfg.Segments {
			br := &netlink.Bridge{LinkAttrs: attrs(bridgeName(s), l.cfg.MTU)}

			// Without an address of its own, the bridge has the lowest MAC address of its ports.
			// This address can change when a host is added, and hosts that know the former address
			// do not reach the router.
			br.HardwareAddr = net.HardwareAddr{0x02, 0, 0, 0, 0x77, byte(s)}
			if err := h.LinkAdd(br); err != nil {
				return fmt.Errorf("add bridge %s: %w", br.Name, err)
			}

			for _, f := range l.cfg.Families {
				if err := addAddr(h, br, segmentAddr(f, s, router)); err != nil {
					return err
				}
			}
			if err := setUp(h, br); err != nil {
				return err
			}
		}
		return nil
	})
}

func bridgeName(segment int) string { return fmt.Sprintf("l2-%d", segment+1) }

func (l *Lab) attach(ctx context.Context, host *Host) error {
	port := &netlink.Veth{ // the end on the segment's bridge
		LinkAttrs:        attrs(host.Name(), l.cfg.MTU),
		PeerName:         "eth0",
		PeerHardwareAddr: host.mac, // none, which makes the kernel choose one, until the host is reinstalled
		PeerNamespace:    netlink.NsFd(host.net.Fd()),
	}
	err := l.underlay.Netlink(ctx, func(h *netlink.Handle) error {
		if err := plug(h, port, bridgeName(host.segment)); err != nil {
			return err
		}
		return l.shape(h, port)
	})
	if err != nil {
		return err
	}

	var assigned []assignment
	for _, f := range l.cfg.Families {
		assigned = append(assigned, assignment{
			own: segmentAddr(f, host.segment, host.number), gateway: segmentAddr(f, host.segment, router).Addr(),
		})
	}
	err = host.Netlink(ctx, func(h *netlink.Handle) error {
		eth0, err := configure(h, assigned)
		if err == nil {
			host.mac = eth0.Attrs().HardwareAddr
		}
		return err
	})
	if err != nil {
		return err
	}

	if err := plugged(ctx, l.underlay, port.Name, bridgeName(host.segment), host.Namespace); err != nil {
		return err
	}
	return l.answered(ctx, host)
}

// carrierTimeout limits the wait for the carrier of a new link, and for its addresses.
const carrierTimeout = 10 * time.Second

// answered waits until the host can ping itself and the router, because the kernel makes the routes of
// a new IPv6 address in the background.
func (l *Lab) answered(ctx context.Context, host *Host) error {
	ctx, cancel := context.WithTimeout(ctx, carrierTimeout)
	defer cancel()

	for _, f := range l.cfg.Families {
		for _, dst := range []netip.Addr{host.Addr(f), segmentAddr(f, host.segment, router).Addr()} {
			for {
				_, err := host.Ping(ctx, dst, Echo{Timeout: carrierTimeout / 5})
				if err == nil {
					break
				}
				if ctx.Err() != nil {
					return err
				}
			}
		}
	}
	return nil
}

func plugged(ctx context.Context, near *Namespace, port, bridge string, far *Namespace) error {
	// After many links have been created and removed, the kernel may take a second to notice a
	// new carrier, and drops packets until then.
	ctx, cancel := context.WithTimeoutCause(ctx, carrierTimeout, errors.New("no carrier"))
	defer cancel()
	for _, end := range []struct {
		of   *Namespace
		link string
	}{{far, "eth0"}, {near, port}, {near, bridge}} {
		for {
			up := false
			err := end.of.Netlink(ctx, func(h *netlink.Handle) error {
				link, err := h.LinkByName(end.link)
				up = err == nil && link.Attrs().OperState == netlink.OperUp
				return err
			})
			if err != nil {
				return fmt.Errorf("find %s: %w", end.link, err)
			}
			if up {
				break
			}

			if wait.For(ctx, 5*time.Millisecond) != nil {
				return fmt.Errorf("wait for %s: %w", end.link, context.Cause(ctx))
			}
		}
	}
	return nil
}

func (l *Lab) pinNeighbours(ctx context.Context) error {
	// The kernel limits the neighbours that it resolves in all namespaces together, to 1024 by
	// default (gc_thresh3). The entries of 33 hosts for each other exceed that limit.
	const maxLearned = 20
	if len(l.hosts) <= maxLearned {
		return nil
	}

	for _, host := range l.hosts {
		err := host.Netlink(ctx, func(h *netlink.Handle) error {
			eth0, err := h.LinkByName("eth0")
			if err != nil {
				return fmt.Errorf("find eth0: %w", err)
			}

			for _, peer := range l.hosts {
				if peer == host || peer.segment != host.segment {
					continue
				}
				for _, f := range l.cfg.Families {
					n := &netlink.Neigh{
						LinkIndex: eth0.Attrs().Index, State: netlink.NUD_PERMANENT,
						IP: peer.Addr(f).AsSlice(), HardwareAddr: peer.mac,
					}
					if err := h.NeighSet(n); err != nil {
						return fmt.Errorf("add neighbour %s: %w", peer.Addr(f), err)
					}
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s: %w", host.name, err)
		}
	}
	return nil
}

func plug(h *netlink.Handle, port *netlink.Veth, bridge string) error {
	if err := h.LinkAdd(port); err != nil {
		return fmt.Errorf("add veth %s: %w", port.Name, err)
	}

	br, err := h.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", bridge, err)
	}
	if err := h.LinkSetMaster(port, br); err != nil {
		return fmt.Errorf("add %s to %s: %w", port.Name, bridge, err)
	}
	return setUp(h, port)
}

func configure(h *netlink.Handle, assigned []assignment) (eth0 netlink.Link, err error) {
	if eth0, err = h.LinkByName("eth0"); err != nil {
		return nil, fmt.Errorf("find eth0: %w", err)
	}

	for _, a := range assigned {
		if err := addAddr(h, eth0, a.own); err != nil {
			return nil, err
		}
	}
	if err := setUp(h, eth0); err != nil {
		return nil, err
	}

	for _, a := range assigned {
		r := &netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: a.gateway.AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return nil, fmt.Errorf("add default route via %s: %w", a.gateway, err)
		}
	}
	return eth0, nil
}

func (n *Namespace) boot(ctx context.Context) error {
	return n.Netlink(ctx, func(h *netlink.Handle) error {
		for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0); err != nil {
				return err
			}
		}
		return loUp(h)
	})
}

func loUp(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	return setUp(h, lo)
}

func setUp(h *netlink.Handle, link netlink.Link) error {
	// Without duplicate address detection the link-local address can be used at once: an IPv6
	// router needs it to resolve neighbours.
	name := link.Attrs().Name
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/accept_dad", []byte("0"), 0); err != nil {
		return err
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

func attrs(name string, mtu int) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	a.MTU = mtu
	return a
}

func addAddr(h *netlink.Handle, link netlink.Link, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD // no duplicate address detection, so that the address can be used at once
	}
	if err := h.AddrReplace(link, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, link.Attrs().Name, err)
	}
	return nil
}

// ipNet keeps the host bits, because p is an address and its prefix length.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (l *Lab) shape(h *netlink.Handle, port netlink.Link) error {
	at := netlink.QdiscAttrs{
		LinkIndex: port.Attrs().Index,
		Handle:    netlink.MakeHandle(1, 0),
		Parent:    netlink.HANDLE_ROOT,
	}

	if l.cfg.Loss > 0 || l.cfg.Latency > 0 {
		netem := netlink.NewNetem(at, netlink.NetemQdiscAttrs{
			Latency: uint32(l.cfg.Latency.Microseconds()),
			Loss:    float32(l.cfg.Loss),
			Limit:   100_000,
		})
		if err := addQdisc(h, netem); err != nil {
			return fmt.Errorf("loss and latency: %w", err)
		}
		at.Parent = netlink.MakeHandle(1, 1)
		at.Handle = netlink.MakeHandle(2, 0)
	}

	if l.cfg.Rate == 0 {
		return nil
	}

	burst := max(l.cfg.Rate/100, math.MaxUint16+1) // large enough for a packet with segmentation offload
	tbf := &netlink.Tbf{
		QdiscAttrs: at,
		Rate:       l.cfg.Rate,
		Limit:      uint32(min(burst*4, math.MaxUint32)),
		Buffer:     netlink.Xmittime(l.cfg.Rate, uint32(min(burst, math.MaxUint32))),
	}
	if err := addQdisc(h, tbf); err != nil {
		return fmt.Errorf("rate: %w", err)
	}
	return nil
}

func addQdisc(h *netlink.Handle, q netlink.Qdisc) error {
	err := h.QdiscAdd(q)
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("this kernel has no %s queueing discipline", q.Type())
	}
	return err
}
