// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"github.com/flanneld/flanneld/test/lab"
)

// Values of argument 0 with which the benchmark runs as a minimal program for comparison.
// Such a program only carries packets in place of a daemon, or only queries a store.
const (
	plainWireGuard = "bench-wireguard"
	plainUDP       = "bench-udp"
	plainList      = "bench-etcd-list"
	plainWatch     = "bench-etcd-watch"
	plainKubeWatch = "bench-kube-watch"
)

const (
	plainDevice = "plain0"
	plainMTU    = 1440 // fits into the underlay with the overhead of either program that carries packets
	plainPort   = 51820
)

// plainAddr returns the address in the tunnel of a host, counted from 1.
func plainAddr(host int) netip.Addr { return netip.AddrFrom4([4]byte{10, 127, 0, byte(host)}) }

// runPlain runs the minimal program called name with its only argument, until the program
// ends. It returns false if there is no such program.
func runPlain(name string, args []string) (is bool, err error) {
	run, is := map[string]func(string) error{
		plainWireGuard: runWireGuard, plainUDP: runUDP,
		plainList: runList, plainWatch: runWatch, plainKubeWatch: runKubeWatch,
	}[name]
	switch {
	case !is:
		return false, nil
	case len(args) != 1:
		return true, fmt.Errorf("%s: want a configuration", name)
	}
	return true, run(args[0])
}

// startPlain starts a program that carries packets on each host, with its element of
// configs. The caller must call stop, even after an error.
func (b *bed) startPlain(ctx context.Context, name string, configs []string) (stop func(), err error) {
	var cmds []*exec.Cmd
	stop = func() {
		for _, cmd := range cmds {
			_ = cmd.Process.Kill() // the result of a killed process does not matter
			_ = cmd.Wait()
		}
		b.plain = nil
	}

	self, err := os.Executable()
	if err != nil {
		return stop, err
	}

	for i, h := range b.lab.Hosts() {
		cmd := &exec.Cmd{Path: self, Args: []string{name, configs[i]}, Stderr: os.Stderr}
		if err := h.Start(cmd); err != nil {
			return stop, fmt.Errorf("start %s: %w", name, err)
		}
		cmds = append(cmds, cmd)
		b.plain = append(b.plain, cmd.Process.Pid)
		if err := setUpPlain(ctx, h, plainAddr(i+1)); err != nil {
			return stop, err
		}
	}
	return stop, nil
}

// setUpPlain waits up to five seconds for the device of the minimal program, and gives it
// an address.
func setUpPlain(ctx context.Context, h *lab.Host, addr netip.Addr) error {
	script := fmt.Sprintf("for i in $(seq 100); do ip link show %[1]s >/dev/null 2>&1 && break; sleep 0.05; done; "+
		"ip addr add %[2]s/24 dev %[1]s && ip link set %[1]s mtu %[3]d up", plainDevice, addr, plainMTU)
	if out, err := h.Exec(ctx, "sh", "-c", script); err != nil {
		return fmt.Errorf("set up %s: %w: %s", plainDevice, err, strings.TrimSpace(string(out)))
	}
	return nil
}
