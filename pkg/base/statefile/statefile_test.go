// SPDX-License-Identifier: Apache-2.0

package statefile_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/statefile"
)

type content struct{ Subnet string }

func open(t *testing.T, dir string) *statefile.File[content] {
	t.Helper()
	f, err := statefile.Open[content](dir, "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestRoundTrip(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "flannel")
	f := open(t, dir)
	if _, ok, err := f.Load(); ok || err != nil {
		t.Fatalf("Load without a file: %v, %v", ok, err)
	}
	for _, s := range []string{"10.5.1.0/24", "10.5.2.0/24"} {
		if err := f.Save(content{s}); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	got, ok, err := open(t, dir).Load()
	if err != nil || !ok || got.Subnet != "10.5.2.0/24" {
		t.Errorf("Load after reopening: %+v, %v, %v", got, ok, err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "node.json"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v, error %v, want %o", path, info.Mode(), err, want)
		}
	}
	if names, _ := os.ReadDir(dir); len(names) != 2 {
		t.Errorf("%d files left in the directory, want state and lock", len(names))
	}
}

func TestIntact(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(path string) error
	}{
		{"removed", os.Remove},
		{"cut", func(path string) error { return os.Truncate(path, 5) }},
		{"written to", func(path string) error { return os.WriteFile(path, []byte("{}"), 0o600) }},
		{"replaced by a copy", func(path string) error {
			text, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path+".copy", text, 0o600)
			}
			return errors.Join(err, os.Rename(path+".copy", path))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			f := open(t, dir)
			if f.Intact() {
				t.Error("intact before it was saved")
			}
			for range 2 {
				if err := f.Save(content{"10.5.1.0/24"}); err != nil {
					t.Fatal(err)
				}
				if !f.Intact() {
					t.Error("not intact right after it was saved")
				}
				if err := tc.do(filepath.Join(dir, "node.json")); err != nil {
					t.Fatal(err)
				}
				if f.Intact() {
					t.Error("still intact")
				}
			}
		})
	}
}

// TestSecondProcess expects that a file which is open cannot be opened again: neither by this process, nor by
// another one, which runs this test too. Files with another name in the same directory are independent.
func TestSecondProcess(t *testing.T) {
	const variable = "FLANNELD_TEST_STATE_DIR" // set in the second process
	dir, second := os.LookupEnv(variable)
	if !second {
		dir = t.TempDir()
		open(t, dir)
	}
	if _, err := statefile.Open[content](dir, "node"); !errors.Is(err, statefile.ErrInUse) {
		t.Errorf("second Open: %v, want ErrInUse", err)
	}
	other, err := statefile.Open[content](dir, "other")
	if err != nil {
		t.Fatalf("another name in the same directory: %v", err)
	}
	_ = other.Close()
	if second {
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSecondProcess$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestSecondProcess") {
		t.Errorf("the second process: %v\n%s", err, out)
	}
}

func TestLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "flannel")
	lock, err := statefile.Lock(dir, "device")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%s: mode %v, error %v, want 0700", dir, info.Mode(), err)
	}
	if _, err := statefile.Lock(dir, "device"); !errors.Is(err, statefile.ErrInUse) {
		t.Errorf("second Lock: %v, want ErrInUse", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if lock, err = statefile.Lock(dir, "device"); err != nil {
		t.Fatalf("Lock after Close: %v", err)
	}
	_ = lock.Close()
}

// TestLockFilesGo checks that no file stays of a lock that was released, or of a state that was removed, and
// that two processes never have one lock, although the files come and go.
func TestLockFilesGo(t *testing.T) {
	dir := t.TempDir()
	f, err := statefile.Open[string](dir, "network")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Save("a"); err != nil {
		t.Fatal(err)
	}
	if err := f.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}

	var holders, taken atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				lock, err := statefile.Lock(dir, "device")
				if errors.Is(err, statefile.ErrInUse) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				taken.Add(1)
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				holders.Add(-1)
				_ = lock.Close()
			}
		})
	}
	wg.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || taken.Load() == 0 {
		t.Errorf("%v is left (%v), and the lock was taken %d times", left, err, taken.Load())
	}
}

func TestUnusable(t *testing.T) {
	for name, raw := range map[string]string{
		"damaged": `{"version":1,"state":{"Subnet":"10.5`,
		"version": `{"version":7,"state":{}}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "node.json"), []byte(raw), 0o600); err != nil {
				t.Fatal(err)
			}
			f := open(t, dir)
			_, ok, err := f.Load()
			if ok || err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("Load: %v, %v; want an error about %q", ok, err, name)
			}
			if err := f.Save(content{"x"}); err != nil {
				t.Errorf("Save over it: %v", err)
			}
		})
	}
}
