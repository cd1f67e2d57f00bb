// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// withoutProgress names an etcd that reports progress to an API server only every ten minutes, so
// the server's caches are behind most of the time.
const withoutProgress = "etcd 3.4"

// etcds contains the paths of etcds for API servers, by version: 3.4 is Debian's, and empty means
// the etcd that is linked in.
var etcds = map[string]string{
	withoutProgress: "/usr/bin/etcd", "etcd 3.5": "../../bin/tools/etcd-3.5", "etcd 3.6": "../../bin/tools/etcd-3.6", "newest etcd": "",
}

// TestEveryEtcd runs tests with an API server on each etcd in etcds.
//
//stages:rest it needs older etcds, which take minutes to build
func TestEveryEtcd(t *testing.T) {
	t.Parallel()
	for name, program := range etcds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &server{dir: t.TempDir(), program: program}
			t.Cleanup(s.stop)
			if err := s.start(); err != nil {
				t.Fatal(err)
			}
			for name, test := range map[string]func(*fixture, *testing.T){
				"revision ahead of the cache": (*fixture).testAheadOfCache,
				"restart ahead of the cache":  (*fixture).testRestartAheadOfCache,
				"restored store":              (*fixture).testRestoredStore,
			} {
				t.Run(name, func(t *testing.T) {
					f := newFixture(t, s)
					f.setConfig(t, configV4)
					test(f, t)
				})
			}
		})
	}
}

// ahead brings the store to a revision that the API server's cache of Nodes has not reached, and
// returns that revision. It changes only ConfigMaps.
func (f *fixture) ahead(t *testing.T) int64 {
	t.Helper()
	var made struct {
		Metadata struct{ ResourceVersion string }
	}
	for n := range 3 {
		body := f.do(t, http.MethodPost, "/api/v1/namespaces/default/configmaps", map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"generateName": fmt.Sprintf("ahead%d-", n)},
		})
		if err := json.Unmarshal(body, &made); err != nil {
			t.Fatal(err)
		}
	}
	revision, err := strconv.ParseInt(made.Metadata.ResourceVersion, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

// testAheadOfCache requests a revision that the server's cache has not reached. The answer must
// have that revision and the present Nodes, for each kind of request, because the server refuses
// them in different forms. Only with an etcd that sends no progress does the log say that the cache
// is behind.
func (f *fixture) testAheadOfCache(t *testing.T) {
	f.peer(t, 2)
	m := f.started(t)
	// While this watch runs, the server keeps its cache, so no request makes it fill the cache
	// again.
	subnettest.Watch(t, m).Until(t, "the peer", subnettest.Has("node2"))
	f.deleteNode(t, "node2")
	f.peer(t, 3)
	for name, q := range map[string]query{
		"full": {}, "metadata": {metadata: true}, "one Node": {name: "node3"}, "several Nodes": {hosts: []string{hostOf("node3")}},
	} {
		t.Run(name, func(t *testing.T) {
			logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(1)))
			q.revision = f.ahead(t)
			var names []string
			l, err := m.client.list(klog.NewContext(t.Context(), logger), m.decoder, q, func(n *wire.Node) { names = append(names, string(n.Name)) })
			if err != nil || l.Revision < q.revision {
				t.Fatalf("the list is at %d of %d, %v", l.Revision, q.revision, err)
			}
			if got := strings.Join(names, " "); !strings.Contains(got, "node3") || strings.Contains(got, "node2") {
				t.Errorf("it has %q", got)
			}
			log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
			want := 0
			if f.program == etcds[withoutProgress] {
				want = 1
			}
			if n := strings.Count(log, "cache is behind"); n != want {
				t.Errorf("%d lines say that the cache is behind, want %d:\n%s", n, want, log)
			}
		})
	}
}

// testRestartAheadOfCache restarts a node with a last known state whose revision the API server's
// cache has not reached. A Node that was deleted meanwhile must be gone, and the API must not be
// reported as unusable.
func (f *fixture) testRestartAheadOfCache(t *testing.T) {
	f.peer(t, 2)
	f.peer(t, 3)
	m := f.started(t)
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	before := subnettest.Watch(t, m).Until(t, "peers", subnettest.Has("node2", "node3"))
	f.stopAPI()
	if err := f.startAPI(); err != nil {
		t.Fatal(err)
	}
	f.deleteNode(t, "node2")
	known := subnet.LedgerState{Store: before.Store}
	for _, l := range before.Leases {
		known.Peers = append(known.Peers, subnet.Peer{Lease: *l})
	}
	for what, revision := range map[string]int64{"as it was": before.Store.Revision, "ahead": f.ahead(t)} {
		known.Store.Revision = revision
		m = f.started(t, func(c *Config) {
			c.Known, c.Own = known, own
			c.OnStatus = func(err error) {
				if err != nil {
					t.Errorf("%s: the status is %v", what, err)
				}
			}
		})
		after := subnettest.Watch(t, m).Until(t, what, subnettest.Has("node3"))
		if after.Store.ID != before.Store.ID || after.Store.Revision < revision {
			t.Errorf("%s: the store went from %+v to %+v", what, known.Store, after.Store)
		}
	}
}

// testRestoredStore starts a manager with a last known state of a much higher revision than the
// store has, as after the restore of a backup. The manager must publish the present state with the
// same store id and the lower revision, by which the ledger recognizes the restored store.
func (f *fixture) testRestoredStore(t *testing.T) {
	f.peer(t, 2)
	m := f.started(t)
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	before := subnettest.Watch(t, m).Until(t, "the peer", subnettest.Has("node2"))
	known := subnet.LedgerState{Store: before.Store, Peers: []subnet.Peer{{Lease: *before.Leases[0]}}}
	known.Store.Revision += 1 << 40
	m = f.started(t, func(c *Config) {
		c.Known, c.Own = known, own
		c.OnStatus = func(err error) {
			if err != nil {
				t.Errorf("the status is %v", err)
			}
		}
	})
	w := subnettest.Watch(t, m)
	after := w.Until(t, "the peer", subnettest.Has("node2"))
	if after.Store.Revision >= known.Store.Revision || after.Store.ID != before.Store.ID {
		t.Errorf("the store went from %+v to %+v", known.Store, after.Store)
	}
	f.peer(t, 3)
	w.Until(t, "a peer that has come since", subnettest.Has("node2", "node3"))
}

// slowStore is a proxy before an etcd that can hold back the events of watches.
type slowStore struct {
	*httptest.Server
	mu   sync.Mutex
	open chan struct{} // a channel that is closed while nothing is held back
}

func newSlowStore(t *testing.T, etcd *url.URL) *slowStore {
	t.Helper()
	s := &slowStore{open: make(chan struct{})}
	close(s.open)
	var up, down http.Protocols // up is for gRPC, and down also for requests for etcd's health
	up.SetUnencryptedHTTP2(true)
	down.SetUnencryptedHTTP2(true)
	down.SetHTTP1(true)
	rp := httputil.NewSingleHostReverseProxy(etcd)
	rp.Transport, rp.FlushInterval = &http.Transport{Protocols: &up}, -1
	rp.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path == "/etcdserverpb.Watch/Watch" {
			r.Body = &heldBack{r.Body, s}
		}
		return nil
	}
	rp.ErrorLog = log.New(io.Discard, "", 0)
	rp.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) }
	s.Server = httptest.NewUnstartedServer(rp)
	s.Config.Protocols = &down
	s.Start()
	t.Cleanup(func() {
		s.freeze(false)
		s.CloseClientConnections()
		rp.Transport.(*http.Transport).CloseIdleConnections()
		s.Close()
	})
	return s
}

// freeze makes the proxy hold back the events of watches if on is true. Otherwise it sends all that
// were held back.
func (s *slowStore) freeze(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.open:
		if on {
			s.open = make(chan struct{})
		}
	default:
		if !on {
			close(s.open)
		}
	}
}

// heldBack is the body of a watch. Its Read does not return while the slowStore is frozen.
type heldBack struct {
	io.ReadCloser
	of *slowStore
}

func (h *heldBack) Read(b []byte) (int, error) {
	n, err := h.ReadCloser.Read(b)
	h.of.mu.Lock()
	open := h.of.open
	h.of.mu.Unlock()
	<-open
	return n, err
}

// balancer forwards TCP connections to one of several API servers.
type balancer struct {
	net.Listener
	to    atomic.Pointer[string]
	mu    sync.Mutex
	conns map[net.Conn]bool
}

func newBalancer(t *testing.T) *balancer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &balancer{Listener: l, conns: map[net.Conn]bool{}}
	var accepting, forwarding sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b.keep(conn) // before forward chooses the destination, so that use ends all connections to another server
			forwarding.Go(func() { b.forward(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		accepting.Wait()
		b.cut()
		forwarding.Wait()
	})
	return b
}

func (b *balancer) forward(from net.Conn) {
	defer from.Close()
	to, err := net.Dial("tcp", *b.to.Load())
	if err != nil {
		return
	}
	go func() { // this goroutine ends with the connection from
		_, _ = io.Copy(to, from)
		to.Close()
	}()
	_, _ = io.Copy(from, to)
}

func (b *balancer) keep(conn net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns[conn] = true
}

// cut ends all connections.
func (b *balancer) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		c.Close()
	}
	clear(b.conns)
}

// use sends new connections to an API server, and ends the present connections.
func (b *balancer) use(s *server) {
	addr := strings.TrimPrefix(s.url, "https://")
	b.to.Store(&addr)
	b.cut()
}

// TestAPIServersBehindABalancer starts two API servers on one etcd. A is up to date. B gets no
// events from etcd for a time, and is started again later. A manager that is moved between them
// must always find the present Nodes, and must not take the store for another one.
//
//stages:rest it starts several API servers
func TestAPIServersBehindABalancer(t *testing.T) {
	t.Parallel()
	a := &server{dir: t.TempDir()}
	t.Cleanup(a.stop)
	if err := a.start(); err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, a)
	f.setConfig(t, configV4)
	slow := newSlowStore(t, &a.etcdURL)
	to, err := url.Parse(slow.URL)
	if err != nil {
		t.Fatal(err)
	}
	b := &server{dir: t.TempDir(), etcdURL: *to}
	t.Cleanup(b.stopAPI)
	if err := b.startAPI(); err != nil {
		t.Fatal(err)
	}
	lb := newBalancer(t)
	lb.use(a)

	f.peer(t, 2)
	f.peer(t, 3)
	statuses := make(chan error, 1000)
	m := f.started(t, func(c *Config) {
		c.Kubeconfig = f.kubeconfig(t, "https://"+lb.Addr().String(), flannel)
		c.OnStatus = func(err error) { statuses <- err }
	})
	m.timing.silence, m.timing.late = 500*time.Millisecond, 500*time.Millisecond
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	keep(t, m, own)
	w := subnettest.Watch(t, m)
	first := w.Until(t, "peers", subnettest.Has("node2", "node3"))
	same := func(what string, have ...string) {
		t.Helper()
		var s subnet.Snapshot
		// A real server that is behind delays each request by 3 s, and several have to follow each other.
		waittest.Eventually(t, 3*patience, what, func() error {
			all := w.All()
			if s = all[len(all)-1]; !subnettest.Has(have...)(s) {
				return fmt.Errorf("the last of %d snapshots is %+v", len(all), s)
			}
			return nil
		})
		if s.Store.ID != first.Store.ID || s.Store.Revision < first.Store.Revision {
			t.Errorf("%s: the store went from %+v to %+v", what, first.Store, s.Store)
		}
		first = s
	}
	heartbeat := func(n int) {
		f.note(t, "node1", map[string]any{"heartbeat": fmt.Sprint(n)})
	}

	slow.freeze(true)
	lb.use(b)
	// The connections to A are closed, so only B can send the next changes.
	f.deleteNode(t, "node2")
	f.peer(t, 4)
	heartbeat(1)
	same("through a server that gets no events", "node3", "node4")
	expectStatus(t, statuses, "behind")
	lb.use(a)
	f.peer(t, 5)
	same("through the other one", "node3", "node4", "node5")
	expectStatus(t, statuses, "nil")

	// B starts again, and its cache is empty when the next request comes.
	b.stopAPI()
	slow.freeze(false)
	lb.use(b)
	f.deleteNode(t, "node3")
	if err := b.startAPI(); err != nil {
		t.Fatal(err)
	}
	same("through a server that has just started", "node4", "node5")
	heartbeat(2)
	f.peer(t, 6)
	same("through it", "node4", "node5", "node6")
	for range 5 {
		lb.use(a)
		lb.use(b)
	}
	f.peer(t, 7)
	same("in the end", "node4", "node5", "node6", "node7")
}

// TestTooLargeIsRecognised expects that tooLarge recognizes the answer in each of its forms.
// Servers before 1.18.6 name no cause, and all servers answer a request for metadata in JSON.
func TestTooLargeIsRecognised(t *testing.T) {
	status := func(message string, causes ...metav1.CauseType) []byte {
		s := &metav1.Status{Message: message, Reason: metav1.StatusReasonTimeout, Code: http.StatusGatewayTimeout, Details: &metav1.StatusDetails{}}
		for _, c := range causes {
			s.Details.Causes = append(s.Details.Causes, metav1.StatusCause{Type: c})
		}
		return wiretest.Object(t, s)
	}
	for name, tt := range map[string]struct {
		body []byte
		want bool
	}{
		"protobuf":             {status("Timeout: x", "ResourceVersionTooLarge"), true},
		"protobuf, no cause":   {status("Timeout: Too large resource version: 148, current: 125"), true},
		"protobuf, another":    {status("Timeout: x", "Other"), false},
		"JSON":                 {[]byte(`{"reason":"Timeout","message":"x","details":{"causes":[{"reason":"ResourceVersionTooLarge"}]},"code":504}`), true},
		"JSON, no cause":       {[]byte(`{"reason":"Timeout","message":"Timeout: Too large resource version: 148, current: 125","code":504}`), true},
		"JSON, another":        {[]byte(`{"reason":"Timeout","message":"x","details":{"causes":[{"reason":"Other"}]},"code":504}`), false},
		"a proxy on the way":   {[]byte("<html>504 Gateway Time-out</html>"), false},
		"nothing":              {nil, false},
		"JSON, no such detail": {[]byte(`{"message":"x","details":null,"code":504}`), false},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusGatewayTimeout)
				_, _ = w.Write(tt.body)
			}))
			defer s.Close()
			base, err := url.Parse(s.URL)
			if err != nil {
				t.Fatal(err)
			}
			c := &client{random: randomTime, base: base, http: s.Client()}
			_, err = c.do(t.Context(), request{})
			e, ok := errors.AsType[*apiError](err)
			if !ok || e.code != 504 || apiErrorOf(err).tooLarge != tt.want || e.retryAfter != time.Second {
				t.Errorf("got %+v, want a resource version that is too large: %v", err, tt.want)
			}
		})
	}
}
