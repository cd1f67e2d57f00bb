package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
)

// client connects when it is first needed: with a user name the library logs
// in while it is made, and nothing may block before that.
type client struct {
	cfg  clientv3.Config
	sem  chan struct{} // guards what follows
	conn *clientv3.Client
	done bool
}

var errClosed = errors.New("manager is closed")

// A connection that is silent for pingAfter is sent a ping, and is dead if that is
// not answered in pingTimeout. A server allows no less than 5 s.
const pingAfter, pingTimeout = 10 * time.Second, 5 * time.Second

// window is how many bytes a server may send ahead: a list of thousands of leases.
const window = 1 << 20

func newClient(cfg Config, timeout time.Duration) (*client, error) {
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
	return &client{sem: make(chan struct{}, 1), cfg: clientv3.Config{
		Endpoints:            cfg.Endpoints,
		TLS:                  tlsConfig,
		Username:             cfg.Username,
		Password:             cfg.Password,
		DialTimeout:          timeout,
		DialKeepAliveTime:    pingAfter,
		DialKeepAliveTimeout: pingTimeout,
		MaxUnaryRetries:      3, // the caller retries; this is for a token that ran out
		Logger:               zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           grpcbackoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
				MinConnectTimeout: timeout,
			}),
			// Otherwise gRPC answers every message with a ping, to find out how
			// large a window it needs: for one small event that is most of the work.
			grpc.WithStaticStreamWindowSize(window),
			grpc.WithStaticConnWindowSize(window),
			// The library waits for a connection and so hides why there is none.
			grpc.WithChainUnaryInterceptor(failFastUnary),
			grpc.WithChainStreamInterceptor(failFastStream),
		},
	}}, nil
}

func failFastUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(false))...)
}

func failFastStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return open(ctx, desc, cc, method, append(opts, grpc.WaitForReady(false))...)
}

// checkEndpoint accepts what the library understands: a URL, or host:port.
func checkEndpoint(endpoint string) error {
	scheme, host, isURL := strings.Cut(endpoint, "://")
	if !isURL {
		scheme, host = "", endpoint
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

// tls returns nil if no file is given. The client certificate is read anew for
// each connection, so that it may be replaced at any time.
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

// get returns the connected client and makes it if there is none.
func (c *client) get(ctx context.Context) (*clientv3.Client, error) {
	select {
	case c.sem <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-c.sem }()
	if c.done {
		return nil, errClosed
	}
	if c.conn != nil {
		return c.conn, nil
	}
	// The library's context lives as long as the client; ctx may only end the making.
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	cfg := c.cfg
	cfg.Context = life
	conn, err := clientv3.New(cfg)
	if err != nil {
		cancel()
		return nil, err
	}
	if !stop() {
		cancel()
		_ = conn.Close() // it was not used
		return nil, ctx.Err()
	}
	c.conn = conn
	return conn, nil
}

// renew has the next get make a new client. Whatever still uses the old one
// fails as if its connection were broken.
func (c *client) renew() {
	c.sem <- struct{}{}
	old := c.conn
	if !c.done {
		c.conn = nil
	}
	done := c.done
	<-c.sem
	if old != nil && !done {
		_ = old.Close() // an error would be about what is given up anyway
	}
}

func (c *client) close() error {
	c.sem <- struct{}{}
	defer func() { <-c.sem }()
	c.done = true
	if c.conn == nil {
		return nil
	}
	if err := c.conn.Close(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("close etcd client: %w", err)
	}
	return nil
}

// callOptions are for calls past the library, whose limit is gRPC's 4 MB.
func callOptions() []grpc.CallOption {
	return []grpc.CallOption{grpc.MaxCallRecvMsgSize(math.MaxInt32)}
}

// keepAlive renews an etcd lease once and returns its TTL. The library's own
// way spins while a server has no leader.
func keepAlive(ctx context.Context, conn *clientv3.Client, id clientv3.LeaseID) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewLeaseClient(conn.ActiveConnection()).LeaseKeepAlive(ctx, callOptions()...)
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
