// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"

	"github.com/flanneld/flanneld/test/must"
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
func runPlain(name string, args []string) bool {
	run, ok := map[string]func(string){
		plainWireGuard: runWireGuard, plainUDP: runUDP,
		plainList: runList, plainWatch: runWatch, plainKubeWatch: runKubeWatch,
	}[name]
	if ok {
		run(args[0])
	}
	return ok
}

// startPlain starts a program that carries packets on each host, with its element of
// configs, until the end of the bed.
func (b *bed) startPlain(ctx context.Context, name string, configs []string) {
	for i, h := range b.lab.Hosts() {
		cmd := &exec.Cmd{Path: must.Get(os.Executable()), Args: []string{name, configs[i]}, Stderr: os.Stderr}
		must.Do(h.Start(cmd))
		b.plain = append(b.plain, cmd)

		// Up to five seconds for the device.
		script := fmt.Sprintf("for i in $(seq 100); do ip link show %[1]s >/dev/null 2>&1 && break; sleep 0.05; done; "+
			"ip addr add %[2]s/24 dev %[1]s && ip link set %[1]s mtu %[3]d up", plainDevice, plainAddr(i+1), plainMTU)
		must.Get(h.Exec(ctx, "sh", "-c", script))
	}
}
