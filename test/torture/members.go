// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

const (
	clientPort, peerPort = 2379, 2380
	etcdDir              = "/var/lib/etcd"
	// quota is the size in bytes above which the store refuses writes.
	quota = 16 << 20
	// rootPassword is the password of the store's administrator.
	rootPassword = "torture-root"
)

// member is one member of the store, on a host of its own. Its clients must present a
// certificate and log in.
type member struct {
	host    *lab.Host
	name    string
	cluster string // value of --initial-cluster
	files   [2]string
	ca      string

	mu      sync.Mutex
	program string
	cmd     *exec.Cmd     // nil while it is down
	exited  chan struct{} // closed when cmd has ended
	output  *os.File
}

// store is an etcd cluster of several members.
type store struct {
	authority *lab.Authority
	members   []*member
	clientTLS [2]string // paths of the certificate and the key of flanneld
	user      string
	password  string
}

func newStore(dir, program string, hosts []*lab.Host) (*store, error) {
	authority, err := lab.NewAuthority(dir)
	if err != nil {
		return nil, err
	}
	s := &store{authority: authority, user: "flannel", password: "first"}
	var cluster []string
	for i, h := range hosts {
		m := &member{host: h, name: fmt.Sprintf("m%d", i+1), program: program, ca: authority.CA()}
		cluster = append(cluster, fmt.Sprintf("%s=%s", m.name, m.url(peerPort)))
		s.members = append(s.members, m)
	}
	for _, m := range s.members {
		m.cluster = strings.Join(cluster, ",")
		if m.output, err = os.Create(filepath.Join(dir, m.name+".log")); err != nil {
			return nil, err
		}
	}
	return s, s.issue()
}

// issue makes new certificates for all members and for flanneld. They replace the files
// of the former ones.
func (s *store) issue() error {
	var err error
	for _, m := range s.members {
		addrs := []netip.Addr{m.addr(), netip.AddrFrom4([4]byte{127, 0, 0, 1})}
		if m.files[0], m.files[1], err = s.authority.Issue(m.name, addrs); err != nil {
			return err
		}
	}
	s.clientTLS[0], s.clientTLS[1], err = s.authority.Issue("flanneld", nil)
	return err
}

func (m *member) addr() netip.Addr { return m.host.Addr(prefix.IPv4) }

func (m *member) url(port uint16) string {
	return "https://" + netip.AddrPortFrom(m.addr(), port).String()
}

// start starts the member with its data, unless it runs. It does not wait until the
// member answers, because it answers only if a majority of the members runs.
func (m *member) start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cmd != nil {
		return nil
	}
	cmd := exec.Command(m.program,
		"--name", m.name, "--data-dir", etcdDir, "--log-level", "warn",
		"--listen-client-urls", m.url(clientPort), "--advertise-client-urls", m.url(clientPort),
		"--listen-peer-urls", m.url(peerPort), "--initial-advertise-peer-urls", m.url(peerPort),
		"--initial-cluster", m.cluster, "--initial-cluster-state", "new",
		"--cert-file", m.files[0], "--key-file", m.files[1], "--trusted-ca-file", m.ca, "--client-cert-auth",
		"--peer-cert-file", m.files[0], "--peer-key-file", m.files[1], "--peer-trusted-ca-file", m.ca, "--peer-client-cert-auth",
		"--heartbeat-interval", "100", "--election-timeout", "1000",
		"--quota-backend-bytes", fmt.Sprint(quota), "--bcrypt-cost", "4")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stdout, cmd.Stderr = m.output, m.output
	if err := m.host.Start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", m.name, err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // a signal ends it, so the result does not matter
	}()
	m.cmd, m.exited = cmd, exited
	return nil
}

// kill ends the member with SIGKILL, as a crash would, and waits for its end.
func (m *member) kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cmd == nil {
		return
	}
	_ = m.cmd.Process.Kill()
	<-m.exited
	m.cmd = nil
}

// signal sends sig to the member if it runs.
func (m *member) signal(sig syscall.Signal) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cmd == nil {
		return nil
	}
	return m.cmd.Process.Signal(sig)
}

// upgrade kills the member and starts it again with another program.
func (m *member) upgrade(program string) error {
	m.kill()
	m.mu.Lock()
	m.program = program
	m.mu.Unlock()
	return m.start()
}

// client returns a client that is logged in as administrator and uses only the given
// members. It connects from the host of the first of them, because no fault separates
// that host from its member.
func (s *store) client(ctx context.Context, members ...*member) (*clientv3.Client, error) {
	cfg, err := s.clientConfig(ctx, members)
	if err != nil {
		return nil, err
	}
	cfg.Username, cfg.Password = "root", rootPassword
	return clientv3.New(cfg)
}

func (s *store) clientConfig(ctx context.Context, members []*member) (clientv3.Config, error) {
	pair, err := tls.LoadX509KeyPair(s.clientTLS[0], s.clientTLS[1])
	if err != nil {
		return clientv3.Config{}, err
	}
	ca, err := os.ReadFile(s.authority.CA())
	if err != nil {
		return clientv3.Config{}, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	cfg := clientv3.Config{
		Context: ctx,
		Logger:  zap.NewNop(),
		TLS:     &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return members[0].host.Dial(ctx, "tcp", addr)
		})},
		DialTimeout: 5 * time.Second,
	}
	for _, m := range members {
		cfg.Endpoints = append(cfg.Endpoints, m.url(clientPort))
	}
	return cfg, nil
}

// begin starts all members and waits until the store answers. It stores the network
// configuration, creates the users, and switches authentication on.
func (s *store) begin(ctx context.Context, network string) error {
	for _, m := range s.members {
		if err := m.start(); err != nil {
			return err
		}
	}
	cfg, err := s.clientConfig(ctx, s.members)
	if err != nil {
		return err
	}
	cfg.DialTimeout = 0 // no limit, because the members need some time until they answer
	c, err := clientv3.New(cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := until(ctx, "the store to answer", func(ctx context.Context) error {
		_, err := c.Put(ctx, lab.Prefix+"/config", network)
		return err
	}); err != nil {
		return err
	}
	const role = "flannel"
	end := clientv3.GetPrefixRangeEnd(lab.Prefix)
	steps := []func() error{
		func() error { _, err := c.UserAdd(ctx, "root", rootPassword); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.RoleAdd(ctx, role); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, role, lab.Prefix, end, clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := c.UserAdd(ctx, s.user, s.password); return err },
		func() error { _, err := c.UserGrantRole(ctx, s.user, role); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up users of the store: %w", err)
		}
	}
	return nil
}

// flags returns the arguments and the environment variables with which flanneld connects
// to the store.
func (s *store) flags() (args, env []string) {
	var urls []string
	for _, m := range s.members {
		urls = append(urls, m.url(clientPort))
	}
	return []string{
		"--etcd-endpoints=" + strings.Join(urls, ","), "--etcd-cafile=" + s.authority.CA(),
		"--etcd-certfile=" + s.clientTLS[0], "--etcd-keyfile=" + s.clientTLS[1], "--etcd-username=" + s.user,
	}, []string{"FLANNELD_ETCD_PASSWORD=" + s.password}
}

// close ends all members.
func (s *store) close() {
	for _, m := range s.members {
		m.kill()
		m.output.Close()
	}
}

// attempt limits the time of one attempt of until.
const attempt = 15 * time.Second

// until repeats f until it succeeds or ctx ends. Each attempt gets a context that ends
// after the time attempt.
func until(ctx context.Context, what string, f func(context.Context) error) error {
	var last error
	for {
		try, cancel := context.WithTimeout(ctx, attempt)
		err := f(try)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for %s: %w: %w", what, context.Cause(ctx), cmp.Or(last, err))
		}
		last = err
		_ = wait.For(ctx, 200*time.Millisecond)
	}
}
