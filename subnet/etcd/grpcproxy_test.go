// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
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

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
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

// TestWatchByGRPCProxy starts hosts that watch through a proxy, which merges their watches. Each
// host must list the leases only once and see each change, although the proxy omits the cluster's
// id in the responses that it creates itself.
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

// TestAnswersToProbes probes a stream to etcd, and one through the grpc-proxy. Only etcd must count as a
// server that answers probes: see awaitRevision. An answer comes before the events of a watch that
// was requested after the probe, so the test knows when there is none.
func TestAnswersToProbes(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	for name, tc := range map[string]struct {
		server  *server
		answers bool
	}{
		"etcd":       {f.server, true},
		"grpc-proxy": {startGRPCProxy(t, f.server, etcdReleases(t)["3.4"]), false},
	} {
		t.Run(name, func(t *testing.T) {
			through := *f
			through.server = tc.server
			m := through.manager(t)
			m.timing.quiet = endless // the test alone probes
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			conn, _, err := m.client.get(ctx)
			if err != nil {
				t.Fatal(err)
			}
			s, err := open(ctx, conn, []string{m.configKey()}, f.put(t, "config", configV4))
			if err != nil {
				t.Fatal(err)
			}
			created, events := make(chan struct{}, 2), make(chan struct{}, 2)
			watchdog := time.AfterFunc(endless, cancel)
			defer watchdog.Stop()
			received := make(chan error, 1)
			go func() {
				received <- m.receive(s, watchdog, watcher{on: func(resp *pb.WatchResponse, _ int64) error {
					if resp.Created {
						created <- struct{}{}
					}
					for range resp.Events {
						events <- struct{}{}
					}
					return nil
				}})
			}()
			waittest.Receive(t, patience, "the first watch", created)
			waittest.Receive(t, patience, "the event of the configuration", events) // from now on etcd does not drop probes
			s.probe()
			if err := s.send(watchRequest(f.prefix+"/other", f.put(t, "other", ""))); err != nil {
				t.Fatal(err)
			}
			waittest.Receive(t, patience, "the second watch", created)
			waittest.Receive(t, patience, "the event of the other key", events)
			if answers := s.answers.Load(); answers != tc.answers {
				t.Errorf("the server counts as one that answers probes: %v, want %v", answers, tc.answers)
			}
			cancel()
			waittest.Receive(t, patience, "the end of the stream", received)
		})
	}
}
