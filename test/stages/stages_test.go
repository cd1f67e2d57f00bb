// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// module writes a Go module with these files into a temporary directory, and changes to that directory.
func module(t *testing.T, files map[string]string) {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module sample\n\ngo 1.26\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

func source(pkg, body string) string {
	return "package " + pkg + "\n\nimport \"testing\"\n\n" + body + "\n"
}

func TestStages(t *testing.T) {
	module(t, map[string]string{
		"Makefile": "build:\n",
		"good/a_test.go": source("good", `func TestGood(t *testing.T) { t.Run("sub", func(*testing.T) {}) }
func TestKernelGood(t *testing.T) {}; func TestVMGood(t *testing.T) { t.Error("on the wrong machine") }
func FuzzGood(f *testing.F) { f.Fuzz(func(*testing.T, []byte) {}) }`),
		"bad/a_test.go":         source("bad", `func TestBad(t *testing.T) { t.Error("reason shown") }`),
		"broken/a_test.go":      source("broken", `func TestBroken(t *testing.T) { undefinedName() }`),
		"panics/a_test.go":      source("panics", `func TestPanics(t *testing.T) { var m map[int]int; m[0] = 1 }`),
		"test/e2e/a_test.go":    source("e2e", `func TestKernelLooksSo(t *testing.T) {}; func TestVMToo(t *testing.T) { t.Error("on the wrong machine") }`),
		"test/e2ebut/b_test.go": source("e2ebut", `func TestOther(t *testing.T) {}`),
	})
	for _, tt := range []struct {
		stage    string
		ci       string
		ok       bool
		counts   string
		contains []string
	}{
		{stage: "unit", ok: false, counts: "4 passed, 3 failed, 0 skipped", contains: []string{
			"reason shown", "undefined: undefinedName", "assignment to entry in nil map",
			"failed: sample/bad.TestBad: a_test.go:5: reason shown", "failed: sample/broken: broken/a_test.go:5:33: undefined: undefinedName",
			"failed: sample/panics.TestPanics: panic: assignment to entry in nil map",
		}},
		{stage: "kernel", ci: "true", ok: true, counts: "1 passed, 0 failed, 0 skipped", contains: []string{"sample/good"}},
		{stage: "e2e", ci: "true", ok: true, counts: "1 passed, 0 failed, 0 skipped", contains: []string{"sample/test/e2e"}},
	} {
		t.Run(tt.stage, func(t *testing.T) {
			t.Setenv("CI", tt.ci)
			var out bytes.Buffer
			ok, err := execute(t.Context(), []string{tt.stage}, &out)
			if err != nil {
				t.Fatal(err)
			}
			if ok != tt.ok {
				t.Errorf("got ok %v, want %v", ok, tt.ok)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := lines[len(lines)-1]; got != tt.counts {
				t.Errorf("got last line %q, want %q", got, tt.counts)
			}
			for _, want := range tt.contains {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing", want)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

// TestSkippedTest checks that a skipped test makes a stage fail if CI is true, and only then. The skipped
// test exists only in the module that it writes to a temporary folder.
func TestSkippedTest(t *testing.T) {
	module(t, map[string]string{
		"Makefile":        "build:\n",
		"later/a_test.go": source("later", `func TestGood(t *testing.T) {}; func TestLater(t *testing.T) { t.Skip("not today") }`),
	})
	for ci, want := range map[string]bool{"": true, "true": false} {
		t.Setenv("CI", ci)
		var out bytes.Buffer
		ok, err := execute(t.Context(), []string{"unit"}, &out)
		if ok != want || err != nil || !strings.HasSuffix(strings.TrimSpace(out.String()), "1 passed, 0 failed, 1 skipped") ||
			!strings.Contains(out.String(), "skipped: sample/later.TestLater") || !strings.Contains(out.String(), "not today") {
			t.Errorf("CI=%q: ok %v, error %v, want ok %v and one skipped test:\n%s", ci, ok, err, want, out.String())
		}
	}
}

// TestBackground checks that a stage in the background runs at the same time as the stage after it. An
// exclusive stage must run only after the end of the stage in the background, and the run must wait for
// the result of that stage.
func TestBackground(t *testing.T) {
	module(t, map[string]string{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	reached, ended := make(chan struct{}), make(chan struct{})
	results := runAll(ctx, []stage{
		{name: "clusters", background: true, run: func(_ context.Context, r *run, _ selection) error {
			r.noTests = true
			defer close(ended)
			select {
			case <-reached:
				return errors.New("after the next stage")
			case <-ctx.Done():
				return ctx.Err()
			}
		}},
		{name: "next", run: func(_ context.Context, r *run, _ selection) error {
			r.noTests = true
			close(reached)
			return nil
		}},
		{name: "guest", exclusive: true, run: func(_ context.Context, r *run, _ selection) error {
			r.noTests = true
			select {
			case <-ended:
				return nil
			default:
				return errors.New("before the end of the clusters")
			}
		}},
	}, selection{}, io.Discard)
	if len(results) != 3 || !results[1].ok() || !results[2].ok() {
		t.Fatalf("got results %+v, want three, with the second and the third ok", results)
	}
	if err := results[0].err; err == nil || err.Error() != "after the next stage" {
		t.Errorf("the stage in the background ended with %v", err)
	}
}

// TestInterruptedEarly checks that a run fails if it is interrupted before a stage has begun.
func TestInterruptedEarly(t *testing.T) {
	module(t, map[string]string{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	pass := func(_ context.Context, r *run, _ selection) error {
		r.noTests = true
		return nil
	}
	for _, background := range []bool{false, true} {
		results := runAll(ctx, []stage{{name: "one", background: background, run: pass}}, selection{}, io.Discard)
		if len(results) != 1 || results[0].ok() {
			t.Errorf("background %v: got results %+v, want one that is not ok", background, results)
		}
	}
}

// TestFailureIsAtTheEnd checks that the last five lines name the failed test, the file with its output
// and the command that runs it alone, even if the test prints long logs. It also checks the list of
// failures, the log and that command.
func TestFailureIsAtTheEnd(t *testing.T) {
	module(t, map[string]string{
		"a_test.go": source("sample", `func TestGood(*testing.T) {}; func TestBad(t *testing.T) { t.Run("a (b)", func(t *testing.T) {
	t.Cleanup(func() { t.Logf("log of a daemon:%s", strings.Repeat("\nline", 1000)) })
	t.Log("not the reason"); t.Fatal("reason shown")
}) }`),
	})
	text, err := os.ReadFile("a_test.go")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("a_test.go", bytes.Replace(text, []byte(`import "testing"`), []byte(`import ("strings"; "testing")`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if ok, err := execute(t.Context(), []string{"unit"}, &out); err != nil || ok {
		t.Errorf("got ok %v, error %v, want neither", ok, err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{
		"look first at sample.TestBad/a_(b): a_test.go:7: reason shown",
		"the output of all tests, with the logs of their daemons: bin/tests/unit.log",
		`this test alone: make test-unit RUN='TestBad/a_\(b\)'`,
		"",
		"1 passed, 2 failed, 0 skipped",
	}
	if diff := cmp.Diff(want, lines[len(lines)-5:]); diff != "" {
		t.Errorf("last lines (-want +got):\n%s", diff)
	}
	failed, err := os.ReadFile("bin/tests/failed-all")
	if want := "unit: failed: sample.TestBad/a_(b): a_test.go:7: reason shown\nunit: failed: sample.TestBad\n"; err != nil || string(failed) != want {
		t.Errorf("the list of failures is %q (%v), want %q", failed, err, want)
	}
	_, none := execute(t.Context(), []string{"none"}, io.Discard)
	if failed, err := os.ReadFile("bin/tests/failed-all"); err != nil || none == nil || string(failed) != none.Error()+"\n" {
		t.Errorf("without such a stage the list of failures is %q (%v), want %v", failed, err, none)
	}
	log, err := os.ReadFile("bin/tests/unit.log")
	if want := "TestGood"; err != nil || !strings.Contains(string(log), want) || strings.Count(string(log), "line\n") != 1000 {
		t.Errorf("the log (%v) does not contain %s and the lines of TestBad:\n%s", err, want, log)
	}
	out.Reset()
	if _, err := execute(t.Context(), []string{"-run", `TestBad/a_\(b\)`, "unit"}, &out); err != nil || !strings.HasSuffix(out.String(), "\n0 passed, 2 failed, 0 skipped\n") {
		t.Errorf("TestBad alone: error %v, output:\n%s", err, &out)
	}
}

// TestTestsThatDoNotEnd checks a package that ends before its tests: it must count as a failure that
// names these tests, even if other tests have failed.
//
//stages:rest it waits until tests are ended; TestStages has tests that end
func TestTestsThatDoNotEnd(t *testing.T) {
	module(t, map[string]string{
		"hangs/a_test.go": source("hangs", `func TestGood(*testing.T) {}; func TestBad(t *testing.T) { t.Error("reason shown") }
func TestHangs(t *testing.T) { t.Run("sub/sub", func(t *testing.T) { <-make(chan int) }) }`),
		"crashes/a_test.go": source("crashes", `func TestCrashes(t *testing.T) { go func() { panic("reason shown") }(); <-make(chan int) }`),
		"exits/a_test.go":   strings.Replace(source("exits", `func TestExits(t *testing.T) { os.Exit(3) }`), `import`, `import "os"; import`, 1),
		"alone/a_test.go":   source("alone", `func TestAlone(t *testing.T) { t.Fatal("panic: not one") }`),
	})
	for pkg, want := range map[string][]string{
		"hangs": {
			"sample/hangs.TestBad: a_test.go:5: reason shown",
			"sample/hangs: panic: test timed out after 2s; did not end: TestHangs/sub/sub",
		},
		"crashes": {"sample/crashes: panic: reason shown; did not end: TestCrashes"},
		"exits":   {"sample/exits: did not end: TestExits"},
		"alone":   {"sample/alone.TestAlone: a_test.go:5: panic: not one"},
	} {
		t.Run(pkg, func(t *testing.T) {
			var out bytes.Buffer
			r := &run{stage: "unit", out: &lockedWriter{w: &out}}
			if err := goTest(t.Context(), r, "-timeout=2s", "./"+pkg); err != nil {
				t.Error(err)
			}
			var got []string
			for _, f := range r.failures {
				got = append(got, regexp.MustCompile(` \(\d+s\)`).ReplaceAllString(f.String(), ""))
			}
			if diff := cmp.Diff(want, got); diff != "" || r.failed != len(want) {
				t.Errorf("%d failures (-want +got):\n%s\n%s", r.failed, diff, &out)
			}
		})
	}
}

// TestTestsThatWaited checks that the failure of a package does not name tests that were paused, and so
// waited for others.
func TestTestsThatWaited(t *testing.T) {
	r := &run{out: io.Discard}
	err := newReader(r).read(strings.NewReader(`{"Time":"2026-01-01T00:00:00Z","Action":"run","Package":"p","Test":"TestPaused"}
{"Time":"2026-01-01T00:00:01Z","Action":"pause","Package":"p","Test":"TestPaused"}
{"Time":"2026-01-01T00:00:01Z","Action":"run","Package":"p","Test":"TestHangs"}
{"Time":"2026-01-01T00:00:02Z","Action":"pause","Package":"p","Test":"TestHangs"}
{"Time":"2026-01-01T00:00:03Z","Action":"cont","Package":"p","Test":"TestHangs"}
{"Time":"2026-01-01T00:00:03Z","Action":"run","Package":"p","Test":"TestHangs/sub"}
{"Time":"2026-01-01T00:00:03Z","Action":"cont","Package":"p","Test":"TestPasses"}
{"Time":"2026-01-01T00:00:04Z","Action":"pass","Package":"p","Test":"TestPasses"}
{"Time":"2026-01-01T00:08:00Z","Action":"run","Package":"p","Test":"TestBeside"}
{"Time":"2026-01-01T00:10:00Z","Action":"output","Package":"p","Output":"*** Test killed with quit: ran too long (10m0s).\n"}
{"Time":"2026-01-01T00:10:00Z","Action":"fail","Package":"p"}
`))
	want := "failed: p: *** Test killed with quit: ran too long (10m0s); did not end: TestHangs/sub (9m57s), TestBeside (2m0s)"
	if got := r.reasons(); err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("got %q, error %v, want %q", got, err, want)
	}
}

// TestParts checks that each of the two parts runs only its own tests, that the part all runs the tests of
// both, and that a run with -short leaves long tests. Below the table a run must name the tests that it leaves.
//
//stages:rest it runs go test several times; TestStages does once
func TestParts(t *testing.T) {
	files := map[string]string{
		"Makefile": "build:\n",
		"a_test.go": source("sample", `func TestA(*testing.T) {}
func FuzzA(f *testing.F) { f.Fuzz(func(*testing.T, []byte) {}) }

// TestSlow is slow.
//
//stages:rest waits for an hour
func TestSlow(*testing.T) {}

//stages:long repeats TestSlow
func TestLong(t *testing.T) { if testing.Short() { t.Error("in a short run") } }

//stages:rest waits for an hour
func TestKernelSlow(*testing.T) {}`),
		"test/e2e/a_test.go":        source("e2e", "func TestE(*testing.T) {}\n\n//stages:rest waits\nfunc TestESlow(*testing.T) {}\n\n//stages:rest waits\nfunc TestAloneSlow(*testing.T) {}"),
		"test/kubernetes/a_test.go": source("kubernetes", "func TestK(*testing.T) {}"),
		"dist/a_test.go":            source("dist", "//stages:rest builds a release\nfunc TestRelease(*testing.T) {}"),
	}
	module(t, files)
	for _, tt := range []struct {
		part     string
		short    bool
		counts   string
		contains []string
		rows     map[string]string
	}{
		{"short", false, "3 passed, 0 failed, 0 skipped", []string{
			"unit: left to make test-rest: TestSlow, TestLong\n", "kernel: left to make test-rest: TestKernelSlow\n",
			"alone: left to make test-rest: TestAloneSlow\n", "e2e: left to make test-rest: TestESlow\n", "fuzz: left to make test-rest: the whole stage\n",
			"kubernetes: left to make test-rest: the whole stage\n", "release: left to make test-rest: the whole stage\n",
		}, map[string]string{"kernel": "1", "alone": "1", "e2e": "1", "fuzz": "all"}},
		{"rest", false, "8 passed, 0 failed, 0 skipped", []string{
			"unit: left to make test: TestA, FuzzA\n", "e2e: left to make test: TestE\n",
		}, map[string]string{"unit": "2", "kubernetes": "0", "release": "0"}},
		{"rest", true, "7 passed, 0 failed, 0 skipped", []string{
			"unit: left to make test: TestA, FuzzA\nunit: left to make test-rest without SHORT=1: TestLong\n",
		}, map[string]string{"unit": "3", "kubernetes": "0", "release": "0"}},
		{"all", false, "11 passed, 0 failed, 0 skipped", nil, map[string]string{"unit": "0", "kubernetes": "0"}},
	} {
		t.Run(fmt.Sprintf("%s, short %v", tt.part, tt.short), func(t *testing.T) {
			var out bytes.Buffer
			args := []string{"-part", tt.part, "-fuzztime", "1x", fmt.Sprintf("-short=%v", tt.short)}
			if tt.part == "all" {
				t.Setenv("CI", "")
			} else {
				t.Setenv("CI", "true")
				args = append(args, "build", "unit", "kernel", "alone", "e2e", "fuzz", "kubernetes", "release")
			}
			ok, err := execute(t.Context(), args, &out)
			if err != nil || !ok {
				t.Errorf("got ok %v, error %v", ok, err)
			}
			if !strings.HasSuffix(out.String(), "\n"+tt.counts+"\n") {
				t.Errorf("want %s", tt.counts)
			}
			for _, want := range tt.contains {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing", want)
				}
			}
			for stage, left := range tt.rows {
				if !regexp.MustCompile(`(?m)^ *` + stage + ` .* ` + left + `$`).MatchString(out.String()) {
					t.Errorf("the row of %s does not end with %s", stage, left)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

// TestMarks checks that a mark without an effect is an error. A mark is an error too if a test with the
// same name is in the other part.
func TestMarks(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		err   string
	}{
		"no reason":    {map[string]string{"a_test.go": source("a", "//stages:rest\nfunc TestA(*testing.T) {}")}, "a_test.go:5:1: want //stages:rest or //stages:long with a reason"},
		"no such mark": {map[string]string{"a_test.go": source("a", "//stages:slow waits\nfunc TestA(*testing.T) {}")}, "a_test.go:5:1: want"},
		"no test":      {map[string]string{"a_test.go": source("a", "//stages:rest slow\nfunc helper(*testing.T) {}")}, "a_test.go:5:1: want"},
		"not adjacent": {map[string]string{"a_test.go": source("a", "//stages:rest slow\n\nfunc TestA(*testing.T) {}")}, "a_test.go:5:1: want"},
		"same name": {map[string]string{
			"a_test.go":   source("a", "//stages:rest slow\nfunc TestA(*testing.T) {}"),
			"b/b_test.go": source("b", "func TestA(*testing.T) {}"),
		}, "sample.TestA and sample/b.TestA are in different parts"},
		"same name, long": {map[string]string{
			"a_test.go":   source("a", "//stages:long slow\nfunc TestA(*testing.T) {}"),
			"b/b_test.go": source("b", "//stages:rest slow\nfunc TestA(*testing.T) {}"),
		}, "sample.TestA and sample/b.TestA are in different parts"},
	} {
		t.Run(name, func(t *testing.T) {
			module(t, tt.files)
			if _, err := newSelection(t.Context(), short, ""); err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("got error %v, want %q", err, tt.err)
			}
		})
	}
}

// TestShortPart checks that the table of defect classes in testing.md names only end-to-end tests of the
// short part, including those in test/vm, and at least one for each class.
func TestShortPart(t *testing.T) {
	t.Chdir("../..")
	page, err := os.ReadFile("Documentation/testing.md")
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSelection(t.Context(), short, "")
	if err != nil {
		t.Fatal(err)
	}
	e2e, _ := s.split("e2e")
	vm, _ := s.split("vm")
	names := map[string]bool{}
	for _, one := range append(e2e, vm...) {
		names[one.name] = true
	}
	_, table, _ := strings.Cut(string(page), "| Class of defects |")
	table, _, _ = strings.Cut(table, "\n\n")
	classes := strings.Split(table, "\n")[2:]
	if len(classes) < 15 {
		t.Errorf("the table has %d classes", len(classes))
	}
	for _, class := range classes {
		listed := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(class, -1)
		if len(listed) == 0 {
			t.Errorf("no test: %s", class)
		}
		for _, m := range listed {
			if !names[m[1]] {
				t.Errorf("%s is not in the short part of the end-to-end tests", m[1])
			}
		}
	}
}

func TestSelectionByName(t *testing.T) {
	module(t, map[string]string{"a_test.go": source("a", "func TestA(*testing.T) {}\nfunc TestAB(*testing.T) {}\nfunc TestMain(*testing.M) {}")})
	for _, tt := range []struct{ run, pattern string }{
		{"TestA", "^(TestA)$"}, // but not TestAB
		{"TestA/x", "^(TestA)$/x"},
		{"^TestA", "^(TestA|TestAB)$"},
		{"", "^(TestA|TestAB)$"},
	} {
		s, err := newSelection(t.Context(), all, tt.run)
		if err != nil {
			t.Fatal(err)
		}
		if chosen, _ := s.split("unit"); pattern(chosen, s.sub) != tt.pattern {
			t.Errorf("%q runs %s, want %s", tt.run, pattern(chosen, s.sub), tt.pattern)
		}
	}
	if _, err := newSelection(t.Context(), all, "TestC"); err == nil || !strings.Contains(err.Error(), `"TestC"`) {
		t.Errorf("got error %v, want one that names TestC", err)
	}
}

// TestDivide checks that each test is in one group, and tests of the same name are in the same one.
func TestDivide(t *testing.T) {
	tests := []test{{name: "TestB"}, {name: "TestA", pkg: "p"}, {name: "TestC"}, {name: "TestA", pkg: "q"}, {name: "TestD"}}
	for n, want := range map[int][]string{
		1: {"^(TestA|TestB|TestC|TestD)$"},
		2: {"^(TestA|TestC)$", "^(TestB|TestD)$"},
		9: {"^(TestA)$", "^(TestB)$", "^(TestC)$", "^(TestD)$"},
	} {
		var got []string
		count := 0
		for _, group := range divide(tests, n) {
			got = append(got, pattern(group, ""))
			count += len(group)
		}
		if !slices.Equal(got, want) || count != len(tests) {
			t.Errorf("%d groups: got %q with %d tests, want %q with %d", n, got, count, want, len(tests))
		}
	}
}

// TestUnitRunsAgain checks that the stage unit uses no cached result of Go. Such a result does not
// depend on files that are read by a program which the test runs.
func TestUnitRunsAgain(t *testing.T) {
	module(t, map[string]string{
		"a_test.go": `package sample

import (
	"os/exec"
	"testing"
)

func TestScript(t *testing.T) {
	if out, err := exec.Command("sh", "script").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
`,
		"script": ". ./part\n",
	})
	for _, tt := range []struct{ part, counts string }{
		{"exit 0\n", "1 passed, 0 failed, 0 skipped"},
		{"exit 1\n", "0 passed, 1 failed, 0 skipped"},
	} {
		if err := os.WriteFile("part", []byte(tt.part), 0o600); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if _, err := execute(t.Context(), []string{"unit"}, &out); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(out.String(), "\n"+tt.counts+"\n") {
			t.Errorf("with %q want %s:\n%s", tt.part, tt.counts, &out)
		}
	}
}

// TestEnded checks that the running tests end when a signal ends the run, and that the run then fails.
//
//stages:rest it waits until tests are ended; TestStages has tests that end
func TestEnded(t *testing.T) {
	program := filepath.Join(t.TempDir(), "stages")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			module(t, map[string]string{"a_test.go": `package sample

import (
	"fmt"
	"os"
	"testing"
)

func TestForever(t *testing.T) {
	os.WriteFile("pid", fmt.Appendln(nil, os.Getpid()), 0o600)
	<-t.Context().Done()
}
`})
			heeded := make(chan os.Signal, 1)
			signal.Notify(heeded, sig) // otherwise the program would inherit that the signal is ignored, if the tests run under nohup
			defer signal.Stop(heeded)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, program, "unit")
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var pid int
			poll(t, "the test to start", func() bool {
				text, err := os.ReadFile("pid")
				if err != nil || !strings.HasSuffix(string(text), "\n") {
					return false
				}
				pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
				return err == nil
			})
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("stages passed, want them to fail")
			}
			if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("the test still runs (%v)", err)
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			if want := "unit: interrupted\n"; !strings.Contains(out.String(), want) {
				t.Errorf("%q is missing in:\n%s", want, &out)
			}
		})
	}
}

func poll(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waited a minute for %s", what)
		}
	}
}

// TestFuzzTimeIsOver checks that a fuzz target that failed only because its time was over runs once
// more. It must not run again after another failure, or after the second run.
//
//stages:rest fuzzing is left to the rest as well
func TestFuzzTimeIsOver(t *testing.T) {
	const minimizing = "fuzz: minimizing 41-byte failing input file\n"
	const over, finding = "    context deadline exceeded", "    a_test.go:1: context deadline exceeded"
	for _, tt := range []struct {
		name   string
		before string // output before the failure in the first run or, if always is set, in all runs
		said   string // output of the failure
		always bool
		runs   int
		counts string
	}{
		{"time", "", over, false, 2, "1 passed, 0 failed, 0 skipped"},
		{"time twice", "", over, true, 2, "0 passed, 1 failed, 0 skipped"},
		{"a finding that is made smaller", minimizing, over, false, 1, "0 passed, 1 failed, 0 skipped"},
		{"a finding", "", finding, false, 1, "0 passed, 1 failed, 0 skipped"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runs := filepath.Join(t.TempDir(), "runs")
			module(t, map[string]string{"a_test.go": `package sample

import (
	"fmt"
	"os"
	"slices"
	"testing"
)

func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "-test.fuzzworker") {
		m.Run()
		return
	}
	before, _ := os.ReadFile(` + strconv.Quote(runs) + `)
	os.WriteFile(` + strconv.Quote(runs) + `, append(before, '.'), 0o600)
	if ` + strconv.FormatBool(tt.always) + ` || len(before) == 0 {
		fmt.Print("=== RUN   FuzzIt\n" + ` + strconv.Quote(tt.before) + ` + "--- FAIL: FuzzIt (0.01s)\n" + ` + strconv.Quote(tt.said) + ` + "\nFAIL\n")
		os.Exit(1)
	}
	m.Run()
}

func FuzzIt(f *testing.F) { f.Fuzz(func(*testing.T, []byte) {}) }
`})
			var out bytes.Buffer
			if _, err := execute(t.Context(), []string{"-fuzztime", "1x", "fuzz"}, &out); err != nil {
				t.Fatal(err)
			}
			if !strings.HasSuffix(out.String(), "\n"+tt.counts+"\n") {
				t.Errorf("want %s:\n%s", tt.counts, &out)
			}
			if did, err := os.ReadFile(runs); err != nil || len(did) != tt.runs {
				t.Errorf("the target ran %d times (%v), want %d", len(did), err, tt.runs)
			}
		})
	}
}

func TestSummary(t *testing.T) {
	for _, tt := range []struct {
		name   string
		run    *run
		ok     bool
		result string
	}{
		{"passed", &run{counts: counts{passed: 1}}, true, "ok"},
		{"failed", &run{counts: counts{passed: 1, failed: 1}}, false, "FAIL"},
		{"skipped", &run{counts: counts{passed: 1, skipped: 1}}, true, "ok"},
		{"skipped under CI", &run{strict: true, counts: counts{passed: 1, skipped: 1}}, false, "FAIL"},
		{"no tests", &run{}, true, "no tests"},
		{"no tests under CI", &run{strict: true}, false, "FAIL"},
		{"no tests expected", &run{strict: true, noTests: true}, true, "ok"},
		{"did not run", &run{counts: counts{passed: 1}, err: errors.New("no")}, false, "FAIL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			if ok := summary(&out, []*run{tt.run}, 0); ok != tt.ok {
				t.Errorf("got ok %v, want %v", ok, tt.ok)
			}
			if got := tt.run.result(); got != tt.result {
				t.Errorf("got %q, want %q", got, tt.result)
			}
		})
	}
}

func TestChoose(t *testing.T) {
	if _, err := choose(stages(options{}), []string{"unti"}); err == nil || !strings.Contains(err.Error(), `"unti"`) {
		t.Errorf("got error %v, want one that names the unknown stage", err)
	}
	for _, tt := range []struct{ names, want []string }{
		{[]string{"fuzz", "unit"}, []string{"unit", "fuzz"}},
		{[]string{"unit", "e2e", "vm"}, []string{"build", "unit", "e2e", "vm"}},
		{[]string{"e2e", "build"}, []string{"build", "e2e"}},
		{[]string{"kubernetes"}, []string{"build", "kubernetes"}},
		{nil, []string{"build", "unit", "kernel", "fuzz", "release", "alone", "kubernetes", "e2e", "vm"}},
	} {
		chosen, err := choose(stages(options{}), tt.names)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range chosen {
			got = append(got, s.name)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.names, diff)
		}
	}
}

// TestNeeds checks that a stage does not run if the stage that it needs fails, and that other stages do.
// A stage that is needed must run even if it was not named.
func TestNeeds(t *testing.T) {
	module(t, map[string]string{
		"Makefile":           "build:\n\t@echo no compiler; false\n",
		"a_test.go":          source("sample", `func TestGood(t *testing.T) {}`),
		"test/e2e/a_test.go": source("e2e", `func TestEndToEnd(t *testing.T) {}`),
	})
	for _, tt := range []struct {
		stages []string
		counts string
	}{
		{[]string{"build", "unit", "e2e"}, "1 passed, 0 failed, 0 skipped"},
		{[]string{"e2e"}, "0 passed, 0 failed, 0 skipped"}, // the run does not use the result of an earlier build either
	} {
		var out bytes.Buffer
		ok, err := execute(t.Context(), tt.stages, &out)
		if err != nil || ok {
			t.Errorf("%q: got ok %v, error %v, want neither", tt.stages, ok, err)
		}
		for _, want := range []string{"no compiler", "e2e: not run: build did not pass", "\n" + tt.counts + "\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q: %q is missing in:\n%s", tt.stages, want, &out)
			}
		}
	}
}
