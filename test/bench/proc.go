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

	"flanneld/pkg/lab"
)

// processCPU returns the CPU time that a running process has used, all its
// threads together, to the nanosecond.
func processCPU(pid int) (time.Duration, error) {
	const schedClock = 2 // CPUCLOCK_SCHED, as clock_getcpuclockid(3) makes it
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// treeCPU is the CPU time of a process and of those that it has waited for.
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
		return 0, fmt.Errorf("/proc/%d/stat is not understood", pid)
	}
	var user, system int64
	if _, err := fmt.Sscan(fields[first], &user); err != nil {
		return 0, err
	}
	_, err = fmt.Sscan(fields[first+1], &system)
	return own + time.Duration(user+system)*tick, err
}

// memory is what a process has in RAM, in bytes.
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

// children counts the child processes that a process has now. Those that have ended
// are in its treeCPU.
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

// openFiles counts the file descriptors of a process.
func openFiles(pid int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries), err
}

// held is what a daemon holds at one moment, and has used until then.
type held struct {
	anonymous  float64 // bytes
	files      int
	goroutines float64
	heapGoal   float64 // bytes: at this size the heap is collected, 1.5 times what is alive
	cpu        time.Duration
}

func holdings(ctx context.Context, d *lab.Daemon) (h held, err error) {
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
	_, page, err := d.Get(ctx, "/metrics") // last: a request takes memory, files and goroutines
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
