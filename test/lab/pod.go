// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
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
	text, err := os.ReadFile(h.Path(file))
	if err != nil {
		return nil, fmt.Errorf("%s: has no %s yet: %w", h.Name(), file, err)
	}
	env, err := parseSubnetEnv(string(text), file)
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

	env.bridge = bridge
	p := &Pod{Namespace: n, host: h, network: network, mtu: env.mtu}
	if err := p.connect(ctx, env, number); err != nil {
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

func (p *Pod) connect(ctx context.Context, env subnetEnv, number int) error {
	var assigned []assignment
	for _, bridge := range env.bridges {
		addr := bridge.Addr()
		for range number {
			addr = addr.Next()
		}
		if !bridge.Contains(addr) {
			return fmt.Errorf("no address left in %s for pod %d", bridge.Masked(), number)
		}
		assigned = append(assigned, assignment{own: netip.PrefixFrom(addr, bridge.Bits()), gateway: bridge.Addr()})
		p.addrs = append(p.addrs, addr)
	}

	port := &netlink.Veth{
		LinkAttrs:     attrs(fmt.Sprintf("pod%d", number), env.mtu),
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(p.net.Fd()),
	}
	err := p.host.Netlink(ctx, func(h *netlink.Handle) error {
		if err := ensureBridge(h, env); err != nil {
			return err
		}
		return plug(h, port, env.bridge)
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
	return plugged(ctx, p.host.Namespace, port.Name, env.bridge, p.Namespace)
}

// randomMAC belongs to no manufacturer.
func randomMAC() net.HardwareAddr {
	b := binary.BigEndian.AppendUint64(nil, rand.Uint64())[:6]
	b[0] = 0x02 // locally administered, and unicast
	return b
}

func ensureBridge(h *netlink.Handle, env subnetEnv) error {
	br, err := h.LinkByName(env.bridge)
	if err != nil {
		br = &netlink.Bridge{LinkAttrs: attrs(env.bridge, env.mtu)}

		// Without an address of its own, the bridge has the lowest MAC address of its ports.
		// This address can change when a pod is added, and pods send to the former address for
		// up to a minute.
		br.Attrs().HardwareAddr = randomMAC()
		if err := h.LinkAdd(br); err != nil {
			return fmt.Errorf("add bridge %s: %w", env.bridge, err)
		}
	}
	if err := h.LinkSetMTU(br, env.mtu); err != nil {
		return fmt.Errorf("set MTU of %s: %w", env.bridge, err)
	}

	for _, a := range env.bridges {
		if err := addAddr(h, br, a); err != nil {
			return err
		}
	}
	return setUp(h, br)
}

// subnetEnv is the part of the subnet file that pods use, and the name of their bridge.
type subnetEnv struct {
	bridges []netip.Prefix // addresses of the bridge, IPv4 first
	mtu     int
	bridge  string // name of the bridge, which is not from the file
}

func parseSubnetEnv(text, file string) (env subnetEnv, err error) {
	values := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		values[key] = value
	}

	for _, key := range []string{"FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"} {
		value, ok := values[key]
		if !ok {
			continue
		}
		p, err := netip.ParsePrefix(value)
		if err != nil {
			return env, fmt.Errorf("%s in %s: %w", key, file, err)
		}
		env.bridges = append(env.bridges, p)
	}
	if len(env.bridges) == 0 {
		return env, fmt.Errorf("%s names no subnet", file)
	}

	const minMTU = 68 // the least MTU of a link with IPv4
	env.mtu, err = strconv.Atoi(values["FLANNEL_MTU"])
	if err != nil || env.mtu < minMTU || env.mtu > maxMTU {
		return env, fmt.Errorf("FLANNEL_MTU in %s: want %d to %d, got %q", file, minMTU, maxMTU, values["FLANNEL_MTU"])
	}
	return env, nil
}
