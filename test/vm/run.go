// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os/exec"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/test/must"
)

// command returns a command that runs in dir. When ctx ends, the command and its
// children are killed. The command is also killed when this process exits.
func command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func output(ctx context.Context, dir, name string, args ...string) string {
	var stdout, stderr bytes.Buffer
	cmd := command(ctx, dir, name, args...)
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		must.Fail("run %s: %w: %s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String()
}
