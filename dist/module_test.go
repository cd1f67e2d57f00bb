// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"os/exec"
	"strings"
	"testing"
)

// TestModule checks that make module replaces the path of the module in every file, so that all
// packages of a fork exist and are found. go list runs offline.
//
//stages:rest it lists all packages of a clone, which takes seconds
func TestModule(t *testing.T) {
	const fork = "example.org/you/flanneld"
	dir := cloneTree(t, commitTree(t))
	module := command(t, "go", "-C", dir, "list", "-m")
	before := command(t, "go", "-C", dir, "list", "./...")

	out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", dir, "module", "NAME=").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "make module: NAME is missing, ") {
		t.Errorf("make module without NAME: %v: %s; want an error that names NAME", err, out)
	}

	command(t, "make", "-s", "-C", dir, "module", "NAME="+fork)
	if left, err := exec.CommandContext(t.Context(), "git", "-C", dir, "grep", "-F", module).Output(); err == nil {
		t.Errorf("files still contain the old path:\n%s", left)
	}
	t.Setenv("GOPROXY", "off")
	t.Setenv("GOFLAGS", "-mod=readonly")
	if want, got := strings.ReplaceAll(before, module, fork), command(t, "go", "-C", dir, "list", "./..."); got != want {
		t.Errorf("packages of the fork:\n%s\nwant\n%s", got, want)
	}
	command(t, "go", "-C", dir, "list", "-deps", "-test", "./...") // fails if a package that is imported does not exist
}
