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

// vmBudget limits the run time of the guest in the vm stage.
const vmBudget = 25 * time.Minute

const (
	kernelTests = "^TestKernel"
	vmTests     = "^TestVM"

	e2eFolder        = "/test/e2e"
	kubernetesFolder = "/test/kubernetes"
)

func build(ctx context.Context, r *run) error {
	r.noTests = true
	return show(command(ctx, "make", "--no-print-directory", "build"), r)
}

// unit runs the tests that belong to no other stage. It does not use cached results: the
// cache notices changes of files that a test opens, but not of files that are read by
// programs that the test runs.
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

// kernel runs the TestKernel... tests. It does not use cached results, because results
// depend on this machine.
func kernel(ctx context.Context, r *run) error {
	found, err := find(ctx, regexp.MustCompile(`(?m)^func (TestKernel\w*)\(\w+ \*testing\.T\)`), notEndToEnd)
	if err != nil || len(found) == 0 {
		return err
	}
	return goTest(ctx, r, append([]string{"-race", "-count=1", "-run", kernelTests}, packagesOf(found)...)...)
}

// vm runs the tests that need kernel features which this machine may lack.
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
	program := filepath.Join(dir, "vm") // go run would not forward signals
	if err := show(command(ctx, "go", "build", "-o", program, "./test/vm"), r); err != nil {
		return fmt.Errorf("build test/vm: %w", err)
	}
	args := []string{"-json", "-run", vmTests, "-timeout", vmBudget.String()}
	return events(command(ctx, program, append(args, packagesOf(found)...)...), r)
}

func endToEnd(ctx context.Context, r *run) error {
	return folder(ctx, r, e2eFolder, "-race", "-timeout=30m", "-skip", vmTests)
}

// kubernetes runs without the race detector, because the tests contain no code of the
// product.
func kubernetes(ctx context.Context, r *run, short bool) error {
	return folder(ctx, r, kubernetesFolder, "-timeout=90m", "-skip", vmTests, fmt.Sprintf("-short=%v", short))
}

// folder runs the packages of a folder one at a time, so that each has the whole machine.
func folder(ctx context.Context, r *run, path string, args ...string) error {
	pkgs, err := packages(ctx)
	if err != nil {
		return err
	}
	args = append(args, "-count=1", "-p=1")
	before := len(args)
	for _, p := range pkgs {
		if p.in(path) {
			args = append(args, p.ImportPath)
		}
	}
	if len(args) == before {
		return nil
	}
	return goTest(ctx, r, args...)
}

// fuzz runs as many targets in parallel as there are CPUs. An input that makes a target
// fail is saved in testdata/fuzz of its package, and from then on fails the unit stage
// too.
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

// timeIsOver matches the failure that a fuzzer of Go before 1.27 may report when its time
// is over (https://go.dev/issue/75804). If an input made the target fail, the report has
// further lines, or the log says that the input is being minimized.
var timeIsOver = regexp.MustCompile(`(?m)^--- FAIL: Fuzz\w+ \([\d.]+s\)\n    context deadline exceeded\nFAIL$`)

// fuzzTarget runs one target. If only the end of its time made it fail, it runs once
// more.
func fuzzTarget(ctx context.Context, out io.Writer, t found, each string) (*run, error) {
	for again := false; ; again = true {
		var said bytes.Buffer
		r := &run{stage: "fuzz", out: &lockedWriter{w: io.MultiWriter(out, &said)}}
		err := goTest(ctx, r, "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+each, "-parallel=1", t.pkg)
		if again || !timeIsOver.Match(said.Bytes()) || bytes.Contains(said.Bytes(), []byte("failing input file")) {
			return r, err
		}
		fmt.Fprintf(out, "      %s runs once more: the end of its time is not a failure, see go.dev/issue/75804\n", t.name)
	}
}

// goTest runs `go test -json` with args and adds the results to r. It counts failed tests
// and does not return an error for them.
func goTest(ctx context.Context, r *run, args ...string) error {
	return events(command(ctx, "go", append([]string{"test", "-json"}, args...)...), r)
}

// events runs a command that prints the events of go test -json.
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
		err = nil // the failed tests are the better description
	}
	if err != nil {
		err = fmt.Errorf("run %s tests: %w", r.stage, err)
	}
	return errors.Join(err, readErr)
}

// command returns a command in a process group of its own. When ctx ends, the whole group
// gets SIGINT, because go does not forward signals to the tests that it runs.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// wait waits for a command and kills the processes that remain in its group.
func wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // usually there are none
	return err
}

// show runs a command whose output goes to the output of r.
func show(cmd *exec.Cmd, r *run) error {
	cmd.Stdout, cmd.Stderr = r.out, r.out
	if err := cmd.Start(); err != nil {
		return err
	}
	return wait(cmd)
}

// pkg holds the fields of `go list -json` that are used here.
type pkg struct {
	Dir, ImportPath           string
	TestGoFiles, XTestGoFiles []string
}

func (p pkg) in(folder string) bool { return strings.Contains(p.ImportPath+"/", folder+"/") }

// endToEnd is true of packages that have a stage to themselves.
func (p pkg) endToEnd() bool { return p.in(e2eFolder) || p.in(kubernetesFolder) }

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

// found is a test function.
type found struct{ pkg, name string }

func notEndToEnd(p pkg) bool { return !p.endToEnd() }

// packagesOf returns the packages of the functions, each once.
func packagesOf(all []found) []string {
	var pkgs []string
	for i, f := range all {
		if i == 0 || f.pkg != all[i-1].pkg {
			pkgs = append(pkgs, f.pkg)
		}
	}
	return pkgs
}

// find returns what the first group of re matches in the test files of all packages for
// which where returns true, package by package.
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
