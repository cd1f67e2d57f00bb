// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// childEnv is the variable that makes this test binary build a lab and end in a certain
// way instead of running tests.
const childEnv = "LAB_TEST_CHILD"

// runTestChild returns at once unless the variable childEnv is set. Otherwise this is a
// process that a test observes: it builds a lab, prints "built", waits for the end of its
// standard input, and then ends in the way that the variable names.
func runTestChild() {
	how := os.Getenv(childEnv)
	if how == "" {
		return
	}
	if how == "nobody" {
		if err := syscall.Setuid(65534); err != nil {
			panic(err)
		}
	}
	ctx := context.Background()
	l, err := lab.New(ctx, lab.Config{Hosts: 2, Flanneld: "/bin/sleep"})
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
	for _, h := range l.Hosts() {
		go func() { _, _ = h.Exec(ctx, "sleep", "97") }()
	}
	fmt.Fprintln(os.Stdout, "built")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	switch how {
	case "panic":
		panic("as required")
	case "close":
		l.Close()
	}
	os.Exit(0)
}

// traces returns the ids of the processes below root, including root, and the network
// namespaces of their threads.
func traces(t *testing.T, root int) (namespaces map[string]bool, processes []int) {
	t.Helper()
	namespaces = map[string]bool{}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if !descends(pid, root) {
			continue
		}
		processes = append(processes, pid)
		links, _ := filepath.Glob(dir + "/task/*/ns/net")
		for _, link := range links {
			if ns, err := os.Readlink(link); err == nil {
				namespaces[ns] = true
			}
		}
	}
	return namespaces, processes
}

func descends(pid, root int) bool {
	for pid > 1 {
		if pid == root {
			return true
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		pid, _ = strconv.Atoi(strings.Fields(rest)[1])
	}
	return false
}

func TestKernelLabLeavesNothing(t *testing.T) {
	for _, how := range []string{"close", "panic", "SIGKILL"} {
		t.Run(how, func(t *testing.T) {
			tmp := t.TempDir()
			cmd := exec.Command(executable(t))
			cmd.Env = append(os.Environ(), childEnv+"="+how, "TMPDIR="+tmp)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, _ := bufio.NewReader(out).ReadString('\n'); line != "built\n" {
				t.Fatalf("child prints %q", line)
			}
			var made map[string]bool
			var processes []int
			waitUntil(t, "etcd and two sleeps", func() bool {
				made, processes = traces(t, cmd.Process.Pid)
				return len(processes) == 4
			})
			if len(made) != 4 {
				t.Errorf("%d namespaces, want the machine's, the underlay's and two hosts'", len(made))
			}
			if how == "SIGKILL" {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			in.Close()
			_ = cmd.Wait()
			waitUntil(t, "end of every process", func() bool {
				for _, pid := range processes {
					if syscall.Kill(pid, 0) == nil {
						return false
					}
				}
				return true
			})
			// Only a mount can keep a namespace without processes alive.
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			for ns := range made {
				if strings.Contains(string(mounts), ns) {
					t.Errorf("namespace %s is mounted", ns)
				}
			}
			if files, err := os.ReadDir(tmp); err != nil || len(files) > 0 {
				t.Errorf("left behind: %v, %v", files, err)
			}
		})
	}
}

func executable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

func script(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "flanneld")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestKernelDaemon(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1})
	h := l.Host(1)
	start := func(text string, args ...string) *lab.Daemon {
		t.Helper()
		d, err := h.StartFlanneld(t.Context(), lab.FlanneldOptions{Path: script(t, text), Args: args, Env: []string{"COLOUR=blue"}})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}

	d := start(`echo "got $* $COLOUR" >&2; trap "echo bye; exit 7" TERM; echo up; while :; do sleep 0.05; done`, "-v=4")
	if err := d.WaitLog(t.Context(), "up"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--etcd-endpoints=http://192.168.77.254:2379", "-v=4 blue", "--healthz-port=8081"} {
		if !strings.Contains(d.Log(), want) {
			t.Errorf("log %q lacks %s", d.Log(), want)
		}
	}
	if code, err := d.Stop(t.Context()); code != 7 || err != nil {
		t.Errorf("exit code %d, %v; want 7", code, err)
	}
	if err := d.WaitLog(t.Context(), "bye"); err != nil {
		t.Error(err)
	}
	if err := d.WaitLog(t.Context(), "never"); err == nil {
		t.Error("WaitLog succeeded for text that an ended daemon never wrote")
	}

	d = start(`echo "no such flag" >&2; exit 1`)
	if err := d.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "exit status 1: no such flag") {
		t.Errorf("got %v, want how the daemon ended and its last line", err)
	}

	d = start("sleep 60")
	d.Kill()
	if code, err := d.Wait(t.Context()); code != -1 || err != nil {
		t.Errorf("killed: %d, %v; want -1", code, err)
	}
}

// TestKernelDaemonBelowRun checks that a host can run a binary below /run although it has
// its own /run.
func TestKernelDaemonBelowRun(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	echo, err := os.ReadFile("/bin/echo")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.Host(2).Path("/run/flanneld"), echo, 0o755); err != nil {
		t.Fatal(err)
	}
	var d *lab.Daemon
	err = l.Host(2).Do(t.Context(), func() (err error) { // only host2 has a file /run/flanneld
		d, err = l.Host(1).StartFlanneld(t.Context(), lab.FlanneldOptions{Path: "/run/flanneld", Args: []string{"hello"}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.WaitLog(t.Context(), "hello"); err != nil {
		t.Error(err)
	}
}
