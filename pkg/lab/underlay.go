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

	"flanneld/pkg/prefix"
)

const router = 254 // the router's host number on every segment

// segmentAddr is the address of a host number on a segment.
func segmentAddr(f prefix.Family, segment, host int) netip.Prefix {
	if f == prefix.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(77 + segment), byte(host)}), 24)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x77, 5: byte(segment), 15: byte(host)}), 64)
}

// endpointAddrs are the router's addresses, by which every host reaches it.
func (l *Lab) endpointAddrs() []netip.Addr {
	var addrs []netip.Addr
	for s := range l.cfg.Segments {
		for _, f := range l.cfg.Families {
			addrs = append(addrs, segmentAddr(f, s, router).Addr())
		}
	}
	return addrs
}

// buildSegments makes a bridge for each segment. The bridges' own addresses
// make the namespace the router between them.
func (l *Lab) buildSegments(ctx context.Context) error {
	if err := l.underlay.boot(ctx); err != nil {
		return err
	}
	return l.underlay.Netlink(ctx, func(h *netlink.Handle) error {
		for s := range l.cfg.Segments {
			br := &netlink.Bridge{LinkAttrs: attrs(bridgeName(s), l.cfg.MTU)}
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

// attach gives host its eth0: the other end is a port of its segment's bridge.
func (l *Lab) attach(ctx context.Context, host *Host) error {
	port := &netlink.Veth{
		LinkAttrs:     attrs(host.Name(), l.cfg.MTU),
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(host.net.Fd()),
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
	err = host.Netlink(ctx, func(h *netlink.Handle) error {
		var addrs []netip.Prefix
		for _, f := range l.cfg.Families {
			addrs = append(addrs, segmentAddr(f, host.segment, host.number))
		}
		gateway := func(p netip.Prefix) netip.Addr {
			return segmentAddr(prefix.FamilyOf(p.Addr()), host.segment, router).Addr()
		}
		if err := configure(h, addrs, gateway); err != nil {
			return err
		}
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find eth0: %w", err)
		}
		host.mac = eth0.Attrs().HardwareAddr
		return nil
	})
	if err != nil {
		return err
	}
	return plugged(ctx, l.underlay, port.Name, bridgeName(host.segment), host.Namespace)
}

// carrierTimeout bounds the wait for a new link's carrier.
const carrierTimeout = 10 * time.Second

// plugged waits until packets pass from the far end's eth0 through port to
// bridge: where many links come and go the kernel takes a second to act on a new
// carrier, and drops what is sent before.
func plugged(ctx context.Context, near *Namespace, port, bridge string, far *Namespace) error {
	ctx, cancel := context.WithTimeoutCause(ctx, carrierTimeout, errors.New("no carrier"))
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for _, end := range []struct {
		of   *Namespace
		link string
	}{{far, "eth0"}, {near, port}, {near, bridge}} {
		for up := false; !up; {
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
			select {
			case <-tick.C:
			case <-ctx.Done():
				return fmt.Errorf("wait for %s: %w", end.link, context.Cause(ctx))
			}
		}
	}
	return nil
}

// maxLearned is the number of hosts up to which they resolve each other.
const maxLearned = 20

// pinNeighbours gives the hosts of a big lab permanent entries for each other.
// The kernel counts the resolved neighbours of all namespaces against one
// limit, 1024 unless the machine says otherwise, and a mesh of 32 hosts is
// beyond that.
func (l *Lab) pinNeighbours(ctx context.Context) error {
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

// plug adds a veth pair and makes its near end a port of bridge.
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

// configure sets up eth0: its addresses, and through each one's gateway a
// default route.
func configure(h *netlink.Handle, addrs []netip.Prefix, gateway func(netip.Prefix) netip.Addr) error {
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0: %w", err)
	}
	for _, a := range addrs {
		if err := addAddr(h, eth0, a); err != nil {
			return err
		}
	}
	if err := setUp(h, eth0); err != nil {
		return err
	}
	for _, a := range addrs {
		gw := gateway(a)
		r := &netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: gw.AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("add default route via %s: %w", gw, err)
		}
	}
	return nil
}

// boot brings lo up and makes the namespace forward.
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

// setUp sets up a link of the namespace that the calling thread is in, with a
// link-local address that is usable at once: without one an IPv6 router finds
// no neighbours.
func setUp(h *netlink.Handle, link netlink.Link) error {
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
	a.Name, a.MTU = name, mtu
	return a
}

func addAddr(h *netlink.Handle, link netlink.Link, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD // usable at once
	}
	if err := h.AddrReplace(link, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, link.Attrs().Name, err)
	}
	return nil
}

// ipNet keeps p's host bits, which an address has and a route has not.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// shape limits what goes through port towards its host.
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
		at.Parent, at.Handle = netlink.MakeHandle(1, 1), netlink.MakeHandle(2, 0)
	}
	if l.cfg.Rate == 0 {
		return nil
	}
	burst := max(l.cfg.Rate/100, math.MaxUint16+1) // a segmentation-offloaded packet must fit
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
