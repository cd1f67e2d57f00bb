// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestKernelAttached checks that filters count only if they have dropped packets, and programs always.
func TestKernelAttached(t *testing.T) {
	enterNamespace(t)
	shell(t, "ip link add one type veth peer name two && ip link set one up && ip link set two up && ip addr add 192.0.2.1/24 dev one")
	expect := func(when string, want ...string) {
		t.Helper()
		have, err := Attached(status.Report{Interface: status.Interface{Name: "one"}}, nil)
		if err != nil || fmt.Sprint(have) != fmt.Sprint(want) {
			t.Errorf("%s: %v, %v, want %v", when, have, err, want)
		}
	}

	// expectDump checks the lines about the device in a part of the archive, without the numbers that the kernel chooses.
	expectDump := func(part string, want ...string) {
		t.Helper()
		lines, err := Dumps()[part]()
		var have []string
		for _, l := range lines {
			if strings.HasPrefix(l, "dev one ") {
				have = append(have, regexp.MustCompile(`(program|sent) [1-9]\d*`).ReplaceAllString(l, "$1 N"))
			}
		}
		if err != nil || !slices.Equal(have, want) {
			t.Errorf("%s: %q, %v, want %q", part, have, err, want)
		}
	}

	expect("nothing is attached")
	// The program returns 2 (drop) for IPv4, and -1 (no decision) otherwise.
	shell(t, "tc qdisc add dev one clsact && tc filter add dev one egress bpf da bytecode '4,40 0 0 12,21 0 1 2048,6 0 0 2,6 0 0 4294967295'")
	expect("no packet was dropped")
	send(t)
	send(t)
	expect("packets were dropped", "{one tc (clsact, 2 packets dropped)}")
	one, err := netlink.LinkByName("one")
	if err != nil {
		t.Fatal(err)
	}
	inward := netlink.FilterAttrs{LinkIndex: one.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Protocol: unix.ETH_P_ALL, Priority: 7, Handle: 1}
	if err := netlink.FilterAdd(&netlink.BpfFilter{FilterAttrs: inward, Fd: int(loadProgram(t, unix.BPF_PROG_TYPE_SCHED_CLS)), Name: "look.o:[in]", DirectAction: true}); err != nil {
		t.Fatal(err)
	}
	expectDump("tc-queues", "dev one noqueue handle none parent root sent 0 packets dropped 0", "dev one clsact handle ffff:0 parent ingress sent N packets dropped 2")
	expectDump("tc-filters", "dev one ingress protocol 0x3 priority 7 handle 0x1 bpf program N look.o:[in]", "dev one egress protocol 0x3 priority 49152 handle 0x1 bpf program 0 ")
	const code = "bpf bytecode '1,6 0 0 0'"
	shell(t, "tc qdisc del dev one clsact && tc qdisc add dev one ingress && tc filter add dev one ingress "+code)
	shell(t, "tc qdisc add dev one handle 5: root htb && tc filter add dev one parent 5: "+code)
	expectDump("tc-filters", "dev one 5:0 protocol 0x3 priority 49152 handle 0x1 bpf program 0 ", "dev one ingress protocol 0x3 priority 49152 handle 0x1 bpf program 0 ")
	shell(t, "tc qdisc del dev one ingress && tc qdisc del dev one root")

	link := mustBPF(t, unix.BPF_LINK_CREATE, struct{ program, device, where, flags uint32 }{
		loadProgram(t, unix.BPF_PROG_TYPE_SCHED_CLS), uint32(one.Attrs().Index), unix.BPF_TCX_INGRESS, 0,
	})
	expect("a program for tcx", "{one tcx (1 BPF programs)}")
	expectDump("bpf", "dev one tcx ingress program N look")
	if err := unix.Close(int(link)); err != nil {
		t.Fatal(err)
	}
	expect("the program is gone")

	if err := netlink.LinkSetXdpFd(one, int(loadProgram(t, unix.BPF_PROG_TYPE_XDP))); err != nil {
		t.Fatal(err)
	}
	if have, err := Attached(status.Report{Interface: status.Interface{Name: "one"}}, nil); err != nil || len(have) != 1 || !strings.HasPrefix(have[0].What, "XDP program ") {
		t.Errorf("a program for XDP: %v, %v", have, err)
	}
	expectDump("bpf", "dev one XDP program N look")

	// A container may lack the right to ask. XDP is known all the same, because the link names it.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var rights [2]unix.CapUserData
	if err := unix.Capget(&header, &rights[0]); err != nil {
		t.Fatal(err)
	}
	rights[0].Effective, rights[1].Effective = 0, 0
	if err := unix.Capset(&header, &rights[0]); err != nil { // of this thread
		t.Fatal(err)
	}
	if all, err := programs(); !errors.Is(err, unix.EPERM) || len(all) != 1 {
		t.Errorf("without rights: %v, %v, want the program for XDP and an error", all, err)
	}
}

// TestFilterWithAction checks the line of a filter that the kernels of test machines need not have.
func TestFilterWithAction(t *testing.T) {
	drop := &netlink.GenericAction{ActionAttrs: netlink.ActionAttrs{Action: netlink.TC_ACT_SHOT}}
	f := &netlink.MatchAll{FilterAttrs: netlink.FilterAttrs{LinkIndex: 3, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1}, Actions: []netlink.Action{drop}}
	if got, want := filter(f, devices{3: "eth0"}), "dev eth0 egress protocol 0x0 priority 1 handle 0x0 matchall action generic shot"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// enterNamespace gives the goroutine of the test a network namespace of its own.
func enterNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
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

// loadProgram loads a program that returns 0, with the name look, and returns its file descriptor.
func loadProgram(t *testing.T, kind uint32) uint32 {
	t.Helper()
	code := [2]uint64{0xb7, 0x95} // r0 = 0; exit
	license := [4]byte{'G', 'P', 'L'}
	return mustBPF(t, unix.BPF_PROG_LOAD, struct {
		kind, count   uint32
		code, license unsafe.Pointer
		_             [3]uint64
		name          [16]byte
		_             [7]uint64
	}{kind: kind, count: 2, code: unsafe.Pointer(&code), license: unsafe.Pointer(&license), name: [16]byte{'l', 'o', 'o', 'k'}})
}

// mustBPF makes a system call, and returns the file descriptor that it opens.
func mustBPF[T any](t *testing.T, command uintptr, attributes T) uint32 {
	t.Helper()
	fd, errno := bpf(command, &attributes)
	if errno != 0 {
		t.Fatalf("bpf(%d): %v", command, errno)
	}
	return uint32(fd)
}
