// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/oneline"
)

// receiver is a FOU port (foo over UDP, linux/fou.h): the kernel unpacks IPv4 packets from
// the datagrams that arrive at local. The kernel does not announce when a port is deleted.
type receiver struct{ local netip.AddrPort }

// fouMissing returns an error if the kernel has no FOU at present.
func fouMissing() error {
	_, err := netlink.FouFamilyId()
	if errors.Is(err, unix.ENOENT) {
		return errors.New("the kernel has no fou (load the module fou)")
	}
	if err != nil {
		return fmt.Errorf("look up fou: %w", err)
	}
	return nil
}

// list returns the FOU ports with the number of r, on any address, that unpack IPv4 packets.
func (r receiver) list() (ports []netlink.Fou, err error) {
	all, err := netlink.FouList(unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("list FOU ports: %w", err)
	}
	for _, f := range all {
		if f.Port == int(r.local.Port()) && f.Protocol == unix.IPPROTO_IPIP && f.EncapType == netlink.FOU_ENCAP_DIRECT {
			ports = append(ports, f)
		}
	}
	return ports, nil
}

// address returns the address on which f receives, or 0.0.0.0 if f receives on all addresses,
// as before Linux 5.2.
func address(f netlink.Fou) netip.Addr {
	if a, ok := netip.AddrFromSlice(f.Local.To4()); ok {
		return a
	}
	return netip.IPv4Unspecified()
}

func (r receiver) is(f netlink.Fou) bool {
	a := address(f)
	return a == r.local.Addr() || a.IsUnspecified()
}

// present reports whether the kernel has r, or a FOU port with the same number on all
// addresses.
func (r receiver) present() (bool, error) {
	ports, err := r.list()
	return slices.ContainsFunc(ports, r.is), err
}

// ensure creates r if present would report false, and deletes the other FOU ports with its
// number, which belong to a former address of this host. missing reports whether r had to be
// created, also if that has failed.
func (r receiver) ensure() (missing bool, err error) {
	ports, err := r.list()
	if err != nil {
		return false, err
	}
	missing = true
	for _, f := range ports {
		if r.is(f) {
			missing = false
		} else if err := command(netlink.FOU_CMD_DEL, netip.AddrPortFrom(address(f), r.local.Port())); err != nil {
			return false, err
		}
	}
	if !missing {
		return false, nil
	}
	err = command(netlink.FOU_CMD_ADD, r.local)
	if errors.Is(err, unix.EADDRINUSE) {
		err = fmt.Errorf("%w: another program uses the port", err)
	}
	return true, err
}

// command adds or deletes the FOU port with the address and the number in at. cmd is FOU_CMD_ADD
// or FOU_CMD_DEL. The attributes are those of linux/fou.h. The library's own functions do not
// support a port with an address.
func command(cmd uint8, at netip.AddrPort) error {
	family, err := netlink.FouFamilyId()
	if err != nil {
		return fmt.Errorf("look up fou: %w", err)
	}
	req := nl.NewNetlinkRequest(family, unix.NLM_F_ACK)
	data := []byte{cmd, 1, 0, 0} // command and version
	for _, a := range []*nl.RtAttr{
		nl.NewRtAttr(netlink.FOU_ATTR_PORT, binary.BigEndian.AppendUint16(nil, at.Port())),
		nl.NewRtAttr(netlink.FOU_ATTR_AF, []byte{unix.AF_INET}),
		nl.NewRtAttr(netlink.FOU_ATTR_IPPROTO, []byte{unix.IPPROTO_IPIP}),
		nl.NewRtAttr(netlink.FOU_ATTR_TYPE, []byte{netlink.FOU_ENCAP_DIRECT}),
	} {
		data = append(data, a.Serialize()...)
	}
	if !at.Addr().IsUnspecified() {
		data = append(data, nl.NewRtAttr(netlink.FOU_ATTR_LOCAL_V4, at.Addr().AsSlice()).Serialize()...)
	}
	req.AddRawData(data)
	if _, err := req.Execute(unix.NETLINK_GENERIC, 0); err != nil {
		verb := "add"
		if cmd == netlink.FOU_CMD_DEL {
			verb = "delete"
		}
		return fmt.Errorf("%s FOU port %s: %w", verb, at, err)
	}
	return nil
}

// remove removes the FOU ports with the number of r, on any address. It returns nil if there
// are none.
func (r receiver) remove() error {
	if fouMissing() != nil {
		return nil // without FOU there are no ports
	}
	ports, err := r.list()
	errs := []error{err}
	for _, f := range ports {
		errs = append(errs, command(netlink.FOU_CMD_DEL, netip.AddrPortFrom(address(f), r.local.Port())))
	}
	return oneline.Join(errs...)
}

// removeAll removes all objects of the kernel path: the device with the routes to it, the
// port, and the filter.
func (r receiver) removeAll() error {
	return oneline.Join(removeDevice(), r.remove(), removeFilter())
}

// removeDevice removes the device if it belongs to the kernel path. It returns nil if there is
// no such device.
func removeDevice() error {
	link, err := netlink.LinkByName(deviceName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up link %s: %w", deviceName, err)
	}
	if tunnel, ok := link.(*netlink.Iptun); !ok || tunnel.EncapType == 0 {
		return nil
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete link %s: %w", deviceName, err)
	}
	return nil
}
