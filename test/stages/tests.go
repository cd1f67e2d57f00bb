// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/must"
)

// part is the part of the tests that a run contains, or all.
type part string

// Each test is either in short or in rest. all means both parts.
const (
	short part = "short"
	rest  part = "rest"
	all   part = "all"
)

// A mark is the start of a line in the comment of a test. The reason follows in the line. restMark puts
// the test into the rest. So does longMark, and a run with -short leaves the test.
const (
	restMark = "//stages:rest"
	longMark = "//stages:long"
)

const (
	e2eFolder        = "/test/e2e"
	kubernetesFolder = "/test/kubernetes"
)

// A test is a test, an example or a fuzz target.
type test struct {
	pkg, name string
	rest      bool
	long      bool // whether a run with -short leaves it; true only if rest is
}

func (t test) stage() string {
	switch {
	case strings.HasPrefix(t.name, "TestVM"):
		return "vm"
	case in(t.pkg, kubernetesFolder):
		return "kubernetes"
	case in(t.pkg, e2eFolder) && strings.HasPrefix(t.name, "TestAlone"):
		return "alone"
	case in(t.pkg, e2eFolder):
		return "e2e"
	case strings.HasPrefix(t.name, "TestKernel"):
		return "kernel"
	case strings.HasSuffix(t.pkg, "/dist") && strings.HasPrefix(t.name, "TestRelease"):
		return "release"
	}
	return "unit"
}

func (t test) fuzzTarget() bool { return strings.HasPrefix(t.name, "Fuzz") }

func in(pkg, folder string) bool { return strings.Contains(pkg+"/", folder+"/") }

// pattern returns an argument for -run that matches exactly the names of the tests. If sub is not empty,
// only those of their subtests run that match the pattern sub.
func pattern(tests []test, sub string) string {
	var names []string
	for _, t := range tests {
		names = append(names, t.name)
	}
	slices.Sort(names)
	run := "^(" + strings.Join(slices.Compact(names), "|") + ")$"
	if sub != "" {
		run += "/" + sub
	}
	return run
}

// divide returns the tests in at most n groups with about the same number of names. Tests that have the
// same name are in the same group, because a pattern does not contain the package.
func divide(tests []test, n int) [][]test {
	byName := map[string][]test{}
	for _, t := range tests {
		byName[t.name] = append(byName[t.name], t)
	}
	groups := make([][]test, min(n, len(byName)))
	for i, name := range slices.Sorted(maps.Keys(byName)) {
		groups[i%len(groups)] = append(groups[i%len(groups)], byName[name]...)
	}
	return groups
}

// packagesOf returns the packages of the tests, each once. Packages with the most tests are first,
// because they take longest. If one of them began last, it would run at the end while no other package
// is left.
func packagesOf(tests []test) []string {
	counts := map[string]int{}
	for _, t := range tests {
		counts[t.pkg]++
	}
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b))
	})
}

// A selection decides which tests of each stage run.
type selection struct {
	tests []test // tests of all stages
	part  part
	match *regexp.Regexp // pattern for the names of the tests that run; nil if all run
	sub   string         // pattern for the subtests that run; empty if all run
	short bool           // whether tests run in their short form
}

// shortForms returns an argument for tests that says whether they run in their short form.
func (s selection) shortForms() string { return fmt.Sprintf("-short=%v", s.short) }

// newSelection reads the tests of the module. run is the name of a test or a pattern for names. After a
// slash it may have a pattern for subtests. If run is empty, all tests are selected. If no test matches,
// newSelection returns an error.
func newSelection(ctx context.Context, p part, run string) (s selection, err error) {
	err = must.Catch(func() {
		s = selection{tests: findTests(ctx), part: p}
		var top string
		top, s.sub, _ = strings.Cut(run, "/")
		if top != "" {
			s.match = s.matching(top)
		}
	})
	return s, err
}

// matching returns a pattern that only the test with this name matches. If there is none, name is a pattern.
func (s selection) matching(name string) *regexp.Regexp {
	if slices.ContainsFunc(s.tests, func(t test) bool { return t.name == name }) {
		return regexp.MustCompile("^" + name + "$")
	}

	match, err := regexp.Compile(name)
	if err != nil {
		must.Fail("read the pattern of tests: %w", err)
	}
	if !slices.ContainsFunc(s.tests, func(t test) bool { return match.MatchString(t.name) }) {
		must.Fail("no test matches %q", name)
	}
	return match
}

// of returns the selection for a stage. It contains all tests of the stage if the whole stage belongs to
// the rest and the run is of the rest.
func (s selection) of(st stage) selection {
	if st.rest && s.part == rest {
		s.part = all
	}
	return s
}

// split returns the tests of the stage that run, and those that are left to the other part or to a run
// without -short. It omits tests whose name is not selected.
func (s selection) split(stage string) (chosen, left []test) {
	for _, t := range s.tests {
		switch {
		case t.stage() != stage, s.match != nil && !s.match.MatchString(t.name):
		case (s.part == all || t.rest == (s.part == rest)) && (!s.short || !t.long):
			chosen = append(chosen, t)
		default:
			left = append(left, t)
		}
	}
	return chosen, left
}

// timeout returns an argument for go test that limits the time of each package. The limits for both
// parts are given; a run of all gets their sum. A limit is about twice the time of the slowest package
// with two CPUs, because a test that hangs must not use up the time of the whole run.
func (s selection) timeout(ofShort, ofRest time.Duration) string {
	limit := map[part]time.Duration{short: ofShort, rest: ofRest, all: ofShort + ofRest}[s.part]
	return "-timeout=" + limit.String()
}

func (s selection) fuzzTargets() []test {
	return slices.DeleteFunc(slices.Clone(s.tests), func(t test) bool { return !t.fuzzTarget() })
}

func findTests(ctx context.Context) (tests []test) {
	for _, p := range packages(ctx) {
		for _, file := range append(p.TestGoFiles, p.XTestGoFiles...) {
			tests = append(tests, testsOf(p.ImportPath, filepath.Join(p.Dir, file))...)
		}
	}
	checkNames(tests)
	return tests
}

// checkNames fails if two tests have the same name and the same stage, but are in different
// parts. The patterns of go test do not contain the package, so a pattern for one test would match both.
func checkNames(tests []test) {
	type key struct{ stage, name string }
	first := map[key]test{}
	for _, t := range tests {
		k := key{t.stage(), t.name}
		if f, ok := first[k]; ok && (f.rest != t.rest || f.long != t.long) {
			must.Fail("read tests: %s.%s and %s.%s are in different parts: give one another name", f.pkg, f.name, t.pkg, t.name)
		}
		first[k] = t
	}
}

// testsOf returns the tests in a file of the package pkg. It fails if the file contains a
// mark that has no reason or does not belong to a test.
func testsOf(pkg, path string) (tests []test) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		must.Fail("read tests: %w", err)
	}
	marks := map[token.Pos]bool{} // positions of the marks that belong to a test
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !isTest(f.Name.Name) {
			continue
		}

		t := test{pkg: pkg, name: f.Name.Name}
		if f.Doc != nil {
			for _, c := range f.Doc.List {
				mark, reason, _ := strings.Cut(c.Text, " ")
				if strings.TrimSpace(reason) == "" || mark != restMark && mark != longMark {
					continue
				}
				t.rest = true
				t.long = t.long || mark == longMark
				marks[c.Pos()] = true
			}
		}
		tests = append(tests, t)
	}

	for _, group := range file.Comments {
		for _, c := range group.List {
			if strings.HasPrefix(c.Text, "//stages:") && !marks[c.Pos()] {
				must.Fail("read tests: %s: want %s or %s with a reason, in the comment of a test", files.Position(c.Pos()), restMark, longMark)
			}
		}
	}
	return tests
}

func isTest(name string) bool {
	if name == "TestMain" {
		return false
	}
	for _, prefix := range []string{"Test", "Fuzz", "Example"} {
		if after, ok := strings.CutPrefix(name, prefix); ok && (after == "" || after[0] < 'a' || after[0] > 'z') {
			return true
		}
	}
	return false
}

// pkg contains those fields of the output of `go list -json` that are used here.
type pkg struct {
	Dir, ImportPath           string
	TestGoFiles, XTestGoFiles []string
}

func packages(ctx context.Context) (pkgs []pkg) {
	cmd := command(ctx, "go", "list", "-json=Dir,ImportPath,TestGoFiles,XTestGoFiles", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		must.Fail("run go list: %w", err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return pkgs
		}
		if err != nil {
			must.Fail("read go list: %w", err)
		}
		pkgs = append(pkgs, p)
	}
}
