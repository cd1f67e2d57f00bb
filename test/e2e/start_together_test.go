// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/lab"
)

// startLimit is the longest time from the start of the daemons to the readiness of all of them.
const startLimit = 2 * time.Second

// debianEtcd is Debian's etcd 3.4.23. It answers the probes of a watch before it has sent all events.
const debianEtcd = "/usr/bin/etcd"

// TestAloneHostsStartTogether kills all daemons, deletes everything that they have in etcd, puts
// another configuration, and starts all daemons at once, several times. Each host then has last known
// leases that are gone, and watches while the others write theirs. All must be ready within startLimit.
func TestAloneHostsStartTogether(t *testing.T) {
	startTogether(t, 3, debianEtcd, false)
}

// TestAloneHostsStartTogetherOnEveryEtcd is TestAloneHostsStartTogether on each release of etcd, also
// behind etcd's grpc-proxy, and in more rounds unless -short is set.
//
//stages:rest TestAloneHostsStartTogether starts hosts on Debian's etcd
func TestAloneHostsStartTogetherOnEveryEtcd(t *testing.T) {
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	for name, program := range map[string]string{
		"3.4":     debianEtcd,
		"3.5":     built("tools/etcd-3.5"),
		"3.6":     built("tools/etcd-3.6"),
		"present": "", // the store of the lab
	} {
		t.Run(name, func(t *testing.T) { startTogether(t, rounds, program, false) })
		t.Run(name+" behind grpc-proxy", func(t *testing.T) { startTogether(t, rounds, program, true) })
	}
}

// startTogether runs rounds of TestAloneHostsStartTogether on an etcd of program, or on the lab's own
// if program is empty. If proxied is set, daemons reach it through Debian's grpc-proxy.
func startTogether(t *testing.T, rounds int, program string, proxied bool) {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	router := l.RouterAddr(v4[0])
	url := l.Etcd().Endpoints()[0]
	if program != "" {
		url = startProgram(t, l, netip.AddrPortFrom(router, 2479), func(url string) []string {
			return []string{program, "--data-dir", t.TempDir(), "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:0"}
		})
	}
	store := clientOf(t, l, url)
	if proxied {
		behind := url
		url = startProgram(t, l, netip.AddrPortFrom(router, 2579), func(url string) []string {
			return []string{debianEtcd, "grpc-proxy", "start", "--endpoints", behind, "--listen-addr", url[len("http://"):], "--advertise-client-url", url[len("http://"):], "--data-dir", t.TempDir()}
		})
	}

	options := lab.FlanneldOptions{Args: []string{"--etcd-endpoints=" + url}}
	for round := range rounds + 1 { // in the first one there is no last known state
		for _, h := range l.Hosts() {
			if d := h.Daemon(); d != nil {
				d.Kill()
			}
		}
		if _, err := store.Delete(testContext(t), lab.Prefix, clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
		putKey(t, store, lab.Prefix+"/config", `{"Network":"10.5.0.0/16","Backend":`+backendConfig([]string{"vxlan", "host-gw"}[round%2])+`}`)

		began := time.Now()
		for _, h := range l.Hosts() {
			start(t, h, options)
		}
		for _, h := range l.Hosts() {
			expectReady(t, h.Daemon())
		}
		took := time.Since(began).Round(time.Millisecond)
		t.Logf("round %d: all hosts are ready after %s", round, took)
		if took > startLimit {
			t.Errorf("round %d: the hosts were ready after %s, want %s", round, took, startLimit)
		}
		for _, h := range l.Hosts() {
			for _, other := range except(l.Hosts(), h) {
				key := statusOf(t, other).Lease.Key
				eventually(t, "the state file of "+h.Name()+" has "+key, func() error { return stateHas(h, key) })
			}
		}
	}
}

// stateHas returns nil if the state file of the host's daemon contains the key of a lease.
func stateHas(h *lab.Host, key string) error {
	text, err := readState(h)
	if err != nil {
		return err
	}
	quoted, err := json.Marshal(key)
	if err == nil && !strings.Contains(text, string(quoted)) {
		err = fmt.Errorf("no %s in %s", quoted, text)
	}
	return err
}

// startProgram starts a program that serves at an address of the router, and waits until it accepts
// connections. command returns the command for its URL, which startProgram also returns.
func startProgram(t *testing.T, l *lab.Lab, at netip.AddrPort, command func(url string) []string) (url string) {
	t.Helper()
	url = "http://" + at.String()
	args := command(url)
	path, err := filepath.Abs(args[0])
	if err != nil {
		t.Fatal(err)
	}
	var output bytes.Buffer
	cmd := exec.Command(path, args[1:]...)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := l.Underlay().Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // the error says that a signal has ended the program
		if t.Failed() {
			t.Logf("output of %s:\n%s", path, output.String())
		}
	})
	eventually(t, path+" accepts connections", func() error {
		conn, err := l.Underlay().Dial(testContext(t), "tcp", at.String())
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	return url
}

// clientOf returns a client of the etcd with that URL in the router's namespace.
func clientOf(t *testing.T, l *lab.Lab, url string) *clientv3.Client {
	t.Helper()
	c, err := l.Etcd().Client(context.WithoutCancel(t.Context()), func(c *clientv3.Config) { c.Endpoints = []string{url} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
