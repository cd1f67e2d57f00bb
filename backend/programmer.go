package backend

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/oneline"
	"flanneld/pkg/parallel"
	"flanneld/subnet"
)

// Programmer is what the networks of all kernel backends have in common: it
// holds the kernel to what the peers' leases ask for.
type Programmer struct {
	// Base is what the kernel holds without any peers.
	Base dataplane.State
	// Desired returns what the kernel holds for one peer's lease; nil for nothing.
	// It is safe for concurrent use. It is nil itself if that is so for all peers.
	Desired func(context.Context, subnet.Lease) ([]dataplane.Object, error)
	// Volatile says that Desired depends on more than the lease: it is asked
	// again for all peers when the kernel has announced something, but not more
	// often than once in this time. Zero means that it does not.
	Volatile time.Duration

	*dataplane.Reconciler

	objects map[string][]dataplane.Object // by lease key; nil: all have to be asked for
	keys    map[netip.Prefix]string       // lease keys by destination; nil until one is looked for
	asked   time.Time                     // for all of them
	stale   bool                          // the answers may be others by now
}

// SetUp makes the kernel hold Base, and removes nothing but what is in its way.
func (p *Programmer) SetUp(ctx context.Context) error {
	base := dataplane.NewState()
	base.AddState(p.Base)
	report, err := p.Reconcile(ctx, base, false)
	_, refused := p.outcome(report)
	return oneline.Join(err, refused)
}

// Sync implements Network. It costs what has changed in the set, unless
// everything may have.
func (p *Programmer) Sync(ctx context.Context, peers Set) (Outcome, error) {
	p.stale = p.stale || p.Volatile > 0 && len(peers.Changed) == 0
	if peers.All || p.objects == nil || p.stale && time.Since(p.asked) >= p.Volatile {
		return p.all(ctx, peers)
	}
	var removed, added []dataplane.Object
	for _, key := range peers.Changed {
		want, err := p.desired(ctx, key, peers)
		if err != nil {
			p.objects = nil
			return Outcome{}, err
		}
		have := p.objects[key]
		p.forget(key)
		p.remember(key, want)
		removed = append(removed, without(have, want)...)
		added = append(added, without(want, have)...)
	}
	report, err := p.Update(ctx, removed, added, peers.Complete)
	o, refused := p.outcome(report)
	p.stale = p.stale || p.Volatile > 0 && report.Rerouted // a changed lease may have come with it
	if p.stale {
		o.Again = max(p.Volatile-time.Since(p.asked), time.Nanosecond)
	}
	return o, oneline.Join(err, refused)
}

// Holdings implements Inspector.
func (p *Programmer) Holdings(key string) []Holding {
	var hs []Holding
	for _, o := range p.objects[key] {
		hs = append(hs, Holding{Object: o.String(), Present: p.Holds(o)})
	}
	return hs
}

// all asks for everything anew.
func (p *Programmer) all(ctx context.Context, peers Set) (Outcome, error) {
	p.objects, p.keys, p.asked, p.stale = nil, nil, time.Now(), false
	keys := slices.Collect(maps.Keys(peers.Leases))
	objects, errs := make([][]dataplane.Object, len(keys)), make([]error, len(keys))
	var failed atomic.Bool // one is enough
	parallel.For(len(keys), func(i int) {
		if !failed.Load() {
			objects[i], errs[i] = p.desired(ctx, keys[i], peers)
			if errs[i] != nil {
				failed.Store(true)
			}
		}
	})
	if err := cmp.Or(errs...); err != nil {
		return Outcome{}, err
	}
	p.objects = make(map[string][]dataplane.Object, len(keys))
	for i, key := range keys {
		p.remember(key, objects[i])
	}
	want := dataplane.StateOf(p.everything)
	want.AddState(p.Base)
	report, err := p.Reconcile(ctx, want, peers.Complete)
	o, refused := p.outcome(report)
	if p.stale = p.Volatile > 0 && report.Rerouted; p.stale { // perhaps after they were asked
		o.Again = p.Volatile
	}
	return o, oneline.Join(err, refused)
}

// everything iterates over what all peers ask for.
func (p *Programmer) everything(yield func(dataplane.Object) bool) {
	for _, of := range p.objects {
		for _, o := range of {
			if !yield(o) {
				return
			}
		}
	}
}

// desired is what the peer with that key asks for: nothing if it is gone.
func (p *Programmer) desired(ctx context.Context, key string, peers Set) ([]dataplane.Object, error) {
	l, ok := peers.Leases[key]
	if !ok || p.Desired == nil {
		return nil, nil
	}
	objects, err := p.Desired(ctx, *l)
	if err != nil {
		return nil, fmt.Errorf("lease %s: %w", key, err)
	}
	return objects, nil
}

func (p *Programmer) remember(key string, objects []dataplane.Object) {
	if len(objects) == 0 {
		return
	}
	p.objects[key] = objects
	if p.keys != nil {
		p.index(key, objects)
	}
}

func (p *Programmer) index(key string, objects []dataplane.Object) {
	for _, o := range objects {
		if r, ok := o.(dataplane.Route); ok {
			p.keys[r.Dst] = key
		}
	}
}

// key is that of the lease that asks for a route to dst.
func (p *Programmer) key(dst netip.Prefix) string {
	if p.keys == nil {
		p.keys = make(map[netip.Prefix]string, len(p.objects))
		for key, objects := range p.objects {
			p.index(key, objects)
		}
	}
	return p.keys[dst]
}

func (p *Programmer) forget(key string) {
	for _, o := range p.objects[key] {
		if r, ok := o.(dataplane.Route); ok && p.keys[r.Dst] == key {
			delete(p.keys, r.Dst)
		}
	}
	delete(p.objects, key)
}

// outcome says in terms of leases what a report says in terms of routes. Those of
// Base are no peer's: packets to all of them may leave by what is in the way.
func (p *Programmer) outcome(r dataplane.Report) (Outcome, error) {
	o := Outcome{Repaired: r.Repaired, Retry: r.Unreachable}
	var errs []error
	for _, refusal := range r.Refused {
		route := refusal.Route
		switch {
		case len(p.Base.Routes[route.Dst]) == 0:
			o.Refused = append(o.Refused, subnet.Refusal{Key: p.key(route.Dst), Reason: refusal.Reason})
		case refusal.Dev != route.Dev: // else an address on our own device has made the route
			errs = append(errs, fmt.Errorf("put %s: %s", route, refusal.Reason))
		}
	}
	return o, oneline.Join(errs...)
}

// without returns those of a that are not in b. Both are short.
func without(a, b []dataplane.Object) []dataplane.Object {
	var rest []dataplane.Object
	for _, o := range a {
		if !slices.Contains(b, o) {
			rest = append(rest, o)
		}
	}
	return rest
}
