// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNamespace is set in the environment of a process that has its own network namespace.
const inNamespace = "PATHS_TEST_NAMESPACE"

// TestKernelCost measures the prober of a host with 5,000 peers, which all answer: the probes that it
// sends a second, and the share of a CPU that it and the kernel take for them. The peers are addresses
// of the loopback interface of a namespace, so the kernel's time includes that of the answers.
//
//stages:rest it measures for 30 seconds
func TestKernelCost(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKernelCost$", "-test.v", "-test.timeout=2m")
		cmd.Env = append(os.Environ(), inNamespace+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v (this test needs root):\n%s", err, out)
		}
		t.Logf("%s", out)
		return
	}
	const (
		n    = 5000
		took = 30 * time.Second
		// The race detector makes the prober several times slower. Without it the target is 0.5.
		mostPercent = 5
	)
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	loopback := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, byte(i>>8) + 1, byte(i), 0}), 24)
	}
	var peers []Peer
	for i := range n {
		peers = append(peers, Peer{Key: fmt.Sprint(i), Paths: []Path{{Subnet: loopback(i + 1), PublicIP: netip.AddrFrom4([4]byte{127, 0, 0, 1})}}})
	}
	var answered atomic.Int64
	p := NewProber(Config{
		Own: []netip.Prefix{loopback(0)}, Network: Network{BackendType: "vxlan", MTU: 1450, Devices: true}, Limit: NewLimit(),
		Peers:    func(context.Context) ([]Peer, bool) { return peers, true },
		Answered: func(time.Duration) { answered.Add(1) },
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	<-time.After(3 * time.Second) // a round begins with work for its 278 seconds
	used, before := cpuTime(t), answered.Load()
	<-time.After(took)
	percent := 100 * (cpuTime(t) - used).Seconds() / took.Seconds()
	perSecond := float64(answered.Load()-before) / took.Seconds()
	cancel()
	wg.Wait()
	o := p.Outcome(0)
	t.Logf("%d paths of %d peers: %.2f echoes a second, %.3f %% of a CPU", o.Paths, n, perSecond, percent)
	if o.Unreachable() > 0 || perSecond > Rate || perSecond*round.Seconds() < float64(o.Paths) {
		t.Errorf("%+v, %.2f echoes a second; want every path ok, at most %d a second, and all paths in %s", o, perSecond, Rate, round)
	}
	if percent > mostPercent {
		t.Errorf("the prober uses %.3f %% of a CPU, want at most %d %%", percent, mostPercent)
	}
}

// cpuTime returns the CPU time of this process, in the kernel too.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
