// SPDX-License-Identifier: Apache-2.0

package documentation_test

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "out") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		raw, err := os.ReadFile(path)
		all[path] = string(raw)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("only %d pages found", len(all))
	}
	return all
}

var (
	fenced  = regexp.MustCompile("(?ms)^```.*?^```$")
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)|(?:src|srcset|href)="([^"]+)"`)
	word    = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// anchors returns the set of ids that links to the headings of a page use.
func anchors(text string) map[string]bool {
	ids := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		id := word.ReplaceAllString(strings.ToLower(h[1]), "")
		ids[strings.ReplaceAll(id, " ", "-")] = true
	}
	return ids
}

func TestAnchors(t *testing.T) {
	ids := anchors("# One `two`, three\n```\n# not this\n```\n## Route protocol 98\n### a-b_c\n")
	for _, want := range []string{"one-two-three", "route-protocol-98", "a-b_c"} {
		if !ids[want] {
			t.Errorf("no %s in %v", want, ids)
		}
	}
	if len(ids) != 3 {
		t.Errorf("%v", ids)
	}
}

// TestLinks checks that links within the project lead to existing files and headings, and that each page is linked from
// another page, except for three READMEs where readers begin, and the templates of issues and pull requests. The folder Documentation must not
// link to code, which packages do not have.
func TestLinks(t *testing.T) {
	all := pages(t)
	linked := map[string]bool{
		"../README.md": true, "../backend/README.md": true, "../dist/kubernetes/chart/README.md": true,
		"../.github/ISSUE_TEMPLATE/problem.md": true, "../.github/ISSUE_TEMPLATE/wish.md": true, "../.github/PULL_REQUEST_TEMPLATE.md": true,
	}
	code := regexp.MustCompile(`^\.\./(\.github|backend|cmd|pkg|subnet|test)/`)
	for path, text := range all {
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			target := m[1] + m[2]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			file, id, _ := strings.Cut(target, "#")
			to := path
			if file != "" {
				to = filepath.Join(filepath.Dir(path), file)
			}
			linked[to] = linked[to] || to != path
			if code.MatchString(to) && !code.MatchString(path) {
				t.Errorf("%s: %s links to code", path, target)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %s links to a file that does not exist", path, target)
			} else if id != "" && !anchors(all[to])[id] {
				t.Errorf("%s: %s has no heading #%s", path, to, id)
			}
		}
	}
	for path := range all {
		if !linked[path] {
			t.Errorf("no page links to %s", path)
		}
	}
}

// references lists the pages that readers search instead of reading them to the end, each with
// the reason. They may have more words than other pages.
var references = map[string]string{
	"../CHANGELOG.md":                          "one line for each change",
	"../Documentation/internals/benchmarks.md": "results of measurements",
	"../Documentation/decisions.md":            "one entry for each decision",
	"../Documentation/reference.md":            "generated lists",
}

var indented = regexp.MustCompile(`(?m)^(    |\t|\|).*\n`)

// TestPagesAreReadable checks that a page that is not in references is short enough to be read.
// Words in tables and examples do not count. In this folder such a page must also begin with what
// the reader can do after reading it.
func TestPagesAreReadable(t *testing.T) {
	const most = 1500
	unused := maps.Clone(references)
	for path, text := range pages(t) {
		prose := indented.ReplaceAllString(fenced.ReplaceAllString(text, ""), "")
		words := len(strings.Fields(prose))
		if _, found := references[path]; found {
			delete(unused, path)
			continue
		}
		if words > most {
			t.Errorf("%s has %d words, want at most %d: split it, or add it to references", path, words, most)
		}
		if _, first, _ := strings.Cut(prose, "\n\n"); strings.HasPrefix(path, "../Documentation/") && !strings.HasPrefix(first, "After this page ") {
			t.Errorf("%s does not begin with what the reader can do after it: %.60q", path, first)
		}
	}
	for path := range unused {
		t.Errorf("references contains %s, which does not exist", path)
	}
}

// TestBackendPages checks that the page of each backend has the usual headings in the usual
// order. It may have more headings between them.
func TestBackendPages(t *testing.T) {
	want := []string{"Description", "Configuration", "Lease data", "Kernel objects owned", "MTU", "Metrics", "Failure modes", "Examples"}
	for _, s := range sections {
		if s.backend == "" {
			continue
		}
		raw, err := os.ReadFile(filepath.Join("backends", s.backend+".md"))
		if err != nil {
			t.Error(err)
			continue
		}
		at := 0
		for _, h := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(string(raw), ""), -1) {
			if at < len(want) && h[1] == want[at] {
				at++
			}
		}
		if at < len(want) {
			t.Errorf("backends/%s.md: no heading %q where it should be", s.backend, want[at])
		}
	}
}

// TestRunbooks checks that each alert links to a heading that tells what to do about it, and that troubleshooting.md
// has its name.
func TestRunbooks(t *testing.T) {
	rules, err := os.ReadFile("../dist/prometheus/flannel-rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	all := pages(t)
	alerts := strings.Split(string(rules), "- alert: ")[1:]
	for _, alert := range alerts {
		name, _, _ := strings.Cut(alert, "\n")
		m := regexp.MustCompile(`runbook_url: \S+/Documentation/([\w-]+\.md)#?(\S*)`).FindStringSubmatch(alert)
		if m == nil {
			t.Errorf("%s has no runbook_url", name)
			continue
		}
		if text, ok := all["../Documentation/"+m[1]]; !ok || m[2] != "" && !anchors(text)[m[2]] {
			t.Errorf("%s links to %s#%s, which does not exist", name, m[1], m[2])
		}
		if !strings.Contains(all["../Documentation/troubleshooting.md"], "`"+name+"`") {
			t.Errorf("troubleshooting.md does not mention %s", name)
		}
	}
}
