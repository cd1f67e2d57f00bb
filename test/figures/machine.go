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

	"golang.org/x/sys/unix"
)

// Machine describes the machine on which a run was made.
type Machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"` // model
	CPUs   int    `json:"cpus"`
}

// String returns the description as a part of a sentence.
func (m Machine) String() string {
	return fmt.Sprintf("Linux %s, %d CPUs (%s)", m.Kernel, m.CPUs, m.CPU)
}

// ThisMachine returns the description of this machine.
func ThisMachine() (Machine, error) {
	m := Machine{CPU: "unknown", CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return m, err
	}
	m.Kernel = unix.ByteSliceToString(u.Release[:])
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	return m, nil
}
