// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const (
	patience = 10 * time.Second
	endless  = 4 * time.Minute // longer than any step of a test takes on a busy machine
)

// server is a real etcd on loopback.
type server struct {
	dir      string
	url      string
	peer     string       // address for other members, as host:port; an emptied etcd with the same address keeps its cluster id
	tls      embed.Config // only its ClientTLSInfo is used
	election uint         // time without a leader until an election, in ms; zero means 500. The TTL of an etcd lease is at least 1.5 times that
	program  string       // path of an etcd that runs as a process; empty means the etcd that is linked in
	tokenTTL uint         // seconds after which an unused token expires; zero means 300
	bcrypt   uint         // cost of checking a password; zero means the least, 4
	etcd     *embed.Etcd
	process  *process
}

// newServer starts an etcd that ends with the test.
func newServer(tb testing.TB, options ...func(*server)) *server {
	tb.Helper()
	s := &server{dir: filepath.Join(tb.TempDir(), "etcd"), url: "http://" + freeAddr(tb)}
	for _, o := range options {
		o(s)
	}
	s.start(tb)
	tb.Cleanup(s.stop)
	return s
}

func freeAddr(tb testing.TB) string {
	tb.Helper()
	addr, err := subnettest.FreeAddr()
	if err != nil {
		tb.Fatal(err)
	}
	return addr
}

func (s *server) start(tb testing.TB) {
	tb.Helper()
	client, err := url.Parse(s.url)
	if err != nil {
		tb.Fatal(err)
	}
	if s.peer == "" {
		s.peer = freeAddr(tb)
	}
	peer := url.URL{Scheme: "http", Host: s.peer}
	if s.program != "" {
		s.process = startProcess(tb, s)
		return
	}
	cfg := embed.NewConfig()
	cfg.Dir = s.dir
	cfg.UnsafeNoFsync = true
	cfg.TickMs, cfg.ElectionMs = 50, cmp.Or(s.election, 500)
	cfg.BcryptCost, cfg.AuthTokenTTL = cmp.Or(s.bcrypt, 4), cmp.Or(s.tokenTTL, 300)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.ClientTLSInfo = s.tls.ClientTLSInfo
	wait.WhileInUse(tb.Context(), func() bool { // after a stop the address may be in use for a moment
		s.etcd, err = embed.StartEtcd(cfg)
		return errors.Is(err, unix.EADDRINUSE)
	})
	if err != nil {
		tb.Fatal(err)
	}
	select {
	case <-s.etcd.Server.ReadyNotify():
	case <-time.After(patience):
		tb.Fatal("etcd is not ready")
	}
}

func (s *server) stop() {
	if s.etcd != nil {
		s.etcd.Close()
		s.etcd = nil
	}
	if s.process != nil {
		s.process.stop()
		s.process = nil
	}
}

// wipe replaces the etcd by an empty one at the same address.
func (s *server) wipe(tb testing.TB) {
	tb.Helper()
	s.stop()
	if err := os.RemoveAll(s.dir); err != nil {
		tb.Fatal(err)
	}
	s.start(tb)
}

// client returns a new client of the server for the test itself. No manager uses it.
func (s *server) client(tb testing.TB) *clientv3.Client {
	tb.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{s.url}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: grpcbackoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1, MaxDelay: 50 * time.Millisecond},
		})},
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// shared is one etcd for the tests that need no special one.
var shared = sync.OnceValues(func() (*server, error) {
	dir, err := os.MkdirTemp("", "etcd-test-")
	return &server{dir: dir}, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if s, err := shared(); err == nil {
		s.stop()
		os.RemoveAll(s.dir)
	}
	if code == 0 {
		err := goleak.Find()
		for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); {
			err = goleak.Find() // it waits for some time by itself; members of a cluster need longer to end
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

var sharedStart sync.Once

func sharedServer(tb testing.TB) *server {
	tb.Helper()
	s, err := shared()
	if err != nil {
		tb.Fatal(err)
	}
	sharedStart.Do(func() {
		s.url = "http://" + freeAddr(tb)
		s.start(tb)
	})
	return s
}

// fixture is an etcd with a prefix that only one test uses.
type fixture struct {
	*server
	kv     *clientv3.Client
	prefix string
}

func newFixture(tb testing.TB, s *server) *fixture {
	tb.Helper()
	return &fixture{s, s.client(tb), "/test/" + filepath.Base(filepath.Dir(tb.TempDir()))}
}

func (f *fixture) put(tb testing.TB, key, value string, opts ...clientv3.OpOption) int64 {
	tb.Helper()
	resp, err := f.kv.Put(tb.Context(), f.prefix+"/"+key, value, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	return resp.Header.Revision
}

func (f *fixture) delete(tb testing.TB, key string) {
	tb.Helper()
	if _, err := f.kv.Delete(tb.Context(), f.prefix+"/"+key); err != nil {
		tb.Fatal(err)
	}
}

// get returns the value, the id of the etcd lease and the revision of the last write of a key. They
// are zero if there is no such key.
func (f *fixture) get(tb testing.TB, key string) (value string, lease, revision int64) {
	tb.Helper()
	resp, err := f.kv.Get(tb.Context(), f.prefix+"/"+key)
	if err != nil {
		tb.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return "", 0, 0
	}
	return string(resp.Kvs[0].Value), resp.Kvs[0].Lease, resp.Kvs[0].ModRevision
}

// grant creates an etcd lease with a time to live of ttl seconds, and returns the option that gives it
// to a key.
func (f *fixture) grant(tb testing.TB, ttl int64) clientv3.OpOption {
	tb.Helper()
	resp, err := f.kv.Grant(tb.Context(), ttl)
	if err != nil {
		tb.Fatal(err)
	}
	return clientv3.WithLease(resp.ID)
}

// etcdLeases returns the number of etcd leases in the store. A test that expects a number needs a server of
// its own, because etcd leases of earlier tests expire in the shared one.
func (f *fixture) etcdLeases(tb testing.TB) int {
	tb.Helper()
	resp, err := f.kv.Leases(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return len(resp.Leases)
}

// manager returns a manager that is closed at the end of the test. Most of its intervals are short,
// and others are so long that they do not end during a test.
func (f *fixture) manager(tb testing.TB, options ...func(*Config)) *Manager {
	tb.Helper()
	cfg := Config{Endpoints: []string{f.url}, Prefix: f.prefix}
	for _, o := range options {
		o(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	m.timing = timing{
		request: 3 * time.Second, page: 3 * time.Second, slow: time.Hour, login: patience, check: time.Hour, back: time.Hour, quiet: 300 * time.Millisecond, idle: 300 * time.Millisecond, probeAnswer: time.Second,
		backoffMin: 10 * time.Millisecond, backoff: 200 * time.Millisecond, exhausted: time.Hour, audit: time.Hour,
		restoreMin: 10 * time.Millisecond, restored: 100 * time.Millisecond,
	}
	if m.client.login != nil {
		m.client.login.retry = m.backoff()
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	return m
}

// proxy forwards connections from managers to an etcd, and can fail in the ways in which a network
// fails.
type proxy struct {
	addr, target string

	mu         sync.Mutex
	listener   net.Listener
	conns      []net.Conn
	hang       chan struct{}  // nothing is forwarded until this channel is closed; nil: no stall
	last       []byte         // the proxy stalls after data that contains this text; nil: it does not
	rate       int            // bytes per second to all managers together; zero: no limit
	busy       time.Time      // when all bytes so far will have been sent at this rate
	sent       atomic.Int64   // number of bytes to managers
	accepting  sync.WaitGroup // the goroutine that accepts connections and adds them to conns
	forwarding sync.WaitGroup
}

func newProxy(tb testing.TB, s *server) *proxy {
	tb.Helper()
	u, err := url.Parse(s.url)
	if err != nil {
		tb.Fatal(err)
	}
	p := &proxy{addr: freeAddr(tb), target: u.Host}
	p.open(tb)
	tb.Cleanup(p.cut)
	return p
}

func (p *proxy) open(tb testing.TB) {
	tb.Helper()
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		tb.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener = l
	p.accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.serve(c)
		}
	})
}

func (p *proxy) serve(c net.Conn) {
	up, err := net.DialTimeout("tcp", p.target, patience)
	if err != nil {
		c.Close()
		return
	}
	p.mu.Lock()
	p.conns = append(p.conns, c, up)
	p.mu.Unlock()
	for _, d := range [][2]net.Conn{{c, up}, {up, c}} {
		p.forwarding.Go(func() {
			defer d[0].Close()
			defer d[1].Close()
			buf := make([]byte, 32<<10)
			for {
				n, err := d[0].Read(buf)
				p.mu.Lock()
				hang := p.hang
				p.mu.Unlock()
				if hang != nil {
					<-hang
				}
				p.stallAfter(buf[:n])
				if d[1] == c {
					p.sent.Add(int64(n))
					<-time.After(p.delay(n))
				}
				if _, werr := d[1].Write(buf[:n]); werr != nil || err != nil {
					return
				}
			}
		})
	}
}

// delay returns the time until n more bytes have been sent at the rate of the proxy, after all
// bytes before them.
func (p *proxy) delay(n int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rate == 0 {
		return 0
	}
	if now := time.Now(); p.busy.Before(now) {
		p.busy = now
	}
	p.busy = p.busy.Add(time.Duration(n) * time.Second / time.Duration(p.rate))
	return time.Until(p.busy)
}

// stall makes the proxy keep connections open and forward nothing.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hangUp()
}

// hangUp makes the goroutines that forward data wait. The caller has locked mu.
func (p *proxy) hangUp() {
	if p.hang == nil { // otherwise goroutines wait for the present channel
		p.hang = make(chan struct{})
	}
}

// stallAfterText makes the proxy stall as soon as it has forwarded data that contains text.
func (p *proxy) stallAfterText(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = []byte(text)
}

func (p *proxy) stallAfter(data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil && bytes.Contains(data, p.last) {
		p.last = nil
		p.hangUp()
	}
}

// cut closes all connections, makes the proxy refuse new ones, and ends a stall.
func (p *proxy) cut() {
	p.mu.Lock()
	if p.listener != nil {
		p.listener.Close()
		p.listener = nil
	}
	p.mu.Unlock()
	p.accepting.Wait() // otherwise a connection that was just accepted would be missing in conns, and stay open
	p.mu.Lock()
	p.last = nil // nothing causes a stall from here on
	for _, c := range p.conns {
		c.Close()
	}
	if p.hang != nil { // after the connections, so that delayed data is lost
		close(p.hang)
		p.hang = nil
	}
	p.conns = nil
	p.mu.Unlock()
	p.forwarding.Wait()
}

func (p *proxy) url() string { return "http://" + p.addr }

func contextWithCancel(tb testing.TB) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(tb.Context())
	tb.Cleanup(cancel)
	return ctx, cancel
}
