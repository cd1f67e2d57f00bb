// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(watching)
	cache := m.cache.Swap(nil)
	if cache == nil {
		cache = m.newNodeCache(ctx)
	}

	// The receiver may be a new one. It needs all leases, which a list brings.
	cache.revision = 0
	cache.current = false
	cache.stale = false
	defer func() {
		cache.publishMark(sink)
		m.cache.Store(cache)
	}()

	b := m.backoff()
	t := &turns{m: m}
	for {
		var begun time.Time
		err := m.resume(ctx, cache, t, sink)
		if err == nil {
			err = m.follow(ctx, cache, sink, func() {
				begun = time.Now()
				if !cache.stale {
					m.report(ctx, watching, nil)
				}
			})
		}
		m.resetAfterLongWatch(b, begun)
		cache.current = err == nil

		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			continue
		case errors.Is(err, errRelist), errors.Is(err, errStale):
			cache.revision = 0
			if errors.Is(err, errStale) {
				// The next connection may lead to another server.
				cache.stale = true
				m.report(ctx, watching, err)
				m.client.renew()
			}
			// Other nodes may have to list at the same moment, such as all whose watches this
			// server has served. The cost of each list grows with the number of Nodes, and so does
			// the random pause.
			err = b.Wait(ctx, m.client.random(time.Duration(len(cache.entries))*m.timing.spread))

		case errors.Is(err, errBusy):
			err = t.wait(ctx, len(cache.entries), err)
		case cache.revision == 0 && overloaded(err):
			m.report(ctx, watching, err)
			if err = t.wait(ctx, len(cache.entries), err); err == nil {
				err = b.Wait(ctx, 0)
			}

		default:
			m.report(ctx, watching, err)
			err = b.Wait(ctx, retryAfter(err))
		}
		if err != nil {
			return err
		}
	}
}

// resume brings the cache to a revision from which a watch can start. If the last watch has ended
// after its time, there is nothing to do. Otherwise resume first asks the store for its revision,
// because a server accepts a watch from a revision that it has never seen, and sends nothing. If
// the store is still the same, the watch can continue. If the store is another one, or there was no
// list yet, resume continues from the last known state or lists the Nodes, and publishes the cache.
// It returns errBusy if the host has to wait before it lists.
func (m *Manager) resume(ctx context.Context, cache *nodeCache, t *turns, sink func(subnet.Update)) error {
	if cache.current && cache.revision != 0 {
		return nil
	}

	var s *ownNode
	var err error
	if cache.listed {
		s, err = m.readOwn(ctx)
	} else {
		s, err = m.recent(ctx)
	}
	if err != nil {
		return err
	}
	if cache.revision != 0 && s.revision >= cache.revision && s.exists && cache.hasNode(*m.name.Load(), s.uid) {
		return nil
	}
	if restored, err := m.restore(ctx, cache, s); err != nil {
		return err
	} else if restored {
		sink(cache.update(nil))
		return nil
	}
	if err := t.check(); err != nil {
		return err
	}
	next, err := m.list(ctx, cache, s)
	if err != nil {
		return err
	}
	t.reset()
	if cache.store.ID != "" && (next.store.ID != cache.store.ID || next.store.Revision < cache.store.Revision) {
		klog.FromContext(ctx).Error(nil, "the Kubernetes API has not the store it had", "was", cache.store, "is", next.store)
	}

	for name, e := range next.entries {
		cache.logUnreadable(ctx, name, cache.entries[name], e)
	}
	*cache = *next
	sink(cache.update(nil))
	return nil
}

// manyRequests is the number of requests for Nodes above which one list of all Nodes in full is
// cheaper.
const manyRequests = 32

// list returns a new cache, filled from a list that has reached the revision cache.required. If
// cache knows podCIDRs, list requests only the metadata of the Nodes, because the rest of a Node is
// several times as large. After that it requests in full the Nodes whose podCIDRs are not known, or
// all Nodes if that needs fewer requests: see manyRequests.
func (m *Manager) list(ctx context.Context, cache *nodeCache, s *ownNode) (*nodeCache, error) {
	required := cache.required(s)
	if cache.entries == nil {
		return m.listAs(ctx, cache, s, query{revision: required})
	}

	next, err := m.listAs(ctx, cache, s, query{revision: required, metadata: true})
	if err != nil {
		return nil, err
	}
	requests := next.requests(next.missing())
	if len(requests) > manyRequests {
		if next.behind {
			required = 0
		}
		return m.listAs(ctx, cache, s, query{revision: required})
	}

	answers, err := m.requestAll(ctx, requests)
	for _, got := range answers {
		next.applyAnswer(got)
	}
	return next, err
}

func (m *Manager) listAs(ctx context.Context, cache *nodeCache, s *ownNode, q query) (*nodeCache, error) {
	next := cache.successor()
	on := func(n *wire.Node) { next.put(n, !q.metadata, cache) }
	l, err := m.client.list(ctx, m.decoder, q, on)
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	next.complete(*m.name.Load(), l, s, cache)
	m.nodes.Store(int64(len(next.entries)))
	return next, nil
}

// follow watches from the revision of the cache until the watch ends, and publishes the changes.
// Meanwhile it requests new Nodes, probes the watch when it is silent, and makes the audit. It
// returns errStale, wrapped, if the watch is stale, errRelist if the store is older than it was,
// and otherwise the result of client.watch.
func (m *Manager) follow(ctx context.Context, cache *nodeCache, sink func(subnet.Update), alive func()) error {
	ctx, cancel := context.WithCancel(ctx)
	events := make(chan wire.Event)
	taken := make(chan struct{})
	ended := make(chan error, 1)
	f := newFetcher(m, cache)
	defer f.due.Stop()
	p := newProbe(m, cache)
	defer p.due.Stop()
	a := newAudit(m, cache)
	defer a.due.Stop()
	defer func() {
		cancel()
		f.wg.Wait()
	}()

	f.wg.Go(func() {
		ended <- m.client.watch(ctx, m.decoder, query{metadata: true, revision: cache.revision}, alive, func(e wire.Event) error {
			select {
			case events <- e:
			case <-ctx.Done():
				return ctx.Err()
			}
			<-taken
			return nil
		})
	})

	for _, name := range cache.missing() {
		f.request(name)
	}
	for {
		select {
		case e := <-events:
			name, err := cache.advance(e)
			taken <- struct{}{}
			if err != nil {
				return err
			}
			if name != "" && cache.entries[name].needsRequest() {
				f.request(name)
			}
			p.applyEvent(ctx)
			cache.publish(ctx, name, sink)
			a.compare(ctx, f, sink)

		case <-f.due.C:
			f.flush(ctx)
		case got := <-f.answers:
			f.applyAnswer(got)
			for _, name := range got.names {
				cache.publish(ctx, name, sink)
			}

		case <-p.due.C:
			if err := p.fire(ctx, &f.wg); err != nil {
				return err
			}

		case s := <-p.got:
			p.applyAnswer(s)
		case <-a.due.C:
			a.begin(ctx, &f.wg)
		case r := <-a.got:
			a.setList(r)
			a.compare(ctx, f, sink)
		case err := <-ended:
			return err
		}
	}
}
