// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/flanneld/flanneld/subnet"
)

// TestReadyBeforeTheSubnet makes the network ready, from the last known state, while this host's Node has no podCIDR
// yet. Acquire must go on waiting for one, with few requests.
func TestReadyBeforeTheSubnet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scriptedHost{
			T: t, start: time.Now(), nodes: map[string]*corev1.Node{}, watches: map[*watcher]bool{},
			config: filepath.Join(t.TempDir(), "net-conf.json"),
		}
		s.write(`{"Network":"10.5.0.0/16"}`)
		s.node("n1", nil)
		ready := make(chan struct{})
		m, err := New(Config{APIURL: "http://api", NodeName: "n1", NetConfig: s.config, Ready: ready})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		m.client.http = &http.Client{Transport: s}
		cfg, err := m.Config(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		time.AfterFunc(100*time.Millisecond, func() { close(ready) })
		if _, err := m.Acquire(ctx, cfg, subnet.Claim{}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire returns %v, want the end of its context", err)
		}
		if n := strings.Count(s.String(), "watch from"); n > 2 {
			t.Errorf("%d watches, want one before the network is ready, and one after that:\n%s", n, s.String())
		}
	})
}
