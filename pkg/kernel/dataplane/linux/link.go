// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// linkIndex returns 0 if the device does not exist.
func (k *Kernel) linkIndex(name string) (int, error) {
	req, err := unix.NewIfreq(name)
	if err != nil { // no device can have such a name
		return 0, nil //nolint:nilerr // 0 means that the device does not exist
	}

	err = k.sock.control(func(fd int) error { return unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req) })
	if errors.Is(err, unix.ENODEV) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look up link %s: %w", name, err)
	}
	return int(req.Uint32()), nil
}

func (k *Kernel) applyLink(ctx context.Context, op dataplane.Op) error {
	want := op.Object.(dataplane.Link)
	index, err := k.linkIndex(want.Name)
	if err != nil {
		return err
	}

	if op.Delete {
		if index == 0 {
			return nil
		}
		err := k.links.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}, LinkType: want.Kind})
		if errors.Is(err, unix.ENODEV) { // another program was faster
			return nil
		}
		return err
	}

	if index == 0 {
		err = k.createLink(want)
	} else {
		err = k.changeLink(ctx, want, index)
	}
	if err != nil {
		return err
	}
	if err := k.setTxChecksum(want.Name, want.TxChecksum); err != nil {
		return err
	}
	return k.setUp(want)
}

// createLink uses the attributes of other flannel daemons, so that each can adopt a device of another.
func (k *Kernel) createLink(want dataplane.Link) error {
	var err error
	module := want.Kind
	switch want.Kind {
	case dataplane.KindVXLAN:
		err = k.createVXLAN(want)
	case dataplane.KindIPIP:
		err = k.createTunnel(want)
	case dataplane.KindIP6Tnl:
		err = k.createTunnel(want)
		module = "ip6_tunnel"
	case dataplane.KindWireGuard:
		err = k.links.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: want.Name, MTU: want.MTU}})
	default:
		return fmt.Errorf("cannot create a link of type %q", want.Kind)
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: this kernel has no %s (load the module %s; some distributions ship it in a package linux-modules-extra)",
			err, want.Kind, module)
	}
	return err
}

func (k *Kernel) createVXLAN(want dataplane.Link) error {
	under, err := k.underlay(want.VXLAN.Underlay)
	if err != nil {
		return err
	}
	err = k.links.LinkAdd(&netlink.Vxlan{
		LinkAttrs:    netlink.LinkAttrs{Name: want.Name, HardwareAddr: net.HardwareAddr(want.MAC[:]), MTU: want.MTU},
		VxlanId:      want.VXLAN.VNI,
		VtepDevIndex: under,
		SrcAddr:      net.IP(want.VXLAN.Local.AsSlice()),
		Port:         want.VXLAN.Port,
		Learning:     want.VXLAN.Learning,
		GBP:          want.VXLAN.GBP,
	})
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: another vxlan device has VNI %d and port %d", err, want.VXLAN.VNI, want.VXLAN.Port)
	}
	return err
}

func (k *Kernel) underlay(name string) (int, error) {
	index, err := k.linkIndex(name)
	if err == nil && index == 0 {
		err = fmt.Errorf("underlay device %s: %w", name, unix.ENODEV)
	}
	return index, err
}

// changeLink changes the attributes that differ, except for TxChecksum and Up. The device keeps its FDB
// and its routes and, unless its MAC changes, its neighbours.
func (k *Kernel) changeLink(ctx context.Context, want dataplane.Link, index int) error {
	state := dataplane.NewState()
	if _, err := k.readLink(want.Name, dataplane.Scope{}, state); err != nil {
		return err
	}
	have := state.Links[want.Name]
	if !have.Compatible(want) {
		return fmt.Errorf("cannot change the existing %s device into the wanted one", have.Kind)
	}

	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: want.Name, Index: index}}
	if have.VXLAN != want.VXLAN {
		if err := k.changeVXLAN(ctx, index, have.VXLAN, want.VXLAN); err != nil {
			return err
		}
	}
	if have.Tunnel != want.Tunnel {
		if err := k.links.LinkModify(tunnel(want)); err != nil { // the objects on the device stay
			return fmt.Errorf("change local address to %s: %w", want.Tunnel.Local, err)
		}
	}
	if have.MAC != want.MAC {
		if err := k.links.LinkSetHardwareAddr(link, net.HardwareAddr(want.MAC[:])); err != nil {
			return fmt.Errorf("set MAC %s: %w", want.MAC, err)
		}
	}
	if have.MTU != want.MTU {
		if err := k.links.LinkSetMTU(link, want.MTU); err != nil {
			return fmt.Errorf("set MTU %d: %w", want.MTU, err)
		}
	}
	return nil
}

// changeVXLAN sends only the attributes that differ, because the kernel refuses most
// attributes in a change, even if they are equal.
func (k *Kernel) changeVXLAN(ctx context.Context, index int, have, want dataplane.VXLAN) error {
	under, err := k.underlay(want.Underlay)
	if err != nil {
		return err
	}
	failed := k.sock.send(ctx, 1, func(_ int, m *message) {
		m.begin(unix.RTM_NEWLINK, 0, ifinfomsg(index)...)
		m.nest(unix.IFLA_LINKINFO, func() {
			m.attr(unix.IFLA_INFO_KIND, []byte("vxlan"))
			m.nest(unix.IFLA_INFO_DATA, func() {
				if have.Underlay != want.Underlay {
					m.attr32(unix.IFLA_VXLAN_LINK, uint32(under))
				}
				if have.Local != want.Local {
					typ := uint16(unix.IFLA_VXLAN_LOCAL)
					if want.Local.Is6() {
						typ = unix.IFLA_VXLAN_LOCAL6
					}
					m.addr(typ, want.Local)
				}
				if have.Learning != want.Learning {
					learning := []byte{0}
					if want.Learning {
						learning[0] = 1
					}
					m.attr(unix.IFLA_VXLAN_LEARNING, learning)
				}
			})
		})
	})
	if err := failed[0]; err != nil {
		return fmt.Errorf("change vxlan parameters: %w", err)
	}
	return nil
}

func (k *Kernel) setUp(want dataplane.Link) error {
	acceptRAOff(want.Name)
	if !want.Up {
		return nil
	}

	err := k.links.LinkSetUp(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: want.Name}})
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("set up: %w: another program listens on UDP port %d", err, want.VXLAN.Port)
	}
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// enableIPv6 lets a device have IPv6 addresses although sysctl -w net.ipv6.conf.default.disable_ipv6=1,
// as hardening guides recommend, has turned them off. The put that follows fails if that is not permitted.
func enableIPv6(dev string) { _ = os.WriteFile(disableIPv6(dev), []byte("0"), 0) }

func disableIPv6(dev string) string {
	return filepath.Join("/proc/sys/net/ipv6/conf", dev, "disable_ipv6")
}

// IPv6Off returns the name of the sysctl that keeps the device dev, which may not exist yet, from having IPv6
// addresses, if Apply is not permitted to change that. Otherwise it returns "".
func IPv6Off(dev string) string {
	for _, scope := range []string{dev, "default"} {
		value, err := os.ReadFile(disableIPv6(scope))
		switch {
		case err != nil: // the device does not exist
		case string(value) != "1\n" || unix.Access(disableIPv6(scope), unix.W_OK) == nil:
			return ""
		default:
			return "net.ipv6.conf." + strings.ReplaceAll(scope, ".", "/") + ".disable_ipv6"
		}
	}
	return ""
}

// acceptRAOff prevents router advertisements of pods from configuring the device. Nothing can be done
// if /proc/sys is read-only or IPv6 is disabled.
func acceptRAOff(dev string) {
	_ = os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", dev, "accept_ra"), []byte("0"), 0)
}
