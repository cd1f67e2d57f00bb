// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
)

// TestDaemons checks that FindDaemons finds the running pods on all pages of a list, and that Get
// reads from one of them and follows no redirect. The API server is a fake one. TestKubeMesh in
// test/e2e uses a real API server.
func TestDaemons(t *testing.T) {
	var leaked atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { leaked.Store(true) }))
	defer other.Close()
	const pod = `{"metadata":{"name":%q%s},"spec":{"nodeName":%q},"status":{"phase":%q}}`
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		const pods = "/api/v1/namespaces/net/pods"
		switch q := r.URL.Query(); r.URL.Path {
		case pods:
			if q.Get("labelSelector") != "app=flannel" {
				t.Errorf("the selector is %q", q.Get("labelSelector"))
			}
			if q.Get("continue") == "" {
				fmt.Fprintf(w, `{"metadata":{"continue":"2"},"items":[`+pod+`,`+pod+`]}`, "new", "", "node1", "Running", "waiting", "", "node2", "Pending")
			} else {
				fmt.Fprintf(w, `{"items":[`+pod+`,`+pod+`,`+pod+`]}`, "old", `,"deletionTimestamp":"2026-01-01T00:00:00Z"`, "node1", "Running", "evicted", "", "node1", "Failed", "evil", "", "node3", "Running")
			}
		case pods + "/new:8287/proxy/statusz.json":
			fmt.Fprintf(w, "paths=%s", q.Get("paths"))
		case pods + "/evil:8287/proxy/statusz.json":
			http.Redirect(w, r, other.URL, http.StatusFound)
		default:
			http.NotFound(w, r)
		}
	}))
	defer api.Close()
	d, err := FindDaemons(t.Context(), Config{APIURL: api.URL}, "net", "app=flannel")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, tc := range []struct{ node, answer, err string }{
		{"node1", "paths=all", ""},
		{"node2", "", "there is no running pod of flanneld on it in namespace net"},
		{"node3", "", "302"},
		{"node4", "", "there is no running pod of flanneld on it in namespace net"},
	} {
		var body []byte
		answer, err := d.Get(t.Context(), tc.node, 8287, "statusz.json", url.Values{"paths": {"all"}})
		if err == nil {
			body, err = io.ReadAll(answer)
			_ = answer.Close()
		}
		if string(body) != tc.answer || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %q, %v; want %q, %q", tc.node, body, err, tc.answer, tc.err)
		}
	}
	if leaked.Load() {
		t.Error("a redirect was followed")
	}
}
