// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src.json"), filepath.Join(dir, "net.d", "10-flannel.conflist")
	if err := os.WriteFile(src, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(src, 0o640); err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	if code := run([]string{src, dst}, &stderr); code != 1 || !strings.Contains(stderr.String(), "net.d") {
		t.Errorf("without a destination folder: exit code %d, %q", code, stderr.String())
	}
	if err := os.Mkdir(filepath.Dir(dst), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{"", "old"} {
		if before != "" {
			if err := os.WriteFile(dst, []byte(before), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if code := run([]string{src, dst}, &stderr); code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr.String())
		}
		text, err := os.ReadFile(dst)
		info, _ := os.Stat(dst)
		if err != nil || string(text) != "{}" || info.Mode().Perm() != 0o640 {
			t.Errorf("%q, %v, %v; want the source's content and mode", text, info.Mode(), err)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(dst))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestInstallBeside checks that no temporary file is created in TMPDIR, even if that
// directory is on the file system of the destination.
func TestInstallBeside(t *testing.T) {
	dir := t.TempDir()
	src, dst, tmp := filepath.Join(dir, "src.json"), filepath.Join(dir, "10-flannel.conflist"), filepath.Join(dir, "tmp")
	if err := os.WriteFile(src, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	before := time.Unix(1, 0)
	if err := os.Chtimes(tmp, before, before); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	var stderr strings.Builder
	if code := run([]string{src, dst}, &stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr.String())
	}
	if info, err := os.Stat(tmp); err != nil || !info.ModTime().Equal(before) {
		t.Errorf("there was a file in TMPDIR: %v, %v", info.ModTime(), err)
	}
}

// TestBrokenSource checks that an empty or broken file does not replace the present one.
func TestBrokenSource(t *testing.T) {
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	for _, tt := range []struct{ dst, source, want string }{
		{"10-flannel.conflist", "", "src is empty"},
		{"10-flannel.conflist", `{"name": "cbr0", "plug`, "src is not JSON"},
		{"flannel", "", "src is empty"},
	} {
		dst := filepath.Join(dir, tt.dst)
		for file, content := range map[string]string{src: tt.source, dst: "old"} {
			if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var stderr strings.Builder
		code := run([]string{src, dst}, &stderr)
		if code != 1 || !strings.Contains(stderr.String(), tt.want) || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%+v: exit code %d, %q", tt, code, stderr.String())
		}
		if text, err := os.ReadFile(dst); string(text) != "old" {
			t.Errorf("%+v: the former file is %q now, %v", tt, text, err)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 3 {
		t.Errorf("left behind: %v", entries)
	}
	if code := run([]string{os.Args[0], filepath.Join(dir, "flannel")}, os.Stderr); code != 0 {
		t.Error("a program is not installed")
	}
}

func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	for name, args := range map[string][]string{
		"usage:":             {"one"},
		"usage: install":     {"one", "two", "three"},
		"no such file":       {filepath.Join(dir, "none"), filepath.Join(dir, "dst")},
		"not a regular file": {dir, filepath.Join(dir, "dst")},
	} {
		var stderr strings.Builder
		if code := run(args, &stderr); code != 1 || !strings.Contains(stderr.String(), name) || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d, %q; want 1 and one line with %q", args, code, stderr.String(), name)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
}
