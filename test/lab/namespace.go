// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is an anonymous network namespace. Those of hosts and of the router have a
// mount namespace too. A thread keeps it alive. The same thread is the parent of all
// processes in the namespace: when it ends, the kernel sends them their death signal.
type Namespace struct {
	name     string
	net, mnt *os.File // mnt is nil if the namespace uses the machine's mounts
	tid      int
	calls    chan func()
	stop     chan struct{}
	close    func() // removes the namespace; may be called twice

	files sync.RWMutex // locked for reading while a thread joins the namespace, because close closes net and mnt
}

// newNamespace makes a namespace with enter, which moves the calling thread into new namespaces,
// prepares these, and opens them in the Namespace.
func newNamespace(name string, enter func(*Namespace) error) (*Namespace, error) {
	n := &Namespace{name: name, calls: make(chan func()), stop: make(chan struct{})}
	entered := make(chan error, 1)
	ended := make(chan struct{})
	n.close = sync.OnceFunc(func() {
		close(n.stop)
		<-ended

		n.files.Lock()
		defer n.files.Unlock()
		for _, f := range []*os.File{n.net, n.mnt} {
			if f != nil {
				f.Close()
			}
		}
	})

	go onOwnThread(func() {
		defer close(ended)
		n.tid = unix.Gettid()
		err := enter(n)
		entered <- err
		if err != nil {
			return
		}

		for {
			select {
			case f := <-n.calls:
				f()
			case <-n.stop:
				return
			}
		}
	})

	if err := <-entered; err != nil {
		n.close()
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	return n, nil
}

// onOwnThread runs f on a thread that ends after f. It must be the last call of a goroutine, because a
// locked thread ends with its goroutine. If the caller is on the main thread, onOwnThread returns
// before f ends.
func onOwnThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}

	// The main thread cannot end, and /proc/PID shows its namespaces as those of the process.
	defer runtime.UnlockOSThread()
	elsewhere := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(elsewhere)
		f()
	}()
	<-elsewhere
}

// Name returns the name of the namespace in the lab, such as host1 or host1/pod1.
func (n *Namespace) Name() string { return n.name }

// NetNS returns a path to the network namespace. It is valid in all processes while the
// lab is open.
func (n *Namespace) NetNS() string {
	return fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), n.tid)
}

// Nsenter returns a command that enters the namespace from outside, to which the caller
// appends the command to run there. It works while the lab is open.
func (n *Namespace) Nsenter() string {
	if n.mnt == nil {
		return fmt.Sprintf("nsenter -t %d -n", n.tid)
	}
	return fmt.Sprintf("nsenter -t %d -n -m", n.tid)
}

// Do runs f inside the namespace, on a separate thread, waits for it and returns its
// result. Sockets that f opens belong to the namespace and may be used from any goroutine.
// f may block and may call Do. If ctx has ended before, Do does not run f and returns an
// error. It does not interrupt f when ctx ends.
func (n *Namespace) Do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	result := make(chan error, 1)
	go onOwnThread(func() {
		if err := n.join(); err != nil {
			result <- fmt.Errorf("enter namespace %s: %w", n.name, err)
			return
		}
		result <- f()
	})
	return <-result
}

func (n *Namespace) join() error {
	n.files.RLock()
	defer n.files.RUnlock()

	select {
	case <-n.stop:
		return os.ErrClosed
	default:
	}

	if n.mnt != nil {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(int(n.mnt.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
	}
	return unix.Setns(int(n.net.Fd()), unix.CLONE_NEWNET)
}

// Netlink runs f inside the namespace with a new netlink handle, which it closes after f.
func (n *Namespace) Netlink(ctx context.Context, f func(*netlink.Handle) error) error {
	return n.Do(ctx, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink in %s: %w", n.name, err)
		}
		defer h.Close()
		return f(h)
	})
}

// Dial connects from inside the namespace. address must be numeric because name
// resolution would use the machine's files.
func (n *Namespace) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return inside(ctx, n, func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, address) })
}

// Listen listens inside the namespace. address must be numeric, as for Dial.
func (n *Namespace) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return inside(ctx, n, func() (net.Listener, error) { return new(net.ListenConfig).Listen(ctx, network, address) })
}

// inside is Do for an f with a result.
func inside[T any](ctx context.Context, n *Namespace, f func() (T, error)) (result T, err error) {
	err = n.Do(ctx, func() (err error) {
		result, err = f()
		return err
	})
	return result, err
}

// Exec runs a command inside the namespace. It returns its standard output and standard
// error as one text, also if the command fails. The command is killed when ctx ends or the
// namespace is closed.
func (n *Namespace) Exec(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) } // kills the command and its children

	out := &log{}
	cmd.Stdout = out
	cmd.Stderr = out
	if err := n.Start(cmd); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return out.bytes(), fmt.Errorf("%s: run %s: %w%s", n.name, name, err, out.lastLine())
	}
	return out.bytes(), nil
}
