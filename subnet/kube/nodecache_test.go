// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

// newNode returns a Node. created is the time of its creation, in seconds since 1970, and also its
// uid as text.
func newNode(name string, created int) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(strconv.Itoa(created)), CreationTimestamp: metav1.Unix(int64(created), 0), Annotations: map[string]string{},
	}}
}

// randomStore changes Nodes at random, sends the events to a cache, and applies the cache's updates
// to two ledgers.
type randomStore struct {
	t          *testing.T
	rnd        *rand.Rand
	d          *wire.Decoder
	v          *nodeCache
	nodes      map[string]*corev1.Node
	revision   int
	uids       int
	byChange   subnet.Ledger // applies the changes in updates
	bySnapshot subnet.Ledger // applies the snapshots in updates
}

func (w *randomStore) sink(u subnet.Update) {
	if _, ok := w.byChange.Follow(u, time.Now()); !ok {
		w.byChange.Apply(u.Snapshot(), time.Now())
	}
	w.bySnapshot.Apply(u.Snapshot(), time.Now())
}

// event sends an event to the cache, as a watch does.
func (w *randomStore) event(kind string, n *corev1.Node) {
	w.revision++
	n.ResourceVersion = strconv.Itoa(w.revision)
	name, err := w.v.advance(wiretest.DecodeEvent(w.t, w.d, kind, n))
	if err != nil {
		w.t.Fatal(err)
	}
	w.v.publish(w.t.Context(), name, w.sink)
}

// answer requests the Nodes whose podCIDRs the cache does not know, and passes the answers to the
// cache.
func (w *randomStore) answer() {
	for _, name := range w.v.missing() {
		got := &nodeRequest{names: []string{name}, found: map[string]*ownNode{}}
		if n := w.nodes[name]; n != nil {
			got.found[name] = newOwnNode(wiretest.Decode(w.t, w.d, n, false))
		}
		w.v.applyAnswer(got)
		w.v.publish(w.t.Context(), name, w.sink)
	}
}

func (w *randomStore) step() {
	name := fmt.Sprintf("n%d", w.rnd.IntN(8))
	n := w.nodes[name]
	pick := func(of ...string) string { return of[w.rnd.IntN(len(of))] }
	switch {
	case n == nil:
		w.uids++
		n = newNode(name, w.uids)
		w.nodes[name] = n
		if w.rnd.IntN(2) == 0 {
			n.Annotations = map[string]string{annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1"}
		}
		w.event(wire.Added, n)
	case w.rnd.IntN(6) == 0:
		delete(w.nodes, name)
		w.event(wire.Deleted, n)
	case w.rnd.IntN(3) == 0 && len(n.Spec.PodCIDRs) == 0:
		n.Spec.PodCIDRs = []string{fmt.Sprintf("10.5.%d.0/24", w.uids%256), fmt.Sprintf("fd00:5:0:%x::/64", w.uids)}[:1+w.rnd.IntN(2)]
		w.event(wire.Modified, n)
	default:
		key := pick("kube-subnet-manager", "public-ip", "public-ipv6", "backend-data", "backend-type", "other")
		if value := pick("true", "192.0.2.1", "192.0.2.2", "2001:db8::1", "{}", "{", ""); value == "" {
			delete(n.Annotations, annotationKey(key))
		} else {
			n.Annotations[annotationKey(key)] = value
		}
		w.event(wire.Modified, n)
	}
	if w.rnd.IntN(3) > 0 {
		w.answer()
	}
}

// TestChangesAndSnapshotsAgree makes 5,000 random changes, and applies the updates to two ledgers:
// one by their changes and one by their snapshots. It compares the ledgers after each change, and
// in the end also with the Nodes.
//
//stages:rest it compares the ledgers after each of 5,000 changes
func TestChangesAndSnapshotsAgree(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := &randomStore{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), d: newDecoder(), nodes: map[string]*corev1.Node{}}
	w.v = &nodeCache{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}, store: subnet.StoreID{ID: "s"}, standing: current}
	w.sink(w.v.update(nil))
	same := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	for i := range 5000 {
		w.step()
		if diff := cmp.Diff(w.bySnapshot.State().Peers, w.byChange.State().Peers, same); diff != "" {
			t.Fatalf("step %d: the ledgers differ (-by snapshot +by change):\n%s", i, diff)
		}
	}
	w.answer()
	for _, p := range w.bySnapshot.State().Peers {
		n := w.nodes[p.Lease.Key]
		if n == nil || p.Lease.Key == "n0" || p.Lease.Order != uint64(n.CreationTimestamp.Unix()) || !slices.Contains(n.Spec.PodCIDRs, p.Lease.Endpoints[0].Subnet.String()) {
			t.Errorf("peer %+v of node %+v", p.Lease, n)
		}
	}
	for name, n := range w.nodes {
		good := n.Annotations[annotationKey("kube-subnet-manager")] == "true" && n.Annotations[annotationKey("public-ip")] == "192.0.2.1" &&
			n.Annotations[annotationKey("backend-data")] == "" && len(n.Spec.PodCIDRs) > 0 && name != "n0"
		if good && w.bySnapshot.Lease(name) == nil {
			t.Errorf("no peer for node %+v", n)
		}
	}
}

// TestNodesDoNotFillTheLog makes a Node wrong and right again, as its host can do 300 times a second.
func TestNodesDoNotFillTheLog(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	cache := newNodeCache(Config{}, nil)
	e := &entry{name: "n1"}
	for range 2 * loglimit.Many {
		e.err = errors.New("wrong")
		cache.logUnreadable(ctx, e)
		e.err = nil
		cache.logUnreadable(ctx, e)
	}
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(log, "n1"); n != loglimit.Many {
		t.Errorf("%d lines, want %d", n, loglimit.Many)
	}
}

// TestReplacedNodeCanBeRead lists a readable Node in the place of an unreadable one with its name. The log must say
// that the Node can be read again.
func TestReplacedNodeCanBeRead(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	cache := newNodeCache(Config{}, defaultKeys())
	cache.entries = map[string]*entry{"n1": {name: "n1", uid: "former", err: errors.New("wrong")}}
	cache.logUnreadable(ctx, cache.entries["n1"])
	next := cache.successor()
	n := newNode("n1", 1)
	if next.put(wiretest.Decode(t, newDecoder(), n, false), true, cache) {
		t.Errorf("a Node with uid %q counts as the former one", n.UID)
	}
	next.logUnreadable(ctx, next.entries["n1"])
	if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); !strings.Contains(log, "can be read again") {
		t.Errorf("the log is\n%s", log)
	}
}

// TestUnusablePodCIDRsOfUnmanagedNode expects that podCIDRs that cannot be used are a problem only while flannel
// manages the Node, also after the audit has corrected the entry.
func TestUnusablePodCIDRsOfUnmanagedNode(t *testing.T) {
	d := newDecoder()
	cache := &nodeCache{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}}
	n := newNode("n1", 1)
	n.Spec.PodCIDRs = []string{"10.5.1.0/24", "10.5.2.0/24", "10.5.3.0/24"}
	cache.put(wiretest.Decode(t, d, n, false), true, &nodeCache{})
	for _, managed := range []string{"", "true", "", "true"} {
		cache.store.Revision++
		n.ResourceVersion, n.Annotations[annotationKey("kube-subnet-manager")] = strconv.FormatInt(cache.store.Revision, 10), managed
		if _, err := cache.advance(wiretest.DecodeEvent(t, d, wire.Modified, n)); err != nil {
			t.Fatal(err)
		}
		listed := cache.successor()
		listed.put(wiretest.Decode(t, d, n, true), false, cache)
		for when, problem := range map[string]string{"after the event": cache.entries["n1"].problem(), "after the audit": listed.entries["n1"].problem()} {
			if (problem != "") != (managed == "true") {
				t.Errorf("%s, managed is %q: problem %q", when, managed, problem)
			}
		}
	}
}

// TestHeartbeatsAllocateNothing expects that an event that does not change a lease costs the cache
// no allocation, because there are hundreds of such events in a second.
func TestHeartbeatsAllocateNothing(t *testing.T) {
	d := newDecoder()
	cache := &nodeCache{keys: defaultKeys(), entries: map[string]*entry{}}
	n := newNode("node-4711", 1)
	n.ResourceVersion, n.Spec.PodCIDRs = "5", []string{"10.5.1.0/24"}
	n.Annotations = map[string]string{
		annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1", annotationKey("backend-type"): "vxlan",
		annotationKey("backend-data"): `{"VtepMAC":"02:00:00:00:00:01"}`, "volumes.kubernetes.io/controller-managed-attach-detach": "true",
	}
	cache.put(wiretest.Decode(t, d, n, false), true, &nodeCache{})
	cache.publishAll(t.Context(), func(subnet.Update) {})
	n.ResourceVersion = "1000000"
	heartbeat := wiretest.DecodeEvent(t, d, wire.Modified, n)
	allocs := testing.AllocsPerRun(1000, func() {
		if name, err := cache.advance(heartbeat); name != "" || err != nil {
			t.Fatalf("%q has changed, %v", name, err)
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for a heartbeat", allocs)
	}
	if cache.store.Revision != 1000000 {
		t.Errorf("the cache is at %d", cache.store.Revision)
	}
}

// TestRequiredRevision checks how new a list must be.
func TestRequiredRevision(t *testing.T) {
	for _, tt := range []struct {
		name             string
		cache, node, now int64 // revisions of the cache, of this host's Node, and of the store
		server           serverCache
		want             int64
	}{
		{"nothing is known", 0, 0, 7, upToDate, 7},
		{"the cache is later", 5, 3, 7, upToDate, 5},
		{"the Node is later", 3, 5, 7, upToDate, 5},
		{"the store is not later", 5, 7, 7, upToDate, 7},
		{"the server's cache is behind", 3, 5, 7, behind, 5},
		{"the last watch was stale", 3, 5, 7, stale, 0},
		{"the last watch was stale, nothing is known", 0, 0, 7, stale, 0},
		{"a restored store", 9, 5, 7, upToDate, 0},
	} {
		c := &nodeCache{store: subnet.StoreID{Revision: tt.cache}, server: tt.server}
		if got := c.required(&ownNode{version: tt.node, revision: tt.now}); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

// TestClaimed changes Nodes. The first list does not say when a lease was written. A lease that differs from it, or
// comes later, was written at the revision of its Node.
func TestClaimed(t *testing.T) {
	d := newDecoder()
	managed := func(name, cidr string) *corev1.Node {
		n := newNode(name, 1)
		n.Spec.PodCIDRs = []string{cidr}
		n.Annotations = map[string]string{annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1"}
		return n
	}
	first, second := managed("n1", "10.5.1.0/24"), managed("n2", "10.5.2.0/24")
	cache := &nodeCache{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}}
	claimed := func(what, name string, want uint64) {
		t.Helper()
		if l := cache.entries[name].lease; l == nil || l.Claimed != want {
			t.Errorf("%s: the lease is %+v, want it written at %d", what, l, want)
		}
	}
	event := func(kind string, n *corev1.Node, revision string) {
		t.Helper()
		n.ResourceVersion = revision
		if _, err := cache.advance(wiretest.DecodeEvent(t, d, kind, n)); err != nil {
			t.Fatal(err)
		}
	}
	list := func(n *corev1.Node, revision string) {
		n.ResourceVersion = revision
		old := cache
		cache = old.successor()
		cache.put(wiretest.Decode(t, d, n, false), true, old)
	}

	list(first, "5")
	claimed("the first list", "n1", 0)
	cache.standing = current
	event(wire.Modified, first, "8")
	claimed("a heartbeat", "n1", 0)
	first.Annotations[annotationKey("public-ip")] = "192.0.2.9"
	event(wire.Modified, first, "9")
	claimed("another address", "n1", 9)
	event(wire.Added, second, "10")
	cache.applyAnswer(&nodeRequest{names: []string{"n2"}, found: map[string]*ownNode{"n2": newOwnNode(wiretest.Decode(t, d, second, false))}})
	claimed("a new Node", "n2", 10)
	list(first, "11")
	claimed("another list", "n1", 9)
	first.Annotations[annotationKey("public-ip")] = "192.0.2.8"
	list(first, "12")
	claimed("another address in another list", "n1", 12)
}

// TestCompleteCache fills a cache from a list, which shows the state of the server's cache and the identity of the store.
func TestCompleteCache(t *testing.T) {
	for _, tt := range []struct {
		name         string
		before       serverCache
		behind, same bool
		former       string // id of the store of the former cache
		want         serverCache
		store        string
	}{
		{"up to date", upToDate, false, true, "s", upToDate, "s"},
		{"the list came from the store", upToDate, true, true, "s", behind, "s"},
		{"no longer behind", behind, false, true, "s", upToDate, "s"},
		{"only an event ends a stale watch", stale, false, true, "s", stale, "s"},
		{"stale, and the list came from the store", stale, true, true, "s", stale, "s"},
		{"other Nodes", upToDate, false, false, "s", upToDate, "uid"},
		{"no store was known", upToDate, false, true, "", upToDate, "uid"},
	} {
		old := &nodeCache{server: tt.before, store: subnet.StoreID{ID: tt.former, Revision: 3}}
		c := old.successor()
		c.complete("n1", listing{wire.ListMeta{Revision: 7}, tt.behind}, &ownNode{uid: "uid"}, old, tt.same)
		if want := (subnet.StoreID{ID: tt.store, Revision: 7}); c.server != tt.want || c.store != want || c.standing != current || c.own != "n1" {
			t.Errorf("%s: %+v, want server %d, store %v", tt.name, c, tt.want, want)
		}
	}
}

// TestIsNode tells a Node from a later one with its name, by the uid, or by the age if the uid is not known.
func TestIsNode(t *testing.T) {
	n := &wire.Node{UID: []byte("u"), Created: 5}
	for _, tt := range []struct {
		e    entry
		want bool
	}{
		{entry{uid: "u", order: 5}, true}, {entry{uid: "other", order: 5}, false}, {entry{uid: "u", order: 4}, true},
		{entry{order: 5}, true}, {entry{order: 4}, false},
	} {
		if got := tt.e.isNode(n); got != tt.want {
			t.Errorf("%+v is the Node: %v, want %v", tt.e, got, tt.want)
		}
	}
}
