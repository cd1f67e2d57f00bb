// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Report is the result of Reconcile or Update. Puts and Deletes count the changes that they
// have tried to make. Of the puts of the bulk start, they count only those that succeeded.
type Report struct {
	Puts, Deletes int
	// Repaired is the number of these changes that undo a change by another program.
	// Reconcile counts only changes that the kernel has announced. Update may also count
	// changes that a read has found.
	Repaired int
	// Refused contains the wanted routes that were not created, with the reasons. Unless
	// there was an error, all other wanted objects exist. After an error Refused is empty.
	Refused []Refusal
	// Unreachable is set if the kernel has refused a route because of its gateway. The
	// cause may disappear without an announcement, so the caller should try again later.
	Unreachable bool
	// Rerouted is set if the kernel has announced a change after which OnLink may return
	// another result. After an error it is false, and the next Report without an error sets
	// it.
	Rerouted bool
}

// count adds ops to the report. repair reports whether a change undoes one by another program.
func (r *Report) count(ops []Op, repair func(Object) bool) {
	for _, op := range ops {
		if op.Delete {
			r.Deletes++
		} else {
			r.Puts++
		}
		if repair(op.Object) {
			r.Repaired++
		}
	}
}

// passes limits how many passes one Reconcile or Update makes. The last pass finds nothing
// to do. Duplicates of a route take two passes, or four if a delete removes the route that
// should stay. A link that lost its IPv6 addresses while it came up takes three, and new
// devices take one more.
const passes = 6

// Config configures a Reconciler.
type Config struct {
	Kernel Kernel
	Scope  Scope
	// Resync is the interval of full reads: the first pass after four fifths of Resync reads
	// the whole state again. The caller should start a pass about every Resync, with a
	// jitter of at most a fifth.
	Resync time.Duration
}

// Reconciler makes the kernel's state equal to a wanted state. Only Changed may be called
// concurrently with another method.
type Reconciler struct {
	cache cache

	want  State
	dirty keys // where want and the kernel's state may differ
	gone  keys // where to sweep even if the next Reconcile or Update does not
	all   bool // want and the kernel's state may differ everywhere
	swept bool // the last Reconcile that succeeded swept, so nothing is left to delete
	// dropped has the routes in canonical form that are no longer wanted since the last sweep, except for those on
	// Scope.Devices. Another program may have made them.
	dropped map[Route]struct{}

	start bulkStart

	refused     map[Route]Refusal   // routes that Plan has refused, by wanted route in canonical form
	unreachable map[Route]Refusal   // the same for routes that the kernel has refused because of their gateway
	logged      map[taken]time.Time // time of the last log line
}

// NewReconciler returns a Reconciler, which the caller closes. It returns an error only if
// Kernel.Monitor does.
func NewReconciler(c Config) (*Reconciler, error) {
	r := &Reconciler{
		cache: cache{kernel: c.Kernel, scope: c.Scope, resync: c.Resync, changed: wait.NewSignal()},
		want:  NewState(), dirty: keys{}, gone: keys{}, all: true, dropped: map[Route]struct{}{},
		refused: map[Route]Refusal{}, unreachable: map[Route]Refusal{}, logged: map[taken]time.Time{},
	}
	r.start = bulkStart{cache: &r.cache}
	if err := r.cache.listen(); err != nil {
		return nil, err
	}
	return r, nil
}

// Close ends the monitor. It does not change the kernel.
func (r *Reconciler) Close() error { return r.cache.close() }

// Changed returns a channel that receives when the kernel may have announced a change. The
// caller should then call Reconcile or Update.
func (r *Reconciler) Changed() <-chan struct{} { return r.cache.changed }

// Has reports whether the kernel has o, according to the cache. A route counts if it
// forwards packets as o does, see Route.same. Any other object must have all attributes of
// o, except that the checksum offload does not count if o is a link with OffloadAuto.
func (r *Reconciler) Has(o Object) bool { return r.cache.serves(o) }

// Count contains the numbers of wanted and present objects of one kind.
type Count struct {
	Wanted  int `json:"wanted"`
	Present int `json:"present"`
}

// Counts returns for each kind of object (link, address, neighbour, fdb, route) how many
// are wanted and how many of these the kernel has, according to the cache. It leaves out a
// kind of which none is wanted.
func (r *Reconciler) Counts() map[string]Count {
	counts := map[string]Count{}
	for o := range r.want.All() {
		c := counts[o.kind()]
		c.Wanted++
		if r.Has(o) {
			c.Present++
		}
		counts[o.kind()] = c
	}
	return counts
}

// Reconcile makes the kernel's state equal to want, and takes ownership of want. With sweep
// it also deletes the objects in scope that are not wanted, except for links, and for routes
// of other programs on devices outside of Scope.Devices that were not wanted before. Without sweep it deletes only objects that conflict with want, and
// detours that were left behind. It may be repeated with an equal want.
//
// A route that must not or cannot be created because of its destination or gateway causes
// no error: Report.Refused contains it. Reconcile returns an error if a read or another
// change fails, or if other programs keep undoing its changes. The error wraps the first
// few causes. The changes that have succeeded remain. The report counts the changes of all
// passes, including those that failed.
func (r *Reconciler) Reconcile(ctx context.Context, want State, sweep bool) (Report, error) {
	for route := range r.want.AllRoutes() {
		if !want.Has(route) {
			r.drop(route)
		}
	}
	r.want = want
	r.all = true
	return r.converge(ctx, sweep)
}

// Update is like Reconcile with a change of the last wanted state: it first removes the
// objects in removed from that state, and then adds the objects in added. Its cost depends
// on the number of changes and not on the size of the state. After an error the next call
// need not name these objects again.
func (r *Reconciler) Update(ctx context.Context, removed, added []Object, sweep bool) (Report, error) {
	for _, o := range removed {
		if route, ok := o.(Route); ok && r.want.Has(route) {
			r.drop(route)
		}
	}
	r.want.Remove(removed...)
	r.want.Add(added...)
	for _, o := range slices.Concat(removed, added) {
		r.dirty.add(o)
		if _, ok := o.(Link); ok { // objects disappear with their link
			r.all = true
		}
	}
	return r.converge(ctx, sweep)
}

func (r *Reconciler) drop(route Route) {
	if !r.cache.scope.device(route.Dev) { // on these the Reconciler may delete any route
		r.dropped[route.canonical()] = struct{}{}
	}
}

// SweepAt makes the next Reconcile or Update delete the objects that have the keys of objects and are not
// wanted, even if that call does not sweep. If that call fails, the one after it does so.
func (r *Reconciler) SweepAt(objects ...Object) {
	for _, o := range objects {
		r.gone.add(o)
		r.dirty.add(o)
	}
}

// converge repeats passes until one finds no change to make.
func (r *Reconciler) converge(ctx context.Context, sweep bool) (Report, error) {
	var report Report
	if sweep && !r.swept { // earlier passes without sweep may have left objects with any key
		r.all = true
	}

	for route := range r.unreachable { // try again
		r.dirty.add(route)
	}
	clear(r.unreachable)

	puts, read := r.start.run(ctx, r.want, sweep)
	report.Puts = puts
	r.all = r.all || read

	named := maps.Clone(r.dirty) // places that the caller has named
	everywhere := r.all
	for range passes {
		drifted, all, err := r.cache.refresh(ctx, r.cache.scope)
		if err != nil {
			return report, err
		}

		r.all = r.all || all
		changes := r.plan(drifted, sweep)
		r.logTaken(ctx, changes.Taken)
		if len(changes.Ops) == 0 {
			r.finish(&report, sweep)
			return report, nil
		}

		err = r.apply(ctx, changes.Ops)
		report.count(changes.Ops, func(o Object) bool { return drifted.has(o) || !everywhere && !named.has(o) })
		if err != nil {
			return report, err
		}
	}
	return report, errors.New("kernel state does not settle: another program keeps changing the same entries")
}

// plan returns the changes of the next pass. It compares only the places where want and the kernel's
// state may differ. drifted are those that other programs have changed.
func (r *Reconciler) plan(drifted keys, sweep bool) Changes {
	maps.Copy(r.dirty, drifted)
	have := r.cache.State
	want := r.want
	if r.all {
		clear(r.refused)
	} else {
		have = have.only(r.dirty)
		want = want.only(r.dirty)
		maps.DeleteFunc(r.refused, func(route Route, _ Refusal) bool { return r.dirty.has(route) })
	}

	changes := Plan(have, want, r.cache.scope, r.dropped, sweep)
	if !sweep {
		changes.Ops = append(changes.Ops, r.planGone(changes.Ops)...)
	}
	for _, refusal := range changes.Refused {
		r.refused[refusal.Route.canonical()] = refusal
	}
	changes.Ops = r.reachable(changes.Ops)
	return changes
}

// planGone returns the deletes that SweepAt has asked for and that are not in ops.
func (r *Reconciler) planGone(ops []Op) []Op {
	all := Plan(r.cache.only(r.gone), r.want.only(r.gone), r.cache.scope, r.dropped, true).Ops
	return slices.DeleteFunc(all, func(op Op) bool { return !r.gone.has(op.Object) || slices.Contains(ops, op) })
}

// reachable drops the puts of routes whose gateway the kernel has refused in this call.
func (r *Reconciler) reachable(ops []Op) []Op {
	return slices.DeleteFunc(ops, func(op Op) bool {
		route, _ := op.Object.(Route)
		_, known := r.unreachable[route.canonical()]
		return known && !op.Delete
	})
}

// finish completes the report after a pass that found nothing to do.
func (r *Reconciler) finish(report *Report, sweep bool) {
	if sweep {
		clear(r.dropped)
	}
	clear(r.dirty)
	clear(r.gone)
	r.all = false
	r.swept = sweep

	for _, refusals := range []map[Route]Refusal{r.refused, r.unreachable} {
		for _, refusal := range refusals {
			report.Refused = append(report.Refused, refusal)
		}
	}
	report.Unreachable = len(r.unreachable) > 0
	report.Rerouted = r.cache.rerouted
	r.cache.rerouted = false
}

// apply executes ops. A route that the kernel refuses because of its gateway concerns one peer only,
// so that is no error.
func (r *Reconciler) apply(ctx context.Context, ops []Op) error {
	var errs []error
	failures := write(ctx, r.cache.kernel, ops)
	for _, e := range failures {
		if refusal, ok := e.refusal(); ok {
			r.unreachable[refusal.Route.canonical()] = refusal
		} else {
			errs = append(errs, e)
		}
	}

	if len(errs) > 0 { // only a read can tell what the failures have left behind
		r.cache.invalidate()
		return opErrors(errs)
	}
	if len(failures) > 0 {
		ops = r.reachable(slices.Clone(ops))
	}
	r.cache.applyWrites(ops)
	return nil
}

// takenLog is the minimum time between two log lines about the same routes. Their program may keep
// restoring them.
const takenLog = time.Minute

// taken identifies the routes of a program to a destination.
type taken struct {
	dst      netip.Prefix
	protocol uint8
}

// logTaken logs routes of other programs that are replaced.
func (r *Reconciler) logTaken(ctx context.Context, routes []Route) {
	now := time.Now()
	maps.DeleteFunc(r.logged, func(_ taken, at time.Time) bool { return now.Sub(at) >= takenLog })
	for _, route := range routes {
		of := taken{route.Dst, route.Protocol}
		if _, known := r.logged[of]; !known {
			r.logged[of] = now
			klog.FromContext(ctx).Info("taking over a route that another program made", "route", route.String(), "protocol", route.Protocol)
		}
	}
}
