// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUnmapProgram releases the pages of this program and of a mapped file. An unchanged
// mapping of the file must leave memory. Its content must stay the same, and so must that
// of a mapping with a page changed in memory.
func TestUnmapProgram(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(rand.Uint32())
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	mapped := func() []byte {
		m, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Munmap(m); err != nil {
				t.Error(err)
			}
		})
		return m
	}
	same, changed := mapped(), mapped()
	copy(changed, "changed") // like a loader that relocates code
	for _, m := range [][]byte{same, changed} {
		if err := unix.Mprotect(m, unix.PROT_READ); err != nil {
			t.Fatal(err)
		}
	}
	if string(same) != string(content) || resident(t, same) == "0 kB" {
		t.Fatal("no page of the file is in memory")
	}
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	if after := resident(t, same); after != "0 kB" {
		t.Errorf("%s of the file are still in memory", after)
	}
	if string(same) != string(content) {
		t.Error("released pages have another content")
	}
	if want := "changed" + string(content[len("changed"):]); string(changed) != want {
		t.Error("a page changed in memory was lost")
	}
}

// resident returns how much of a mapping is in memory, according to proc_pid_smaps(5).
func resident(t *testing.T, m []byte) string {
	t.Helper()
	mappings, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(fmt.Sprintf(`(?m)^%s-(?:.*\n)*?Rss: +(\d+ kB)$`, strings.TrimPrefix(fmt.Sprintf("%p", &m[0]), "0x"))).FindSubmatch(mappings)
	if found == nil {
		t.Fatalf("no mapping at %p in\n%s", &m[0], mappings)
	}
	return string(found[1])
}
