// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

type process struct {
	name   string
	cmd    *exec.Cmd
	log    *log
	exited chan struct{} // closed when the process has exited and been reaped
}

type processSpec struct {
	name string // argument 0 of the process
	path string // of the binary, outside the namespace
	args []string
	env  []string
}

func startProcess(ctx context.Context, n *Namespace, s processSpec) (*process, error) {
	path, release, err := n.program(ctx, s.path)
	if err != nil {
		return nil, err
	}
	defer release()

	p := &process{name: n.name + " " + s.name, log: &log{}, exited: make(chan struct{})}
	p.cmd = &exec.Cmd{
		Path:   path,
		Args:   append([]string{s.name}, s.args...),
		Env:    s.env,
		Dir:    "/",
		Stderr: p.log,
		Stdout: p.log,
	}
	if err := n.Start(p.cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", n.name, err)
	}

	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // Wait sets ProcessState, which has the result
	}()
	return p, nil
}

// pipeDelay limits how long the remaining output of a process is read after its exit.
// Reading takes a moment, but on a busy machine it takes longer.
const pipeDelay = 10 * time.Second

// Start starts a command inside the namespace. The command dies when the namespace is
// closed or this process ends. The caller must call cmd.Wait.
func (n *Namespace) Start(cmd *exec.Cmd) error {
	// With a process group of its own, Ctrl-C in a terminal reaches only the lab's own process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.WaitDelay = pipeDelay

	// On the namespace's thread, from which cmd inherits the namespaces, and whose end sends the
	// death signal.
	result := make(chan error, 1)
	select {
	case n.calls <- func() { result <- cmd.Start() }:
		return <-result
	case <-n.stop:
		return fmt.Errorf("start %s: %w", cmd.Path, os.ErrClosed)
	}
}

// program returns a path through which a process in n can run the binary at path, even if /run or
// /var/lib of the namespace hides it. The caller calls release as soon as the process runs.
func (n *Namespace) program(ctx context.Context, path string) (runnable string, release func(), err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	release = func() { f.Close() }

	want, err := f.Stat()
	if err != nil {
		release()
		return "", nil, err
	}

	runnable = fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	err = n.Do(ctx, func() error {
		if have, err := os.Stat(path); err == nil && os.SameFile(have, want) {
			runnable = path
		}
		return nil
	})
	if err != nil {
		release()
		return "", nil, err
	}
	return runnable, release, nil
}

// PID returns the process id, as the machine numbers it.
func (p *process) PID() int { return p.cmd.Process.Pid }

// Signal sends sig. It returns os.ErrProcessDone if the process has ended.
func (p *process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// Freeze stops the process with SIGSTOP and waits until it is stopped.
func (p *process) Freeze() error {
	if err := p.Signal(unix.SIGSTOP); err != nil {
		return err
	}

	// One thread of the process handles SIGSTOP. On a busy machine the other threads continue
	// until that thread runs.
	for {
		err := unix.Waitid(unix.P_PID, p.PID(), nil, unix.WSTOPPED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("waitid", err)
		}
	}
}

// Kill ends the process with SIGKILL and waits until it has exited.
func (p *process) Kill() {
	if err := p.cmd.Process.Kill(); err == nil || errors.Is(err, os.ErrProcessDone) {
		<-p.exited
	}
}

// Wait waits until the process ends and returns its exit code, or -1 if a signal ended
// it. It returns an error if ctx ends first.
func (p *process) Wait(ctx context.Context) (code int, err error) {
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for %s to exit: %w", p.name, context.Cause(ctx))
	}
}

// Log returns the output of the process so far.
func (p *process) Log() string { return string(p.log.bytes()) }

// WaitLog waits until the log contains text. It returns an error if the process exits
// without having written it, or if ctx ends first.
func (p *process) WaitLog(ctx context.Context, text string) error {
	for {
		have, more := p.log.read()
		if strings.Contains(have, text) {
			return nil
		}

		select {
		case <-more:
		case <-p.exited:
			if strings.Contains(p.Log(), text) { // written after read
				return nil
			}
			return fmt.Errorf("%s ended without logging %q: %w", p.name, text, p.ended())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s to log %q: %w", p.name, text, context.Cause(ctx))
		}
	}
}

// Ended returns nil while the process runs, and afterwards an error with the exit status
// and the last line of output.
func (p *process) Ended() error {
	select {
	case <-p.exited:
		return p.ended()
	default:
		return nil
	}
}

func (p *process) ended() error {
	return fmt.Errorf("%s: %v%s", p.name, p.cmd.ProcessState, p.log.lastLine())
}

func (p *process) await(ctx context.Context, period time.Duration, ask func() error) error {
	tick := time.NewTicker(period)
	defer tick.Stop()

	for {
		err := ask()
		if err == nil {
			return nil
		}

		select {
		case <-tick.C:
		case <-p.exited:
			return fmt.Errorf("wait for an answer: %w", p.ended())
		case <-ctx.Done():
			return fmt.Errorf("wait for an answer of %s: %w: %w%s", p.name, context.Cause(ctx), err, p.log.lastLine())
		}
	}
}

// server is a program in the router's namespace that can be started again.
type server struct {
	now atomic.Pointer[process] // the last start; nil before the first one
}

// start starts the server, and waits until it answers at url. It asks through t, once in each period.
func (s *server) start(ctx context.Context, n *Namespace, spec processSpec, t *http.Transport, url string, period time.Duration) error {
	p, err := startProcess(ctx, n, spec)
	if err != nil {
		return fmt.Errorf("start %s: %w", spec.name, err)
	}
	s.now.Store(p)

	client := &http.Client{Transport: t, Timeout: 2 * time.Second}
	defer client.CloseIdleConnections()
	return p.await(ctx, period, func() error { return get(ctx, client, url) })
}

func (s *server) running() bool {
	p := s.now.Load()
	return p != nil && p.Ended() == nil
}

// PID returns the process id, as the machine numbers it.
func (s *server) PID() int { return s.now.Load().PID() }

// Kill ends the server with SIGKILL and waits for its end. Its data stays.
func (s *server) Kill() {
	if p := s.now.Load(); p != nil {
		p.Kill()
	}
}

// Stop freezes the server with SIGSTOP: it still accepts connections but does not answer until
// Cont.
func (s *server) Stop() error { return s.now.Load().Freeze() }

// Cont resumes a frozen server.
func (s *server) Cont() error { return s.now.Load().Signal(syscall.SIGCONT) }

// Log returns the output of the process that was started last.
func (s *server) Log() string { return s.now.Load().Log() }

func stopAll(daemons []*Daemon) {
	const patience = 2 * time.Second

	for _, d := range daemons {
		_ = d.Signal(unix.SIGTERM) // a daemon may already have exited
	}

	end := time.Now().Add(patience)
	for _, d := range daemons {
		select {
		case <-d.exited:
		case <-time.After(time.Until(end)):
			d.Kill()
		}
	}
}

// log is the output of a process.
type log struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more wait.Broadcast // sent at each write
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.more.Send()
	return l.buf.Write(b)
}

func (l *log) read() (have string, more <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String(), l.more.Changed()
}

func (l *log) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.buf.Bytes())
}

// lastLine returns the last line of output with ": " before it, so that it can be appended to an
// error, or "" without output.
func (l *log) lastLine() string {
	text := strings.TrimSpace(string(l.bytes()))
	if text == "" {
		return ""
	}
	return ": " + text[strings.LastIndex(text, "\n")+1:]
}
