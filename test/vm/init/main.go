// SPDX-License-Identifier: Apache-2.0

// Command init is the first program in the guest of test/vm. It prepares the guest, runs the
// tests in the list of jobs, and then ends the guest.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
	"github.com/flanneld/flanneld/test/vm/job"
)

func main() {
	if err := must.Catch(run); err != nil {
		fmt.Fprintln(os.Stderr, "init:", err) // written to the console
	}
	unix.Sync()
	// qemu runs with -no-reboot, so it ends instead of restarting the machine.
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART); err != nil {
		fmt.Fprintln(os.Stderr, "init:", err)
	}
	os.Exit(1) // the kernel panics when init exits, which ends the machine too
}

func run() {
	for _, m := range []struct{ kind, dir string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"cgroup2", "/sys/fs/cgroup"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
	} {
		must.Do(unix.Mount(m.kind, m.dir, m.kind, 0, ""))
	}

	for key, value := range map[string]string{"PATH": "/usr/sbin:/usr/bin", "HOME": "/root", "TMPDIR": "/tmp", "EMULATED": "1"} {
		must.Do(os.Setenv(key, value))
	}

	port := openPort()
	defer port.Close()
	traceDrops()

	for _, args := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		// An emulated CPU may stop for seconds. After three requests without an answer the kernel would take
		// a neighbour for dead, and drop packets to it. New devices, also those of other network namespaces,
		// get these values.
		{"sysctl", "-qw", "net.ipv4.neigh.default.ucast_solicit=60", "net.ipv4.neigh.default.mcast_solicit=60",
			"net.ipv6.neigh.default.ucast_solicit=60", "net.ipv6.neigh.default.mcast_solicit=60"},
		// For the same reason packets between namespaces may wait long for the CPU. The kernel drops packets
		// for which this queue has no place; by default it has 1000 places.
		{"sysctl", "-qw", "net.core.netdev_max_backlog=100000"},
		{"modprobe", "tun"}, // the kernel does not load it on demand, because its device file exists only after loading
	} {
		command(args...)
	}
	keepStaticKeys()
	text := must.Get(os.ReadFile(job.File))
	var jobs []job.Job
	must.Do(json.Unmarshal(text, &jobs))

	for _, j := range jobs {
		var uptime unix.Timespec
		must.Do(unix.ClockGettime(unix.CLOCK_BOOTTIME, &uptime))
		args := j.Command(time.Duration(uptime.Nano()))
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = j.Dir
		cmd.Stdout = port
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) { // tests have failed, which their output says
			must.Fail("run %s: %w", cmd, err)
		}
	}
}

func command(args ...string) {
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		must.Fail("run %q: %w: %s", args, err, out)
	}
}

// keepStaticKeys makes objects in the first network namespace that stay for as long as the guest runs.
// They keep some of the kernel's static keys enabled.
//
// A static key enables code for a rarely used feature. The kernel changes instructions when the
// first user of the feature appears, in whichever namespace, and when the last one disappears.
// While it changes an instruction, a breakpoint (int3) is in its place. qemu 7.2 may translate
// the code at that moment, and keep the breakpoint in its translation. CPUs that come to this
// instruction then never get past it: the guest locks up.
func keepStaticKeys() {
	var chains strings.Builder
	for _, hook := range []string{"prerouting", "input", "forward", "output", "postrouting"} {
		fmt.Fprintf(&chains, "chain %s { type filter hook %[1]s priority 0; }; ", hook)
	}

	for _, args := range [][]string{
		// A chain at each hook, for nf_hooks_needed and ingress_needed_key.
		{"nft", "table inet kept { " + chains.String() + "}"},
		{"nft", "table netdev kept { chain ingress { type filter hook ingress device lo priority 0; }; }"},
		// A tunnel with sockets that may use the memory reserves, for udp_encap_needed_key,
		// udpv6_encap_needed_key and memalloc_socks_key.
		{"ip", "link", "add", "kept0", "type", "wireguard"},
		{"ip", "link", "set", "kept0", "up"},
		// A tunnel whose parameters are in its routes, for ip_tunnel_metadata_cnt.
		{"ip", "link", "add", "kept1", "type", "vxlan", "external", "dstport", "4789"},
		{"ip", "link", "set", "kept1", "up"},
	} {
		command(args...)
	}
}

// traceDrops makes the kernel record each packet that it drops, until the guest ends. A test that misses
// packets can then report where in the kernel they were dropped.
func traceDrops() {
	const dir = "/sys/kernel/tracing"
	must.Do(unix.Mount("tracefs", dir, "tracefs", 0, ""))

	for _, setting := range []struct{ file, value string }{
		{"trace_clock", "tai"}, // so that each record contains the time of day
		{"options/hash-ptr", "0"},
		{"buffer_size_kb", "4096"}, // for each CPU; when it is full, the oldest events are lost
		{"events/skb/kfree_skb/enable", "1"},
	} {
		must.Do(os.WriteFile(filepath.Join(dir, setting.file), []byte(setting.value), 0))
	}
}

// openPort opens the serial line to the host machine, and sets it to raw mode, so that output arrives
// unchanged.
func openPort() *os.File {
	port := must.Get(os.OpenFile(job.Port, os.O_RDWR|unix.O_NOCTTY, 0))
	t := must.Get(unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS))
	t.Iflag = 0
	t.Oflag = 0
	t.Lflag = 0
	must.Do(unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, t))
	return port
}
