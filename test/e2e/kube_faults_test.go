// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// proxy is an HTTPS proxy in front of a cluster's API server. If status is not 0, it answers
// every request with that status. refused counts these answers.
type proxy struct {
	*httptest.Server
	status, refused atomic.Int32
}

// startProxy starts a proxy. The kubeconfigs that options writes afterwards name the proxy
// as the server.
func (c *cluster) startProxy() *proxy {
	c.t.Helper()
	f := &proxy{}
	pass := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: c.api.Addr(nil).String()})
	transport := c.api.Transport(c.Underlay())
	pass.Transport, pass.FlushInterval = transport, -1
	pass.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	f.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := int(f.status.Load())
		if status == 0 {
			pass.ServeHTTP(w, r)
			return
		}
		f.refused.Add(1)
		if status == http.StatusTooManyRequests {
			w.Header().Set("Retry-After", "1")
		}
		w.WriteHeader(status)
	}))
	l, err := c.Underlay().Listen(testContext(c.t), "tcp", netip.AddrPortFrom(c.api.Addr(nil).Addr(), 0).String())
	if err != nil {
		c.t.Fatal(err)
	}
	f.Listener.Close()
	f.Listener, f.EnableHTTP2 = l, true
	f.StartTLS()
	c.t.Cleanup(func() {
		f.CloseClientConnections()
		transport.CloseIdleConnections()
		f.Close()
	})
	ca := c.write("proxy-ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw}))
	c.server = fmt.Sprintf(`{"server":"https://%s","certificate-authority":%q,"tls-server-name":%q}`, l.Addr(), ca, f.Certificate().DNSNames[0])
	return f
}

// refuse makes the proxy answer every request with a status. It closes all connections, so
// that watches get the status too, and waits until the proxy has answered several requests.
// With status 0, refuse returns at once, and the proxy passes requests to the API server
// again.
func (f *proxy) refuse(t *testing.T, status int) {
	t.Helper()
	f.status.Store(int32(status))
	if status == 0 {
		return
	}
	f.refused.Store(0)
	f.CloseClientConnections()
	eventually(t, fmt.Sprintf("several answers %d", status), func() error {
		if n := f.refused.Load(); n < 8 {
			return fmt.Errorf("%d answers so far", n)
		}
		return nil
	})
}

// TestKubeErrorAnswers checks that daemons start and forward packets although the API server
// answers requests with errors for a while: at the start, and while Nodes are added and
// deleted. These answers must not change the kernel.
//
//stages:rest it starts an API server
func TestKubeErrorAnswers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	f := c.startProxy()
	f.status.Store(http.StatusInternalServerError)
	for n := 1; n <= 2; n++ {
		expectLog(t, start(t, c.Host(n), c.options(n)), "the Kubernetes API is not usable")
	}
	f.refuse(t, http.StatusUnauthorized)
	f.refuse(t, 0)
	c.addNode(100, c.peerAnnotations(100))
	for _, h := range c.Hosts() {
		expectReady(t, h.Daemon())
		expectKernel(t, h, c.peerEntries(100), nil)
	}
	if err := c.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	flows := startFlows(t, c.Lab, 200)
	for i, status := range []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusUnauthorized} {
		f.refuse(t, status)
		gone, added := 100+i, 101+i
		c.deleteNode(gone)
		c.addNode(added, c.peerAnnotations(added))
		pause(t, time.Second)
		for _, h := range c.Hosts() {
			state, err := vxlanKernelState(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(state, c.peerEntries(gone)[0]) || strings.Contains(state, peerMAC(added)) {
				t.Errorf("the API server answers %d, and the kernel of %s has changed:\n%s", status, h.Name(), state)
			}
		}
		f.refuse(t, 0)
		for _, h := range c.Hosts() {
			expectKernel(t, h, c.peerEntries(added), []string{fmt.Sprintf("10.5.%d.0", gone), peerMAC(gone)})
		}
	}
	for _, h := range c.Hosts() {
		expectReady(t, h.Daemon())
		if err := h.Daemon().Ended(); err != nil {
			t.Error(err)
		}
	}
	expectNothingLost(t, flows)
}

// mounts is the folder in which a pod finds the token of its ServiceAccount. The kubelet
// replaces all files in it at once, by means of the symbolic link ..data.
const mounts = "/run/secrets/kubernetes.io/serviceaccount"

// mount creates a Secret and a token of the ServiceAccount flannel, and writes the token
// into the folder mounts of a host, as the kubelet does. It returns the token. The token is
// bound to the Secret, so deleting the Secret revokes it.
func (c *cluster) mount(h *lab.Host, secret string) (token string) {
	c.t.Helper()
	const namespace = "/api/v1/namespaces/kube-flannel/"
	var made struct{ Metadata struct{ UID string } }
	raw := c.do(http.MethodPost, namespace+"secrets", map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": secret}}, "")
	if err := json.Unmarshal(raw, &made); err != nil {
		c.t.Fatal(err)
	}
	var answer struct{ Status struct{ Token string } }
	raw = c.do(http.MethodPost, namespace+"serviceaccounts/flannel/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{
			"boundObjectRef": map[string]any{"apiVersion": "v1", "kind": "Secret", "name": secret, "uid": made.Metadata.UID},
		},
	}, "")
	if err := json.Unmarshal(raw, &answer); err != nil {
		c.t.Fatal(err)
	}
	ca, err := os.ReadFile(c.api.CA())
	if err != nil {
		c.t.Fatal(err)
	}
	dir := h.Path(mounts)
	err = errors.Join(os.MkdirAll(filepath.Join(dir, ".."+secret), 0o755),
		os.WriteFile(filepath.Join(dir, ".."+secret, "token"), []byte(answer.Status.Token), 0o600),
		os.WriteFile(filepath.Join(dir, ".."+secret, "ca.crt"), ca, 0o600),
		os.Symlink(".."+secret, filepath.Join(dir, "..data_tmp")), os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	for _, file := range []string{"token", "ca.crt"} {
		if _, missing := os.Lstat(filepath.Join(dir, file)); missing != nil {
			err = errors.Join(err, os.Symlink(filepath.Join("..data", file), filepath.Join(dir, file)))
		}
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return answer.Status.Token
}

// TestKubeTokenRotated revokes the mounted token of a daemon. When a new token is mounted,
// the daemon must use it, without a restart and without packet loss.
//
//stages:rest it starts an API server
func TestKubeTokenRotated(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	meta := func(kind, name string) map[string]any {
		return map[string]any{"apiVersion": "v1", "kind": kind, "metadata": map[string]any{"name": name}}
	}
	c.do(http.MethodPost, "/api/v1/namespaces", meta("Namespace", "kube-flannel"), "")
	c.do(http.MethodPost, "/api/v1/namespaces/kube-flannel/serviceaccounts", meta("ServiceAccount", "flannel"), "")
	h := c.Host(1)
	old := c.mount(h, "first")
	api := c.api.Addr(h)
	d := start(t, h, lab.FlanneldOptions{
		Args: []string{"--kube-subnet-mgr", "--net-config-path=" + filepath.Join(c.dir, "net-conf.json")},
		Env:  []string{"NODE_NAME=" + nodeName(1), "KUBERNETES_SERVICE_HOST=" + api.Addr().String(), fmt.Sprintf("KUBERNETES_SERVICE_PORT=%d", api.Port())},
	})
	start(t, c.Host(2), c.options(2))
	expectReady(t, d)
	expectReady(t, c.Host(2).Daemon())
	if err := c.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	flows := startFlows(t, c.Lab, 200)

	c.do(http.MethodDelete, "/api/v1/namespaces/kube-flannel/secrets/first", nil, "")
	c.kill() // a running API server would consider the token valid for a while, from its cache
	c.start()
	if status, answer, err := c.tryAs(old, http.MethodGet, nodesPath, nil, ""); err != nil || status != http.StatusUnauthorized {
		t.Fatalf("request with a revoked token: %d, %v: %s, want 401", status, err, answer)
	}
	expectLog(t, d, "Unauthorized")
	c.addNode(100, c.peerAnnotations(100))
	expectKernel(t, c.Host(2), c.peerEntries(100), nil)
	expectKernel(t, h, nil, []string{peerMAC(100)})
	if lines := linesWith(d, "the Kubernetes API is usable again"); len(lines) > 0 {
		t.Errorf("the API is reported as usable although the token is revoked: %q", lines)
	}

	c.mount(h, "second")
	expectLog(t, d, "the Kubernetes API is usable again")
	expectKernel(t, h, c.peerEntries(100), nil)
	expectReady(t, d)
	if err := d.Ended(); err != nil {
		t.Error(err)
	}
	expectNothingLost(t, flows)
}
