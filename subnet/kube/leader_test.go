// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const (
	task      = "test-task"
	leasePath = "/apis/coordination.k8s.io/v1/namespaces/" + defaultNamespace + "/leases"
)

// TestLeaderLosesTheAPI cuts the leader off from the API. Its term must end before another node becomes
// the leader, which must not take long.
func TestLeaderLosesTheAPI(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	first := f.manager(t, "node1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	term := subnettest.Lead(t, first, task, subnet.Lease{Key: "node1"})
	p.answer(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	start := time.Now()
	over := make(chan time.Time, 1)
	go func() { <-term.Over; over <- time.Now() }()
	subnettest.Lead(t, f.manager(t, "node2"), task, subnet.Lease{Key: "node2"})
	took := time.Since(start)
	select {
	case ended := <-over:
		t.Logf("the term has ended after %v, and the next one has begun after %v", ended.Sub(start), took)
	default:
		t.Error("two nodes are the leader")
	}
	if most := 2 * first.timing.leader; took > most {
		t.Errorf("the next term has begun after %v, want at most %v", took, most)
	}
}

// TestLeaseOfTheLeader expects that a term survives a change of the Lease by another program, and ends
// when an operator deletes the Lease or another node takes it. A restarted daemon leads at once.
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
	expectOver := func(term subnettest.Term) {
		t.Helper()
		select {
		case <-term.Over:
		case <-time.After(patience):
			t.Fatal("the term does not end")
		}
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
	expectOver(term)

	term = subnettest.Lead(t, m, task, own)
	change(map[string]any{"spec": map[string]string{"holderIdentity": "node9"}})
	expectOver(term)
	if l := read(); l.Spec.Holder != "node9" {
		t.Errorf("the Lease is %+v, want it left to the other node", l)
	}
	f.do(t, http.MethodDelete, leasePath+"/flanneld-"+task, nil)
	term = subnettest.Lead(t, m, task, own)
	f.do(t, http.MethodDelete, leasePath+"/flanneld-"+task, nil)
	expectOver(term)
}

// TestLeaderWithoutPermission expects errors that name the Lease and the cause.
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
