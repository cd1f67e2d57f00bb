// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	conformanceBudget = 20 * time.Minute
	parallel          = 6 // number of tests at the same time; most of the time they wait
)

// spec is the result of a test in ginkgo's report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// conformance runs those of Kubernetes' tests whose names match focus, and reports each
// as a subtest. It fails if their number is not want. While the tests run it calls
// meanwhile, which must return soon after running is closed.
func (c *cluster) conformance(focus string, want int, meanwhile func(running <-chan struct{})) {
	c.t.Helper()
	run := c.startConformance(focus)
	meanwhile(run.ended)
	ran := 0
	for _, s := range run.specs() {
		if s.State == "skipped" || s.LeafNodeText == "" { // focus does not match it, or it is a hook of the suite
			continue
		}
		ran++
		c.t.Run(s.name(), func(t *testing.T) {
			t.Logf("%s in %s", s.State, s.RunTime.Round(time.Millisecond))
			if s.State != "passed" {
				t.Error(s.Failure.Message)
			}
		})
	}
	if ran != want {
		c.t.Errorf("%d tests ran, want %d: %s", ran, want, lastLines(run.out.String(), 60))
	}
}

// conformanceRun is a run of Kubernetes' tests in another process.
type conformanceRun struct {
	c     *cluster
	out   bytes.Buffer // output; may be read after ended is closed
	ended chan struct{}
	err   error
}

const report = "conformance.json"

func (c *cluster) startConformance(focus string) *conformanceRun {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), conformanceBudget)
	c.t.Cleanup(cancel)
	// In a PID namespace of their own, ginkgo's children end when ginkgo ends, even if it
	// is killed.
	cmd := exec.CommandContext(ctx, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--", tool(c.t, "kubernetes/ginkgo"), fmt.Sprintf("--procs=%d", parallel), "--no-color",
		"--focus="+focus, "--timeout="+conformanceBudget.String(), "--output-dir="+c.dir, "--json-report="+report,
		tool(c.t, "kubernetes/conformance.test"), "--", "--kubeconfig="+filepath.Join(c.dir, admin+".kubeconfig"),
		"--kubectl-path="+tool(c.t, "kubectl"), "--provider=skeleton", "--disable-log-dump", "--dump-logs-on-failure=false",
		// The suite waits until nodes are ready, but not for one that is cordoned or
		// reboots.
		"--allowed-not-ready-nodes=1",
		"--non-blocking-taints=node.kubernetes.io/unschedulable,node.kubernetes.io/not-ready,node.kubernetes.io/unreachable")
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), repositories(c.t), "HOME="+c.dir)
	r := &conformanceRun{c: c, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &r.out, &r.out
	if err := c.lab.Underlay().Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		defer close(r.ended)
		r.err = cmd.Wait()
	}()
	return r
}

// specs waits for the end of the run and returns the results of all tests in its report.
func (r *conformanceRun) specs() (specs []spec) {
	t := r.c.t
	t.Helper()
	<-r.ended
	text, err := os.ReadFile(filepath.Join(r.c.dir, report))
	if err != nil {
		t.Fatalf("conformance tests: %v, %v: %s", r.err, err, lastLines(r.out.String(), 60))
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &suites); err != nil {
		t.Fatal(err)
	}
	for _, s := range suites {
		specs = append(specs, s.SpecReports...)
	}
	return specs
}
