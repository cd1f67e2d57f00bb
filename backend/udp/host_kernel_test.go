// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
)

// childEnv makes the test binary act as the next start of a daemon: it opens the device twice
// and prints the result.
const childEnv = "UDP_TEST_NEXT_START"

func TestMain(m *testing.M) {
	lab.RunChild()
	if os.Getenv(childEnv) != "" {
		h := NewHost(Settings{})
		err := h.usable(deviceName)
		if err == nil {
			err = openAndStore(context.Background(), h)
		}
		if err == nil { // open it again, as after a change of the external interface
			err = openAndStore(context.Background(), h)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, h.device.Name(), h.askedSystemd, h.device.Alive())
		_ = h.Close()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// openAndStore opens the device of h, and passes it to systemd.
func openAndStore(ctx context.Context, h *Host) error {
	err := h.openDevice(ctx, deviceName)
	if err == nil {
		h.store(ctx, h.device)
	}
	return err
}

// oneHost creates a host in a network namespace. ctx ends after 30 s, which limits the
// duration of the test.
func oneHost(t *testing.T) (ctx context.Context, l *lab.Lab) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes a network namespace: run it as root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return ctx, l
}

// TestKernelSystemdKeepsTheDevice checks that the device survives a restart under systemd. The
// test plays systemd: it receives the device from a Host, keeps it when that Host closes, and
// passes it to a new process, which cannot create one. That process must not pass the device to systemd again.
func TestKernelSystemdKeepsTheDevice(t *testing.T) {
	ctx, l := oneHost(t)
	systemd := listenAsSystemd(t)
	h := NewHost(Settings{})
	if err := l.Host(1).Do(ctx, func() error { return openAndStore(ctx, h) }); err != nil {
		t.Fatal(err)
	}
	kept := receiveKept(t, systemd)
	defer kept.Close()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	index := func() string {
		out, err := l.Host(1).Exec(ctx, "sh", "-c", "ip -o link show flannel0 || true")
		if err != nil {
			t.Fatal(err)
		}
		number, _, _ := strings.Cut(string(out), ":")
		return number
	}
	before := index()
	// systemd passes the process id in an environment variable.
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", `mount -t tmpfs empty /dev/net && LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=flannel0 exec "$0"`, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.ExtraFiles = []*os.File{kept}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := l.Host(1).Do(ctx, cmd.Start); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if err != nil || !strings.Contains(out.String(), "flannel0 true true\n") || !strings.Contains(out.String(), "systemd has kept") {
		t.Errorf("next start: %v, %s", err, &out)
	}
	if after := index(); after != before || after == "" {
		t.Errorf("device %q, was %q", after, before)
	}
	last, err := net.Dial("unixgram", systemd.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer last.Close()
	if _, err := last.Write([]byte("last")); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, 1000)
	n, err := systemd.Read(message)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(message[:n]); got != "last" {
		t.Errorf("the next start sent %q to systemd, want no message: systemd keeps the device already", got)
	}
}

// listenAsSystemd returns the socket to which this process sends notifications during the test.
func listenAsSystemd(t *testing.T) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { systemd.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return systemd
}

// TestKernelMessagesLost checks a process that cannot change sysctls, as in many containers: it
// must log once that ICMP errors are lost, unless the sysctls are set already.
func TestKernelMessagesLost(t *testing.T) {
	ctx, l := oneHost(t)
	const readOnly = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && "
	for _, tc := range []struct {
		name, before string
		lines        int
	}{
		{"writable", "", 0},
		{"read-only", readOnly, 1},
		{"read-only, and set for new devices", "sysctl -qw net.ipv4.conf.default.accept_local=1 && " + readOnly, 0},
		{"read-only, and set for all", "sysctl -qw net.ipv4.conf.default.accept_local=0 net.ipv4.conf.all.accept_local=1 && " + readOnly, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", tc.before+`exec "$0"`, os.Args[0])
			cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), childEnv+"=1"), &out, &out
			if err := l.Host(1).Do(ctx, cmd.Start); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v: %s", err, &out)
			}
			if n := strings.Count(out.String(), "cannot send ICMP errors"); n != tc.lines {
				t.Errorf("%d log lines about ICMP errors, want %d: %s", n, tc.lines, &out)
			}
		})
	}
}

// receiveKept returns the file that the service asks systemd to keep.
func receiveKept(t *testing.T, systemd *net.UnixConn) *os.File {
	t.Helper()
	_ = systemd.SetReadDeadline(time.Now().Add(30 * time.Second))
	for {
		buf, oob := make([]byte, 1000), make([]byte, unix.CmsgSpace(4))
		n, noob, _, _, err := systemd.ReadMsgUnix(buf, oob)
		if err != nil {
			t.Fatal(err)
		}
		if string(buf[:n]) != "FDSTORE=1\nFDNAME=flannel0" {
			continue
		}
		messages, err := unix.ParseSocketControlMessage(oob[:noob])
		if err != nil {
			t.Fatal(err)
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fds[0]), "kept")
	}
}
