// SPDX-License-Identifier: Apache-2.0

// Command storm measures what a store has to do for many hosts at once. It runs the store
// side of N hosts (the managers of subnet/etcd or subnet/kube, without devices, routes and
// rules) in one process against a real store on the same machine.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
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

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("storm", flag.ContinueOnError)
	stores := f.String("store", "etcd,kube", "comma-separated stores: etcd, kube, or proxy for etcd behind its grpc-proxy")
	sizes := f.String("n", "1000", "comma-separated numbers of hosts")
	kubeSizes := f.String("kube-n", "", "comma-separated numbers of hosts with Kubernetes; empty means those of -n")
	var known []string
	for _, s := range scenarios() {
		known = append(known, s.name)
	}

	only := f.String("only", "", "comma-separated scenarios; empty means all of "+strings.Join(known, ", "))
	f.StringVar(&o.etcd, "etcd", "bin/tools/etcd-3.6", "etcd program")
	f.StringVar(&o.apiserver, "apiserver", "bin/tools/kube-apiserver", "Kubernetes API server")
	f.DurationVar(&o.limit, "limit", 15*time.Minute, "time limit of one scenario")
	f.DurationVar(&o.churn, "churn", time.Minute, "time in which a tenth of the hosts leaves and as many join")
	f.DurationVar(&o.renew, "renew", time.Minute, "time after which each lease is renewed, in the scenario renew")
	f.StringVar(&o.out, "out", "", "folder for results.json and the charts")
	f.StringVar(&o.page, "page", "", "markdown file whose tables are replaced")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}

	var err error
	if o.sizes, err = numbers("n", *sizes); err != nil {
		return o, err
	}
	if o.kubeSizes, err = numbers("kube-n", cmp.Or(*kubeSizes, *sizes)); err != nil {
		return o, err
	}
	o.stores = strings.Split(*stores, ",")
	for _, s := range o.stores {
		if s != "etcd" && s != "kube" && s != "proxy" {
			return o, fmt.Errorf("-store: %q is none of etcd, kube and proxy", s)
		}
	}
	if *only != "" {
		o.scenarios = strings.Split(*only, ",")
	}

	for _, s := range o.scenarios {
		if !strings.Contains(","+strings.Join(known, ",")+",", ","+s+",") {
			return o, fmt.Errorf("-only: unknown scenario %q", s)
		}
	}
	return o, nil
}

// numbers parses list, the value of a flag with several numbers of hosts.
func numbers(flag, list string) (sizes []int, err error) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxHosts {
			return nil, fmt.Errorf("-%s: %q is not a number from 1 to %d", flag, text, maxHosts)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
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

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := execute(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

func execute(ctx context.Context, args []string, progress io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	r := &report{Date: time.Now()}
	if err := r.describe(ctx); err != nil {
		return err
	}

	for _, store := range o.stores {
		sizes := o.sizes
		if store == "kube" {
			sizes = o.kubeSizes
		}
		for _, n := range sizes {
			if err := one(ctx, o, store, n, r, progress); err != nil {
				return fmt.Errorf("%s, %d hosts: %w", store, n, err)
			}
			if err := r.save(o); err != nil { // save now, because the rest can take an hour
				return err
			}
		}
	}
	return nil
}

// one runs the scenarios with one store and n hosts, and adds their results to r.
func one(ctx context.Context, o options, store string, n int, r *report, progress io.Writer) error {
	l, err := lab.New(ctx, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: store != "kube"}})
	if err != nil {
		return err
	}
	defer l.Close()
	s := &storm{lab: l, n: n, limit: o.limit, minute: o.churn, renew: o.renew, report: r}
	if store == "kube" {
		s.store, err = startKube(ctx, l, o.apiserver, n)
	} else {
		s.store, err = startEtcd(ctx, l, o.etcd, store == "proxy")
	}
	if err != nil {
		return err
	}
	defer s.store.close()
	if err := s.startHosts(ctx); err != nil {
		return err
	}
	defer s.stopHosts()
	return s.run(ctx, o.scenarios, progress)
}

func startKube(ctx context.Context, l *lab.Lab, program string, n int) (server, error) {
	k, err := startAPIServer(ctx, l, program)
	if err != nil {
		return nil, err
	}
	if err := k.addNodes(ctx, 0, n); err != nil {
		k.close()
		return nil, fmt.Errorf("make nodes: %w", err)
	}
	return k, nil
}

// describe records the version of the source, as git prints it, and the machine.
func (r *report) describe(ctx context.Context) error {
	commit, err := exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return fmt.Errorf("ask git for the version: %w", err)
	}
	r.Commit = strings.TrimSpace(string(commit))
	r.Machine, err = figures.ThisMachine()
	return err
}

// save writes the results into the folder and on the page that o names. The results of an
// earlier run are replaced. If o names no folder or no page, save does not write there.
func (r *report) save(o options) error {
	if o.out != "" {
		if err := figures.Save(o.out, r, r.charts()); err != nil {
			return err
		}
	}
	if o.page == "" {
		return nil
	}
	return figures.Insert(o.page, "make storm", r.markdown)
}
