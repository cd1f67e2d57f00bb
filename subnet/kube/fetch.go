// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// fetcher requests Nodes in full. It ends with the watch for which it was made. The requests run in
// goroutines of their own. Only the goroutine that follows the watch uses everything else.
//
// Every daemon of the cluster requests a new Node at the same moment, and many new Nodes would
// cause many requests. So a daemon sends requests only once in an interval that grows with the
// number of Nodes. It then requests together all Nodes that have come in that time.
type fetcher struct {
	m     *Manager
	cache *nodeCache
	// requested contains the Nodes that are being requested, or wait for that. The value is true if
	// the Node has changed since the request, so that the answer may be older than that change.
	requested map[string]bool
	waiting   []string    // names of those in requested that no request contains yet
	due       *time.Timer // fires when the Nodes in waiting have to be requested
	last      time.Time   // when Nodes were requested last
	answers   chan fetched
	slots     chan struct{}
	wg        sync.WaitGroup
}

// nodeRequest is one request for the Nodes with these names.
type nodeRequest struct {
	query
	names []string
}

// fetched is the answer to a request. found has the Nodes in the answer, by name.
type fetched struct {
	nodeRequest
	found map[string]*ownNode
}

const (
	fetchers = 8 // the most requests at the same time
	fewNodes = 4 // up to this number, Nodes are requested one by one: the server finds a name faster than a label
	// together is the most Nodes in one request, so that its URL has less than 8 kB.
	together = 100
	// atOnce is the largest number of Nodes in a cluster with which all daemons may request one new
	// Node at the same time: the API server needs as much time to send them the event as to answer
	// them.
	atOnce = 5000
)

func newFetcher(m *Manager, cache *nodeCache) *fetcher {
	f := &fetcher{m: m, cache: cache, requested: map[string]bool{}, answers: make(chan fetched), slots: make(chan struct{}, fetchers), due: time.NewTimer(0)}
	f.due.Stop()
	return f
}

// request makes the fetcher request a Node soon. If a request for it is in progress, request
// records that the Node has changed since.
func (f *fetcher) request(name string) {
	if _, under := f.requested[name]; under {
		f.requested[name] = true
		return
	}
	f.requested[name] = false
	if len(f.waiting) == 0 {
		f.due.Reset(f.pause())
	}
	f.waiting = append(f.waiting, name)
}

// interval returns the least time between two calls of flush, each of which sends requests.
func (f *fetcher) interval() time.Duration {
	return f.m.timing.requestPause*time.Duration(len(f.cache.entries)) + 1
}

func (f *fetcher) pause() time.Duration {
	next := time.Until(f.last.Add(f.interval()))
	if next <= 0 {
		return f.m.client.random(f.m.timing.requestPause * time.Duration(max(0, len(f.cache.entries)-atOnce)))
	}
	return next + f.m.client.random(f.interval())
}

// flush requests all waiting Nodes whose podCIDRs are still not known.
func (f *fetcher) flush(ctx context.Context) {
	f.last = time.Now()
	names := slices.DeleteFunc(f.waiting, func(name string) bool {
		f.requested[name] = false
		if f.cache.entries[name].needsRequest() {
			return false
		}
		delete(f.requested, name)
		return true
	})

	f.waiting = nil
	spread := f.interval()
	for _, a := range f.cache.requests(names) {
		f.wg.Go(func() { f.fetch(ctx, a, spread) })
	}
}

// requests returns the requests for the Nodes with these names. Each Node is requested at the
// revision of its last event or a later one. The server that has sent the event has that revision
// in its cache. If the server's cache was behind, the Nodes are requested from the store.
func (c *nodeCache) requests(names []string) []nodeRequest {
	all := c.split(names)
	if c.behind {
		for i := range all {
			all[i].revision = 0
		}
	}
	return all
}

func (c *nodeCache) split(names []string) []nodeRequest {
	var all []nodeRequest
	var labelled []string
	for _, name := range names {
		e := c.entries[name]
		if e.host != "" && len(names) > fewNodes {
			labelled = append(labelled, name)
			continue
		}
		all = append(all, nodeRequest{query{name: name, revision: e.version}, []string{name}})
	}

	for chunk := range slices.Chunk(labelled, together) {
		a := nodeRequest{names: chunk}
		for _, name := range chunk {
			e := c.entries[name]
			a.hosts, a.revision = append(a.hosts, e.host), max(a.revision, e.version)
		}
		all = append(all, a)
	}
	return all
}

// requestOnce sends one request for Nodes.
func (m *Manager) requestOnce(ctx context.Context, a nodeRequest) (fetched, error) {
	got := fetched{a, make(map[string]*ownNode, len(a.names))}
	if _, err := m.readNodes(ctx, a.query, func(name string, s *ownNode) { got.found[name] = s }); err != nil {
		return fetched{}, fmt.Errorf("read node %s: %w", a, err)
	}
	return got, nil
}

// requestAll sends requests, several at a time, and returns all answers. If requests fail, it also
// returns the error of the first of them, and their answers are empty.
func (m *Manager) requestAll(ctx context.Context, requests []nodeRequest) ([]fetched, error) {
	answers := make([]fetched, len(requests))
	errs := make([]error, len(requests))
	slots := make(chan struct{}, fetchers)
	var wg sync.WaitGroup
	for i, a := range requests {
		slots <- struct{}{}
		wg.Go(func() {
			answers[i], errs[i] = m.requestOnce(ctx, a)
			<-slots
		})
	}
	wg.Wait()
	return answers, cmp.Or(errs...)
}

// String returns the names of the Nodes, or the first one and the number of the others.
func (a nodeRequest) String() string {
	if len(a.names) > 1 {
		return fmt.Sprintf("%s and %d others", a.names[0], len(a.names)-1)
	}
	return a.names[0]
}

// fetch sends a request again and again until it is answered or ctx ends, and sends the answer on
// f.answers. A random time up to spread is added to each pause, so that daemons which a server has
// refused together do not repeat their requests together.
func (f *fetcher) fetch(ctx context.Context, a nodeRequest, spread time.Duration) {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return
	}

	// The request is an activity of its own, because the watch works at the same time.
	activity := getting + a.names[0]
	defer f.m.outage.Forget(activity)
	b := f.m.backoff()
	for failed := false; ; failed = true {
		got, err := f.m.requestOnce(ctx, a)
		if err == nil {
			if failed {
				f.m.report(ctx, activity, nil)
			}
			select {
			case f.answers <- got:
			case <-ctx.Done():
			}
			return
		}
		f.m.report(ctx, activity, err)
		if b.Wait(ctx, retryAfter(err)+f.m.client.random(spread)) != nil {
			return
		}
	}
}

// applyAnswer applies an answer to the cache. It requests a Node again if its podCIDRs are still
// not known and one of these is true: the Node has changed since the request, or a request by label
// has not found it.
func (f *fetcher) applyAnswer(got fetched) {
	f.cache.applyAnswer(got)
	for _, name := range got.names {
		again := f.requested[name]
		delete(f.requested, name)
		if f.cache.entries[name].needsRequest() && (again || got.isMissing(name)) {
			f.request(name)
		}
	}
}

// isMissing reports whether a Node is missing in the answer to a request by label. Such a request
// selects several Nodes by their label kubernetes.io/hostname, and the label may have changed
// since. The next request for a missing Node is by its name. isMissing reports false for the answer
// to a request by name.
func (got fetched) isMissing(name string) bool { return got.hosts != nil && got.found[name] == nil }

// applyAnswer puts the podCIDRs in the answer to a request for Nodes into the cache.
func (c *nodeCache) applyAnswer(got fetched) {
	for _, name := range got.names {
		e := c.entries[name]
		s := got.found[name]
		switch {
		case e == nil:
		case s != nil && s.uid == e.uid:
			c.setCIDRs(e, s.cidrs, s.cidrsErr)
			c.decode(e)
			e.host = ""
		case got.isMissing(name):
			e.host = ""
		}
	}
}
