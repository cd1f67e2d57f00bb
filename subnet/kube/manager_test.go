// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const vtep = `{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`

func endpoint(public string) subnet.Endpoint {
	return subnet.Endpoint{PublicIP: netip.MustParseAddr(public), Data: json.RawMessage(vtep)}
}

func vxlanClaim(public string) subnet.Claim {
	return subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{endpoint(public)}}
}

func acquire(t *testing.T, m *Manager, c subnet.Claim) subnet.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := subnettest.Acquire(ctx, m, c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// keep starts Keep, which runs until the test ends, and returns a channel that gets its error.
func keep(t *testing.T, m *Manager, own subnet.Lease) <-chan error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		done <- m.Keep(ctx, own)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return done
}

func (f *fixture) expectNotes(t *testing.T, name string, want map[string]string) {
	t.Helper()
	waittest.Eventually(t, patience, "annotations of "+name, func() error {
		have := f.node(t, name).Metadata.Annotations
		for key, value := range want {
			if have[annotationKey(key)] != value {
				return fmt.Errorf("%s is %q, want %q", key, have[annotationKey(key)], value)
			}
		}
		return nil
	})
}

func TestAcquireWaitsForThePodCIDR(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	m := f.manager(t, "late")
	type result struct {
		lease subnet.Lease
		err   error
	}
	got := make(chan result, 1)
	go func() {
		l, err := subnettest.Acquire(t.Context(), m, vxlanClaim("192.0.2.1"))
		got <- result{l, err}
	}()
	still := func(what string) {
		t.Helper()
		select {
		case r := <-got:
			t.Fatalf("%s: got %+v", what, r)
		case <-time.After(300 * time.Millisecond):
		}
	}
	still("without the Node")
	f.addNode(t, "late")
	still("without a podCIDR")
	if notes := f.node(t, "late").Metadata.Annotations; len(notes) > 0 {
		t.Errorf("annotated while it waits: %v", notes)
	}
	f.do(t, http.MethodPatch, "/api/v1/nodes/late", map[string]any{"spec": map[string]any{"podCIDR": "10.5.9.0/24", "podCIDRs": []string{"10.5.9.0/24"}}}, "application/merge-patch+json")
	select {
	case r := <-got:
		if r.err != nil || r.lease.Endpoints[0].Subnet.String() != "10.5.9.0/24" {
			t.Errorf("got %+v", r)
		}
	case <-time.After(patience):
		t.Fatal("it does not notice its podCIDR")
	}
}

func TestPodCIDRThatDoesNotFit(t *testing.T) {
	for name, tt := range map[string]struct {
		config string
		cidrs  []string
		want   []string
	}{
		"outside":          {configV4, []string{"10.6.1.0/24"}, []string{"10.6.1.0/24", "10.5.0.0/16"}},
		"around":           {configV4, []string{"10.0.0.0/8"}, []string{"10.0.0.0/8", "10.5.0.0/16"}},
		"IPv6 outside":     {configDual, []string{"10.5.1.0/24", "fd00:10:6::/64"}, []string{"fd00:10:6::/64", "fd00:10:5::/48"}},
		"without a family": {configDual, []string{"10.5.1.0/24"}, []string{"fd00:10:5::/48", "10.5.1.0/24"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.setConfig(t, tt.config)
			f.addNode(t, "n1", tt.cidrs...)
			c := vxlanClaim("192.0.2.1")
			c.Endpoints = append(c.Endpoints, endpoint("2001:db8::1"))
			_, err := subnettest.Acquire(t.Context(), f.manager(t, "n1"), c)
			if !errors.Is(err, subnet.ErrUnfit) {
				t.Fatalf("got %v, want ErrUnfit", err)
			}
			for _, text := range append(tt.want, "n1") {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q does not name %s", err, text)
				}
			}
			if notes := f.node(t, "n1").Metadata.Annotations; len(notes) > 0 {
				t.Errorf("it is annotated nevertheless: %v", notes)
			}
			if got := f.events(t, "n1"); len(got) != 1 || !strings.Contains(got[0], tt.want[0]) {
				t.Errorf("events are %q, want one that names %s", got, tt.want[0])
			}
		})
	}
}

// events returns the Events about a Node, as REASON: MESSAGE.
func (f *fixture) events(t *testing.T, name string) []string {
	t.Helper()
	var list struct {
		Items []struct {
			Reason, Message string
			InvolvedObject  struct{ Kind, Name, UID string }
		}
	}
	if err := json.Unmarshal(f.do(t, http.MethodGet, "/api/v1/namespaces/default/events", nil), &list); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == name && e.InvolvedObject.UID != "" {
			got = append(got, e.Reason+": "+e.Message)
		}
	}
	return got
}

// TestEventsOfManyStarts expects that several starts which fail for one reason lead to one Event,
// and to another one after the Node was created again.
func TestEventsOfManyStarts(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", "10.6.1.0/24")
	for range 3 {
		if _, err := subnettest.Acquire(t.Context(), f.manager(t, "n1"), vxlanClaim("192.0.2.1")); !errors.Is(err, subnet.ErrUnfit) {
			t.Errorf("got %v, want ErrUnfit", err)
		}
	}
	if got := f.events(t, "n1"); len(got) != 1 {
		t.Errorf("events are %q, want one", got)
	}
	f.deleteNode(t, "n1")
	f.addNode(t, "n1", "10.6.1.0/24")
	_, _ = subnettest.Acquire(t.Context(), f.manager(t, "n1"), vxlanClaim("192.0.2.1"))
	if got := f.events(t, "n1"); len(got) != 2 {
		t.Errorf("after the Node was made again events are %q, want one more", got)
	}
}

// TestWithoutEvents checks that Acquire returns ErrUnfit also with the role of flannel's own
// manifests, which does not permit Events.
func TestWithoutEvents(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.grant(t, false)
	f.setConfig(t, configV4)
	f.addNode(t, "n1", "10.6.1.0/24")
	if _, err := subnettest.Acquire(t.Context(), f.manager(t, "n1"), vxlanClaim("192.0.2.1")); !errors.Is(err, subnet.ErrUnfit) {
		t.Errorf("got %v, want ErrUnfit", err)
	}
	if got := f.events(t, "n1"); len(got) != 0 {
		t.Errorf("events are %q", got)
	}
}

func TestPublicIPOverwrite(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configDual)
	f.addNode(t, "n1", cidrs(1)...)
	f.note(t, "n1", map[string]any{annotationKey("public-ip-overwrite"): "198.51.100.1"})
	m := f.manager(t, "n1")
	c := vxlanClaim("192.0.2.1")
	c.Endpoints = append(c.Endpoints, endpoint("2001:db8::1"))
	own := acquire(t, m, c)
	if got := own.Endpoints[0].PublicIP.String(); got != "192.0.2.1" {
		t.Errorf("this host's lease has %s, want what was detected", got)
	}
	f.expectNotes(t, "n1", map[string]string{"public-ip": "198.51.100.1", "public-ipv6": "2001:db8::1"})
	keep(t, m, own)
	f.note(t, "n1", map[string]any{annotationKey("public-ip-overwrite"): nil, annotationKey("public-ipv6-overwrite"): "2001:db8::99"})
	f.expectNotes(t, "n1", map[string]string{"public-ip": "192.0.2.1", "public-ipv6": "2001:db8::99"})
	f.note(t, "n1", map[string]any{annotationKey("public-ipv6-overwrite"): "nonsense", annotationKey("public-ip"): "6.6.6.6"})
	f.expectNotes(t, "n1", map[string]string{"public-ip": "192.0.2.1", "public-ipv6": "2001:db8::1"})
	f.expectEvent(t, "n1", "nonsense")
}

func (f *fixture) expectEvent(t *testing.T, name, text string) {
	t.Helper()
	waittest.Eventually(t, patience, "event", func() error {
		if got := f.events(t, name); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, text) }) {
			return fmt.Errorf("events are %q", got)
		}
		return nil
	})
}

// TestOverwriteThatIsIgnored expects that Acquire logs only once that an annotation cannot be used,
// although it has to try again. Keep must create an Event for each further text that cannot be
// used, although the Node need not be written.
func TestOverwriteThatIsIgnored(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	f.note(t, "n1", map[string]any{annotationKey("public-ip-overwrite"): "nonsense"})
	p := newProxy(t, f.server)
	m := f.manager(t, "n1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	p.answer(func(w http.ResponseWriter, r *http.Request) bool {
		return r.Method == http.MethodPatch && (len(p.requests()) < 10 && status500(w))
	})
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	own, err := subnettest.Acquire(klog.NewContext(t.Context(), logger), m, vxlanClaim("192.0.2.1"))
	if err != nil {
		t.Fatal(err)
	}
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(log, "is ignored"); n != 1 {
		t.Errorf("%d lines say that it is ignored, want 1:\n%s", n, log)
	}
	keep(t, m, own)
	f.expectEvent(t, "n1", "nonsense")
	for _, text := range []string{"rubbish", "0.0.0.0", "10.5.1.7"} { // the last one is in the subnet of the node's pods
		f.note(t, "n1", map[string]any{annotationKey("public-ip-overwrite"): text})
		f.expectEvent(t, "n1", text)
	}
	f.expectNotes(t, "n1", map[string]string{"public-ip": "192.0.2.1"})
}

func TestNodePublicIP(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	get := func() string {
		t.Helper()
		addrs, err := f.manager(t, "n1").PublicIPs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(addrs)
	}
	if got := get(); got != "[]" {
		t.Errorf("without annotations: %s", got)
	}
	f.note(t, "n1", map[string]any{annotationKey("node-public-ip"): "198.51.100.1", annotationKey("node-public-ipv6"): "2001:db8::1"})
	if got := get(); got != "[198.51.100.1 2001:db8::1]" {
		t.Errorf("got %s", got)
	}
	f.note(t, "n1", map[string]any{annotationKey("node-public-ip"): "nonsense"})
	if got := get(); got != "[2001:db8::1]" {
		t.Errorf("with one that is nonsense: %s", got)
	}
	f.note(t, "n1", map[string]any{annotationKey("node-public-ip"): "0.0.0.0", annotationKey("node-public-ipv6"): "ff02::1"})
	if got := get(); got != "[]" {
		t.Errorf("with addresses that no host has: %s", got)
	}
}

// TestLocation reads the location from a label of this host's Node. PublicIPs, Location and Recall
// together must send one request.
func TestLocation(t *testing.T) {
	const zone = "topology.kubernetes.io/zone"
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	label := func(value any) {
		t.Helper()
		f.do(t, http.MethodPatch, "/api/v1/nodes/n1", map[string]any{"metadata": map[string]any{"labels": map[string]any{zone: value}}}, "application/merge-patch+json")
	}
	label("eu-central-1a")
	for key, want := range map[string]string{zone: "eu-central-1a", "other": "", wire.HostnameLabel: hostOf("n1")} {
		m := f.manager(t, "n1", func(c *Config) { c.LocationLabel = key })
		if got, err := m.Location(t.Context()); err != nil || got != want {
			t.Errorf("the label %s gives %q, %v, want %q", key, got, err, want)
		}
	}
	p := newProxy(t, f.server)
	m := f.manager(t, "n1", func(c *Config) {
		c.Kubeconfig, c.LocationLabel = f.kubeconfig(t, p.URL, flannel), zone
	})
	if _, err := m.PublicIPs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := m.Location(t.Context()); err != nil || got != "eu-central-1a" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := m.Recall(t.Context(), subnet.Claim{}); err != nil {
		t.Fatal(err)
	}
	if got := p.requests(); len(got) != 1 {
		t.Errorf("it asks %q, want one read of this host's Node", got)
	}
	label("")
	if got, err := f.manager(t, "n1", func(c *Config) { c.LocationLabel = zone }).Location(t.Context()); err != nil || got != "" {
		t.Errorf("an empty label gives %q, %v", got, err)
	}
}

// TestLocationLabelChanges checks that Keep logs each change of the label to another value than the
// one in use, and nothing when the label has that value again.
func TestLocationLabelChanges(t *testing.T) {
	k := keeper{Manager: &Manager{cfg: Config{LocationLabel: "example.org/site"}}}
	used := "east"
	look := func(value string) string {
		t.Helper()
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		k.noteLocation(klog.NewContext(t.Context(), logger), &ownNode{exists: true, location: value})
		return logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	}
	if log := look("west"); log != "" {
		t.Errorf("before the label was used, the log has %q", log)
	}
	k.label = nil
	k.location.Store(&used)
	for i, step := range []struct {
		value string
		logs  bool
	}{{"east", false}, {"", true}, {"", false}, {"west", true}, {"east", false}, {"west", true}} {
		if log := look(step.value); strings.Contains(log, "restart flanneld to use the other location") != step.logs {
			t.Errorf("step %d, %q: the log has %q", i, step.value, log)
		}
	}
	k.noteLocation(t.Context(), &ownNode{}) // a Node that is gone has no label
}

func TestNodeNameFromThePod(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	f.do(t, http.MethodPost, "/api/v1/namespaces/default/serviceaccounts", map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": map[string]any{"name": "pods"}})
	f.do(t, http.MethodPost, "/api/v1/namespaces/default/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "flannel-x"},
		"spec": map[string]any{
			"nodeName": "n1", "serviceAccountName": "pods", "automountServiceAccountToken": false,
			"containers": []any{map[string]any{"name": "c", "image": "i"}},
		},
	})
	m := f.manager(t, "", func(c *Config) { c.PodName, c.PodNamespace = "flannel-x", "default" })
	if l := acquire(t, m, vxlanClaim("192.0.2.1")); l.Key != "n1" {
		t.Errorf("got %+v, want the lease of n1", l)
	}
	if _, err := New(Config{Kubeconfig: f.kubeconfig(t, f.url, flannel), PodName: "x"}); err == nil || !strings.Contains(err.Error(), "NODE_NAME") {
		t.Errorf("without a name: %v", err)
	}
}

func TestCondition(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	status := func() string {
		for _, c := range f.node(t, "n1").Status.Conditions {
			if c.Type == wire.NetworkUnavailable {
				return c.Status + " " + c.Reason + " " + c.Message
			}
		}
		return ""
	}
	f.addNode(t, "n1", cidrs(1)...)
	ready := make(chan struct{})
	p := newProxy(t, f.server)
	m := f.manager(t, "n1", func(c *Config) { c.Ready, c.Kubeconfig = ready, f.kubeconfig(t, p.URL, flannel) })
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	keep(t, m, own)
	<-time.After(300 * time.Millisecond)
	if got := status(); got != "" {
		t.Errorf("before it is ready the condition is %s", got)
	}
	p.answer(func(w http.ResponseWriter, r *http.Request) bool {
		return r.Method == http.MethodPatch && status500(w)
	})
	close(ready)
	waittest.Eventually(t, patience, "tries", func() error {
		if n := len(p.requests()); n < 6 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	p.answer(nil)
	const want = "False FlannelIsUp Flannel is running on this node"
	good := func() error {
		if got := status(); got != want {
			return fmt.Errorf("the condition is %q, want %q", got, want)
		}
		return nil
	}
	waittest.Eventually(t, patience, "condition", good)
	f.do(t, http.MethodPatch, "/api/v1/nodes/n1/status", map[string]any{"status": map[string]any{"conditions": []any{
		map[string]any{"type": wire.NetworkUnavailable, "status": "True", "reason": "AnotherController"},
	}}}, sendPatch)
	waittest.Eventually(t, patience, "condition that was flipped", good)
}

// TestReadyAsTheAPIReturns makes the network ready at the moment at which the API becomes usable
// again. Keep must set the condition.
func TestReadyAsTheAPIReturns(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	p := newProxy(t, f.server)
	ready, away := make(chan struct{}), make(chan struct{})
	goAway, becomeReady := sync.OnceFunc(func() { close(away) }), sync.OnceFunc(func() { close(ready) })
	m := f.manager(t, "n1", func(c *Config) {
		c.Ready, c.Kubeconfig = ready, f.kubeconfig(t, p.URL, flannel)
		c.OnStatus = func(err error) {
			if err != nil {
				goAway()
				return
			}
			select {
			case <-away:
				becomeReady()
			default:
			}
		}
	})
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	p.answer(status(http.StatusServiceUnavailable))
	keep(t, m, own)
	<-away
	p.answer(nil)
	waittest.Eventually(t, patience, "condition", func() error {
		conditions := f.node(t, "n1").Status.Conditions
		if len(conditions) != 1 || conditions[0].Status != "False" {
			return fmt.Errorf("it has %v", conditions)
		}
		return nil
	})
}

func status500(w http.ResponseWriter) bool { return status(http.StatusInternalServerError)(w, nil) }

// TestNothingToWrite starts a manager whose Node needs no correction. The manager must read this host's Node
// once, and write nothing.
func TestNothingToWrite(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	acquire(t, f.manager(t, "n1"), vxlanClaim("192.0.2.1"))
	p := newProxy(t, f.server)
	m := f.manager(t, "n1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	if _, err := m.PublicIPs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Recall(t.Context(), subnet.Claim{}); err != nil {
		t.Fatal(err)
	}
	acquire(t, m, vxlanClaim("192.0.2.1"))
	if got := p.requests(); len(got) != 1 || !strings.HasPrefix(got[0], "GET ") {
		t.Errorf("it asks %q, want one read of this host's Node", got)
	}
}

func TestOwnNodeThatGoesAndComesBack(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "n1", cidrs(1)...)
	m := f.manager(t, "n1")
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	done := keep(t, m, own)
	f.deleteNode(t, "n1")
	<-time.After(100 * time.Millisecond)
	f.addNode(t, "n1", cidrs(1)...)
	f.expectNotes(t, "n1", map[string]string{"kube-subnet-manager": "true", "public-ip": "192.0.2.1", "backend-data": vtep})
	f.deleteNode(t, "n1")
	f.addNode(t, "n1", cidrs(2)...)
	select {
	case err := <-done:
		if !errors.Is(err, subnet.ErrLeaseLost) || !strings.Contains(err.Error(), "10.5.1.0/24") || !strings.Contains(err.Error(), "10.5.2.0/24") {
			t.Errorf("Keep returned %v, want ErrLeaseLost with both podCIDRs", err)
		}
	case <-time.After(patience):
		t.Error("Keep did not notice another podCIDR")
	}
}

// peer creates a Node with the annotations of flannel.
func (f *fixture) peer(t *testing.T, n int) {
	t.Helper()
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody(nodeName(n), peerNotes(n), cidrs(n)...))
}

func peerNotes(n int) map[string]string {
	return map[string]string{
		annotationKey("kube-subnet-manager"): "true", annotationKey("backend-type"): "vxlan", annotationKey("public-ip"): fmt.Sprintf("192.0.2.%d", n),
		annotationKey("backend-data"): fmt.Sprintf(`{"VNI":1,"VtepMAC":"02:00:00:00:00:%02x"}`, n),
	}
}

// started creates node 1 if it does not exist, and returns a manager that has acquired its lease.
func (f *fixture) started(t *testing.T, change ...func(*Config)) *Manager {
	t.Helper()
	if status, _, _ := f.try(http.MethodGet, "/api/v1/nodes/node1", nil); status == http.StatusNotFound {
		f.addNode(t, "node1", cidrs(1)...)
	}
	m := f.manager(t, "node1", change...)
	acquire(t, m, vxlanClaim("192.0.2.1"))
	return m
}

func subnetOf(s subnet.Snapshot, key string) string {
	for _, l := range s.Leases {
		if l.Key == key {
			return l.Endpoints[0].Subnet.String()
		}
	}
	return ""
}

func TestWatchNewNodes(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.peer(t, 2)
	f.addNode(t, "stranger", "10.5.100.0/24")
	w := subnettest.Watch(t, f.started(t))
	w.Until(t, "a peer that was there", subnettest.Has("node2"))

	f.peer(t, 3)
	w.Until(t, "a peer that is new", subnettest.Has("node2", "node3"))

	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("node4", peerNotes(4)))
	<-time.After(200 * time.Millisecond)
	f.do(t, http.MethodPatch, "/api/v1/nodes/node4", map[string]any{"spec": map[string]any{"podCIDR": "10.5.4.0/24", "podCIDRs": []string{"10.5.4.0/24"}}}, "application/merge-patch+json")
	w.Until(t, "a peer whose podCIDR comes late", subnettest.Has("node2", "node3", "node4"))

	f.deleteNode(t, "node3")
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("node3", peerNotes(3), "10.5.33.0/24"))
	w.Until(t, "a peer that came back with another podCIDR", func(s subnet.Snapshot) bool { return subnetOf(s, "node3") == "10.5.33.0/24" })

	// An annotation does not change the subnet of a node.
	f.note(t, "node2", map[string]any{annotationKey("podCIDR"): "10.5.0.0/16", annotationKey("public-ip"): "192.0.2.222"})
	snap := w.Until(t, "a peer's new address", func(s subnet.Snapshot) bool {
		return slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Endpoints[0].PublicIP.String() == "192.0.2.222" })
	})
	if got := subnetOf(snap, "node2"); got != "10.5.2.0/24" {
		t.Errorf("its subnet is %s", got)
	}
}

func TestPeerWhoseAnnotationsGo(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.peer(t, 2)
	m := f.started(t)
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("node2"))
	f.note(t, "node2", map[string]any{annotationKey("kube-subnet-manager"): nil, annotationKey("public-ip"): nil})
	kept := func(s subnet.Snapshot) bool { return slices.Equal(s.Undecodable, []string{"node2"}) }
	w.Until(t, "the peer kept", kept)
	f.note(t, "node2", map[string]any{annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): "192.0.2.2"})
	back := w.Until(t, "the peer back", subnettest.Has("node2"))

	// The peer is also kept after a restart, because the last known state shows that it is the same
	// Node.
	f.note(t, "node2", map[string]any{annotationKey("kube-subnet-manager"): nil})
	known := subnet.LedgerState{Store: back.Store, Peers: []subnet.Peer{{Lease: *back.Leases[0]}}}
	again := subnettest.Watch(t, f.started(t, func(c *Config) { c.Known = known }))
	if s := again.Until(t, "a snapshot", func(subnet.Snapshot) bool { return true }); !kept(s) || s.Store.ID != back.Store.ID {
		t.Errorf("after a restart: %+v", s)
	}
	// Another Node with the same name does not keep the lease.
	known.Peers[0].Lease.Order--
	other := subnettest.Watch(t, f.started(t, func(c *Config) { c.Known = known }))
	if s := other.Until(t, "a snapshot", func(subnet.Snapshot) bool { return true }); kept(s) {
		t.Errorf("another Node counts as the previous one: %+v", s)
	}
}

// TestPeerWithOneFamilyMangled expects that a family which cannot be read keeps its last endpoint,
// and that changes of the other family are applied.
func TestPeerWithOneFamilyMangled(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configDual)
	f.peer(t, 2)
	f.peer(t, 3)
	f.note(t, "node2", map[string]any{annotationKey("public-ipv6"): "2001:db8::2"})
	f.note(t, "node3", map[string]any{annotationKey("public-ipv6"): "nonsense"})
	w := subnettest.Watch(t, f.manager(t, "node1"))
	publics := func(key, want string) func(subnet.Snapshot) bool {
		return func(s subnet.Snapshot) bool {
			var got []string
			for _, l := range s.Leases {
				for _, e := range l.Endpoints {
					if l.Key == key {
						got = append(got, e.PublicIP.String())
					}
				}
			}
			return strings.Join(got, " ") == want && len(s.Undecodable) == 0
		}
	}
	w.Until(t, "what can be read", func(s subnet.Snapshot) bool {
		return publics("node2", "192.0.2.2 2001:db8::2")(s) && publics("node3", "192.0.2.3")(s)
	})
	f.note(t, "node2", map[string]any{annotationKey("public-ipv6"): "nonsense", annotationKey("public-ip"): "192.0.2.222"})
	w.Until(t, "the address of the one, and the other as it was", publics("node2", "192.0.2.222 2001:db8::2"))
	f.note(t, "node2", map[string]any{annotationKey("public-ipv6"): "2001:db8::22"})
	w.Until(t, "both again", publics("node2", "192.0.2.222 2001:db8::22"))
	all, err := Entries(t.Context(), Config{Kubeconfig: f.kubeconfig(t, f.url, flannel)})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if said := strings.Contains(fmt.Sprint(e.Err), "public-ipv6"); said != (e.Lease.Key == "node3") || len(e.Lease.Endpoints) == 0 {
			t.Errorf("an operator sees %+v", e)
		}
	}
}

// TestEntriesWithUnusablePodCIDRs expects that an operator sees a Node whose podCIDRs cannot be used only if
// flannel manages it.
func TestEntriesWithUnusablePodCIDRs(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.addNode(t, "other", "0.0.0.0/0")
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("managed", peerNotes(3), "0.0.0.0/0"))
	all, err := Entries(t.Context(), Config{Kubeconfig: f.kubeconfig(t, f.url, flannel)})
	if err != nil || len(all) != 1 || all[0].Lease.Key != "managed" || all[0].Err == nil {
		t.Errorf("%+v, %v, want only the managed Node, with an error", all, err)
	}
}

// TestWithoutPodCIDR expects the names of the Nodes that cannot get a subnet, before flannel manages any.
func TestWithoutPodCIDR(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.addNode(t, "with", "10.5.1.0/24")
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("without", nil))
	names, err := WithoutPodCIDR(t.Context(), Config{Kubeconfig: f.kubeconfig(t, f.url, flannel)})
	if err != nil || !slices.Equal(names, []string{"without"}) {
		t.Errorf("%q, %v, want the Node without", names, err)
	}
}

// TestRestartIsCheap expects that a restart requests in full only the two new Nodes, because the
// podCIDRs of the others are known.
func TestRestartIsCheap(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	for n := 2; n <= 6; n++ {
		f.peer(t, n)
	}
	m := f.started(t)
	own := acquire(t, m, vxlanClaim("192.0.2.1"))
	before := subnettest.Watch(t, m).Until(t, "peers", func(s subnet.Snapshot) bool { return len(s.Leases) == 5 })

	f.deleteNode(t, "node2")
	f.deleteNode(t, "node3")
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("node3", peerNotes(3), "10.5.33.0/24"))
	f.peer(t, 7)
	known := subnet.LedgerState{Store: before.Store}
	for _, lease := range before.Leases {
		l := *lease
		if l.Key == "node3" {
			l.Order-- // creation times are in seconds, and both Nodes may be of the same second
		}
		known.Peers = append(known.Peers, subnet.Peer{Lease: l})
	}
	p := newProxy(t, f.server)
	m = f.started(t, func(c *Config) {
		c.Known, c.Own, c.Kubeconfig = known, own, f.kubeconfig(t, p.URL, flannel)
	})
	p.answer(nil)
	after := subnettest.Watch(t, m).Until(t, "a snapshot", func(subnet.Snapshot) bool { return true })
	if !subnettest.Has("node3", "node4", "node5", "node6", "node7")(after) || subnetOf(after, "node3") != "10.5.33.0/24" || after.Store.ID != before.Store.ID {
		t.Errorf("after the restart: %+v", after)
	}
	asked := map[string]bool{}
	for _, text := range p.requests() {
		_, uri, _ := strings.Cut(text, " ")
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		if one := u.Query().Get("fieldSelector"); one != "" {
			asked[strings.TrimPrefix(one, "metadata.name=")] = true
		}
	}
	delete(asked, "node1") // this host's Node is requested again if it was read too long ago
	if diff := cmp.Diff(map[string]bool{"node3": true, "node7": true}, asked); diff != "" {
		t.Errorf("which Nodes it asks for: the two new ones (-want +got):\n%s", diff)
	}
}

func TestOutages(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.peer(t, 2)
	p := newProxy(t, f.server)
	statuses := make(chan error, 100)
	p.answer(status(http.StatusServiceUnavailable)) // away before the start
	f.addNode(t, "node1", cidrs(1)...)
	m := f.manager(t, "node1", func(c *Config) {
		c.Kubeconfig = f.kubeconfig(t, p.URL, flannel)
		c.OnStatus = func(err error) { statuses <- err }
	})
	expect := func(want string) { t.Helper(); expectStatus(t, statuses, want) }
	acquired := make(chan error, 1)
	go func() {
		_, err := subnettest.Acquire(t.Context(), m, vxlanClaim("192.0.2.1"))
		acquired <- err
	}()
	expect("503 Service Unavailable")
	p.answer(nil)
	expect("nil")
	if err := <-acquired; err != nil {
		t.Fatal(err)
	}
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("node2"))
	for n, code := range []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusUnauthorized} {
		p.answer(status(code))
		p.CloseClientConnections()
		expect(fmt.Sprint(code))
		have := []string{"node2"}
		for i := 3; i <= 3+n; i++ {
			have = append(have, nodeName(i))
		}
		f.peer(t, 3+n)
		p.answer(nil)
		expect("nil")
		w.Until(t, "a peer that came meanwhile", subnettest.Has(have...))
	}
	p.answer(func(_ http.ResponseWriter, r *http.Request) bool { // a server that hangs up
		return func() bool { panic(http.ErrAbortHandler) }()
	})
	p.CloseClientConnections()
	expect("API server")
	p.answer(nil)
	expect("nil")
	f.deleteNode(t, "node2")
	w.Until(t, "a peer gone", func(s subnet.Snapshot) bool { return subnetOf(s, "node2") == "" })
}

// TestReconnectIsNoRecovery expects that Reconnect does not end an outage: a server that accepts
// requests and never answers stays unavailable.
func TestReconnectIsNoRecovery(t *testing.T) {
	for name, talk := range map[string]func(*testing.T, *Manager, subnet.Lease){
		"start": func(t *testing.T, m *Manager, _ subnet.Lease) {
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = m.PublicIPs(ctx)
			}()
			t.Cleanup(func() { cancel(); <-ended })
		},
		"own node": func(t *testing.T, m *Manager, own subnet.Lease) { keep(t, m, own) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.setConfig(t, configV4)
			f.addNode(t, "n1", cidrs(1)...)
			p := newProxy(t, f.server)
			statuses, asked := make(chan error, 100), make(chan struct{}, 100)
			m := f.manager(t, "n1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
			own := acquire(t, m, vxlanClaim("192.0.2.1"))
			m.outage = loglimit.NewOutage("the Kubernetes API", func(err error) { statuses <- err })
			m.timing.request = time.Second
			p.answer(func(_ http.ResponseWriter, r *http.Request) bool {
				if requestsNode(r, "n1") {
					asked <- struct{}{}
				}
				<-r.Context().Done()
				return true
			})
			next := func() {
				t.Helper()
				select {
				case <-asked:
				case <-time.After(patience):
					t.Fatal("there are no more requests")
				}
			}
			talk(t, m, own)
			next()
			next()
			if err := <-statuses; err == nil || !strings.Contains(err.Error(), "no answer in time") {
				t.Fatalf("the status of a silent server is %v", err)
			}
			m.Reconnect()
			next() // the outcome of the previous request was reported before this one
			select {
			case err := <-statuses:
				t.Errorf("the status of the new connection is %v", err)
			default:
			}
			p.answer(nil)
			select {
			case err := <-statuses:
				if err != nil {
					t.Errorf("the status of a server that answers is %v", err)
				}
			case <-time.After(patience):
				t.Error("no status of a server that answers")
			}
		})
	}
}

// TestOneNodeCannotBeRequested expects that failures of requests for one Node are reported as an
// outage, and that the watch publishes other Nodes meanwhile. The outage must end when the Node can
// be requested.
func TestOneNodeCannotBeRequested(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.peer(t, 2)
	p := newProxy(t, f.server)
	statuses := make(chan error, 100)
	m := f.started(t, func(c *Config) {
		c.Kubeconfig = f.kubeconfig(t, p.URL, flannel)
		c.OnStatus = func(err error) { statuses <- err }
	})
	w := subnettest.Watch(t, m)
	w.Until(t, "the peer", subnettest.Has("node2"))
	for len(statuses) > 0 {
		<-statuses
	}
	p.answer(func(w http.ResponseWriter, r *http.Request) bool {
		return requestsNode(r, "node3") && status(http.StatusInternalServerError)(w, r)
	})
	f.peer(t, 3)
	next := func() error {
		t.Helper()
		select {
		case err := <-statuses:
			return err
		case <-time.After(patience):
			t.Fatal("no status")
			return nil
		}
	}
	if err := next(); err == nil || !strings.Contains(err.Error(), "500") {
		t.Fatalf("the status while the Node cannot be requested is %v", err)
	}
	f.peer(t, 4)
	w.Until(t, "another new peer", subnettest.Has("node2", "node4"))
	for len(statuses) > 0 {
		if err := <-statuses; err == nil {
			t.Error("the outage has ended although the Node cannot be requested")
		}
	}
	p.answer(nil)
	w.Until(t, "the peer", subnettest.Has("node2", "node3", "node4"))
	for err := next(); err != nil; err = next() {
		t.Logf("still %v", err)
	}
}

// watchedThroughProxy returns a fixture without peers, a proxy before its API server, and a watcher that
// uses the proxy.
func watchedThroughProxy(t *testing.T) (*fixture, *proxy, *subnettest.Watcher) {
	t.Helper()
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	p := newProxy(t, f.server)
	m := f.started(t, func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	return f, p, w
}

// requestsNode reports whether r requests only the Node with that name.
func requestsNode(r *http.Request, name string) bool {
	return r.URL.Query().Get("fieldSelector") == "metadata.name="+name
}

// TestPodCIDRComesWhileANodeIsRequested gives a Node its podCIDR after the server has prepared the
// answer to a request for the Node, and before that answer arrives. The manager must request the
// Node again.
func TestPodCIDRComesWhileANodeIsRequested(t *testing.T) {
	f, p, w := watchedThroughProxy(t)
	asked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	p.answer(func(rw http.ResponseWriter, r *http.Request) bool {
		first := false
		if requestsNode(r, "node3") {
			once.Do(func() { first = true })
		}
		if !first {
			return false
		}
		early := httptest.NewRecorder()
		p.pass(early, r)
		close(asked)
		<-release
		maps.Copy(rw.Header(), early.Header())
		_, _ = rw.Write(early.Body.Bytes())
		return true
	})
	f.do(t, http.MethodPost, "/api/v1/nodes", nodeBody("node3", peerNotes(3)))
	<-asked
	f.do(t, http.MethodPatch, "/api/v1/nodes/node3", map[string]any{"spec": map[string]any{"podCIDR": cidrs(3)[0], "podCIDRs": cidrs(3)}}, "application/merge-patch+json")
	f.peer(t, 4)
	w.Until(t, "a peer that came after the podCIDR", subnettest.Has("node4"))
	close(release)
	w.Until(t, "both", subnettest.Has("node3", "node4"))
}

// TestWatchesThatDoNotLast expects pauses between watches that the server accepts and ends at once.
func TestWatchesThatDoNotLast(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"ended":   status(http.StatusOK),
		"too old": status(http.StatusGone),
		"fails": func(w http.ResponseWriter, _ *http.Request) bool {
			_, _ = w.Write([]byte("\x00\x00\x00\x04junk"))
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.setConfig(t, configV4)
			f.addNode(t, "node1", cidrs(1)...)
			p := newProxy(t, f.server)
			p.answer(func(w http.ResponseWriter, r *http.Request) bool { return r.URL.Query().Has("watch") && answer(w, r) })
			through := func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) }
			m := f.manager(t, "node1", through)
			own := acquire(t, m, vxlanClaim("192.0.2.1"))
			subnettest.Watch(t, m)
			keep(t, m, own)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			late := make(chan struct{})
			go func() {
				defer close(late)
				_, _ = subnettest.Acquire(ctx, f.manager(t, "late", through), vxlanClaim("192.0.2.2"))
			}()
			<-time.After(3 * time.Second)
			cancel()
			<-late
			watches := strings.Count(strings.Join(p.requests(), "\n"), "watch=true")
			// Watch, Keep and Acquire each wait for 10, 20, 40 ms and so on up to 200 ms, with a
			// random deviation of up to a half.
			if watches < 6 || watches > 120 {
				t.Errorf("%d watches in 3 s, want some 60", watches)
			}
		})
	}
}

func TestTokenIsRead(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	f.addNode(t, "node1", cidrs(1)...)
	p := newProxy(t, f.server)
	p.answer(func(w http.ResponseWriter, r *http.Request) bool {
		return r.Header.Get("Authorization") != "Bearer "+flannel && status(http.StatusUnauthorized)(w, r)
	})
	m := f.manager(t, "node1", func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, "old-token") })
	acquired := make(chan error, 1)
	go func() {
		_, err := subnettest.Acquire(t.Context(), m, vxlanClaim("192.0.2.1"))
		acquired <- err
	}()
	waittest.Eventually(t, patience, "tries with the old token", func() error {
		if n := len(p.requests()); n < 2 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	f.kubeconfig(t, p.URL, flannel) // writes the new token, as when it is rotated
	select {
	case err := <-acquired:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the new token is not read")
	}
}

// TestWipedServer restarts the API server, and later replaces its store by an empty one. The store
// of the restarted server must count as the same. The empty store, with a new Node of the own name,
// must count as another one.
//
//stages:rest it takes half a minute; TestWatchNewNodes starts an API server too
func TestWipedServer(t *testing.T) {
	t.Parallel()
	s := &server{dir: t.TempDir()}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	f := newFixture(t, s)
	f.setConfig(t, configV4)
	f.peer(t, 2)
	m := f.started(t)
	w := subnettest.Watch(t, m)
	before := w.Until(t, "the peer", subnettest.Has("node2"))

	s.stopAPI()
	if err := s.startAPI(); err != nil {
		t.Fatal(err)
	}
	f.peer(t, 3)
	restarted := w.Until(t, "a restarted server", subnettest.Has("node2", "node3"))
	if restarted.Store.ID != before.Store.ID || restarted.Store.Revision <= before.Store.Revision {
		t.Errorf("the store went from %+v to %+v", before.Store, restarted.Store)
	}

	s.wipe(t)
	f.grant(t, true)
	f.addNode(t, "node1", cidrs(1)...)
	f.peer(t, 4)
	wiped := w.Until(t, "a wiped server", subnettest.Has("node4"))
	if wiped.Store.ID == before.Store.ID {
		t.Errorf("the wiped store is %+v, as it was before", wiped.Store)
	}
}

// TestThousandNodes replaces a thousand Nodes by others. The watch must publish exactly the others
// in the end.
//
//stages:rest it creates thousands of nodes
func TestThousandNodes(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, `{"Network":"10.0.0.0/8"}`)
	m := f.started(t)
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	const nodes = 1000
	name := func(round, n int) string { return fmt.Sprintf("many%d-%d", round, n) }
	parallel(t, nodes, func(n int) {
		body := nodeBody(name(1, n), peerNotes(1), fmt.Sprintf("10.%d.%d.0/24", 100+n/256, n%256))
		f.do(t, http.MethodPost, "/api/v1/nodes", body)
	})
	w.Until(t, "a thousand", func(s subnet.Snapshot) bool { return len(s.Leases) == nodes })
	start := time.Now()
	parallel(t, nodes, func(n int) {
		f.deleteNode(t, name(1, n))
		body := nodeBody(name(2, n), peerNotes(1), fmt.Sprintf("10.%d.%d.0/24", 110+n/256, n%256))
		f.do(t, http.MethodPost, "/api/v1/nodes", body)
	})
	written := time.Since(start)
	w.Until(t, "a thousand others", func(s subnet.Snapshot) bool {
		return len(s.Leases) == nodes && !slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return !strings.HasPrefix(l.Key, "many2-") })
	})
	t.Logf("written in %s, known %s later", written, time.Since(start)-written)
}

// parallel calls f with each number from 0 to n-1, from eight goroutines, and waits for them.
func parallel(t *testing.T, n int, f func(int)) {
	t.Helper()
	const workers = 8
	done := make(chan struct{})
	for w := range workers {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := w; i < n; i += workers {
				f(i)
			}
		}()
	}
	for range workers {
		<-done
	}
}
