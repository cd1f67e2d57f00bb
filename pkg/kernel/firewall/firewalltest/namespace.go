// SPDX-License-Identifier: Apache-2.0

// Package firewalltest contains the tests that every flavour of the firewall must pass.
// They run in network namespaces of their own.
package firewalltest

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Enter moves the calling test, its goroutine and the programs that it runs into a new
// network namespace and a new mount namespace. The mount namespace has its own /run,
// because iptables locks a file there. Both namespaces disappear when the test ends.
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
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, &stderr)
	}
	return string(out)
}

// Ruleset returns the text of each chain that nft lists, by family, table and name, such as "ip filter
// FORWARD". The lines of a table that belong to no chain, without its comment, have the key of the table, such
// as "ip filter". Ruleset runs one program, because the tests list rules hundreds of times.
func Ruleset(t testing.TB) map[string]string {
	t.Helper()
	ruleset := map[string]string{}
	table := ""
	chain := ""
	for line := range strings.Lines(Shell(t, "nft --stateless list ruleset")) {
		name := strings.TrimSuffix(line, " {\n")
		switch {
		case strings.HasPrefix(line, "#"), strings.HasPrefix(line, "\tcomment "), line == "}\n":
		case strings.HasPrefix(line, "table "):
			table = strings.TrimPrefix(name, "table ")
			chain = ""
			ruleset[table] = ""

		case strings.HasPrefix(line, "\tchain "):
			chain = table + " " + strings.TrimPrefix(name, "\tchain ")
			ruleset[chain] = ""
		case line == "\t}\n":
			chain = ""
		case chain != "":
			ruleset[chain] += line
		default:
			ruleset[table] += line
		}
	}
	return ruleset
}
