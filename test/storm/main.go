// SPDX-License-Identifier: Apache-2.0

// Command storm measures what a store has to do for many hosts at once. It runs the store
// side of N hosts (the managers of subnet/etcd or subnet/kube, without devices, routes and
// rules) in one process against a real store on the same machine.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// options are the parameters of a run.
type options struct {
	stores    []string
	sizes     []int // numbers of hosts
	kubeSizes []int // numbers of hosts with Kubernetes
	scenarios []string
	etcd      string
	apiserver string
	limit     time.Duration
	churn     time.Duration
	renew     time.Duration
	out       string // folder for results; empty if none
	page      string // Markdown page whose tables are replaced; empty if none
}

func parse(args []string) options {
	var o options
	f := flag.NewFlagSet("storm", flag.ContinueOnError)
	stores := f.String("store", "etcd,kube", "comma-separated stores: etcd, kube")
	sizes := f.String("n", "1000", "comma-separated numbers of hosts")
	kubeSizes := f.String("kube-n", "", "comma-separated numbers of hosts with Kubernetes; empty means those of -n")
	var known []string
	for _, s := range scenarios() {
		known = append(known, s.name)
	}

	only := f.String("only", "", "comma-separated scenarios; empty means all of "+strings.Join(known, ", "))
	f.StringVar(&o.etcd, "etcd", "bin/tools/etcd-3.6", "etcd program")
	f.StringVar(&o.apiserver, "apiserver", figures.APIServerPath, "Kubernetes API server")
	f.DurationVar(&o.limit, "limit", 15*time.Minute, "time limit of one scenario")
	f.DurationVar(&o.churn, "churn", time.Minute, "time in which a tenth of the hosts leaves and as many join")
	f.DurationVar(&o.renew, "renew", time.Minute, "time after which each lease is renewed, in the scenario renew")
	f.StringVar(&o.out, "out", "", "folder for results.json and the charts")
	f.StringVar(&o.page, "page", "", "markdown file whose tables are replaced")
	must.Do(f.Parse(args))
	if f.NArg() > 0 {
		must.Fail("unexpected argument %q", f.Arg(0))
	}

	o.sizes = numbers("n", *sizes)
	o.kubeSizes = numbers("kube-n", cmp.Or(*kubeSizes, *sizes))
	o.stores = strings.Split(*stores, ",")
	for _, s := range o.stores {
		if s != "etcd" && s != "kube" {
			must.Fail("-store: %q is neither etcd nor kube", s)
		}
	}
	if *only != "" {
		o.scenarios = strings.Split(*only, ",")
	}

	for _, s := range o.scenarios {
		if !slices.Contains(known, s) {
			must.Fail("-only: unknown scenario %q", s)
		}
	}
	return o
}

func numbers(flag, list string) (sizes []int) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxHosts {
			must.Fail("-%s: %q is not a number from 1 to %d", flag, text, maxHosts)
		}
		sizes = append(sizes, n)
	}
	return sizes
}

// maxHosts is the largest number of hosts. The scenario churn needs larger numbers for the
// hosts that join. extra, the number of a host that does not exist, must be larger still.
const maxHosts = 15_000

func main() {
	lab.RunChild()
	if isHosts(os.Args) {
		if err := runHosts(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}

	must.Main("storm", func(ctx context.Context) { execute(ctx, os.Args[1:], os.Stdout) })
}

func execute(ctx context.Context, args []string, progress io.Writer) {
	o := parse(args)
	commit := must.Get(exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty").Output())
	r := &report{Date: time.Now(), Commit: strings.TrimSpace(string(commit)), Machine: figures.ThisMachine()}
	for _, store := range o.stores {
		sizes := o.sizes
		if store == "kube" {
			sizes = o.kubeSizes
		}
		for _, n := range sizes {
			if err := must.Catch(func() { one(ctx, o, store, n, r, progress) }); err != nil {
				must.Fail("%s, %d hosts: %w", store, n, err)
			}
			r.save(o) // now, because the rest can take an hour
		}
	}
}

func one(ctx context.Context, o options, store string, n int, r *report, progress io.Writer) {
	var etcd lab.EtcdOptions
	if store == "etcd" { // with room for the data of all hosts
		etcd = lab.EtcdOptions{Program: o.etcd, Env: []string{"ETCD_QUOTA_BACKEND_BYTES=" + strconv.Itoa(8<<30)}}
	}
	l := must.Get(lab.New(ctx, lab.Config{Hosts: 1, Etcd: etcd}))
	defer l.Close()
	s := &storm{lab: l, n: n, limit: o.limit, minute: o.churn, renew: o.renew, report: r, out: progress}
	if store == "kube" {
		s.store = startAPIServer(ctx, l, o.apiserver)
	} else {
		s.store = newEtcdServer(ctx, l)
	}
	defer s.store.close()
	s.store.join(ctx, 0, n)
	s.startHosts(ctx)
	defer s.stopHosts()
	s.run(ctx, o.scenarios)
}

// save writes the results into the folder and on the page that o names. The results of an
// earlier run are replaced. If o names no folder or no page, save does not write there.
func (r *report) save(o options) {
	if o.out != "" {
		figures.Save(o.out, r, r.charts())
	}
	if o.page != "" {
		figures.Insert(o.page, "make storm", r.markdown)
	}
}
