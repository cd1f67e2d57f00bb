// SPDX-License-Identifier: Apache-2.0

package location

import (
	"context"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// joint unites the wanted states of both backends, and makes the kernel match the result with one
// Reconciler. Each backend has a view, and uses the view like a Reconciler of its own.
type joint struct {
	backend.Reconciler
	between, inside *view
	// complete is set when both backends have named all peers. Before that, an object that one
	// backend does not want is not deleted, because the other backend may want it.
	complete bool
}

// view is the Reconciler of one backend.
type view struct {
	*joint
	want     dataplane.State
	rerouted bool // see dataplane.Report
}

func newJoint(r backend.Reconciler) *joint {
	j := &joint{Reconciler: r}
	j.between = &view{joint: j, want: dataplane.NewState()}
	j.inside = &view{joint: j, want: dataplane.NewState()}
	return j
}

// Reconcile implements backend.Reconciler.
func (v *view) Reconcile(ctx context.Context, want dataplane.State, sweep bool) (dataplane.Report, error) {
	v.want = want
	all := dataplane.NewState()
	all.AddState(v.between.want)
	all.AddState(v.inside.want)
	report, err := v.joint.Reconcile(ctx, all, sweep && v.complete)
	return v.report(report), err
}

// Update implements backend.Reconciler.
func (v *view) Update(ctx context.Context, removed, added []dataplane.Object, sweep bool) (dataplane.Report, error) {
	v.want.Remove(removed...)
	v.want.Add(added...)
	report, err := v.joint.Update(ctx, removed, added, sweep && v.complete)
	return v.report(report), err
}

// report returns the part of r that is about the backend of v.
func (v *view) report(r dataplane.Report) dataplane.Report {
	// The Reconciler sets Rerouted only once, and both backends must hear of it.
	for _, other := range []*view{v.between, v.inside} {
		other.rerouted = other.rerouted || r.Rerouted
	}
	r.Rerouted = v.rerouted
	v.rerouted = false
	r.Refused = slices.DeleteFunc(r.Refused, func(refused dataplane.Refusal) bool { return !v.want.Has(refused.Route) })
	return r
}

// Changed implements backend.Reconciler. It returns nil, because the network listens to the common
// Reconciler itself.
func (*view) Changed() <-chan struct{} { return nil }

// Close implements backend.Reconciler. The network closes the common Reconciler.
func (*view) Close() error { return nil }
