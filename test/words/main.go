// SPDX-License-Identifier: Apache-2.0

// Command words checks the language of comments and documentation: it reports every
// sentence that contains one of the forms in words.txt, with the reason.
package main

import (
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "words:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("words", flag.ContinueOnError)
	root := flags.String("root", ".", "folder to check")
	words := flags.String("words", "test/words/words.txt", "file with the forms")
	if err := flags.Parse(args); err != nil {
		return err
	}
	rules, err := readRules(*words)
	if err != nil {
		return err
	}
	found, err := check(*root, rules)
	if err != nil {
		return err
	}
	for _, f := range found {
		fmt.Fprintf(out, "%s:%d: %q: %s\n", f.path, f.line, f.match, f.reason)
	}
	if len(found) > 0 {
		return fmt.Errorf("%d findings; Documentation/contributing.md has the rules", len(found))
	}
	return nil
}

// rule is a form that must not be used.
type rule struct {
	form   *regexp.Regexp
	reason string
}

// readRules reads the rules in a file. A line has a regular expression, tabs, and the reason.
// The expression is matched against one sentence at a time, and ignores case. Empty lines and
// comments, which begin with #, are omitted.
func readRules(path string) ([]rule, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var rules []rule
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		expr, reason, _ := strings.Cut(line, "\t")
		if reason = strings.TrimSpace(reason); reason == "" {
			return nil, fmt.Errorf("%s: %q has no reason after a tab", path, line)
		}
		form, err := regexp.Compile("(?i)" + expr)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		rules = append(rules, rule{form, reason})
	}
	return rules, nil
}

// finding is a match of a rule.
type finding struct {
	path, match, reason string
	line                int // first line of the paragraph or comment
}

func check(root string, rules []rule) (found []finding, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
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

		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}

		for _, p := range paragraphs(string(raw)) {
			for _, sentence := range sentences(p.text) {
				for _, r := range rules {
					if match := r.form.FindString(sentence); match != "" {
						found = append(found, finding{name, shorten(match), r.reason, p.line})
					}
				}
			}
		}
		return nil
	})
	return found, err
}

// skipped are the names of folders without text of this project's authors, or with generated
// text.
var skipped = []string{".git", "bin", "out", "testdata", "base"}

func shorten(s string) string {
	const most = 60
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
