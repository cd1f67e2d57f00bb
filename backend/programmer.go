// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/parallel"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/subnet"
)

var _ Sweeper = (*dataplane.Reconciler)(nil)

// volatilePause is the least time between two calls of Desired for all peers because of routes. A
// router may change its routes all the time.
const volatilePause = time.Second

// Programmer is the common part of the networks of all kernel backends. It makes the
// kernel's state match the leases of the peers.
type Programmer struct {
	// Base is the wanted state without any peers.
	Base dataplane.State
	// Desired returns the objects that the kernel should have for one peer's lease. It
	// must be safe for concurrent use. Desired is nil if peers need no objects.
	Desired func(context.Context, subnet.Lease) ([]dataplane.Object, error)
	// Volatile is set if the result of Desired also depends on routes of the host, as with direct
	// routing. Sync then calls Desired for all peers after a change of such routes, and in passes
	// without a changed lease, but at most once a second.
	Volatile bool

	Reconciler

	objects  map[string][]dataplane.Object // by lease key; nil if Desired must be called for all peers
	lastCall time.Time                     // when Desired was last called for all peers
	stale    bool                          // the results of Desired may be out of date
}

// SetUp makes the kernel contain Base. It removes only objects that conflict with Base. It returns an
// error if a route of Base is refused, for example because a device of another program is directly
// connected to the destination.
func (p *Programmer) SetUp(ctx context.Context) error {
	base := dataplane.NewState()
	base.AddState(p.Base)
	report, err := p.Reconcile(ctx, base, false)
	_, refused := p.outcome(report)
	return oneline.Join(err, refused)
}

// Sync implements Network. It calls Desired only for the changed leases, unless any lease or any
// result of Desired may have changed. If Desired fails, Sync writes nothing, and the next call of
// Sync calls Desired for all peers.
func (p *Programmer) Sync(ctx context.Context, peers Set) (Outcome, error) {
	peers = p.WithResized(peers)
	p.stale = p.stale || p.Volatile && len(peers.Changed) == 0
	if peers.All || p.objects == nil || p.stale && time.Since(p.lastCall) >= volatilePause {
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
		delete(p.objects, key)
		if len(want) > 0 {
			p.objects[key] = want
		}
		removed = append(removed, without(have, want)...)
		added = append(added, without(want, have)...)
	}

	report, err := p.Update(ctx, removed, added, peers.Complete)
	o, refused := p.outcome(report)
	p.stale = p.stale || p.Volatile && report.Rerouted // this pass has called Desired only for changed leases
	if p.stale {
		o.Again = max(volatilePause-time.Since(p.lastCall), time.Nanosecond)
	}
	return o, oneline.Join(err, refused)
}

// WithResized returns peers with further keys in Changed: those of the peers with a path whose MTU
// has changed since the last call. Sync calls it. A network that reads Changed itself before it
// calls Sync must call WithResized first, and pass the result to Sync.
func (p *Programmer) WithResized(peers Set) Set {
	if n, ok := p.Reconciler.(*narrowing); ok {
		peers.Changed = n.changed(peers.Changed)
	}
	return peers
}

// Report implements Inspector.
func (p *Programmer) Report() NetworkReport { return NetworkReport{Counts: p.Counts()} }

// Objects implements Inspector.
func (p *Programmer) Objects(key string) []ObjectReport {
	var hs []ObjectReport
	for _, o := range p.objects[key] {
		hs = append(hs, ObjectReport{Object: o.String(), Present: p.Has(o)})
	}
	return hs
}

func (p *Programmer) all(ctx context.Context, peers Set) (Outcome, error) {
	p.objects = nil // until Desired has succeeded for every peer
	p.lastCall = time.Now()
	p.stale = false
	if n, ok := p.Reconciler.(*narrowing); ok {
		n.prober.Retain(func(key string) bool { return peers.Leases[key] != nil })
	}

	keys := slices.Collect(maps.Keys(peers.Leases))
	objects := make([][]dataplane.Object, len(keys))
	errs := make([]error, len(keys))
	parallel.For(len(keys), func(i int) { objects[i], errs[i] = p.desired(ctx, keys[i], peers) })
	if err := cmp.Or(errs...); err != nil {
		return Outcome{}, err
	}
	p.objects = make(map[string][]dataplane.Object, len(keys))
	for i, key := range keys {
		if len(objects[i]) > 0 {
			p.objects[key] = objects[i]
		}
	}
	want := dataplane.StateOf(objects)
	want.AddState(p.Base)
	report, err := p.Reconcile(ctx, want, peers.Complete)

	// A route that changed during this pass may have changed after Desired had looked at it.
	o, refused := p.outcome(report)
	p.stale = p.Volatile && report.Rerouted
	if p.stale {
		o.Again = volatilePause
	}
	return o, oneline.Join(err, refused)
}

func (p *Programmer) desired(ctx context.Context, key string, peers Set) (objects []dataplane.Object, err error) {
	l, ok := peers.Leases[key]
	if !ok {
		l = &subnet.Lease{Key: key} // without subnets, so the search for its path MTUs ends
	} else if p.Desired != nil {
		if objects, err = p.Desired(ctx, *l); err != nil {
			return nil, fmt.Errorf("lease %s: %w", key, err)
		}
	}

	if n, ok := p.Reconciler.(*narrowing); ok {
		objects = n.narrow(*l, objects, p.Base)
	}
	return objects, nil
}

// PathMTU implements PathSizer.
func (p *Programmer) PathMTU(subnet netip.Prefix) int {
	if n, ok := p.Reconciler.(*narrowing); ok {
		return n.prober.Size(subnet)
	}
	return 0
}

func (p *Programmer) outcome(r dataplane.Report) (Outcome, error) {
	o := Outcome{Repaired: r.Repaired, Retry: r.Unreachable}
	keys := map[netip.Prefix]string{} // by destination of a route
	if len(r.Refused) > 0 {
		for key, objects := range p.objects {
			for _, o := range objects {
				if route, ok := o.(dataplane.Route); ok {
					keys[route.Dst] = key
				}
			}
		}
	}

	var errs []error
	for _, refusal := range r.Refused {
		route := refusal.Route
		if len(p.Base.Routes[route.Dst]) == 0 {
			o.Refused = append(o.Refused, subnet.Refusal{Key: keys[route.Dst], Reason: refusal.Reason})
			continue
		}

		// A route of Base belongs to no peer. If an address on the backend's own device has created
		// the refusing route, packets arrive all the same. Another device may receive those to all peers.
		if refusal.Dev != route.Dev {
			errs = append(errs, fmt.Errorf("put %s: %s", route, refusal.Reason))
		}
	}
	return o, oneline.Join(errs...)
}

func without(a, b []dataplane.Object) []dataplane.Object {
	var rest []dataplane.Object
	for _, o := range a {
		if !slices.Contains(b, o) {
			rest = append(rest, o)
		}
	}
	return rest
}
