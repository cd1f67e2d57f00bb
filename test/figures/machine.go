// SPDX-License-Identifier: Apache-2.0

// Package figures contains what the measuring programs have in common: readings of processes
// and of counters, the description of the machine, the Nodes that they create, and the files with
// results.
package figures

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// Machine describes the machine on which a run was made.
type Machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"` // model, or "unknown"
	CPUs   int    `json:"cpus"`

	// PageFault is the time for the first access to a page of memory, which the kernel must
	// provide. SystemCall is the time of a system call that does nothing. Both differ between
	// virtual machines by more than the speeds of the CPUs do. Both are 0 in results of older
	// versions, which did not measure them.
	PageFault  time.Duration `json:"page_fault_ns,omitempty"`
	SystemCall time.Duration `json:"system_call_ns,omitempty"`
}

// String returns the description as text that fits into a sentence.
func (m Machine) String() string {
	text := fmt.Sprintf("Linux %s, %d CPUs (%s)", m.Kernel, m.CPUs, m.CPU)
	if m.PageFault > 0 {
		text += fmt.Sprintf(", %.3g µs for a page fault and %.2g µs for a system call", micros(m.PageFault), micros(m.SystemCall))
	}
	return text
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// ThisMachine returns the description of this machine. It measures PageFault and SystemCall,
// which takes less than a second.
func ThisMachine() Machine {
	var u unix.Utsname
	must.Do(unix.Uname(&u))
	m := Machine{
		Kernel: unix.ByteSliceToString(u.Release[:]), CPU: "unknown", CPUs: runtime.NumCPU(),
		PageFault: least(pageFault), SystemCall: least(systemCall),
	}
	for line := range strings.Lines(string(must.Get(os.ReadFile("/proc/cpuinfo")))) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	return m
}

// least measures five times and returns the shortest time, because other programs only make a
// measurement longer.
func least(measure func() time.Duration) time.Duration {
	shortest := measure()
	for range 4 {
		shortest = min(shortest, measure())
	}
	return shortest
}

func systemCall() time.Duration {
	const calls = 10_000
	start := time.Now()
	for range calls {
		_ = unix.Getppid()
	}
	return time.Since(start) / calls
}

func pageFault() time.Duration {
	const pages = 1000
	size := os.Getpagesize()
	memory := must.Get(unix.Mmap(-1, 0, pages*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE))

	// A kernel without huge pages returns an error, and does not need the advice.
	_ = unix.Madvise(memory, unix.MADV_NOHUGEPAGE)
	start := time.Now()
	for p := range pages {
		memory[p*size] = 1
	}

	took := time.Since(start) / pages
	must.Do(unix.Munmap(memory))
	return took
}
