package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a child that runs inside a namespace.
type process struct {
	name   string
	cmd    *exec.Cmd
	log    *log
	exited chan struct{} // closed once it is reaped
}

type processSpec struct {
	name string // what it calls itself, argument 0
	path string // of the binary, as this process sees it
	args []string
	env  []string
	out  io.Writer // standard output; nil means to the log
}

// startProcess starts a child that dies with n, or with this process.
func startProcess(ctx context.Context, n *Namespace, s processSpec) (*process, error) {
	path, release, err := n.program(ctx, s.path)
	if err != nil {
		return nil, err
	}
	defer release()
	p := &process{name: n.name + " " + s.name, log: newLog(), exited: make(chan struct{})}
	p.cmd = &exec.Cmd{
		Path:   path,
		Args:   append([]string{s.name}, s.args...),
		Env:    s.env,
		Dir:    "/",
		Stderr: p.log,
		Stdout: s.out,
	}
	if s.out == nil {
		p.cmd.Stdout = p.log
	}
	if err := n.start(p.cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", n.name, err)
	}
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // how it ended is kept in ProcessState
	}()
	return p, nil
}

// Start starts a command inside the namespace that dies with it, or with this
// process. The caller waits for it.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.start(cmd) }

// pipeDelay is how long the rest of what a process has written may take to be
// read once it has ended: a moment, but where the machine is busy a long one.
const pipeDelay = 10 * time.Second

// start starts cmd from the namespace's thread, so that it inherits the
// namespaces and its death signal is tied to them. A process group of its own
// keeps a terminal's Ctrl-C for the lab.
func (n *Namespace) start(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.WaitDelay = pipeDelay
	result := make(chan error, 1)
	select {
	case n.calls <- func() { result <- cmd.Start() }:
		return <-result
	case <-n.stop:
		return fmt.Errorf("start %s: %w", cmd.Path, os.ErrClosed)
	}
}

// program returns a path by which a process in n can run the binary at path,
// which the namespace's own /run and /var/lib may hide. release is called once
// it runs.
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

// PID returns the process id, in the machine's own numbering.
func (p *process) PID() int { return p.cmd.Process.Pid }

// Signal sends sig. It returns os.ErrProcessDone once the process has ended.
func (p *process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// freeze stops the process with SIGSTOP and waits until it stands: the signal is one
// thread's to see, and on a busy machine the others go on until that has had its turn.
func (p *process) freeze() error {
	if err := p.Signal(unix.SIGSTOP); err != nil {
		return err
	}
	for {
		err := unix.Waitid(unix.P_PID, p.PID(), nil, unix.WSTOPPED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("waitid", err)
		}
	}
}

// Kill ends the process with SIGKILL and waits until it is gone.
func (p *process) Kill() {
	if err := p.cmd.Process.Kill(); err == nil || errors.Is(err, os.ErrProcessDone) {
		<-p.exited
	}
}

// Exited is closed once the process has ended.
func (p *process) Exited() <-chan struct{} { return p.exited }

// Wait waits until the process ends and returns its exit code, -1 if a signal
// ended it.
func (p *process) Wait(ctx context.Context) (code int, err error) {
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for %s to exit: %w", p.name, context.Cause(ctx))
	}
}

// Log returns what the process has written so far.
func (p *process) Log() string { return string(p.log.bytes()) }

// WaitLog waits until the log holds text. It fails when the process ends
// without having written it.
func (p *process) WaitLog(ctx context.Context, text string) error {
	for {
		have, more := p.log.read()
		if strings.Contains(have, text) {
			return nil
		}
		select {
		case <-more:
			continue
		default:
		}
		select {
		case <-more:
		case <-p.exited:
			if strings.Contains(p.Log(), text) {
				return nil
			}
			return fmt.Errorf("%s ended without logging %q: %w", p.name, text, p.ended())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s to log %q: %w", p.name, text, context.Cause(ctx))
		}
	}
}

// Ended says how the process ended, with the last line that it wrote; nil
// while it runs.
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

// stopAll asks the daemons to stop and kills those that do not.
func stopAll(daemons []*Daemon) {
	const patience = 2 * time.Second
	for _, d := range daemons {
		_ = d.Signal(unix.SIGTERM) // one that is gone already is fine
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	for _, d := range daemons {
		select {
		case <-d.exited:
		case <-late.C:
			late.Reset(0) // nor wait for the others
			d.Kill()
		}
	}
}

// log collects what a process writes and tells who waits for it.
type log struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{} // closed at the next write
}

func newLog() *log { return &log{more: make(chan struct{})} }

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.more)
	l.more = make(chan struct{})
	return l.buf.Write(b)
}

func (l *log) read() (have string, more <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String(), l.more
}

func (l *log) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.buf.Bytes())
}

// lastLine returns the last line that was written, in the form in which it
// follows an error; empty if there is none.
func (l *log) lastLine() string {
	text := strings.TrimSpace(string(l.bytes()))
	if text == "" {
		return ""
	}
	return ": " + text[strings.LastIndex(text, "\n")+1:]
}
