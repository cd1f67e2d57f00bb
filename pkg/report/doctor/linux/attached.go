// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// attached returns what may drop packets at devices, by rules that are not read: filters of tc that have dropped some, and
// programs for BPF.
func attached(devices []string) ([]doctor.Attached, error) {
	links, err := dump(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	queues, err := dump(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	if err != nil {
		return nil, err
	}

	var all []doctor.Attached
	for _, link := range links {
		own := link.Attrs()
		if !slices.Contains(devices, own.Name) {
			continue
		}
		add := func(format string, args ...any) {
			all = append(all, doctor.Attached{Dev: own.Name, What: fmt.Sprintf(format, args...)})
		}

		for _, q := range queues {
			// The kernel counts what filters drop as drops of their queue. Other queues drop packets of any busy host.
			filters := q.Type() == "clsact" || q.Type() == "ingress"
			if c := q.Attrs().Statistics; filters && q.Attrs().LinkIndex == own.Index && c != nil && c.Queue.Drops > 0 {
				add("tc (%s, %d packets dropped)", q.Type(), c.Queue.Drops)
			}
		}
		if own.Xdp != nil && own.Xdp.Attached {
			add("XDP program %d", own.Xdp.ProgId)
		}
		for _, where := range []uint32{unix.BPF_TCX_INGRESS, unix.BPF_TCX_EGRESS} {
			if n := programs(own.Index, where); n > 0 {
				add("tcx (%d BPF programs)", n)
			}
		}
	}
	return all, nil
}

// programs returns the number of programs for BPF at a device. Linux before 6.6 has none there.
func programs(device int, where uint32) int {
	query := struct { // of union bpf_attr
		device, where, _, _ uint32
		_                   uint64
		count, _            uint32
		_                   [4]uint64
	}{device: uint32(device), where: where}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&query)), unsafe.Sizeof(query))
	if errno != 0 {
		return 0
	}
	return int(query.count)
}
