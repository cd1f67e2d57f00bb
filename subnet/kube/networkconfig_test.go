// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestWatchConfigFollowsAConfigMap replaces the folder of the configuration file, as an update of a
// ConfigMap's volume does: the file is a link into a folder that is a link, too. Then it deletes
// the file. WatchConfig must report each new text once, and nil in the end.
func TestWatchConfigFollowsAConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(name, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "net-conf.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(name, filepath.Join(dir, "tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "net-conf.json")
	version("1", "one")
	if err := os.Symlink("..data/net-conf.json", path); err != nil {
		t.Fatal(err)
	}
	m := &Manager{cfg: Config{NetConfig: path}, timing: timing{poll: time.Millisecond}}
	ctx, cancel := context.WithCancel(t.Context())
	seen, ended := make(chan []byte), make(chan error, 1)
	go func() { ended <- m.WatchConfig(ctx, func(text []byte) { seen <- text }) }()
	expect := func(want []byte) {
		t.Helper()
		select {
		case got := <-seen:
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		case <-time.After(patience):
			t.Fatalf("the sink of WatchConfig was not called with %q", want)
		}
	}
	expect([]byte("one"))
	version("2", "one") // the same text is not reported again
	version("3", "two")
	expect([]byte("two"))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	expect(nil)
	cancel()
	if err := <-ended; err == nil {
		t.Error("no error at the end")
	}
}
