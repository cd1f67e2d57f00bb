// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// APIServerOptions configures a Kubernetes API server.
type APIServerOptions struct {
	Path   string   // of the binary
	Tokens []string // contents of its --token-auth-file, one user a line: token,user,uid,"group,..."
	Args   []string // added after the lab's own arguments, so that they override them
	Etcd   string   // URL of the store, as the router reaches it; empty: the lab's etcd

	// ServiceAddrs are the addresses of the API server's Service. Its certificate is valid for
	// them too.
	ServiceAddrs []netip.Addr
}

// APIServer is a real kube-apiserver with RBAC. It is a separate process in the router's
// namespace. It stores its objects in the lab's etcd, unless APIServerOptions.Etcd names
// another store.
type APIServer struct {
	server
	lab   *Lab
	opt   APIServerOptions
	files TLSFiles
	tls   *tls.Config // of the lab's own clients
}

const (
	apiServerDir  = "/run/kube-apiserver"
	apiServerPort = 6443
)

// StartAPIServer starts an API server and waits until it answers. The lab must have a store and
// must not run another API server. If the API server does not start or does not answer,
// StartAPIServer returns it together with the error.
func (l *Lab) StartAPIServer(ctx context.Context, o APIServerOptions) (*APIServer, error) {
	s, err := l.newAPIServer(o)
	if err != nil {
		return nil, fmt.Errorf("prepare API server: %w", err)
	}
	return s, s.Start(ctx)
}

func (l *Lab) newAPIServer(o APIServerOptions) (*APIServer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.etcd == nil {
		return nil, errors.New("the lab has no store")
	}
	if l.api != nil && l.api.running() {
		return nil, errors.New("the lab already runs one")
	}

	s := &APIServer{lab: l, opt: o}
	dir := l.underlay.Path(apiServerDir)
	var err error
	if s.files, s.tls, err = writeTLSFiles(dir, "apiserver", slices.Concat(l.endpointAddrs(), o.ServiceAddrs), false); err != nil {
		return nil, err
	}

	tokens := strings.Join(o.Tokens, "\n") + "\n"
	if err := os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte(tokens), 0o600); err != nil {
		return nil, err
	}
	l.api = s
	return s, nil
}

// Start starts the API server with the data that is in its store, and waits until it
// answers. It must not be running.
func (s *APIServer) Start(ctx context.Context) error {
	// This path allows anonymous requests as soon as the API server has created its roles.
	url := "https://" + s.Addr(nil).String() + "/readyz"
	return s.start(ctx, s.lab.underlay, processSpec{
		name: "kube-apiserver", path: s.opt.Path, args: append(s.args(), s.opt.Args...), env: childEnv(nil),
	}, s.Transport(s.lab.underlay), url, 50*time.Millisecond)
}

func (s *APIServer) args() []string {
	addr := s.lab.endpointAddrs()[0]
	anywhere := netip.IPv4Unspecified()
	services := "10.96.0.0/16"
	if addr.Is6() {
		anywhere = netip.IPv6Unspecified()
		services = "fd00:96::/112"
	}
	return []string{
		"--etcd-servers=" + cmp.Or(s.opt.Etcd, s.lab.etcd.url(addr)),
		"--bind-address=" + anywhere.String(), "--advertise-address=" + addr.String(), fmt.Sprintf("--secure-port=%d", apiServerPort),
		"--tls-cert-file=" + s.files.serverCert, "--tls-private-key-file=" + s.files.serverKey,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + s.files.serverCert, "--service-account-signing-key-file=" + s.files.serverKey,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--token-auth-file=" + apiServerDir + "/tokens.csv", "--allow-privileged=true",
		"--service-cluster-ip-range=" + services, "--endpoint-reconciler-type=none", "--shutdown-delay-duration=0s",
	}
}

func get(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()

	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// Addr returns the API server's address on the segment of h, in the first family of the
// lab. If h is nil, it returns the address on the first segment.
func (s *APIServer) Addr(h *Host) netip.AddrPort {
	segment := 0
	if h != nil {
		segment = h.segment
	}
	return netip.AddrPortFrom(segmentAddr(s.lab.cfg.Families[0], segment, router).Addr(), apiServerPort)
}

// Transport returns a transport that connects from inside n. It always connects to the API
// server's address on the first segment, but the server's certificate must be valid for
// the host in the URL. The caller closes idle connections.
func (s *APIServer) Transport(n *Namespace) *http.Transport {
	return &http.Transport{
		TLSClientConfig: s.tls.Clone(),
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return n.Dial(ctx, network, s.Addr(nil).String())
		},
		ForceAttemptHTTP2: true,
	}
}

// Kubeconfig returns a kubeconfig with which a client on any segment can use a token. The
// token must be one of APIServerOptions.Tokens or one of a service account.
func (s *APIServer) Kubeconfig(token string) ([]byte, error) {
	// The content, because the path is not valid in another PID namespace.
	ca, err := os.ReadFile(s.CA())
	if err != nil {
		return nil, err
	}

	return json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "lab",
		"clusters": []any{map[string]any{"name": "lab", "cluster": map[string]any{"server": "https://" + s.Addr(nil).String(), "certificate-authority-data": ca}}},
		"users":    []any{map[string]any{"name": token, "user": map[string]any{"token": token}}},
		"contexts": []any{map[string]any{"name": "lab", "context": map[string]any{"cluster": "lab", "user": token}}},
	})
}

// CA returns the path of the certificate of the authority that signed the API server's
// certificate. Processes of root, in the lab or not, can read it while the lab is open.
func (s *APIServer) CA() string { return s.files.CA }

// SigningKey returns the path of the key that signs tokens of service accounts. Kubernetes'
// controllers need it. The processes that can read the file CA can read it too.
func (s *APIServer) SigningKey() string { return s.files.serverKey }

// Restart kills the API server and starts it again.
func (s *APIServer) Restart(ctx context.Context) error {
	s.Kill()
	return s.Start(ctx)
}
