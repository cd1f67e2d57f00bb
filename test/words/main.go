// SPDX-License-Identifier: Apache-2.0

// Command words checks the language of comments and documentation: it reports every
// sentence that contains one of the forms in words.txt, with the reason.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/test/must"
)

func main() {
	must.Main("words", func(context.Context) { run(os.Args[1:], os.Stdout) })
}

func run(args []string, out io.Writer) {
	flags := flag.NewFlagSet("words", flag.ContinueOnError)
	root := flags.String("root", ".", "folder to check")
	words := flags.String("words", "test/words/words.txt", "file with the forms")
	must.Do(flags.Parse(args))
	found := check(*root, readRules(*words))
	for _, f := range found {
		fmt.Fprintf(out, "%s:%d: %q: %s\n", f.path, f.line, f.match, f.reason)
	}
	if len(found) > 0 {
		must.Fail("%d findings; Documentation/contributing.md has the rules", len(found))
	}
}

// rule is a form that must not be used.
type rule struct {
	form   *regexp.Regexp
	reason string
}

// readRules reads the rules in a file. A line has a regular expression, tabs, and the reason.
// The expression is matched against one sentence at a time, and ignores case. Empty lines and
// comments, which begin with #, are omitted.
func readRules(path string) (rules []rule) {
	for line := range strings.Lines(string(must.Get(os.ReadFile(path)))) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		expr, reason, _ := strings.Cut(line, "\t")
		if reason = strings.TrimSpace(reason); reason == "" {
			must.Fail("%s: %q has no reason after a tab", path, line)
		}
		form, err := regexp.Compile("(?i)" + expr)
		if err != nil {
			must.Fail("%s: %w", path, err)
		}
		rules = append(rules, rule{form, reason})
	}
	return rules
}

// finding is a match of a rule.
type finding struct {
	path, match, reason string
	line                int // first line of the paragraph or comment
}

func check(root string, rules []rule) (found []finding) {
	must.Do(filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		must.Do(err)
		if d.IsDir() {
			if slices.Contains(skipped, d.Name()) {
				return fs.SkipDir
			}
			return nil
		}

		paragraphs := extractor(d.Name())
		if paragraphs == nil {
			return nil
		}

		name := must.Get(filepath.Rel(root, path))
		for _, p := range paragraphs(string(must.Get(os.ReadFile(path)))) {
			for _, sentence := range sentences(p.text) {
				for _, r := range rules {
					if match := r.form.FindString(sentence); match != "" {
						found = append(found, finding{name, oneline.Shorten(match, 60), r.reason, p.line})
					}
				}
			}
		}
		return nil
	}))
	return found
}

// skipped are the names of folders without text of this project's authors, or with generated
// text.
var skipped = []string{".git", "bin", "out", "testdata", "base"}
