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

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/parallel"
	"github.com/flanneld/flanneld/subnet"
)

var _ Sweeper = (*dataplane.Reconciler)(nil)

// Programmer is the common part of the networks of all kernel backends. It makes the
// kernel's state match the leases of the peers.
type Programmer struct {
	// Base is the wanted state without any peers.
	Base dataplane.State
	// Desired returns the objects that the kernel should have for one peer's lease. It
	// must be safe for concurrent use. Desired is nil if peers need no objects.
	Desired func(context.Context, subnet.Lease) ([]dataplane.Object, error)
	// Volatile is not zero if the result of Desired also depends on routes of the host. Sync then
	// calls Desired for all peers after a change of such routes, and in passes without a changed
	// lease. Volatile is the least time between two such rounds of calls. Zero means that the result
	// of Desired depends on the lease only.
	Volatile time.Duration

	Reconciler

	objects  map[string][]dataplane.Object // by lease key; nil if Desired must be called for all peers
	keys     map[netip.Prefix]string       // lease keys by destination of a route; nil until the method key is called
	lastCall time.Time                     // when Desired was last called for all peers
	stale    bool                          // the results of Desired may be out of date
}

// SetUp makes the kernel contain Base. It removes only objects that conflict with Base. It returns
// an error if a route of Base is refused, for example because a device of another program is directly
// connected to the destination. See outcome.
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
	p.stale = p.stale || p.Volatile > 0 && len(peers.Changed) == 0
	if peers.All || p.objects == nil || p.stale && time.Since(p.lastCall) >= p.Volatile {
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
	p.stale = p.stale || p.Volatile > 0 && report.Rerouted // this pass has called Desired only for changed leases
	if p.stale {
		o.Again = max(p.Volatile-time.Since(p.lastCall), time.Nanosecond)
	}
	return o, oneline.Join(err, refused)
}

// WithResized returns peers with further keys in Changed: those of the peers with a path whose MTU
// has changed since the last call. Sync calls it. A network that reads Changed itself before it
// calls Sync must call WithResized first, and pass the result to Sync.
func (p *Programmer) WithResized(peers Set) Set {
	if n := p.narrower(); n != nil {
		peers.Changed = n.changed(peers.Changed)
	}
	return peers
}

// Objects implements Inspector.
func (p *Programmer) Objects(key string) []ObjectReport {
	var hs []ObjectReport
	for _, o := range p.objects[key] {
		hs = append(hs, ObjectReport{Object: o.String(), Present: p.Has(o)})
	}
	return hs
}

// all calls Desired for all peers, and makes the kernel match Base and the results. If Desired
// fails, all writes nothing.
func (p *Programmer) all(ctx context.Context, peers Set) (Outcome, error) {
	p.objects, p.keys, p.lastCall, p.stale = nil, nil, time.Now(), false
	if n := p.narrower(); n != nil {
		n.retain(peers.Leases)
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
		p.remember(key, objects[i])
	}

	want := dataplane.NewState()
	for _, of := range p.objects {
		want.Add(of...)
	}

	want.AddState(p.Base)
	report, err := p.Reconcile(ctx, want, peers.Complete)
	o, refused := p.outcome(report)
	if p.stale = p.Volatile > 0 && report.Rerouted; p.stale { // the change may have happened after the calls of Desired
		o.Again = p.Volatile
	}
	return o, oneline.Join(err, refused)
}

// desired returns the wanted objects of the peer with the lease key, with the MTUs of narrow paths.
// It returns none if the peer has no lease in peers.
func (p *Programmer) desired(ctx context.Context, key string, peers Set) (objects []dataplane.Object, err error) {
	l, ok := peers.Leases[key]
	n := p.narrower()
	if !ok {
		l = &subnet.Lease{Key: key} // without subnets
	} else if p.Desired != nil {
		if objects, err = p.Desired(ctx, *l); err != nil {
			return nil, fmt.Errorf("lease %s: %w", key, err)
		}
	}
	if n != nil {
		objects = n.narrow(*l, objects, p.Base)
	}
	return objects, nil
}

// narrower is a Reconciler that also finds the MTUs of the paths to peers, and gives their routes these
// MTUs.
type narrower interface {
	Reconciler
	changed(keys []string) []string         // returns keys, and the keys of peers whose path MTU has changed since the last call
	retain(leases map[string]*subnet.Lease) // forgets the peers without a lease in leases
	narrow(l subnet.Lease, objects []dataplane.Object, base dataplane.State) []dataplane.Object
	size(subnet netip.Prefix) int // see PathMTU
}

// narrower returns the Reconciler if that finds the MTUs of paths, and otherwise nil.
func (p *Programmer) narrower() narrower {
	n, _ := p.Reconciler.(narrower)
	return n
}

// PathMTU implements PathSizer.
func (p *Programmer) PathMTU(subnet netip.Prefix) int {
	if n := p.narrower(); n != nil {
		return n.size(subnet)
	}
	return 0
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

// key returns the key of the lease that needs a route to dst, or "" if none does.
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

// outcome translates a report about routes into an Outcome about leases. A refused route
// of Base belongs to no peer. outcome returns an error about it if the conflict is with
// another device than that of the route, because that device may receive the packets to
// all peers.
func (p *Programmer) outcome(r dataplane.Report) (Outcome, error) {
	o := Outcome{Repaired: r.Repaired, Retry: r.Unreachable}
	var errs []error
	for _, refusal := range r.Refused {
		route := refusal.Route
		switch {
		case len(p.Base.Routes[route.Dst]) == 0:
			o.Refused = append(o.Refused, subnet.Refusal{Key: p.key(route.Dst), Reason: refusal.Reason})
		case refusal.Dev != route.Dev: // otherwise an address on the backend's own device has created the route
			errs = append(errs, fmt.Errorf("put %s: %s", route, refusal.Reason))
		}
	}
	return o, oneline.Join(errs...)
}

// without returns the objects of a that are not in b. Both are short.
func without(a, b []dataplane.Object) []dataplane.Object {
	var rest []dataplane.Object
	for _, o := range a {
		if !slices.Contains(b, o) {
			rest = append(rest, o)
		}
	}
	return rest
}
