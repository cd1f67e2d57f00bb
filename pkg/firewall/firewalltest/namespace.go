// SPDX-License-Identifier: Apache-2.0

// Package firewalltest contains the tests that every flavour of the firewall must pass.
// They run in network namespaces of their own.
package firewalltest

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Enter moves the calling test, its goroutine and the programs that it runs into a new
// network namespace and a new mount namespace. The latter is needed because iptables
// locks a file. Both disappear when the test ends.
func Enter(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces: run it as root")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
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

// Shell runs a script in the calling test's namespaces and returns its standard output.
func Shell(t testing.TB, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
	out, err := cmd.Output()
	if err != nil {
		var stderr []byte
		if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // Output documents this type
			stderr = e.Stderr
		}
		t.Fatalf("%s: %v: %s", script, err, stderr)
	}
	return string(out)
}
