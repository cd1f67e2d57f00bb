// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// guest describes a virtual machine that can be started.
type guest struct {
	options
	kernel  kernel
	image   string // path of the initrd, which is its only file system
	console string // path of the file to which its kernel writes messages
}

func boot(ctx context.Context, g guest, r *report) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.timeout, fmt.Errorf("the guest was not done after %s", g.timeout))
	defer cancel()
	// Emulation is slow, and some options save time. A plain CPU is one: programs use the
	// extensions of newer CPUs if these exist, and their emulation takes longer. norandmaps is
	// another: with code at the same address in each process, qemu finds it at once in its cache
	// of translated code. The options in the second line turn off parts of the kernel that cost
	// CPU time and that no test needs: its hardening, audit, security modules except landlock, and the
	// accounting of kernel memory. A guest whose CPUs are locked up for a minute panics. Its
	// console then contains the stacks.
	cmd := command(ctx, "", "qemu-system-x86_64",
		"-accel", "tcg,thread=multi", "-cpu", "qemu64,+rdrand", "-smp", strconv.Itoa(g.cpus), "-m", strconv.Itoa(g.memory),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-net", "none",
		"-kernel", g.kernel.image, "-initrd", g.image,
		"-append", "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off norandmaps clocksource=tsc tsc=reliable watchdog_thresh=30 softlockup_panic=1"+
			" init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off audit=0 lsm=landlock cgroup.memory=nokmem,nosocket",
		"-serial", "file:"+g.console, "-serial", "stdio")

	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start qemu: %w", err)
	}
	err = r.read(pipe)
	if waitErr := cmd.Wait(); ctx.Err() != nil {
		err = context.Cause(ctx)
	} else {
		err = errors.Join(err, waitErr)
	}
	if err != nil || r.failed > 0 || len(r.ended) == 0 {
		fmt.Fprintf(os.Stderr, "the guest's console:\n%s\n", lastLines(g.console, 60))
	}
	return err
}

func lastLines(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
