// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

const (
	// maxOutput limits how much of a command's output is used, in bytes.
	maxOutput = 64 << 10
	// maxLines limits how many lines of a command's output are logged.
	maxLines = 100
	// outputWait is the time for which processes that a finished command has left in the
	// background may still write output. Then the output is closed.
	outputWait = time.Second
)

// privateVariables lists variables of the daemon's environment that commands do not get.
// They are secrets, or belong to the daemon's own systemd unit.
var privateVariables = []string{"FLANNELD_ETCD_PASSWORD=", "NOTIFY_SOCKET=", "WATCHDOG_USEC=", "WATCHDOG_PID="}

// input contains the variables and the standard input of a command.
type input struct {
	Env   []string `json:"env,omitempty"`   // "NAME=value", added to the daemon's environment
	Stdin string   `json:"stdin,omitempty"` // without the newline at its end
}

var errTimeout = errors.New("killed together with all its children: it took longer than CommandTimeout")

// run returns standard output and error as one trimmed text, even if the command fails. After the
// timeout, and when ctx ends, it kills the command's process group.
func (c command) run(ctx context.Context, in input, timeout time.Duration) (output string, err error) {
	if !c.configured() {
		return "", nil
	}

	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	env := environment(in.Env)
	words := []string{"sh", "-c", c.Line}
	if !c.Shell {
		words = c.words(env)
	}

	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	out := &buffer{}
	cmd.Stdout = out
	cmd.Stderr = out
	cmd.Stdin = strings.NewReader(in.Stdin + "\n")
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = outputWait
	err = cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) { // the command has left a process in the background
		err = nil
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}

	output = out.text()
	if err == nil {
		return output, nil
	}
	last := output[strings.LastIndexByte(output, '\n')+1:] // usually the reason
	if last = shorten(strings.TrimSpace(last)); last != "" {
		return output, fmt.Errorf("%s: %w: %s", c.Name, err, last)
	}
	return output, fmt.Errorf("%s: %w", c.Name, err)
}

// words splits the line first, and then replaces variables, so that no value is split or taken for
// shell syntax.
func (c command) words(env []string) []string {
	value := map[string]string{}
	for _, v := range env {
		name, text, _ := strings.Cut(v, "=")
		value[name] = text
	}
	words := strings.Fields(c.Line)
	for i, w := range words {
		words[i] = os.Expand(w, func(name string) string { return value[name] })
	}
	return words
}

func environment(extra []string) []string {
	public := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return slices.ContainsFunc(privateVariables, func(p string) bool { return strings.HasPrefix(v, p) })
	})
	return append(public, extra...) // the last value of a variable counts
}

// buffer stores the first maxOutput bytes.
type buffer struct{ b bytes.Buffer }

// Write implements io.Writer. It never fails, so that the command does not block.
func (b *buffer) Write(p []byte) (int, error) {
	b.b.Write(p[:min(len(p), maxOutput-b.b.Len())])
	return len(p), nil
}

func (b *buffer) text() string {
	return strings.TrimSpace(strings.ToValidUTF8(b.b.String(), "\uFFFD"))
}

func logOutput(log klog.Logger, c command, output string) {
	if output == "" {
		return
	}
	lines := strings.Split(output, "\n")
	for i, line := range lines {
		if i == maxLines {
			log.Info("command output truncated", "command", c.Name, "lines", len(lines)-maxLines)
			return
		}
		log.Info("command output", "command", c.Name, "line", shorten(strings.TrimRight(line, "\r")))
	}
}

func shorten(s string) string { return oneline.Shorten(s, 300) }
