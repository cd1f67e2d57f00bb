// SPDX-License-Identifier: Apache-2.0

// Command stages runs the tests in stages, one after another, and prints a table of
// results and times at the end. Some stages run in the background of those after them. If a
// stage fails, the others still run, except those that need it: these count as failed too.
// Arguments name the stages that run, in addition to those that they need. Without arguments
// all stages run.
//
// The stages find their tests by name, so no list of packages is necessary. A test that
// needs root and a network namespace is named TestKernel... and belongs to the kernel
// stage. A test of test/e2e that needs the whole machine is named TestAlone... and runs
// before the stages in the background start. A test that needs a kernel feature that
// this machine may lack, such as WireGuard or IPIP, is named TestVM... and runs in test/vm.
// A test of dist that is named TestRelease... belongs to the stage release. Fuzz targets are
// named Fuzz... A test file with a build tag belongs to no stage.
//
// The tests have two parts. A test whose comment contains the line "//stages:rest reason"
// belongs to the rest, and so do some stages as a whole. All other tests are the short part.
// With -short, testing.Short returns true in tests of the rest, so that long tests take their
// short form, and those with the line "//stages:long reason" do not run. The table names the
// tests that a run leaves.
//
// With CI=true a skipped test is a failure, and so is a stage without tests: otherwise a
// test that cannot run would look as if it had passed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
)

// A stage is a group of tests, and one row of the table.
type stage struct {
	name  string
	help  string
	needs string // name of the stage that must pass before this one runs; empty if none
	rest  bool   // whether the whole stage belongs to the rest
	// background means that later stages do not wait for the end of this one.
	background bool
	// exclusive means that this stage waits for the end of all stages in the background.
	exclusive bool
	run       func(ctx context.Context, r *run, s selection) error
}

type options struct {
	part     part
	run      string
	fuzzTime string
	short    bool
}

func stages(o options) []stage {
	return []stage{
		{name: "build", help: "make build", run: build},
		{name: "unit", help: "all but the other stages, with the race detector", run: unit},
		{name: "kernel", help: "TestKernel..., with the race detector", run: kernel},
		{name: "fuzz", help: "every fuzz target for a while", rest: true,
			run: func(ctx context.Context, r *run, s selection) error { return fuzz(ctx, r, s, o.fuzzTime) }},
		{name: "release", help: "TestRelease... of dist, which build releases", rest: true, run: release},
		{name: "alone", help: "TestAlone..., which need the whole machine", needs: "build", run: endToEnd},
		// Clusters mostly wait for their programs: alone, the stage would use a fifth of two
		// CPUs. So it runs at the same time as the stage e2e.
		{name: "kubernetes", help: "test/kubernetes: real kubelets, and Kubernetes' own tests", needs: "build", rest: true, background: true, run: kubernetes},
		{name: "e2e", help: "test/e2e: real daemons and traffic", needs: "build", run: endToEnd},
		// The CPUs of the guests are emulated and slow, so no other stage runs at the same time.
		{name: "vm", help: "TestVM..., on Debian kernels in qemu", needs: "build", exclusive: true, run: vm},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), endings()...)
	ok, err := execute(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// endings returns the signals that end the run. SIGHUP, which announces the loss of the
// terminal, is one of them, because the child processes do not get it. Under nohup, which
// makes the program ignore SIGHUP, it is not one of them.
func endings() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// execute runs the stages that args name, with the flags in args. ok reports whether all of
// them passed. It writes the reasons of failures to a file in logs, also if it cannot choose
// stages or tests. Only a wrong flag leaves the file unchanged.
func execute(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	flags := flag.NewFlagSet("stages", flag.ContinueOnError)
	var o options
	flags.StringVar((*string)(&o.part), "part", string(all), "which tests run: short, rest or all")
	flags.StringVar(&o.run, "run", "", "run only the test with this name, or tests that match this pattern, with a pattern of subtests after a slash")
	flags.StringVar(&o.fuzzTime, "fuzztime", "10s", "how long each fuzz target runs")
	flags.BoolVar(&o.short, "short", false, "run long tests in their short form, as testing.Short reports it")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	if !slices.Contains([]part{short, rest, all}, o.part) {
		return false, fmt.Errorf("unknown part %q: want short, rest or all", o.part)
	}

	out = &lockedWriter{w: out}
	start := time.Now()
	results, err := o.results(ctx, flags.Args(), out)
	if err != nil {
		return false, errors.Join(err, o.part.writeFailures(err.Error()+"\n"))
	}
	ok = summary(out, results, time.Since(start))
	failed := ""
	if !ok {
		failed = failures(results)
	}
	return ok, o.part.writeFailures(failed)
}

// results runs the stages with these names, or all if names is empty, and returns their
// results.
func (o options) results(ctx context.Context, names []string, out io.Writer) ([]*run, error) {
	chosen, err := choose(stages(o), names)
	if err != nil {
		return nil, err
	}
	sel, err := newSelection(ctx, o.part, o.run)
	if err != nil {
		return nil, err
	}
	sel.short = o.short
	return runAll(ctx, chosen, sel, out), nil
}

// writeFailures writes the reasons of failures to the file for a part. .ci/run prints that
// file at the end.
func (p part) writeFailures(text string) error {
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(logs, "failed-"+string(p)), []byte(text), 0o600)
}

// runAll runs the stages and returns their results in the same order. A run that is
// interrupted returns no results for stages that it did not reach.
func runAll(ctx context.Context, chosen []stage, sel selection, out io.Writer) []*run {
	strict := os.Getenv("CI") == "true"
	var results []*run
	var background sync.WaitGroup
	defer background.Wait()

	for _, s := range chosen {
		if s.exclusive {
			background.Wait()
		}

		r := &run{stage: s.name, part: sel.part, strict: strict, out: out}
		results = append(results, r)
		if s.rest && sel.part == short {
			r.leftOut = true
			continue
		}
		if slices.ContainsFunc(results, func(n *run) bool { return n.stage == s.needs && !n.ok() }) {
			r.err = fmt.Errorf("not run: %s did not pass", s.needs)
			continue
		}

		fmt.Fprintf(out, "== %s: %s\n", s.name, s.help)
		if s.background {
			background.Go(func() { runOne(ctx, s, r, sel) })
			continue
		}
		if runOne(ctx, s, r, sel); errors.Is(r.err, errInterrupted) {
			break
		}
	}
	return results
}

var errInterrupted = errors.New("interrupted")

// runOne runs a stage and stores its time and its error in r.
func runOne(ctx context.Context, s stage, r *run, sel selection) {
	start := time.Now()
	r.err = logged(r, func() error { return s.run(ctx, r, sel.of(s)) })
	r.took = time.Since(start)
	if ctx.Err() != nil {
		r.err = errInterrupted
	}
}

// logs is the folder with the output of all tests, in one file for each stage, and with the
// reasons of failures, in one file for each part.
const logs = "bin/tests"

// logged runs a stage, and writes the output of its tests to a file in logs.
func logged(r *run, stage func() error) error {
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return err
	}
	r.logName = filepath.Join(logs, r.stage+".log")
	file, err := os.Create(r.logName)
	if err != nil {
		return err
	}
	r.log = &lockedWriter{w: file}
	return errors.Join(stage(), file.Close())
}

// choose returns the named stages and those that they need, in the order of all. Without names it returns all.
func choose(all []stage, names []string) ([]stage, error) {
	if len(names) == 0 {
		return all, nil
	}

	known := map[string]stage{}
	for _, s := range all {
		known[s.name] = s
	}

	wanted := map[string]bool{}
	for _, name := range names {
		s, ok := known[name]
		if !ok {
			return nil, fmt.Errorf("unknown stage %q: want %s", name, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		wanted[name] = true
		wanted[s.needs] = true
	}
	return slices.DeleteFunc(slices.Clone(all), func(s stage) bool { return !wanted[s.name] }), nil
}

// summary prints the table, the tests that are left to the other part, the reasons of failures
// and, on the last line, the totals. If something failed, the lines before the totals tell the
// reader where to look first. summary returns true if all stages passed.
func summary(out io.Writer, results []*run, took time.Duration) bool {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stage\tresult\tseconds\tCPU\tpassed\tfailed\tskipped\tleft\t")
	ok := true
	total := counts{}
	left := 0
	var cpu time.Duration
	for _, r := range results {
		ok = ok && r.ok()
		total.add(r.counts)
		cpu += r.cpu
		left += len(r.left)
		fmt.Fprintf(w, "%s\t%s\t%.1f\t%.1f\t%d\t%d\t%d\t%s\t\n",
			r.stage, r.result(), r.took.Seconds(), r.cpu.Seconds(), r.passed, r.failed, r.skipped, r.leftColumn())
	}

	fmt.Fprintf(w, "all\t%s\t%.1f\t%.1f\t%d\t%d\t%d\t%d\t\n", word(ok), took.Seconds(), cpu.Seconds(), total.passed, total.failed, total.skipped, left)
	if err := w.Flush(); err != nil {
		return false
	}

	for _, r := range results {
		names := r.leftNames()
		for _, command := range slices.Sorted(maps.Keys(names)) {
			fmt.Fprintf(out, "%s: left to %s: %s\n", r.stage, command, strings.Join(names[command], ", "))
		}
	}

	fmt.Fprint(out, failures(results))
	if i := slices.IndexFunc(results, func(r *run) bool { return !r.ok() }); i >= 0 {
		fmt.Fprintln(out)
		results[i].lookAt(out)
	}
	fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return ok
}

// failures returns the reasons of failures and the skipped tests of all stages, one per line.
func failures(results []*run) string {
	var lines strings.Builder
	for _, r := range results {
		for _, reason := range r.reasons() {
			fmt.Fprintf(&lines, "%s: %s\n", r.stage, reason)
		}
	}
	return lines.String()
}

func word(ok bool) string {
	if ok {
		return "ok"
	}
	return "FAIL"
}
