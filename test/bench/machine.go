// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// usage contains the CPU time of the whole machine until at, and that of this process
// and of the children that it has waited for.
type usage struct {
	at            time.Time
	machine, ours time.Duration
}

func machineCPU() (u usage) {
	u.at = time.Now()
	line, _, _ := strings.Cut(string(must.Get(os.ReadFile("/proc/stat"))), "\n")
	for i, field := range strings.Fields(line) {
		const idle, iowait, steal = 4, 5, 8
		if i != 0 && i != idle && i != iowait && i < steal {
			u.machine += time.Duration(must.Get(strconv.ParseInt(field, 10, 64))) * clockTick
		}
	}

	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		must.Do(unix.Getrusage(who, &r))
		u.ours += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	return u
}

func othersCPU(before usage) float64 {
	now := machineCPU()
	others := (now.machine - before.machine) - (now.ours - before.ours)
	return max(0, float64(others)/float64(now.at.Sub(before.at)))
}
