// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// leftovers does not contain the device of the backend, because that belongs to the Scope.
func (b *Backend) leftovers() []backend.Leftover {
	if b.env.Network != "" { // with several networks, such objects belong to another daemon
		return nil
	}
	return []backend.Leftover{kernelPath{b.config.Port}}
}

// kernelPath consists of the objects with which earlier versions let the kernel carry the packets:
// an ipip device with UDP encapsulation, the FOU port that receives the datagrams (foo over UDP,
// linux/fou.h), and a table of nftables that checks their senders.
type kernelPath struct{ port int }

const senderTable = "flannel-udp"

func (k kernelPath) String() string {
	return fmt.Sprintf("kernel path of udp: device %s, FOU port %d, nftables table %s", deviceName, k.port, senderTable)
}

// Present implements backend.Leftover.
func (k kernelPath) Present() (bool, error) {
	device, err := formerDevice()
	if err != nil || device != nil {
		return device != nil, err
	}
	ports, err := k.fouPorts()
	if err != nil || len(ports) > 0 || nftables.Available() != nil {
		return len(ports) > 0, err
	}
	return nftables.HasTable(prefix.IPv4, senderTable)
}

// Remove implements backend.Leftover.
func (k kernelPath) Remove(context.Context) error {
	device, err := formerDevice()
	errs := []error{err}
	if device != nil {
		if err := netlink.LinkDel(device); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("delete link %s: %w", deviceName, err))
		}
	}

	ports, err := k.fouPorts()
	errs = append(errs, err)
	for _, f := range ports {
		errs = append(errs, deleteFOUPort(f))
	}

	if nftables.Available() == nil {
		errs = append(errs, nftables.RemoveTable(prefix.IPv4, senderTable))
	}
	return oneline.Join(errs...)
}

// formerDevice returns nil if there is no device of the kernel path.
func formerDevice() (netlink.Link, error) {
	link, err := netlink.LinkByName(deviceName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up link %s: %w", deviceName, err)
	}
	if tunnel, ok := link.(*netlink.Iptun); !ok || tunnel.EncapType == 0 {
		return nil, nil // the device of this version has the same name, but another type
	}
	return link, nil
}

// fouPorts returns those on any address, because that of the host may have changed.
func (k kernelPath) fouPorts() (ports []netlink.Fou, err error) {
	if _, err := netlink.FouFamilyId(); errors.Is(err, unix.ENOENT) {
		return nil, nil // the kernel has no FOU
	}
	all, err := netlink.FouList(unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("list FOU ports: %w", err)
	}

	for _, f := range all {
		if f.Port == k.port && f.Protocol == unix.IPPROTO_IPIP && f.EncapType == netlink.FOU_ENCAP_DIRECT {
			ports = append(ports, f)
		}
	}
	return ports, nil
}

// deleteFOUPort replaces netlink.FouDel, which finds only ports on all addresses.
func deleteFOUPort(f netlink.Fou) error {
	family, err := netlink.FouFamilyId()
	if err != nil {
		return fmt.Errorf("look up fou: %w", err)
	}

	attrs := []*nl.RtAttr{
		nl.NewRtAttr(netlink.FOU_ATTR_PORT, binary.BigEndian.AppendUint16(nil, uint16(f.Port))),
		nl.NewRtAttr(netlink.FOU_ATTR_AF, []byte{unix.AF_INET}),
	}
	if local := f.Local.To4(); local != nil && !local.IsUnspecified() {
		attrs = append(attrs, nl.NewRtAttr(netlink.FOU_ATTR_LOCAL_V4, local))
	}

	data := []byte{netlink.FOU_CMD_DEL, 1, 0, 0} // command and version
	for _, a := range attrs {
		data = append(data, a.Serialize()...)
	}

	req := nl.NewNetlinkRequest(family, unix.NLM_F_ACK)
	req.AddRawData(data)
	if _, err := req.Execute(unix.NETLINK_GENERIC, 0); err != nil {
		return fmt.Errorf("delete FOU port %d: %w", f.Port, err)
	}
	return nil
}
