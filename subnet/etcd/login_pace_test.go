// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// TestLoginWithoutTokenIsPaced has a member that says "auth is not enabled" beside one that refuses requests without a token.
func TestLoginWithoutTokenIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logins := 0
		l := &login{
			authenticate: func() (string, error) { logins++; return "", nil },
			turn:         func(context.Context) error { return nil },
			retry:        &wait.Backoff{Least: time.Second, Most: time.Second},
		}
		start := time.Now()
		for range 100 {
			token, err := l.get(t.Context(), t.Context())
			if err != nil {
				t.Fatal(err)
			}
			l.observe(token, rpctypes.ErrUserEmpty)
		}
		if took := time.Since(start); took < 30*time.Second {
			t.Errorf("%d logins in %v", logins, took)
		}
	})
}
