// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// fill puts the given number of reservations, with values of the usual size.
func (f *fixture) fill(tb testing.TB, leases int) {
	tb.Helper()
	for first := 0; first < leases; first += 100 {
		var ops []clientv3.Op
		for n := first; n < min(first+100, leases); n++ {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s/subnets/10.%d.%d.0-24", f.prefix, n/256, n%256),
				strings.TrimSuffix(leaseValue(fmt.Sprintf("192.0.%d.%d", n/256, n%256)), "}")+strings.Repeat(" ", 250)+"}"))
		}
		if _, err := f.kv.Txn(tb.Context()).Then(ops...).Commit(); err != nil {
			tb.Fatal(err)
		}
	}
}

// TestListByPages checks that a list of several pages has each lease once, sorted by key.
func TestListByPages(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	for _, leases := range []int{0, 1, pageSize - 1, pageSize, pageSize + 1, 2*pageSize + 1} {
		f.fill(t, leases)
		l, err := m.list(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(l.entries) != leases {
			t.Errorf("%d leases are listed, want %d", len(l.entries), leases)
		}
		for i, e := range l.entries {
			if i > 0 && l.entries[i-1].key >= e.key {
				t.Errorf("%s is listed after %s", e.key, l.entries[i-1].key)
			}
			if e.err != nil || len(e.subnets) != 1 || e.modRevision > l.store.Revision {
				t.Fatalf("listed at revision %d: %+v", l.store.Revision, e)
			}
		}
	}
}

// TestListAtOneRevision deletes a lease of the second page and adds one after the first page was read. The
// list must be that of the first page's revision.
func TestListAtOneRevision(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	f.fill(t, 2*pageSize)
	last, added := fmt.Sprintf("10.%d.%d.0-24", (2*pageSize-1)/256, (2*pageSize-1)%256), "10.255.1.0-24"
	change := sync.OnceFunc(func() {
		f.delete(t, "subnets/"+last)
		f.put(t, "subnets/"+added, leaseValue("192.0.2.1"))
	})
	m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			defer change()
			return invoke(ctx, method, req, reply, cc, opts...)
		}))
	l, err := m.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	has := func(key string) bool {
		return slices.ContainsFunc(l.entries, func(e *entry) bool { return e.key == key })
	}
	if n := len(l.entries); n != 2*pageSize || !has(last) || has(added) {
		t.Errorf("%d leases are listed, the deleted one: %v, the added one: %v; want %d, true, false", n, has(last), has(added), 2*pageSize)
	}
}

// TestSlowLink makes two hosts list at once over one slow link. The lists must succeed although
// they take longer than the deadline of a request.
//
//stages:rest it waits for transfers on a slow link
func TestSlowLink(t *testing.T) {
	const leases, hosts, deadline = 3 * pageSize, 2, 4 * time.Second
	f := newFixture(t, newServer(t))
	f.fill(t, leases)
	p := newProxy(t, f.server)
	p.rate = 400_000
	start := time.Now()
	var watchers []*subnettest.Watcher
	for range hosts {
		m := f.manager(t, throughProxy(p))
		m.timing.request, m.timing.page = deadline, deadline
		watchers = append(watchers, subnettest.Watch(t, m))
	}
	for _, w := range watchers {
		w.Until(t, "all leases", func(s subnet.Snapshot) bool { return len(s.Leases) == leases })
	}
	if d := time.Since(start); d < deadline {
		t.Errorf("the lists took %s: the link is no slow one", d)
	}
}

// TestListTakesTurns expects that list waits for a random time (see turn) before it reads the second
// page, but only if the last small request was slow. A slow request shows that the store is
// overloaded, and the waits spread the pages of many hosts over time.
func TestListTakesTurns(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.fill(t, pageSize+1)
	m := f.manager(t)
	m.timing.spread = time.Hour // for each lease, so that the turn does not come in the time of the test
	for slow, limit := range map[time.Duration]time.Duration{time.Hour: patience, time.Nanosecond: time.Second} {
		m.timing.slow = slow
		if _, err := m.Config(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := m.list(ctx)
		cancel()
		if waits := errors.Is(err, context.DeadlineExceeded); waits != (slow == time.Nanosecond) {
			t.Errorf("a list when a request takes longer than %s: %v", slow, err)
		}
	}
}

// TestStartListsOnce starts a node that has no last known state. Choosing the interface, choosing the
// subnet and the watch need all leases each, and one list is sufficient for the three.
func TestStartListsOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configSmall)
	f.populate(t, 1000)
	p := newProxy(t, f.server)
	m := f.manager(t, throughProxy(p))
	recall := func(own subnet.Claim) {
		t.Helper()
		if _, err := m.Recall(t.Context(), own); err != nil {
			t.Fatal(err)
		}
	}

	recall(subnet.Claim{})
	list := p.sent.Load()
	own := claim("192.0.2.1")
	recall(own)
	acquire(t, m, own)
	(&restartableNode{f: f}).watchUntilCurrent(t, m, subnet.LedgerState{})

	if sent := p.sent.Load(); sent > list*3/2 {
		t.Errorf("the start received %d bytes, %d of them until the first list had arrived: it listed again", sent, list)
	}
}
