// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const patience = 10 * time.Second

// apiserver is the path of the API server.
const apiserver = "../../bin/tools/kube-apiserver"

// server is a real API server on loopback, on a real etcd.
type server struct {
	dir, url string
	program  string // path of an etcd; empty: the etcd that is linked in
	etcd     *embed.Etcd
	etcdProc *program
	etcdURL  url.URL
	proc     *program
	flags    []string
}

// program is a process that a test has started.
type program struct {
	*exec.Cmd
	log    string // path of the log file
	exited chan struct{}
}

// run starts the program at path, which logs into a file in dir. The kernel kills it when the
// process of the tests ends.
func run(dir, path string, args ...string) (*program, error) {
	log, err := os.Create(filepath.Join(dir, filepath.Base(path)+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &program{exec.Command(path, args...), log.Name(), make(chan struct{})}
	p.Stdout, p.Stderr = log, log
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		return nil, fmt.Errorf("%s to test with: %w", filepath.Base(path), err)
	}
	go func() {
		_ = p.Wait()
		close(p.exited)
	}()
	return p, nil
}

// kill ends the program. p may be nil.
func (p *program) kill() {
	if p != nil {
		_ = p.Process.Kill()
		<-p.exited
	}
}

// await calls up again and again until it returns nil, for at most two minutes. It returns an error
// before if the program ends.
func (p *program) await(up func() error) error {
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := up()
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			text, _ := os.ReadFile(p.log)
			return fmt.Errorf("%s ended: %s", p.Path, text[max(0, len(text)-1000):])
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not ready: %w", p.Path, err)
		}
	}
}

const (
	admin   = "admin-token"   // token of an administrator
	flannel = "flannel-token" // token of a daemon, see grant for its permissions
)

// shared is one server for the tests that need no special one.
var shared = sync.OnceValues(func() (*server, error) {
	dir, err := os.MkdirTemp("", "apiserver-test-")
	if err != nil {
		return nil, err
	}
	running = &server{dir: dir}
	return running, running.start()
})

// running is the shared server, or nil if no test has needed it.
var running *server

func TestMain(m *testing.M) {
	code := m.Run()
	if running != nil {
		running.stop()
		os.RemoveAll(running.dir)
	}
	os.Exit(code)
}

func sharedServer(tb testing.TB) *server {
	tb.Helper()
	s, err := shared()
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// start starts etcd and the API server. After a stop they have the same data and addresses as
// before.
func (s *server) start() error {
	if err := s.startEtcd(); err != nil {
		return err
	}
	return s.startAPI()
}

func (s *server) startEtcd() error {
	if s.etcdURL.Host == "" {
		addr, err := subnettest.FreeAddr()
		if err != nil {
			return err
		}
		s.etcdURL = url.URL{Scheme: "http", Host: addr}
	}
	addr, err := subnettest.FreeAddr()
	if err != nil {
		return err
	}
	peer := url.URL{Scheme: "http", Host: addr}
	if s.program != "" {
		return s.startProgram(peer)
	}
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(s.dir, "etcd")
	cfg.UnsafeNoFsync = true
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{s.etcdURL}, []url.URL{s.etcdURL}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	if s.etcd, err = embed.StartEtcd(cfg); err != nil {
		return err
	}
	<-s.etcd.Server.ReadyNotify()
	return nil
}

// startProgram starts the etcd of s.program, and returns when it is healthy.
func (s *server) startProgram(peer url.URL) (err error) {
	s.etcdProc, err = run(
		s.dir, s.program, "--data-dir="+filepath.Join(s.dir, "etcd"),
		"--listen-client-urls="+s.etcdURL.String(), "--advertise-client-urls="+s.etcdURL.String(),
		"--listen-peer-urls="+peer.String(), "--initial-advertise-peer-urls="+peer.String(), "--initial-cluster=default="+peer.String(),
	)
	if err != nil {
		return err
	}
	return s.etcdProc.await(func() error {
		resp, err := adminClient().Get(s.etcdURL.String() + "/health")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
}

func (s *server) startAPI() error {
	if s.url == "" {
		addr, err := subnettest.FreeAddr()
		if err != nil {
			return err
		}
		s.url = "https://" + addr
	}
	tokens := filepath.Join(s.dir, "tokens.csv")
	text := admin + ",admin,admin,system:masters\n" + flannel + ",system:serviceaccount:kube-flannel:flannel,flannel-uid\n"
	if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
		return err
	}
	key := filepath.Join(s.dir, "sa.key")
	if _, err := os.Stat(key); err != nil {
		if out, err := exec.Command("openssl", "genrsa", "-out", key, "2048").CombinedOutput(); err != nil {
			return fmt.Errorf("make key: %w: %s", err, out)
		}
	}
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(s.url, "https://"))
	proc, err := run(s.dir, apiserver, append([]string{
		"--etcd-servers=" + s.etcdURL.String(), "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + port,
		"--cert-dir=" + filepath.Join(s.dir, "certs"), "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + key,
		"--service-account-signing-key-file=" + key, "--authorization-mode=RBAC", "--token-auth-file=" + tokens,
		"--endpoint-reconciler-type=none", "--shutdown-delay-duration=0s",
	}, s.flags...)...)
	if err != nil {
		return err
	}
	s.proc = proc
	return proc.await(func() error {
		status, _, err := s.try(http.MethodGet, "/readyz", nil)
		if err == nil && status != http.StatusOK {
			err = errors.New(http.StatusText(status))
		}
		return err
	})
}

// stopAPI kills the API server.
func (s *server) stopAPI() {
	s.proc.kill()
}

// stop kills the API server, and then etcd.
func (s *server) stop() {
	s.stopAPI()
	s.etcdProc.kill()
	if s.etcd != nil {
		s.etcd.Close()
	}
}

// wipe stops etcd and the API server, and starts them again without data at the same addresses.
func (s *server) wipe(t *testing.T) {
	t.Helper()
	s.stop()
	if err := os.RemoveAll(filepath.Join(s.dir, "etcd")); err != nil {
		t.Fatal(err)
	}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
}

var adminClient = sync.OnceValue(func() *http.Client {
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true, // a self-signed certificate on loopback
	}}
})

// try sends a request as an administrator, and returns the status and the body of the answer.
// contentType is at most one type of the request's body, which is JSON without it. The request has
// no deadline, because no test is about its time. Deleting 1,000 Nodes takes long on a busy machine.
func (s *server) try(method, path string, body any, contentType ...string) (int, []byte, error) {
	var raw []byte
	if body != nil {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	req, err := http.NewRequestWithContext(context.Background(), method, s.url+path, bytes.NewReader(raw))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+admin)
	req.Header.Set("Content-Type", "application/json")
	if len(contentType) > 0 {
		req.Header.Set("Content-Type", contentType[0])
	}
	resp, err := adminClient().Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// do is like try. The test fails if the request does not succeed.
func (s *server) do(t testing.TB, method, path string, body any, contentType ...string) []byte {
	t.Helper()
	status, answer, err := s.try(method, path, body, contentType...)
	if err != nil || status >= 300 {
		t.Fatalf("%s %s: %d, %v: %s", method, path, status, err, answer)
	}
	return answer
}

// node contains the fields of a Node that tests read.
type node struct {
	Metadata struct {
		Name        string
		UID         string
		Annotations map[string]string
	}
	Spec   struct{ PodCIDRs []string }
	Status struct {
		Conditions []struct{ Type, Status, Reason, Message string }
	}
}

func (s *server) node(t testing.TB, name string) node {
	t.Helper()
	var n node
	if err := json.Unmarshal(s.do(t, http.MethodGet, "/api/v1/nodes/"+name, nil), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// addNode creates a Node with podCIDRs, which may be none.
func (s *server) addNode(t testing.TB, name string, cidrs ...string) {
	t.Helper()
	s.do(t, http.MethodPost, "/api/v1/nodes", nodeBody(name, nil, cidrs...))
}

func nodeBody(name string, annotations map[string]string, cidrs ...string) map[string]any {
	spec := map[string]any{}
	if len(cidrs) > 0 {
		spec = map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs}
	}
	return map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": name, "annotations": annotations, "labels": map[string]string{wire.HostnameLabel: hostOf(name)}},
		"spec":     spec,
	}
}

// hostOf returns the host name of a Node, which need not be the Node's name.
func hostOf(node string) string { return "host-of-" + node }

func (s *server) deleteNode(t testing.TB, name string) {
	t.Helper()
	s.do(t, http.MethodDelete, "/api/v1/nodes/"+name, nil)
}

// note changes annotations of a Node; the value nil removes one.
func (s *server) note(t testing.TB, name string, annotations map[string]any) {
	t.Helper()
	s.do(t, http.MethodPatch, "/api/v1/nodes/"+name, map[string]any{"metadata": map[string]any{"annotations": annotations}}, "application/merge-patch+json")
}

// fixture is a server without any Nodes at the beginning of a test, and a folder for the files of
// managers.
type fixture struct {
	*server
	dir string
}

func newFixture(t *testing.T, s *server) *fixture {
	t.Helper()
	f := &fixture{s, t.TempDir()}
	s.do(t, http.MethodDelete, "/api/v1/nodes", nil)
	s.do(t, http.MethodDelete, "/api/v1/namespaces/default/events", nil)
	f.grant(t, true)
	return f
}

// grant gives the daemon the permissions of flannel's first manifests, which are fewer than those
// of later ones. If events is true, the daemon may also create Events.
func (f *fixture) grant(t *testing.T, events bool) {
	t.Helper()
	rules := []map[string]any{
		{"apiGroups": []string{""}, "resources": []string{"pods"}, "verbs": []string{"get"}},
		{"apiGroups": []string{""}, "resources": []string{"nodes"}, "verbs": []string{"list", "watch"}},
		{"apiGroups": []string{""}, "resources": []string{"nodes/status"}, "verbs": []string{"patch"}},
	}
	if events {
		rules = append(rules, map[string]any{"apiGroups": []string{""}, "resources": []string{"events"}, "verbs": []string{"create"}})
	}
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	role := map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "flannel"}, "rules": rules,
	}
	binding := map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": map[string]any{"name": "flannel"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "flannel"},
		"subjects": []map[string]any{{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "system:serviceaccount:kube-flannel:flannel"}},
	}
	for path, body := range map[string]any{"clusterroles": role, "clusterrolebindings": binding} {
		switch status, answer, err := f.try(http.MethodPost, rbac+path, body); {
		case err == nil && status == http.StatusConflict:
			f.do(t, http.MethodPut, rbac+path+"/flannel", body)
		case err != nil || status >= 300:
			t.Fatalf("create %s: %d, %v: %s", path, status, err, answer)
		}
	}
}

// kubeconfig writes a kubeconfig with that URL and a file with that token, and returns the path of
// the kubeconfig. It replaces the files of an earlier call.
func (f *fixture) kubeconfig(t *testing.T, url, token string) string {
	t.Helper()
	tokenFile := filepath.Join(f.dir, "token")
	if err := os.WriteFile(tokenFile, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(f.dir, "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",
"clusters":[{"name":"c","cluster":{"server":%q,"insecure-skip-tls-verify":true}}],
"users":[{"name":"u","user":{"tokenFile":%q}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, url, tokenFile)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (f *fixture) netConf() string { return filepath.Join(f.dir, "net-conf.json") }

func (f *fixture) setConfig(t *testing.T, raw string) {
	t.Helper()
	if err := os.WriteFile(f.netConf(), []byte(raw), 0o600); err != nil {
		t.Fatal(err)
	}
}

// manager returns a manager of the Node with that name, with short pauses. It is closed at the end
// of the test.
func (f *fixture) manager(t *testing.T, name string, change ...func(*Config)) *Manager {
	t.Helper()
	cfg := Config{Kubeconfig: f.kubeconfig(t, f.url, flannel), NodeName: name, NetConfig: f.netConf()}
	for _, c := range change {
		c(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.timing.restoreMin, m.timing.backoffMin, m.timing.backoff = 10*time.Millisecond, 10*time.Millisecond, 200*time.Millisecond
	t.Cleanup(func() { m.Close() })
	return m
}

// expectStatus waits for a status of the API whose text contains want, and skips others. The text
// of a usable API is "<nil>".
func expectStatus(t *testing.T, statuses <-chan error, want string) {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case err := <-statuses:
			if strings.Contains(fmt.Sprint(err), want) {
				return
			}
		case <-timeout:
			t.Fatalf("no status %s", want)
		}
	}
}
