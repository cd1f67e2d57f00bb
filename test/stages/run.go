// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// counts contains the numbers of tests, including subtests.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(d counts) {
	c.passed += d.passed
	c.failed += d.failed
	c.skipped += d.skipped
}

// lockedWriter lets several goroutines write to w: those that run go commands of one or more stages, and
// those that parse the output.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// A run is the result of one stage.
type run struct {
	stage   string
	part    part
	strict  bool // skipped tests count as failures, and so does a stage without tests
	noTests bool // the stage has no tests, as expected
	took    time.Duration
	cpu     time.Duration // CPU time of all processes; more than took if several CPUs were busy, less if tests waited
	out     io.Writer
	log     io.Writer // gets the output of all tests
	logName string
	err     error // a failure other than those of tests

	counts
	failures []failure // in the order in which they were reported
	skips    []string
	left     []test // tests of the other part, and those that a run with -short leaves
	leftOut  bool   // the whole stage is left to the other part
}

// A failure is a failed test or package.
type failure struct {
	pkg, test string // test is empty if the package itself failed
	message   string // as reader.message returns it; may be empty
}

func (f failure) String() string {
	name := f.pkg
	if f.test != "" {
		name += "." + f.test
	}
	if f.message != "" {
		name += ": " + f.message
	}
	return name
}

// merge adds the results and the CPU time of other, which ran a part of the stage.
func (r *run) merge(other *run) {
	r.add(other.counts)
	r.cpu += other.cpu
	r.failures = append(r.failures, other.failures...)
	r.skips = append(r.skips, other.skips...)
}

// take returns the tests of the stage that run, and stores the others in left.
func (r *run) take(s selection) []test {
	var chosen []test
	chosen, r.left = s.split(r.stage)
	r.noTests = len(chosen) == 0 && len(r.left) > 0
	return chosen
}

// other returns the command that runs a test in left.
func (r *run) other(t test) string {
	switch {
	case r.part == short:
		return "make test-rest"
	case t.long:
		return "make test-rest without SHORT=1"
	}
	return "make test"
}

func (r *run) leftColumn() string {
	if r.leftOut {
		return "all"
	}
	return strconv.Itoa(len(r.left))
}

// leftNames returns the names of the tests in left, by the command that runs them.
func (r *run) leftNames() map[string][]string {
	names := map[string][]string{}
	if r.leftOut {
		names[r.other(test{})] = []string{"the whole stage"}
	}
	for _, t := range r.left {
		names[r.other(t)] = append(names[r.other(t)], t.name)
	}
	return names
}

func (r *run) empty() bool { return !r.noTests && r.passed+r.failed+r.skipped == 0 }

func (r *run) ok() bool {
	return r.leftOut || r.err == nil && r.failed == 0 && (!r.strict || r.skipped == 0 && !r.empty())
}

func (r *run) result() string {
	if r.leftOut {
		return "left"
	}
	if r.ok() && r.empty() {
		return "no tests"
	}
	return word(r.ok())
}

// reasons returns the reasons of failures and the skipped tests of the stage, one per element.
func (r *run) reasons() []string {
	if r.leftOut {
		return nil
	}

	var reasons []string
	for _, f := range r.failures {
		reasons = append(reasons, "failed: "+f.String())
	}

	for _, s := range r.skips {
		reasons = append(reasons, "skipped: "+s)
	}
	if r.strict && r.err == nil && r.empty() {
		reasons = append(reasons, "no tests were found, and CI is true")
	}
	if r.err != nil {
		reasons = append(reasons, r.err.Error())
	}
	return reasons
}

// lookAt prints, in at most three lines, where to look first. The stage must have failed.
func (r *run) lookAt(out io.Writer) {
	if len(r.failures) == 0 {
		fmt.Fprintf(out, "look first at %s: %s\n", r.stage, strings.Join(r.reasons(), "; "))
		return
	}

	first := r.failures[0]
	for _, f := range r.failures { // take one with a message: a test that failed because of its subtest has none
		if f.message != "" {
			first = f
			break
		}
	}

	fmt.Fprintf(out, "look first at %s\n", first)
	if r.logName != "" {
		fmt.Fprintf(out, "the output of all tests, with the logs of their daemons: %s\n", r.logName)
	}
	if first.test != "" && r.stage != "fuzz" {
		fmt.Fprintf(out, "this test alone: make test-%s RUN='%s'\n", r.stage, regexp.QuoteMeta(first.test))
	}
}

// event is a line of `go test -json`. See `go doc test2json`.
type event struct {
	Time                          time.Time
	Action, Package, Test, Output string
	ImportPath                    string // set in events with the output of a build
	FailedBuild                   string
	Elapsed                       float64
}

// slow is the time in seconds from which on a passed test gets a line of its own.
const slow = 2

// reader converts the events of one `go test -json` command into lines, and adds its counts and failures
// to run.
type reader struct {
	run     *run
	output  map[string][]string             // for each test, package and build, output that was not printed yet
	counts  map[string]*counts              // of each package
	running map[string]map[string]time.Time // for each package, the tests that run, and since when
	broken  map[string]string               // for each failed build, its first message
}

func newReader(r *run) *reader {
	return &reader{
		run: r, output: map[string][]string{}, counts: map[string]*counts{},
		running: map[string]map[string]time.Time{}, broken: map[string]string{},
	}
}

// read handles all lines of r. It prints lines that are not events unchanged.
func (p *reader) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			p.line(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read go test: %w", err)
		}
	}
}

func (p *reader) line(line string) {
	var e event
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(p.run.out, line)
		fmt.Fprint(p.log(), line)
		return
	}

	key := cmp.Or(e.ImportPath, e.Package)
	if e.Test != "" {
		key = testName(e)
	}

	switch e.Action {
	case "run", "cont":
		if p.running[e.Package] == nil {
			p.running[e.Package] = map[string]time.Time{}
		}
		p.running[e.Package][e.Test] = e.Time

	case "pause": // the test waits until other parallel tests have ended
		delete(p.running[e.Package], e.Test)
	case "output", "build-output":
		if !strings.HasPrefix(e.Output, "=== ") {
			p.output[key] = append(p.output[key], e.Output)
		}

	case "build-fail":
		p.broken[key] = p.message(key)
		p.show(key)
	case "pass", "fail", "skip":
		if e.Test != "" {
			p.test(e, key)
		} else {
			p.pkg(e)
		}
	}
}

func testName(e event) string { return e.Package + "." + e.Test }

// show prints the output of a test, package or build in one piece, because another stage may print at
// the same time. It also writes the output to the log, and drops it.
func (p *reader) show(key string) {
	fmt.Fprint(p.run.out, strings.Join(p.output[key], ""))
	p.forget(key)
}

// forget writes the output of a test, package or build only to the log, and drops it.
func (p *reader) forget(key string) {
	for _, s := range p.output[key] {
		fmt.Fprint(p.log(), s)
	}
	delete(p.output, key)
}

func (p *reader) log() io.Writer {
	if p.run.log == nil {
		return io.Discard
	}
	return p.run.log
}

// messageLine matches three kinds of lines: the first line of what a test prints with t.Error, t.Log and
// similar functions, the first line of a crash, and an error of the compiler.
var messageLine = regexp.MustCompile(`^(?:\s+(\S+_test\.go:\d+: .*)|(` + crash + `.*)|(\S+\.go:\d+:\d+: .*))\n`)

// crash matches the start of the line that is printed when a test program ends before its tests. go test
// kills a program that does not end within its time.
const crash = `(?:panic: |fatal error: |\*\*\* Test killed|signal: )`

var crashLine = regexp.MustCompile("^" + crash)

// logLine matches a message of a test that only introduces the log of a daemon.
var logLine = regexp.MustCompile(`: log of .*:$`)

// message returns the reason in the output of a test, package or build that was not printed yet, or "" if
// there is none. This is the first crash or error of the compiler. Without one it is the last message of
// the test that does not introduce a log. go test does not tell errors from other messages, but a test
// usually ends after an error.
func (p *reader) message(key string) string {
	message := ""
	for _, s := range p.output[key] {
		m := messageLine.FindStringSubmatch(s)
		switch {
		case m == nil || logLine.MatchString(strings.TrimSuffix(s, "\n")):
		case m[1] == "":
			return cmp.Or(m[1:]...) // the line of the crash, or of the error of the compiler
		default:
			message = m[1]
		}
	}
	return message
}

func (p *reader) of(pkg string) *counts {
	if p.counts[pkg] == nil {
		p.counts[pkg] = &counts{}
	}
	return p.counts[pkg]
}

func (p *reader) test(e event, key string) {
	c := p.of(e.Package)
	delete(p.running[e.Package], e.Test)
	switch e.Action {
	case "pass":
		c.passed++
		if e.Elapsed >= slow && !strings.Contains(e.Test, "/") {
			fmt.Fprintf(p.run.out, "      %s (%.1fs)\n", e.Test, e.Elapsed)
		}

	case "fail":
		c.failed++
		p.run.failures = append(p.run.failures, failure{e.Package, e.Test, p.message(key)})
		p.show(key)

	case "skip":
		c.skipped++
		p.run.skips = append(p.run.skips, key)
		p.show(key)
	}
	p.forget(key)
}

func (p *reader) pkg(e event) {
	c := p.of(e.Package)
	if e.Action == "fail" {
		if message := p.early(e); message != "" || c.failed == 0 {
			c.failed++
			message = cmp.Or(message, p.broken[e.FailedBuild], p.message(e.Package))
			p.run.failures = append(p.run.failures, failure{pkg: e.Package, message: message})
		}
		for _, key := range p.keys(e.Package) {
			p.show(key)
		}
	}

	p.forget(e.Package)
	delete(p.running, e.Package)
	p.run.add(*c)
	if *c == (counts{}) {
		return
	}
	fmt.Fprintf(p.run.out, "%-4s  %s  %.1fs  %d passed, %d failed, %d skipped\n",
		word(e.Action != "fail"), e.Package, e.Elapsed, c.passed, c.failed, c.skipped)
}

// early returns why a package has ended before its tests, and which tests did not end. The one that hung
// or crashed is among them. It returns "" if all tests have ended.
func (p *reader) early(e event) string {
	began := p.running[e.Package]
	for _, test := range slices.Collect(maps.Keys(began)) {
		for i, c := range test {
			if c == '/' {
				delete(began, test[:i]) // the test only waits for its subtest
			}
		}
	}

	tests := slices.Collect(maps.Keys(began))
	if len(tests) == 0 {
		return ""
	}

	slices.SortFunc(tests, func(a, b string) int { return cmp.Or(began[a].Compare(began[b]), strings.Compare(a, b)) })
	for i, test := range tests {
		if since := began[test]; !since.IsZero() {
			tests[i] += fmt.Sprintf(" (%v)", e.Time.Sub(since).Round(time.Second))
		}
	}

	message := "did not end: " + strings.Join(tests, ", ")
	for _, key := range p.keys(e.Package) { // the output of the test that printed last contains the crash
		if m := p.message(key); crashLine.MatchString(m) {
			return strings.TrimSuffix(m, ".") + "; " + message
		}
	}
	return message
}

// keys returns the sorted keys in output that belong to a package: its own, and those of tests that did
// not end.
func (p *reader) keys(pkg string) []string {
	var keys []string
	for key := range p.output {
		if key == pkg || strings.HasPrefix(key, pkg+".") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}
