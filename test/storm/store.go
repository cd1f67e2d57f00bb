// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// server is a store under test: one process in the namespace of the lab's router.
// The process is etcd, or a Kubernetes API server without the etcd that stores its
// data. The proxy in front of etcd is another process.
type server interface {
	pid() int
	restart(ctx context.Context) error
	// calls returns how many requests the process has received since its start, by
	// kind. An API server counts only requests for Nodes.
	calls(ctx context.Context) (figures.Counts, error)
	// writeAndRead writes and reads something that is not flannel's, as other users of the store do.
	writeAndRead(ctx context.Context) error
	// bystanderCalls returns the kinds under which calls counts the requests of
	// writeAndRead, if it counts them.
	bystanderCalls() []string
	// reach returns how hosts reach the store.
	reach() Store
	close()
}

// usage is what a process has used so far.
type usage struct {
	cpu  time.Duration
	peak float64 // largest memory in bytes since the process started, or since figures.ResetPeak
}

func usageOf(pid int) (usage, error) {
	cpu, err := figures.ProcessCPU(pid)
	if err != nil {
		return usage{}, err
	}
	m, err := figures.ProcessMemory(pid)
	return usage{cpu, m.Peak}, err
}

// etcdServer is an etcd of one member. program is the path of its binary.
type etcdServer struct {
	lab     *lab.Lab
	program string
	client  *clientv3.Client
	http    *http.Client
	url     string
	etcd    *process
	proxy   *process // the grpc-proxy through which hosts reach etcd; nil if they reach it directly
}

const etcdPort, proxyPort = 2379, 23790

// startEtcd starts an etcd and writes the network configuration. If proxied is true,
// it also starts the grpc-proxy of the same program.
func startEtcd(ctx context.Context, l *lab.Lab, program string, proxied bool) (s *etcdServer, err error) {
	s = &etcdServer{lab: l, url: routerURL(l, etcdPort)}
	if s.program, err = filepath.Abs(program); err != nil {
		return nil, err
	}
	s.http = &http.Client{Transport: &http.Transport{DialContext: l.Underlay().Dial, DisableKeepAlives: true}, Timeout: 20 * time.Second}
	s.client, err = clientv3.New(clientv3.Config{
		Endpoints: []string{s.url}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) {
			return l.Underlay().Dial(ctx, "tcp", a)
		})},
	})
	if err != nil {
		return nil, err
	}
	if err := s.start(ctx); err != nil {
		s.close()
		return nil, err
	}
	if proxied {
		addr := strings.TrimPrefix(routerURL(l, proxyPort), "http://")
		s.proxy, err = startProcess(ctx, l, s.program, func() error { return s.healthy(ctx, routerURL(l, proxyPort)) },
			"grpc-proxy", "start", "--data-dir", "/var/lib/proxy", "--endpoints", s.url, "--listen-addr", addr, "--advertise-client-url", addr)
	}
	if err == nil {
		_, err = s.client.Put(ctx, lab.Prefix+"/config", networkConfig)
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("prepare etcd: %w", err)
	}
	return s, nil
}

func routerURL(l *lab.Lab, port int) string {
	return fmt.Sprintf("http://%s:%d", l.RouterAddr(prefix.IPv4), port)
}

func (s *etcdServer) start(ctx context.Context) (err error) {
	s.etcd, err = startProcess(ctx, s.lab, s.program, func() error { return s.healthy(ctx, s.url) },
		"--data-dir", "/var/lib/etcd", "--log-level", "error", "--quota-backend-bytes", strconv.Itoa(8<<30),
		"--listen-client-urls", s.url, "--advertise-client-urls", s.url)
	return err
}

// process is a program in the router's namespace.
type process struct {
	cmd    *exec.Cmd
	output bytes.Buffer
	exited chan struct{}
}

// startProcess starts a program and waits until ready returns nil. It returns an
// error if the program or ctx ends first.
func startProcess(ctx context.Context, l *lab.Lab, program string, ready func() error, args ...string) (*process, error) {
	p := &process{exited: make(chan struct{})}
	p.cmd = &exec.Cmd{Path: program, Args: append([]string{program}, args...), Stdout: &p.output, Stderr: &p.output}
	if err := l.Underlay().Start(p.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // it is ended by a signal
	}()

	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready()
		if err == nil {
			return p, nil
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return nil, fmt.Errorf("%s has ended: %s", program, p.output.String())
		case <-ctx.Done():
			p.stop()
			return nil, fmt.Errorf("wait for %s: %w: %w", program, context.Cause(ctx), err)
		}
	}
}

func (p *process) stop() {
	if p != nil {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.exited
	}
}

// healthy returns nil if the etcd or the proxy at url reports that it is healthy.
func (s *etcdServer) healthy(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/health", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

func (s *etcdServer) pid() int { return s.etcd.cmd.Process.Pid }

func (s *etcdServer) restart(ctx context.Context) error {
	s.etcd.stop()
	return s.start(ctx)
}

func (s *etcdServer) close() {
	s.proxy.stop()
	s.etcd.stop()
	_ = s.client.Close()
}

func (s *etcdServer) reach() Store {
	url := s.url
	if s.proxy != nil {
		url = routerURL(s.lab, proxyPort)
	}
	return Store{Etcd: []string{url}, Prefix: lab.Prefix}
}

func (s *etcdServer) writeAndRead(ctx context.Context) error {
	if _, err := s.client.Put(ctx, "/bystander", time.Now().String()); err != nil {
		return err
	}
	_, err := s.client.Get(ctx, "/bystander")
	return err
}

func (*etcdServer) bystanderCalls() []string { return []string{"Put", "Range"} }

// calls counts messages instead of gRPC calls, because one stream carries many
// requests.
func (s *etcdServer) calls(ctx context.Context) (figures.Counts, error) {
	return figures.EtcdMessages(ctx, s.http, s.url)
}
