// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ProcessCPU returns the CPU time that all threads of a running process have used
// since its start.
func ProcessCPU(pid int) (time.Duration, error) {
	const schedClock = 2 // CPUCLOCK_SCHED of the kernel, from which clock_getcpuclockid(3) makes the id of the clock too
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// Memory is the memory in RAM that a process uses, in bytes.
type Memory struct {
	Peak            float64 // since the process started, or since ResetPeak
	Anonymous, File float64 // now
}

// ProcessMemory returns the memory that a running process uses.
func ProcessMemory(pid int) (m Memory, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	fields := map[string]*float64{"VmHWM": &m.Peak, "RssAnon": &m.Anonymous, "RssFile": &m.File}
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		field := fields[key]
		if field == nil {
			continue
		}
		kB, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
		if err != nil {
			return m, fmt.Errorf("/proc/%d/status: %s: %w", pid, key, err)
		}
		*field = kB * 1024
		delete(fields, key)
	}
	if len(fields) > 0 {
		return m, fmt.Errorf("/proc/%d/status lacks %d of the memory sizes", pid, len(fields))
	}
	return m, nil
}

// ResetPeak sets the peak of a process to the memory that it uses now.
func ResetPeak(pid int) error {
	const resetPeak = "5"
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte(resetPeak), 0)
}
