// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// SocketPath returns the path of the socket of the daemon that writes the given subnet
// file. The socket is beside that file and its name is derived from it, so that two
// daemons do not use the same socket.
func SocketPath(subnetFile string) string {
	dir, base := filepath.Split(filepath.Clean(subnetFile))
	if base == "subnet.env" {
		return dir + "flanneld.sock"
	}
	return dir + "flanneld-" + strings.TrimSuffix(base, ".env") + ".sock"
}

// Listen opens a local socket at path that only root can use (0600). It creates the
// folder if that is missing, and replaces a socket that an earlier daemon has left. If a
// process answers on the socket, Listen tries again for a moment, as wait.WhileInUse says,
// and then returns an error. If the file of the socket is lost, Accept returns an error soon.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) { return nil, fmt.Errorf("open status socket: %w", err) }
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fail(err)
	}
	var err error
	wait.WhileInUse(ctx, func() bool {
		var conn net.Conn
		if conn, err = (&net.Dialer{}).DialContext(ctx, "unix", path); err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	if err == nil {
		return fail(fmt.Errorf("%s is in use by another process", path))
	}
	if info, statErr := os.Lstat(path); statErr == nil && info.Mode().Type() == os.ModeSocket && errors.Is(err, syscall.ECONNREFUSED) {
		if err := os.Remove(path); err != nil {
			return fail(err)
		}
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return fail(err)
	}
	file, err := os.Lstat(path)
	if err = cmp.Or(err, os.Chmod(path, 0o600)); err != nil {
		_ = ln.Close()
		return fail(err)
	}
	return listener{ln.(*net.UnixListener), file}, nil
}

// socketCheck is the interval at which a listener looks for its file: at the moments at which the daemon looks for
// its subnet files.
const socketCheck = 30 * time.Second

// listener ends within socketCheck after its file was removed or replaced.
type listener struct {
	*net.UnixListener

	file os.FileInfo
}

func (l listener) lost() bool {
	now, err := os.Lstat(l.Addr().String())
	return err != nil || !os.SameFile(l.file, now)
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	for {
		_ = l.SetDeadline(time.Now().Add(wait.UntilNext(socketCheck))) // it fails as Accept does
		conn, err := l.UnixListener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return conn, err
		}
		if l.lost() {
			return nil, fmt.Errorf("%s is gone", l.Addr())
		}
	}
}

// Close implements net.Listener. It does not remove the socket of another listener.
func (l listener) Close() error {
	if l.lost() {
		l.SetUnlinkOnClose(false)
	}
	return l.UnixListener.Close()
}

// Client returns an HTTP client that sends every request to the socket at path.
func Client(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		DisableKeepAlives: true,
	}}
}
