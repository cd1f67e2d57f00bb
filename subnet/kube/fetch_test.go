// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestManyNewNodes expects that Nodes which are created at the same time are requested together, by
// their label. A Node without the label, and one with an empty label, must be found too.
//
//stages:rest it creates thousands of nodes
func TestManyNewNodes(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, `{"Network":"10.0.0.0/8"}`)
	p := newProxy(t, f.server)
	m := f.started(t, func(c *Config) { c.Kubeconfig = f.kubeconfig(t, p.URL, flannel) })
	m.timing.requestPause = 20 * time.Millisecond
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	p.answer(nil)
	const nodes = 200
	parallel(t, nodes, func(n int) {
		body := nodeBody(fmt.Sprintf("many%d", n), peerNotes(n), fmt.Sprintf("10.99.%d.0/24", n))
		switch labels := body["metadata"].(map[string]any); n {
		case 7:
			delete(labels, "labels")
		case 8:
			labels["labels"] = map[string]string{wire.HostnameLabel: ""}
		}
		f.do(t, http.MethodPost, "/api/v1/nodes", body)
	})
	w.Until(t, "all", func(s subnet.Snapshot) bool { return len(s.Leases) == nodes })
	one, several := 0, 0
	for _, text := range p.requests() {
		switch {
		case strings.Contains(text, "labelSelector="):
			several++
		case strings.Contains(text, "fieldSelector=") && !strings.Contains(text, "watch="):
			one++
		}
	}
	if several == 0 || one+several > nodes/4 {
		t.Errorf("%d requests for one Node and %d for several, of %d Nodes", one, several, nodes)
	}
}

// TestLabelHasChanged expects that Nodes are requested by name if they are missing in the answer to
// a request by label, because their label has changed since their event.
func TestLabelHasChanged(t *testing.T) {
	d := newDecoder()
	cache := &nodeCache{keys: defaultKeys(), own: "n0", entries: map[string]*entry{}}
	var names []string
	for n := range 2*together + 1 {
		node := newNode(fmt.Sprintf("n%d", n), n)
		node.ResourceVersion, node.Labels = fmt.Sprint(n+1), map[string]string{wire.HostnameLabel: fmt.Sprintf("h%d", n)}
		node.Annotations[annotationKey("kube-subnet-manager")] = "true"
		if _, err := cache.advance(wiretest.DecodeEvent(t, d, wire.Added, node)); err != nil {
			t.Fatal(err)
		}
		names = append(names, node.Name)
	}
	requests := cache.requests(names)
	if len(requests) != 3 || len(requests[0].hosts) != together || requests[0].revision != together || len(requests[2].hosts) != 1 {
		t.Fatalf("%d requests: %+v", len(requests), requests)
	}
	if got := requests[2].values().Get("labelSelector"); got != wire.HostnameLabel+" in (h200)" {
		t.Errorf("the selector is %q", got)
	}
	cache.applyAnswer(&requests[0])
	again := cache.requests(names[:together])
	if len(again) != together || again[3].name != "n3" || again[3].revision != 4 || again[3].hosts != nil {
		t.Errorf("%d requests after that: %+v", len(again), again)
	}
}

// countingServer answers requests and records the times at which they came.
type countingServer struct {
	mu     sync.Mutex
	at     []time.Time
	answer func(*http.Request) *http.Response
}

func (c *countingServer) RoundTrip(r *http.Request) (*http.Response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = append(c.at, time.Now())
	return c.answer(r), nil
}

// times returns the times of the requests since its last call, in order.
func (c *countingServer) times() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.at
	c.at = nil
	slices.SortFunc(at, time.Time.Compare)
	return at
}

// emulated returns the manager of the Node with that name, in a cluster of that many Nodes. Its
// requests go to c.
func emulated(name string, nodes int, c *countingServer) *Manager {
	m := &Manager{
		client: &client{random: randomTime, base: &url.URL{Scheme: "https", Host: "api"}, http: &http.Client{Transport: c}},
		outage: loglimit.NewOutage("the API", nil), keys: defaultKeys(), decoder: newDecoder(),
		timing: timing{request: time.Second, backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second, vary: 0.5, requestPause: 100 * time.Microsecond, event: 10 * time.Millisecond, silence: time.Hour, late: time.Hour},
	}
	m.name.Store(&name)
	m.seen.Store(&ownNode{exists: true, uid: name})
	m.nodes.Store(int64(nodes))
	m.events = newEventSender(m)
	return m
}

// TestOnlyListsAreCompressed expects that requests for all Nodes allow the server to compress its answer,
// whether it does or not, unless the Nodes are whole and the server is busy, and that no other request does. A compressed watch would come in blocks.
func TestOnlyListsAreCompressed(t *testing.T) {
	plain := wiretest.List(t, "9", "", newNode("n0", 1), newNode("n1", 2))
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		q        query
		busy     bool // a small request was slow
		watch    bool
		encoding string // of the answer
		body     []byte
		want     string
		nodes    int
	}{
		"all Nodes":               {encoding: "gzip", body: packed.Bytes(), want: "gzip", nodes: 2},
		"all Nodes, not packed":   {body: plain, want: "gzip", nodes: 2},
		"a page of metadata":      {q: query{metadata: true, limit: 500}, encoding: "gzip", body: packed.Bytes(), want: "gzip", nodes: 2},
		"all Nodes, busy server":  {busy: true, body: plain, nodes: 2},
		"metadata, busy server":   {q: query{metadata: true}, busy: true, encoding: "gzip", body: packed.Bytes(), want: "gzip", nodes: 2},
		"one Node":                {q: query{name: "n0"}, body: plain, nodes: 2},
		"some Nodes":              {q: query{hosts: []string{"n0", "n1"}}, body: plain, nodes: 2},
		"a watch":                 {q: query{metadata: true, revision: 9}, watch: true},
		"an answer that is no gz": {encoding: "gzip", body: plain, want: "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			asked := ""
			m := emulated("n0", 2, &countingServer{answer: func(r *http.Request) *http.Response {
				asked = r.Header.Get("Accept-Encoding")
				return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Encoding": {tc.encoding}}, Body: io.NopCloser(bytes.NewReader(tc.body))}
			}})
			if tc.busy {
				m.client.slow.Store(time.Now().UnixNano())
			}
			nodes := 0
			var err error
			if tc.watch {
				err = m.client.watch(t.Context(), m.decoder, tc.q, func() {}, func(wire.Event) error { return nil })
			} else {
				_, err = m.client.list(t.Context(), m.decoder, tc.q, func(*wire.Node) { nodes++ })
			}
			if asked != tc.want {
				t.Errorf("the request accepts the encoding %q, want %q", asked, tc.want)
			}
			if nodes != tc.nodes || (err == nil) != (nodes > 0) {
				t.Errorf("%d Nodes came, with %v, want %d", nodes, err, tc.nodes)
			}
		})
	}
}

// TestEventsOfAllNodesAreSpread makes 2,000 nodes refuse a bad peer at the same moment. Their
// Events must reach the API server spread over time: a tenth of them in no less than a second.
func TestEventsOfAllNodesAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &countingServer{answer: func(*http.Request) *http.Response {
			return &http.Response{StatusCode: http.StatusCreated, Body: http.NoBody}
		}}
		const nodes = 2000
		var wg sync.WaitGroup
		start := time.Now()
		for n := range nodes {
			m := emulated(fmt.Sprintf("n%d", n), nodes, c)
			wg.Go(func() { m.events.run(t.Context()) })
			m.Warn("FlannelPeerRefused", "bad")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		times := c.times()
		if len(times) != nodes {
			t.Fatalf("%d requests for %d Events", len(times), nodes)
		}
		for i, at := range times[:nodes-nodes/10] {
			if took := times[i+nodes/10].Sub(at); took < time.Second {
				t.Fatalf("%d Events within %s, %s from the start", nodes/10, took, at.Sub(start))
			}
		}
	})
}

// TestRequestsForNodesAreSpread expects that daemons do not request a new Node together, and that
// daemons which a server has refused together do not repeat their requests together.
func TestRequestsForNodesAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var free atomic.Bool
		c := &countingServer{answer: func(*http.Request) *http.Response {
			if !free.Load() {
				return &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}}, Body: io.NopCloser(strings.NewReader("busy"))}
			}
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(wiretest.List(t, "5", "")))}
		}}
		const nodes, daemons = 10000, 200
		cache := &nodeCache{keys: defaultKeys(), own: "n0", entries: make(map[string]*entry, nodes)} // shared by all daemons, which only read it
		for n := range nodes {
			cache.entries[fmt.Sprint(n)] = &entry{name: fmt.Sprint(n)}
		}
		cache.entries["1"].notes[annotation.Managed] = annotation.Note{Text: "true", Present: true}
		for range daemons {
			f := newFollower(emulated("n0", nodes, c), cache, func(subnet.Update) {})
			f.request("1")
			ended := make(chan error, 1)
			context.AfterFunc(t.Context(), func() { ended <- nil })
			go func() {
				defer f.wg.Wait()
				_ = f.run(t.Context(), ended)
			}()
		}
		within := func(what string, from time.Duration) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			at := c.times()
			if len(at) != daemons {
				t.Fatalf("%s: %d requests by %d daemons", what, len(at), daemons)
			}
			if spread := at[len(at)-1].Sub(at[0]); spread < from {
				t.Errorf("%s: all within %s, want %s", what, spread, from)
			}
		}
		within("for one Node", 300*time.Millisecond)
		free.Store(true)
		time.Sleep(2 * time.Second)
		within("after a refusal", 800*time.Millisecond)
	})
}

// TestRefusalOfAProxy expects the message of a refusal whose other fields are not those of a Status.
func TestRefusalOfAProxy(t *testing.T) {
	c := &client{host: "api"}
	for _, body := range []string{`{"status":503,"message":"no backend"}`, `{"code":"503","message":"no backend"}`, `{"message":"no backend","details":"x"}`, `{"message":"no backend","metadata":[]}`, `{"message":"no backend"}`} {
		err := c.refusal(&http.Response{StatusCode: 503, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))})
		if !strings.Contains(err.Error(), "503 no backend") {
			t.Errorf("%s: %v", body, err)
		}
	}
}
