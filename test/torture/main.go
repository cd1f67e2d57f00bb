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

	"flanneld/pkg/lab"
)

func main() {
	lab.RunChild()
	var o options
	flag.IntVar(&o.hosts, "hosts", 20, "number of hosts that run flanneld")
	flag.DurationVar(&o.duration, "duration", 10*time.Minute, "duration of one run")
	flag.StringVar(&o.flanneld, "flanneld", "bin/flanneld", "program to test")
	flag.StringVar(&o.etcd, "etcd", "bin/tools/etcd-3.5,bin/tools/etcd-3.6", "releases of etcd, from the first to the last of which members are upgraded")
	runs := flag.Int("runs", 5, "number of runs")
	seed := flag.Uint64("seed", 0, "seed of the first run; 0 picks one")
	dir := flag.String("dir", "", "folder for logs of failed runs; without it a temporary one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	failed := 0
	for i := range *runs {
		o.seed, o.dir = *seed+uint64(i), *dir
		if err := run(ctx, o, os.Stdout); err != nil {
			fmt.Fprintf(os.Stdout, "seed %d: %v\n", o.seed, err)
			failed++
		}
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Printf("%d of %d runs kept all promises\n", *runs-failed, *runs)
	if failed > 0 {
		os.Exit(1)
	}
}

// options are those of one run.
type options struct {
	hosts    int
	duration time.Duration
	flanneld string
	etcd     string // paths of the releases of etcd, separated by commas
	seed     uint64
	dir      string // for logs; empty: a temporary folder that remains if the run fails
}

// run makes one run and reports it to out. An error lists the broken promises.
func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "torture"); err != nil {
			return err
		}
	}
	o.dir = filepath.Join(o.dir, fmt.Sprintf("seed-%d", o.seed))
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	fmt.Fprintf(out, "seed %d: %d hosts, %s, logs in %s\n", o.seed, o.hosts, o.duration, o.dir)
	t, err := newTorture(ctx, o, out)
	if err != nil {
		return err
	}
	defer t.close()
	found, err := t.run(ctx)
	if err != nil || len(found) > 0 {
		err = errors.Join(err, logs(o.dir, t.hosts))
		return errors.Join(errors.New("broken promises:\n  "+strings.Join(found, "\n  ")), err)
	}
	return os.RemoveAll(o.dir)
}
