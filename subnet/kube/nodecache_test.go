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
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
	"github.com/flanneld/flanneld/subnet/kube/wire/wiretest"
)

// newNode returns the Node with that name that was created in a second since 1970, with a uid of
// its own.
func newNode(name string, created int) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(strconv.Itoa(created)), CreationTimestamp: metav1.Unix(int64(created), 0), Annotations: map[string]string{},
	}}
}

// walker changes Nodes at random, and tells a view of it.
type walker struct {
	t        *testing.T
	rnd      *rand.Rand
	d        *wire.Decoder
	v        *view
	nodes    map[string]*corev1.Node
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
func (w *walker) tell(kind string, n *corev1.Node) {
	w.revision++
	n.ResourceVersion = strconv.Itoa(w.revision)
	name, err := w.v.advance(wiretest.DecodeEvent(w.t, w.d, kind, n))
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
			got.found[name] = newSelf(wiretest.Decode(w.t, w.d, n, false), 0)
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
		n = newNode(name, w.uids)
		w.nodes[name] = n
		if w.rnd.IntN(2) == 0 {
			n.Annotations = map[string]string{annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1"}
		}
		w.tell(wire.Added, n)
	case w.rnd.IntN(6) == 0:
		delete(w.nodes, name)
		w.tell(wire.Deleted, n)
	case w.rnd.IntN(3) == 0 && len(n.Spec.PodCIDRs) == 0:
		n.Spec.PodCIDRs = []string{fmt.Sprintf("10.5.%d.0/24", w.uids%256), fmt.Sprintf("fd00:5:0:%x::/64", w.uids)}[:1+w.rnd.IntN(2)]
		w.tell(wire.Modified, n)
	default:
		key := pick("kube-subnet-manager", "public-ip", "public-ipv6", "backend-data", "backend-type", "other")
		if value := pick("true", "192.0.2.1", "192.0.2.2", "2001:db8::1", "{}", "{", ""); value == "" {
			delete(n.Annotations, annotationKey(key))
		} else {
			n.Annotations[annotationKey(key)] = value
		}
		w.tell(wire.Modified, n)
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
	w := &walker{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), d: defaultKeys().newDecoder(), nodes: map[string]*corev1.Node{}}
	w.v = &view{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}, store: subnet.StoreID{ID: "s"}}
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
		if n == nil || p.Lease.Key == "n0" || p.Lease.Order != uint64(n.CreationTimestamp.Unix()) || !slices.Contains(n.Spec.PodCIDRs, p.Lease.Endpoints[0].Subnet.String()) {
			t.Errorf("peer %+v of node %+v", p.Lease, n)
		}
	}
	for name, n := range w.nodes {
		good := n.Annotations[annotationKey("kube-subnet-manager")] == "true" && n.Annotations[annotationKey("public-ip")] == "192.0.2.1" &&
			n.Annotations[annotationKey("backend-data")] == "" && len(n.Spec.PodCIDRs) > 0 && name != "n0"
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
	d := defaultKeys().newDecoder()
	v := &view{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}}
	n := newNode("n1", 1)
	n.Spec.PodCIDRs = []string{"10.5.1.0/24", "fd00:5::/64"}
	n.Annotations = map[string]string{
		annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1", annotationKey("public-ipv6"): "nonsense",
	}
	tell := func(kind, key, value string) {
		t.Helper()
		v.revision++
		n.ResourceVersion, n.Annotations[annotationKey(key)] = strconv.FormatInt(v.revision, 10), value
		name, err := v.advance(wiretest.DecodeEvent(t, d, kind, n))
		if err != nil {
			t.Fatal(err)
		}
		v.publish(ctx, name, func(subnet.Update) {})
	}
	tell(wire.Added, "other", "")
	v.supply(fetched{asking{names: []string{"n1"}}, map[string]*self{"n1": newSelf(wiretest.Decode(t, d, n, false), 0)}})
	v.publish(ctx, "n1", func(subnet.Update) {})
	tell(wire.Modified, "other", "x")
	tell(wire.Modified, "public-ip", "192.0.2.2")
	tell(wire.Modified, "public-ipv6", "2001:db8::1")
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if in, out := strings.Count(log, "public-ipv6"), strings.Count(log, "can be read again"); in != 1 || out != 1 {
		t.Errorf("%d lines name the annotation and %d say that it is good again, want one each:\n%s", in, out, log)
	}
}

// TestHeartbeatsAllocateNothing expects that an event that changes nothing of a lease costs the
// view no allocation, because there are hundreds of them in a second.
func TestHeartbeatsAllocateNothing(t *testing.T) {
	d := defaultKeys().newDecoder()
	v := &view{keys: defaultKeys(), entries: map[string]*entry{}}
	n := newNode("node-4711", 1)
	n.ResourceVersion, n.Spec.PodCIDRs = "5", []string{"10.5.1.0/24"}
	n.Annotations = map[string]string{
		annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.1", annotationKey("backend-type"): "vxlan",
		annotationKey("backend-data"): `{"VtepMAC":"02:00:00:00:00:01"}`, "volumes.kubernetes.io/controller-managed-attach-detach": "true",
	}
	v.take(wiretest.Decode(t, d, n, false), true, &view{})
	n.ResourceVersion = "1000000"
	heartbeat := wiretest.DecodeEvent(t, d, wire.Modified, n)
	allocs := testing.AllocsPerRun(1000, func() {
		if name, err := v.advance(heartbeat); name != "" || err != nil {
			t.Fatalf("%q has changed, %v", name, err)
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for a heartbeat", allocs)
	}
	if v.revision != 1000000 {
		t.Errorf("the view is at %d", v.revision)
	}
}
