// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// logBook collects log lines.
type logBook struct {
	mu  sync.Mutex
	all []string
}

func (b *logBook) lines() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.all)
}

// withLog returns a context whose logger writes to the returned logBook.
func withLog(ctx context.Context) (context.Context, *logBook) {
	b := &logBook{}
	logger := funcr.New(func(_, args string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all = append(b.all, strings.TrimPrefix(args, `"level"=0 `))
	}, funcr.Options{})
	return klog.NewContext(ctx, logger), b
}

// statuses collects the arguments of OnStatus.
type statuses struct {
	mu  sync.Mutex
	all []error
}

func (s *statuses) add(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, err)
}

func (s *statuses) list() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

func (s *statuses) last() (known bool, err error) {
	all := s.list()
	if len(all) == 0 {
		return false, nil
	}
	return true, all[len(all)-1]
}

func (s *statuses) option(c *Config) { c.OnStatus = s.add }

func TestGarbage(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	good := leaseValue("192.0.2.7")
	f.put(t, "subnets/10.5.7.0-24", good)
	f.put(t, "subnets/10.5.8.0-24", good)
	w := subnettest.Watch(t, f.manager(t))
	w.Until(t, "two peers", subnettest.Has("10.5.7.0-24", "10.5.8.0-24"))

	bad := map[string]string{
		"garbage": "x", "10.5.1.0-24x": good, "nested/10.5.1.0-24": good, "": good, strings.Repeat("k", 500): good,
		"10.5.2.0-24": "{", "10.5.3.0-24": "null", "10.5.4.0-24": `{"PublicIP":null}`, "10.5.5.0-24": strings.Repeat("x", 1<<20),
		"10.5.8.0-24": "",
	}
	var keys []string
	for key, v := range bad {
		f.put(t, "subnets/"+key, v)
		keys = append(keys, key)
	}
	slices.Sort(keys)
	f.put(t, "subnetsX/10.5.99.0-24", good)
	f.put(t, "subnets/10.5.9.0-24", leaseValue("192.0.2.9"))
	all := func(s subnet.Snapshot) bool {
		return slices.Equal(s.Undecodable, keys) && subnettest.Has("10.5.7.0-24", "10.5.9.0-24")(s)
	}
	w.Until(t, "the good and the bad", all)
	for _, s := range w.All() {
		if !slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Key == "10.5.7.0-24" }) {
			t.Errorf("a snapshot lacks a good peer: %+v", s)
		}
	}
	late := subnettest.Watch(t, f.manager(t))
	late.Until(t, "the good and the bad", all)
	f.put(t, "subnets/10.5.8.0-24", good)
	w.Until(t, "a lease readable again", subnettest.Has("10.5.7.0-24", "10.5.8.0-24", "10.5.9.0-24"))
}

func TestGarbageIsLoggedOnce(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	m := f.manager(t, throughProxy(p))
	ctx, book := withLog(t.Context())
	ctx, cancel := context.WithCancel(ctx)
	begun, done := make(chan struct{}), make(chan error)
	begin := sync.OnceFunc(func() { close(begun) })
	go func() { done <- m.Watch(ctx, func(subnet.Update) { begin() }) }()
	logged := func(text string) {
		t.Helper()
		waittest.Until(t, patience, "a line with "+text, func() bool {
			return slices.ContainsFunc(book.lines(), func(line string) bool { return strings.Contains(line, text) })
		})
	}
	waittest.Receive(t, patience, "the first list", begun)
	for range 3 {
		f.put(t, "subnets/10.5.1.0-24", strings.Repeat("x", 1<<20))
	}
	f.put(t, "subnets/"+strings.Repeat("k", 500), "")
	logged("is not a subnet key")
	p.cut()
	compact(t, f, f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2")))
	p.open(t)
	logged("usable again")
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	logged("can be read again")
	cancel()
	waittest.Receive(t, patience, "the end of Watch", done)
	long := strings.Repeat("k", 64) + "…"
	want := []string{
		`"msg"="lease cannot be read and keeps its last good state" "error"="value has 1048576 bytes (at most 65536 are read)" "key"="10.5.1.0-24"`,
		`"msg"="lease cannot be read and keeps its last good state" "error"="\"` + long +
			`\" is not a subnet key (want for example 10.5.1.0-24 or 10.5.1.0-24&fd00:0:0:1::-64)" "key"="` + long + `"`,
		"etcd is not usable, retrying", "etcd is usable again",
		`"level"=0 "msg"="lease can be read again" "key"="10.5.1.0-24"`,
	}
	got := book.lines()
	if len(got) != len(want) {
		t.Fatalf("got %d lines, want %d:\n%s", len(got), len(want), strings.Join(got, "\n"))
	}
	for i := range want {
		if !strings.Contains(`"level"=0 `+got[i], want[i]) {
			t.Errorf("line %d is\n%s, want\n%s", i, got[i], want[i])
		}
	}
}

func compact(tb testing.TB, f *fixture, revision int64) {
	tb.Helper()
	if _, err := f.kv.Compact(tb.Context(), revision, clientv3.WithCompactPhysical()); err != nil {
		tb.Fatal(err)
	}
}

// TestOutages makes the connection fail in several ways while leases are created, changed and
// deleted. In half of the cases the missed revisions are compacted. When the connection works
// again, the watch must publish the changes, and must not take the store for another one.
func TestOutages(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"cut", "stalled"} {
		for _, compacted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, compacted %v", how, compacted), func(t *testing.T) {
				f := newFixture(t, newServer(t))
				f.put(t, "config", configV4)
				p := newProxy(t, f.server)
				var status statuses
				f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 60))
				f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"), f.grant(t, 60))
				w := subnettest.Watch(t, f.manager(t, throughProxy(p), status.option))
				w.Until(t, "two peers", subnettest.Has("10.5.1.0-24", "10.5.2.0-24"))
				waittest.Until(t, patience, "status up", func() bool { known, err := status.last(); return known && err == nil })
				before := len(w.All())
				if how == "cut" {
					p.cut()
				} else {
					p.stall()
				}
				waittest.Until(t, patience, "status down", func() bool { _, err := status.last(); return err != nil })
				f.delete(t, "subnets/10.5.1.0-24")
				f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.22"))
				last := f.put(t, "subnets/10.5.3.0-24", leaseValue("192.0.2.3"))
				if compacted {
					compact(t, f, last)
				}
				if n := len(w.All()); n != before {
					t.Errorf("%d snapshots while the store was away", n-before)
				}
				p.cut()
				p.open(t)
				s := w.Until(t, "what happened meanwhile", func(s subnet.Snapshot) bool {
					return subnettest.Has("10.5.2.0-24", "10.5.3.0-24")(s) && s.Leases[0].Endpoints[0].PublicIP.String() == "192.0.2.22"
				})
				if slices.ContainsFunc(w.All(), func(s subnet.Snapshot) bool { return s.Another }) {
					t.Error("the store is taken for another one")
				}
				if s.Store.Revision < last {
					t.Errorf("snapshot is of revision %d, want at least %d", s.Store.Revision, last)
				}
				waittest.Until(t, patience, "status up", func() bool { _, err := status.last(); return err == nil })
				checkTransitions(t, status.list())
			})
		}
	}
}

func checkTransitions(t *testing.T, all []error) {
	t.Helper()
	if len(all) > 5 {
		t.Errorf("status changed %d times: %v", len(all), all)
	}
	for i, err := range all {
		if i > 0 && err == nil && all[i-1] == nil {
			t.Errorf("reported twice that the store is usable: %v", all)
		}
	}
}

// TestIdleWatchStaysUp expects that a watch without events stays up while it is probed many times,
// and publishes nothing after the first snapshot. The test needs a server of its own. On a shared
// server, leases of other tests expire and raise the revision, and the watch publishes that.
func TestIdleWatchStaysUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	var status statuses
	m := f.manager(t, status.option)
	m.timing.quiet, m.timing.probeAnswer = 50*time.Millisecond, 2*time.Second
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	start := time.Now()
	waittest.Until(t, patience, "longer than idle and grace", func() bool { return time.Since(start) > 3*time.Second })
	if all := status.list(); len(all) != 1 || all[0] != nil {
		t.Errorf("status was %v, want up and nothing else", all)
	}
	if n := len(w.All()); n != 1 {
		t.Errorf("%d snapshots, want 1", n)
	}
}

func TestStoreWiped(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	for n := range 20 {
		f.put(t, "subnets/10.5.1.0-24", leaseValue(fmt.Sprintf("192.0.2.%d", n+1)))
	}
	w := subnettest.Watch(t, f.manager(t))
	before := w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	f.wipe(t)
	after := w.Until(t, "no peer", subnettest.Has())
	if after.Store.ID == before.Store.ID && after.Store.Revision >= before.Store.Revision {
		t.Errorf("store is %+v, was %+v: that does not show that it was wiped", after.Store, before.Store)
	}
	var ledger subnet.Ledger
	ledger.Apply(before, time.Now())
	ledger.Apply(after, time.Now())
	if held := ledger.Held(); !slices.Equal(held, []string{"10.5.1.0-24"}) {
		t.Errorf("held are %v", held)
	}
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"))
	w.Until(t, "what the new store gets", subnettest.Has("10.5.2.0-24"))
}

// TestStoreWipedAndUsedOutOfSight empties a store during an outage, and then writes to it until its
// revision is higher than before. The manager cannot recognize the new store by a lower revision,
// but must notice that it is another one, and report that in one snapshot.
func TestStoreWipedAndUsedOutOfSight(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		had, has  []string
		compacted bool
	}{
		"another lease":            {had: []string{"10.5.1.0-24"}, has: []string{"10.5.2.0-24"}},
		"one in place of another":  {had: []string{"10.5.1.0-24", "10.5.2.0-24"}, has: []string{"10.5.3.0-24", "10.5.2.0-24"}},
		"leases taken again":       {had: []string{"10.5.1.0-24", "10.5.2.0-24"}, has: []string{"10.5.2.0-24", "10.5.1.0-24"}},
		"one that came after that": {had: []string{"10.5.1.0-24"}, has: []string{"10.5.1.0-24", "10.5.2.0-24"}},
		"none any more":            {had: []string{"10.5.1.0-24"}},
		"one where there was none": {has: []string{"10.5.1.0-24"}},
		"its past compacted":       {had: []string{"10.5.1.0-24"}, has: []string{"10.5.2.0-24"}, compacted: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, newServer(t))
			put := func(keys []string) {
				for _, key := range keys {
					f.put(t, "subnets/"+key, leaseValue("192.0.2."+strings.Split(key, ".")[2]), f.grant(t, 60))
				}
			}
			put(tc.had)
			for range 3 {
				f.put(t, "other", "")
			}
			p := newProxy(t, f.server)
			w := subnettest.Watch(t, f.manager(t, throughProxy(p)))
			before := w.Until(t, "the peers", subnettest.Has(tc.had...))
			p.cut()
			f.wipe(t)
			put(tc.has)
			head := int64(0)
			for head <= before.Store.Revision {
				head = f.put(t, "other", "")
			}
			if tc.compacted {
				compact(t, f, head)
			}
			p.open(t)
			has := slices.Sorted(slices.Values(tc.has))
			after := w.Until(t, "what the new store has", func(s subnet.Snapshot) bool { return s.Another && subnettest.Has(has...)(s) })
			var ledger subnet.Ledger
			ledger.Apply(before, time.Now())
			ledger.Apply(after, time.Now())
			for _, key := range tc.had {
				if ledger.Lease(key) == nil {
					t.Errorf("%s is a peer no more", key)
				}
			}
			f.put(t, "subnets/10.5.4.0-24", leaseValue("192.0.2.104"))
			w.Until(t, "a peer that comes later", func(s subnet.Snapshot) bool { return !s.Another && subnettest.Has(append(has, "10.5.4.0-24")...)(s) })
		})
	}
}

// TestGracePeriodAfterAnOutage expects that a grace period begins after a long outage, and lasts while another
// store replaces the first one. Its end is an update.
func TestGracePeriodAfterAnOutage(t *testing.T) {
	t.Parallel()
	const margin = 50 * time.Millisecond
	f := newFixture(t, newServer(t))
	for n := range 20 {
		f.put(t, "subnets/10.5.1.0-24", leaseValue(fmt.Sprintf("192.0.2.%d", n+1)))
	}
	p := newProxy(t, f.server)
	m := f.manager(t, throughProxy(p), func(c *Config) { c.RenewMargin = margin })
	m.timing.gracePeriod, m.timing.dead, m.timing.idle = 3*time.Second, time.Millisecond, 100*time.Millisecond
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	p.cut()
	cut := time.Now()
	f.delete(t, "subnets/10.5.1.0-24")
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.102"))
	waittest.Until(t, patience, "longer than the margin", func() bool { return time.Since(cut) > 2*margin })
	p.open(t)
	during := func(want ...string) func(subnet.Snapshot) bool {
		return func(s subnet.Snapshot) bool { return time.Now().Before(s.Grace) && subnettest.Has(want...)(s) }
	}
	w.Until(t, "the other lease in the grace period", during("10.5.2.0-24"))
	f.wipe(t)
	w.Until(t, "no lease in the grace period", during())
	f.put(t, "subnets/10.5.7.0-24", leaseValue("192.0.2.107"))
	w.Until(t, "what the new store gets", subnettest.Has("10.5.7.0-24"))
	w.Until(t, "the end of the grace period", func(s subnet.Snapshot) bool { return s.Grace.IsZero() && subnettest.Has("10.5.7.0-24")(s) })
}

func TestStoreRestarted(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 60))
	w := subnettest.Watch(t, f.manager(t))
	w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	f.stop()
	f.start(t)
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"))
	w.Until(t, "a new peer", subnettest.Has("10.5.1.0-24", "10.5.2.0-24"))
	for _, s := range w.All() {
		if len(s.Leases) == 0 || s.Another {
			t.Errorf("a snapshot lacks the peer, or is said to be of another store: %+v", s)
		}
	}
}

func TestOwnDualSiblingIsAPeer(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	l := acquire(t, m, claim("192.0.2.1"))
	f.put(t, "subnets/"+l.Key+"&fd00::-64", `{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::9"}`)
	w := subnettest.Watch(t, m)
	w.Until(t, "the sibling and not ourselves", subnettest.Has(l.Key+"&fd00::-64"))
}

func TestCancelWhileUnreachable(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	p.stall()
	m := f.manager(t, throughProxy(p))
	l := subnet.Lease{Key: "10.5.1.0-24", Endpoints: claim("192.0.2.1").Endpoints}
	cfg, err := subnet.ParseConfig([]byte(configV4))
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(context.Context) error{
		"Config":  func(ctx context.Context) error { _, err := m.Config(ctx); return err },
		"Recall":  func(ctx context.Context) error { _, err := m.Recall(ctx, claim("192.0.2.1")); return err },
		"Acquire": func(ctx context.Context) error { _, err := m.Acquire(ctx, cfg, claim("192.0.2.1")); return err },
		"Keep":    func(ctx context.Context) error { return m.Keep(ctx, l) },
		"Watch":   func(ctx context.Context) error { return m.Watch(ctx, func(subnet.Update) {}) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		start := time.Now()
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 2*time.Second {
			t.Errorf("%s: returned %v after %s", name, err, time.Since(start))
		}
		cancel()
	}
}

// TestDeadConnection expects that the pings of gRPC, which cost the store nothing, detect a dead
// connection. The interval between the probes of follow is too long for them to detect it.
func TestDeadConnection(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	p := newProxy(t, f.server)
	var status statuses
	m := f.manager(t, throughProxy(p), status.option)
	m.timing.quiet = time.Hour
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	p.stall()
	waittest.Until(t, patience, "status down", func() bool { _, err := status.last(); return err != nil })
	p.cut()
	p.open(t)
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"))
	w.Until(t, "a peer that came meanwhile", subnettest.Has("10.5.1.0-24", "10.5.2.0-24"))
}

// TestSilence watches a store that sends nothing for so long that leases could have expired. Then
// the store deletes a lease. If a host notices a dead connection sooner than that, there was no
// outage. Otherwise there may have been one, and the deletion comes in a grace period.
func TestSilence(t *testing.T) {
	const margin = 50 * time.Millisecond
	t.Run("noticed", func(t *testing.T) {
		f, w := watchSilentStore(t, margin, margin/2)
		f.delete(t, "subnets/10.5.1.0-24")
		w.Until(t, "no peer", func(s subnet.Snapshot) bool { return s.Grace.IsZero() && subnettest.Has()(s) })
	})
	t.Run("unnoticed", func(t *testing.T) {
		f, w := watchSilentStore(t, margin, time.Hour)
		f.delete(t, "subnets/10.5.1.0-24")
		w.Until(t, "no peer in a grace period", func(s subnet.Snapshot) bool { return time.Now().Before(s.Grace) && subnettest.Has()(s) })
	})
}

// watchSilentStore watches a store with one peer, and returns when the store has sent nothing for
// twice the time margin, the RenewMargin of leases. dead is the time after which a host notices a
// dead connection.
func watchSilentStore(t *testing.T, margin, dead time.Duration) (*fixture, *subnettest.Watcher) {
	t.Helper()
	f := newFixture(t, sharedServer(t))
	reported := make(chan string, 10)
	m := f.manager(t, func(c *Config) {
		c.RenewMargin = margin
		c.OnConfig = func(text []byte) { reported <- string(text) }
	})
	m.timing.quiet, m.timing.gracePeriod, m.timing.dead = time.Hour, time.Hour, dead
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("10.5.1.0-24"))
	// The watches of leases and of the configuration must both have sent an event. Before that,
	// more responses to their beginning may come.
	config := func(want string) {
		t.Helper()
		timeout := time.After(patience)
		for {
			select {
			case got := <-reported:
				if got == want {
					return
				}
			case <-timeout:
				t.Fatalf("configuration %q was not reported", want)
			}
		}
	}
	config("") // it was read once, when the watch began
	f.put(t, "config", configV4)
	config(configV4)
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	w.Until(t, "the peer again", subnettest.Has("10.5.1.0-24"))
	start := time.Now()
	waittest.Until(t, patience, "longer than the margin", func() bool { return time.Since(start) > 2*margin })
	return f, w
}

// TestQuietViewIsNotCompacted writes other keys to an etcd and compacts it while no lease changes.
// The answers to probes must keep the revision of the cache up to date, so that a host whose
// connection breaks after that needs no full list. etcd 3.4.23 is an exception: it answers probes
// before it has sent all events, so the cache ignores its answers, and the host may need a list.
//
//stages:rest it needs older etcds, which take minutes to build
func TestQuietViewIsNotCompacted(t *testing.T) {
	programs := etcdReleases(t)
	for _, release := range slices.Sorted(maps.Keys(programs)) {
		t.Run(release, func(t *testing.T) {
			f := newFixture(t, newServer(t, func(s *server) { s.program = programs[release] }))
			f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 60))
			p := newProxy(t, f.server)
			m := f.manager(t, throughProxy(p))
			m.timing.quiet = 50 * time.Millisecond
			var lists, reached atomic.Int64 // reached is the revision of the cache
			reported := make(chan int, 100)
			ctx, cancel := contextWithCancel(t)
			done := make(chan error)
			go func() {
				done <- m.Watch(ctx, func(u subnet.Update) {
					if u.Changed == nil {
						lists.Add(1)
					}
					now := u.Snapshot()
					reached.Store(now.Store.Revision)
					reported <- len(now.Leases)
				})
			}()
			until := func(leases int) {
				t.Helper()
				waittest.Until(t, patience, fmt.Sprintf("%d leases", leases), func() bool {
					select {
					case n := <-reported:
						return n == leases
					default:
						return false
					}
				})
			}
			until(1)
			head := int64(0)
			for range 5 {
				head = f.put(t, "other", "")
			}
			start := time.Now()
			waittest.Until(t, patience, "the cache at the present revision", func() bool {
				if release == "3.4" {
					return time.Since(start) > 20*m.timing.quiet // time for many probes
				}
				return reached.Load() >= head
			})
			p.cut()
			compact(t, f, head)
			f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"), f.grant(t, 60))
			p.open(t)
			until(2)
			want := int64(1)
			if release == "3.4" {
				want = 2
			}
			if n := lists.Load(); n > want {
				t.Errorf("%d full lists, want at most %d", n, want)
			}
			cancel()
			waittest.Receive(t, patience, "the end of Watch", done)
		})
	}
}

// TestGarbageDoesNotFillTheLog makes a lease wrong and right again, as a host can do 300 times a second.
func TestGarbageDoesNotFillTheLog(t *testing.T) {
	m := newManager(Config{})
	ctx, book := withLog(t.Context())
	good, bad := &entry{key: "10.5.1.0-24"}, &entry{key: "10.5.1.0-24", err: errors.New("wrong")}
	problems := map[string]string{}
	for range 2 * loglimit.Many {
		m.logUndecodable(ctx, problems, bad)
		m.logUndecodable(ctx, problems, good)
	}
	if n := len(book.lines()); n != loglimit.Many {
		t.Errorf("%d lines, want %d", n, loglimit.Many)
	}
}

// TestNextWatchWaitsForItsTurn ends a watch, as a change of the configuration does on all hosts at once, and compacts the
// revision to which it has come. The next watch must not list all leases at the same moment as those of other hosts.
func TestNextWatchWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configSmall)
	f.populate(t, 3)
	m := f.manager(t)
	m.timing.spread = time.Hour // for each lease, so that the turn does not come in the time of the test
	first, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := m.Watch(first, func(subnet.Update) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Fatalf("the first watch publishes nothing: %v", err)
	}
	f.put(t, "subnets/10.5.9.0-28", leaseValue("192.0.2.9"), f.grant(t, 60))
	compact(t, f, f.put(t, "other", ""))
	updates := 0
	next, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = m.Watch(next, func(subnet.Update) { updates++ })
	if updates > 0 {
		t.Errorf("%d updates before the turn of this host, want none", updates)
	}
}

// TestGarbageIsLoggedOnceInSeveralWatches ends a watch, and starts another one, as a change of the configuration does.
// A lease that cannot be read must not be logged again, and if it can be read by then, that must be logged.
func TestGarbageIsLoggedOnceInSeveralWatches(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	ctx, book := withLog(t.Context())
	watch := func() {
		ctx, cancel := context.WithCancel(ctx)
		_ = m.Watch(ctx, func(subnet.Update) { cancel() })
	}
	for _, key := range []string{"subnets/10.5.1.0-24", "subnets/10.5.2.0-24"} {
		f.put(t, key, "{")
	}
	watch()
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"))
	watch()
	watch()
	waittest.Until(t, patience, "three lines", func() bool { return len(book.lines()) >= 3 })
	if got := book.lines(); len(got) != 3 {
		t.Errorf("got %d lines, want one for each of two leases and one for the lease that can be read:\n%s", len(got), strings.Join(got, "\n"))
	}
}
