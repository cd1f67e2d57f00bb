package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// counts are the numbers of tests, including subtests.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(d counts) {
	c.passed += d.passed
	c.failed += d.failed
	c.skipped += d.skipped
}

// lockedWriter lets several go commands of a stage, and their parsers, write to one
// place.
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
	strict  bool // skipped tests count as failures, and so does a stage without tests
	noTests bool // the stage has no tests, as expected
	took    time.Duration
	out     io.Writer
	err     error // a failure other than that of a test

	counts
	failures []string // names of failed tests and packages, in order
	skips    []string
}

func (r *run) empty() bool { return !r.noTests && r.passed+r.failed+r.skipped == 0 }

func (r *run) ok() bool {
	return r.err == nil && r.failed == 0 && (!r.strict || r.skipped == 0 && !r.empty())
}

func (r *run) result() string {
	if r.ok() && r.empty() {
		return "no tests"
	}
	return word(r.ok())
}

// reasons returns why the stage is not ok, one reason per line.
func (r *run) reasons() []string {
	var reasons []string
	for _, f := range r.failures {
		reasons = append(reasons, "failed: "+f)
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

// event is a line of `go test -json`. See `go doc test2json`.
type event struct {
	Action, Package, Test, Output string
	ImportPath                    string // of build output
	FailedBuild                   string
	Elapsed                       float64
}

// slow is the time in seconds from which a test gets a line of its own.
const slow = 2

// parser converts the events of a `go test -json` command into lines and counts.
type parser struct {
	run    *run
	output map[string][]string // output of each test, package and build that was not printed yet
	counts map[string]*counts  // of each package
}

// read processes all lines of r. It prints lines that are not events unchanged.
func (p *parser) read(r io.Reader) error {
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

func (p *parser) line(line string) {
	var e event
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(p.run.out, line)
		return
	}
	key := cmp.Or(e.ImportPath, e.Package)
	if e.Test != "" {
		key = testName(e)
	}
	switch e.Action {
	case "output", "build-output":
		if !strings.HasPrefix(e.Output, "=== ") {
			p.output[key] = append(p.output[key], e.Output)
		}
	case "build-fail":
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

func (p *parser) show(key string) {
	for _, s := range p.output[key] {
		fmt.Fprint(p.run.out, s)
	}
	delete(p.output, key)
}

func (p *parser) of(pkg string) *counts {
	if p.counts[pkg] == nil {
		p.counts[pkg] = &counts{}
	}
	return p.counts[pkg]
}

func (p *parser) test(e event, key string) {
	c := p.of(e.Package)
	switch e.Action {
	case "pass":
		c.passed++
		if e.Elapsed >= slow && !strings.Contains(e.Test, "/") {
			fmt.Fprintf(p.run.out, "      %s (%.1fs)\n", e.Test, e.Elapsed)
		}
	case "fail":
		c.failed++
		p.run.failures = append(p.run.failures, key)
		p.show(key)
	case "skip":
		c.skipped++
		p.run.skips = append(p.run.skips, key)
		p.show(key)
	}
	delete(p.output, key)
}

func (p *parser) pkg(e event) {
	c := p.of(e.Package)
	if e.Action == "fail" {
		if c.failed == 0 { // a panic, a timeout, or a failed build
			c.failed++
			p.run.failures = append(p.run.failures, e.Package)
		}
		p.showAll(e.Package)
	}
	delete(p.output, e.Package)
	p.run.add(*c)
	if *c == (counts{}) {
		return
	}
	fmt.Fprintf(p.run.out, "%-4s  %s  %.1fs  %d passed, %d failed, %d skipped\n",
		word(e.Action != "fail"), e.Package, e.Elapsed, c.passed, c.failed, c.skipped)
}

// showAll prints the remaining output of a package: its own, and that of tests that did
// not end.
func (p *parser) showAll(pkg string) {
	var keys []string
	for key := range p.output {
		if key == pkg || strings.HasPrefix(key, pkg+".") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		p.show(key)
	}
}
