// SPDX-License-Identifier: Apache-2.0

// Command torture runs flanneld on many hosts with an etcd of three members, causes faults at
// random, and checks from the histories of all kernels, subnet files, logs and members that
// flanneld kept its promises:
//
//   - two hosts never serve the same subnet;
//   - no host removes a route to a host that is there;
//   - no host leaves its subnet while it has the lease;
//   - packets between pods arrive all the time;
//   - everything is right again within a bounded time after the last fault;
//   - no daemon repeats a log line without bound.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

func main() {
	lab.RunChild()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok := runs(ctx, os.Stdout)
	stop()
	if !ok {
		os.Exit(1)
	}
}

// runs makes the runs that the command line requests, and reports them to out. It returns
// true if all of them kept all promises. It returns false if ctx ends before all runs are
// made.
func runs(ctx context.Context, out io.Writer) bool {
	var o options
	flag.IntVar(&o.hosts, "hosts", 20, "number of hosts that run flanneld")
	flag.DurationVar(&o.duration, "duration", 10*time.Minute, "duration of one run")
	flag.StringVar(&o.flanneld, "flanneld", "bin/flanneld", "program to test")
	flag.StringVar(&o.etcd, "etcd", "bin/tools/etcd-3.5,bin/tools/etcd-3.6", "releases of etcd, from the first to the last of which members are upgraded")
	count := flag.Int("runs", 5, "number of runs")
	seed := flag.Uint64("seed", 0, "seed of the first run; 0 picks one")
	dir := flag.String("dir", "", "folder for logs of failed runs; without it a temporary one")
	flag.Parse()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	kept := 0
	for i := 0; i < *count && ctx.Err() == nil; i++ {
		o.seed, o.dir = *seed+uint64(i), *dir
		if err := run(ctx, o, out); err != nil {
			fmt.Fprintf(out, "seed %d: %v\n", o.seed, err)
			continue
		}
		kept++
	}
	fmt.Fprintf(out, "%d of %d runs kept all promises\n", kept, *count)
	return kept == *count
}

// options contains the parameters of one run.
type options struct {
	hosts    int
	duration time.Duration
	flanneld string
	etcd     string // paths of the releases of etcd, separated by commas
	seed     uint64
	dir      string // parent of the folder with logs; empty: a new temporary folder. Only a failed run keeps its logs
}

// run makes one run and reports it to out. It returns an error that lists the broken
// promises, or that says why the run itself failed.
func run(ctx context.Context, o options, out io.Writer) error {
	if o.dir == "" {
		temporary, err := os.MkdirTemp("", "torture")
		if err != nil {
			return err
		}
		o.dir = temporary
		defer func() { _ = os.Remove(temporary) }() // fails if it contains logs
	}
	o.dir = filepath.Join(o.dir, fmt.Sprintf("seed-%d", o.seed))
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	defer func() { _ = os.Remove(o.dir) }() // fails if it contains logs
	fmt.Fprintf(out, "seed %d: %d hosts, %s, logs in %s\n", o.seed, o.hosts, o.duration, o.dir)
	t, err := newTorture(ctx, o, out)
	if err != nil {
		return err
	}
	defer t.close()
	if err := failure(t.run(ctx)); err != nil {
		return errors.Join(err, logs(o.dir, t.hosts))
	}
	return os.RemoveAll(o.dir)
}

// failure returns an error that lists the broken promises, if there are any, and contains err. It returns
// nil if the run has kept all promises and err is nil.
func failure(broken []string, err error) error {
	if len(broken) == 0 {
		return err
	}
	return errors.Join(errors.New("broken promises:\n  "+strings.Join(broken, "\n  ")), err)
}
