package etcd

import (
	"bytes"
	"net"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"flanneld/subnet/subnettest"
)

// startGRPCProxy starts the grpc-proxy of an etcd release in front of s, and returns s
// as managers reach it through the proxy.
func startGRPCProxy(t *testing.T, s *server, program string) *server {
	t.Helper()
	addr := freeAddr(t)
	var output bytes.Buffer
	cmd := exec.Command(program, "grpc-proxy", "start", "--endpoints", s.url, "--listen-addr", addr, "--data-dir", t.TempDir())
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // it is ended by a signal
	}()
	t.Cleanup(func() {
		select {
		case <-exited:
			t.Errorf("%s grpc-proxy has ended: %s", program, output.String())
		default:
		}
		_ = cmd.Process.Kill()
		<-exited
	})
	eventually(t, "the grpc-proxy to accept connections", func() bool {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	proxied := *s
	proxied.url = "http://" + addr
	return &proxied
}

// TestSuiteByGRPCProxy runs the suite with managers that reach etcd through its grpc-proxy.
func TestSuiteByGRPCProxy(t *testing.T) {
	s := sharedServer(t)
	for release, program := range releases(t) {
		if program == "" {
			continue
		}
		t.Run(release, func(t *testing.T) {
			proxied := startGRPCProxy(t, s, program)
			subnettest.Run(t, func(t *testing.T) subnettest.Backing {
				f := newFixture(t, s)
				f.server = proxied
				return backing{f}
			})
		})
	}
}
