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

	"flanneld/subnet"
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

// TestWatchByGRPCProxy has hosts watch through a proxy, which merges their watches, while
// others write to the store. Hosts see each change and no outage, though a proxy does not
// answer probes and leaves the cluster's id out of what it says by itself.
func TestWatchByGRPCProxy(t *testing.T) {
	const hosts = 5
	s := sharedServer(t)
	for release, program := range releases(t) {
		if program == "" {
			continue
		}
		t.Run(release, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", configV4)
			f.server = startGRPCProxy(t, s, program)
			var status statuses
			var checks, lists atomic.Int64
			var watchers []*subnettest.Watcher
			for range hosts {
				m := f.manager(t, status.option)
				m.timing.check, m.timing.grace, m.timing.quiet = 50*time.Millisecond, 50*time.Millisecond, patience
				m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(
					func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						if r, ok := req.(*pb.RangeRequest); ok && len(r.RangeEnd) > 0 {
							lists.Add(1)
						} else if ok && r.CountOnly {
							checks.Add(1)
						}
						return invoke(ctx, method, req, reply, cc, opts...)
					}))
				w := subnettest.Watch(t, m)
				w.Until(t, "nobody", subnettest.Has())
				watchers = append(watchers, w)
			}
			for i, key := range []string{"10.5.1.0-24", "10.5.2.0-24", "10.5.3.0-24"} {
				f.put(t, "subnets/"+key, value(fmt.Sprintf("192.0.2.%d", i+1)))
				for host, w := range watchers {
					w.Until(t, fmt.Sprintf("lease %s at host %d", key, host), func(s subnet.Snapshot) bool {
						return slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Key == key })
					})
				}
				before := checks.Load()
				f.put(t, "other", "not flannel's")
				eventually(t, "checks of the watches", func() bool { return checks.Load() >= before+hosts })
			}
			if n := lists.Load(); n != hosts {
				t.Errorf("%d hosts have listed the leases %d times, want once each", hosts, n)
			}
			for _, err := range status.list() {
				if err != nil {
					t.Errorf("outage: %v", err)
				}
			}
		})
	}
}
