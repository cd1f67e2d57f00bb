// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Offsets in bytes in a message, which begins with struct nlmsghdr and, for a neighbour,
// struct ndmsg.
const (
	offsetType    = 4
	offsetPort    = 12
	offsetIfindex = unix.NLMSG_HDRLEN + 4
)

// maxFiltered is the maximum number of devices for which filter makes a BPF program. The program
// compares the device of a message with each of them, and a jump skips at most 255 instructions.
const maxFiltered = 64

// filter makes the kernel drop announcements that this process would ignore, so that they do not wake it:
//   - changes of routes, nexthop objects and neighbours through the socket with the given port, which this
//     process has made itself, as far as the messages contain the port;
//   - changes of neighbours on other devices: on a host with a thousand pods they happen all the time.
//
// conn is the socket that receives announcements. With more than maxFiltered devices everything is delivered.
func filter(conn *netlink.Conn, port uint32, devices []int) error {
	if len(devices) > maxFiltered {
		return conn.RemoveBPF()
	}

	const (
		deliver = 1 << 18
		drop    = 0
	)

	// The classic filter reads big-endian numbers; these are in host order.
	host16 := func(v uint16) uint32 {
		return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, v)))
	}

	host32 := func(v uint32) uint32 {
		return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, v))
	}

	// A jump contains the number of instructions to skip. The last two instructions are
	// the verdicts drop and deliver.
	n := uint8(len(devices))
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offsetType, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_NEWROUTE), SkipTrue: 6},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_DELROUTE), SkipTrue: 5},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_NEWNEXTHOP), SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_DELNEXTHOP), SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_NEWNEIGH), SkipTrue: 5},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host16(unix.RTM_DELNEIGH), SkipTrue: 4},
		bpf.RetConstant{Val: deliver},
		// Routes and nexthop objects.
		bpf.LoadAbsolute{Off: offsetPort, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host32(port), SkipTrue: n + 4},
		bpf.RetConstant{Val: deliver},
		// Neighbours and FDB entries.
		bpf.LoadAbsolute{Off: offsetPort, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: host32(port), SkipTrue: n + 1},
		bpf.LoadAbsolute{Off: offsetIfindex, Size: 4},
	}

	for i, index := range devices {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: host32(uint32(index)), SkipTrue: n - uint8(i)})
	}
	program = append(program, bpf.RetConstant{Val: drop}, bpf.RetConstant{Val: deliver})

	raw, err := bpf.Assemble(program)
	if err != nil {
		return err
	}
	return conn.SetBPF(raw)
}
