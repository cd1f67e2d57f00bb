// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/netip"
	"os"
	"os/exec"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// Values of argument 0 with which the benchmark runs as a minimal program for comparison.
// Such a program only carries packets in place of a daemon, or only queries a store.
const (
	plainWireGuard = "bench-wireguard"
	plainList      = "bench-etcd-list"
	plainWatch     = "bench-etcd-watch"
	plainKubeWatch = "bench-kube-watch"
)

const (
	plainDevice = "plain0"
	plainMTU    = 1440 // fits into the underlay with WireGuard's overhead
	plainPort   = 51820
)

func plainAddr(host int) netip.Addr { return netip.AddrFrom4([4]byte{10, 127, 0, byte(host)}) }

// runPlain runs the minimal program called name with its only argument, until the program
// ends. It returns false if there is no such program.
func runPlain(name string, args []string) bool {
	run, ok := map[string]func(string){
		plainWireGuard: runWireGuard, plainList: runList, plainWatch: runWatch, plainKubeWatch: runKubeWatch,
	}[name]
	if ok {
		run(args[0])
	}
	return ok
}

// startPlain starts the minimal program called name on a host, with config as its only argument. It waits until
// the program reports that it carries packets, has read the data, or has begun its watch. See sayThere. The
// caller must call end.
func (b *bed) startPlain(ctx context.Context, h *lab.Host, name, config string) *exec.Cmd {
	cmd := &exec.Cmd{Path: must.Get(os.Executable()), Args: []string{name, config}, Stderr: os.Stderr}
	says := must.Get(cmd.StdoutPipe())
	must.Do(h.Start(cmd))

	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })() // ends the wait below, because the program may never report
	if _, err := says.Read(make([]byte, 1)); err != nil {
		end(cmd)
		must.Fail("%s has ended: %w", name, err)
	}
	return cmd
}

func sayThere() { must.Get(os.Stdout.Write([]byte{'.'})) }

func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // the result of a killed process does not matter
	_ = cmd.Wait()
}
