// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(watching)
	v := m.view.Swap(nil)
	if v == nil {
		v = m.newView(ctx)
	}
	// A new receiver needs all leases, which a list brings.
	v.revision, v.current, v.blind = 0, false, false
	defer func() {
		v.part(sink)
		m.view.Store(v)
	}()
	b := m.backoff()
	for {
		var begun time.Time
		err := m.resume(ctx, v, sink)
		if err == nil {
			err = m.follow(ctx, v, sink, func() {
				begun = time.Now()
				if !v.blind {
					m.report(ctx, watching, nil)
				}
			})
		}
		m.lasted(b, begun)
		v.current = err == nil
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			continue
		case errors.Is(err, errRelist), errors.Is(err, errStale):
			v.revision = 0
			if errors.Is(err, errStale) {
				// A new connection may lead to another server.
				v.blind = true
				m.report(ctx, watching, err)
				m.client.renew()
			}
			// All nodes have to list again at this moment, and what a list
			// costs grows with their number.
			err = b.Wait(ctx, rand.N(time.Duration(len(v.entries))*m.timing.spread+1))
		default:
			m.report(ctx, watching, err)
			err = b.Wait(ctx, pause(err))
		}
		if err != nil {
			return err
		}
	}
}

// lasted resets b after a watch that has lasted for some time. A watch that a server ends at once
// counts like one that it refuses.
func (m *Manager) lasted(b *wait.Backoff, begun time.Time) {
	if !begun.IsZero() && time.Since(begun) > m.timing.backoff {
		b.Reset()
	}
}

// resume brings the view to a revision from which a watch can start. After a watch that has ended
// in good order there is nothing to do. Otherwise resume asks the store for its revision first,
// because a server accepts a watch from a revision that it has never seen and is silent then. If
// the store is not the same, resume lists the Nodes.
func (m *Manager) resume(ctx context.Context, v *view, sink func(subnet.Update)) error {
	if v.current && v.revision != 0 {
		return nil
	}
	var s *self
	var err error
	if v.listed {
		s, err = m.look(ctx)
	} else {
		s, err = m.recent(ctx)
	}
	if err != nil {
		return err
	}
	if v.revision != 0 && s.revision >= v.revision && s.exists && v.has(*m.name.Load(), s.uid) {
		return nil
	}
	if restored, err := m.restore(ctx, v, s); err != nil {
		return err
	} else if restored {
		sink(v.update(nil))
		return nil
	}
	next, err := m.list(ctx, v, s)
	if err != nil {
		return err
	}
	if v.store.ID != "" && (next.store.ID != v.store.ID || next.store.Revision < v.store.Revision) {
		klog.FromContext(ctx).Error(nil, "the Kubernetes API has not the store it had", "was", v.store, "is", next.store)
	}
	for name, e := range next.entries {
		logUnreadable(ctx, name, v.entries[name], e)
	}
	*v = *next
	sink(v.update(nil))
	return nil
}

// manyRequests is the number of requests for Nodes above which one full list is cheaper.
const manyRequests = 32

// list returns a view of the present state of the store. It requests metadata only if podCIDRs are
// known, because the rest of a Node is several times as large.
func (m *Manager) list(ctx context.Context, v *view, s *self) (*view, error) {
	required := v.required(s)
	if v.entries == nil {
		return m.listAs(ctx, v, s, query{revision: required})
	}
	next, err := m.listAs(ctx, v, s, query{revision: required, metadata: true})
	if err != nil {
		return nil, err
	}
	requests := next.requests(next.missing())
	if len(requests) > manyRequests {
		if next.behind {
			required = 0
		}
		return m.listAs(ctx, v, s, query{revision: required})
	}
	answers, err := m.askAll(ctx, requests)
	for _, got := range answers {
		next.supply(got)
	}
	return next, err
}

func (m *Manager) listAs(ctx context.Context, v *view, s *self, q query) (*view, error) {
	next := v.successor()
	on := func(n *wire.Node) { next.take(n, !q.metadata, v) }
	l, err := m.client.list(ctx, m.decoder, q, on)
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	next.complete(*m.name.Load(), l, s, v)
	m.nodes.Store(int64(len(next.entries)))
	return next, nil
}

// follow watches from the revision of the view until the watch ends.
func (m *Manager) follow(ctx context.Context, v *view, sink func(subnet.Update), alive func()) error {
	ctx, cancel := context.WithCancel(ctx)
	events, taken, ended := make(chan wire.Event), make(chan struct{}), make(chan error, 1)
	f := newFetcher(m, v)
	defer f.due.Stop()
	p := newProbe(m, v)
	defer p.due.Stop()
	a := newAudit(m, v)
	defer a.due.Stop()
	defer func() {
		cancel()
		f.wg.Wait()
	}()
	f.wg.Go(func() {
		ended <- m.client.watch(ctx, m.decoder, query{metadata: true, revision: v.revision}, alive, func(e wire.Event) error {
			select {
			case events <- e:
			case <-ctx.Done():
				return ctx.Err()
			}
			<-taken
			return nil
		})
	})
	for _, name := range v.missing() {
		f.want(name)
	}
	for {
		select {
		case e := <-events:
			name, err := v.advance(e)
			taken <- struct{}{}
			if err != nil {
				return err
			}
			if name != "" && v.entries[name].lacks() {
				f.want(name)
			}
			p.heard(ctx)
			v.publish(ctx, name, sink)
			a.compare(ctx, f, sink)
		case <-f.due.C:
			f.flush(ctx)
		case got := <-f.got:
			f.take(got)
			for _, name := range got.names {
				v.publish(ctx, name, sink)
			}
		case <-p.due.C:
			if err := p.fire(ctx, &f.wg); err != nil {
				return err
			}
		case s := <-p.got:
			p.take(s)
		case <-a.due.C:
			a.begin(ctx, &f.wg)
		case r := <-a.got:
			a.take(r)
			a.compare(ctx, f, sink)
		case err := <-ended:
			return err
		}
	}
}
