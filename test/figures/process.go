// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// ProcessCPU returns the CPU time that all threads of a running process have used
// since its start.
func ProcessCPU(pid int) time.Duration {
	const schedClock = 2 // CPUCLOCK_SCHED of the kernel, from which clock_getcpuclockid(3) makes the id of the clock too
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		must.Fail("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano())
}

// Memory is the memory in RAM that a process uses, in bytes.
type Memory struct {
	Peak            float64 // since the process started, or since ResetPeak
	Anonymous, File float64 // now
}

// ProcessMemory returns the memory that a running process uses.
func ProcessMemory(pid int) (m Memory) {
	fields := map[string]*float64{"VmHWM": &m.Peak, "RssAnon": &m.Anonymous, "RssFile": &m.File}
	for line := range strings.Lines(string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))))) {
		key, rest, _ := strings.Cut(line, ":")
		if field := fields[key]; field != nil {
			*field = 1024 * must.Get(strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64))
			delete(fields, key)
		}
	}
	if len(fields) > 0 {
		must.Fail("/proc/%d/status lacks %d of the memory sizes", pid, len(fields))
	}
	return m
}

// ResetPeak sets the peak of a process to the memory that it uses now.
func ResetPeak(pid int) {
	const resetPeak = "5"
	must.Do(os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte(resetPeak), 0))
}
