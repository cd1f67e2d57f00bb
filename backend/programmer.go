// SPDX-License-Identifier: Apache-2.0

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

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/parallel"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/pathmtu"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// volatilePause is the least time between two calls of Desired for all peers because of routes. A
// router may change its routes all the time.
const volatilePause = time.Second

// Programmer is the network of a kernel backend, or its common part with others. It makes the
// kernel's state match the leases of the peers.
//
// Two backends can share a Programmer, as in a migration. Each of them then has a part of it: a Programmer
// whose Sync writes nothing. The Sync of the whole writes what both parts want, so one request replaces the
// best route to a peer that moves from one to the other.
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
	// Spare is set on a part whose routes of Base stay out of the kernel.
	Spare bool

	// Parts and the fields up to Partial are those of a Programmer that two backends share.
	Parts []*Programmer
	// Merge returns the objects that the kernel should have for the peer with the lease key, from what the
	// parts want. It must be safe for concurrent use. Touch names the keys for which it may return another
	// result.
	Merge func(key string) []dataplane.Object
	// Partial is set if the parts may not have named all that they want. Only what they no longer want is
	// then deleted.
	Partial bool

	*Notifier
	kernel *dataplane.Reconciler // of the whole
	whole  *Programmer           // nil unless p is a part
	prober *pathmtu.Prober       // nil unless Backend.MTU is "probe"
	// probing contains the probers of the parts, by number, for PathMTU.
	probing [2]atomic.Pointer[pathmtu.Prober]
	number  int // of a part

	objects  map[string][]dataplane.Object  // by lease key
	changed  map[string]struct{}            // keys of leases for which Desired or Merge must be called
	all      bool                           // Desired or Merge must be called for all leases
	gone     []dataplane.Object             // no longer wanted, while all peers were not known
	refused  map[string][]dataplane.Refusal // routes that the last Sync could not put, by lease key
	lastCall time.Time                      // when Desired was last called for all peers
	stale    bool                           // the results of Desired may be out of date
}

// Programmer returns the Programmer of a network with this scope. The caller closes it.
func (e Env) Programmer(ctx context.Context, scope dataplane.Scope) (*Programmer, error) {
	p := newProgrammer(ctx)
	if e.Part != nil {
		p = e.Part(ctx)
	} else {
		var err error
		c := dataplane.Config{Kernel: e.Kernel, Scope: scope, Resync: e.Resync}
		p.kernel, err = dataplane.NewReconciler(c)
		if err != nil {
			return nil, err
		}
		p.Forward(p.kernel.Changed())
	}

	if e.ProbesMTU {
		if err := e.probe(ctx, p, scope); err != nil {
			return nil, oneline.Join(err, p.Close())
		}
	}
	return p, nil
}

func newProgrammer(ctx context.Context) *Programmer {
	return &Programmer{
		Base: dataplane.NewState(), Notifier: NewNotifier(ctx),
		objects: map[string][]dataplane.Object{}, changed: map[string]struct{}{}, all: true,
	}
}

// Share gives p two parts, which want nothing yet. For merge see Programmer.Merge.
func (p *Programmer) Share(ctx context.Context, merge func(key string) []dataplane.Object) {
	p.Parts = make([]*Programmer, 2)
	p.Merge = merge
	for i := range p.Parts {
		p.NewPart(ctx, i)
	}
}

// NewPart replaces a part by one that wants nothing yet. Its signals are those of p.
func (p *Programmer) NewPart(ctx context.Context, number int) *Programmer {
	part := newProgrammer(ctx)
	part.Notifier.changed = p.Notifier.changed
	part.kernel = p.kernel
	part.whole = p
	part.number = number
	p.probing[number].Store(nil)
	p.Parts[number] = part
	p.all = true
	return part
}

// Touch makes the next Sync examine the peer with this lease key.
func (p *Programmer) Touch(key string) { p.changed[key] = struct{}{} }

// SweepAt makes the next Sync delete those objects with the keys of objects that nothing wants, even if
// not all peers are known. In a part it does nothing.
func (p *Programmer) SweepAt(objects ...dataplane.Object) {
	if p.whole == nil {
		p.kernel.SweepAt(objects...)
	}
}

// SetUp makes the kernel contain Base. It removes only objects that conflict with Base. It returns an
// error if a route of Base is refused, for example because a device of another program is directly
// connected to the destination.
func (p *Programmer) SetUp(ctx context.Context) error {
	whole := p
	for whole.whole != nil {
		whole = whole.whole
	}
	report, err := p.kernel.Reconcile(ctx, whole.state(), false)
	whole.reroute(report.Rerouted)
	_, refused := p.outcome(report)
	return oneline.Join(err, refused)
}

// base returns the wanted state without any peers, with that of the parts.
func (p *Programmer) base() dataplane.State {
	all := dataplane.NewState()
	all.AddState(p.Base)
	for _, part := range p.Parts {
		more := part.base()
		if part.Spare {
			clear(more.Routes)
		}
		all.AddState(more)
	}
	return all
}

// state returns the wanted state.
func (p *Programmer) state() dataplane.State {
	want := dataplane.StateOf(slices.Collect(maps.Values(p.objects)))
	want.AddState(p.base())
	return want
}

// Sync implements Network. It calls Desired only for the changed leases, unless any lease or any
// result of Desired may have changed. If Desired fails, Sync writes nothing, and the next call of
// Sync calls Desired for the same leases again.
func (p *Programmer) Sync(ctx context.Context, peers Set) (Outcome, error) {
	peers = p.WithResized(peers)
	for _, key := range peers.Changed {
		p.Touch(key)
	}
	p.stale = p.stale || p.Volatile && len(peers.Changed) == 0
	all := peers.All || p.all || p.stale && time.Since(p.lastCall) >= volatilePause
	if all {
		p.all = true // until Desired has succeeded for every peer
		p.lastCall = time.Now()
		p.stale = false
		if p.prober != nil {
			p.prober.Retain(func(key string) bool { return peers.Leases[key] != nil })
		}
	}

	examine := Set{Leases: peers.Leases, All: all, Changed: slices.Collect(maps.Keys(p.changed))}
	keys := KeysToSync(examine, p.objects)
	objects := make([][]dataplane.Object, len(keys))
	errs := make([]error, len(keys))
	parallel.For(len(keys), func(i int) { objects[i], errs[i] = p.desired(ctx, keys[i], peers) })
	if err := cmp.Or(errs...); err != nil {
		return Outcome{}, err
	}

	if len(p.objects) == 0 {
		p.objects = make(map[string][]dataplane.Object, len(keys)) // a map that grows to thousands of keys is copied often
	}
	var removed, added []dataplane.Object
	for i, key := range keys {
		have := p.objects[key]
		removed = append(removed, without(have, objects[i])...)
		if !all {
			added = append(added, without(objects[i], have)...)
		}
		delete(p.objects, key)
		if len(objects[i]) > 0 {
			p.objects[key] = objects[i]
		}
	}
	clear(p.changed)
	p.all = false

	if p.whole != nil {
		p.whole.all = p.whole.all || all
		for _, key := range keys {
			p.whole.Touch(key)
		}
		return Outcome{}, nil
	}
	return p.write(ctx, removed, added, all, peers.Complete)
}

// write makes the kernel match the objects. removed and added are their changes since the last pass. If all
// is set, anything may have changed.
func (p *Programmer) write(
	ctx context.Context, removed, added []dataplane.Object, all, complete bool,
) (Outcome, error) {
	p.gone = append(p.gone, removed...)
	if complete {
		if p.Partial {
			p.kernel.SweepAt(p.gone...)
		}
		p.gone = nil
	}

	var report dataplane.Report
	var err error
	sweep := complete && !p.Partial
	if all {
		report, err = p.kernel.Reconcile(ctx, p.state(), sweep)
	} else {
		report, err = p.kernel.Update(ctx, removed, added, sweep)
	}

	o, refused := p.outcome(report)
	o.Again = p.reroute(report.Rerouted)
	return o, oneline.Join(err, refused)
}

// reroute tells p and its parts whether routes of the host have changed. A route that changed during a pass
// may have changed after Desired had looked at it. again is the time after which Desired must be called for
// all peers because of that; zero if it need not.
func (p *Programmer) reroute(rerouted bool) (again time.Duration) {
	p.stale = p.stale || p.Volatile && rerouted
	if p.stale {
		again = max(volatilePause-time.Since(p.lastCall), time.Nanosecond)
	}
	for _, part := range p.Parts {
		again = least.Of(again, part.reroute(rerouted))
	}
	return again
}

// Check implements Network for backends whose leases contain no data.
func (*Programmer) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Report implements Network.
func (p *Programmer) Report() NetworkReport {
	return NetworkReport{Counts: p.Counts(), PathMTU: p.PathMTU, Objects: p.Objects}
}

// Counts returns for each kind of object how many are wanted, by all parts of the whole, and how many of
// these exist.
func (p *Programmer) Counts() map[string]dataplane.Count { return p.kernel.Counts() }

// Has reports whether the kernel has o. A route of a part may stand by.
func (p *Programmer) Has(o dataplane.Object) bool {
	r, isRoute := o.(dataplane.Route)
	return p.kernel.Has(o) || p.whole != nil && isRoute && p.kernel.Has(r.Standby())
}

// Wanted returns the objects for the peer with the lease key.
func (p *Programmer) Wanted(key string) []dataplane.Object { return p.objects[key] }

// Objects implements NetworkReport.Objects.
func (p *Programmer) Objects(key string) []status.Object {
	var all []status.Object
	for _, o := range p.objects[key] {
		all = append(all, status.Object{Text: o.String(), Present: p.Has(o)})
	}
	return all
}

func (p *Programmer) desired(ctx context.Context, key string, peers Set) (objects []dataplane.Object, err error) {
	l, ok := peers.Leases[key]
	switch {
	case !ok:
		l = &subnet.Lease{Key: key} // without subnets, so the search for its path MTUs ends
	case p.Merge != nil:
		return p.Merge(key), nil
	case p.Desired != nil:
		if objects, err = p.Desired(ctx, *l); err != nil {
			return nil, fmt.Errorf("lease %s: %w", key, err)
		}
	}

	if p.prober != nil {
		objects = p.narrow(*l, objects)
	}
	return objects, nil
}

// RouteTo returns the route to a subnet of the peer with the lease key: one of the peer, or else one to the
// subnet alone through the device of the route to the network around it.
func (p *Programmer) RouteTo(key string, dst netip.Prefix) (_ dataplane.Route, ok bool) {
	return p.routeTo(dst, p.objects[key])
}

func (p *Programmer) routeTo(dst netip.Prefix, objects []dataplane.Object) (_ dataplane.Route, ok bool) {
	for _, o := range objects {
		if r, ok := o.(dataplane.Route); ok && r.Dst == dst {
			return r, true
		}
	}

	for r := range p.Base.AllRoutes() {
		if r.Type == dataplane.Unicast && prefix.Contains(r.Dst, dst) {
			return dataplane.NewRoute(dst, netip.Addr{}, r.Dev, false), true
		}
	}
	for _, part := range p.Parts {
		if r, ok := part.routeTo(dst, nil); ok {
			return r, true
		}
	}
	return dataplane.Route{}, false
}

// Refused returns why the kernel has refused a route of the peer with the lease key, or "" if it has not. It
// considers only routes for which is returns true.
func (p *Programmer) Refused(key string, is func(dataplane.Route) bool) string {
	for _, refusal := range p.refused[key] {
		if is(refusal.Route) {
			return refusal.Reason
		}
	}
	return ""
}

func (p *Programmer) outcome(r dataplane.Report) (Outcome, error) {
	o := Outcome{Repaired: r.Repaired, Retry: r.Unreachable}
	p.refused = map[string][]dataplane.Refusal{}
	if len(r.Refused) == 0 {
		return o, nil
	}

	keys := map[netip.Prefix]string{} // by destination of a route
	for key, objects := range p.objects {
		for _, o := range objects {
			if route, ok := o.(dataplane.Route); ok {
				keys[route.Dst] = key
			}
		}
	}

	base := p.base()
	var errs []error
	for _, refusal := range r.Refused {
		route := refusal.Route
		key, ofPeer := keys[route.Dst]
		switch {
		case ofPeer:
			p.refused[key] = append(p.refused[key], refusal)
			o.Refused = append(o.Refused, subnet.Refusal{Key: key, Reason: refusal.Reason})
		// A route of Base belongs to no peer. If an address on the backend's own device has created
		// the refusing route, packets arrive all the same. Another device may receive those to all peers.
		case base.Has(route) && refusal.Dev != route.Dev:
			errs = append(errs, fmt.Errorf("put %s: %s", route, refusal.Reason))
		}
	}
	return o, oneline.Join(errs...)
}

// Close ends the functions of the Notifier, and the monitor of the kernel unless p is a part. It does not
// change the kernel.
func (p *Programmer) Close() error {
	p.Notifier.Close()
	if p.whole != nil {
		return nil
	}
	return p.kernel.Close()
}

// CloseWith closes the networks of the parts, of which each may be nil, and then p.
func (p *Programmer) CloseWith(networks ...Network) error {
	p.Notifier.Close() // whose functions may use the networks
	var errs []error
	for _, n := range networks {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	return oneline.Join(append(errs, p.Close())...)
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
