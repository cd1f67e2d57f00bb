// Command stages runs the tests in stages, one after the other, and ends with
// a table of what came out and how long it took. A stage that fails does not
// keep the later ones from running; one that needs it is left out and counts
// as failed. Without arguments all stages run, otherwise the named ones and what
// they need.
//
// Nothing here lists packages. Tests that need root and a network namespace
// stand beside the code they test and are named TestKernel...; they make the
// kernel stage. Tests that need a kernel with WireGuard, IPIP and whatever else this
// machine's may lack are named TestVM...; test/vm runs them. Fuzz targets are found by their names as well.
//
// Under CI=true a skipped test is a failure, and so is a stage that finds no
// tests: what cannot run there must not look as if it had passed.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// A stage is one line of the table.
type stage struct {
	name  string
	help  string
	needs string // the stage without which this one cannot run; empty: none
	run   func(ctx context.Context, r *run) error
}

func stages(fuzzTime string) []stage {
	return []stage{
		{name: "build", help: "make build", run: build},
		{name: "unit", help: "all but the other stages, with the race detector", run: unit},
		{name: "kernel", help: "TestKernel..., with the race detector", run: kernel},
		{name: "e2e", help: "test/e2e: real daemons and traffic", needs: "build", run: endToEnd},
		{name: "vm", help: "TestVM..., on a Debian kernel in qemu", needs: "build", run: vm},
		{name: "fuzz", help: "every fuzz target for a while", run: func(ctx context.Context, r *run) error {
			return fuzz(ctx, r, fuzzTime)
		}},
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

// endings are the signals that end the run. That its terminal is gone is one, as what
// it starts does not hear of that; nohup says otherwise.
func endings() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// execute runs the stages that args name; ok says that all of them passed.
func execute(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	flags := flag.NewFlagSet("stages", flag.ContinueOnError)
	fuzzTime := flags.String("fuzztime", "10s", "how long each fuzz target runs")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	all := stages(*fuzzTime)
	chosen, err := choose(all, flags.Args())
	if err != nil {
		return false, err
	}
	strict := os.Getenv("CI") == "true"
	var results []*run
	out = &lockedWriter{w: out}
	for _, s := range chosen {
		r := &run{stage: s.name, strict: strict, out: out}
		results = append(results, r)
		if slices.ContainsFunc(results, func(n *run) bool { return n.stage == s.needs && !n.ok() }) {
			r.err = fmt.Errorf("not run: %s did not pass", s.needs)
			continue
		}
		fmt.Fprintf(out, "== %s: %s\n", s.name, s.help)
		start := time.Now()
		r.err = s.run(ctx, r)
		r.took = time.Since(start)
		if ctx.Err() != nil {
			r.err = fmt.Errorf("interrupted")
			break
		}
	}
	return summary(out, results), nil
}

// choose returns the named stages, each once and after the one that it needs.
func choose(all []stage, names []string) ([]stage, error) {
	if len(names) == 0 {
		return all, nil
	}
	var chosen []stage
	for _, name := range names {
		s, err := named(all, name)
		if err != nil {
			return nil, err
		}
		if s.needs != "" {
			needed, err := named(all, s.needs)
			if err != nil {
				return nil, err
			}
			chosen = with(chosen, needed)
		}
		chosen = with(chosen, s)
	}
	return chosen, nil
}

func named(all []stage, name string) (stage, error) {
	var known []string
	for _, s := range all {
		if s.name == name {
			return s, nil
		}
		known = append(known, s.name)
	}
	return stage{}, fmt.Errorf("unknown stage %q: want %s", name, strings.Join(known, ", "))
}

// with adds a stage, unless it is there.
func with(chosen []stage, s stage) []stage {
	if slices.ContainsFunc(chosen, func(c stage) bool { return c.name == s.name }) {
		return chosen
	}
	return append(chosen, s)
}

// summary writes the table and, last and alone on its line, the totals.
func summary(out io.Writer, results []*run) bool {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stage\tresult\tseconds\tpassed\tfailed\tskipped\t")
	ok, total, took := true, counts{}, time.Duration(0)
	for _, r := range results {
		ok = ok && r.ok()
		total.add(r.counts)
		took += r.took
		fmt.Fprintf(w, "%s\t%s\t%.1f\t%d\t%d\t%d\t\n", r.stage, r.result(), r.took.Seconds(), r.passed, r.failed, r.skipped)
	}
	fmt.Fprintf(w, "all\t%s\t%.1f\t%d\t%d\t%d\t\n", word(ok), took.Seconds(), total.passed, total.failed, total.skipped)
	if err := w.Flush(); err != nil {
		return false
	}
	for _, r := range results {
		for _, reason := range r.reasons() {
			fmt.Fprintf(out, "%s: %s\n", r.stage, reason)
		}
	}
	fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return ok
}

func word(ok bool) string {
	if ok {
		return "ok"
	}
	return "FAIL"
}
