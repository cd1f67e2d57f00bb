// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

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
// and then returns an error.
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
	if err := os.Chmod(path, 0o600); err != nil {
		_ = ln.Close()
		return fail(err)
	}
	return ln, nil
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
