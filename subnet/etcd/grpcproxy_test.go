// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// startGRPCProxy starts the grpc-proxy of program, an etcd release, in front of s. It returns a
// copy of s with the URL of the proxy, so that managers of the copy use the proxy. The proxy ends
// with the test.
func startGRPCProxy(t *testing.T, s *server, program string) *server {
	t.Helper()
	addr := freeAddr(t)
	var output bytes.Buffer
	cmd := exec.Command(program, "grpc-proxy", "start", "--endpoints", s.url, "--listen-addr", addr, "--advertise-client-url", addr, "--data-dir", t.TempDir())
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // the error says that a signal has ended the proxy
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
	waittest.Until(t, patience, "the grpc-proxy to accept connections", func() bool {
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
//
//stages:rest it needs older etcds, which take minutes to build
func TestSuiteByGRPCProxy(t *testing.T) {
	s := sharedServer(t)
	for release, program := range etcdReleases(t) {
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

// TestWatchByGRPCProxy starts hosts that watch through a proxy, which merges their watches. The
// hosts must list as often as there are hosts, and each must see each change, although the proxy
// omits the cluster's id in the responses that it creates itself.
//
//stages:rest it needs older etcds, which take minutes to build
func TestWatchByGRPCProxy(t *testing.T) {
	const hosts = 5
	s := sharedServer(t)
	for release, program := range etcdReleases(t) {
		if program == "" {
			continue
		}
		t.Run(release, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", configV4)
			f.server = startGRPCProxy(t, s, program)
			var lists atomic.Int64
			var watchers []*subnettest.Watcher
			for range hosts {
				m := f.manager(t)
				m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(
					func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						if r, ok := req.(*pb.RangeRequest); ok && len(r.RangeEnd) > 0 {
							lists.Add(1)
						}
						return invoke(ctx, method, req, reply, cc, opts...)
					}))
				w := subnettest.Watch(t, m)
				w.Until(t, "nobody", subnettest.Has())
				watchers = append(watchers, w)
			}
			for i, key := range []string{"10.5.1.0-24", "10.5.2.0-24", "10.5.3.0-24"} {
				f.put(t, "subnets/"+key, leaseValue(fmt.Sprintf("192.0.2.%d", i+1)))
				for host, w := range watchers {
					w.Until(t, fmt.Sprintf("lease %s at host %d", key, host), func(s subnet.Snapshot) bool {
						return slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Key == key })
					})
				}
			}
			if n := lists.Load(); n != hosts {
				t.Errorf("%d hosts have listed the leases %d times, want once each", hosts, n)
			}
		})
	}
}

// TestNoAnswerToProbes checks awaitRevision when others have written to the store and no answer to
// a probe was received. The stream must count as behind only after timing.quiet, when the next
// notification is due. The test receives nothing from the stream, so it does not depend on what the
// proxy sends.
func TestNoAnswerToProbes(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.server = startGRPCProxy(t, f.server, etcdReleases(t)["3.4"])
	m := f.manager(t)
	m.timing.probeAnswer = time.Millisecond
	for _, quiet := range []time.Duration{time.Hour, 10 * time.Millisecond} {
		m.timing.quiet = quiet
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		conn, _, err := m.client.get(ctx)
		if err != nil {
			t.Fatal(err)
		}
		s, err := open(ctx, conn, []string{m.configKey()}, 2)
		if err != nil {
			t.Fatal(err)
		}
		revision := f.put(t, "other", "not flannel's")
		s.probe()
		err = m.awaitRevision(ctx, s, revision)
		cancel()
		if behind := errors.Is(err, errBehind); behind != (quiet < time.Second) {
			t.Errorf("without an answer to probes, with a notification every %s: %v", quiet, err)
		}
	}
}
