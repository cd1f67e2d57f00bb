// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestRunEndsWithoutAStore starts the daemon without a store, waits until it has logged
// that, and stops it. Run must then end soon, without an error. The test needs no network
// namespace, because the daemon does not change the kernel before the store answers.
func TestRunEndsWithoutAStore(t *testing.T) {
	defer goleak.VerifyNone(t)
	addr, err := subnettest.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	host, port, _ := net.SplitHostPort(addr)
	opts, err := options.Parse([]string{
		"--etcd-endpoints=http://127.0.0.1:1", "--healthz-ip=" + host, "--healthz-port=" + port,
		"--state-dir=" + t.TempDir(), "--subnet-file=" + filepath.Join(t.TempDir(), "subnet.env"),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- Run(ctx, Config{Options: opts, Backends: builtin.New}) }()
	deadline := time.After(10 * time.Second)
	for !strings.Contains(log(), "etcd is not usable") {
		select {
		case err := <-done:
			t.Fatalf("Run ended: %v", err)
		case <-deadline:
			t.Fatalf("the log does not mention the store:\n%s", log())
		case <-time.After(10 * time.Millisecond):
		}
	}
	resp, err := http.Get("http://" + addr + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	idle, err := net.Dial("tcp", addr) // a connection without a request
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %s, want 503", resp.Status)
	}
	start := time.Now()
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("stopping took %s", took)
	}
	if strings.Contains(log(), "not everything has ended") {
		t.Errorf("the daemon has not ended in time:\n%s", log())
	}
}

// TestRunWithoutItsPort calls Run twice while another program uses the health port, as a
// program that embeds the daemon may do. Neither run may leave anything behind.
func TestRunWithoutItsPort(t *testing.T) {
	defer goleak.VerifyNone(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	opts, err := options.Parse([]string{
		"--healthz-ip=127.0.0.1", "--healthz-port=" + strconv.Itoa(taken.Addr().(*net.TCPAddr).Port),
		"--state-dir=" + t.TempDir(), "--subnet-file=" + filepath.Join(t.TempDir(), "subnet.env"),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	for range 2 {
		if err := Run(klog.NewContext(t.Context(), logger), Config{Options: opts, Backends: builtin.New}); err == nil || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("Run: %v, want the error of the port", err)
		}
	}
	if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Contains(log, "status socket") {
		t.Errorf("the first run has kept the status socket:\n%s", log)
	}
}

// TestRunWithoutItsFiles starts the daemon with files that it cannot use. Run must return an
// error.
func TestRunWithoutItsFiles(t *testing.T) {
	defer goleak.VerifyNone(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"a CA file for etcd":     {"--etcd-cafile=" + file},
		"a kubeconfig":           {"--kube-subnet-mgr", "--net-config-path=" + file, "--kubeconfig-file=" + file},
		"a directory for states": {"--state-dir=/dev/null/nowhere", "--etcd-cafile=" + file},
	} {
		opts, err := options.Parse(append([]string{
			"--state-dir=" + t.TempDir(), "--subnet-file=" + filepath.Join(t.TempDir(), "subnet.env"),
		}, args...), nil)
		if err != nil {
			t.Fatal(err)
		}
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		if err := Run(klog.NewContext(t.Context(), logger), Config{Options: opts, Backends: builtin.New}); err == nil {
			t.Errorf("%s: the daemon ends without an error", name)
		}
	}
}
