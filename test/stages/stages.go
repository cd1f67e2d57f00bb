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
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// vmBudget limits how long each guest of the stage vm runs.
const vmBudget = 30 * time.Minute

// mostGuests limits the number of guests, because each needs up to 2 GB of memory.
const mostGuests = 4

func build(ctx context.Context, r *run, _ selection) error {
	r.noTests = true
	return show(command(ctx, "make", "--no-print-directory", "build"), r)
}

// unit, like kernel, does not use cached results. The cache of Go notices changes of files that
// a test opens. It does not notice changes of this machine, or of files that are read by
// programs which the test runs.
func unit(ctx context.Context, r *run, s selection) error {
	return goTests(ctx, r, s, "-race", s.timeout(15*time.Minute, 15*time.Minute), "-p", perCPU(2))
}

func kernel(ctx context.Context, r *run, s selection) error {
	return goTests(ctx, r, s, "-race", "-p", perCPU(2))
}

// perCPU returns n times the number of CPUs, as text: how many packages or tests run at the
// same time. That is more than there are CPUs, because most tests wait for timers and for other
// processes.
func perCPU(n int) string { return strconv.Itoa(n * runtime.NumCPU()) }

// vm runs the tests that need kernel features which this machine may lack, in several guests at
// the same time. Each guest runs one test at a time. There is one guest more than there are CPUs,
// because a test waits for timers about a quarter of the time, but no more than mostGuests.
func vm(ctx context.Context, r *run, s selection) error {
	tests := r.take(s)
	if len(tests) == 0 {
		return nil
	}

	dir, err := os.MkdirTemp("", "stages-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "vm") // go run would not forward signals
	if err := show(command(ctx, "go", "build", "-o", program, "./test/vm"), r); err != nil {
		return fmt.Errorf("build test/vm: %w", err)
	}
	guests := min(runtime.NumCPU()+1, mostGuests)
	return parallel(r, guests, divide(tests, guests), func(one *run, tests []test) error {
		args := []string{"-json", s.shortForms(), "-run", pattern(tests, s.sub), "-timeout", vmBudget.String()}
		return events(command(ctx, program, append(args, packagesOf(tests)...)...), one)
	})
}

// endToEnd runs one package after the other, so that packages do not share the machine. Like release
// and kubernetes, it runs without the race detector, because the tests start the product as programs,
// which are built without it.
func endToEnd(ctx context.Context, r *run, s selection) error {
	return goTests(ctx, r, s, s.timeout(20*time.Minute, 40*time.Minute), "-p=1", "-parallel", perCPU(4))
}

func release(ctx context.Context, r *run, s selection) error {
	return goTests(ctx, r, s, "-timeout=30m")
}

func kubernetes(ctx context.Context, r *run, s selection) error {
	return goTests(ctx, r, s, "-timeout=90m", "-p=1")
}

// goTests runs the tests of the stage that the selection chooses.
func goTests(ctx context.Context, r *run, s selection, args ...string) error {
	tests := r.take(s)
	if len(tests) == 0 {
		return nil
	}
	// make lint runs go vet, for all packages at once.
	args = append(args, "-count=1", "-vet=off", s.shortForms(), "-run", pattern(tests, s.sub))
	return goTest(ctx, r, append(args, packagesOf(tests)...)...)
}

// fuzz runs every target for the time in each, and as many targets at the same time as there
// are CPUs. Go saves an input that makes a target fail in testdata/fuzz of its package. From
// then on, that input makes the stage unit fail too.
func fuzz(ctx context.Context, r *run, s selection, each string) error {
	return parallel(r, runtime.NumCPU(), s.fuzzTargets(), func(one *run, t test) error { return fuzzTarget(ctx, one, t, each) })
}

// parallel calls do for each element, for at most limit elements at the same time. Each call gets a
// run of its own. Their results are added to r in the order of the elements.
func parallel[T any](r *run, limit int, elements []T, do func(one *run, element T) error) error {
	var group errgroup.Group
	group.SetLimit(limit)
	results := make([]*run, len(elements))
	for i, element := range elements {
		results[i] = &run{stage: r.stage, out: r.out, log: r.log}
		group.Go(func() error { return do(results[i], element) })
	}
	err := group.Wait()
	for _, one := range results {
		r.merge(one)
	}
	return err
}

// timeIsOver matches a failure that a fuzzer of Go before 1.27 may report only because its time
// is over (https://go.dev/issue/75804). If an input made the target fail, the report has
// further lines, or the log says that the input is being minimized.
var timeIsOver = regexp.MustCompile(`(?m)^--- FAIL: Fuzz\w+ \([\d.]+s\)\n    context deadline exceeded\nFAIL$`)

// fuzzTarget runs one target and adds the result to r. If it failed only because its time was
// over, fuzzTarget runs it once more.
func fuzzTarget(ctx context.Context, r *run, t test, each string) error {
	for again := false; ; again = true {
		var said bytes.Buffer
		one := &run{stage: r.stage, out: &lockedWriter{w: io.MultiWriter(r.out, &said)}, log: r.log}
		err := goTest(ctx, one, "-vet=off", "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+each, "-parallel=1", t.pkg)
		if again || !timeIsOver.Match(said.Bytes()) || bytes.Contains(said.Bytes(), []byte("failing input file")) {
			r.merge(one)
			return err
		}
		fmt.Fprintf(r.out, "      %s runs once more: the end of its time is not a failure, see go.dev/issue/75804\n", t.name)
	}
}

// goTest runs `go test -json` with args and adds the results to r. It counts failed tests, and
// does not return an error for them.
func goTest(ctx context.Context, r *run, args ...string) error {
	args = append([]string{"test", "-json"}, args...)
	cmd := command(ctx, "go", args...)
	if slices.Contains(args, "-race") {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1") // the race detector is a library in C
	}
	return events(cmd, r)
}

// events runs a command that prints the events of go test -json, and adds these to r. It
// returns an error if the command fails without a failed test.
func events(cmd *exec.Cmd, r *run) error {
	cmd.Stderr = r.out
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	readErr := newReader(r).read(pipe)
	err = r.wait(cmd)
	if err != nil && r.failed > 0 {
		err = nil // the failed tests are the better description
	}
	if err != nil {
		err = fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	return errors.Join(err, readErr)
}

// command returns a command in a process group of its own. If it compiles, it does so without cgo, so
// that tests share compiled packages with the programs of make build. When ctx ends, the whole group gets
// SIGINT, because go does not forward signals to the tests that it runs. After 20 more seconds
// the command is killed.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if os.Getenv("GORACE") == "" {
		// Otherwise each process with the race detector would wait for a second at its exit.
		cmd.Env = append(cmd.Env, "GORACE=atexit_sleep_ms=50")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// wait waits for a command, and kills the processes that remain in its group. It adds to r the
// CPU time of the command and of those processes for which the command has waited.
func (r *run) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // usually there are none
	r.cpu += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return err
}

// show runs a command, and prints its output where r prints.
func show(cmd *exec.Cmd, r *run) error {
	cmd.Stdout = r.out
	cmd.Stderr = r.out
	if err := cmd.Start(); err != nil {
		return err
	}
	return r.wait(cmd)
}
