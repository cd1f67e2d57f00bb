// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestTokenRunsOut checks that a lease is renewed although the token has expired since its last
// use, and although etcd has lost the token in a restart.
//
//stages:rest it needs an older etcd, which takes minutes to build
func TestTokenRunsOut(t *testing.T) {
	programs := etcdReleases(t)
	for _, release := range slices.Sorted(maps.Keys(programs)) {
		t.Run(release, func(t *testing.T) {
			t.Parallel()
			testTokenRunsOut(t, programs[release])
		})
	}
}

func testTokenRunsOut(t *testing.T, program string) {
	const leaseTTL = 15 * time.Second // the lease is renewed after at most 5 s, when the token has expired
	f := newFixture(t, newServer(t, func(s *server) { s.program, s.tokenTTL = program, 1 }))
	f.put(t, "config", configV4)
	enableAuth(t, f)
	renewed := make(chan subnet.Lease, 100)
	m := f.manager(t, withTTL(leaseTTL), func(c *Config) {
		c.Username, c.Password = "flannel", "secret"
		c.OnLease = func(l subnet.Lease) { renewed <- l }
	})
	// No probes, so that only the requests of renewals use the token.
	m.timing.quiet, m.timing.idle = time.Hour, time.Hour
	own := acquire(t, m, claim("192.0.2.1"))
	waittest.Receive(t, patience, "the lease", renewed)
	k := startKeep(t, m, own)
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	key := f.prefix + "/subnets/" + own.Key
	lease := func() clientv3.LeaseID {
		t.Helper()
		resp, err := f.root(t).Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) != 1 {
			t.Fatal("this host's lease is gone")
		}
		return clientv3.LeaseID(resp.Kvs[0].Lease)
	}
	had := lease()
	renewal := func(why string) {
		t.Helper()
		select {
		case <-renewed:
		case <-time.After(leaseTTL):
			t.Fatalf("no renewal %s", why)
		}
	}
	renewal("after the login has run out")
	renewal("after the login has run out again")
	f.stop()
	f.start(t)
	for len(renewed) > 0 {
		<-renewed
	}
	renewal("after a restart")
	if now := lease(); now != had {
		t.Errorf("the key is on etcd lease %x, was on %x", now, had)
	}
	for n := range 2 {
		peer := fmt.Sprintf("10.5.%d.0-24", 200+n)
		if _, err := f.root(t).Put(t.Context(), f.prefix+"/subnets/"+peer, leaseValue(fmt.Sprintf("192.0.2.%d", 200+n))); err != nil {
			t.Fatal(err)
		}
		w.Until(t, "a peer after the restart", func(s subnet.Snapshot) bool { return len(s.Leases) == n+1 })
	}
	k.stillRuns(t)
}

// TestLoginsAfterRestart restarts an etcd, which then does not know the tokens of the hosts any
// more. Each host may log in only once after that.
//
//stages:rest it needs older etcds, which take minutes to build
func TestLoginsAfterRestart(t *testing.T) {
	const hosts = 40
	s := newServer(t, func(s *server) { s.program, s.bcrypt = etcdReleases(t)["3.5"], 8 })
	f := newFixture(t, s)
	f.put(t, "config", configV4)
	enableAuth(t, f)
	root := func(key, value string) {
		t.Helper()
		if _, err := f.root(t).Put(t.Context(), f.prefix+"/subnets/"+key, value); err != nil {
			t.Fatal(err)
		}
	}
	var watchers []*subnettest.Watcher
	var keepers []keeper
	for n := range hosts {
		m := f.manager(t, func(c *Config) { c.Username, c.Password = "flannel", "secret" })
		m.timing.spread = 10 * time.Millisecond
		m.timing.login = defaultTiming().login // a host whose login takes longer begins another one
		own := acquire(t, m, claim(fmt.Sprintf("192.0.2.%d", n+1)))
		keepers = append(keepers, startKeep(t, m, own))
		w := subnettest.Watch(t, m)
		w.Until(t, "the others", func(s subnet.Snapshot) bool { return len(s.Leases) == n })
		watchers = append(watchers, w)
	}
	f.stop()
	f.start(t)
	root("10.77.0.0-24", leaseValue("192.0.2.200"))
	for i, w := range watchers {
		w.Until(t, fmt.Sprintf("a peer after the restart, by host %d", i+1), func(s subnet.Snapshot) bool { return len(s.Leases) == hosts })
		keepers[i].stillRuns(t)
	}
	if n := countLogins(t, s); n > hosts+1 {
		t.Errorf("%d logins of %d hosts, and one of the test", n, hosts)
	}
}

// countLogins returns the number of logins that an etcd has handled since its start.
func countLogins(tb testing.TB, s *server) (n int) {
	tb.Helper()
	req, err := http.NewRequestWithContext(tb.Context(), http.MethodGet, s.url+"/metrics", http.NoBody)
	if err != nil {
		tb.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), `grpc_server_started_total{grpc_method="Authenticate"`) {
			fields := strings.Fields(lines.Text())
			if n, err = strconv.Atoi(fields[len(fields)-1]); err != nil {
				tb.Fatal(err)
			}
		}
	}
	if err := lines.Err(); err != nil {
		tb.Fatal(err)
	}
	return n
}

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
