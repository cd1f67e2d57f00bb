// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

func apiServer(t *testing.T, l *lab.Lab) *lab.APIServer {
	t.Helper()
	binary, err := filepath.Abs("../../bin/tools/kube-apiserver")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := l.StartAPIServer(ctx, lab.APIServerOptions{
		Path: binary, Tokens: []string{"root,admin,admin,system:masters", "other,somebody,somebody"},
	})
	if err != nil {
		t.Fatalf("%v (make components)", err)
	}
	return s
}

// ask sends a request from inside h to the API server's address on the segment of h. It
// returns the status and the body of the answer. The server's certificate must be valid
// for that address.
func ask(ctx context.Context, s *lab.APIServer, h *lab.Host, token, method, path, body string) (int, string, error) {
	transport := s.Transport(h.Namespace)
	transport.DialContext = h.Dial // the transport of s would connect to the address on the first segment
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+s.Addr(h).String()+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

//stages:rest TestKubePods of test/e2e has pods on hosts with an API server
func TestKernelAPIServer(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2, Segments: 2, Families: dual})
	s := apiServer(t, l)
	expect := func(h *lab.Host, token, method, path, body string, want int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		status, text, err := ask(ctx, s, h, token, method, path, body)
		if err != nil || status != want {
			t.Errorf("%s %s: %d, %v, want %d: %s", method, path, status, err, want, text)
		}
	}
	const nodes = "/api/v1/nodes"
	expect(l.Host(1), "root", http.MethodPost, nodes, `{"kind":"Node","apiVersion":"v1","metadata":{"name":"node1"}}`, http.StatusCreated)
	expect(l.Host(2), "root", http.MethodGet, nodes+"/node1", "", http.StatusOK)
	expect(l.Host(2), "other", http.MethodGet, nodes, "", http.StatusForbidden)
	expect(l.Host(2), "nobody", http.MethodGet, nodes, "", http.StatusUnauthorized)

	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	frozen, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if status, _, err := ask(frozen, s, l.Host(1), "root", http.MethodGet, nodes, ""); err == nil {
		t.Errorf("a frozen API server answers: %d", status)
	}
	if err := s.Cont(); err != nil {
		t.Fatal(err)
	}
	expect(l.Host(1), "root", http.MethodGet, nodes, "", http.StatusOK)

	if _, err := l.StartAPIServer(t.Context(), lab.APIServerOptions{}); err == nil || !strings.Contains(err.Error(), "already runs one") {
		t.Errorf("a second one: %v", err)
	}
	restart, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Restart(restart); err != nil {
		t.Fatal(err)
	}
	expect(l.Host(1), "root", http.MethodGet, nodes+"/node1", "", http.StatusOK)
	s.Kill()
	if _, _, err := ask(t.Context(), s, l.Host(1), "root", http.MethodGet, nodes, ""); err == nil {
		t.Error("a killed API server answers")
	}
}

func TestKernelAPIServerFailsToStart(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1})
	for why, o := range map[string]lab.APIServerOptions{
		"no such file": {Path: "/none"},
		"exit status":  {Path: "/bin/false"},
	} {
		if _, err := l.StartAPIServer(t.Context(), o); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%+v: %v, want %q", o, err, why)
		}
	}
	l = newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	if _, err := l.StartAPIServer(t.Context(), lab.APIServerOptions{}); err == nil || !strings.Contains(err.Error(), "no store") {
		t.Errorf("without a store: %v", err)
	}
}
