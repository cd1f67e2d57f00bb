// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// clockTick is the unit of CPU times in /proc.
const clockTick = 10 * time.Millisecond

func pause(ctx context.Context, d time.Duration) {
	if wait.For(ctx, d) != nil {
		must.Do(context.Cause(ctx))
	}
}

// spent returns how much CPU time a daemon or another process uses while f runs. cpu is figures.ProcessCPU or treeCPU.
func spent(cpu func(pid int) time.Duration, pid int, f func()) time.Duration {
	before := cpu(pid)
	f()
	return cpu(pid) - before
}

// treeCPU returns the CPU time of a process, including that of children for which it
// has waited.
func treeCPU(pid int) time.Duration {
	file := fmt.Sprintf("/proc/%d/stat", pid)
	_, rest, _ := strings.Cut(string(must.Get(os.ReadFile(file))), ") ")
	fields := strings.Fields(rest)
	const cutime, cstime = 13, 14
	if len(fields) <= cstime {
		must.Fail("%s has an unexpected format", file)
	}
	ticks := must.Get(strconv.Atoi(fields[cutime])) + must.Get(strconv.Atoi(fields[cstime]))
	return figures.ProcessCPU(pid) + time.Duration(ticks)*clockTick
}

// children returns the number of children that a process has now, running or not yet
// waited for. treeCPU does not include their CPU time.
func children(pid int) (count int) {
	for _, file := range must.Get(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))) {
		count += len(strings.Fields(string(must.Get(os.ReadFile(file)))))
	}
	return count
}

// resources contains what a daemon uses at one moment, and its CPU time until then.
type resources struct {
	anonymous  float64 // bytes
	files      int
	goroutines float64
	heapGoal   float64 // size in bytes at which the heap is collected, 1.5 times the live heap
	cpu        time.Duration
}

func holdings(ctx context.Context, d *lab.Daemon) resources {
	h := resources{
		anonymous: figures.ProcessMemory(d.PID()).Anonymous, cpu: figures.ProcessCPU(d.PID()),
		files: len(must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID())))),
	}
	page := metrics(ctx, d) // last, because the request itself uses memory, files and goroutines
	h.goroutines = figure(page, "go_goroutines")
	h.heapGoal = figure(page, "go_memstats_next_gc_bytes")
	return h
}

func metrics(ctx context.Context, d *lab.Daemon) string {
	_, page, err := d.Get(ctx, "/metrics")
	must.Do(err)
	return page
}

func figure(page, name string) float64 {
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return must.Get(strconv.ParseFloat(strings.TrimSpace(value), 64))
		}
	}
	must.Fail("the daemon's metrics have no %s", name)
	return 0
}

// requests returns how many messages of all clients etcd has received so far, by method, as etcd
// counts them. It asks etcd from inside host.
func requests(ctx context.Context, host *lab.Host) figures.Counts {
	transport := &http.Transport{DialContext: host.Dial, DisableKeepAlives: true}
	return figures.EtcdMessages(ctx, &http.Client{Transport: transport, Timeout: 10 * time.Second}, host.EtcdEndpoint())
}

func eth0(ctx context.Context, h *lab.Host) (attrs *netlink.LinkAttrs) {
	withNetlink(ctx, h, func(nl *netlink.Handle) { attrs = must.Get(nl.LinkByName("eth0")).Attrs() })
	return attrs
}
