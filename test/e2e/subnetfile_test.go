// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
)

// TestSubnetFile checks that the daemon writes a subnet file again that another program
// has removed or changed, and replaces a damaged one at its start. The daemon must not be
// ready while it cannot write the file.
func TestSubnetFile(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 4}, `{"Type":"vxlan"}`)

	removed, altered := l.Host(1), l.Host(2)
	content := map[*lab.Host]string{}
	for _, h := range []*lab.Host{removed, altered} {
		startOne(t, h, lab.FlanneldOptions{})
		content[h] = readSubnetFile(t, h)
	}
	if err := os.Remove(removed.Path(lab.SubnetFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(altered.Path(lab.SubnetFile), []byte("FLANNEL_SUBNET=10.99.0.1/24\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	t.Run("damaged before the start", func(t *testing.T) {
		h := l.Host(3)
		if err := os.MkdirAll(filepath.Dir(h.Path(lab.SubnetFile)), 0o755); err != nil {
			t.Fatal(err)
		}
		damaged := "FLANNEL_SUBNET=10.5.1.1\nFLANNEL_MTU\n\x00\xff=\n" + strings.Repeat("x", 1<<20)
		if err := os.WriteFile(h.Path(lab.SubnetFile), []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		d := startOne(t, h, lab.FlanneldOptions{})
		if text := readSubnetFile(t, h); !strings.HasPrefix(text, "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.") || strings.Contains(text, "x") {
			t.Errorf("the damaged subnet file is not replaced:\n%s", text)
		}
		if lines := linesWith(d, lab.SubnetFile); len(lines) == 0 || len(d.Log()) > 10_000 {
			t.Errorf("want a short log that names the subnet file:\n%.10000s", d.Log())
		}
	})
	t.Run("cannot be written", func(t *testing.T) { testUnwritableSubnetFile(t, l.Host(4)) })

	for _, h := range []*lab.Host{removed, altered} {
		eventually(t, h.Name()+" writes its subnet file again", func() error {
			text, err := os.ReadFile(h.Path(lab.SubnetFile))
			if err == nil && string(text) != content[h] {
				err = fmt.Errorf("it contains %q, want %q", text, content[h])
			}
			return err
		})
	}
}

func readSubnetFile(t *testing.T, h *lab.Host) string {
	t.Helper()
	text, err := os.ReadFile(h.Path(lab.SubnetFile))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func testUnwritableSubnetFile(t *testing.T, h *lab.Host) {
	dir := filepath.Dir(lab.SubnetFile)
	err := h.Do(testContext(t), func() error {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		return unix.Mount("lab", dir, "tmpfs", unix.MS_RDONLY, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	s := newSupervisor(t, h, "notify")
	d := start(t, h, lab.FlanneldOptions{Env: s.env()})
	expectLog(t, d, "no subnet file, trying again")
	if got := s.next(t, 3*time.Second); got != "" {
		t.Errorf("notification %q without a subnet file, want none", got)
	}
	status, body, _ := d.Get(testContext(t), "/readyz")
	if status != 503 || !strings.Contains(body, "subnet file: ") || !strings.Contains(body, "read-only file system") {
		t.Errorf("/readyz: %d %q, want 503 with the reason", status, body)
	}
	expectOnce(t, d, "no subnet file, trying again")

	if err := h.Do(testContext(t), func() error { return unix.Unmount(dir, 0) }); err != nil {
		t.Fatal(err)
	}
	s.expect(t, "READY=1")
	expectReady(t, d)
}

// TestTwoDaemonsOnOneSubnetFile checks that a second daemon with the same subnet file
// exits, because each would overwrite what the other has written.
func TestTwoDaemonsOnOneSubnetFile(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	first := startOne(t, l.Host(1), lab.FlanneldOptions{})
	second := start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--healthz-port=0"}})
	expectFailure(t, second, "another flanneld", lab.SubnetFile)
	if err := first.Ended(); err != nil {
		t.Error(err)
	}
	if n := len(leases(t, l)); n != 1 {
		t.Errorf("%d leases, want only that of the first daemon", n)
	}
}
