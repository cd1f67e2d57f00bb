// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(watching)
	cache := m.cache.Swap(newNodeCache(Config{}, m.keys))
	defer func() {
		cache.publishMark(sink)
		m.cache.Store(cache)
	}()

	// The receiver may be a new one. It needs all leases, which a list brings.
	if cache.standing == current {
		cache.standing = outdated
	}
	cache.server = upToDate

	b := m.backoff()
	t := &turns{m: m}
	for {
		err := m.resume(ctx, cache, t, sink)
		for err == nil { // a watch that has ended after its time is continued at once
			err = m.follow(ctx, cache, sink)
			if errors.Is(err, errDue) {
				m.audit(ctx, cache, sink)
				err = nil
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := m.afterFailure(ctx, cache, t, b, err); err != nil {
			return err
		}
	}
}

// afterFailure decides what follows from the error of resume or follow, and waits. It returns the error of ctx if
// ctx ends first.
func (m *Manager) afterFailure(ctx context.Context, cache *nodeCache, t *turns, b *wait.Backoff, err error) error {
	switch relist := errors.Is(err, errRelist) || errors.Is(err, errStale); {
	case relist:
		cache.standing = outdated
		if errors.Is(err, errStale) {
			// The next connection may lead to another server.
			cache.server = stale
			m.outage.Report(ctx, watching, err)
			m.client.renew()
		}
		// Other nodes may have to list at the same moment, such as all whose watches this
		// server has served. The cost of each list grows with the number of Nodes, and so does
		// the random pause.
		return b.Wait(ctx, m.client.random(time.Duration(len(cache.entries))*m.timing.spread))

	case errors.Is(err, errBusy):
		return t.wait(ctx, err)
	case cache.standing != current && overloaded(err):
		m.outage.Report(ctx, watching, err)
		if err := t.wait(ctx, err); err != nil {
			return err
		}
		return b.Wait(ctx, 0)

	default:
		m.outage.Report(ctx, watching, err)
		return b.Wait(ctx, apiErrorOf(err).retryAfter)
	}
}

// resume makes the cache current. It first asks the store for its revision, because a server accepts a
// watch from a revision that it has never seen, and sends nothing. If the cache is current and the store is
// still the same, the watch can continue. Otherwise resume continues from the last known state or lists the
// Nodes, and publishes the cache. It returns errBusy if the host has to wait before it lists.
func (m *Manager) resume(ctx context.Context, cache *nodeCache, t *turns, sink func(subnet.Update)) error {
	read := m.recent
	if cache.own != "" || !t.begun.IsZero() {
		read = m.readOwn
	}
	s, err := read(ctx)
	if err != nil {
		return err
	}

	switch cache.standing {
	case outdated:
	case current:
		own := cache.entries[cache.own]
		if s.exists && own != nil && own.uid == s.uid && s.revision >= cache.store.Revision {
			return nil
		}
	case lastKnown:
		if err := m.restore(ctx, cache, s); err != nil {
			return err
		}
		if cache.standing == current {
			cache.publishAll(ctx, sink)
			return nil
		}
	}

	if err := t.check(); err != nil {
		return err
	}
	next, err := m.list(ctx, cache, s)
	if err != nil {
		return err
	}
	t.begun = time.Time{} // the next wait begins with a short pause
	if cache.store.ID != "" && (next.store.ID != cache.store.ID || next.store.Revision < cache.store.Revision) {
		klog.FromContext(ctx).Error(nil, "the Kubernetes API is not the store it was", "was", cache.store, "is", next.store)
	}

	*cache = *next
	cache.publishAll(ctx, sink)
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
		return m.listAs(ctx, cache, s, query{revision: next.ifUpToDate(required)})
	}

	err = m.requestAll(ctx, requests)
	for i := range requests {
		next.applyAnswer(&requests[i])
	}
	return next, err
}

func (m *Manager) listAs(ctx context.Context, cache *nodeCache, s *ownNode, q query) (*nodeCache, error) {
	next := cache.successor()
	same := false
	l, err := m.client.list(ctx, m.decoder, q, func(n *wire.Node) {
		if next.put(n, !q.metadata, cache) {
			same = true
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	next.complete(*m.name.Load(), l, s, cache, same)
	m.nodes.Store(int64(len(next.entries)))
	return next, nil
}
