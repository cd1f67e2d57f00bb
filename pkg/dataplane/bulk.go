// SPDX-License-Identifier: Apache-2.0

package dataplane

// A start on new devices creates thousands of objects. This file creates them in one batch
// before the ordinary passes. The Reconciler is correct without the call of bulkStart.
//
// Reason. An ordinary pass reads the routing table before it writes. The table may contain
// many routes of other programs, and the first packet to a pod would wait for the read. An
// ordinary pass also makes the kernel announce each of its writes to this process. On new
// devices neither is necessary: no other program has used them yet, and the ordinary passes
// read everything afterwards anyway. So bulkStart does not read the routing table, and
// suspends announcements from muteFrom writes on. It creates the links before the first full
// read, because the creation of a link invalidates what was read before.
//
// Measurement. 5,000 vxlan peers, starts with the call alternating with starts without it,
// 2 busy CPUs, medians. Beside 200,000 routes of another program (7 starts each) all objects
// exist 251 ms after exec instead of 414 ms, and the daemon has used 183 ms of CPU time until
// it is ready instead of 239 ms. Beside few routes (9 starts each) the daemon uses 125 ms of
// CPU time instead of 130 ms, and 2 MB more memory at most. If bulkStart did not suspend
// announcements, the daemon would use 144 ms, and 3 MB more.
//
// Invariant. The result is the same as that of the ordinary passes alone. To guarantee
// that, bulkStart
//   - only puts wanted objects, never deletes, and creates routes exclusively, so that it
//     cannot replace a route that it has not read;
//   - reads the addresses of the host first, so that Plan refuses a route to a directly
//     connected network;
//   - reports no failure: the passes that follow read the whole state, repeat what has
//     failed, and report it.

import (
	"context"
)

// bulkStart records how far Reconciler.bulkStart has come.
type bulkStart struct {
	linked bool // makeLinks was called, even if it failed
	fresh  bool // makeLinks has created all devices, and bulkStart has put nothing on them yet
}

// muteFrom is the number of writes from which suspending announcements saves more than it
// costs: after a suspension a Monitor no longer knows the state of the links, and may report
// a loss once more.
const muteFrom = 1000

// bulkStart creates the missing links in its first call. If this has created all devices of
// the scope, bulkStart also creates the other wanted objects, in the first call that sweeps
// or in which a route through a device is wanted. Until then it only reads the state,
// without the routing table. After that it does nothing. If a read fails or the plan needs
// a delete, it leaves the objects to the ordinary passes.
func (r *Reconciler) bulkStart(ctx context.Context, report *Report, sweep bool) {
	if !r.start.linked {
		r.start.linked = true
		r.start.fresh = len(r.want.Links) > 0 && r.makeLinks(ctx, report)
	}
	if !r.start.fresh {
		return
	}
	scope := r.cache.scope
	scope.Connected = true
	if !sweep && !r.want.usesDevices() { // a later call has the routes
		if !r.cache.valid {
			_, _, _ = r.cache.refresh(ctx, scope)
			r.all = true
		}
		return
	}
	r.start.fresh = false
	r.cache.invalidate() // the passes read the whole state
	have, err := r.cache.kernel.Read(ctx, scope)
	if err != nil {
		return
	}
	ops := Plan(have, r.want, scope, nil, false).Ops
	for i, op := range ops {
		if op.Delete { // another program has changed the new devices
			return
		}
		_, ops[i].Exclusive = op.Object.(Route)
	}
	if len(ops) >= muteFrom && r.cache.monitor != nil {
		r.cache.monitor.Mute()
	}
	failures := r.write(ctx, ops)
	report.Puts += len(ops) - len(failures)
}

// makeLinks creates the wanted links that do not exist. It returns true only if no device
// of the scope existed before and all of them were created.
func (r *Reconciler) makeLinks(ctx context.Context, report *Report) bool {
	have, err := r.cache.kernel.Read(ctx, Scope{Devices: r.cache.scope.Devices})
	if err != nil {
		return false
	}
	var ops []Op
	for _, name := range sortedKeys(r.want.Links) {
		if _, exists := have.Links[name]; !exists {
			ops = append(ops, Op{Object: r.want.Links[name]})
		}
	}
	failures := r.write(ctx, ops)
	report.Puts += len(ops) - len(failures)
	return len(failures) == 0 && len(ops) == len(r.cache.scope.Devices)
}
