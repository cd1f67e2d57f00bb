// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pidFile is the environment variable with which TestInterrupted runs itself in a second
// process. The second process starts a node, writes its process id to the file that the
// variable names, and waits until the first one ends it.
const pidFile = "FLANNELD_TEST_PID_FILE"

// TestInterrupted ends runs early, and checks that their processes, cgroups and files
// disappear. Only if a run itself is killed, this needs sweep, which the next run calls.
func TestInterrupted(t *testing.T) {
	if file := os.Getenv(pidFile); file != "" {
		waitWithNode(t, file)
		return
	}
	for _, tt := range []struct {
		name string
		end  func(*earlyRun) error
		next bool // whether sweep must remove the cgroups and files
	}{
		{"interrupt", func(r *earlyRun) error { return unix.Kill(r.pid, unix.SIGINT) }, false},
		{"go command killed", func(r *earlyRun) error {
			return errors.Join(r.output.Close(), r.parent.Kill()) // like a go command that is killed: it does not read the output any more
		}, false},
		{"killed", func(r *earlyRun) error { return unix.Kill(r.pid, unix.SIGKILL) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := startRun(t)
			run := r.pid
			cgroups, err := cgroupsOf(run)
			if err != nil {
				t.Fatal(err)
			}
			tmp := filesOf(run)
			if _, err := os.Stat(tmp); err != nil || len(cgroups) == 0 || len(processesOf(t, tmp)) == 0 {
				t.Fatalf("before the end: folder %v, cgroups %q", err, cgroups)
			}
			if err := tt.end(r); err != nil {
				t.Fatal(err)
			}
			eventually(t, "end of the run", func(context.Context) error {
				if all := processesOf(t, tmp); len(all) > 0 {
					return fmt.Errorf("these processes are left: %q", all)
				}
				if tt.next {
					if err := sweep(); err != nil {
						return err
					}
				}
				left, err := cgroupsOf(run)
				if _, statErr := os.Stat(tmp); !errors.Is(statErr, fs.ErrNotExist) {
					left = append(left, tmp)
				}
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("these folders are left: %q", left)
				}
				return err
			})
		})
	}
}

func waitWithNode(t *testing.T, file string) {
	t.Helper()
	newCluster(t, config{nodes: 1, families: v4})
	part := file + ".part"
	err := errors.Join(os.WriteFile(part, []byte(strconv.Itoa(os.Getpid())), 0o600), os.Rename(part, file))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end", func(context.Context) error {
		t.Log("waits") // write output, like a test that is busy
		return errors.New("not interrupted")
	})
}

// earlyRun is a run of these tests that a test ends early.
type earlyRun struct {
	pid    int
	parent *os.Process // the shell that runs it, in place of the go command
	output *os.File    // end of the pipe from which the output of both processes is read
}

// startRun runs this test in another process, as the child of a shell, and waits until that
// process has a node.
func startRun(t *testing.T) *earlyRun {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	output, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "pid")
	test, _, _ := strings.Cut(t.Name(), "/")
	shell := exec.CommandContext(background(t), "sh", "-c", `"$@"; exit $?`, "sh", self, "-test.v", "-test.run=^"+test+"$")
	shell.Env = append(os.Environ(), pidFile+"="+file)
	shell.Stdout, shell.Stderr = out, out
	err = shell.Start()
	out.Close()
	if err != nil {
		t.Fatal(err)
	}
	ended, read := make(chan error, 1), make(chan struct{})
	go func() { ended <- shell.Wait(); close(ended) }()
	var text bytes.Buffer
	go func() { _, _ = io.Copy(&text, output); close(read) }()
	t.Cleanup(func() {
		<-ended
		_ = output.Close() // may be closed already
		if <-read; t.Failed() {
			t.Logf("output of the run: %s", text.String())
		}
	})
	r := &earlyRun{parent: shell.Process, output: output}
	eventually(t, "node of the run", func(context.Context) error {
		select {
		case err := <-ended:
			t.Fatalf("the run ended: %v", err)
		default:
		}
		text, err := os.ReadFile(file)
		if err == nil {
			r.pid, err = strconv.Atoi(string(text))
		}
		return err
	})
	return r
}

// cgroupsOf returns the cgroups of a run, each of which contains the cgroups of its nodes. It
// returns one for each hierarchy in which there is one.
func cgroupsOf(run int) (found []string, err error) {
	roots, err := hierarchies()
	for _, root := range roots {
		if _, err := os.Stat(folderOf(root, run)); !errors.Is(err, fs.ErrNotExist) {
			found = append(found, folderOf(root, run))
		}
	}
	return found, err
}

// processesOf returns the command lines of all processes that contain dir.
func processesOf(t *testing.T, dir string) (found []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if line := strings.ReplaceAll(string(text), "\x00", " "); err == nil && strings.Contains(line, dir) { // an error means that the process has ended
			found = append(found, line)
		}
	}
	return found
}
