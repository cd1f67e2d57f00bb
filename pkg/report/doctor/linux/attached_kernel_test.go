// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestKernelAttached checks that filters count only if they have dropped packets, and programs always.
func TestKernelAttached(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	shell(t, "ip link add one type veth peer name two && ip link set one up && ip link set two up && ip addr add 192.0.2.1/24 dev one")
	expect := func(when string, want ...string) {
		t.Helper()
		have, err := attached([]string{"one"})
		if err != nil || fmt.Sprint(have) != fmt.Sprint(want) {
			t.Errorf("%s: %v, %v, want %v", when, have, err, want)
		}
	}

	expect("nothing is attached")
	// The program returns 2 (drop) for IPv4, and -1 (no decision) otherwise.
	shell(t, "tc qdisc add dev one clsact && tc filter add dev one egress bpf da bytecode '4,40 0 0 12,21 0 1 2048,6 0 0 2,6 0 0 4294967295'")
	expect("no packet was dropped")
	send(t)
	send(t)
	expect("packets were dropped", "{one tc (clsact, 2 packets dropped)}")
	shell(t, "tc qdisc del dev one clsact")

	one, err := netlink.LinkByName("one")
	if err != nil {
		t.Fatal(err)
	}
	link := bpf(t, unix.BPF_LINK_CREATE, struct{ program, device, where, flags uint32 }{
		loadProgram(t, unix.BPF_PROG_TYPE_SCHED_CLS), uint32(one.Attrs().Index), unix.BPF_TCX_INGRESS, 0,
	})
	expect("a program for tcx", "{one tcx (1 BPF programs)}")
	if err := unix.Close(int(link)); err != nil {
		t.Fatal(err)
	}
	expect("the program is gone")

	if err := netlink.LinkSetXdpFd(one, int(loadProgram(t, unix.BPF_PROG_TYPE_XDP))); err != nil {
		t.Fatal(err)
	}
	if have, err := attached([]string{"one"}); err != nil || len(have) != 1 || !strings.HasPrefix(have[0].What, "XDP program ") {
		t.Errorf("a program for XDP: %v, %v", have, err)
	}
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// send sends a packet on the device.
func send(t *testing.T) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "udp", "192.0.2.255:9")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = conn.Write([]byte{1}) // fails if the packet is dropped at once
	_ = conn.Close()
}

// loadProgram loads a program that returns 0, and returns its file descriptor.
func loadProgram(t *testing.T, kind uint32) uint32 {
	t.Helper()
	code := [2]uint64{0xb7, 0x95} // r0 = 0; exit
	license := [4]byte{'G', 'P', 'L'}
	return bpf(t, unix.BPF_PROG_LOAD, struct {
		kind, count   uint32
		code, license unsafe.Pointer
		_             [12]uint64
	}{kind: kind, count: 2, code: unsafe.Pointer(&code), license: unsafe.Pointer(&license)})
}

// bpf makes a system call, and returns the file descriptor that it opens.
func bpf[T any](t *testing.T, command uintptr, attributes T) uint32 {
	t.Helper()
	fd, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(&attributes)), unsafe.Sizeof(attributes))
	if errno != 0 {
		t.Fatalf("bpf(%d): %v", command, errno)
	}
	return uint32(fd)
}
