// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/figures"
)

// describe records the version of flanneld and the machine.
func (r *report) describe(ctx context.Context, flanneld string) error {
	version, err := exec.CommandContext(ctx, flanneld, "--version").CombinedOutput()
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", flanneld, err)
	}
	r.Commit = strings.TrimSpace(string(version))
	r.Machine, err = figures.ThisMachine()
	return err
}

// usage contains the CPU time of the whole machine until at, and that of this process
// and of the children that it has waited for.
type usage struct {
	at            time.Time
	machine, ours time.Duration
}

func machineCPU() (u usage, err error) {
	u.at = time.Now()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line) {
		const idle, iowait, steal, tick = 4, 5, 8, 10 * time.Millisecond
		if i == 0 || i == idle || i == iowait || i >= steal {
			continue
		}
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return u, fmt.Errorf("read /proc/stat: %w", err)
		}
		u.machine += time.Duration(n) * tick
	}

	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			return u, err
		}
		u.ours += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	return u, nil
}

// othersCPU returns how many CPUs other programs have used on average since before.
func othersCPU(before usage) (float64, error) {
	now, err := machineCPU()
	if err != nil {
		return 0, err
	}
	others := (now.machine - before.machine) - (now.ours - before.ours)
	return max(0, float64(others)/float64(now.at.Sub(before.at))), nil
}
