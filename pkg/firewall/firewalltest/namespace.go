// Package firewalltest is what the flavours of the firewall have to pass, in
// network namespaces of the tests' own.
package firewalltest

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Enter puts the calling test, its goroutine and the programs that it runs,
// into fresh namespaces: of the network, and of mounts, because the lock of
// iptables is a file. They are gone when the test ends.
func Enter(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces: run it as root")
	}
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
		t.Fatal("unshare: ", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal("make mounts private: ", err)
	}
	if err := unix.Mount("test", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		t.Fatal("mount /run: ", err)
	}
}

// Shell runs a script in the calling test's namespaces and returns what it
// prints on stdout.
func Shell(t testing.TB, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
	out, err := cmd.Output()
	if err != nil {
		var stderr []byte
		if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // it is what Output documents
			stderr = e.Stderr
		}
		t.Fatalf("%s: %v: %s", script, err, stderr)
	}
	return string(out)
}
