// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// A plain route names its next hop by device and gateway. Any other route names it by the id of a nexthop
// object. When a plain IPv4 route is added, the kernel compares its next hop with the next hops of all
// plain routes through the device. So adding thousands of plain routes through one device takes quadratic
// time. Through nexthop objects it takes linear time. Routes through a device with few routes stay plain:
// scripts expect the output of ip(8) for plain routes, and a single plain route is less work.
// https://docs.kernel.org/networking/nexthop-group-resilient.html explains the terms,
// include/uapi/linux/nexthop.h the format.
//
// A route with its own MTU stays plain. If it used a nexthop object, a later put without an MTU would not
// remove the MTU: the kernel takes the attributes of an existing route through the same object.
const (
	nexthopThreshold = 256
	nexthopLinger    = time.Minute
)

// nexthop is a nexthop object.
type nexthop struct {
	gateway netip.Addr // invalid if there is none
	index   int        // index of the device
	onLink  bool
	users   int       // number of routes that use it
	unused  time.Time // when a read has first found it without a user; zero if the last read has found one
}

// nexthops contains the nexthop objects with flanneld's protocol number. Another flanneld on
// this host may have created some of them and may delete them. So each route gets a new object.
type nexthops struct {
	enabled   bool
	threshold int           // puts use objects if the device would have this many plain routes otherwise
	linger    time.Duration // an unused object is kept for this time, because its creator may be about to use it

	mu    sync.Mutex
	byID  map[uint32]*nexthop
	idle  []uint32    // objects that may be deleted if no route uses them
	plain map[int]int // number of IPv4 routes with a gateway and without an object, by index of the device
	next  uint32
}

func (t *nexthops) reset() {
	t.byID = map[uint32]*nexthop{}
	t.plain = map[int]int{}
	t.idle = nil
}

func (t *nexthops) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}

// forget removes an object that another program has deleted or replaced.
func (t *nexthops) forget(id uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byID, id)
}

// release counts one user less of an object. The caller holds t.mu.
func (t *nexthops) release(id uint32) {
	if o, ours := t.byID[id]; ours {
		o.users--
		t.idle = append(t.idle, id)
	}
}

// announced completes a route that another program has deleted or put, and counts it. If no route uses the object any
// more, the next releaseNexthops deletes it. An object that counts too many routes, because one was replaced, stays
// until the next read. One that counts too few would be deleted together with its routes, and the kernel does not
// announce that.
func (t *nexthops) announced(r *routeReply, deleted bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.complete(r)
	if deleted {
		t.release(r.route.NexthopID)
	} else if o, ours := t.byID[r.route.NexthopID]; ours {
		o.users++
	}
}

// addRoute completes a route that Read has found, and counts it.
func (t *nexthops) addRoute(r *routeReply) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.complete(r)
	if o, ours := t.byID[r.route.NexthopID]; ours {
		o.users++
	} else if r.route.NexthopID == 0 && r.route.Gateway.Is4() {
		t.plain[r.oif]++
	}
}

// complete resolves the id of a nexthop object. The kernel shows nothing else with
// net.ipv4.nexthop_compat_mode=0. The caller holds t.mu.
func (t *nexthops) complete(r *routeReply) {
	if o, ours := t.byID[r.route.NexthopID]; ours && r.oif == 0 {
		r.route.Gateway = o.gateway
		r.oif = o.index
		r.route.OnLink = o.onLink
	}
}

// selectUnused lets the next releaseNexthops delete the objects that no route has used for t.linger. The
// caller has just read the kernel's routes.
func (t *nexthops) selectUnused() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for id, o := range t.byID {
		if o.users > 0 {
			o.unused = time.Time{}
			continue
		}
		if o.unused.IsZero() {
			o.unused = now
		}
		if now.Sub(o.unused) >= t.linger {
			t.idle = append(t.idle, id)
		}
	}
}

// viaNexthop reports whether op puts an IPv4 route with a gateway, which could use a nexthop object.
func viaNexthop(op *dataplane.Op) (dataplane.Route, bool) {
	r, _ := op.Object.(dataplane.Route)
	return r, !op.Delete && r.Gateway.Is4()
}

// putFailed takes a plain route back whose put has failed. After any failure the Reconciler reads the
// kernel, which counts the users of nexthop objects again.
func (t *nexthops) putFailed(op *dataplane.Op, indexes map[string]int) {
	if r, ok := viaNexthop(op); ok && r.NexthopID == 0 {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.plain[indexes[r.Dev]]--
	}
}
