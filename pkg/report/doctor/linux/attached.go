// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// Attached returns what may drop packets at the devices of a network and at its bridges, by rules that are not read:
// filters of tc that have dropped some, and programs for BPF.
func Attached(r status.Report, bridges []doctor.Bridge) ([]doctor.Attached, error) {
	devices := append(slices.Clone(r.Network.Devices), r.Interface.Name)
	for _, b := range bridges {
		devices = append(devices, b.Name)
	}
	links, err := dump(netlink.LinkList)
	queues, failed := dump(queues)
	if err = cmp.Or(err, failed); err != nil {
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
			if ids, err := tcx(own.Index, where); err == nil && len(ids) > 0 {
				add("tcx (%d BPF programs)", len(ids))
			}
		}
	}
	return all, nil
}

func queues() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) }

// filters returns the filters of all queues, even with an error. The kernel lists those of one parent at a time.
func filters() (all []netlink.Filter, err error) {
	queues, err := dump(queues)
	for _, q := range queues {
		parents := []uint32{q.Attrs().Handle}
		if q.Type() == "clsact" {
			parents = []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS}
		}
		device := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: q.Attrs().LinkIndex}}
		for _, parent := range parents {
			found, failed := dump(func() ([]netlink.Filter, error) { return netlink.FilterList(device, parent) })
			all = append(all, found...)
			err = oneline.Join(err, failed)
		}
	}
	return all, err
}

// program is a program for BPF at a device.
type program struct {
	device int
	hook   string
	id     uint32
}

// programs returns the programs at all devices that are no filters, even with an error.
func programs() (all []program, err error) {
	links, err := dump(netlink.LinkList)
	for _, link := range links {
		own := link.Attrs()
		if own.Xdp != nil && own.Xdp.Attached {
			all = append(all, program{own.Index, "XDP", own.Xdp.ProgId})
		}
		for i, hook := range []string{"tcx ingress", "tcx egress"} {
			ids, failed := tcx(own.Index, uint32(unix.BPF_TCX_INGRESS+i))
			err = cmp.Or(err, failed) // most often the same for all
			for _, id := range ids {
				all = append(all, program{own.Index, hook, id})
			}
		}
	}
	return all, err
}

// tcx returns the programs for BPF at a device, in the order in which they run. Linux before 6.6 has none there.
func tcx(device int, where uint32) ([]uint32, error) {
	var pinned runtime.Pinner
	defer pinned.Unpin()
	ids := make([]uint32, 64) // BPF_MPROG_MAX
	pinned.Pin(&ids[0])
	query := struct { // of union bpf_attr
		device, where, _, _ uint32
		ids                 uint64
		count, _            uint32
		_                   [4]uint64
	}{device: uint32(device), where: where, ids: uint64(uintptr(unsafe.Pointer(&ids[0]))), count: uint32(len(ids))}
	switch _, errno := bpf(unix.BPF_PROG_QUERY, &query); errno {
	case 0:
		return ids[:query.count], nil
	case unix.EINVAL, unix.ENODEV: // an old kernel, or the device is gone
		return nil, nil
	default: // such as the seccomp profile of a container
		return nil, fmt.Errorf("ask for the programs of tcx: %w", errno)
	}
}

// name returns the name of a program, or nothing if it has none, or this process may not ask for it.
func (p program) name() string {
	fd, errno := bpf(unix.BPF_PROG_GET_FD_BY_ID, &struct{ id, _, _ uint32 }{id: p.id})
	if errno != 0 {
		return ""
	}
	defer unix.Close(int(fd))

	var pinned runtime.Pinner
	defer pinned.Unpin()
	info := &struct { // the start of struct bpf_prog_info
		_    [8]uint64
		name [16]byte
	}{}
	pinned.Pin(info)
	_, errno = bpf(unix.BPF_OBJ_GET_INFO_BY_FD, &struct {
		fd, size uint32
		info     uint64
	}{uint32(fd), uint32(unsafe.Sizeof(*info)), uint64(uintptr(unsafe.Pointer(info)))})
	if errno != 0 {
		return ""
	}
	return unix.ByteSliceToString(info.name[:])
}

// bpf makes a system call with a part of union bpf_attr.
func bpf[T any](command uintptr, attributes *T) (fd uintptr, errno unix.Errno) {
	fd, _, errno = unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(attributes)), unsafe.Sizeof(*attributes))
	return fd, errno
}
