// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestEmbedded runs the program of embedding.md on two hosts, and flanneld on a third one. All pods must
// reach each other, also while the program of one host is stopped and after its restart.
//
//stages:rest it builds a program
func TestEmbedded(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "embedded")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../embedded")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	for _, h := range l.Hosts()[:2] {
		startOne(t, h, lab.FlanneldOptions{Path: program})
	}
	startOne(t, l.Host(3), lab.FlanneldOptions{})
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
	expectStop(t, l.Host(1).Daemon())
	expectMatrix(t, l)
	startOne(t, l.Host(1), lab.FlanneldOptions{Path: program})
	expectMatrix(t, l)
}

// TestEmbeddedPage checks that embedding.md contains the program that TestEmbedded runs.
func TestEmbeddedPage(t *testing.T) {
	code, err := os.ReadFile("../embedded/main.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../Documentation/embedding.md")
	if err != nil {
		t.Fatal(err)
	}
	_, program, _ := strings.Cut(string(code), "\n\n") // the license is not in the page
	var lines []string
	for line := range strings.Lines(program) {
		if strings.TrimSpace(line) != "" {
			line = "    " + line
		}
		lines = append(lines, line)
	}
	if want := strings.Join(lines, ""); !strings.Contains(string(page), want) {
		t.Errorf("the page does not contain this program:\n%s", want)
	}
}
