// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

// crowd stands for an API server that many hosts ask.
type crowd struct {
	t     *testing.T
	nodes int
	busy  func(r *http.Request) *http.Response // answers small requests while the server is busy; if it returns nil, they get the usual answer

	mu     sync.Mutex
	free   bool // the server is not busy any more
	counts int  // number of requests for the number of Nodes
	lists  []time.Time
}

func (c *crowd) RoundTrip(r *http.Request) (*http.Response, error) {
	if t := httptrace.ContextClientTrace(r.Context()); t != nil {
		t.WroteRequest(httptrace.WroteRequestInfo{})
	}
	q := r.URL.Query()
	name, own := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name=")
	watch, count := q.Has("watch"), q.Has("limit")
	c.mu.Lock()
	free := c.free
	switch {
	case watch:
	case count:
		c.counts++
	case !own:
		c.lists = append(c.lists, time.Now())
	}
	c.mu.Unlock()
	if watch {
		body, end := io.Pipe()
		context.AfterFunc(r.Context(), func() { end.Close() })
		return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
	}
	if !free && (own || count) {
		if refusal := c.busy(r); refusal != nil {
			return refusal, nil
		}
	}
	if !own {
		name = "another"
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: "7"}}
	list := wiretest.List(c.t, "9", "", node)
	if count {
		others := int64(c.nodes - 1)
		list = wiretest.Object(c.t, &metav1.PartialObjectMetadataList{
			ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: "more", RemainingItemCount: &others},
			Items:    []metav1.PartialObjectMetadata{*wiretest.Metadata(node)},
		})
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(list)))}, nil
}

// slowly waits for so long that a request counts as slow, and leaves the answer to the crowd.
func slowly(*http.Request) *http.Response {
	time.Sleep(2 * slowAfter)
	return nil
}

// refuse returns the answer with which API Priority and Fairness refuses a request.
func refuse(*http.Request) *http.Response {
	return &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}}, Body: io.NopCloser(strings.NewReader("busy"))}
}

// watching starts the watches of hosts that have no last known state.
func (c *crowd) watching(ctx context.Context, hosts int) {
	for n := range hosts {
		name := fmt.Sprintf("n%d", n)
		m := &Manager{
			client: &client{random: randomTime, base: &url.URL{Scheme: "https", Host: "api"}, http: &http.Client{Transport: c}},
			outage: loglimit.NewOutage("the API", nil), decoder: newDecoder(),
			timing: timing{
				request: 10 * time.Second, backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second, vary: 0.5,
				spread: time.Millisecond, silence: time.Hour, late: time.Hour, audit: time.Hour,
			},
		}
		m.name.Store(&name)
		m.cache.Store(newNodeCache(Config{}, nil))
		m.seen.Store(&ownNode{exists: true, uid: name})
		m.cache.Store(newNodeCache(Config{}, nil))
		go func() { _ = m.Watch(ctx, func(subnet.Update) {}) }()
	}
}

// listed returns how long after start each list was requested, in order, and how many requests
// asked for the number of Nodes.
func (c *crowd) listed(start time.Time) (at []time.Duration, counts int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.lists {
		at = append(at, t.Sub(start))
	}
	slices.Sort(at)
	return at, c.counts
}

// TestListsWaitForABusyServer expects no list while small requests are slow or refused. When the
// server answers them quickly again, the lists of all hosts must be spread.
func TestListsWaitForABusyServer(t *testing.T) {
	for name, busy := range map[string]func(*http.Request) *http.Response{"slow": slowly, "refusing": refuse} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const hosts, nodes = 200, 1000
				c := &crowd{t: t, nodes: nodes, busy: busy}
				c.watching(t.Context(), hosts)
				time.Sleep(20 * time.Second)
				start := time.Now()
				if at, _ := c.listed(start); len(at) > 0 {
					t.Fatalf("%d lists came while the server was busy", len(at))
				}
				c.mu.Lock()
				c.free = true
				c.mu.Unlock()
				time.Sleep(time.Minute)
				at, counts := c.listed(start)
				if len(at) != hosts {
					t.Fatalf("%d of %d hosts have listed", len(at), hosts)
				}
				if name == "slow" && counts != hosts { // a refused request for the number is repeated
					t.Errorf("%d requests for the number of Nodes, want one by each of %d hosts", counts, hosts)
				}
				if spread := at[hosts*9/10] - at[hosts/10]; spread < 5*time.Second {
					t.Errorf("four fifths of the lists came within %s", spread)
				}
			})
		})
	}
}

// TestListFromAServerThatIsAlwaysSlow expects that a host lists after turns.most although the
// server is still slow.
func TestListFromAServerThatIsAlwaysSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 300
		c := &crowd{t: t, nodes: nodes, busy: slowly}
		start := time.Now()
		c.watching(t.Context(), 1)
		time.Sleep(5 * time.Minute)
		most := sumFactor * nodes * time.Millisecond
		if at, _ := c.listed(start); len(at) != 1 || at[0] < most/2 || at[0] > 2*most {
			t.Errorf("lists came after %v, want one after some %s", at, most)
		}
	})
}

// TestSlowRequests expects that the time in which a connection is made does not make a request
// count as slow. A refusal, and no answer in time, count as slow.
func TestSlowRequests(t *testing.T) {
	refused := &apiError{code: http.StatusTooManyRequests}
	for _, tc := range []struct {
		name                string
		connecting, answers time.Duration
		err                 error
		slow                bool
	}{
		{name: "quick", answers: slowAfter},
		{name: "slow link", connecting: 2 * slowAfter, answers: slowAfter},
		{name: "slow", answers: slowAfter + 1, slow: true},
		{name: "refused", err: refused, slow: true},
		{name: "without an answer", err: context.DeadlineExceeded, slow: true},
		{name: "not found", err: &apiError{code: http.StatusNotFound}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &client{}
				err := c.patiently(t.Context(), time.Minute, func(ctx context.Context) error {
					time.Sleep(tc.connecting)
					httptrace.ContextClientTrace(ctx).WroteRequest(httptrace.WroteRequestInfo{})
					time.Sleep(tc.answers)
					return tc.err
				})
				if slow := c.slow.Load() != 0; slow != tc.slow || !errors.Is(err, tc.err) {
					t.Errorf("slow is %v, want %v; the error is %v, want %v", slow, tc.slow, err, tc.err)
				}
			})
		})
	}
}

// TestCount asks a real API server for the number of Nodes.
func TestCount(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.setConfig(t, configV4)
	m := f.started(t)
	for _, name := range []string{"counted1", "counted2", "counted3"} {
		f.addNode(t, name, "10.5.9.0/24")
	}
	var all struct{ Items []struct{} }
	if err := json.Unmarshal(f.do(t, http.MethodGet, "/api/v1/nodes", nil), &all); err != nil {
		t.Fatal(err)
	}
	if n, err := m.count(t.Context()); err != nil || n != len(all.Items) || n < 4 {
		t.Errorf("there are %d Nodes, want %d; %v", n, len(all.Items), err)
	}
}
