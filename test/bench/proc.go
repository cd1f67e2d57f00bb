// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// treeCPU returns the CPU time of a process, including that of children for which it
// has waited.
func treeCPU(pid int) (time.Duration, error) {
	own, err := figures.ProcessCPU(pid)
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	const first, tick = 13, 10 * time.Millisecond // index of the field cutime, which cstime follows; both are in ticks
	if len(fields) < first+2 {
		return 0, fmt.Errorf("/proc/%d/stat has an unexpected format", pid)
	}

	var user, system int64
	if _, err := fmt.Sscan(fields[first], &user); err != nil {
		return 0, err
	}
	_, err = fmt.Sscan(fields[first+1], &system)
	return own + time.Duration(user+system)*tick, err
}

// children returns the number of children that a process has now, running or not yet
// waited for. treeCPU does not include their CPU time.
func children(pid int) (count int, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		count += len(strings.Fields(string(text)))
	}
	return count, nil
}

// openFiles returns the number of open file descriptors of a process.
func openFiles(pid int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries), err
}

// resources contains what a daemon uses at one moment, and its CPU time until then.
type resources struct {
	anonymous  float64 // bytes
	files      int
	goroutines float64
	heapGoal   float64 // size in bytes at which the heap is collected, 1.5 times the live heap
	cpu        time.Duration
}

func holdings(ctx context.Context, d *lab.Daemon) (h resources, err error) {
	m, err := figures.ProcessMemory(d.PID())
	if err != nil {
		return h, err
	}
	h.anonymous = m.Anonymous
	if h.files, err = openFiles(d.PID()); err != nil {
		return h, err
	}
	if h.cpu, err = figures.ProcessCPU(d.PID()); err != nil {
		return h, err
	}
	_, page, err := d.Get(ctx, "/metrics") // last, because the request itself uses memory, files and goroutines
	if err != nil {
		return h, err
	}
	if h.goroutines, err = figure(page, "go_goroutines"); err != nil {
		return h, err
	}
	h.heapGoal, err = figure(page, "go_memstats_next_gc_bytes")
	return h, err
}

// figure returns the value of a Prometheus metric without labels. It returns an error
// if page does not have the metric.
func figure(page, name string) (float64, error) {
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("the daemon's metrics have no %s", name)
}
