package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"flanneld/pkg/outage"
	"flanneld/subnet"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(watching)
	v := m.view.Swap(nil)
	if v == nil {
		v = m.newView(ctx)
	}
	// Whoever listens now has to be told of everything, which a list does.
	v.revision, v.current = 0, false
	defer func() { m.view.Store(v) }()
	b := m.backoff()
	for {
		var begun time.Time
		err := m.resume(ctx, v, sink)
		if err == nil {
			err = m.follow(ctx, v, sink, func() {
				begun = time.Now()
				m.report(ctx, watching, nil)
			})
		}
		m.lasted(b, begun)
		v.current = err == nil
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			continue
		case errors.Is(err, errRelist):
			v.revision = 0
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

// lasted resets b after a watch that has lasted since it was begun. One that a
// server takes only to end it is as good as one that it refuses.
func (m *Manager) lasted(b *outage.Backoff, begun time.Time) {
	if !begun.IsZero() && time.Since(begun) > m.timing.backoff {
		b.Reset()
	}
}

// resume brings the view up to where a watch can start: by nothing at all where
// the last watch has ended in good order, by a look at the store where it is
// still the same, or by a list. A server takes a watch from a revision that it
// has never seen, and would be silent for long: so it has to be asked first.
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

// manyMissing is how many Nodes are rather asked for by one full list.
const manyMissing = 32

// list returns the view of the store as it is now. What is known of podCIDRs
// spares the list the greater part of every Node.
func (m *Manager) list(ctx context.Context, v *view, s *self) (*view, error) {
	if v.entries == nil {
		return m.listAs(ctx, v, s, query{revision: s.revision})
	}
	next, err := m.listAs(ctx, v, s, query{revision: s.revision, metadata: true})
	if err != nil {
		return nil, err
	}
	missing := next.missing()
	if len(missing) > manyMissing {
		return m.listAs(ctx, v, s, query{revision: s.revision})
	}
	for _, name := range missing {
		got, err := m.read(ctx, name, next.revision)
		if err != nil {
			return nil, err
		}
		next.supply(fetched{name, got})
	}
	return next, nil
}

func (m *Manager) listAs(ctx context.Context, v *view, s *self, q query) (*view, error) {
	next := v.successor()
	on := func(o *object) error {
		next.take(o, !q.metadata, v)
		return nil
	}
	l, err := m.client.list(ctx, m.decoder, q, on)
	if e, ok := errors.AsType[*apiError](err); ok && e.tooLarge {
		// An older server, whose cache lags behind its store: ask the store.
		next, q.revision = v.successor(), 0
		l, err = m.client.list(ctx, m.decoder, q, on)
	}
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	next.complete(*m.name.Load(), l.revision, s, v)
	return next, nil
}

// happened is one event of the watch, whose object is lent.
type happened struct {
	kind string
	o    *object
}

// follow watches from where the view is until the watch ends.
func (m *Manager) follow(ctx context.Context, v *view, sink func(subnet.Update), alive func()) error {
	ctx, cancel := context.WithCancel(ctx)
	events, taken, ended := make(chan happened), make(chan struct{}), make(chan error, 1)
	f := &fetcher{m: m, asked: map[string]bool{}, got: make(chan fetched), slots: make(chan struct{}, fetchers)}
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		f.wg.Wait()
	}()
	wg.Go(func() {
		ended <- m.client.watch(ctx, m.decoder, query{metadata: true, revision: v.revision}, alive, func(kind string, o *object) error {
			select {
			case events <- happened{kind, o}:
			case <-ctx.Done():
				return ctx.Err()
			}
			<-taken
			return nil
		})
	})
	for _, name := range v.missing() {
		f.start(ctx, name, v.revision)
	}
	for {
		var name string
		var err error
		select {
		case e := <-events:
			name, err = v.advance(e)
			if name != "" && v.entries[name].lacks() {
				f.start(ctx, name, v.revision)
			}
			taken <- struct{}{}
		case got := <-f.got:
			name = got.name
			again := f.asked[name]
			delete(f.asked, name)
			if v.supply(got); again && v.entries[name].lacks() {
				f.start(ctx, name, v.revision)
			}
		case err := <-ended:
			return err
		}
		if err != nil {
			return err
		}
		v.publish(ctx, name, sink)
	}
}

// fetchers is how many Nodes are asked for at the same time.
const fetchers = 8

// fetcher asks for single Nodes in full. It ends with the watch that made it.
type fetcher struct {
	m *Manager
	// asked has the Nodes that are being asked for: true if one has changed since,
	// so that the answer may be older than what made it worth asking.
	asked map[string]bool
	got   chan fetched
	slots chan struct{}
	wg    sync.WaitGroup
}

// fetched is what came of it: the name is that of the Node that was asked for.
type fetched struct {
	name string
	self *self
}

// start asks for a Node as it was at revision or later, unless that is under way.
func (f *fetcher) start(ctx context.Context, name string, revision int64) {
	if _, under := f.asked[name]; under {
		f.asked[name] = true
		return
	}
	f.asked[name] = false
	f.wg.Go(func() {
		select {
		case f.slots <- struct{}{}:
			defer func() { <-f.slots }()
		case <-ctx.Done():
			return
		}
		// An activity of its own: the watch that goes on says nothing of it.
		activity := getting + name
		defer f.m.outage.Forget(activity)
		b := f.m.backoff()
		for failed := false; ; failed = true {
			// From the server's cache, if that is no older than what made us ask.
			got, err := f.m.read(ctx, name, revision)
			if err == nil {
				if failed {
					f.m.report(ctx, activity, nil)
				}
				select {
				case f.got <- fetched{name, got}:
				case <-ctx.Done():
				}
				return
			}
			f.m.report(ctx, activity, err)
			if b.Wait(ctx, pause(err)) != nil {
				return
			}
		}
	})
}
