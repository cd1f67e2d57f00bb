// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestToolsFollowVersion checks that make lets a link in bin/tools lead to the tool of the
// current version, even if a tool of another version was built later.
func TestToolsFollowVersion(t *testing.T) {
	makefile, err := filepath.Abs("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	built := t.TempDir()
	for i, version := range []string{"v1", "v2"} {
		path := filepath.Join(built, "helm-"+version)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1+i), 0)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	for _, version := range []string{"v2", "v1", "v2"} {
		cmd := exec.CommandContext(t.Context(), "make", "-C", dir, "-f", makefile, "bin/tools/helm", "COMPONENTS="+built, "HELM_VERSION="+version)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got, err := os.Readlink(filepath.Join(dir, "bin/tools/helm"))
		if want := filepath.Join(built, "helm-"+version); err != nil || got != want {
			t.Errorf("helm is %q (%v), want %s", got, err, want)
		}
	}
}
