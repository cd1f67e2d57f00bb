// SPDX-License-Identifier: Apache-2.0

package kube

import (
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
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/subnet"
)

// walker changes Nodes at random, and tells a view of it.
type walker struct {
	t        *testing.T
	rnd      *rand.Rand
	d        *decoder
	v        *view
	nodes    map[string]*wireNode
	revision int
	uids     int
	hinted   subnet.Ledger // goes by what changed
	whole    subnet.Ledger // goes by snapshots
}

func (w *walker) sink(u subnet.Update) {
	if _, ok := w.hinted.Follow(u, time.Now()); !ok {
		w.hinted.Apply(u.Snapshot(), time.Now())
	}
	w.whole.Apply(u.Snapshot(), time.Now())
}

// tell gives the view an event, as the watch does.
func (w *walker) tell(kind string, n *wireNode) {
	w.revision++
	n.revision = strconv.Itoa(w.revision)
	var o object
	got, err := w.d.frame(wireFrame(kind, n.partial()), &o)
	if err != nil {
		w.t.Fatal(err)
	}
	name, err := w.v.advance(happened{got, &o})
	if err != nil {
		w.t.Fatal(err)
	}
	w.v.publish(w.t.Context(), name, w.sink)
}

// answer supplies what the view lacks, or not yet.
func (w *walker) answer() {
	for _, name := range w.v.missing() {
		got := fetched{asking{names: []string{name}}, map[string]*self{}}
		if n := w.nodes[name]; n != nil {
			var o object
			if err := w.d.node(n.full(), &o); err != nil {
				w.t.Fatal(err)
			}
			got.found[name] = newSelf(&o, 0)
		}
		w.v.supply(got)
		w.v.publish(w.t.Context(), name, w.sink)
	}
}

func (w *walker) step() {
	name := fmt.Sprintf("n%d", w.rnd.IntN(8))
	n := w.nodes[name]
	pick := func(of ...string) string { return of[w.rnd.IntN(len(of))] }
	switch {
	case n == nil:
		w.uids++
		n = &wireNode{name: name, uid: strconv.Itoa(w.uids), created: uint64(w.uids), annotations: map[string]string{}}
		w.nodes[name] = n
		if w.rnd.IntN(2) == 0 {
			n.annotations = map[string]string{anno("kube-subnet-manager"): "true", anno("public-ip"): "192.0.2.1"}
		}
		w.tell(added, n)
	case w.rnd.IntN(6) == 0:
		delete(w.nodes, name)
		w.tell(deleted, n)
	case w.rnd.IntN(3) == 0 && len(n.cidrs) == 0:
		n.cidrs = []string{fmt.Sprintf("10.5.%d.0/24", w.uids%256), fmt.Sprintf("fd00:5:0:%x::/64", w.uids)}[:1+w.rnd.IntN(2)]
		w.tell(modified, n)
	default:
		key := pick("kube-subnet-manager", "public-ip", "public-ipv6", "backend-data", "backend-type", "other")
		if value := pick("true", "192.0.2.1", "192.0.2.2", "2001:db8::1", "{}", "{", ""); value == "" {
			delete(n.annotations, anno(key))
		} else {
			n.annotations[anno(key)] = value
		}
		w.tell(modified, n)
	}
	if w.rnd.IntN(3) > 0 {
		w.answer()
	}
}

// TestHintsComeToTheSame follows thousands of random changes twice, by what
// changed and by the whole, and holds both against the Nodes in the end.
func TestHintsComeToTheSame(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := &walker{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), d: testDecoder(), nodes: map[string]*wireNode{}}
	w.v = &view{keys: &w.d.keys, own: "n0", entries: map[string]*entry{}, store: subnet.StoreID{ID: "s"}}
	w.sink(w.v.update(nil))
	same := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	for i := range 5000 {
		w.step()
		if diff := cmp.Diff(w.whole.State().Peers, w.hinted.State().Peers, same); diff != "" {
			t.Fatalf("step %d: by hints it differs (-whole +hinted):\n%s", i, diff)
		}
	}
	w.answer()
	for _, p := range w.whole.State().Peers {
		n := w.nodes[p.Lease.Key]
		if n == nil || p.Lease.Key == "n0" || p.Lease.Order != n.created || !slices.Contains(n.cidrs, p.Lease.Endpoints[0].Subnet.String()) {
			t.Errorf("peer %+v of node %+v", p.Lease, n)
		}
	}
	for name, n := range w.nodes {
		good := n.annotations[anno("kube-subnet-manager")] == "true" && n.annotations[anno("public-ip")] == "192.0.2.1" &&
			n.annotations[anno("backend-data")] == "" && len(n.cidrs) > 0 && name != "n0"
		if good && w.whole.Lease(name) == nil {
			t.Errorf("no peer for node %+v", n)
		}
	}
}

// One line tells of a family that cannot be read, however often its Node changes, and
// one that it can be again.
func TestMangledFamilyIsLoggedOnce(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	d := testDecoder()
	v := &view{keys: &d.keys, own: "n0", entries: map[string]*entry{}}
	n := &wireNode{name: "n1", uid: "1", cidrs: []string{"10.5.1.0/24", "fd00:5::/64"}, annotations: map[string]string{
		anno("kube-subnet-manager"): "true", anno("public-ip"): "192.0.2.1", anno("public-ipv6"): "nonsense",
	}}
	tell := func(kind, key, value string) {
		t.Helper()
		v.revision++
		n.revision, n.annotations[anno(key)] = strconv.FormatInt(v.revision, 10), value
		var o object
		kind, err := d.frame(wireFrame(kind, n.partial()), &o)
		if err != nil {
			t.Fatal(err)
		}
		name, err := v.advance(happened{kind, &o})
		if err != nil {
			t.Fatal(err)
		}
		v.publish(ctx, name, func(subnet.Update) {})
	}
	tell(added, "other", "")
	var o object
	if err := d.node(n.full(), &o); err != nil {
		t.Fatal(err)
	}
	v.supply(fetched{asking{names: []string{"n1"}}, map[string]*self{"n1": newSelf(&o, 0)}})
	v.publish(ctx, "n1", func(subnet.Update) {})
	tell(modified, "other", "x")
	tell(modified, "public-ip", "192.0.2.2")
	tell(modified, "public-ipv6", "2001:db8::1")
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if in, out := strings.Count(log, "public-ipv6"), strings.Count(log, "can be read again"); in != 1 || out != 1 {
		t.Errorf("%d lines name the annotation and %d say that it is good again, want one each:\n%s", in, out, log)
	}
}
