// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// TestToolsFollowVersion checks that make lets a link in bin/tools lead to the tool of the
// current version, even if a tool of another version was built later.
func TestToolsFollowVersion(t *testing.T) {
	makefile, err := filepath.Abs("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	built := t.TempDir()
	for i, version := range []string{"v1", "v2"} {
		path := filepath.Join(built, "helm-"+version)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1+i), 0)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	for _, version := range []string{"v2", "v1", "v2"} {
		cmd := exec.CommandContext(t.Context(), "make", "-C", dir, "-f", makefile, "bin/tools/helm", "COMPONENTS="+built, "HELM_VERSION="+version)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got, err := os.Readlink(filepath.Join(dir, "bin/tools/helm"))
		if want := filepath.Join(built, "helm-"+version); err != nil || got != want {
			t.Errorf("helm is %q (%v), want %s", got, err, want)
		}
	}
}

// TestWorkflowsCallMake checks that the workflows of GitHub run only .ci/run and targets of the
// Makefile. So what fails there fails with the same command on a developer's machine.
func TestWorkflowsCallMake(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}

	files, err := filepath.Glob("../../.github/workflows/*.yml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no workflows: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var workflow struct {
			Jobs map[string]struct{ Steps []struct{ Run string } }
		}
		if err := yaml.Unmarshal(text, &workflow); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for name, job := range workflow.Jobs {
			for _, step := range job.Steps {
				if step.Run != "" && !callsMake(step.Run, targets) {
					t.Errorf("%s: the job %s runs %q, want .ci/run, or make with targets of the Makefile", file, name, step.Run)
				}
			}
		}
	}
}

// callsMake reports whether a command is .ci/run, or make with targets and perhaps variables.
func callsMake(command string, targets map[string]bool) bool {
	words := strings.Fields(command)
	if words[0] != "make" {
		return command == ".ci/run"
	}
	for _, word := range words[1:] {
		if !strings.Contains(word, "=") && !targets[word] {
			return false
		}
	}
	return len(words) > 1
}
