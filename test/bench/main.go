// SPDX-License-Identifier: Apache-2.0

// Command bench measures the cost of flanneld with a real kernel and a real store, in a
// lab of network namespaces. It compares this cost with that of the kernel alone for the
// same objects, or of a minimal program for the same work, in the same run.
package main

import (
	"context"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// options are the parameters of a run.
type options struct {
	flanneld string
	out      string // folder for results
	page     string // Markdown page whose tables are replaced; empty if none
	only     string
	quick    bool

	rounds     int
	cold       []int // numbers of peers for cold starts
	large      int   // number of peers in the measures with a large cluster
	eventSizes []int
	eventCount int // how often a lease is added and removed per round
	restarts   int
	atRest     time.Duration
	busyFor    time.Duration
}

func parse(args []string) options {
	o := options{
		rounds: 9, cold: []int{10, 1000, 5000, 10000}, large: 5000, eventSizes: []int{100, 1000, 10000}, eventCount: 200,
		restarts: 20, atRest: time.Minute, busyFor: 15 * time.Second,
	}

	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.StringVar(&o.flanneld, "flanneld", "bin/flanneld", "the daemon, as make build makes it")
	f.StringVar(&o.out, "out", "dist/out/bench", "folder for results.json and the charts")
	f.StringVar(&o.page, "page", "", "markdown file that takes the tables in")
	f.StringVar(&o.only, "only", "", "comma-separated measures; empty means all of "+strings.Join(names(), ", "))
	f.BoolVar(&o.quick, "quick", false, "fewer rounds, shorter waits: minutes less, and less to be trusted")
	rounds := f.Int("rounds", 0, "rounds of each measure; 0 means the default")
	peers := f.Int("n", 0, "leases of others in the large measures; 0 means 5000")
	must.Do(f.Parse(args))
	if o.quick {
		o.rounds = 3
		o.cold = []int{10, 5000}
		o.eventCount = 50
		o.restarts = 4
		o.eventSizes = []int{1000, 10000}
		o.atRest = 5 * time.Second
		o.busyFor = 5 * time.Second
	}
	if *rounds > 0 {
		o.rounds = *rounds
	}
	if *peers > 0 {
		o.large = *peers
		o.cold = []int{*peers}
	}
	if f.NArg() > 0 {
		must.Fail("unexpected argument %q", f.Arg(0))
	}
	if o.page != "" && o.only != "" {
		must.Fail("-page needs all measures, so it cannot be combined with -only")
	}
	return o
}

func main() {
	lab.RunChild()
	must.Main("bench", func(ctx context.Context) {
		if !runPlain(os.Args[0], os.Args[1:]) {
			execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
		}
	})
}

func execute(ctx context.Context, args []string, out, progress io.Writer) {
	o := parse(args)
	version := must.Get(exec.CommandContext(ctx, o.flanneld, "--version").CombinedOutput())
	r := &report{Date: time.Now(), Quick: o.quick, Commit: strings.TrimSpace(string(version)), Machine: figures.ThisMachine()}
	before := machineCPU()
	b := newBed(ctx, o.flanneld)
	run := &runner{options: o, bed: b, report: r}
	incomplete := must.Catch(func() { run.all(ctx, progress) })
	b.close() // before othersCPU, which counts the CPU time only of children that have ended
	must.Do(context.Cause(ctx))
	r.OthersCPU = othersCPU(before)
	r.Seconds = time.Since(r.Date).Seconds()
	r.markdown(out, allMeasures)
	if incomplete != nil { // a run with a failed measure does not replace the results of the last one
		must.Fail("%w", incomplete)
	}
	r.save(o)
}

// save writes the report as results.json, as charts and, if o.page is set, on that page.
// It replaces the results of the last run.
func (r *report) save(o options) {
	if o.only == "" { // remove charts of the last run for which this run has no data
		for _, chart := range must.Get(filepath.Glob(filepath.Join(o.out, "*.svg"))) {
			must.Do(os.Remove(chart))
		}
	}
	figures.Save(o.out, r, r.charts())
	if o.page != "" {
		figures.Insert(o.page, "make bench", func(out io.Writer) { r.markdown(out, judgedMeasures) })
	}
}
