package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// vmBudget is how long the guest of the vm stage may run.
const vmBudget = 25 * time.Minute

const (
	kernelTests = "^TestKernel"
	vmTests     = "^TestVM"
	e2eFolder   = "/test/e2e"
)

func build(ctx context.Context, r *run) error {
	r.noTests = true
	return show(command(ctx, "make", "--no-print-directory", "build"), r)
}

// unit takes no results from the cache: it knows the files that tests open, but not
// those that programs read which tests run.
func unit(ctx context.Context, r *run) error {
	pkgs, err := packages(ctx)
	if err != nil {
		return err
	}
	var paths []string
	for _, p := range pkgs {
		if !p.endToEnd() {
			paths = append(paths, p.ImportPath)
		}
	}
	return goTest(ctx, r, append([]string{"-race", "-count=1", "-skip", kernelTests + "|" + vmTests}, paths...)...)
}

// kernel runs what depends on this machine, so nothing comes from the cache.
func kernel(ctx context.Context, r *run) error {
	found, err := find(ctx, regexp.MustCompile(`(?m)^func (TestKernel\w*)\(\w+ \*testing\.T\)`), notEndToEnd)
	if err != nil || len(found) == 0 {
		return err
	}
	return goTest(ctx, r, append([]string{"-race", "-count=1", "-run", kernelTests}, packagesOf(found)...)...)
}

// vm runs what needs a kernel with more than this machine's may have.
func vm(ctx context.Context, r *run) error {
	found, err := find(ctx, regexp.MustCompile(`(?m)^func (TestVM\w*)\(\w+ \*testing\.T\)`), func(pkg) bool { return true })
	if err != nil || len(found) == 0 {
		return err
	}
	dir, err := os.MkdirTemp("", "stages-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "vm") // go run would not pass on that it shall end
	if err := show(command(ctx, "go", "build", "-o", program, "./test/vm"), r); err != nil {
		return fmt.Errorf("build test/vm: %w", err)
	}
	args := []string{"-json", "-run", vmTests, "-timeout", vmBudget.String()}
	return events(command(ctx, program, append(args, packagesOf(found)...)...), r)
}

// endToEnd gives one package after the other the whole machine.
func endToEnd(ctx context.Context, r *run) error {
	pkgs, err := packages(ctx)
	if err != nil {
		return err
	}
	args := []string{"-race", "-count=1", "-p=1", "-timeout=30m", "-skip", vmTests}
	before := len(args)
	for _, p := range pkgs {
		if p.endToEnd() {
			args = append(args, p.ImportPath)
		}
	}
	if len(args) == before {
		return nil
	}
	return goTest(ctx, r, args...)
}

// fuzz runs one target on each CPU at a time. What a target finds stands in
// its package's testdata/fuzz afterwards and fails the unit stage from then on.
func fuzz(ctx context.Context, r *run, each string) error {
	targets, err := find(ctx, regexp.MustCompile(`(?m)^func (Fuzz\w*)\(\w+ \*testing\.F\)`), notEndToEnd)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU())
	results := make([]*run, len(targets))
	for i, t := range targets {
		group.Go(func() (err error) {
			results[i], err = fuzzTarget(ctx, r.out, t, each)
			return err
		})
	}
	err = group.Wait()
	for _, one := range results {
		r.add(one.counts)
		r.failures = append(r.failures, one.failures...)
		r.skips = append(r.skips, one.skips...)
	}
	return err
}

// timeIsOver is what a fuzzer of Go before 1.27 may say, and call a failure, when
// its time is over (https://go.dev/issue/75804). Of a finding it says more, or has
// said that it is about to make the input smaller.
var timeIsOver = regexp.MustCompile(`(?m)^--- FAIL: Fuzz\w+ \([\d.]+s\)\n    context deadline exceeded\nFAIL$`)

// fuzzTarget runs one target, and once more if it was its time alone that failed.
func fuzzTarget(ctx context.Context, out io.Writer, t found, each string) (*run, error) {
	for again := false; ; again = true {
		var said bytes.Buffer
		r := &run{stage: "fuzz", out: &lockedWriter{w: io.MultiWriter(out, &said)}}
		err := goTest(ctx, r, "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+each, "-parallel=1", t.pkg)
		if again || !timeIsOver.Match(said.Bytes()) || bytes.Contains(said.Bytes(), []byte("failing input file")) {
			return r, err
		}
		fmt.Fprintf(out, "      %s runs once more: that its time is over is no failure, see go.dev/issue/75804\n", t.name)
	}
}

// goTest runs `go test -json args` and reports to r. A failed test is no
// error here, it is counted.
func goTest(ctx context.Context, r *run, args ...string) error {
	return events(command(ctx, "go", append([]string{"test", "-json"}, args...)...), r)
}

// events runs a command that writes what go test -json writes.
func events(cmd *exec.Cmd, r *run) error {
	cmd.Stderr = r.out
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	p := parser{run: r, output: map[string][]string{}, counts: map[string]*counts{}}
	readErr := p.read(pipe)
	err = wait(cmd)
	if err != nil && r.failed > 0 {
		err = nil // the failed tests say it better
	}
	if err != nil {
		err = fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	return errors.Join(err, readErr)
}

// command returns a command in a process group of its own, all of which is asked to
// end when ctx does: go does not pass that on to the tests that it runs.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// wait waits for a command, and ends what is left of its group.
func wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // as a rule nothing is
	return err
}

// show runs a command that writes to where r does.
func show(cmd *exec.Cmd, r *run) error {
	cmd.Stdout, cmd.Stderr = r.out, r.out
	if err := cmd.Start(); err != nil {
		return err
	}
	return wait(cmd)
}

// pkg is what is needed of `go list -json`.
type pkg struct {
	Dir, ImportPath           string
	TestGoFiles, XTestGoFiles []string
}

func (p pkg) endToEnd() bool { return strings.Contains(p.ImportPath+"/", e2eFolder+"/") }

func packages(ctx context.Context) ([]pkg, error) {
	cmd := command(ctx, "go", "list", "-json=Dir,ImportPath,TestGoFiles,XTestGoFiles", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run go list: %w", err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return pkgs, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read go list: %w", err)
		}
		pkgs = append(pkgs, p)
	}
}

// found is a function of a test file.
type found struct{ pkg, name string }

func notEndToEnd(p pkg) bool { return !p.endToEnd() }

// packagesOf returns the packages of what find has found.
func packagesOf(all []found) []string {
	var pkgs []string
	for i, f := range all {
		if i == 0 || f.pkg != all[i-1].pkg {
			pkgs = append(pkgs, f.pkg)
		}
	}
	return pkgs
}

// find returns what the first group of re matches in the test files of the
// packages that where is true of, package by package.
func find(ctx context.Context, re *regexp.Regexp, where func(pkg) bool) ([]found, error) {
	pkgs, err := packages(ctx)
	if err != nil {
		return nil, err
	}
	var all []found
	for _, p := range pkgs {
		if !where(p) {
			continue
		}
		for _, file := range append(p.TestGoFiles, p.XTestGoFiles...) {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				return nil, err
			}
			for _, m := range re.FindAllSubmatch(text, -1) {
				all = append(all, found{p.ImportPath, string(m[1])})
			}
		}
	}
	return all, nil
}
