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
)

// Kernel is the seam to the operating system.
type Kernel interface {
	// Read returns all that the kernel holds on the scope's devices, and of the
	// routes of the main table, on any device, those that the scope shows. Non-permanent, learned, group and link-local entries are left
	// out. Of a scope without networks only the links are read, and of one with
	// Connected no routing table. An interrupted or partial dump is an error, never
	// a short answer.
	Read(ctx context.Context, s Scope) (State, error)
	// Apply carries out all of ops, in order. One that fails does not stop
	// the others; the failures are returned. Deleting what is not there is
	// success. It completes the objects in ops by what the kernel was given
	// beside them: a Monitor need not announce own writes.
	Apply(ctx context.Context, ops []Op) []OpError
	// Monitor listens to changes in the scope from now on. The caller closes
	// the monitor.
	Monitor(s Scope) (Monitor, error)
	// OnLink returns the device on whose own network dst is; "" if it is behind a
	// gateway or unknown. A network on a device is what a route without a gateway
	// leads to, unless it is a default route (IsNetwork) or the device resolves no
	// addresses to neighbours, as those of VPNs.
	OnLink(ctx context.Context, dst netip.Addr) (dev string, err error)
}

// OpError is the failure of one change.
type OpError struct {
	Op  Op
	Err error
}

// Error names the change and the cause.
func (e OpError) Error() string { return e.Op.String() + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e OpError) Unwrap() error { return e.Err }

// Report is what a pass did.
type Report struct {
	Puts, Deletes int
	// Repaired is how many of these undid what others had changed.
	Repaired int
	// Refused are all wanted routes that are not there, and why: the rest is
	// in place.
	Refused []Refusal
	// Unreachable is set when the cause of a refusal may pass by itself.
	Unreachable bool
	// Rerouted is set when the kernel has announced something by which OnLink may
	// say something else now.
	Rerouted bool
}

// count takes in ops, but for exclusive ones that have met a route.
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

// passes bounds how often one Reconcile looks again: the last pass finds
// nothing to do. Duplicates of a route take two passes, or four if a delete hits the
// one that is to stay, a link that came up and lost its IPv6 addresses on the way
// three, and fresh devices one more.
const passes = 6

// Config is what a Reconciler works with.
type Config struct {
	Kernel Kernel
	Scope  Scope
	// Resync is how often everything is looked at, give or take a fifth: what is known
	// of the kernel is read again with the first look after four fifths of it. Zero
	// means that every pass reads.
	Resync time.Duration
}

// Reconciler makes the kernel hold what is wanted. It is not safe for
// concurrent use, but for Changed.
type Reconciler struct {
	mirror   mirror
	recorded map[Route]struct{} // on other devices than ours, in canonical form
	former   []Route            // recorded, and not wanted any more

	want  State
	dirty Keys // where want and the kernel may differ
	all   bool // they may differ anywhere
	swept bool // nothing was left to delete when the last sweep ended

	refused     map[netip.Prefix]Refusal
	unreachable map[netip.Prefix]Refusal
	told        map[taken]time.Time // when a line was logged last
}

// NewReconciler returns a Reconciler, which the caller closes.
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

// Close lets go of what the Reconciler holds. The kernel stays as it is.
func (r *Reconciler) Close() error {
	if r.mirror.monitor == nil {
		return nil
	}
	return r.mirror.monitor.Close()
}

// Changed delivers when the kernel has announced something that a Reconcile
// should look at; nil if it never does.
func (r *Reconciler) Changed() <-chan struct{} {
	if r.mirror.monitor == nil {
		return nil
	}
	return r.mirror.monitor.Ready()
}

// Record says that the routes of s, wherever they lie and whoever made them,
// are ours to remove once they are not wanted any more.
func (r *Reconciler) Record(s State) {
	for route := range s.AllRoutes() {
		r.record(route)
	}
}

// record leaves out what is ours by its device.
func (r *Reconciler) record(route Route) {
	if !r.mirror.scope.device(route.Dev) {
		r.recorded[route.canonical()] = struct{}{}
	}
}

// Holds reports whether the kernel, as far as is known, has o; of routes, one
// that forwards as o does.
func (r *Reconciler) Holds(o Object) bool { return r.mirror.holds(o) }

// Count is a number of objects of one kind.
type Count struct {
	Wanted, Present int
}

// Counts returns how much of what is wanted the kernel has, as far as is
// known, by kind: link, address, neighbour, fdb, route.
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

// Reconcile makes the kernel hold want, which is the Reconciler's from now on.
// With sweep it also removes what is in scope and not wanted; without, nothing
// goes that want can live with. It may be called any number of times.
func (r *Reconciler) Reconcile(ctx context.Context, want State, sweep bool) (Report, error) {
	r.Record(want)
	r.want, r.all = want, true
	return r.settle(ctx, sweep)
}

// Update is Reconcile for a want that differs from the last one by what is
// removed and then added. It costs what changed, not what exists.
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

// settle repeats passes until one finds nothing to do.
func (r *Reconciler) settle(ctx context.Context, sweep bool) (Report, error) {
	var report Report
	if sweep && !r.swept { // what was left lying before has to go now
		r.all = true
	}
	for dst, refusal := range r.unreachable { // let us see again
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
			if r.mirror.partial && (sweep || r.want.leads()) { // what else there is has to be known now
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

// makeLinks makes the links that are missing before everything is read: they
// would void what was read before them, and as long as they are all fresh nobody
// has to wait until the many routes of others are read that a host may have. What
// cannot be made is left to the passes.
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

// plan compares what may differ. Where little may, it looks at that alone, and
// comes to the same result.
func (r *Reconciler) plan(drifted Keys, sweep bool) Changes {
	r.dirty.merge(drifted)
	have, want := r.mirror.State, r.want
	if r.all || len(r.dirty.links) > 0 { // with a link goes what is on it
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

// reachable removes from ops the routes that are known to be refused.
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

// settled ends a Reconcile that has left nothing to do.
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

// refusal says that a route was not made because of its gateway: it is out of reach, or
// no other host, such as an address of our own or the broadcast address of a network.
// Where there is a nexthop object that may be what is wrong instead.
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

// apply carries out ops. Routes that are refused for their gateway are a matter of
// that peer alone: they are noted, and are no error. Nor is it one that something
// not yet known was there first: met says where.
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
	case refused < len(failures): // what exactly that has left behind is for the next look to find out
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

// opErrors keeps the log line short when thousands of changes fail for one
// reason.
func opErrors(errs []error) error {
	const shown = 3
	if len(errs) <= shown {
		return oneLine(errs)
	}
	return fmt.Errorf("%w; and %d more", oneLine(errs[:shown]), len(errs)-shown)
}

func oneLine(errs []error) error {
	var joined error
	for _, err := range errs {
		if joined == nil {
			joined = err
			continue
		}
		joined = fmt.Errorf("%w; %w", joined, err)
	}
	return joined
}

// takenLog is the least time between two lines about routes that the same program makes
// to the same destination.
const takenLog = time.Minute

// taken is what a line about a route of another program is about.
type taken struct {
	dst      netip.Prefix
	protocol uint8
}

// logTaken logs what is taken over, the first time at once and in a fight once a minute.
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
