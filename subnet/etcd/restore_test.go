// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// restartableNode is a node that keeps its ledger and its own lease across restarts, like the
// daemon.
type restartableNode struct {
	f      *fixture
	ledger subnet.Ledger
	own    subnet.Lease
}

// startedTwice returns a node with one peer, and the state that it has stored after a restart.
func startedTwice(t *testing.T) (*restartableNode, subnet.LedgerState) {
	t.Helper()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"), f.grant(t, 60))
	k := &restartableNode{f: f}
	k.restart(t, "", nil)
	k.restart(t, "", nil)
	return k, k.savedState(t)
}

// savedState returns the state of the ledger in the form in which it is read from a state file.
func (k *restartableNode) savedState(tb testing.TB) (state subnet.LedgerState) {
	tb.Helper()
	raw, err := json.Marshal(k.ledger.State())
	if err == nil {
		err = json.Unmarshal(raw, &state)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return state
}

// watchUntilCurrent restores the ledger from state, and runs Watch of m until the ledger has
// reached the present revision of the store. To know that revision it puts a lease of another node,
// 10.5.255.0-24. It returns the snapshot of the first update.
func (k *restartableNode) watchUntilCurrent(tb testing.TB, m *Manager, state subnet.LedgerState) (first subnet.Snapshot) {
	tb.Helper()
	k.ledger.Restore(state, time.Now())
	marker := k.f.put(tb, "subnets/10.5.255.0-24", leaseValue("192.0.2.255"), k.f.grant(tb, 60))
	ctx, cancel := context.WithTimeout(tb.Context(), endless)
	defer cancel()
	updates := 0
	err := m.Watch(ctx, func(u subnet.Update) {
		if updates++; updates == 1 {
			first = u.Snapshot()
		}
		if _, ok := k.ledger.Follow(u, time.Now()); !ok {
			k.ledger.Apply(u.Snapshot(), time.Now())
		}
		if u.Store.Revision >= marker {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		tb.Fatalf("Watch ended with %v", err)
	}
	return first
}

// restart runs the node again with its last known state. If change is not nil, it modifies that
// state before. If address is not empty, the node first acquires a lease with that public address.
// restart returns the manager, whose Watch has ended, and the snapshot of its first update.
func (k *restartableNode) restart(tb testing.TB, address string, change func(*subnet.LedgerState), options ...func(*Config)) (m *Manager, first subnet.Snapshot) {
	tb.Helper()
	state := k.savedState(tb)
	if change != nil {
		change(&state)
	}
	forManager := state
	forManager.Peers = slices.Clone(state.Peers)
	m = k.f.manager(tb, append(options, func(c *Config) { c.Own, c.Known = k.own, forManager })...)
	if address != "" {
		c, err := m.Recall(tb.Context(), claim(address))
		if err != nil {
			tb.Fatal(err)
		}
		if len(c.Endpoints) == 0 {
			c = claim(address)
		}
		c.BackendType, c.Endpoints[0].PublicIP = "host-gw", netip.MustParseAddr(address)
		k.own = acquire(tb, m, c)
	}
	return m, k.watchUntilCurrent(tb, m, state)
}

// known returns the leases in the ledger, by key, in a form that can be compared.
func (k *restartableNode) known() map[string]string {
	all := map[string]string{}
	for l := range k.ledger.Leases() {
		all[l.Key] = describe(*l)
	}
	return all
}

func describe(l subnet.Lease) string {
	s := fmt.Sprint(l.Order, l.BackendType, l.Permanent)
	for _, e := range l.Endpoints {
		s += fmt.Sprint(" ", e.Subnet, e.PublicIP, string(e.Data))
	}
	return s
}

// stored returns the leases of other nodes that the store has, in the form of known.
func (k *restartableNode) stored(tb testing.TB) map[string]string {
	tb.Helper()
	l, err := k.f.manager(tb).list(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	all := map[string]string{}
	for _, e := range l.entries {
		if e.key != k.own.Key && e.err == nil {
			all[e.key] = describe(e.lease)
		}
	}
	return all
}

// populate puts n leases on one etcd lease: 10.5.0.0-28, 10.5.0.16-28 and so on.
func (f *fixture) populate(tb testing.TB, n int) {
	tb.Helper()
	lease := f.grant(tb, 3600)
	for i := range n {
		v := fmt.Sprintf(`{"PublicIP":"172.16.%d.%d","PublicIPv6":null,"BackendType":"host-gw","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:%02x:%02x"}}`, i>>8, i&0xff, i>>8, i&0xff)
		f.put(tb, fmt.Sprintf("subnets/10.%d.%d.%d-28", 5+i>>12, i>>4&0xff, i&15<<4), v, lease)
	}
}

const configSmall = `{"Network":"10.0.0.0/12","SubnetLen":28,"Backend":{"Type":"host-gw"}}`

// TestRestartReceivesWhatHasChanged restarts a node that knows 300 leases. The node must know the
// present leases, and etcd must send at most a tenth of the bytes that it sends when a node starts
// with a list.
//
//stages:rest it needs older etcds, which take minutes to build
func TestRestartReceivesWhatHasChanged(t *testing.T) {
	const leases = 300
	programs := etcdReleases(t)
	for _, release := range slices.Sorted(maps.Keys(programs)) {
		for name, change := range map[string]func(*fixture, testing.TB){
			"nothing": func(*fixture, testing.TB) {},
			"a few leases": func(f *fixture, tb testing.TB) {
				f.delete(tb, "subnets/10.5.3.0-28")
				f.put(tb, "subnets/10.5.4.0-28", leaseValue("192.0.2.44"), f.grant(tb, 60))
				f.put(tb, "subnets/10.5.100.0-28", leaseValue("192.0.2.100"), f.grant(tb, 60))
				f.put(tb, "subnets/10.5.100.16-28", leaseValue("192.0.2.100"), f.grant(tb, 60))
				f.delete(tb, "subnets/10.5.100.16-28")
			},
			"other keys": func(f *fixture, tb testing.TB) {
				for range 30 {
					f.put(tb, "other", "x")
				}
			},
			"this host's lease": func(f *fixture, tb testing.TB) { f.delete(tb, "subnets/10.5.200.0-28") },
			"a lease that cannot be read": func(f *fixture, tb testing.TB) {
				f.put(tb, "subnets/10.5.4.0-28", "{", f.grant(tb, 60))
			},
		} {
			t.Run(release+", "+name, func(t *testing.T) {
				f := newFixture(t, newServer(t, func(s *server) { s.program = programs[release] }))
				f.put(t, "config", configSmall)
				f.populate(t, leases)
				k := &restartableNode{f: f}
				p := newProxy(t, f.server)
				k.restart(t, "192.0.2.1", nil, throughProxy(p), withPrevious("10.5.200.0/28"))
				list := p.sent.Load()
				f.put(t, "subnets/10.5.255.0-24", leaseValue("192.0.2.255"), f.grant(t, 60))
				k.restart(t, "192.0.2.1", nil)
				before := k.known()
				change(f, t)
				sent := p.sent.Load()
				_, first := k.restart(t, "192.0.2.1", nil, throughProxy(p), withPrevious("10.5.200.0/28"))
				sent = p.sent.Load() - sent
				if first.Another {
					t.Error("the store is taken for another one")
				}
				want := k.stored(t)
				if name == "a lease that cannot be read" {
					want["10.5.4.0-28"] = before["10.5.4.0-28"]
				}
				if diff := gocmp.Diff(want, k.known()); diff != "" {
					t.Errorf("leases (-store +known):\n%s", diff)
				}
				if k.own.Key != "10.5.200.0-28" {
					t.Errorf("this host's lease is %s", k.own.Key)
				}
				if sent > list/10 {
					t.Errorf("the store sent %d bytes, and %d for a start with a list: it was listed", sent, list)
				}
				t.Logf("%d bytes, %d with a list", sent, list)
			})
		}
	}
}

// TestRestartBytes checks that etcd sends less than 10 kB to a node that restarts in a network of
// 5,000 hosts.
//
//stages:rest it takes half a minute; TestSlowRestartListsNothing counts what a restart reads
func TestRestartBytes(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configSmall)
	f.populate(t, 5000)
	k := &restartableNode{f: f}
	p := newProxy(t, f.server)
	k.restart(t, "192.0.2.1", nil, throughProxy(p), withPrevious("10.15.253.0/28"))
	list := p.sent.Load()
	k.restart(t, "192.0.2.1", nil, throughProxy(p))
	start := time.Now()
	sent := p.sent.Load()
	k.restart(t, "192.0.2.1", nil, throughProxy(p))
	sent = p.sent.Load() - sent
	t.Logf("the store sent %d bytes in %s, %d for a start with a list", sent, time.Since(start), list)
	if sent >= 10_000 {
		t.Errorf("a restart takes %d bytes, want less than 10 kB", sent)
	}
	if n := len(k.known()); n != 5001 {
		t.Errorf("%d leases are known, want 5001", n)
	}
}

// TestRestartAtAnotherStore restarts a node whose last known state comes from another store, has a
// compacted revision, or is damaged. The node must know the leases of the store. If it takes the
// store for another one, it must hold the known leases that are missing from the store.
func TestRestartAtAnotherStore(t *testing.T) {
	t.Parallel()
	peers := func(f *fixture, tb testing.TB, n ...int) {
		for _, i := range n {
			f.put(tb, fmt.Sprintf("subnets/10.5.%d.0-24", i), leaseValue(fmt.Sprintf("192.0.2.%d", i)), f.grant(tb, 60))
		}
	}
	fill := func(f *fixture, tb testing.TB, revision int64) {
		for f.put(tb, "other", "") < revision+5 {
		}
	}
	for name, tc := range map[string]struct {
		store func(f *fixture, tb testing.TB, backup string, revision int64)
		state func(*subnet.LedgerState)
		held  bool // the node holds leases that are missing from the store, because it takes the store for another one
	}{
		"its revision is compacted": {store: func(f *fixture, tb testing.TB, _ string, _ int64) {
			f.delete(tb, "subnets/10.5.3.0-24")
			compact(tb, f, f.put(tb, "other", ""))
		}},
		"its revision is compacted, and all peers have left": {store: func(f *fixture, tb testing.TB, _ string, _ int64) {
			for i := 2; i <= 4; i++ {
				f.delete(tb, fmt.Sprintf("subnets/10.5.%d.0-24", i))
			}
			compact(tb, f, f.put(tb, "other", ""))
		}},
		"it was emptied": {held: true, store: func(f *fixture, tb testing.TB, _ string, _ int64) {
			f.wipe(tb)
			f.put(tb, "config", configV4)
			peers(f, tb, 4)
		}},
		"it was emptied and used since": {held: true, store: func(f *fixture, tb testing.TB, _ string, revision int64) {
			f.wipe(tb)
			f.put(tb, "config", configV4)
			peers(f, tb, 4)
			fill(f, tb, revision)
		}},
		"it was emptied, used since and compacted": {held: true, store: func(f *fixture, tb testing.TB, _ string, revision int64) {
			f.wipe(tb)
			f.put(tb, "config", configV4)
			fill(f, tb, revision)
			peers(f, tb, 4)
			compact(tb, f, f.put(tb, "other", ""))
		}},
		"it has another id": {held: true, store: func(f *fixture, tb testing.TB, _ string, revision int64) {
			f.peer = freeAddr(tb)
			f.wipe(tb)
			f.put(tb, "config", configV4)
			fill(f, tb, revision)
		}},
		"it was restored from a backup": {held: true, store: func(f *fixture, tb testing.TB, backup string, _ int64) { f.restore(tb, backup) }},
		"it was restored and used since": {held: true, store: func(f *fixture, tb testing.TB, backup string, revision int64) {
			f.restore(tb, backup)
			peers(f, tb, 5)
			fill(f, tb, revision)
		}},
		"the state has no mark":              {state: func(s *subnet.LedgerState) { s.Store.Mark = "" }},
		"the mark is damaged":                {state: func(s *subnet.LedgerState) { s.Store.Mark = "5 x" }},
		"the mark is of another state":       {held: true, state: func(s *subnet.LedgerState) { s.Store.Mark = "7 12 abc 10.5.3.0-24" }},
		"the state lacks a lease":            {state: func(s *subnet.LedgerState) { s.Peers = s.Peers[1:] }},
		"the state has a lease of elsewhere": {state: func(s *subnet.LedgerState) { s.Peers[0].Lease.Key = "10.6.1.0-24" }},
		"the state has no key of a subnet":   {state: func(s *subnet.LedgerState) { s.Peers[0].Lease.Key = "node1" }},
		"the state is of a later revision":   {held: true, state: func(s *subnet.LedgerState) { s.Store.Revision += 1000 }},
		"the state has no revision":          {state: func(s *subnet.LedgerState) { s.Store.Revision = 0 }},
		"the state is empty":                 {state: func(s *subnet.LedgerState) { *s = subnet.LedgerState{} }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, newServer(t))
			f.put(t, "config", configV4)
			peers(f, t, 2)
			backup := f.backup(t)
			peers(f, t, 3, 4)
			k := &restartableNode{f: f}
			k.restart(t, "192.0.2.1", nil, withPrevious("10.5.77.0/24"))
			k.restart(t, "192.0.2.1", nil)
			had := k.known()
			state := k.ledger.State()
			if tc.store != nil {
				tc.store(f, t, backup, state.Store.Revision)
			}
			k.restart(t, "192.0.2.1", tc.state)
			want := k.stored(t)
			if tc.held {
				for key, l := range had {
					want[key] = cmp.Or(want[key], l)
				}
			}
			if diff := gocmp.Diff(want, k.known()); diff != "" {
				t.Errorf("leases (-want +known):\n%s", diff)
			}
		})
	}
}

// TestRestartWithAFailedList restarts a node at a store that was emptied and used since, and whose
// first list fails. The node must still find out that the store is another one, and hold its peers.
func TestRestartWithAFailedList(t *testing.T) {
	for _, compacted := range []bool{false, true} {
		t.Run(fmt.Sprintf("compacted=%v", compacted), func(t *testing.T) {
			k, state := startedTwice(t)
			f := k.f
			f.wipe(t)
			f.put(t, "config", configV4)
			for f.put(t, "other", "") < state.Store.Revision+5 {
				continue
			}
			if compacted {
				compact(t, f, f.put(t, "other", ""))
			}

			m := f.manager(t, func(c *Config) { c.Known = state })
			page := m.timing.page
			m.timing.page = time.Nanosecond
			if _, err := m.leases(t.Context()); err == nil {
				t.Fatal("the list did not fail")
			}
			m.timing.page = page
			if first := k.watchUntilCurrent(t, m, state); !first.Another {
				t.Error("the store is taken for the one before")
			}
			if _, held := k.known()["10.5.2.0-24"]; !held {
				t.Errorf("the node knows %v, want the peer that the emptied store lacks too", k.known())
			}
		})
	}
}

// recognized returns a cache with the last known leases of m. The test fails if m does not
// recognize its store.
func recognized(t *testing.T, m *Manager) *leaseCache {
	t.Helper()
	cache, is, err := m.restore(t.Context(), m.cache.Load())
	if is != same || err != nil {
		t.Fatalf("the store is %v, want %v (%v)", is, same, err)
	}
	return cache
}

// TestRestartKnowsAllAtOnce restarts a node at servers that differ in what they say about the progress of a watch.
// The first update must have what has changed meanwhile.
func TestRestartKnowsAllAtOnce(t *testing.T) {
	t.Parallel()
	const old = "/usr/bin/etcd" // 3.4.23
	for name, server := range map[string]func(*testing.T) (direct, used *server){
		"etcd": func(t *testing.T) (direct, used *server) {
			direct = newServer(t)
			return direct, direct
		},
		"etcd 3.4.23": func(t *testing.T) (direct, used *server) {
			direct = newServer(t, func(s *server) { s.program = old })
			return direct, direct
		},
		"grpc-proxy": func(t *testing.T) (direct, used *server) {
			direct = newServer(t)
			return direct, startGRPCProxy(t, direct, old)
		},
	} {
		t.Run(name, func(t *testing.T) {
			direct, used := server(t)
			f := newFixture(t, direct)
			f.put(t, "config", configSmall)
			f.populate(t, 300)
			k := &restartableNode{f: f}
			k.restart(t, "", nil)
			state := k.savedState(t)
			for _, gone := range []string{"10.5.0.0-28", "10.5.3.16-28", "10.5.3.32-28", "10.5.255.0-24"} {
				f.delete(t, "subnets/"+gone)
			}
			f.put(t, "subnets/10.5.3.32-28", leaseValue("192.0.2.32"), f.grant(t, 60))
			f.put(t, "subnets/10.5.4.0-28", leaseValue("192.0.2.44"), f.grant(t, 60))
			f.put(t, "subnets/10.6.0.0-28", leaseValue("192.0.2.60"), f.grant(t, 60))
			f.put(t, "other", "")
			want := k.stored(t)

			f.server = used
			m := f.manager(t, func(c *Config) { c.Known = state })
			l, err := m.leases(t.Context())
			if restored := !m.cache.Load().auditAt.IsZero(); err != nil || !restored {
				t.Fatalf("the listing is the last known state: %v, want true (%v)", restored, err)
			}
			have := map[string]string{}
			for _, e := range l.entries {
				have[e.key] = describe(e.lease)
			}
			if diff := gocmp.Diff(want, have); diff != "" {
				t.Errorf("leases (-store +known):\n%s", diff)
			}
		})
	}
}

// TestChoiceNeedsAllLeases restarts a node whose lease is gone and whose former subnet belongs to
// another node by now. It must choose a subnet that is still free.
func TestChoiceNeedsAllLeases(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", `{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.3.0","Backend":{"Type":"host-gw"}}`)
	k := &restartableNode{f: f}
	k.restart(t, "192.0.2.1", nil, withPrevious("10.5.1.0/24"))
	state := k.savedState(t)
	f.delete(t, "subnets/"+k.own.Key)
	for _, n := range []string{"1", "2"} {
		f.put(t, "subnets/10.5."+n+".0-24", leaseValue("192.0.2.10"+n), f.grant(t, 60))
	}
	m := f.manager(t, withPrevious("10.5.1.0/24"), func(c *Config) { c.Own, c.Known = k.own, state })
	if l := acquire(t, m, claim("192.0.2.1")); l.Key != "10.5.3.0-24" {
		t.Errorf("the node has taken %s, want 10.5.3.0-24, the only free subnet", l.Key)
	}
}

// TestRevisionWaitsForAllEvents applies scripts of responses to a cache of revision 10, when the store is
// at revision 20. Each script ends with the response after which the cache must have reached that revision, and
// not before.
func TestRevisionWaitsForAllEvents(t *testing.T) {
	for name, tc := range map[string]struct {
		early  bool // the server answers probes before it has sent all events
		script string
		leases string // keys of the cache at the end, in the order of the script
	}{
		"the server says that it has sent all": {script: `
			created 25
			put a 12 of 12
			delete a 14 of 14
			put b 19 of 19
			answer 25`, leases: "b"},
		"the only change comes together with the revision": {script: `
			created 20
			put a 12 of 20`, leases: "a"},
		// A host that starts at the same time writes its lease, so that the cache never equals the
		// store of revision 20.
		"another change comes with the missing ones": {script: `
			created 20
			put a 12 21 of 21`, leases: "a"},
		"a later change comes after the missing ones": {script: `
			created 20
			put a 12 of 12
			put b 21 of 21`, leases: "a b"},
		"an early answer says nothing": {early: true, script: `
			created 20
			answer 20
			put a 12 of 12
			answer 22
			notification 20`, leases: "a"},
		"a full response is not the last one": {script: `
			created 9000
			full 10 of 9000
			put b 1500 of 9000`, leases: "b"},
		"the configuration says nothing about leases": {script: `
			created 20
			config 30 of 30
			answer 30`},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := New(Config{Endpoints: []string{"http://127.0.0.1:1"}, Prefix: "/n"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = m.Close() })
			head := int64(20)
			if strings.Contains(tc.script, "9000") {
				head = 1200
			}
			cache := &leaseCache{entries: map[string]*entry{}, problems: map[string]string{}, store: subnet.StoreID{ID: "1", Revision: 10}}
			s := &stream{answersEarly: tc.early}
			for line := range strings.SplitSeq(strings.TrimSpace(tc.script), "\n") {
				if cache.store.Revision >= head {
					t.Errorf("the cache has reached revision %d before %q", head, line)
				}
				resp := response(t, strings.Fields(line))
				confirmed := s.confirmed(resp)
				m.applyConfigEvents(cache, resp)
				if err := m.advance(t.Context(), cache, resp, confirmed, func(subnet.Update) {}); err != nil {
					t.Fatal(err)
				}
			}
			if cache.store.Revision < head {
				t.Errorf("the cache is at revision %d at the end of the script, want %d", cache.store.Revision, head)
			}
			for key := range strings.FieldsSeq(tc.leases) {
				if cache.entries[key] == nil {
					t.Errorf("the cache has no lease %s", key)
				}
			}
		})
	}
}

// response returns the response of etcd that a line of a script describes. The line has its kind, the
// key if it has events, their revisions, and the revision of the response.
func response(t *testing.T, line []string) *pb.WatchResponse {
	t.Helper()
	number := func(text string) int64 {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	resp := &pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 1, Revision: number(line[len(line)-1])}, WatchId: firstWatch}
	event := func(kind mvccpb.Event_EventType, key string, revision int64) {
		kv := &mvccpb.KeyValue{Key: []byte(key), ModRevision: revision, CreateRevision: revision, Value: []byte("{}")}
		resp.Events = append(resp.Events, &mvccpb.Event{Type: kind, Kv: kv})
	}
	switch line[0] {
	case "created":
		resp.Created = true
	case "answer":
		resp.WatchId = clientv3.InvalidWatchID
	case "put", "delete":
		kind := mvccpb.PUT
		if line[0] == "delete" {
			kind = mvccpb.DELETE
		}
		for _, revision := range line[2 : len(line)-2] {
			event(kind, "/n/subnets/"+line[1], number(revision))
		}
	case "config":
		resp.WatchId = firstWatch + 1
		event(mvccpb.PUT, "/n/config", number(line[1]))
	case "full":
		for i := range int64(mostRevisions) {
			event(mvccpb.PUT, "/n/subnets/full", number(line[1])+i)
		}
	}
	return resp
}

// TestSlowRestartListsNothing restarts a node with a store that is slow, as when all nodes restart
// at once. The store must send less than 30 kB, so not all leases, and the node must know all
// changes afterwards.
func TestSlowRestartListsNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configSmall)
	f.populate(t, 1000)
	k := &restartableNode{f: f}
	const address = "192.0.2.1"
	k.restart(t, address, nil, withPrevious("10.15.253.0/28"))
	k.restart(t, address, nil)
	fail := func(t *testing.T, m *Manager) {
		t.Helper()
		cfg, err := m.Config(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		pools, err := cfg.Pools()
		if err != nil {
			t.Fatal(err)
		}
		request := m.timing.request
		m.timing.request = time.Nanosecond
		if err := m.acquire(t.Context(), pools, claim(address)); !loglimit.Passes(err) {
			t.Fatalf("acquire returns %v, want an error of the store", err)
		}
		m.timing.request = request
	}
	age := func(m *Manager) {
		old := new(*m.cache.Load())
		old.read = old.read.Add(-2 * stashTime)
		m.cache.Store(old)
	}
	for name, tc := range map[string]struct{ beforeAcquire, beforeWatch func(*testing.T, *Manager) }{
		"a request gets no answer":              {beforeAcquire: fail},
		"two requests get no answer":            {beforeAcquire: func(t *testing.T, m *Manager) { fail(t, m); fail(t, m) }},
		"a request gets no answer for a minute": {beforeAcquire: func(t *testing.T, m *Manager) { fail(t, m); age(m) }},
		"the lease comes after minutes":         {beforeWatch: func(_ *testing.T, m *Manager) { age(m) }},
	} {
		t.Run(name, func(t *testing.T) {
			state := k.savedState(t)
			p := newProxy(t, f.server)
			m := f.manager(t, throughProxy(p), func(c *Config) { c.Own, c.Known = k.own, state })
			c, err := m.Recall(t.Context(), claim(address))
			if err != nil {
				t.Fatal(err)
			}
			if tc.beforeAcquire != nil {
				tc.beforeAcquire(t, m)
			}
			f.delete(t, "subnets/10.5.0.16-28")
			f.put(t, "subnets/10.5.0.32-28", leaseValue("192.0.2.32"), f.grant(t, 60))
			k.own = acquire(t, m, c)
			if tc.beforeWatch != nil {
				tc.beforeWatch(t, m)
			}
			k.watchUntilCurrent(t, m, state)
			if sent := p.sent.Load(); sent >= 30_000 {
				t.Errorf("the store sent %d bytes, want less than 30 kB", sent)
			}
			if diff := gocmp.Diff(k.stored(t), k.known()); diff != "" {
				t.Errorf("the node knows other leases than the store has (-store +node):\n%s", diff)
			}
		})
	}
}

// TestRestartBeforeTheLeaseWasKnown restarts a node whose last known state is older than its lease, as after a power cut
// soon after the first start. The node must recognize the store, and not list its leases.
func TestRestartBeforeTheLeaseWasKnown(t *testing.T) {
	t.Parallel()
	for _, peers := range []int{0, 300} {
		t.Run(fmt.Sprint(peers, " peers"), func(t *testing.T) {
			f := newFixture(t, newServer(t))
			f.put(t, "config", configSmall)
			f.populate(t, peers)
			l, err := f.manager(t).list(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			k := &restartableNode{f: f}
			k.ledger.Apply(new(leaseCache).successor(l, unknown).update(&self{}, nil).Snapshot(), time.Now())
			state := k.savedState(t)
			own := acquire(t, f.manager(t, withPrevious("10.5.200.0/28")), claim("192.0.2.1"))

			p := newProxy(t, f.server)
			m := f.manager(t, throughProxy(p), func(c *Config) { c.Own, c.Known = own, state })
			if found, err := m.Recall(t.Context(), claim("192.0.2.1")); err != nil || !slices.Equal(found.Subnets(), own.Subnets()) {
				t.Errorf("the node finds %v, want its lease %s (%v)", found, own.Key, err)
			}
			if m.cache.Load().another {
				t.Error("the store is taken for another one")
			}
			if sent := p.sent.Load(); sent > 5000 {
				t.Errorf("the store sent %d bytes: it was listed", sent)
			}
		})
	}
}

// TestRestartListsAfterAConflict checks that a node does not use its last known state again after
// the store has refused a lease that the node has chosen by that state.
func TestRestartListsAfterAConflict(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configSmall)
	f.populate(t, 20)
	k := &restartableNode{f: f}
	k.restart(t, "", nil)
	k.restart(t, "", nil)
	state := k.savedState(t)
	// The state is damaged: in place of a subnet that is taken it has another one.
	state.Peers = slices.Clone(state.Peers)
	i := slices.IndexFunc(state.Peers, func(p subnet.Peer) bool { return p.Lease.Key == "10.5.0.0-28" })
	damaged := state.Peers[i].Lease
	damaged.Key = "10.9.0.0-28"
	damaged.Endpoints = slices.Clone(damaged.Endpoints)
	damaged.Endpoints[0].Subnet = netip.MustParsePrefix("10.9.0.0/28")
	state.Peers[i].Lease = damaged
	m := f.manager(t, withPrevious("10.5.0.0/28"), func(c *Config) { c.Known = state })
	if l := acquire(t, m, claim("192.0.2.1")); l.Key == "10.5.0.0-28" {
		t.Error("the node has taken the subnet of another one")
	}
}

// TestRestartsComeToTheSame changes a store at random and restarts a node, many times. After each
// restart the node must know the leases of the store.
func TestRestartsComeToTheSame(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	k := &restartableNode{f: f}
	for step := range 40 {
		for range rnd.IntN(8) {
			key := fmt.Sprintf("subnets/10.5.%d.0-24", 1+rnd.IntN(12))
			switch rnd.IntN(8) {
			case 0, 1:
				f.delete(t, key)
			case 2:
				f.put(t, key, leaseValue(fmt.Sprintf("192.0.2.%d", 10+rnd.IntN(20)))) // a reservation
			case 3:
				f.put(t, "other", "")
			default:
				f.put(t, key, leaseValue(fmt.Sprintf("192.0.2.%d", 10+rnd.IntN(20))), f.grant(t, 60))
			}
		}
		if rnd.IntN(12) == 0 {
			compact(t, f, f.put(t, "other", ""))
		}
		address := ""
		if rnd.IntN(3) > 0 {
			address = "192.0.2.1"
		}
		m, _ := k.restart(t, address, nil, withPrevious("10.5.77.0/24"))
		if m.cache.Load().marked != 0 {
			t.Fatalf("step %d: the last known state was not used up", step)
		}
		want, have := k.stored(t), k.known()
		delete(have, k.own.Key) // without an address the node takes its own lease for that of a peer
		if diff := gocmp.Diff(want, have); diff != "" {
			t.Fatalf("step %d (-store +known):\n%s", step, diff)
		}
	}
}

// TestAudit starts from a last known state that differs from the store although its mark is right.
// The audit must correct it, report that once, and not touch leases that have changed since.
func TestAudit(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	for i := 2; i <= 9; i++ {
		f.put(t, fmt.Sprintf("subnets/10.5.%d.0-24", i), leaseValue(fmt.Sprintf("192.0.2.%d", i)), f.grant(t, 60))
	}
	k := &restartableNode{f: f}
	k.restart(t, "", nil)
	k.restart(t, "", nil)
	state := k.savedState(t)
	at := func(key string) *subnet.Peer {
		i := slices.IndexFunc(state.Peers, func(p subnet.Peer) bool { return p.Lease.Key == key })
		return &state.Peers[i]
	}
	at("10.5.2.0-24").Lease.Endpoints[0].PublicIP = netip.MustParseAddr("192.0.2.222")
	at("10.5.3.0-24").Lease.Order = 1
	moved := at("10.5.4.0-24")
	moved.Lease.Key, moved.Lease.Endpoints[0].Subnet = "10.5.44.0-24", netip.MustParsePrefix("10.5.44.0/24")
	at("10.5.5.0-24").Lease.Endpoints[0].PublicIP = netip.MustParseAddr("192.0.2.223") // this one also changes in the store

	ctx, book := withLog(t.Context())
	ctx, cancel := context.WithCancel(ctx)
	repaired := make(chan int, 10)
	m := f.manager(t, func(c *Config) {
		c.Known = state
		c.OnRepaired = func(n int) { repaired <- n }
	})
	m.timing.audit = 300 * time.Millisecond
	ledger := &subnet.Ledger{}
	ledger.Restore(state, time.Now())
	snaps := make(chan map[string]string, 100)
	done := make(chan error)
	go func() {
		done <- m.Watch(ctx, func(u subnet.Update) {
			if _, ok := ledger.Follow(u, time.Now()); !ok {
				ledger.Apply(u.Snapshot(), time.Now())
			}
			all := map[string]string{}
			for l := range ledger.Leases() {
				all[l.Key] = describe(*l)
			}
			snaps <- all
		})
	}()
	now := waittest.Receive(t, patience, "the first leases", snaps)
	if _, ok := now["10.5.44.0-24"]; !ok {
		t.Fatalf("the last known state was not used: %v", now)
	}
	f.put(t, "subnets/10.5.5.0-24", leaseValue("192.0.2.55"), f.grant(t, 60))
	f.put(t, "subnets/10.5.6.0-24", leaseValue("192.0.2.66"), f.grant(t, 60))
	f.delete(t, "subnets/10.5.7.0-24")
	want := k.stored(t)
	waittest.Until(t, patience, "the leases of the store", func() bool {
		select {
		case now = <-snaps:
		default:
		}
		return maps.Equal(now, want)
	})
	n := waittest.Receive(t, patience, "a report of the correction", repaired)
	f.put(t, "subnets/10.5.8.0-24", leaseValue("192.0.2.88"), f.grant(t, 60))
	want = k.stored(t)
	waittest.Until(t, patience, "a change after that", func() bool {
		select {
		case now = <-snaps:
		default:
		}
		return maps.Equal(now, want)
	})
	cancel()
	waittest.Receive(t, patience, "the end of Watch", done)
	if n < 4 || n > 5 || len(repaired) > 0 {
		t.Errorf("%d leases were corrected, and then %d times more, want 4 or 5 and none", n, len(repaired))
	}
	lines := slices.DeleteFunc(book.lines(), func(s string) bool { return !strings.Contains(s, "were corrected") })
	if len(lines) != 1 || !strings.Contains(lines[0], fmt.Sprintf(`"leases"=%d "first"="10.5.2.0-24"`, n)) {
		t.Errorf("log has %q, want one line about %d leases", lines, n)
	}
}

// deafServer is a proxy before an etcd that keeps back the events of the second key of a watch.
type deafServer struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	etcd *grpc.ClientConn
}

// Range implements pb.KVServer.
func (s deafServer) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return pb.NewKVClient(s.etcd).Range(ctx, r)
}

// Txn implements pb.KVServer.
func (s deafServer) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	return pb.NewKVClient(s.etcd).Txn(ctx, r)
}

// Watch implements pb.WatchServer.
func (s deafServer) Watch(down pb.Watch_WatchServer) error {
	up, err := pb.NewWatchClient(s.etcd).Watch(down.Context())
	if err != nil {
		return err
	}
	go func() {
		for r, err := down.Recv(); err == nil; r, err = down.Recv() {
			_ = up.Send(r)
		}
	}()
	for {
		resp, err := up.Recv()
		if err != nil {
			return err
		}
		if resp.WatchId != firstWatch && len(resp.Events) > 0 {
			continue
		}
		if err := down.Send(resp); err != nil {
			return err
		}
	}
}

// TestConfigDuringAudit ends a watch for the audit when it has brought a later lease, and not yet the configuration.
func TestConfigDuringAudit(t *testing.T) {
	k, state := startedTwice(t)
	f := k.f
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy := grpc.NewServer()
	deaf := deafServer{etcd: f.kv.ActiveConnection()}
	pb.RegisterKVServer(proxy, deaf)
	pb.RegisterWatchServer(proxy, deaf)
	go func() { _ = proxy.Serve(l) }()
	defer proxy.Stop()

	configs := make(chan string, 10)
	m := f.manager(t, func(c *Config) {
		c.Endpoints = []string{"http://" + l.Addr().String()}
		c.Known = state
		c.OnConfig = func(text []byte) { configs <- string(text) }
	})
	m.timing.audit = 2 * time.Second
	leases := subnettest.Watch(t, m)
	if got := waittest.Receive(t, patience, "the configuration", configs); got != configV4 {
		t.Fatalf("configuration is %s", got)
	}
	changed := strings.Replace(configV4, "{", `{"EnableNFTables":true,`, 1)
	f.put(t, "config", changed)
	f.put(t, "subnets/10.5.3.0-24", leaseValue("192.0.2.3"), f.grant(t, 60))
	leases.Until(t, "a later lease", func(s subnet.Snapshot) bool { return len(s.Leases) == 2 })
	if got := waittest.Receive(t, patience, "the changed configuration", configs); got != changed {
		t.Errorf("configuration is %s, want %s", got, changed)
	}
}

// TestAuditFindsNothing audits a true state whose JSON has another form. The audit must compare it
// with the store, and correct nothing.
func TestAuditFindsNothing(t *testing.T) {
	f := newFixture(t, newServer(t))
	for i := 2; i <= 4; i++ {
		v := fmt.Sprintf(`{"PublicIP":"192.0.2.%d", "PublicIPv6":null, "BackendData": { "b" : "<&>" , "a":1 } }`, i)
		f.put(t, fmt.Sprintf("subnets/10.5.%d.0-24", i), v, f.grant(t, 60))
	}
	k := &restartableNode{f: f}
	k.restart(t, "", nil)
	k.restart(t, "", nil)
	m := f.manager(t, func(c *Config) {
		c.Known = k.savedState(t)
		c.OnRepaired = func(n int) { t.Errorf("%d leases were corrected", n) }
	})
	cache := recognized(t, m)
	cache.auditAt = time.Now()
	m.audit(t.Context(), cache, func(u subnet.Update) { t.Errorf("the audit has published %+v", u) })
	if !cache.auditAt.IsZero() {
		t.Error("the cache was not compared with the store")
	}
}
