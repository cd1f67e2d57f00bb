// SPDX-License-Identifier: Apache-2.0

// Command vm runs Go tests on another kernel than this machine's: it boots Debian's cloud
// kernel in qemu. qemu emulates the whole machine, so KVM is not needed. The guest
// contains the compiled tests, the programs in bin, some tools of this machine with their
// libraries, and the kernel's modules, which are loaded on demand.
//
//	go run ./test/vm -run '^TestVM' ./test/e2e
//
// It prints the output of the tests, with -json in the format of `go test -json`. It fails if a
// test fails or is skipped, if the guest ends early or takes too long, or if a package has no
// matching test.
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/flanneld/flanneld/test/must"
)

type options struct {
	run      string // regular expression for the tests to run
	json     bool
	short    bool          // whether tests run in their short form
	timeout  time.Duration // how long the guest may run
	memory   int           // memory of the guest in MB
	cpus     int           // of the guest
	packages []string
}

func main() {
	must.Main("vm", func(ctx context.Context) { execute(ctx, os.Args[1:], os.Stdout) })
}

func parse(args []string) (o options) {
	flags := flag.NewFlagSet("vm", flag.ContinueOnError)
	flags.StringVar(&o.run, "run", "^TestVM", "regular expression of the tests, as for go test")
	flags.BoolVar(&o.json, "json", false, "print events as go test -json does")
	flags.BoolVar(&o.short, "short", false, "run long tests in their short form")
	flags.DurationVar(&o.timeout, "timeout", 15*time.Minute, "how long the guest may run, of which its tests have nine tenths")
	flags.IntVar(&o.memory, "memory", 2048, "of the guest, in MB")
	flags.IntVar(&o.cpus, "cpus", 1, "of the guest, and how many parallel tests run at the same time")
	must.Do(flags.Parse(args))
	if o.packages = flags.Args(); len(o.packages) == 0 {
		must.Fail("no packages given")
	}
	return o
}

func execute(ctx context.Context, args []string, out io.Writer) {
	o := parse(args)
	kernel := findKernel(ctx)
	dir := must.Get(os.MkdirTemp("", "flanneld-vm-"))
	defer os.RemoveAll(dir)
	root := filepath.Join(dir, "root")
	jobs := addTests(ctx, root, o)
	addSystem(ctx, root, kernel)
	image := filepath.Join(dir, "initrd")
	pack(ctx, root, image)
	must.Do(os.RemoveAll(root))
	r := newReport(out, o.json)
	err := boot(ctx, guest{options: o, kernel: kernel, image: image, console: filepath.Join(dir, "console")}, r)
	if err := errors.Join(err, r.close(jobs)); err != nil {
		must.Fail("%w", err)
	}
}
