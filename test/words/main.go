// SPDX-License-Identifier: Apache-2.0

// Command words checks the language of comments and documentation: it reports every
// sentence that contains one of the forms in words.txt, with the reason.
//
// The files and folders in unclean.txt are exempt, because they are not rewritten yet. That
// list can only shrink: an entry without a finding is an error, too. With -shrink the command
// removes such entries.
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
	lists := flags.String("lists", "test/words", "folder of words.txt and unclean.txt")
	shrink := flags.Bool("shrink", false, "remove clean files and folders from unclean.txt")
	if err := flags.Parse(args); err != nil {
		return err
	}
	rules, err := readRules(filepath.Join(*lists, "words.txt"))
	if err != nil {
		return err
	}
	listFile := filepath.Join(*lists, "unclean.txt")
	list, err := readLines(listFile)
	if err != nil {
		return err
	}
	found, err := check(*root, rules)
	if err != nil {
		return err
	}
	exempt, clean := split(list, found)
	failed := 0
	for _, f := range found {
		if covers(exempt, f.path) == "" {
			failed++
			fmt.Fprintf(out, "%s:%d: %q: %s\n", f.path, f.line, f.match, f.reason)
		}
	}
	if *shrink && len(clean) > 0 {
		if err := rewrite(listFile, clean); err != nil {
			return err
		}
		clean = nil
	}

	for _, entry := range clean {
		failed++
		fmt.Fprintf(out, "%s: %s is clean or does not exist: remove it with go run ./test/words -shrink\n", listFile, entry)
	}
	if failed > 0 {
		return fmt.Errorf("%d findings; Documentation/contributing.md has the rules", failed)
	}
	return nil
}

// rule is a form that must not be used.
type rule struct {
	form   *regexp.Regexp
	reason string
}

// readRules reads the rules in a file. A line has a regular expression, tabs, and the reason.
// The expression is matched against one sentence at a time, and ignores case.
func readRules(path string) ([]rule, error) {
	lines, err := readLines(path)
	if err != nil {
		return nil, err
	}
	var rules []rule
	for _, line := range lines {
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

// readLines returns the lines of a file without surrounding spaces. It omits empty lines and
// comments, which begin with #.
func readLines(path string) ([]string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var lines []string
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// finding is a match of a rule.
type finding struct {
	path, match, reason string
	line                int // first line of the paragraph or comment
}

// check returns all findings below root.
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

// split divides the entries of a list of files and folders. exempt contains those with
// findings, and clean those without.
func split(list []string, found []finding) (exempt, clean []string) {
	used := map[string]bool{}
	for _, f := range found {
		used[covers(list, f.path)] = true
	}
	for _, entry := range list {
		if used[entry] {
			exempt = append(exempt, entry)
		} else {
			clean = append(clean, entry)
		}
	}
	return exempt, clean
}

// covers returns the entry of the list that is path or its folder, or "" if there is none.
// The entry of a folder does not cover the folders in it: each of them needs its own.
func covers(list []string, path string) string {
	for _, entry := range []string{path, filepath.Dir(path)} {
		if slices.Contains(list, entry) {
			return entry
		}
	}
	return ""
}

// rewrite removes entries from the list in the file path. It keeps the comments.
func rewrite(path string, remove []string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var kept strings.Builder
	for line := range strings.Lines(string(raw)) {
		if !slices.Contains(remove, strings.TrimSpace(line)) {
			kept.WriteString(line)
		}
	}
	return os.WriteFile(path, []byte(kept.String()), 0o600) // an existing file keeps its mode
}
