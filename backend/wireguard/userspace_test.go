// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
)

// TestLacking checks that the errors of checkAccess and listen name the file that cannot be
// used, and a remedy.
func TestLacking(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := checkAccess(file); err != nil {
		t.Errorf("existing file: %v", err)
	}
	_, noFolder := listen(t.Context(), file, "flannel-wg")
	for what, err := range map[string]error{"no such file": checkAccess(file + "-tun"), "not a directory": noFolder} {
		if err == nil {
			t.Errorf("no error for %q", what)
			continue
		}
		for _, part := range []string{what, file, tunDevice, socketDir, "flanneld-wireguard.conf", "flannel.privileged"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("no %q in %q", part, err)
			}
		}
	}
}

// TestIdleClients checks that close ends the device and its connections, even if a client keeps
// a connection to the device's socket open after a request or in the middle of one.
func TestIdleClients(t *testing.T) {
	for name, said := range map[string]string{"silent": "", "unfinished get": "get=1\n", "unfinished set": "set=1\nlisten_port=7\n"} {
		t.Run(name, func(t *testing.T) {
			dev := wgdevice.NewDevice(tuntest.NewChannelTUN().TUN(), conn.NewStdNetBind(), wgdevice.NewLogger(wgdevice.LogLevelSilent, ""))
			u := &userspaceDevice{dev: dev, initiator: newInitiator(t.Context(), dev)}
			path := filepath.Join(t.TempDir(), "sock")
			var err error
			if u.socket, err = net.Listen("unix", path); err != nil {
				t.Fatal(err)
			}
			u.serve(t.Context())
			c, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			// The answer shows that the client is served.
			if _, err := io.WriteString(c, "get=1\n\n"+said); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			closed := make(chan error)
			go func() { closed <- u.close() }()
			select {
			case err := <-closed:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(5 * time.Second):
				t.Fatal("close does not return")
			}
			if _, err := io.Copy(io.Discard, c); err != nil {
				t.Errorf("the client's connection: %v", err)
			}
		})
	}
}
