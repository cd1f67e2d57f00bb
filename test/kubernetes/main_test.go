// SPDX-License-Identifier: Apache-2.0

// Package kubernetes tests the DaemonSet in clusters of real kubelets, with Kubernetes'
// conformance tests of the network (sig-network).
//
// A node is a host of the lab with further namespaces for processes, mounts, host name,
// IPC and cgroups (node.sh). It runs containerd, runc, kubelet and kube-proxy. The store,
// the API server, the controllers and the scheduler run on the lab's router. The router
// reaches pods by routes that forwarded packets do not use. All images are built from
// programs of this machine and imported, so the tests download nothing.
//
// The machine must provide root, network and mount namespaces, and:
//
//   - cgroups of version 1 or 2 in which new groups can be created. The nodes set
//     failCgroupV1: false, because kubelet refuses version 1 otherwise.
//   - overlayfs on tmpfs, which contains the nodes' disks: about 500 MB of memory each.
//   - br_netfilter with net.bridge.bridge-nf-call-iptables.
//   - nftables, and the iptables matches recent, statistic and physdev, for kube-proxy.
//
// CAP_SYS_RESOURCE is not necessary, because containerd has restrict_oom_score_adj. The
// machine's sysctls do not change: they are read-only in a node, and those that kubelet
// checks are replaced by files with the expected values. Only the first network namespace
// has a writable net.netfilter.nf_conntrack_max, so kube-proxy does not set it.
//
// All processes of a run die with it, and with them namespaces and mounts. Cgroups and files
// are in folders with the number of its process (leftover_test.go). A run removes them at its
// end, even if it is interrupted or the go command is killed. If the run itself is killed,
// the next one removes them.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/test/lab"
)

// patience limits every wait except the one for conformance tests.
const patience = 8 * time.Minute

func TestMain(m *testing.M) {
	lab.RunChild()
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make namespaces: run them as root")
		os.Exit(1)
	}
	os.Exit(run(m))
}

// run runs the tests and removes everything that they leave, also if the run is interrupted.
// It returns the exit code.
func run(m *testing.M) int {
	if err := sweep(); err != nil {
		fmt.Fprintln(os.Stderr, "remove the rest of earlier runs:", err)
		return 1
	}
	tmp := filesOf(os.Getpid())
	err := errors.Join(os.MkdirAll(tmp, 0o700), os.Setenv("TMPDIR", tmp))
	if err == nil {
		// Otherwise the tests would continue after the go command is killed.
		err = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	end := sync.OnceFunc(func() {
		if err := errors.Join(clusters.closeAll(), os.RemoveAll(tmp)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		_ = os.Remove(filepath.Dir(tmp)) // fails while other runs use it
	})
	// Otherwise the process would end at once when it writes output that the go command does
	// not read any more.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-interrupted
		end()
		os.Exit(1)
	}()
	defer end()
	return m.Run()
}

// tool returns the path of a program, or of a folder of programs, in bin/tools. The test
// fails if it is missing.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../../bin/tools", name))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("a component is missing (make components components-nodes): %v", err)
	}
	return path
}

// background returns a context that ends with the test, and after patience at the latest.
func background(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually calls try until it returns nil, and fails the test if patience is over before.
// The context of try ends then too.
func eventually(t *testing.T, what string, try func(context.Context) error) {
	t.Helper()
	ctx := background(t)
	waittest.Eventually(t, patience, what, func() error { return try(ctx) })
}
