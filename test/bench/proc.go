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

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
)

// processCPU returns the CPU time of all threads of a running process, in nanoseconds.
func processCPU(pid int) (time.Duration, error) {
	const schedClock = 2 // CPUCLOCK_SCHED, used as by clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// treeCPU returns the CPU time of a process and of the children that it has waited for.
func treeCPU(pid int) (time.Duration, error) {
	own, err := processCPU(pid)
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	const first, tick = 13, 10 * time.Millisecond // cutime and cstime, in hundredths of a second
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

// memory is the memory of a process in RAM, in bytes.
type memory struct {
	peak, anonymous, file float64
}

func processMemory(pid int) (m memory, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		kB, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
		if err != nil {
			continue
		}
		switch key {
		case "VmHWM":
			m.peak = kB * 1024
		case "RssAnon":
			m.anonymous = kB * 1024
		case "RssFile":
			m.file = kB * 1024
		}
	}
	return m, nil
}

// children returns the number of running children of a process. The time of those that
// have ended is part of treeCPU.
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

// openFiles returns the number of file descriptors of a process.
func openFiles(pid int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries), err
}

// resources are what a daemon uses at one moment, and its CPU time until then.
type resources struct {
	anonymous  float64 // bytes
	files      int
	goroutines float64
	heapGoal   float64 // bytes: the size at which the heap is collected, 1.5 times the live heap
	cpu        time.Duration
}

func holdings(ctx context.Context, d *lab.Daemon) (h resources, err error) {
	m, err := processMemory(d.PID())
	if err != nil {
		return h, err
	}
	h.anonymous = m.anonymous
	if h.files, err = openFiles(d.PID()); err != nil {
		return h, err
	}
	if h.cpu, err = processCPU(d.PID()); err != nil {
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

// figure returns the value of a Prometheus metric without labels.
func figure(page, name string) (float64, error) {
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("the daemon's metrics have no %s", name)
}
