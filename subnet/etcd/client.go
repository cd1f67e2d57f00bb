// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// client owns the connection to etcd. It chooses the endpoint to connect to and the token of
// requests, and decides when to replace them. It connects with the first request.
type client struct {
	cfg    clientv3.Config
	tls    func() (*tls.Config, error) // reads the files
	timing *timing
	login  *login // nil without a user name or password

	ctx context.Context //nolint:containedctx // close ends it, and so connections and a login in progress
	end context.CancelFunc

	hosts atomic.Int64 // number of leases that were read last, as the number of hosts in the network; see turn

	preferred string // the endpoint that this host uses while its member works

	mu        sync.Mutex
	endpoints []string  // in the order in which the next connection tries them
	back      time.Time // when to try the preferred endpoint again; zero if that endpoint is the first of endpoints
	conn      *connection
}

// connection leads to one member: the first one in the order of endpoints that accepts it.
type connection struct {
	*clientv3.Client
	answered atomic.Int64 // when a request was answered last, in nanoseconds since 1970; zero: never
}

// window is the number of bytes that a server may send before the client has read them. It is large
// enough for a page of a list of leases.
const window = 1 << 20

func newClient(cfg Config, t *timing) (*client, error) {
	for i, e := range cfg.Endpoints {
		if err := checkEndpoint(e); err != nil {
			return nil, fmt.Errorf("etcd endpoint %d: %w", i+1, err)
		}
	}
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("no etcd endpoint is given")
	}

	tlsConfig, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	c := &client{tls: cfg.tls, timing: t, endpoints: oneScheme(cfg.Endpoints)}

	// The random order spreads the hosts over the members.
	rand.Shuffle(len(c.endpoints), func(i, j int) { c.endpoints[i], c.endpoints[j] = c.endpoints[j], c.endpoints[i] })
	c.preferred = c.endpoints[0]
	c.ctx, c.end = context.WithCancel(context.Background())
	c.cfg = clientv3.Config{
		Context:              c.ctx,
		TLS:                  tlsConfig,
		DialKeepAliveTime:    pingAfter,
		DialKeepAliveTimeout: pingTimeout,
		MaxUnaryRetries:      1, // the caller retries
		Logger:               zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           grpcbackoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
				MinConnectTimeout: t.request,
			}),
			// A fixed window. With a variable one gRPC would answer every message with a ping, to
			// find out how large the window has to be. For one small event the ping would be most
			// of the work.
			grpc.WithStaticStreamWindowSize(window),
			grpc.WithStaticConnWindowSize(window),
			// For calls that are not made by the functions of the library. Otherwise gRPC would refuse
			// answers of more than 4 MB.
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
			// Without these interceptors the library would wait for a connection, and so hide the
			// reason why there is none.
			grpc.WithChainUnaryInterceptor(failFastUnary),
			grpc.WithChainStreamInterceptor(failFastStream),
			// The library's policy is round robin. It sends requests in turn to all members
			// that accept connections, also to one that is cut off from the others. gRPC's own
			// policy uses one member, and does not wait long for one that does not answer.
			grpc.WithDisableServiceConfig(),
		},
	}

	// The library does not get the user name, because it would log in for every stream, and would
	// send the refused token with the request for a new one. See login.
	if cfg.Username != "" && cfg.Password != "" {
		c.login = &login{
			name: cfg.Username, password: cfg.Password, authenticate: c.authenticate, turn: c.turn,
			retry: &wait.Backoff{Least: 2 * time.Second, Most: 4 * time.Minute, Share: 0.5},
		}
		c.cfg.DialOptions = append(c.cfg.DialOptions, grpc.WithPerRPCCredentials(c.login))
	}
	return c, nil
}

func failFastUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(false))...)
}

func failFastStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return open(ctx, desc, cc, method, append(opts, grpc.WaitForReady(false))...)
}

// checkEndpoint returns an error unless endpoint has a form that the library understands: a URL, or
// host:port.
func checkEndpoint(endpoint string) error {
	scheme, host, isURL := strings.Cut(endpoint, "://")
	if !isURL {
		scheme = ""
		host = endpoint
	}

	switch scheme {
	case "", "http", "https", "unix", "unixs":
	default:
		return fmt.Errorf("%q has scheme %q, want http or https", endpoint, scheme)
	}
	if _, err := url.Parse("http://" + host); err != nil || host == "" || strings.ContainsAny(endpoint, " \t\n") {
		return fmt.Errorf("%q is not a URL such as http://127.0.0.1:2379", endpoint)
	}
	return nil
}

// oneScheme returns the endpoints with the scheme of the first one, because that scheme decides
// whether TLS is used. If the first one has no scheme or is a unix socket, oneScheme removes the
// scheme of the others. Unix sockets keep their scheme.
func oneScheme(endpoints []string) []string {
	scheme, _, isURL := strings.Cut(endpoints[0], "://")
	same := slices.Clone(endpoints)
	for i, e := range same {
		if other, host, ok := strings.Cut(e, "://"); !ok || !strings.HasPrefix(other, "unix") {
			same[i] = cmp.Or(host, e)
			if isURL && !strings.HasPrefix(scheme, "unix") {
				same[i] = scheme + "://" + same[i]
			}
		}
	}
	return same
}

// tls returns the TLS configuration, or nil if no file is given. The client certificate is read
// again for each handshake.
func (c Config) tls() (*tls.Config, error) {
	if c.CertFile == "" && c.KeyFile == "" && c.CAFile == "" {
		return nil, nil //nolint:nilnil // no TLS configuration is a valid one
	}

	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return nil, errors.New("etcd TLS: a client certificate needs both the certificate file and the key file")
	}
	if c.CertFile != "" {
		load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("load client certificate %s with key %s: %w", c.CertFile, c.KeyFile, err)
			}
			return &cert, nil
		}
		if _, err := load(nil); err != nil {
			return nil, fmt.Errorf("etcd TLS: %w", err)
		}
		cfg.GetClientCertificate = load
	}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("etcd TLS: read CA file: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("etcd TLS: CA file %s holds no certificate in PEM form", c.CAFile)
		}
	}
	return cfg, nil
}

// commonName returns the name in the client certificate. It is the user of etcd if there is no user
// name.
func (c Config) commonName() (string, error) {
	cert, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return "", err
	}
	return cert.Leaf.Subject.CommonName, nil
}

// connect returns the connection, and makes it if there is none. It does not block: gRPC connects
// with the first request. It returns errClosed after close.
func (c *client) connect() (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return nil, errClosed
	}
	if c.conn == nil {
		made, err := c.dial(slices.Clone(c.endpoints))
		if err != nil {
			return nil, err
		}
		c.conn = &connection{Client: made}
	}
	return c.conn, nil
}

// dial returns a new connection. It reads the CA file again, which may have been replaced together with the
// certificate of the server. If the file cannot be read now, the content that it had at the start is used.
func (c *client) dial(endpoints []string) (*clientv3.Client, error) {
	cfg := c.cfg
	cfg.Endpoints = endpoints
	if now, err := c.tls(); err == nil {
		cfg.TLS = now
	}
	return clientv3.New(cfg)
}

// turn waits for a random time that grows with the number of hosts. It precedes requests that
// all hosts make at the same event, because the server needs some time for each of them.
func (c *client) turn(ctx context.Context) error {
	return wait.For(ctx, rand.N(time.Duration(c.hosts.Load())*c.timing.spread+1))
}

// observe records the result of a request on conn that began at the time made. It closes conn if
// err shows that the member does not work. The next connection then tries another endpoint first.
// If ctx, the context of the caller, has ended, observe ignores the result, because the end of ctx
// may be the cause of err.
func (c *client) observe(ctx context.Context, conn *connection, made time.Time, err error) {
	switch code := codeOf(err); {
	case ctx.Err() != nil:
	case isAnswer(code):
		conn.answered.Store(time.Now().UnixNano())
	case code == codes.DeadlineExceeded && conn.answered.Load() > made.UnixNano():
		// The request is slow, such as a full list on a slow link, but the member has answered
		// another one in the meantime. A new connection would not help.
	default:
		c.fail(conn)
	}
}

// isAnswer reports whether code, the gRPC code of a result, shows that the member works.
func isAnswer(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Internal, codes.DataLoss, codes.Unknown:
		return false
	default:
		return true
	}
}

// fail closes conn and moves the first endpoint to the end, if conn is still in use. conn leads to
// the first endpoint, or to a later one if the first one did not accept the connection.
func (c *client) fail(conn *connection) {
	c.mu.Lock()
	inUse := c.conn == conn
	if inUse {
		c.conn = nil
		c.endpoints = append(c.endpoints[1:], c.endpoints[0])
		c.back = time.Time{}
		if c.endpoints[0] != c.preferred {
			c.back = c.nextTry()
		}
	}

	c.mu.Unlock()
	if inUse {
		_ = conn.Close() // its errors do not matter any more
	}
}

// nextTry returns when to try the preferred endpoint again. The time varies, because all hosts that
// use a member leave it at the same moment.
func (c *client) nextTry() time.Time { return time.Now().Add(wait.Vary(c.timing.back, 0.5)) }

// comeBack replaces the connection by one to the preferred endpoint, if this host left that endpoint
// long enough ago and its member answers a read of key again. Without comeBack all hosts would stay with the
// members that were never restarted. Requests on the old connection fail as if it had broken.
func (c *client) comeBack(ctx context.Context, key string) {
	c.mu.Lock()
	due := c.ctx.Err() == nil && !c.back.IsZero() && time.Now().After(c.back)
	if due {
		c.back = c.nextTry()
	}

	c.mu.Unlock()
	if !due || !c.works(ctx, c.preferred, key) {
		return
	}

	c.mu.Lock()
	i := slices.Index(c.endpoints, c.preferred)
	c.endpoints = slices.Concat(c.endpoints[i:], c.endpoints[:i])
	c.back = time.Time{}
	c.mu.Unlock()
	c.renew()
}

// works reports whether the member at endpoint answers a read of key within timing.request, over a
// connection made for that.
func (c *client) works(ctx context.Context, endpoint, key string) bool {
	conn, err := c.dial([]string{endpoint})
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), c.timing.request)
	defer cancel()
	_, err = conn.Get(ctx, key, clientv3.WithCountOnly())
	return isAnswer(codeOf(err))
}

// get returns the connection, and the token that its requests will have. token is empty if etcd
// does not require a login. If there is no valid token, get first waits for a login, but no longer
// than timing.request: see login.get for the errors.
func (c *client) get(ctx context.Context) (conn *connection, token string, err error) {
	if c.login != nil {
		ctx, cancel := context.WithTimeout(ctx, c.timing.request)
		defer cancel()
		if token, err = c.login.get(ctx, c.ctx); err != nil {
			return nil, "", err
		}
	}
	conn, err = c.connect()
	return conn, token, err
}

// authenticate logs in and returns the token. The token is empty if etcd does not require one.
func (c *client) authenticate() (token string, err error) {
	conn, err := c.connect()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(c.ctx), c.timing.login)
	defer cancel()
	made := time.Now()
	resp, err := conn.Authenticate(ctx, c.login.name, c.login.password)
	c.observe(c.ctx, conn, made, err)

	switch {
	case errors.Is(err, rpctypes.ErrAuthNotEnabled):
		return "", nil
	case err != nil:
		return "", err
	}
	return resp.Token, nil
}

// do makes one request. If etcd refuses the token, do logs in and tries the request once more: etcd
// forgets a token when it is restarted, or when the token was not used for some minutes. deadline
// is the time for each try. A login before a try has timing.request in addition. If the login is
// still in progress after that time, do returns errLoggingIn or the error of an earlier login: see
// login.get.
func (c *client) do(ctx context.Context, deadline time.Duration, request func(context.Context, *clientv3.Client) error) error {
	token, err := c.try(ctx, deadline, request)
	if c.login == nil || !c.login.observe(token, err) {
		return err
	}
	token, err = c.try(ctx, deadline, request)
	c.login.observe(token, err)
	return err
}

func (c *client) try(ctx context.Context, deadline time.Duration, request func(context.Context, *clientv3.Client) error) (token string, err error) {
	conn, token, err := c.get(ctx)
	if err != nil {
		return token, err
	}
	// With this option a member without a leader returns an error at once.
	inner, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), deadline)
	defer cancel()
	made := time.Now()
	err = request(inner, conn.Client)
	c.observe(ctx, conn, made, err)
	return token, err
}

// renew makes the next request use a new connection. Requests on the old one fail as if
// it had broken.
func (c *client) renew() {
	c.mu.Lock()
	old := c.conn
	c.conn = nil
	c.mu.Unlock()
	if old != nil {
		_ = old.Close() // its errors do not matter any more
	}
}

func (c *client) close() {
	c.end()
	c.renew()
}

// keepAlive renews an etcd lease once and returns its TTL. It returns rpctypes.ErrLeaseNotFound if the
// lease does not exist. The library's own function would use all of a CPU while a server has no leader.
func keepAlive(ctx context.Context, conn *clientv3.Client, id clientv3.LeaseID) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewLeaseClient(conn.ActiveConnection()).LeaseKeepAlive(ctx)
	if err != nil {
		return 0, rpctypes.Error(err)
	}
	if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(id)}); err != nil {
		return 0, rpctypes.Error(err)
	}
	resp, err := stream.Recv()
	switch {
	case err != nil:
		return 0, rpctypes.Error(err)
	case resp.TTL <= 0:
		return 0, rpctypes.ErrLeaseNotFound
	}
	return time.Duration(resp.TTL) * time.Second, nil
}
