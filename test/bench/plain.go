package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"flanneld/pkg/lab"
)

// What the benchmark is called when it is to be a program that carries packets, or asks
// a store, and does nothing else, in place of a daemon.
const (
	plainWireGuard = "bench-wireguard"
	plainUDP       = "bench-udp"
	plainList      = "bench-etcd-list"
	plainWatch     = "bench-etcd-watch"
	plainKubeWatch = "bench-kube-watch"
)

const (
	plainDevice = "plain0"
	plainMTU    = 1440 // with the overhead of either it fits the underlay
	plainPort   = 51820
)

// plainAddr is a host's address in the tunnel.
func plainAddr(host int) netip.Addr { return netip.AddrFrom4([4]byte{10, 127, 0, byte(host)}) }

// runPlain is such a program, if name is that of one.
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

// startPlain starts a program on each host, with its part of configs. stop ends them,
// also after an error.
func (b *bed) startPlain(ctx context.Context, name string, configs []string) (stop func(), err error) {
	var cmds []*exec.Cmd
	stop = func() {
		for _, cmd := range cmds {
			_ = cmd.Process.Kill() // and what it says then is of no interest
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

// setUpPlain gives the program's device, once it is there, an address.
func setUpPlain(ctx context.Context, h *lab.Host, addr netip.Addr) error {
	script := fmt.Sprintf("for i in $(seq 100); do ip link show %[1]s >/dev/null 2>&1 && break; sleep 0.05; done; "+
		"ip addr add %[2]s/24 dev %[1]s && ip link set %[1]s mtu %[3]d up", plainDevice, addr, plainMTU)
	if out, err := h.Exec(ctx, "sh", "-c", script); err != nil {
		return fmt.Errorf("set up %s: %w: %s", plainDevice, err, strings.TrimSpace(string(out)))
	}
	return nil
}
