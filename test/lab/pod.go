// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
)

// SubnetFile is the path at which a host's daemon writes its subnet by default.
const SubnetFile = "/run/flannel/subnet.env"

// PodBridge is the name of the bridge on each host that connects its pods.
const PodBridge = "cni0"

// Pod is a namespace connected to a bridge of its host. Its addresses and MTU come from the
// host's subnet file. Only a pod of AddEmptyPod gets them from another program, which also connects
// the pod.
type Pod struct {
	*Namespace
	host    *Host
	network string // name; empty if the daemon serves only one
	addrs   []netip.Addr
	mtu     int
}

// assignment is an address of a pod or a host, with its default route.
type assignment struct {
	own     netip.Prefix
	gateway netip.Addr
}

// Host returns the host that the pod is on.
func (p *Pod) Host() *Host { return p.host }

// Addrs returns the pod's addresses, IPv4 first. The slice must not be changed.
func (p *Pod) Addrs() []netip.Addr { return p.addrs }

// MTU returns the MTU of the pod's interface, in bytes.
func (p *Pod) MTU() int { return p.mtu }

// Addr returns the pod's address of family f, or the zero Addr if it has none.
func (p *Pod) Addr(f prefix.Family) netip.Addr {
	for _, a := range p.addrs {
		if prefix.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// AddPod adds a pod called host1/name. If name is empty, the pods of a host are called
// host1/pod1, host1/pod2 and so on. The subnet file must exist. The first call on a host creates
// the bridge.
func (h *Host) AddPod(ctx context.Context, name string) (*Pod, error) {
	return h.addPod(ctx, name, "", SubnetFile, PodBridge)
}

// AddNetworkPod adds a pod called host1/network in one of several networks of the host's daemon,
// behind the bridge of that network. The network's subnet file must exist.
func (h *Host) AddNetworkPod(ctx context.Context, network string) (*Pod, error) {
	return h.addPod(ctx, network, network, NetworkFile(network), networkBridge(network))
}

// AddPods adds one pod to the host. If the lab has several networks, it adds one in each network.
func (h *Host) AddPods(ctx context.Context) error {
	names := h.lab.networkNames()
	if len(names) == 0 {
		_, err := h.AddPod(ctx, "")
		return err
	}
	for _, network := range names {
		if _, err := h.AddNetworkPod(ctx, network); err != nil {
			return err
		}
	}
	return nil
}

func (h *Host) addPod(ctx context.Context, name, network, file, bridge string) (*Pod, error) {
	env, err := subnetfile.Load(h.Path(file))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name(), err)
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	number := len(h.pods) + 1
	if name == "" {
		name = fmt.Sprintf("pod%d", number)
	}

	n, err := newNamespace(h.Name()+"/"+name, enterNetNS)
	if err != nil {
		return nil, err
	}

	p := &Pod{Namespace: n, host: h, network: network, mtu: env.MTU}
	if err := p.connect(ctx, env, bridge, number); err != nil {
		n.close()
		return nil, fmt.Errorf("connect %s: %w", p.Name(), err)
	}
	h.pods = append(h.pods, p)
	return p, nil
}

// AddEmptyPod adds a pod called host1/name that has only a loopback interface. A CNI plugin can
// then connect it at NetNS. See also Adopt.
func (h *Host) AddEmptyPod(ctx context.Context, name string) (*Pod, error) {
	n, err := newNamespace(h.Name()+"/"+name, enterNetNS)
	if err != nil {
		return nil, err
	}
	if err := n.Netlink(ctx, loUp); err != nil {
		n.close()
		return nil, err
	}

	p := &Pod{Namespace: n, host: h}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pods = append(h.pods, p)
	return p, nil
}

// Adopt reads the addresses and the MTU of a pod whose eth0 another program, such as a CNI
// plugin, has created. It omits link-local addresses.
func (p *Pod) Adopt(ctx context.Context) error {
	return p.Netlink(ctx, func(h *netlink.Handle) error {
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find eth0 of %s: %w", p.Name(), err)
		}

		p.mtu = eth0.Attrs().MTU
		p.addrs = nil
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			addrs, err := h.AddrList(eth0, family)
			if err != nil {
				return fmt.Errorf("list addresses of %s: %w", p.Name(), err)
			}
			for _, a := range addrs {
				if addr, ok := netip.AddrFromSlice(a.IP); ok && !addr.IsLinkLocalUnicast() {
					p.addrs = append(p.addrs, addr.Unmap())
				}
			}
		}
		return nil
	})
}

func (p *Pod) connect(ctx context.Context, env subnetfile.File, bridge string, number int) error {
	var assigned []assignment
	for _, e := range env.Entries {
		gateway := e.Subnet.Addr().Next() // as in the subnet file
		addr := gateway
		for range number {
			addr = addr.Next()
		}
		if !e.Subnet.Contains(addr) {
			return fmt.Errorf("no address left in %s for pod %d", e.Subnet, number)
		}
		assigned = append(assigned, assignment{own: netip.PrefixFrom(addr, e.Subnet.Bits()), gateway: gateway})
		p.addrs = append(p.addrs, addr)
	}

	port := &netlink.Veth{
		LinkAttrs:     attrs(fmt.Sprintf("pod%d", number), env.MTU),
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(p.net.Fd()),
	}
	err := p.host.Netlink(ctx, func(h *netlink.Handle) error {
		if err := ensureBridge(h, bridge, env.MTU, assigned); err != nil {
			return err
		}
		return plug(h, port, bridge)
	})
	if err != nil {
		return err
	}

	err = p.Netlink(ctx, func(h *netlink.Handle) error {
		if err := loUp(h); err != nil {
			return err
		}
		_, err := configure(h, assigned)
		return err
	})
	if err != nil {
		return err
	}
	return plugged(ctx, p.host.Namespace, port.Name, bridge, p.Namespace)
}

// randomMAC belongs to no manufacturer.
func randomMAC() net.HardwareAddr {
	b := binary.BigEndian.AppendUint64(nil, rand.Uint64())[:6]
	b[0] = 0x02 // locally administered, and unicast
	return b
}

func ensureBridge(h *netlink.Handle, name string, mtu int, assigned []assignment) error {
	br, err := h.LinkByName(name)
	if err != nil {
		br = &netlink.Bridge{LinkAttrs: attrs(name, mtu)}

		// Without an address of its own, the bridge has the lowest MAC address of its ports.
		// This address can change when a pod is added, and pods send to the former address for
		// up to a minute.
		br.Attrs().HardwareAddr = randomMAC()
		if err := h.LinkAdd(br); err != nil {
			return fmt.Errorf("add bridge %s: %w", name, err)
		}
	}
	if err := h.LinkSetMTU(br, mtu); err != nil {
		return fmt.Errorf("set MTU of %s: %w", name, err)
	}

	for _, a := range assigned {
		if err := addAddr(h, br, netip.PrefixFrom(a.gateway, a.own.Bits())); err != nil {
			return err
		}
	}
	return setUp(h, br)
}
