package extension

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

const (
	// maxOutput bounds what is kept of a command's output, in bytes.
	maxOutput = 64 << 10
	// maxLines bounds what is logged of it.
	maxLines = 100
	// linger is how long the output of a command that has ended stays open for
	// what it left in the background.
	linger = time.Second
)

// kept are variables of the daemon's environment that are its own business.
var kept = []string{"FLANNELD_ETCD_PASSWORD=", "NOTIFY_SOCKET=", "WATCHDOG_USEC=", "WATCHDOG_PID="}

// input is what a command is given.
type input struct {
	Env   []string `json:"env,omitempty"`   // "NAME=value", on top of the daemon's
	Stdin string   `json:"stdin,omitempty"` // without the newline at its end
}

// errTimeout is why a command is killed that takes too long.
var errTimeout = errors.New("killed, together with all that it started: it took longer than CommandTimeout")

// run runs the command and returns what it wrote to standard output and error,
// trimmed. The process group is killed after the timeout, and when ctx ends.
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
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Stdin = strings.NewReader(in.Stdin + "\n")
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = linger
	err = cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) { // it has left something in the background
		err = nil
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	output = out.text()
	if err != nil {
		return output, c.failure(err, output)
	}
	return output, nil
}

// failure says in one line what became of the command.
func (c command) failure(err error, output string) error {
	last := output[strings.LastIndexByte(output, '\n')+1:]
	if last = shorten(strings.TrimSpace(last)); last != "" {
		return fmt.Errorf("%s: %w: %s", c.Name, err, last)
	}
	return fmt.Errorf("%s: %w", c.Name, err)
}

// words splits the line at blanks, and then puts in the variables: what they
// hold is never split, and is no syntax.
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

// environment is the daemon's environment with extra on top.
func environment(extra []string) []string {
	var env []string
	for _, v := range os.Environ() {
		own := false
		for _, prefix := range kept {
			own = own || strings.HasPrefix(v, prefix)
		}
		if !own {
			env = append(env, v)
		}
	}
	return append(env, extra...)
}

// buffer keeps the beginning of what is written to it.
type buffer struct{ b bytes.Buffer }

// Write implements io.Writer. It takes everything.
func (b *buffer) Write(p []byte) (int, error) {
	b.b.Write(p[:min(len(p), maxOutput-b.b.Len())])
	return len(p), nil
}

func (b *buffer) text() string {
	return strings.TrimSpace(strings.ToValidUTF8(b.b.String(), "\uFFFD"))
}

// logOutput logs what a command wrote, line by line.
func logOutput(log klog.Logger, c command, output string) {
	if output == "" {
		return
	}
	lines := strings.Split(output, "\n")
	for i, line := range lines {
		if i == maxLines {
			log.Info("command output goes on", "command", c.Name, "lines", len(lines)-maxLines)
			return
		}
		log.Info("command output", "command", c.Name, "line", shorten(strings.TrimRight(line, "\r")))
	}
}

// shorten keeps text fit for a part of one line.
func shorten(s string) string {
	const most = 300 // bytes
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
