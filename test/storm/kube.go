// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// apiServer is a kube-apiserver with its default limits. The CPU time and memory of its etcd do not
// count, because that is another process.
type apiServer struct{ *figures.Kube }

// Tokens of flannel's service account, and of that of the bystander.
const (
	flannelToken   = "flannel"
	bystanderToken = "bystander"
)

func startAPIServer(ctx context.Context, l *lab.Lab, program string) *apiServer {
	account := func(token, namespace, name string) string {
		return fmt.Sprintf(`%s,system:serviceaccount:%s:%s,%s,"system:serviceaccounts,system:serviceaccounts:%s,system:authenticated"`,
			token, namespace, name, name, namespace)
	}
	s := &apiServer{figures.StartKube(ctx, l, l.Underlay(), flannelToken, networkConfig, lab.APIServerOptions{Path: program, Tokens: []string{
		account(flannelToken, "kube-flannel", "flannel"), account(bystanderToken, "default", "bystander"),
	}})}
	s.Do(ctx, figures.AdminToken, http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", figures.JSON, map[string]any{
		"metadata": map[string]any{"name": "storm"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts"}},
	})
	return s
}

// join creates the Nodes of hosts. They have podCIDRs, but no annotations of flannel yet.
func (s *apiServer) join(ctx context.Context, from, to int) {
	figures.Each(from, to, func(i int) {
		cidr := figures.Addr("10.128.0.0", (i+1)<<8).String() + "/24"
		s.Do(ctx, figures.AdminToken, http.MethodPost, figures.NodesPath, figures.JSON, map[string]any{
			"apiVersion": "v1", "kind": "Node",
			"metadata": map[string]any{"name": nodeName(i), "labels": map[string]any{"kubernetes.io/hostname": nodeName(i)}},
			"spec":     map[string]any{"podCIDR": cidr, "podCIDRs": []string{cidr}},
			"status":   map[string]any{"images": figures.NodeImages(i)},
		})
	})
}

func (s *apiServer) leave(ctx context.Context, _ []subnet.Lease, from, to int) {
	figures.Each(from, to, func(i int) {
		s.Do(ctx, figures.AdminToken, http.MethodDelete, figures.NodesPath+"/"+nodeName(i), figures.JSON, map[string]any{})
	})
}

func (s *apiServer) putExtra(ctx context.Context) subnet.Lease {
	s.join(ctx, extra, extra+1)
	l := subnet.Lease{Key: nodeName(extra), Endpoints: []subnet.Endpoint{{PublicIP: publicIP(extra)}}}
	s.Do(ctx, figures.AdminToken, http.MethodPatch, figures.NodesPath+"/"+l.Key, figures.MergePatch, map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		"flannel.alpha.coreos.com/kube-subnet-manager": "true", "flannel.alpha.coreos.com/backend-type": "vxlan",
		"flannel.alpha.coreos.com/public-ip": publicIP(extra).String(), "flannel.alpha.coreos.com/backend-data": string(vtep(extra)),
	}}})
	return l
}

func (*apiServer) name() string { return "Kubernetes" }

func (s *apiServer) pid() int { return s.API.PID() }

func (s *apiServer) restart(ctx context.Context) { must.Do(s.API.Restart(ctx)) }

func (s *apiServer) close() { s.Close() }

func (s *apiServer) reach() Store {
	return Store{Kubeconfig: s.Kubeconfig(), NetConfig: s.NetConfig()}
}

func (s *apiServer) writeAndRead(ctx context.Context) {
	const path = "/api/v1/namespaces/default"
	s.Do(ctx, bystanderToken, http.MethodPatch, path, figures.MergePatch, map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{"storm": time.Now().String()}},
	})
	s.Do(ctx, bystanderToken, http.MethodGet, path, figures.JSON, nil)
}

// bystanderCalls is empty because only requests for Nodes are counted.
func (*apiServer) bystanderCalls() []string { return nil }

// calls counts the requests for Nodes that have ended. So it does not count watches that still run.
// The kind is the verb and, if the server has refused the request, the status code.
func (s *apiServer) calls(ctx context.Context) figures.Counts {
	resp := s.Request(ctx, figures.AdminToken, http.MethodGet, "/metrics", "text/plain", nil)
	defer resp.Body.Close()
	nodes := figures.Counts{}
	for kind, n := range figures.ReadCounts(resp.Body, "apiserver_request_total", "resource", "verb", "code") {
		what, ok := strings.CutPrefix(kind, "nodes ")
		if !ok {
			continue
		}
		if verb, code, _ := strings.Cut(what, " "); code < "300" {
			what = verb
		}
		nodes[what] += n
	}
	return nodes
}
