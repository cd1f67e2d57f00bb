// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http"
	"testing"

	"github.com/flanneld/flanneld/subnet/subnettest"
)

// lostAnswer loses the answer to the next PATCH: it calls lose after the server has executed the request.
type lostAnswer struct {
	http.RoundTripper
	lose func()
}

func (l *lostAnswer) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	if r.Method != http.MethodPatch || err != nil || l.lose == nil {
		return resp, err
	}
	l.lose()
	l.lose = nil
	resp.Body.Close()
	return nil, r.Context().Err()
}

// TestClaimWithoutAnswer supersedes a claim after the server has executed its request, and before the answer. Keep must
// not take what the Node has then for the change of another program: peers would read the former backend again.
func TestClaimWithoutAnswer(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	m := f.started(t)
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	ctx, cancel := context.WithCancel(t.Context())
	m.client.http.Transport = &lostAnswer{m.client.http.Transport, cancel}
	next := vxlanClaim("192.0.2.1")
	next.BackendType = "host-gw"
	if _, err := subnettest.Acquire(ctx, m, next); err == nil {
		t.Fatal("the answer has arrived")
	}
	f.expectNotes(t, "node1", map[string]string{"backend-type": "host-gw"})

	keep(t, m, own)
	f.note(t, "node1", map[string]any{annotationKey("kube-subnet-manager"): "false"})
	f.expectNotes(t, "node1", map[string]string{"kube-subnet-manager": "true"})
	if have := f.node(t, "node1").Metadata.Annotations[annotationKey("backend-type")]; have != "host-gw" {
		t.Errorf("the backend type is %q, want host-gw", have)
	}
}

// TestAcquireOnAnOldNode acquires a claim on the Node as it was before the last one was published.
func TestAcquireOnAnOldNode(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	m := f.started(t)
	cfg, err := m.Config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	before, err := m.readOwn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other := vxlanClaim("192.0.2.1")
	other.BackendType = "host-gw"
	acquire(t, m, other)
	if _, err := m.acquire(t.Context(), before, cfg, vxlanClaim("192.0.2.1")); err != nil {
		t.Fatal(err)
	}
	f.expectNotes(t, "node1", map[string]string{"backend-type": "vxlan"})
}
