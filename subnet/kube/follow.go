// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// follower follows one watch, and publishes the changes. One goroutine runs it, and only that goroutine uses
// its fields and the cache. Requests run in goroutines of their own, and post what is to be done with
// the answers.
//
// Besides the events it has three duties, each with a timer:
//
//   - Nodes that the watch has brought are requested in full, because they come without podCIDRs. Every daemon of
//     the cluster requests a new Node at the same moment, and many new Nodes would cause many requests. So a
//     daemon sends requests only once in an interval that grows with the number of Nodes. It then requests
//     together all Nodes that have come in that time.
//   - A silent watch is probed. An API server whose cache has stopped, or is far behind, continues to serve
//     watches, but sends no events. So the follower reads this host's Node, which kubelet writes every few
//     minutes, and which the server reads from the store. A watch that does not reach the last change of that
//     Node is stale. The server sends a bookmark every minute, if its etcd reports progress. So a healthy watch is
//     never silent for long, and nothing is read.
//   - The watch ends when it is time for the audit: see restore.go.
type follower struct {
	*Manager
	cache                       *nodeCache
	sink                        func(subnet.Update)
	posts                       chan func()
	wg                          sync.WaitGroup
	flushing, probing, auditing *time.Timer

	requested map[string]bool // the Nodes that are being requested, or wait for that
	waiting   []string        // names of those in requested that no request contains yet
	flushed   time.Time       // when Nodes were requested last
	slots     *semaphore.Weighted

	required int64 // the revision that the watch has to reach, of the last change of this host's Node; 0: none yet
}

func newFollower(m *Manager, cache *nodeCache, sink func(subnet.Update)) *follower {
	f := &follower{
		Manager: m, cache: cache, sink: sink, posts: make(chan func()), requested: map[string]bool{}, slots: semaphore.NewWeighted(fetchers),
		flushing: time.NewTimer(0), probing: time.NewTimer(m.silence()), auditing: time.NewTimer(time.Until(cache.auditAt)),
	}
	f.flushing.Stop()
	if cache.auditAt.IsZero() {
		f.auditing.Stop()
	}
	return f
}

// follow watches from the revision of the cache until the watch ends. It returns errDue if it is time for the
// audit, errStale, wrapped, if the watch is stale, errRelist if the store is older than it was, and otherwise
// the result of client.watch.
func (m *Manager) follow(ctx context.Context, cache *nodeCache, sink func(subnet.Update)) error {
	ctx, cancel := context.WithCancel(ctx)
	f := newFollower(m, cache, sink)
	defer f.wg.Wait()
	defer cancel()
	for _, name := range cache.missing() {
		f.request(name)
	}

	ended := make(chan error, 1)
	q := query{metadata: true, revision: cache.store.Revision}
	on := func(e wire.Event) error {
		applied := make(chan error)
		if !f.post(ctx, func() { applied <- f.apply(ctx, e) }) {
			return ctx.Err()
		}
		return <-applied // the event is valid until on returns
	}
	alive := func() {
		if cache.server != stale {
			m.outage.Report(ctx, watching, nil)
		}
	}
	f.wg.Go(func() { ended <- m.client.watch(ctx, m.decoder, q, alive, on) })
	return f.run(ctx, ended)
}

// run is the loop. It returns what comes on ended, or why the follower gives the watch up.
func (f *follower) run(ctx context.Context, ended <-chan error) error {
	for {
		select {
		case act := <-f.posts:
			act()
		case <-f.flushing.C:
			f.flush(ctx)
		case <-f.auditing.C:
			return errDue
		case <-f.probing.C:
			if err := f.probe(ctx); err != nil {
				return err
			}
		case err := <-ended:
			return err
		}
	}
}

// post makes run call act. It reports false if ctx ends before.
func (f *follower) post(ctx context.Context, act func()) bool {
	select {
	case f.posts <- act:
		return true
	case <-ctx.Done():
		return false
	}
}

// apply applies an event to the cache, and publishes what has changed. It requests a Node that has to be requested.
func (f *follower) apply(ctx context.Context, e wire.Event) error {
	name, err := f.cache.advance(e)
	if err != nil {
		return err
	}
	if f.cache.entries[name].needsRequest() {
		f.request(name)
	}
	f.cache.publish(ctx, name, f.sink)

	if f.cache.store.Revision >= f.required {
		f.probing.Reset(f.silence())
		if f.cache.server == stale {
			f.cache.server = upToDate
			f.outage.Report(ctx, watching, nil)
		}
	}
	return nil
}

// request plans the request of a Node, unless one is in progress.
func (f *follower) request(name string) {
	if f.requested[name] {
		return
	}
	f.requested[name] = true
	if len(f.waiting) == 0 {
		f.flushing.Reset(f.pause())
	}
	f.waiting = append(f.waiting, name)
}

// interval returns the least time between two calls of flush, each of which sends requests.
func (f *follower) interval() time.Duration {
	return f.timing.requestPause * time.Duration(len(f.cache.entries))
}

func (f *follower) pause() time.Duration {
	next := time.Until(f.flushed.Add(f.interval()))
	if next <= 0 {
		return f.client.random(f.timing.requestPause * time.Duration(max(0, len(f.cache.entries)-atOnce)))
	}
	return next + f.client.random(f.interval())
}

// flush requests all waiting Nodes whose podCIDRs are still not known.
func (f *follower) flush(ctx context.Context) {
	f.flushed = time.Now()
	names := slices.DeleteFunc(f.waiting, func(name string) bool {
		if f.cache.entries[name].needsRequest() {
			return false
		}
		delete(f.requested, name)
		return true
	})

	f.waiting = nil
	spread := f.interval()
	for _, a := range f.cache.requests(names) {
		f.wg.Go(func() {
			if err := f.fetch(ctx, &a, spread); err == nil {
				f.post(ctx, func() { f.answered(ctx, &a) })
			}
		})
	}
}

// fetch sends a request again and again until it is answered or ctx ends. A random time up to spread is added
// to each pause, so that daemons which a server has refused together do not repeat their requests together.
func (f *follower) fetch(ctx context.Context, a *nodeRequest, spread time.Duration) error {
	if err := f.slots.Acquire(ctx, 1); err != nil {
		return err
	}
	defer f.slots.Release(1)

	// The request is an activity of its own, because the watch works at the same time.
	return f.retry(ctx, getting+a.names[0], func() error {
		err := f.requestOnce(ctx, a)
		if err != nil {
			_ = wait.For(ctx, f.client.random(spread)) // retry notices the end of ctx
		}
		return err
	})
}

// answered applies an answer to the cache. It requests a Node again if its podCIDRs are still
// not known and one of these is true: the Node has changed since the answer, or a request by label
// has not found it.
func (f *follower) answered(ctx context.Context, got *nodeRequest) {
	f.cache.applyAnswer(got)
	for _, name := range got.names {
		delete(f.requested, name)
		if e := f.cache.entries[name]; e.needsRequest() && (e.version > got.shown || got.isMissing(name)) {
			f.request(name)
		}
		f.cache.publish(ctx, name, f.sink)
	}
}

// silence returns the time for which a watch may be silent before it is probed. It is random, because the
// watches of all nodes become silent at the same time.
func (m *Manager) silence() time.Duration {
	return m.timing.silence + m.client.random(m.timing.silence)
}

// probe reads this host's Node. If the watch has not reached the last change of the Node, it has timing.late to
// reach it. probe returns an error if that time has passed.
func (f *follower) probe(ctx context.Context) error {
	if have := f.cache.store.Revision; have < f.required {
		return &apiError{
			host: f.client.host, kind: "stale", cause: errStale,
			message: fmt.Sprintf("its watch is behind: it has come to resource version %d, and this host's Node has %d", have, f.required),
		}
	}

	name := f.cache.own
	f.wg.Go(func() {
		s, err := f.readNode(ctx, name)
		if err != nil {
			s = &ownNode{} // the store's state is not known, so the watch does not count as stale
		}
		f.post(ctx, func() {
			f.required = s.version
			if f.cache.store.Revision < f.required {
				f.probing.Reset(f.timing.late)
			} else {
				f.probing.Reset(f.silence())
			}
		})
	})
	return nil
}

// errStale means that a watch is behind the store: see follower.
var errStale = errors.New("watch is stale")
