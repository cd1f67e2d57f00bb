// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// cache contains the kernel's state in the scope. A read fills it. The kernel's
// announcements and the Reconciler's own acknowledged writes keep it up to date. If it
// might be wrong it becomes invalid, and the next refresh reads the kernel again.
type cache struct {
	kernel  Kernel
	scope   Scope
	resync  time.Duration
	monitor Monitor     // nil until listen
	changed wait.Signal // for all monitors

	State
	valid    bool
	until    time.Time // the first refresh after this time reads in any case
	rerouted bool      // Monitor.Drain has returned rerouted since the last Reconcile that succeeded
}

func (c *cache) invalidate() { c.valid = false }

// listen ensures that there is a monitor.
func (c *cache) listen() (err error) {
	if c.monitor != nil {
		return nil
	}
	if c.monitor, err = c.kernel.Monitor(c.scope, c.changed); err != nil {
		c.monitor = nil
		return fmt.Errorf("listen to kernel changes: %w", err)
	}
	return nil
}

// mute closes the monitor, so that the kernel announces nothing. The next refresh listens again, and
// reads.
func (c *cache) mute() {
	c.invalidate()
	c.rerouted = true
	_ = c.close()
}

func (c *cache) close() error {
	if c.monitor == nil {
		return nil
	}
	err := c.monitor.Close()
	c.monitor = nil
	return err
}

// refresh brings the cache up to date, by the announced events or by a read. changed contains what
// other programs have changed, as far as events tell. all is true after a read, because then any
// object may have changed. After an error the cache is invalid.
func (c *cache) refresh(ctx context.Context, scope Scope) (changed keys, all bool, err error) {
	changed = keys{}
	if err := c.listen(); err != nil {
		return changed, true, err
	}

	events, rerouted, lost := c.monitor.Drain()
	c.rerouted = c.rerouted || rerouted
	if lost {
		c.invalidate()
	}

	for _, e := range events {
		if c.valid && c.applyEvent(e) {
			changed.add(e.Object)
		}
	}
	if c.valid && time.Now().Before(c.until) {
		return changed, false, nil
	}

	c.invalidate()
	if c.State, err = c.kernel.Read(ctx, scope); err != nil {
		return changed, true, fmt.Errorf("read kernel state: %w", err)
	}
	c.valid = true
	c.until = time.Now().Add(c.resync * 4 / 5) // the caller's timer may end a fifth of resync early, see Config.Resync
	return changed, true, nil
}

// applyEvent updates the cache and reports whether another program has changed the object. It was
// not if the cache agrees already: applyWrites has noted this process's own writes.
func (c *cache) applyEvent(e Event) bool {
	if e.Nexthop != 0 {
		// The read finds out what has happened to the routes.
		for r := range c.AllRoutes() {
			if r.NexthopID == e.Nexthop {
				c.invalidate()
				break
			}
		}
		return false
	}

	switch o := e.Object.(type) {
	case Route:
		return c.applyRouteEvent(o, e)
	case Neigh:
		return applyMapEvent(c.Neighs, o.NeighKey, o, e.Deleted)
	case FDB:
		return applyMapEvent(c.FDB, o.FDBKey, o, e.Deleted)
	case Addr:
		return applyMapEvent(c.Addrs, o, struct{}{}, e.Deleted)
	}
	return false
}

func applyMapEvent[K, V comparable](have map[K]V, key K, value V, deleted bool) bool {
	old, ok := have[key]
	if deleted {
		delete(have, key)
		return ok
	}
	have[key] = value
	return !ok || old != value
}

func (c *cache) applyRouteEvent(r Route, e Event) bool {
	// An own write, or a change that makes no difference to packets: only the onlink flag and Plain
	// may differ.
	i := slices.IndexFunc(c.Routes[r.Dst], func(have Route) bool {
		return have.canonical() == r.canonical() && have.Protocol == r.Protocol && have.NexthopID == r.NexthopID && have.MTU == r.MTU
	})

	switch {
	case e.Deleted && i >= 0:
		c.Remove(c.Routes[r.Dst][i])
	case i >= 0:
		c.Routes[r.Dst][i] = r
	case e.Replaced: // the kernel does not say which route was replaced
		c.invalidate()
	case !e.Deleted:
		c.Add(r)
	}
	found := i >= 0
	return e.Deleted == found // otherwise the cache agreed before
}

// applyWrites notes the results of ops, which the kernel has acknowledged.
func (c *cache) applyWrites(ops []Op) {
	for _, op := range ops {
		switch o := op.Object.(type) {
		case Link: // a change of a link deletes or resets objects on it
			c.invalidate()
		case Route:
			c.applyRouteWrite(o, op.Delete)
		default:
			if op.Delete {
				c.Remove(o)
			} else {
				c.Add(o)
			}
		}
	}
}

func (c *cache) applyRouteWrite(r Route, deleted bool) {
	if deleted {
		c.Remove(r)
		// The kernel may have deleted another route, because a delete request does not
		// contain all attributes: an IPv6 one matches any route through a nexthop object,
		// an IPv4 one without a gateway matches any route on the device, and a request
		// for a multipath route does not contain the next hops.
		if r.Multipath || len(c.candidates(r)) > 0 { // the cache cannot tell which one the kernel has deleted
			c.invalidate()
		}
		return
	}

	candidates := c.candidates(r)
	if len(candidates) > 1 { // the cache cannot tell which one the kernel has replaced
		c.invalidate()
	}

	for _, old := range candidates {
		if old.Multipath { // a dump leaves out IPv6 routes between the next hops of a multipath route
			c.invalidate()
		}
		c.Remove(old)
	}
	c.Add(r)
}

// candidates returns the routes that a put of r may replace or a delete of r may remove. They may have
// another type than r.
func (c *cache) candidates(r Route) []Route {
	var found []Route
	for _, have := range c.Routes[r.Dst] {
		if have.Priority == r.Priority && have.TOS == r.TOS {
			found = append(found, have)
		}
	}
	return found
}
