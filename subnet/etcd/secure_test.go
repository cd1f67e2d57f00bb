// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// authority issues certificates and writes them to files in dir.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(tb testing.TB) *authority {
	tb.Helper()
	a := &authority{dir: tb.TempDir()}
	a.cert, a.key = a.issue(tb, "ca", nil)
	return a
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// issue creates a key and a certificate with that common name, signed by the authority, and writes
// the files name.pem and name.key. parent is the certificate of the authority, or nil to create
// that certificate itself.
func (a *authority) issue(tb testing.TB, name string, parent *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: parent == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	signer := a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		tb.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	for suffix, block := range map[string]*pem.Block{".pem": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: raw}} {
		if err := os.WriteFile(a.file(name+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return cert, key
}

func (a *authority) serve(clientCerts bool) func(*server) {
	return func(s *server) {
		s.url = strings.Replace(s.url, "http:", "https:", 1)
		s.tls.ClientTLSInfo = transport.TLSInfo{CertFile: a.file("server.pem"), KeyFile: a.file("server.key")}
		if clientCerts {
			s.tls.ClientTLSInfo.ClientCertAuth, s.tls.ClientTLSInfo.TrustedCAFile = true, a.file("ca.pem")
		}
	}
}

func TestTLS(t *testing.T) {
	a, stranger := newAuthority(t), newAuthority(t)
	a.issue(t, "server", a.cert)
	a.issue(t, "client", a.cert)
	stranger.issue(t, "client", stranger.cert)
	caAlone := func(c *Config) { c.CAFile = a.file("ca.pem") }
	withCert := func(c *Config) {
		c.CAFile, c.CertFile, c.KeyFile = a.file("ca.pem"), a.file("client.pem"), a.file("client.key")
	}
	for _, tc := range []struct {
		name        string
		clientCerts bool
		option      func(*Config)
		want        string // part of the error; empty: no error
	}{
		{"CA alone", false, caAlone, ""},
		{"client certificate", true, withCert, ""},
		{"no scheme but a CA file", false, func(c *Config) {
			caAlone(c)
			c.Endpoints = []string{strings.TrimPrefix(c.Endpoints[0], "https://")}
		}, ""},
		{"wrong CA", false, func(c *Config) { c.CAFile = stranger.file("ca.pem") }, "certificate signed by unknown authority"},
		{"no CA", false, func(*Config) {}, "certificate signed by unknown authority"},
		{"certificate missing", true, caAlone, "certificate required"},
		{"plain text", false, func(c *Config) { c.Endpoints = []string{strings.Replace(c.Endpoints[0], "https", "http", 1)} }, "does the server expect TLS"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newServer(t, a.serve(tc.clientCerts))
			var status statuses
			m := (&fixture{server: s, prefix: "/x"}).manager(t, tc.option, status.option)
			if tc.want == "" {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				if _, err := m.Config(ctx); !errors.Is(err, subnet.ErrNoConfig) {
					t.Errorf("error is %v, want ErrNoConfig", err)
				}
				w := subnettest.Watch(t, m)
				w.Until(t, "no peer", subnettest.Has())
				return
			}
			expectReported(t, m, &status, tc.want)
		})
	}
}

// TestReplacedCA replaces the CA file of a running manager.
func TestReplacedCA(t *testing.T) {
	t.Parallel()
	a, stranger := newAuthority(t), newAuthority(t)
	a.issue(t, "server", a.cert)
	s := newServer(t, a.serve(false))
	var status statuses
	m := (&fixture{server: s, prefix: "/x"}).manager(t, func(c *Config) { c.CAFile = stranger.file("ca.pem") }, status.option)
	done := make(chan error)
	go func() {
		_, err := m.Config(t.Context())
		done <- err
	}()
	unknown := func(err error) bool { return err != nil && strings.Contains(err.Error(), "unknown authority") }
	waittest.Until(t, patience, "the server is refused", func() bool { return slices.ContainsFunc(status.list(), unknown) })

	if err := os.Rename(a.file("ca.pem"), stranger.file("ca.pem")); err != nil {
		t.Fatal(err)
	}
	if err := waittest.Receive(t, patience, "the configuration", done); !errors.Is(err, subnet.ErrNoConfig) {
		t.Errorf("error is %v, want ErrNoConfig", err)
	}
}

// expectReported expects that OnStatus gets an error that contains want within 8 s, in one line
// that names the endpoint.
func expectReported(t *testing.T, m *Manager, status *statuses, want string) {
	t.Helper()
	done := make(chan error)
	ctx, cancel := contextWithCancel(t)
	go func() {
		_, err := m.Config(ctx)
		done <- err
	}()
	// OnStatus may report the broken connection before it reports the reason.
	start := time.Now()
	var text string
	waittest.Until(t, patience, "an error with "+want, func() bool {
		for _, err := range status.list() {
			if err != nil && strings.Contains(err.Error(), want) {
				text = err.Error()
			}
		}
		return text != ""
	})
	if d := time.Since(start); d > 8*time.Second {
		t.Errorf("it took %s", d)
	}
	cancel()
	waittest.Receive(t, patience, "the end of Config", done)
	if !strings.Contains(text, "127.0.0.1:") || strings.ContainsAny(text, "\n\\") || len(text) > 300 {
		t.Errorf("the error is %q, want one line with the endpoint", text)
	}
}

// TestDialCause checks that a server that says nothing is not taken for one that expects TLS.
func TestDialCause(t *testing.T) {
	const prefix = `rpc error: code = Unavailable desc = connection error: desc = "error reading server preface: `
	for text, want := range map[string]string{
		`http2: frame too large"`: "error reading server preface: http2: frame too large (does the server expect TLS, or a client certificate?)",
		`raw-read tcp 192.0.2.1:4242->192.0.2.2:2379: use of closed network connection"`: "the server accepts the connection and says nothing",
	} {
		if got := dialCause(prefix + text); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	var status statuses
	f := &fixture{server: &server{url: "http://" + freeAddr(t)}, prefix: "/x"}
	expectReported(t, f.manager(t, status.option), &status, "connect: connection refused")
	var silent statuses
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f = &fixture{server: &server{url: "http://" + l.Addr().String()}, prefix: "/x"}
	expectReported(t, f.manager(t, silent.option), &silent, "no answer within 3s")
}

func TestPassword(t *testing.T) {
	s := newServer(t)
	f := newFixture(t, s)
	f.put(t, "config", configV4)
	enableAuth(t, f)
	login := func(name, password string) func(*Config) {
		return func(c *Config) { c.Username, c.Password = name, password }
	}
	m := f.manager(t, login("flannel", "secret"))
	l := acquire(t, m, claim("192.0.2.1"))
	keep := startKeep(t, m, l)
	other := acquire(t, f.manager(t, login("flannel", "secret")), claim("192.0.2.2"))
	subnettest.Watch(t, m).Until(t, "the peer", subnettest.Has(other.Key))
	if again := acquire(t, f.manager(t, login("flannel", "secret")), claim("192.0.2.2")); again.Key != other.Key {
		t.Errorf("after a restart got %s, want %s", again.Key, other.Key)
	}
	keep.stillRuns(t)

	for _, tc := range []struct{ name, user, password, want string }{
		{"wrong password", "flannel", "guess", "authentication failed, invalid user ID or password"},
		{"no user", "", "", "user name is empty"},
		{"no permission", "nobody", "secret", "permission denied"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var status statuses
			m := f.manager(t, login(tc.user, tc.password), status.option)
			expectReported(t, m, &status, tc.want)
			for _, err := range status.list() {
				if err != nil && strings.Contains(err.Error(), "guess") {
					t.Errorf("the reported error has the password: %v", err)
				}
			}
		})
	}
	t.Run("password becomes right", func(t *testing.T) {
		m := f.manager(t, login("late", "secret"))
		done := make(chan error)
		go func() {
			_, err := m.Config(t.Context())
			done <- err
		}()
		root := f.root(t)
		if _, err := root.UserAdd(t.Context(), "late", "secret"); err != nil {
			t.Fatal(err)
		}
		if _, err := root.UserGrantRole(t.Context(), "late", "flannel"); err != nil {
			t.Fatal(err)
		}
		if err := waittest.Receive(t, endless, "a login with the right password", done); err != nil {
			t.Error(err)
		}
	})
}

// TestCertificateIsTheLogin runs an etcd that uses the common name of the client certificate as the
// user, so that hosts need no password and no login.
func TestCertificateIsTheLogin(t *testing.T) {
	a := newAuthority(t)
	for _, name := range []string{"server", "root", "flannel"} {
		a.issue(t, name, a.cert)
	}
	s := newServer(t, a.serve(true))
	cert := func(name string) func(*Config) {
		return func(c *Config) {
			c.CAFile, c.CertFile, c.KeyFile = a.file("ca.pem"), a.file(name+".pem"), a.file(name+".key")
		}
	}
	f := &fixture{server: s, prefix: "/x"}
	root, err := f.manager(t, cert("root")).client.connect()
	if err != nil {
		t.Fatal(err)
	}
	f.kv = root.Client
	f.put(t, "config", configV4)
	enableAuth(t, f)
	m := f.manager(t, cert("flannel"))
	own := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, own)
	w := subnettest.Watch(t, m)
	f.put(t, "subnets/10.77.0.0-24", leaseValue("192.0.2.2"))
	w.Until(t, "the peer", subnettest.Has("10.77.0.0-24"))
	k.stillRuns(t)
}

// TestMayOnlyRead expects that a node without the permission to write repeats its attempts with the
// etcd lease that it has, and does not request another one. Refused writes must not count as
// unanswered.
func TestMayOnlyRead(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	enableAuth(t, f)
	root := f.root(t)
	all, end := f.prefix+"/", clientv3.GetPrefixRangeEnd(f.prefix+"/")
	allow := func(p clientv3.PermissionType) {
		t.Helper()
		if _, err := root.RoleGrantPermission(t.Context(), "flannel", all, end, p); err != nil {
			t.Fatal(err)
		}
	}
	var status statuses
	m := f.manager(t, func(c *Config) { c.Username, c.Password = "flannel", "secret" }, status.option)
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	had := etcdLeaseIDs(t, root)
	allow(clientv3.PermissionType(clientv3.PermRead))
	if _, err := root.Delete(t.Context(), all+"subnets/"+l.Key); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, patience, "the report of the missing permission", func() bool {
		_, err := status.last()
		return err != nil && strings.Contains(err.Error(), "permission denied")
	})
	if err := m.writing.Acquire(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if len(m.unanswered) > 0 {
		t.Errorf("%d writes that were refused count as unanswered", len(m.unanswered))
	}
	m.writing.Release(1)
	if have := etcdLeaseIDs(t, root); !slices.Equal(have, had) {
		t.Errorf("the store has the etcd leases %x, want %x", have, had)
	}
	allow(clientv3.PermissionType(clientv3.PermReadWrite))
	waittest.Until(t, patience, "the key on its etcd lease", func() bool {
		resp, err := root.Get(t.Context(), all+"subnets/"+l.Key)
		if err != nil {
			t.Fatal(err)
		}
		return len(resp.Kvs) == 1 && slices.Equal(etcdLeaseIDs(t, root), []clientv3.LeaseID{clientv3.LeaseID(resp.Kvs[0].Lease)})
	})
	k.stillRuns(t)
}

func etcdLeaseIDs(tb testing.TB, c *clientv3.Client) (ids []clientv3.LeaseID) {
	tb.Helper()
	resp, err := c.Leases(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	for _, l := range resp.Leases {
		ids = append(ids, l.ID)
	}
	return ids
}

// enableAuth makes the etcd require logins. The user root may do everything, the user flannel may
// read and write below the prefix, and a further user has no permissions. All passwords are
// "secret". At the end of the test enableAuth disables authentication if the etcd is linked in.
func enableAuth(tb testing.TB, f *fixture) {
	tb.Helper()
	ctx := tb.Context()
	_, err := f.kv.RoleAdd(ctx, "flannel")
	if err == nil {
		_, err = f.kv.RoleGrantPermission(ctx, "flannel", f.prefix+"/", clientv3.GetPrefixRangeEnd(f.prefix+"/"),
			clientv3.PermissionType(clientv3.PermReadWrite))
	}
	for user, role := range map[string]string{"root": "root", "flannel": "flannel", "nobody": ""} {
		if err == nil {
			_, err = f.kv.UserAdd(ctx, user, "secret")
		}
		if err == nil && role != "" {
			_, err = f.kv.UserGrantRole(ctx, user, role)
		}
	}
	if err == nil {
		_, err = f.kv.AuthEnable(ctx)
	}
	if err != nil {
		tb.Fatal(err)
	}
	if f.etcd == nil {
		return
	}
	// The etcd that is linked in panics if it stops while it looks up the permission for a watch. See
	// https://github.com/etcd-io/etcd/issues/14256.
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		root := f.kv // the user root by its certificate, if etcd requires one
		if f.tls.ClientTLSInfo.Empty() {
			root = f.root(tb)
		}
		if _, err := root.AuthDisable(ctx); err != nil {
			tb.Errorf("disable authentication: %v", err)
		}
	})
}

func (f *fixture) root(tb testing.TB) *clientv3.Client {
	tb.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{f.url}, Username: "root", Password: "secret", Logger: zap.NewNop(), DialTimeout: endless,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func TestNewRefuses(t *testing.T) {
	a := newAuthority(t)
	notPEM := a.file("not.pem")
	if err := os.WriteFile(notPEM, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	ok := []string{"http://127.0.0.1:2379"}
	for _, tc := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "no etcd endpoint is given"},
		{Config{Endpoints: []string{ok[0], ""}}, `etcd endpoint 2: "" is not a URL such as http://127.0.0.1:2379`},
		{Config{Endpoints: []string{"ftp://x"}}, `etcd endpoint 1: "ftp://x" has scheme "ftp", want http or https`},
		{Config{Endpoints: []string{"http://a b"}}, "is not a URL"},
		{Config{Endpoints: ok, CertFile: a.file("ca.pem")}, "needs both the certificate file and the key file"},
		{Config{Endpoints: ok, KeyFile: a.file("ca.key")}, "needs both the certificate file and the key file"},
		{Config{Endpoints: ok, CAFile: "/nowhere/ca.pem"}, "open /nowhere/ca.pem: no such file or directory"},
		{Config{Endpoints: ok, CAFile: notPEM}, "holds no certificate in PEM form"},
		{Config{Endpoints: ok, CertFile: notPEM, KeyFile: a.file("ca.key")}, "load client certificate " + notPEM},
	} {
		_, err := New(tc.cfg)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("error is %v, want %q", err, tc.want)
		}
	}
	for _, e := range []string{"127.0.0.1:2379", "https://etcd.example:2379", "http://[::1]:2379", "unix:///run/etcd.sock", "localhost:2379"} {
		m, err := New(Config{Endpoints: []string{e}})
		if err != nil {
			t.Errorf("%s: %v", e, err)
			continue
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if _, err := m.Config(t.Context()); !errors.Is(err, errClosed) {
			t.Errorf("after Close the error is %v", err)
		}
	}
}
