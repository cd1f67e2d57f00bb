// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// Dumps are functions that each list one kind of the kernel's objects, an object a line, by name.
func Dumps() map[string]func() ([]string, error) {
	return map[string]func() ([]string, error){
		"links": describe(netlink.LinkList, func(l netlink.Link, device devices) string {
			a := l.Attrs()
			s := fmt.Sprintf("%d: %s type %s mtu %d state %s flags %s mac %s master %s",
				a.Index, a.Name, l.Type(), a.MTU, a.OperState, a.Flags, a.HardwareAddr, device.name(a.MasterIndex))
			if v, ok := l.(*netlink.Vxlan); ok {
				s += fmt.Sprintf(" vni %d port %d local %s underlay %s learning %v", v.VxlanId, v.Port, v.SrcAddr, device.name(v.VtepDevIndex), v.Learning)
			}
			if c := a.Statistics; c != nil {
				s += fmt.Sprintf(" received %d (%d errors, %d dropped) sent %d (%d errors, %d dropped)",
					c.RxPackets, c.RxErrors, c.RxDropped, c.TxPackets, c.TxErrors, c.TxDropped)
			}
			return s
		}),
		"addresses": describe(addresses, func(a netlink.Addr, device devices) string {
			return fmt.Sprintf("%s dev %s scope %d flags %#x", a.IPNet, device.name(a.LinkIndex), a.Scope, a.Flags)
		}),
		"routes": describe(routeList, func(r netlink.Route, device devices) string {
			return fmt.Sprintf("table %d type %d dev %s protocol %s: %s", r.Table, r.Type, device.name(r.LinkIndex), r.Protocol, r)
		}),
		"rules": describe(ruleList, func(r netlink.Rule, _ devices) string {
			return fmt.Sprintf("family %d: %s iif %s", r.Family, r, cmp.Or(r.IifName, "-"))
		}),
		"ipsec": describe(policies, func(p doctor.Policy, _ devices) string {
			return fmt.Sprintf("%s protocol %d port %d blocks %t lacks a security association %t", p, p.Protocol, p.Port, p.Blocks, p.Lacks)
		}),
		"tc-queues": describe(queues, func(q netlink.Qdisc, device devices) string {
			a := q.Attrs()
			s := fmt.Sprintf("dev %s %s handle %s parent %s", device.name(a.LinkIndex), q.Type(), netlink.HandleStr(a.Handle), netlink.HandleStr(a.Parent))
			if c := a.Statistics; c != nil && c.Basic != nil && c.Queue != nil {
				s += fmt.Sprintf(" sent %d packets dropped %d", c.Basic.Packets, c.Queue.Drops)
			}
			return s
		}),
		"tc-filters": describe(filters, filter),
		"bpf": describe(programs, func(p program, device devices) string {
			return fmt.Sprintf("dev %s %s program %d %s", device.name(p.device), p.hook, p.id, p.name())
		}),
		"neighbours": neighbours(netlink.FAMILY_ALL),
		"fdb":        neighbours(unix.AF_BRIDGE),
	}
}

func filter(f netlink.Filter, device devices) string {
	a := f.Attrs()
	parent := netlink.HandleStr(a.Parent)
	switch a.Parent {
	case netlink.HANDLE_MIN_INGRESS:
		parent = "ingress"
	case netlink.HANDLE_MIN_EGRESS:
		parent = "egress"
	}

	parts := []string{fmt.Sprintf("dev %s %s protocol %#x priority %d handle %#x %s", device.name(a.LinkIndex), parent, a.Protocol, a.Priority, a.Handle, f.Type())}
	var actions []netlink.Action
	switch f := f.(type) {
	case *netlink.BpfFilter:
		parts = append(parts, fmt.Sprintf("program %d %s", f.Id, f.Name))
	case *netlink.Flower:
		actions = f.Actions
	case *netlink.MatchAll:
		actions = f.Actions
	case *netlink.U32:
		actions = f.Actions
	}
	for _, a := range actions {
		parts = append(parts, fmt.Sprintf("action %s %s", a.Type(), a.Attrs().Action))
	}
	return strings.Join(parts, " ")
}

func neighbours(family int) func() ([]string, error) {
	list := func() ([]netlink.Neigh, error) { return netlink.NeighList(0, family) }
	return describe(list, func(n netlink.Neigh, device devices) string {
		return fmt.Sprintf("%s mac %s dev %s state %#x flags %#x", n.IP, n.HardwareAddr, device.name(n.LinkIndex), n.State, n.Flags)
	})
}

// devices has the names of devices by index.
type devices map[int]string

// name returns the name of a device, or its index if it is gone.
func (d devices) name(index int) string { return cmp.Or(d[index], strconv.Itoa(index)) }

// describe returns a function that lists objects, a line each.
func describe[T any](list func() ([]T, error), line func(T, devices) string) func() ([]string, error) {
	return func() ([]string, error) {
		names, err := deviceNames()
		if err != nil {
			return nil, err
		}
		all, err := dump(list)
		lines := make([]string, 0, len(all))
		for _, one := range all {
			lines = append(lines, line(one, names))
		}
		return lines, err
	}
}
