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

// TestLacking names what a host can do that lets flanneld run, but no more.
func TestLacking(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := usable(file); err != nil {
		t.Errorf("a device that is there: %v", err)
	}
	_, noFolder := listen(t.Context(), file, "flannel-wg")
	for what, err := range map[string]error{"no such file": usable(file + "-tun"), "not a directory": noFolder} {
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

// TestIdleClients has programs hold the device's socket open, before a request and in
// the middle of one: the device ends all the same, and so do they.
func TestIdleClients(t *testing.T) {
	for name, said := range map[string]string{"silent": "", "amid a question": "get=1\n", "amid a setting": "set=1\nlisten_port=7\n"} {
		t.Run(name, func(t *testing.T) {
			dev := wgdevice.NewDevice(tuntest.NewChannelTUN().TUN(), conn.NewStdNetBind(), wgdevice.NewLogger(wgdevice.LogLevelSilent, ""))
			u := &userspaceDevice{dev: dev, greeter: newGreeter(dev)}
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
			// The answer says that the client is served.
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
				t.Fatal("the device does not end")
			}
			if _, err := io.Copy(io.Discard, c); err != nil {
				t.Errorf("the client's connection: %v", err)
			}
		})
	}
}
