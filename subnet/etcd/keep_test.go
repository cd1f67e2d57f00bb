// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func withPrefix() clientv3.OpOption { return clientv3.WithPrefix() }

func withTTL(d time.Duration) func(*Config) { return func(c *Config) { c.TTL = d } }

func throughProxy(p *proxy) func(*Config) { return func(c *Config) { c.Endpoints = []string{p.url()} } }

// TestRenewalWritesNothing keeps a lease for three times its TTL, and checks that a renewal does
// not write the key again.
func TestRenewalWritesNothing(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t, withTTL(2*time.Second))
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	_, lease, revision := f.get(t, "subnets/"+l.Key)
	start := time.Now()
	waittest.Until(t, patience, "three times the TTL", func() bool {
		v, leaseNow, now := f.get(t, "subnets/"+l.Key)
		if v != leaseValue("192.0.2.1") || now != revision || leaseNow != lease {
			t.Fatalf("after %s the key has %q at revision %d on etcd lease %x, was at %d on %x",
				time.Since(start), v, now, leaseNow, revision, lease)
		}
		return time.Since(start) > 6*time.Second
	})
	k.stillRuns(t)
}

func TestRenewalTime(t *testing.T) {
	start := time.Now()
	for _, tc := range []struct{ margin, ttl, want time.Duration }{
		{0, 24 * time.Hour, 23 * time.Hour},
		{time.Minute, 24 * time.Hour, 24*time.Hour - time.Minute},
		{1439 * time.Minute, 24 * time.Hour, time.Minute},
		{48 * time.Hour, 24 * time.Hour, time.Minute},
		{0, 30 * time.Second, 10 * time.Second},
	} {
		m, err := New(Config{Endpoints: []string{"http://127.0.0.1:1"}, RenewMargin: tc.margin})
		if err != nil {
			t.Fatal(err)
		}
		// Hosts that got their leases at the same time must not renew them at the same time.
		times := map[time.Duration]bool{}
		for range 10 {
			got := m.renewal(newGrant(1, start, tc.ttl)).Sub(start)
			times[got] = true
			if got > tc.want || got < tc.want*9/10 {
				t.Fatalf("margin %s of %s: renews after %s, want %s to %s", tc.margin, tc.ttl, got, tc.want*9/10, tc.want)
			}
		}
		if len(times) < 5 {
			t.Errorf("margin %s of %s: ten renewals at %d times", tc.margin, tc.ttl, len(times))
		}
	}
}

// TestRenewalAfterSuspend expects that a host which was suspended renews its lease by the wall
// clock, because the monotonic clock, which timers use, has stood still meanwhile.
func TestRenewalAfterSuspend(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	var slept atomic.Int64
	reported := make(chan subnet.Lease, 100)
	m := f.manager(t, func(c *Config) {
		c.OnLease = func(l subnet.Lease) {
			slept.Store(0)
			reported <- l
		}
	})
	m.wall = func() time.Time { return wall().Add(time.Duration(slept.Load())) }
	l := acquire(t, m, claim("192.0.2.1"))
	waittest.Receive(t, patience, "the lease", reported)
	_, _, revision := f.get(t, "subnets/"+l.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	clock := m.wall
	m.wall = func() time.Time {
		defer slept.Store(int64(23*time.Hour + 30*time.Minute)) // the host sleeps when the timer has been set
		return clock()
	}
	err := m.await(ctx, m.own, revision)
	m.wall = clock
	if err != nil {
		t.Errorf("a watch of the key that was up meanwhile ended with %v", err)
	}
	k := startKeep(t, m, l)
	select {
	case renewed := <-reported:
		if !renewed.Expires.After(l.Expires) {
			t.Errorf("expires %s, before %s", renewed.Expires, l.Expires)
		}
	case <-time.After(patience):
		t.Error("not renewed")
	}
	k.stillRuns(t)
}

// TestRenewalWithTheClockSetBack expects that a renewal comes no later if the wall clock is set
// back.
func TestRenewalWithTheClockSetBack(t *testing.T) {
	m, err := New(Config{Endpoints: []string{"http://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	m.wall = func() time.Time { return wall().Add(-5 * time.Hour) }
	g := newGrant(1, time.Now(), 24*time.Hour)
	g.early = 0 // at the latest
	if left := m.untilRenewal(g); left > 23*time.Hour {
		t.Errorf("renews after %s", left)
	}
}

func TestEtcdLeaseRevoked(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	_, lease, _ := f.get(t, "subnets/"+l.Key)
	if _, err := f.kv.Revoke(t.Context(), clientv3.LeaseID(lease)); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, patience, "the same subnet taken again on another etcd lease", func() bool {
		v, again, _ := f.get(t, "subnets/"+l.Key)
		return v == leaseValue("192.0.2.1") && again != lease && again != 0
	})
	k.stillRuns(t)
}

func TestOwnValueChanged(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	before := f.etcdLeases(t)
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	for _, changed := range []string{`{"PublicIP":"192.0.2.1","BackendType":"vxlan"}`, "{", "null", strings.Repeat("x", 1<<20)} {
		f.put(t, "subnets/"+l.Key, changed, f.grant(t, 60))
		waittest.Until(t, patience, "our value back", func() bool {
			v, lease, _ := f.get(t, "subnets/"+l.Key)
			return v == leaseValue("192.0.2.1") && lease != 0
		})
	}
	// A key that is written without an etcd lease is a reservation from then on.
	f.put(t, "subnets/"+l.Key, "{}", clientv3.WithLease(0))
	waittest.Until(t, patience, "our value back as a reservation", func() bool {
		v, lease, _ := f.get(t, "subnets/"+l.Key)
		return v == leaseValue("192.0.2.1") && lease == 0
	})
	// The number may be lower than before, because etcd leases of other tests expire meanwhile.
	waittest.Until(t, patience, "no etcd lease left", func() bool { return f.etcdLeases(t) <= before })
	f.delete(t, "subnets/"+l.Key)
	waittest.Until(t, patience, "the key back with an etcd lease", func() bool {
		v, lease, _ := f.get(t, "subnets/"+l.Key)
		return v == leaseValue("192.0.2.1") && lease != 0
	})
	k.stillRuns(t)
}

func TestOwnKeyTakenOver(t *testing.T) {
	for name, tc := range map[string]struct{ key, want string }{
		"the key itself":      {"", "subnet lease lost: %s now belongs to 192.0.2.9"},
		"as part of a larger": {"10.5.0.0-16", "subnet lease lost: %s now belongs to 192.0.2.9, as part of 10.5.0.0-16"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.put(t, "config", configV4)
			m := f.manager(t)
			l := acquire(t, m, claim("192.0.2.1"))
			k := startKeep(t, m, l)
			key := tc.key
			if key == "" {
				key = l.Key
			}
			f.put(t, "subnets/"+key, leaseValue("192.0.2.9"), f.grant(t, 60))
			if key != l.Key {
				f.delete(t, "subnets/"+l.Key)
			}
			err := k.waitUntilLost(t)
			if want := strings.ReplaceAll(tc.want, "%s", l.Key); err.Error() != want {
				t.Errorf("error is %q, want %q", err, want)
			}
			if v, _, _ := f.get(t, "subnets/"+key); v != leaseValue("192.0.2.9") {
				t.Errorf("the new owner's value is %s", v)
			}
		})
	}
}

// TestOwnKeyTakenOverAtTheSameRevision empties the store, so that revisions start again. Another
// node then writes this host's key at the revision that it had before. Keep must notice that the subnet
// is lost.
func TestOwnKeyTakenOverAtTheSameRevision(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	p := newProxy(t, f.server)
	m := f.manager(t, throughProxy(p))
	l := acquire(t, m, claim("192.0.2.1"))
	_, _, had := f.get(t, "subnets/"+l.Key)
	k := startKeep(t, m, l)
	p.cut()
	f.wipe(t)
	for f.put(t, "config", configV4) < had-1 {
	}
	if now := f.put(t, "subnets/"+l.Key, leaseValue("192.0.2.9"), f.grant(t, 60)); now != had {
		t.Fatalf("it stands at revision %d, want %d", now, had)
	}
	p.open(t)
	if err := k.waitUntilLost(t); !strings.Contains(err.Error(), "now belongs to 192.0.2.9") {
		t.Errorf("error is %v", err)
	}
	if v, _, _ := f.get(t, "subnets/"+l.Key); v != leaseValue("192.0.2.9") {
		t.Errorf("the new owner's value is %s", v)
	}
}

// TestAwayPastTTL lets the lease expire while the host cannot reach the store. The host must take
// the same subnet again, unless another host has taken it.
func TestAwayPastTTL(t *testing.T) {
	for _, taken := range []bool{false, true} {
		t.Run(fmt.Sprintf("taken %v", taken), func(t *testing.T) { testAwayPastTTL(t, taken) })
	}
}

func testAwayPastTTL(t *testing.T, taken bool) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	p := newProxy(t, f.server)
	m := f.manager(t, withTTL(time.Second), throughProxy(p))
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	p.cut()
	waittest.Until(t, patience, "the lease to run out", func() bool {
		v, _, _ := f.get(t, "subnets/"+l.Key)
		return v == ""
	})
	k.stillRuns(t)
	if !taken {
		p.open(t)
		waittest.Until(t, patience, "the same subnet taken again", func() bool {
			v, _, _ := f.get(t, "subnets/"+l.Key)
			return v == leaseValue("192.0.2.1")
		})
		k.stillRuns(t)
		return
	}
	f.put(t, "subnets/"+l.Key, leaseValue("192.0.2.9"), f.grant(t, 60))
	p.open(t)
	_ = k.waitUntilLost(t)
	if v, _, _ := f.get(t, "subnets/"+l.Key); v != leaseValue("192.0.2.9") {
		t.Errorf("the new owner's value is %s", v)
	}
}

// TestTwoOfOneAddress runs two hosts with one public address, which overwrite each other's lease.
// They must pause between their writes.
func TestTwoOfOneAddress(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	a, b := f.manager(t), f.manager(t)
	ca, cb := claim("192.0.2.1"), claim("192.0.2.1")
	ca.BackendType, cb.BackendType = "one", "other"
	l := acquire(t, a, ca)
	_ = acquire(t, b, cb)
	_, _, before := f.get(t, "subnets/"+l.Key)
	ka, kb := startKeep(t, a, l), startKeep(t, b, l)
	start := time.Now()
	waittest.Until(t, patience, "two seconds", func() bool { return time.Since(start) > 2*time.Second })
	ka.stillRuns(t)
	kb.stillRuns(t)
	// The pauses of each host grow from 10 to 100 ms here.
	if _, _, after := f.get(t, "subnets/"+l.Key); after-before > 120 {
		t.Errorf("key was written %d times in 2 s", after-before)
	}
}

// TestStoreWipedUnderKeep empties the store while Keep runs. Keep must create this host's key again, so
// that others see the lease.
func TestStoreWipedUnderKeep(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	f.wipe(t)
	waittest.Until(t, patience, "our lease in the new store", func() bool {
		v, lease, _ := f.get(t, "subnets/"+l.Key)
		return v == leaseValue("192.0.2.1") && lease != 0
	})
	k.stillRuns(t)
	w := subnettest.Watch(t, f.manager(t))
	w.Until(t, "our lease", subnettest.Has(l.Key))
}

// TestReconnect closes the connection while Keep and Watch use it. Both must continue, no change
// may be lost, and no outage may be reported.
func TestReconnect(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t, withTTL(2*time.Second), func(c *Config) {
		c.OnStatus = func(err error) {
			if err != nil {
				t.Error(err)
			}
		}
	})
	l := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, l)
	w := subnettest.Watch(t, m)
	for i := range 5 {
		key := fmt.Sprintf("subnets/10.5.%d.0-24", 200+i)
		f.put(t, key, leaseValue(fmt.Sprintf("192.0.2.%d", 200+i)))
		w.Until(t, key, func(s subnet.Snapshot) bool { return len(s.Leases) == i+1 })
		m.Reconnect()
	}
	f.delete(t, "subnets/"+l.Key)
	waittest.Until(t, patience, "own lease is taken again", func() bool {
		v, _, _ := f.get(t, "subnets/"+l.Key)
		return v == leaseValue("192.0.2.1")
	})
	k.stillRuns(t)
}
