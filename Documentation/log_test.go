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
	logged := loggedTexts(t)
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

// loggedTexts returns the texts in the calls of loggers, each with its places as file:line.
func loggedTexts(t *testing.T) map[string][]string {
	t.Helper()
	call, literal := regexp.MustCompile(`\b(Info|Error|retry)\(`), regexp.MustCompile(`"([^"]+)"`)
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
