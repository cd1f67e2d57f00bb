// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// apiServer is a kube-apiserver with its default limits. The CPU time and memory of its etcd do not
// count, because that is another process.
type apiServer struct {
	api    *lab.APIServer
	dir    string
	client *http.Client
}

// Tokens of the administrator, of flannel's service account, and of the service account of the
// bystander. The administrator's requests do not wait in the queues of API Priority and Fairness.
const (
	adminToken     = "admin"
	flannelToken   = "flannel"
	bystanderToken = "bystander"
)

func startAPIServer(ctx context.Context, l *lab.Lab, program string) (s *apiServer, err error) {
	s = &apiServer{}
	if program, err = filepath.Abs(program); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp("", "storm-"); err != nil {
		return nil, err
	}
	account := func(token, namespace, name string) string {
		return fmt.Sprintf(`%s,system:serviceaccount:%s:%s,%s,"system:serviceaccounts,system:serviceaccounts:%s,system:authenticated"`,
			token, namespace, name, name, namespace)
	}

	s.api, err = l.StartAPIServer(ctx, lab.APIServerOptions{Path: program, Tokens: []string{
		adminToken + ",admin,admin,system:masters",
		account(flannelToken, "kube-flannel", "flannel"),
		account(bystanderToken, "default", "bystander"),
	}})
	if err != nil {
		_ = os.RemoveAll(s.dir)
		return nil, err
	}
	s.client = &http.Client{Transport: s.api.Transport(l.Underlay())}
	if err := s.prepare(ctx); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// prepare writes the files that hosts read, and gives all service accounts all rights.
func (s *apiServer) prepare(ctx context.Context) error {
	kubeconfig, err := s.api.Kubeconfig(flannelToken)
	if err != nil {
		return err
	}
	if err := errors.Join(
		os.WriteFile(filepath.Join(s.dir, "kubeconfig"), kubeconfig, 0o600),
		os.WriteFile(filepath.Join(s.dir, "net-conf.json"), []byte(networkConfig), 0o600),
	); err != nil {
		return err
	}
	return s.do(ctx, adminToken, http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", map[string]any{
		"metadata": map[string]any{"name": "storm"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts"}},
	})
}

// do sends a request with the given token. The body is JSON, and a merge patch if the method is
// PATCH. A status of 300 or more is an error.
func (s *apiServer) do(ctx context.Context, token, method, path string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+s.api.Addr(nil).String()+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}

	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %.300s", method, path, resp.Status, answer)
	}
	return err
}

const nodesPath = "/api/v1/nodes"

// addNodes creates the Nodes of some hosts. The parameter from is the number of the first host, and
// the parameter to is the number after that of the last one. The Nodes have podCIDRs, but no
// annotations of flannel yet.
func (s *apiServer) addNodes(ctx context.Context, from, to int) error {
	return figures.Each(from, to, func(i int) error {
		cidr := addr("10.128.0.0", (i+1)<<8).String() + "/24"
		return s.do(ctx, adminToken, http.MethodPost, nodesPath, map[string]any{
			"apiVersion": "v1", "kind": "Node",
			"metadata": map[string]any{"name": nodeName(i), "labels": map[string]any{"kubernetes.io/hostname": nodeName(i)}},
			"spec":     map[string]any{"podCIDR": cidr, "podCIDRs": []string{cidr}},
			"status":   map[string]any{"images": figures.NodeImages(i)},
		})
	})
}

func (s *apiServer) removeNodes(ctx context.Context, from, to int) error {
	return figures.Each(from, to, func(i int) error {
		return s.do(ctx, adminToken, http.MethodDelete, nodesPath+"/"+nodeName(i), nil)
	})
}

func (s *apiServer) pid() int { return s.api.PID() }

func (s *apiServer) restart(ctx context.Context) error { return s.api.Restart(ctx) }

func (s *apiServer) close() {
	s.api.Kill()
	_ = os.RemoveAll(s.dir)
}

func (s *apiServer) reach() Store {
	return Store{Kubeconfig: filepath.Join(s.dir, "kubeconfig"), NetConfig: filepath.Join(s.dir, "net-conf.json")}
}

func (s *apiServer) writeAndRead(ctx context.Context) error {
	const path = "/api/v1/namespaces/default"
	err := s.do(ctx, bystanderToken, http.MethodPatch, path, map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{"storm": time.Now().String()}},
	})
	if err != nil {
		return err
	}
	return s.do(ctx, bystanderToken, http.MethodGet, path, nil)
}

// bystanderCalls is empty because only requests for Nodes are counted.
func (*apiServer) bystanderCalls() []string { return nil }

// calls counts the requests for Nodes that have ended. So it does not count watches that still run.
// The kind is the verb and, if the server has refused the request, the status code.
func (s *apiServer) calls(ctx context.Context) (figures.Counts, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.api.Addr(nil).String()+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the API server for its metrics: %w", err)
	}
	defer resp.Body.Close()
	all, err := figures.ReadCounts(resp.Body, "apiserver_request_total", "resource", "verb", "code")
	if err != nil {
		return nil, err
	}
	nodes := figures.Counts{}
	for kind, n := range all {
		what, ok := strings.CutPrefix(kind, "nodes ")
		if !ok {
			continue
		}
		if verb, code, _ := strings.Cut(what, " "); code < "300" {
			what = verb
		}
		nodes[what] += n
	}
	return nodes, nil
}
