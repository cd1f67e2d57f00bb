// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/oneline"
)

// Kernel reads and changes the network state of an operating system.
type Kernel interface {
	// Read returns the state of the kernel in the scope: all objects on the scope's
	// devices, and those routes of the main table, on any device, for which Scope.Shows
	// is true. It leaves out entries that are learned, not permanent, for a group, or
	// link-local. For a scope without networks it reads only the links, and for a scope
	// with Connected no routing table. If a dump is interrupted or incomplete, Read
	// returns an error and never a partial state.
	Read(ctx context.Context, s Scope) (State, error)
	// Apply executes all of ops in order and returns the failures. A failure does not
	// stop the operations after it. Deleting an object that does not exist succeeds.
	// Apply writes the attributes that it added for the kernel, such as NexthopID, into
	// the objects of ops, because a Monitor need not announce the caller's own writes.
	Apply(ctx context.Context, ops []Op) []OpError
	// Monitor starts to listen to changes in the scope. The caller closes the monitor.
	Monitor(s Scope) (Monitor, error)
	// OnLink returns the device whose directly connected network contains dst, or "" if
	// dst is behind a gateway or the device is unknown. A route without a gateway leads
	// to a connected network. There are two exceptions: a default route (see IsNetwork),
	// and a device that does not resolve addresses to neighbours, such as that of a VPN.
	OnLink(ctx context.Context, dst netip.Addr) (dev string, err error)
}

// OpError is an operation that failed, with the cause.
type OpError struct {
	Op  Op
	Err error
}

// Error names the change and the cause.
func (e OpError) Error() string { return e.Op.String() + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e OpError) Unwrap() error { return e.Err }

// Report is the result of Reconcile or Update.
type Report struct {
	Puts, Deletes int
	// Repaired is the number of these changes that undid a change by another program.
	Repaired int
	// Refused contains the wanted routes that were not created, with the reasons. All
	// other wanted objects exist.
	Refused []Refusal
	// Unreachable is set if the cause of a refusal may disappear by itself.
	Unreachable bool
	// Rerouted is set if the kernel has announced a change after which OnLink may return
	// another result.
	Rerouted bool
}

// count adds ops to the report, without the exclusive ones that found an existing route.
func (r *Report) count(ops []Op, met Keys, repair func(Object) bool) {
	for _, op := range ops {
		switch {
		case op.Exclusive && met.has(op.Object):
			continue
		case op.Delete:
			r.Deletes++
		default:
			r.Puts++
		}
		if repair(op.Object) {
			r.Repaired++
		}
	}
}

// passes limits how many passes one Reconcile makes. The last pass finds nothing to do.
// Duplicates of a route take two passes, or four if a delete removes the one that should
// stay. A link that lost its IPv6 addresses while it came up takes three, and new devices
// take one more.
const passes = 6

// Config configures a Reconciler.
type Config struct {
	Kernel Kernel
	Scope  Scope
	// Resync is the interval of full reads: the first pass after four fifths of it reads
	// the whole state again. The caller should start a pass about every Resync, with a
	// jitter of at most a fifth. If it is zero, every pass reads.
	Resync time.Duration
}

// Reconciler makes the kernel's state equal to a wanted state. Only Changed may be called
// concurrently with another method.
type Reconciler struct {
	mirror   mirror
	recorded map[Route]struct{} // routes on devices outside Scope.Devices that the Reconciler may delete, in canonical form
	former   []Route            // recorded routes that are no longer wanted

	want  State
	dirty Keys // where want and the kernel's state may differ
	all   bool // want and the kernel's state may differ everywhere
	swept bool // the last Reconcile swept, so nothing is left to delete

	refused     map[netip.Prefix]Refusal
	unreachable map[netip.Prefix]Refusal
	told        map[taken]time.Time // time of the last log line
}

// NewReconciler returns a Reconciler. The caller closes it.
func NewReconciler(c Config) (*Reconciler, error) {
	r := &Reconciler{
		mirror:   mirror{kernel: c.Kernel, scope: c.Scope, resync: c.Resync},
		recorded: map[Route]struct{}{}, want: NewState(), all: true,
		refused: map[netip.Prefix]Refusal{}, unreachable: map[netip.Prefix]Refusal{}, told: map[taken]time.Time{},
	}
	if c.Resync > 0 {
		monitor, err := c.Kernel.Monitor(c.Scope)
		if err != nil {
			return nil, fmt.Errorf("listen to kernel changes: %w", err)
		}
		r.mirror.monitor = monitor
	}
	return r, nil
}

// Close ends the monitor. It does not change the kernel.
func (r *Reconciler) Close() error {
	if r.mirror.monitor == nil {
		return nil
	}
	return r.mirror.monitor.Close()
}

// Changed returns a channel that receives after the kernel has announced a change that a
// Reconcile should handle. It returns nil if there is no monitor.
func (r *Reconciler) Changed() <-chan struct{} {
	if r.mirror.monitor == nil {
		return nil
	}
	return r.mirror.monitor.Ready()
}

// Record makes the Reconciler responsible for the routes of s: it deletes them when they
// are no longer wanted, on any device and even if another program created them.
func (r *Reconciler) Record(s State) {
	for route := range s.AllRoutes() {
		r.record(route)
	}
}

// record ignores routes on the scope's own devices, because the scope covers those
// anyway.
func (r *Reconciler) record(route Route) {
	if !r.mirror.scope.device(route.Dev) {
		r.recorded[route.canonical()] = struct{}{}
	}
}

// Holds reports whether the kernel has o, according to the last known state. A route
// counts if it forwards packets as o does.
func (r *Reconciler) Holds(o Object) bool { return r.mirror.holds(o) }

// Count contains the numbers of wanted and present objects of one kind.
type Count struct {
	Wanted, Present int
}

// Counts returns for each kind of object (link, address, neighbour, fdb, route) how many
// are wanted and how many of these the kernel has, according to the last known state.
func (r *Reconciler) Counts() map[string]Count {
	counts := map[string]Count{}
	for o := range r.want.all() {
		c := counts[kind(o)]
		c.Wanted++
		if r.mirror.holds(o) {
			c.Present++
		}
		counts[kind(o)] = c
	}
	return counts
}

// Reconcile makes the kernel's state equal to want, and takes ownership of want. With
// sweep it also deletes the objects in scope that are not wanted. Without sweep it
// deletes only objects that conflict with want. It may be repeated with an equal want.
func (r *Reconciler) Reconcile(ctx context.Context, want State, sweep bool) (Report, error) {
	r.Record(want)
	r.want, r.all = want, true
	return r.settle(ctx, sweep)
}

// Update is like Reconcile for a wanted state that differs from the last one by the
// objects in removed and then in added. Its cost depends on the number of changes and not
// on the size of the state.
func (r *Reconciler) Update(ctx context.Context, removed, added []Object, sweep bool) (Report, error) {
	for _, o := range removed {
		if route, ok := o.(Route); ok {
			r.former = append(r.former, route.canonical())
		}
	}
	for _, o := range added {
		if route, ok := o.(Route); ok {
			r.record(route)
		}
	}
	r.want.Remove(removed...)
	r.want.Add(added...)
	r.dirty.Add(removed...)
	r.dirty.Add(added...)
	return r.settle(ctx, sweep)
}

// settle repeats passes until one finds no change to make.
func (r *Reconciler) settle(ctx context.Context, sweep bool) (Report, error) {
	var report Report
	if sweep && !r.swept { // the passes without sweep have left objects, so look everywhere
		r.all = true
	}
	for dst, refusal := range r.unreachable { // try again
		addKey(&r.dirty.dsts, dst)
		delete(r.refused, refusal.Route.Dst)
	}
	clear(r.unreachable)
	var asked Keys
	some := !r.all
	asked.merge(r.dirty)
	if err := r.makeLinks(ctx, &report, func(o Object) bool { return some && !asked.has(o) }); err != nil {
		return report, err
	}
	for range passes {
		drifted, all, err := r.mirror.look(ctx)
		if err != nil {
			return report, err
		}
		r.all = r.all || all
		changes := r.plan(drifted, sweep)
		r.logTaken(ctx, changes.Taken)
		if len(changes.Ops) == 0 {
			if r.mirror.partial && (sweep || r.want.leads()) { // the other routes must be known from here on
				r.mirror.void()
				continue
			}
			r.settled(&report, sweep)
			return report, nil
		}
		met, err := r.apply(ctx, changes.Ops)
		report.count(changes.Ops, met, func(o Object) bool { return drifted.has(o) || some && !asked.has(o) })
		if err != nil {
			return report, err
		}
	}
	return report, errors.New("kernel state does not settle: another program keeps changing the same entries")
}

// makeLinks creates missing links before the first full read, for two reasons. Creating a
// link would invalidate an earlier read. And if all links are new, the first read can
// leave out the routing table, which may contain many routes of other programs. If it
// cannot create a link, the passes try again.
func (r *Reconciler) makeLinks(ctx context.Context, report *Report, repair func(Object) bool) error {
	if r.mirror.valid || len(r.want.Links) == 0 {
		return nil
	}
	have, err := r.mirror.kernel.Read(ctx, Scope{Devices: r.mirror.scope.Devices})
	if err != nil {
		return fmt.Errorf("read kernel state: %w", err)
	}
	var ops []Op
	for _, name := range sortedKeys(r.want.Links) {
		if _, there := have.Links[name]; !there {
			ops = append(ops, Op{Object: r.want.Links[name]})
		}
	}
	if len(r.write(ctx, ops)) == 0 {
		report.count(ops, Keys{}, repair)
		r.mirror.fresh = len(ops) == len(r.mirror.scope.Devices)
	}
	return nil
}

// plan compares the places where want and the kernel's state may differ. The result is
// the same as that of a full comparison.
func (r *Reconciler) plan(drifted Keys, sweep bool) Changes {
	r.dirty.merge(drifted)
	have, want := r.mirror.State, r.want
	if r.all || len(r.dirty.links) > 0 { // objects disappear with their link
		clear(r.refused)
	} else {
		have, want = have.Only(r.dirty), want.Only(r.dirty)
		for dst := range r.dirty.dsts {
			delete(r.refused, dst)
		}
	}
	changes := Plan(have, want, r.mirror.scope, r.recorded, sweep)
	for _, refusal := range changes.Refused {
		r.refused[refusal.Route.Dst] = refusal
	}
	changes.Ops = r.reachable(changes.Ops)
	return changes
}

// reachable returns ops without the routes that the kernel has refused because of their
// gateway.
func (r *Reconciler) reachable(ops []Op) []Op {
	return slices.DeleteFunc(ops, func(op Op) bool {
		route, ok := op.Object.(Route)
		if !ok || op.Delete {
			return false
		}
		_, known := r.unreachable[route.Dst]
		return known
	})
}

// settled updates the bookkeeping after a pass that found nothing to do, and completes
// the report.
func (r *Reconciler) settled(report *Report, sweep bool) {
	switch {
	case sweep && r.all:
		clear(r.recorded)
		r.Record(r.want)
		r.former = nil
	case sweep:
		for _, route := range r.former {
			if !slices.ContainsFunc(r.want.Routes[route.Dst], func(w Route) bool { return w.canonical() == route }) {
				delete(r.recorded, route)
			}
		}
		r.former = nil
	}
	r.dirty, r.all, r.swept = Keys{}, false, sweep
	for _, refusals := range []map[netip.Prefix]Refusal{r.refused, r.unreachable} {
		for _, refusal := range refusals {
			report.Refused = append(report.Refused, refusal)
		}
	}
	report.Unreachable = len(r.unreachable) > 0
	report.Rerouted, r.mirror.rerouted = r.mirror.rerouted, false
}

// refusal returns a Refusal if the kernel has refused a route because of its gateway: the
// gateway is unreachable, or it is not another host but an address of this host or the
// broadcast address of a network. It returns false for a route through a nexthop object,
// because that object may be the cause.
func (e OpError) refusal() (f Refusal, ok bool) {
	route, ok := e.Op.Object.(Route)
	switch {
	case !ok, e.Op.Delete, !route.Gateway.IsValid(), route.NexthopID != 0:
	case errors.Is(e.Err, syscall.ENETUNREACH), errors.Is(e.Err, syscall.EHOSTUNREACH):
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s is not on a network of %s", route.Gateway, route.Dev)}, true
	case errors.Is(e.Err, syscall.EINVAL):
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s on %s: %v", route.Gateway, route.Dev, e.Err)}, true
	}
	return Refusal{}, false
}

// apply executes ops. A route that the kernel refuses because of its gateway concerns one
// peer only, so apply records it and returns no error. The same holds for an exclusive
// put that finds an existing route that was not known: met contains these routes.
func (r *Reconciler) apply(ctx context.Context, ops []Op) (met Keys, err error) {
	if r.mirror.partial {
		for i, op := range ops {
			_, route := op.Object.(Route)
			ops[i].Exclusive = route && !op.Delete
		}
	}
	muted := r.mirror.mute(ops)
	failures := r.write(ctx, ops)
	refused := 0
	var errs []error
	for _, e := range failures {
		if e.Op.Exclusive && errors.Is(e.Err, syscall.EEXIST) {
			met.Add(e.Op.Object)
		} else if refusal, ok := e.refusal(); ok {
			refused++
			r.unreachable[refusal.Route.Dst] = refusal
		} else {
			errs = append(errs, e)
		}
	}
	switch {
	case muted:
	case refused < len(failures): // only a read can tell what the failures have left behind
		r.mirror.void()
	case refused > 0:
		r.mirror.wrote(r.reachable(slices.Clone(ops)))
	default:
		r.mirror.wrote(ops)
	}
	return met, opErrors(errs)
}

func (r *Reconciler) write(ctx context.Context, ops []Op) []OpError {
	if log := klog.FromContext(ctx).V(4); log.Enabled() {
		for _, op := range ops {
			log.Info("kernel change", "op", op.String())
		}
	}
	return r.mirror.kernel.Apply(ctx, ops)
}

// opErrors joins errs. It shows only the first few, so that the message stays short if
// thousands of changes fail for the same reason.
func opErrors(errs []error) error {
	const shown = 3
	if len(errs) <= shown {
		return oneline.Join(errs...)
	}
	return fmt.Errorf("%w; and %d more", oneline.Join(errs[:shown]...), len(errs)-shown)
}

// takenLog is the minimum time between two log lines about routes of the same program to
// the same destination.
const takenLog = time.Minute

// taken identifies the subject of a log line: the routes of a program to a destination.
type taken struct {
	dst      netip.Prefix
	protocol uint8
}

// logTaken logs routes of other programs that are replaced: the first time at once, and
// then at most once a minute if the other program keeps restoring them.
func (r *Reconciler) logTaken(ctx context.Context, routes []Route) {
	if len(routes) == 0 {
		return
	}
	now := time.Now()
	maps.DeleteFunc(r.told, func(_ taken, at time.Time) bool { return now.Sub(at) >= takenLog })
	for _, route := range routes {
		of := taken{route.Dst, route.Protocol}
		if _, told := r.told[of]; !told {
			r.told[of] = now
			klog.FromContext(ctx).Info("taking over a route that another program made", "route", route.String(), "protocol", route.Protocol)
		}
	}
}
