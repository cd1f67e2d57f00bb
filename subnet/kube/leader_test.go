// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const (
	task      = "test-task"
	leasePath = "/apis/coordination.k8s.io/v1/namespaces/" + defaultNamespace + "/leases"
)

// TestLeaderLosesTheAPI makes the API refuse all requests of the leader. Its term must end before
// another node becomes the leader, and that must happen within twice timing.leader.
func TestLeaderLosesTheAPI(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	first := f.manager(t, "node1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	term := subnettest.Lead(t, first, task, subnet.Lease{Key: "node1"})
	p.answer(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	term.ExpectTakeover(t, f.manager(t, "node2"), subnet.Lease{Key: "node2"}, 2*first.timing.leader)
}

// TestLeaseOfTheLeader expects that a term survives a change of the Lease by another program, and
// ends when an operator deletes the Lease or another node takes it. A second process of the node
// must lead at once, and end the term of the first.
func TestLeaseOfTheLeader(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t, "node1")
	own := subnet.Lease{Key: "node1"}
	read := func() (l leaderLease) {
		t.Helper()
		if err := json.Unmarshal(f.do(t, http.MethodGet, leasePath+"/flanneld-"+task, nil), &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	change := func(patch map[string]any) {
		t.Helper()
		f.do(t, http.MethodPatch, leasePath+"/flanneld-"+task, patch, sendMerge)
	}

	term := subnettest.Lead(t, m, task, own)
	change(map[string]any{"metadata": map[string]any{"labels": map[string]string{"by": "operator"}}})
	if err := term.Announce(t.Context(), json.RawMessage(`{"a":1}`)); err != nil {
		t.Errorf("after a change by another program: %v", err)
	}
	if l := read(); l.Spec.Holder != "node1" || l.Spec.Seconds != 3 || l.Metadata.Annotations[announcedAnnotation] != `{"a":1}` {
		t.Errorf("the Lease is %+v", l)
	}
	begun := false
	err := f.manager(t, "node1").Lead(t.Context(), task, own, func(context.Context, subnet.Announce) { begun = true })
	if err != nil || !begun {
		t.Errorf("error %v, want the next process to lead at once", err)
	}
	term.ExpectOver(t)

	term = subnettest.Lead(t, m, task, own)
	change(map[string]any{"spec": map[string]string{"holderIdentity": "node9"}})
	term.ExpectOver(t)
	if l := read(); l.Spec.Holder != "node9" {
		t.Errorf("the Lease is %+v, want it left to the other node", l)
	}
	f.do(t, http.MethodDelete, leasePath+"/flanneld-"+task, nil)
	term = subnettest.Lead(t, m, task, own)
	f.do(t, http.MethodDelete, leasePath+"/flanneld-"+task, nil)
	term.ExpectOver(t)
}

// TestLeaderWithoutPermission expects errors that name the Lease and the missing permission.
func TestLeaderWithoutPermission(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t, "node1", func(c *Config) { c.PodNamespace = "default" })
	_, err := m.Leader(t.Context(), task)
	led := m.Lead(t.Context(), task, subnet.Lease{Key: "node1"}, nil)
	for _, err := range []error{err, led} {
		if err == nil || !strings.Contains(err.Error(), "the Lease flanneld-test-task") || !strings.Contains(err.Error(), `cannot get resource "leases"`) {
			t.Errorf("error %v, want one that names the Lease and the permission", err)
		}
	}
}

// TestRoleOfTheChart leads with the permissions for Leases of the Role in the chart. The Role must
// not permit to read another Lease.
func TestRoleOfTheChart(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	text, err := os.ReadFile("../../dist/kubernetes/testdata/leader.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const namespace = "kube-flannel"
	if status, _, err := f.try(http.MethodPost, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": namespace}}); err != nil || status >= 300 && status != http.StatusConflict {
		t.Fatalf("create a namespace: %d, %v", status, err)
	}
	made := 0
	for part := range strings.SplitSeq(string(text), "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(part), &o); err != nil {
			t.Fatal(err)
		}
		metadata, _ := o["metadata"].(map[string]any)
		plural := map[any]string{"Role": "roles", "RoleBinding": "rolebindings"}[o["kind"]]
		if plural != "" && metadata["namespace"] == namespace {
			path := "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace + "/" + plural
			f.do(t, http.MethodPost, path, o)
			t.Cleanup(func() { f.do(t, http.MethodDelete, path, nil) })
			made++
		}
	}
	if made != 2 {
		t.Fatalf("%d objects in %s, want a Role and its binding", made, namespace)
	}
	m := f.manager(t, "node1", func(c *Config) { c.PodNamespace = namespace })
	const cloudRoutes = "cloud-routes"
	term := subnettest.Lead(t, m, cloudRoutes, subnet.Lease{Key: "node1"})
	if err := term.Announce(t.Context(), json.RawMessage(`{}`)); err != nil {
		t.Error(err)
	}
	subnettest.ExpectLeader(t, m, cloudRoutes, subnet.Leader{Name: "node1", Announced: json.RawMessage(`{}`)})
	if _, err := m.Leader(t.Context(), task); err == nil {
		t.Error("the Role permits another Lease")
	}
}
