// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/subnet"
)

// restartableNode is node 1. It keeps its ledger and its own lease across restarts, like the
// daemon.
type restartableNode struct {
	f      *fixture
	ledger subnet.Ledger
	own    subnet.Lease
}

// savedState returns the state of the ledger in the form in which it is read from a state file.
func (k *restartableNode) savedState(t *testing.T) (state subnet.LedgerState) {
	t.Helper()
	raw, err := json.Marshal(k.ledger.State())
	if err == nil {
		err = json.Unmarshal(raw, &state)
	}
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// known returns the leases in the ledger, by key, in a form that can be compared.
func (k *restartableNode) known() map[string]string {
	all := map[string]string{}
	for l := range k.ledger.Leases() {
		s := l.BackendType
		for _, e := range l.Endpoints {
			s += fmt.Sprint(" ", e.Subnet, " ", e.PublicIP, " ", string(e.Data))
		}
		all[l.Key] = s
	}
	return all
}

// restart runs the node with its last known state. If change is not nil, it modifies that state
// before. restart stops the node when the function until returns true for the known leases.
func (k *restartableNode) restart(t *testing.T, change func(*subnet.LedgerState), until func(map[string]string) bool, options ...func(*Config)) {
	t.Helper()
	state := k.savedState(t)
	if change != nil {
		change(&state)
	}
	forManager := state
	forManager.Peers = slices.Clone(state.Peers)
	m := k.f.started(t, append([]func(*Config){func(c *Config) { c.Own, c.Known = k.own, forManager }}, options...)...)
	k.own = acquire(t, m, vxlanClaim("192.0.2.1"))
	k.watch(t.Context(), t, m, state, until)
}

// watch restores the ledger from state, and runs Watch of m. It ends Watch when the function until
// returns true for the known leases.
func (k *restartableNode) watch(ctx context.Context, t *testing.T, m *Manager, state subnet.LedgerState, until func(map[string]string) bool) {
	t.Helper()
	k.ledger.Restore(state, time.Now())
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	done := false
	err := m.Watch(ctx, func(u subnet.Update) {
		if _, ok := k.ledger.Follow(u, time.Now()); !ok {
			k.ledger.Apply(u.Snapshot(), time.Now())
		}
		if until(k.known()) && !done {
			done = true
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("Watch ended with %v; known are %v", err, k.known())
	}
}

// beat changes Nodes in a way that does not concern flannel, like a heartbeat of kubelet.
func (f *fixture) beat(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		f.note(t, name, map[string]any{"example.com/beat": fmt.Sprint(time.Now().UnixNano())})
	}
}

func has(names ...string) func(map[string]string) bool {
	slices.Sort(names)
	return func(known map[string]string) bool { return slices.Equal(slices.Sorted(maps.Keys(known)), names) }
}

// lists returns those requests since the last call of answer that read all Nodes.
func (p *proxy) lists(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(p.requests(), func(text string) bool {
		_, uri, _ := strings.Cut(text, " ")
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		q := u.Query()
		return !strings.HasSuffix(u.Path, "/nodes") || q.Has("watch") || q.Has("fieldSelector") || q.Has("labelSelector")
	})
}

// TestRestartCostsWhatHasChanged restarts a node among 1,000 Nodes. The API server must send less
// than 100 kB, and no list.
//
//stages:rest TestRestartIsCheap counts requests
func TestRestartCostsWhatHasChanged(t *testing.T) {
	const nodes = 1000
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, `{"Network":"10.0.0.0/8"}`)
	names := make([]string, nodes)
	parallel(t, nodes, func(n int) {
		names[n] = fmt.Sprintf("many%d", n)
		f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody(names[n], peerNotes(n%250), fmt.Sprintf("10.%d.%d.0/24", 100+n/256, n%256)))
	})
	k := &restartableNode{f: f}
	p := newProxy(t, f.server)
	through := func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) }
	k.restart(t, nil, has(names...), through)
	list := p.sent.Load()
	f.beat(t, names[:20]...)
	for name, tc := range map[string]struct {
		change func()
		want   []string
	}{
		"nothing":    {func() {}, names},
		"heartbeats": {func() { f.beat(t, names[:30]...) }, names},
		"a new Node": {func() { f.peer(t, 2) }, append(slices.Clone(names), "node2")},
	} {
		t.Run(name, func(t *testing.T) {
			before := p.sent.Load()
			p.answer(nil)
			tc.change()
			k.restart(t, nil, has(tc.want...), through)
			sent := p.sent.Load() - before
			t.Logf("the API server sent %d bytes, and %d for a start with a list", sent, list)
			if lists := p.lists(t); len(lists) > 0 || sent >= 100_000 {
				t.Errorf("a restart takes %d bytes and the lists %q, want less than 100 kB and no list", sent, lists)
			}
			if name == "a new Node" {
				f.deleteNode(t, "node2")
				k.restart(t, nil, has(names...), through)
			}
		})
	}
}

// TestRestartAfterChanges changes Nodes while a manager is stopped. After its restart, without a
// list, the manager must know the same leases as one that starts without a last known state. node5
// is an exception, because only the restarted manager knows its former lease.
func TestRestartAfterChanges(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	for n := 2; n <= 6; n++ {
		f.peer(t, n)
	}
	k := &restartableNode{f: f}
	p := newProxy(t, f.server)
	through := func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) }
	k.restart(t, nil, has("node2", "node3", "node4", "node5", "node6"))
	f.deleteNode(t, "node2")
	f.deleteNode(t, "node3")
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("node3", peerNotes(3), "10.5.33.0/24"))
	f.note(t, "node4", map[string]any{annotationKey("public-ip"): "192.0.2.44"})
	f.note(t, "node5", map[string]any{annotationKey("kube-subnet-manager"): nil})
	f.peer(t, 7)
	f.addNode(t, "node8", "10.5.8.0/24")
	p.answer(nil)
	fresh := &restartableNode{f: f}
	current := func(known map[string]string) bool {
		return has("node3", "node4", "node6", "node7")(known) || has("node3", "node4", "node5", "node6", "node7")(known) && strings.Contains(known["node3"], "33")
	}
	fresh.restart(t, nil, current)
	k.restart(t, nil, func(known map[string]string) bool {
		return maps.Equal(without(known, "node5"), without(fresh.known(), "node5"))
	}, through)
	if lists := p.lists(t); len(lists) > 0 {
		t.Errorf("all Nodes were listed: %q", lists)
	}
}

func without(all map[string]string, key string) map[string]string {
	less := maps.Clone(all)
	delete(less, key)
	return less
}

// TestAudit starts from a last known state that differs from the Nodes. The audit must correct the
// leases, and report that once.
func TestAudit(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	for n := 2; n <= 9; n++ {
		f.peer(t, n)
	}
	f.addNode(t, "other") // a Node that flannel does not manage
	k := &restartableNode{f: f}
	all := []string{"node2", "node3", "node4", "node5", "node6", "node7", "node8", "node9"}
	k.restart(t, nil, has(all...))
	want := k.known()
	state := k.savedState(t)
	at := func(key string) *subnet.Peer {
		i := slices.IndexFunc(state.Peers, func(p subnet.Peer) bool { return p.Lease.Key == key })
		return &state.Peers[i]
	}
	at("node2").Lease.Endpoints[0].PublicIP = netip.MustParseAddr("192.0.2.222")
	at("node4").Lease.Key = "node44"
	at("node5").Lease.Order--

	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	repaired := make(chan int, 10)
	p := newProxy(t, f.server)
	m := f.started(t, func(c *Config) {
		c.Own, c.Known, c.Kubeconfig = k.own, state, f.kubeconfig(t, p.URL, flannel)
		c.OnRepaired = func(n int) { repaired <- n }
	})
	m.timing.audit = 200 * time.Millisecond
	k.watch(ctx, t, m, state, func(known map[string]string) bool { return maps.Equal(known, want) })
	if lists := p.lists(t); slices.ContainsFunc(lists, func(s string) bool { return !strings.Contains(s, "limit=") }) {
		t.Errorf("the Nodes were listed at once: %q", lists)
	}
	if n := <-repaired; n != 4 || len(repaired) > 0 {
		t.Errorf("%d leases were corrected, and then %d times more, want 4 and none", n, len(repaired))
	}
	text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if strings.Count(text, "were corrected") != 1 || strings.Contains(text, "cannot be read") {
		t.Errorf("want one line about corrected leases:\n%s", text)
	}
	if diff := cmp.Diff(want, k.known()); diff != "" {
		t.Errorf("leases (-Nodes +known):\n%s", diff)
	}
}
