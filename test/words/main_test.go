// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/test/must"
)

// tree writes files into a temporary folder and returns the folder.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	const words = "# forms\n\\bnobody\\b\tname the subject\n^what [^?]*$\tno free clause\n"
	dir := tree(t, map[string]string{
		"words.txt":      words,
		"new/a.go":       "package a\n\n// F is for\n// nobody. What it is.\nfunc F() {} // Is it? What is it?\n",
		"new/text.go":    "package a\n\nconst nobody = \"nobody\"\n",
		"old/below/c.sh": "#!/bin/sh\nset -eu # nobody\n",
		"page.md":        "Nobody.\n",
		"testdata/e.md":  "Nobody.\n",
	})
	var out bytes.Buffer
	err := must.Catch(func() { run([]string{"-root", dir, "-words", filepath.Join(dir, "words.txt")}, &out) })
	want := []string{
		`new/a.go:3: "nobody": name the subject`,
		`new/a.go:3: "What it is.": no free clause`,
		`old/below/c.sh:2: "nobody": name the subject`,
		`page.md:1: "Nobody": name the subject`,
	}
	if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(out.String()), "\n")); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	if err == nil || !strings.HasPrefix(err.Error(), "4 findings") {
		t.Errorf("got %v, want 4 findings", err)
	}
}

func TestRuleNeedsReason(t *testing.T) {
	dir := tree(t, map[string]string{"words.txt": "\\bnobody\\b\n"})
	err := must.Catch(func() { run([]string{"-root", dir, "-words", filepath.Join(dir, "words.txt")}, os.Stdout) })
	if err == nil || !strings.Contains(err.Error(), "has no reason") {
		t.Errorf("got %v", err)
	}
}

func TestText(t *testing.T) {
	for name, tt := range map[string]struct {
		file, text string
		want       []string
	}{
		"doc comment": {"a.go", "package a\n\n// F is one.\n//\n// Two.\n//\n//\tcode\nfunc F() {}\n", []string{"F is one.", "Two."}},
		"directive":   {"a.go", "package a\n\n//go:generate nothing\n", []string{""}},
		"shell":       {"a.sh", "#!/bin/sh\n# One\n# two.\nx=a#b # three\n# four\n", []string{"One two.", "three", "four"}},
		"makefile":    {"Makefile", "all: x ## build\n\techo '#' # y\n", []string{"build", "y"}},
		"page":        {"a.md", "# Heading\n\nOne\n`code` two.\n\n    block\n\n- item\n  goes on\n- next\n", []string{"One X two.", "item goes on", "next"}},
		"table":       {"a.md", "| Title | Other |\n|---|---|\n| one | `x` |\n", []string{"one", "X"}},
		"fence":       {"a.md", "```\ncode\n```\nAfter [a link](to/it).\n", []string{"After [a link]."}},
		"other file":  {"a.txt", "One.\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			paragraphs := extractor(tt.file)
			var got []string
			if paragraphs != nil {
				for _, p := range paragraphs(tt.text) {
					if text := strings.Join(strings.Fields(p.text), " "); text != "" || tt.want != nil && tt.want[0] == "" {
						got = append(got, text)
					}
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("paragraphs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSentences(t *testing.T) {
	want := []string{"One is 1.5 s.", "Two:", "three (four).", "Is it five?", "six"}
	if diff := cmp.Diff(want, sentences("One is 1.5 s. Two:\nthree (four). Is it five? six")); diff != "" {
		t.Errorf("sentences (-want +got):\n%s", diff)
	}
}
