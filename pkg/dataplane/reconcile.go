package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"k8s.io/klog/v2"
)

// Kernel is the seam to the operating system.
type Kernel interface {
	// Read returns all that the kernel holds on the scope's devices, and the
	// routes of the main table, on any device, to destinations in its
	// networks. Non-permanent, learned, group and link-local entries are left
	// out. An interrupted or partial dump is an error, never a short answer.
	Read(ctx context.Context, s Scope) (State, error)
	// Apply carries out all of ops, in order. One that fails does not stop
	// the others; the failures are returned. Deleting what is not there is
	// success.
	Apply(ctx context.Context, ops []Op) []OpError
	// OnLink returns the device through which dst is reached without a
	// gateway, or "" if there is a gateway or no route.
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
	// Refused are the wanted routes that were not made, and why: the rest is
	// in place.
	Refused []Refusal
	// Unreachable is set when the cause of a refusal may pass by itself.
	Unreachable bool
}

// passes bounds how often one Reconcile looks again: the last pass finds
// nothing to do. Duplicates of a route take two passes, a link that came up
// and lost its IPv6 addresses on the way three.
const passes = 5

// Reconciler makes the kernel hold what is wanted. It is not safe for
// concurrent use.
type Reconciler struct {
	kernel   Kernel
	scope    Scope
	recorded map[Route]struct{} // in canonical form
}

// NewReconciler returns a Reconciler for what is in s.
func NewReconciler(k Kernel, s Scope) *Reconciler {
	return &Reconciler{kernel: k, scope: s, recorded: map[Route]struct{}{}}
}

// Record says that the routes of s, wherever they lie and whoever made them,
// are ours to remove once they are not wanted any more.
func (r *Reconciler) Record(s State) {
	for route := range s.Routes {
		r.recorded[route.canonical()] = struct{}{}
	}
}

// Reconcile makes the kernel hold want. With sweep it also removes what is in
// scope and not wanted; without, nothing goes that want can live with. It may
// be called any number of times.
func (r *Reconciler) Reconcile(ctx context.Context, want State, sweep bool) (Report, error) {
	var report Report
	r.Record(want)
	unreachable := map[Route]Refusal{}
	for pass := range passes {
		have, err := r.kernel.Read(ctx, r.scope)
		if err != nil {
			return report, fmt.Errorf("read kernel state: %w", err)
		}
		changes := Plan(have, want, r.scope, r.recorded, sweep)
		report.Refused = changes.Refused
		ops := without(changes.Ops, unreachable)
		if len(ops) == 0 {
			if sweep {
				r.recorded = map[Route]struct{}{}
				r.Record(want)
			}
			for _, refusal := range unreachable {
				report.Refused = append(report.Refused, refusal)
			}
			report.Unreachable = len(unreachable) > 0
			return report, nil
		}
		if pass == 0 {
			logTaken(ctx, changes.Taken)
		}
		if err := r.apply(ctx, ops, unreachable); err != nil {
			return report, err
		}
		report.count(ops)
	}
	return report, errors.New("kernel state does not settle: another program keeps changing the same entries")
}

// apply carries out ops. Routes whose gateway is out of reach are a matter of
// that peer alone: they are noted, and are no error.
func (r *Reconciler) apply(ctx context.Context, ops []Op, unreachable map[Route]Refusal) error {
	log := klog.FromContext(ctx)
	for _, op := range ops {
		log.V(4).Info("kernel change", "op", op.String())
	}
	var errs []error
	for _, e := range r.kernel.Apply(ctx, ops) {
		route, ok := e.Op.Object.(Route)
		if ok && !e.Op.Delete && (errors.Is(e.Err, syscall.ENETUNREACH) || errors.Is(e.Err, syscall.EHOSTUNREACH)) {
			unreachable[route] = Refusal{route, fmt.Sprintf("gateway %s is not on a network of %s", route.Gateway, route.Dev)}
			continue
		}
		errs = append(errs, e)
	}
	return opErrors(errs)
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

func (r *Report) count(ops []Op) {
	for _, op := range ops {
		if op.Delete {
			r.Deletes++
		} else {
			r.Puts++
		}
	}
}

// without leaves out the puts of routes that are known to fail.
func without(ops []Op, unreachable map[Route]Refusal) []Op {
	return slices.DeleteFunc(ops, func(op Op) bool {
		route, ok := op.Object.(Route)
		if !ok || op.Delete {
			return false
		}
		_, known := unreachable[route]
		return known
	})
}

func logTaken(ctx context.Context, taken []Route) {
	for _, t := range taken {
		klog.FromContext(ctx).Info("taking over a route that another program made", "route", t.String(), "protocol", t.Protocol)
	}
}
