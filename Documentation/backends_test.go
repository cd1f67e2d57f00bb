// SPDX-License-Identifier: Apache-2.0

package documentation_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
)

// TestBackendFolders checks that the folder of each backend has a README, which backend/README.md links, and that each
// README names tests that exist.
func TestBackendFolders(t *testing.T) {
	index := pages(t)["../backend/README.md"]
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range catalog.Registry.Types() {
		if folder := strings.ReplaceAll(kind, "-", ""); !strings.Contains(index, "("+folder+"/README.md)") {
			t.Errorf("backend/README.md does not link %s/README.md", folder)
		}
	}

	sources := testSources(t, "../backend/*/*_test.go", "../test/e2e/*_test.go")
	readmes, err := filepath.Glob("../backend/*/README.md")
	if err != nil || len(readmes) == 0 {
		t.Fatalf("no README of a backend: %v", err)
	}
	for _, path := range readmes {
		names := regexp.MustCompile(`Test[A-Z]\w*`).FindAllString(pages(t)[path], -1)
		if len(names) == 0 {
			t.Errorf("%s names no test", path)
		}
		for _, name := range names {
			if !strings.Contains(sources, "func "+name) {
				t.Errorf("%s names %s, which does not exist", path, name)
			}
		}
	}
}

func testSources(t *testing.T, patterns ...string) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			raw, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(raw)
		}
	}
	return all.String()
}
