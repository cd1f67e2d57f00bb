// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// etcdReleases returns the programs of the etcds that hosts may use, by release: Debian's, those of
// test/components, and "" for the etcd that is linked into the tests.
func etcdReleases(tb testing.TB) map[string]string {
	tb.Helper()
	programs := map[string]string{"3.4": "/usr/bin/etcd", "present": ""}
	for _, release := range []string{"3.5", "3.6"} {
		program, err := filepath.Abs("../../bin/tools/etcd-" + release)
		if err != nil {
			tb.Fatal(err)
		}
		programs[release] = program
	}
	return programs
}

// process is an etcd that runs as a process.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{}
}

func startProcess(tb testing.TB, s *server) *process {
	tb.Helper()
	election := cmp.Or(s.election, 500)
	var output bytes.Buffer
	p := &process{exited: make(chan struct{}), cmd: exec.Command(s.program,
		"--data-dir", s.dir, "--log-level", "error",
		"--listen-client-urls", s.url, "--advertise-client-urls", s.url,
		"--listen-peer-urls", "http://"+s.peer, "--initial-advertise-peer-urls", "http://"+s.peer,
		"--initial-cluster", "default=http://"+s.peer,
		"--heartbeat-interval", "50", "--election-timeout", fmt.Sprint(election),
		"--auth-token-ttl", fmt.Sprint(cmp.Or(s.tokenTTL, 300)), "--bcrypt-cost", fmt.Sprint(cmp.Or(s.bcrypt, 4)))}
	p.cmd.Stdout, p.cmd.Stderr = &output, &output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // the error says that a signal has ended the process
	}()
	waittest.Until(tb, patience, s.program+" to be ready", func() bool {
		select {
		case <-p.exited:
			tb.Fatalf("%s has ended: %s", s.program, output.String())
		default:
		}
		return healthy(tb, s.url)
	})
	return p
}

// healthy reports whether the member at url has a leader and answers. The request needs no login.
func healthy(tb testing.TB, url string) bool {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/health", http.NoBody)
	if err != nil {
		tb.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// stop kills the process, so etcd loses everything that it keeps only in memory, such as tokens.
func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}
