// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// EtcdOptions configures the store.
type EtcdOptions struct {
	Disabled bool // if set, the lab has no store

	// TLS makes the store use TLS. With TLS, ClientCerts makes it also require client
	// certificates. The lab configures its own clients and daemons accordingly.
	TLS, ClientCerts bool

	// Program is the path of the binary that runs the store; empty means this binary. It is etcd, or its main
	// calls RunChild first, like that of flannel-lab. A test that is built with the race detector names a binary
	// that is not, because the race detector multiplies the CPU time of the store.
	Program string

	Env []string // variables of the store's process, as NAME=value
}

// Etcd is a store with a single member. It is a separate process in the router's
// namespace.
type Etcd struct {
	server
	Program string // as EtcdOptions.Program; the next Start runs it
	n       *Namespace
	addrs   []netip.Addr
	files   TLSFiles    // zero without TLS
	tls     *tls.Config // of the lab's own clients; nil without TLS
	env     []string

	login          sync.Mutex // protects user and password
	user, password string
}

// Paths in the router's namespace.
const (
	etcdDir = "/var/lib/etcd"
	tlsDir  = "/run/etcd-tls"
)

func newEtcd(n *Namespace, addrs []netip.Addr, opt EtcdOptions) (*Etcd, error) {
	e := &Etcd{Program: opt.Program, n: n, addrs: addrs, env: opt.Env}
	var err error
	if e.Program == "" {
		if e.Program, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("find the binary that runs etcd: %w", err)
		}
	}

	if opt.TLS {
		e.files, e.tls, err = writeTLSFiles(n.Path(tlsDir), "etcd", addrs, opt.ClientCerts)
	}
	return e, err
}

// TLSFiles returns the paths of the files that a client needs. They are empty without TLS.
func (e *Etcd) TLSFiles() TLSFiles { return e.files }

// Login makes the clients of the store log in. It does not change those of daemons.
func (e *Etcd) Login(user, password string) {
	e.login.Lock()
	defer e.login.Unlock()
	e.user = user
	e.password = password
}

// Start starts the store with its existing data, and waits until it answers. It must not
// be running.
func (e *Etcd) Start(ctx context.Context) error {
	spec := processSpec{name: etcdChild, path: e.Program, args: e.args(), env: childEnv(e.env)}
	transport := &http.Transport{DialContext: e.n.Dial, DisableKeepAlives: true, TLSClientConfig: e.tls.Clone()}

	// A store without space is not healthy, but it answers this request.
	return e.start(ctx, e.n, spec, transport, e.Endpoints()[0]+"/version", 10*time.Millisecond)
}

func (e *Etcd) args() []string {
	urls := strings.Join(e.Endpoints(), ",")
	args := []string{
		"--data-dir=" + etcdDir, "--listen-client-urls=" + urls, "--advertise-client-urls=" + urls,
		"--listen-peer-urls=http://127.0.0.1:2380", "--log-level=error", "--unsafe-no-fsync",
		// A single member waits for no other member, so a short election timeout makes it start
		// quickly. It also allows leases with a short TTL, because etcd derives the shortest
		// TTL from it. A shorter heartbeat would make an idle etcd use more CPU time.
		"--heartbeat-interval=100", "--election-timeout=500",
		"--bcrypt-cost=4", // the minimum, so that a login takes less than a second even with the race detector
	}
	if e.files.CA != "" {
		args = append(args, "--cert-file="+e.files.serverCert, "--key-file="+e.files.serverKey)
	}
	if e.files.ClientCert != "" {
		args = append(args, "--client-cert-auth", "--trusted-ca-file="+e.files.CA)
	}
	return args
}

// Endpoints returns the URLs of the store, one for each address of the router on the underlay.
func (e *Etcd) Endpoints() []string {
	urls := make([]string, len(e.addrs))
	for i, a := range e.addrs {
		urls[i] = e.url(a)
	}
	return urls
}

func (e *Etcd) url(a netip.Addr) string {
	scheme := "http://"
	if e.files.CA != "" {
		scheme = "https://"
	}
	return scheme + netip.AddrPortFrom(a, 2379).String()
}

// Client returns a client of the store. The client may be used outside of the lab's
// namespaces, because it connects from inside the router's. Each change may modify its
// configuration. The caller closes the client.
func (e *Etcd) Client(ctx context.Context, change ...func(*clientv3.Config)) (*clientv3.Client, error) {
	cfg := clientv3.Config{
		Endpoints: e.Endpoints(),
		Context:   context.WithoutCancel(ctx),
		Logger:    zap.NewNop(),
		TLS:       e.tls.Clone(),
		DialOptions: []grpc.DialOption{
			grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				return e.n.Dial(ctx, "tcp", addr)
			}),
		},
	}

	e.login.Lock()
	cfg.Username = e.user
	cfg.Password = e.password
	e.login.Unlock()

	for _, f := range change {
		f(&cfg)
	}

	c, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("make etcd client: %w", err)
	}
	return c, nil
}

// Restart kills the store and starts it again on the same data.
func (e *Etcd) Restart(ctx context.Context) error {
	e.Kill()
	return e.Start(ctx)
}

// Wipe kills the store, deletes its data and starts it again. The result is a different
// store at the same address.
func (e *Etcd) Wipe(ctx context.Context) error {
	e.Kill()
	if err := os.RemoveAll(e.Dir()); err != nil {
		return fmt.Errorf("wipe etcd: %w", err)
	}
	return e.Start(ctx)
}

// Dir returns the path of the store's data outside the lab.
func (e *Etcd) Dir() string { return e.n.Path(etcdDir) }
