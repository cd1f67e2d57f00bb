// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what commands print to the pages that show it")

// example is a command on a page, with the output that the page shows.
type example struct {
	page    string
	command string
	number  int    // of the commands on the page before it
	output  string // empty if the page shows none
}

// expect checks that a command has printed what the page shows, apart from what differs in each run.
// With -update it writes what the command has printed to the page instead. If the page leaves out lines
// or parts of lines, which it shows as an ellipsis, expect checks the others. It does nothing if the
// page shows no output, or if nothing was printed.
func (e example) expect(t *testing.T, printed string) {
	t.Helper()
	if e.output == "" || printed == "" {
		return
	}
	want, got := constant(e.output), constant(printed)
	if strings.Contains(e.output, "…") {
		want = slices.DeleteFunc(want, func(line string) bool {
			pattern := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(line), "…", ".*") + "$")
			return slices.ContainsFunc(got, pattern.MatchString)
		})
		if len(want) > 0 {
			t.Errorf("%s shows lines that %s does not print: %q\n%s", e.page, e.command, want, printed)
		}
		return
	}

	diff := cmp.Diff(want, got)
	switch {
	case diff == "":
	case *update:
		e.write(t, printed)
	default:
		t.Errorf("%s shows (-) another output of %s than it has (+), see make pages:\n%s\n%s", e.page, e.command, diff, printed)
	}
}

// expectOnPage checks that a command has printed what the page shows, as example.expect does.
func expectOnPage(t *testing.T, page, command, printed string) {
	t.Helper()
	examples := pageExamples(t, page)
	i := slices.IndexFunc(examples, func(e example) bool { return e.command == command && e.output != "" })
	if i < 0 {
		t.Fatalf("%s does not show the output of %s", page, command)
	}
	examples[i].expect(t, printed)
}

var version = regexp.MustCompile(`[^\s"]+ commit \S+ go[\d.]+ \w+/\w+`)

// varying matches what differs in each run, and its replacement.
var varying = []struct {
	pattern *regexp.Regexp
	by      string
}{
	{regexp.MustCompile(`^[IWE]\d{4} [\d:.]+ +\d+ \w+\.go:\d+\]`), "LOG"}, // TestLogLines of Documentation checks the file
	{regexp.MustCompile(`^host\d+ +(\S+/\d+ )`), "$1"},                    // before the route to the lowest subnet
	{version, "VERSION"},
	{regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`), "MAC"},
	{regexp.MustCompile(`\b10\.([56])\.\d+\.`), "10.$1.N."},
	{regexp.MustCompile(`\bfd00:5:0:[0-9a-f]+:`), "fd00:5:0:N:"},
	{regexp.MustCompile(`\b192\.(168\.77|0\.2)\.\d+`), "ADDRESS"},
	{regexp.MustCompile(`\b\d[\d.]*[GM]bit/s`), "RATE"},
	{regexp.MustCompile(`\d{4}-?\d\d-?\d\dT\d\d:?\d\d:?\d\dZ`), "TIME"},
	{regexp.MustCompile(`\b[\d./]+ ?(ms|s)\b`), "N$1"},
	{regexp.MustCompile(`\b(\d+h)?(\d+m)?\d+s\b`), "Ns"},
	{regexp.MustCompile(`nsenter -t \d+`), "nsenter -t PID"},
	{regexp.MustCompile(`\b[0-9a-f]{8,}\b`), "ID"},
	{regexp.MustCompile(`\s+`), " "},
}

// constant returns the lines of an output without what differs in each run, such as times, addresses that
// the kernel or the daemon chooses, and the width of columns. It sorts them, because subnets do.
func constant(output string) (lines []string) {
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		for _, v := range varying {
			line = v.pattern.ReplaceAllString(line, v.by)
		}
		if line != "" {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return lines
}

// write replaces the output below the command on the page.
func (e example) write(t *testing.T, printed string) {
	t.Helper()
	path := "../../Documentation/" + e.page
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	same := 0 // commands like this one, from this one on
	for _, other := range pageExamples(t, e.page)[e.number:] {
		if other.command == e.command {
			same++
		}
	}
	line := regexp.MustCompile(`(?m)^    [$#] ` + regexp.QuoteMeta(e.command) + "\n")
	at := line.FindAllIndex(raw, -1)
	if len(at) < same {
		t.Fatalf("%s does not have the command %s", e.page, e.command)
	}
	begin := at[len(at)-same][1]
	end := begin
	for next := range strings.Lines(string(raw[begin:])) {
		if next != "\n" && (!strings.HasPrefix(next, "    ") || prompted.MatchString(next[4:])) {
			break
		}
		end += len(next)
	}
	end = begin + len(strings.TrimRight(string(raw[begin:end]), "\n")) + 1

	var text strings.Builder
	text.Write(raw[:begin])
	printed = version.ReplaceAllString(strings.TrimRight(printed, "\n"), "v1.0.0 commit 1a2b3c4 go1.26.8 linux/amd64")
	for next := range strings.Lines(printed + "\n") {
		if next != "\n" {
			next = "    " + next
		}
		text.WriteString(next)
	}
	text.Write(raw[end:])
	if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil { //nolint:gosec // a page
		t.Fatal(err)
	}
}
