// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// fetcher asks for Nodes in full. It ends with the watch that made it. All of it
// belongs to the goroutine that follows the watch, but for the requests under way.
//
// A new Node makes every daemon of the cluster ask at the same moment, and many new
// ones would make them ask many times. So a daemon sends at most one request in an
// interval that grows with the number of Nodes, and asks for all Nodes that have
// come meanwhile together.
type fetcher struct {
	m *Manager
	v *view
	// asked has the Nodes that are being asked for, or will be: true if one has changed
	// since the request, so that the answer may be older than that.
	asked   map[string]bool
	waiting []string    // in asked, without a request
	due     *time.Timer // for waiting
	last    time.Time   // when waiting was asked for last
	got     chan fetched
	slots   chan struct{}
	wg      sync.WaitGroup
}

// asking is one request for Nodes.
type asking struct {
	query
	names []string
}

// fetched is what the request has brought, by name.
type fetched struct {
	asking
	found map[string]*self
}

const (
	fetchers = 8 // requests at the same time
	fewNodes = 4 // are asked for one by one: the server finds a name faster than a label
	// together is how many Nodes one request names, so that its URL has less than 8 kB.
	together = 100
	// atOnce is how many daemons may ask at the same time for one new Node: the API
	// server sends them the event over as much time as it needs to answer them.
	atOnce = 5000
)

func newFetcher(m *Manager, v *view) *fetcher {
	f := &fetcher{m: m, v: v, asked: map[string]bool{}, got: make(chan fetched), slots: make(chan struct{}, fetchers), due: time.NewTimer(0)}
	f.due.Stop()
	return f
}

// want has a Node asked for soon.
func (f *fetcher) want(name string) {
	if _, under := f.asked[name]; under {
		f.asked[name] = true
		return
	}
	f.asked[name] = false
	if len(f.waiting) == 0 {
		f.due.Reset(f.pause())
	}
	f.waiting = append(f.waiting, name)
}

// interval is the time for one request.
func (f *fetcher) interval() time.Duration { return f.m.timing.ask*time.Duration(len(f.v.entries)) + 1 }

func (f *fetcher) pause() time.Duration {
	next := time.Until(f.last.Add(f.interval()))
	if next <= 0 {
		return rand.N(f.m.timing.ask*time.Duration(max(0, len(f.v.entries)-atOnce)) + 1)
	}
	return next + rand.N(f.interval())
}

// flush asks for all that wait.
func (f *fetcher) flush(ctx context.Context) {
	f.last = time.Now()
	names := slices.DeleteFunc(f.waiting, func(name string) bool {
		f.asked[name] = false
		if f.v.entries[name].lacks() {
			return false
		}
		delete(f.asked, name)
		return true
	})
	f.waiting = nil
	spread := f.interval()
	for _, a := range f.v.requests(names) {
		f.wg.Go(func() { f.fetch(ctx, a, spread) })
	}
}

// requests returns how to ask for the Nodes of these names: for each as it was at its
// last event or later, which the server that sent the event has in its cache.
func (v *view) requests(names []string) []asking {
	all := v.split(names)
	if v.behind {
		for i := range all {
			all[i].revision = 0
		}
	}
	return all
}

func (v *view) split(names []string) []asking {
	var all []asking
	var labelled []string
	for _, name := range names {
		e := v.entries[name]
		if e.host != "" && len(names) > fewNodes {
			labelled = append(labelled, name)
			continue
		}
		all = append(all, asking{query{name: name, revision: e.version}, []string{name}})
	}
	for chunk := range slices.Chunk(labelled, together) {
		a := asking{names: chunk}
		for _, name := range chunk {
			e := v.entries[name]
			a.hosts, a.revision = append(a.hosts, e.host), max(a.revision, e.version)
		}
		all = append(all, a)
	}
	return all
}

// ask sends one request for Nodes.
func (m *Manager) ask(ctx context.Context, a asking) (fetched, error) {
	got := fetched{a, make(map[string]*self, len(a.names))}
	if _, err := m.readSome(ctx, a.query, func(name string, s *self) { got.found[name] = s }); err != nil {
		return fetched{}, fmt.Errorf("read node %s: %w", a, err)
	}
	return got, nil
}

// askAll sends requests, several at a time, and returns what all of them have brought.
func (m *Manager) askAll(ctx context.Context, requests []asking) ([]fetched, error) {
	answers, errs := make([]fetched, len(requests)), make([]error, len(requests))
	slots := make(chan struct{}, fetchers)
	var wg sync.WaitGroup
	for i, a := range requests {
		slots <- struct{}{}
		wg.Go(func() {
			answers[i], errs[i] = m.ask(ctx, a)
			<-slots
		})
	}
	wg.Wait()
	return answers, cmp.Or(errs...)
}

// String names the Nodes.
func (a asking) String() string {
	if len(a.names) > 1 {
		return fmt.Sprintf("%s and %d others", a.names[0], len(a.names)-1)
	}
	return a.names[0]
}

// fetch sends a request until it is answered. spread is added to pauses, so that
// daemons which a server has refused together do not come back together.
func (f *fetcher) fetch(ctx context.Context, a asking, spread time.Duration) {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return
	}
	// An activity of its own: the watch that goes on says nothing of it.
	activity := getting + a.names[0]
	defer f.m.outage.Forget(activity)
	b := f.m.backoff()
	for failed := false; ; failed = true {
		got, err := f.m.ask(ctx, a)
		if err == nil {
			if failed {
				f.m.report(ctx, activity, nil)
			}
			select {
			case f.got <- got:
			case <-ctx.Done():
			}
			return
		}
		f.m.report(ctx, activity, err)
		if b.Wait(ctx, pause(err)+rand.N(spread)) != nil {
			return
		}
	}
}

// take takes in an answer.
func (f *fetcher) take(got fetched) {
	f.v.supply(got)
	for _, name := range got.names {
		again := f.asked[name]
		delete(f.asked, name)
		if f.v.entries[name].lacks() && (again || got.missed(name)) {
			f.want(name)
		}
	}
}

// missed reports whether the answer lacks a Node. A request for several Nodes selects them by
// their label kubernetes.io/hostname, which can differ from their name. The next request for a
// missed Node is by its name.
func (got fetched) missed(name string) bool { return got.hosts != nil && got.found[name] == nil }
