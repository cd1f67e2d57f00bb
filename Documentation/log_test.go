// SPDX-License-Identifier: Apache-2.0

package documentation_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// logLine matches a log line, with its file, and its message.
var logLine = regexp.MustCompile(`(?m)^( *[IWE]\d{4} [\d:.]+ +\d+ )(\w+\.go):\d+(\] "([^"]+)")`)

// TestLogLines checks that each log line on a page names a file that logs its message. With -update it
// writes the file and the line that do.
func TestLogLines(t *testing.T) {
	logged := loggedTexts(t, regexp.MustCompile(`\b(Info|Error|retry)\(`), regexp.MustCompile(`"([^"]+)"`))
	found := 0
	for path, text := range pages(t) {
		written := logLine.ReplaceAllStringFunc(text, func(line string) string {
			found++
			part := logLine.FindStringSubmatch(line)
			file, message := part[2], part[4]
			from := origin(logged, message)
			if slices.ContainsFunc(from, func(place string) bool { return strings.HasPrefix(place, file+":") }) {
				return line
			}
			if len(from) == 0 || !*update {
				t.Errorf("%s: %s does not log %q, want one of %v (go test ./Documentation -update)", path, file, message, from)
				return line
			}
			return part[1] + from[0] + part[3]
		})
		if written == text {
			continue
		}
		if err := os.WriteFile(path, []byte(written), 0o644); err != nil { //nolint:gosec // a page
			t.Fatal(err)
		}
	}
	if found < 10 {
		t.Errorf("%d log lines found, want at least 10", found)
	}
}

// errorCall matches a call that logs an error, and its message.
var errorCall = regexp.MustCompile(`(?:\b(?:log|logger|klog\.FromContext\(ctx\))\.Error|\bretry)\([^"]+, "(\w[^"]+)"`)

// TestErrorLines checks that troubleshooting.md has a part of each message that is logged as an error, which an
// operator can search for. A part is code of at least shortest characters.
func TestErrorLines(t *testing.T) {
	const shortest = len("lease refused")
	page := pages(t)["../Documentation/troubleshooting.md"]
	parts := regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(page, -1)
	logged := loggedTexts(t, errorCall, errorCall)
	for message, places := range logged {
		if !slices.ContainsFunc(parts, func(part []string) bool { return len(part[1]) >= shortest && strings.Contains(message, part[1]) }) {
			t.Errorf("troubleshooting.md has no part of %q, which %v logs", message, places)
		}
	}
	if len(logged) < 70 {
		t.Errorf("%d messages found, want at least 70", len(logged))
	}
}

// loggedTexts returns the texts in the lines with a call, each with its places as file:line.
func loggedTexts(t *testing.T, call, literal *regexp.Regexp) map[string][]string {
	t.Helper()
	logged := map[string][]string{}
	for _, root := range []string{"../cmd", "../pkg", "../backend", "../subnet"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			code, err := os.ReadFile(path)
			for i, line := range strings.Split(string(code), "\n") {
				if !call.MatchString(line) {
					continue
				}
				for _, m := range literal.FindAllStringSubmatch(line, -1) {
					logged[m[1]] = append(logged[m[1]], fmt.Sprintf("%s:%d", filepath.Base(path), i+1))
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return logged
}

// origin returns the places that log a message, or else those with the longest part of it, because a call
// may add a name or a path.
func origin(logged map[string][]string, message string) []string {
	longest := ""
	for text := range logged {
		if strings.Contains(message, text) && len(text) > max(len(longest), len(message)/3) {
			longest = text
		}
	}
	return logged[longest]
}
