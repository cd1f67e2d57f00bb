// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/prefix"
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

	// All programs in a namespace share the ids. The ids of this process start at a high
	// number, and an id that is in use is skipped.
	nexthopFirst = 0x62000000
	nexthopLast  = nexthopFirst + 1<<20

	nhaID          = 1
	nhaOIF         = 5
	nhaGateway     = 6
	rtmGetNexthop  = 106
	sizeofNhmsg    = 8
	nexthopRetries = 16

	nexthopLinger = time.Minute
)

// hop is the next hop that a nexthop object describes.
type hop struct {
	gateway netip.Addr // invalid if there is none
	index   int        // index of the device
	onLink  bool
}

// object is a nexthop object.
type object struct {
	hop
	id     uint32 // 0 until it is created
	others bool   // routes outside of the scope use it, such as those of another flanneld
	users  int    // number of routes that use it
}

// nexthops contains the nexthop objects with flanneld's protocol number. Another flanneld on
// this host may have created some of them and may delete them, because it does not know that
// this process uses them. So this process uses only objects that it has created itself or that
// only its own routes use.
type nexthops struct {
	enabled   bool
	threshold int           // puts use objects if the device would have this many plain routes otherwise
	linger    time.Duration // an unused object is kept for this time, because its creator may be about to use it

	mu     sync.Mutex
	byID   map[uint32]*object
	byHop  map[hop]*object      // objects that this process may use
	unused map[uint32]time.Time // by id: when a read has first found the object unused
	idle   []uint32             // objects to delete
	plain  map[int]int          // number of IPv4 routes with a gateway and without an object, by index of the device
	next   uint32
}

func (t *nexthops) reset() {
	t.byID, t.byHop, t.plain, t.idle = map[uint32]*object{}, map[hop]*object{}, map[int]int{}, nil
}

func (t *nexthops) add(o *object) {
	t.byID[o.id] = o
	t.next = max(t.next, o.id+1)
}

// use adds n, which may be negative, to the number of routes that use an object, and
// returns the object. It returns nil if the object does not have flanneld's protocol
// number.
func (t *nexthops) use(id uint32, n int) *object {
	o := t.byID[id]
	if o != nil {
		o.users += n
	}
	return o
}

func (t *nexthops) remove(id uint32) {
	delete(t.unused, id) // another program may reuse the id
	if o, ok := t.byID[id]; ok {
		delete(t.byID, id)
		if t.byHop[o.hop] == o {
			delete(t.byHop, o.hop)
		}
	}
}

// forget removes an object that another program has deleted or replaced, if this process
// knows it. Unlike remove, it locks t.mu.
func (t *nexthops) forget(id uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(id)
}

// readNexthops replaces what this process knows about nexthop objects by those that exist.
// Read calls it before it reads the routes, and counts the users of each object while it
// reads them. If Options.NexthopObjects is off or the kernel has no nexthop objects, none
// are known.
func (k *Kernel) readNexthops(ctx context.Context) error {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
		t.reset()
		return nil
	}
	err := k.sock.dump(ctx, func(m *message) {
		m.begin(rtmGetNexthop, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
	}, t.reset, func(typ uint16, payload []byte) {
		if typ != rtmNewNexthop || len(payload) < sizeofNhmsg || payload[2] != dataplane.Protocol {
			return
		}
		var id, index uint32
		var gateway netip.Addr
		for a := range attributes(payload[sizeofNhmsg:]) {
			switch a.typ {
			case nhaID:
				id = a.uint32()
			case nhaOIF:
				index = a.uint32()
			case nhaGateway:
				gateway = a.addr()
			}
		}
		onLink := binary.NativeEndian.Uint32(payload[4:])&unix.RTNH_F_ONLINK != 0
		t.add(&object{hop: hop{gateway, int(index), onLink}, id: id})
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.enabled = false
		return nil
	}
	if err != nil {
		return fmt.Errorf("dump nexthop objects: %w", err)
	}
	return nil
}

// addRoute handles a route in the scope that Read has found: it completes the route and
// counts it as a user of its nexthop object, or as a plain route. This process may then use
// the object for other routes, unless routes outside of the scope use it.
func (t *nexthops) addRoute(r *routeReply) {
	t.complete(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	if id := r.route.NexthopID; id != 0 {
		if o := t.use(id, 1); o != nil && !o.others {
			t.byHop[o.hop] = o
		}
	} else if r.route.Gateway.Is4() {
		t.plain[r.oif]++
	}
}

// complete sets the gateway, the device and the onlink flag of a route through an object
// that this process knows, if the kernel shows only the id, as with
// net.ipv4.nexthop_compat_mode=0.
func (t *nexthops) complete(r *routeReply) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o, ours := t.byID[r.route.NexthopID]; ours && r.oif == 0 {
		r.route.Gateway, r.oif, r.route.OnLink = o.gateway, o.index, o.onLink
	}
}

// markUsedByOthers marks the objects with these ids, because routes outside of the scope
// use them, and counts each id as one user. Read must call it before addRoute.
func (t *nexthops) markUsedByOthers(ids []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range ids {
		if o := t.use(id, 1); o != nil {
			o.others = true
		}
	}
}

// selectUnused adds objects to t.idle, so that the next releaseNexthops deletes them. The
// caller has just read the kernel's routes. selectUnused selects an object only if no route
// has used it for the time t.linger, because the program that has created the object needs
// a moment to create its routes.
func (t *nexthops) selectUnused() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, before := time.Now(), t.unused
	t.unused = map[uint32]time.Time{}
	for id, o := range t.byID {
		if o.users > 0 {
			continue
		}
		since, known := before[id]
		if !known {
			since = now
		}
		if t.unused[id] = since; now.Sub(since) >= t.linger {
			t.idle = append(t.idle, id)
		}
	}
}

// viaNexthop returns the route of op, and whether op puts an IPv4 route with a gateway.
// Only such a route can use a nexthop object. The route is zero if op changes another
// object.
func viaNexthop(op *dataplane.Op) (dataplane.Route, bool) {
	r, ok := op.Object.(dataplane.Route)
	return r, ok && !op.Delete && r.Gateway.IsValid() && prefix.FamilyOf(r.Dst.Addr()) == prefix.IPv4
}

// provideNexthops creates nexthop objects for the routes that ops put, if a device would
// have too many plain routes otherwise, and sets the ids in ops. If it cannot create an
// object the route stays plain. It counts all of these routes as users of an object or as
// plain. indexes contains the index of each device.
func (k *Kernel) provideNexthops(ctx context.Context, ops []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
		return
	}
	puts := map[int]int{} // by index of the device
	for _, op := range ops {
		if r, ok := viaNexthop(op); ok {
			puts[indexes[r.Dev]]++
		}
	}
	for index, n := range puts {
		t.plain[index] += n
		if t.plain[index] >= t.threshold {
			k.provideFor(ctx, index, ops, indexes)
		}
	}
}

// provideFor is provideNexthops for the routes through one device. The caller holds t.mu.
func (k *Kernel) provideFor(ctx context.Context, index int, ops []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	type route struct {
		op  *dataplane.Op
		via *object
	}
	var routes []route
	var missing []*object
	for _, op := range ops {
		r, ok := viaNexthop(op)
		if !ok || r.Plain || r.MTU != 0 || indexes[r.Dev] != index {
			continue
		}
		h := hop{r.Gateway, index, r.OnLink}
		via := t.byHop[h]
		if via == nil {
			via = &object{hop: h}
			t.byHop[h] = via
			missing = append(missing, via)
		}
		routes = append(routes, route{op, via})
	}
	again := missing
	for range nexthopRetries {
		if len(again) == 0 || !t.enabled {
			break
		}
		again = k.createNexthops(ctx, again)
	}
	for _, of := range routes {
		if of.via.id == 0 {
			continue
		}
		of.via.users++
		t.plain[index]--
		r := of.op.Object.(dataplane.Route)
		r.NexthopID = of.via.id
		of.op.Object = r
	}
	for _, o := range missing {
		if o.id == 0 {
			delete(t.byHop, o.hop)
		}
	}
}

// putFailed reduces the number of plain routes after the put op has failed. It ignores a
// route through a nexthop object: the failure makes the Reconciler read the kernel, and the
// read counts the users of the object again.
func (t *nexthops) putFailed(op *dataplane.Op, indexes map[string]int) {
	if r, ok := viaNexthop(op); ok && r.NexthopID == 0 {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.plain[indexes[r.Dev]]--
	}
}

// createNexthops creates the missing objects, which byHop already contains, and sets their
// ids. It returns the objects that need another id, because another program uses the id
// that was tried. The id of an object that could not be created stays 0.
func (k *Kernel) createNexthops(ctx context.Context, missing []*object) (again []*object) {
	t := &k.nexthops
	ids := make([]uint32, len(missing))
	for i := range missing {
		if t.next < nexthopFirst || t.next > nexthopLast {
			t.next = nexthopFirst
		}
		ids[i] = t.next
		t.next++
	}
	failed := k.sock.send(ctx, len(missing), func(i int, m *message) {
		var flags uint32
		if missing[i].onLink {
			flags = unix.RTNH_F_ONLINK
		}
		m.begin(rtmNewNexthop, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nhmsg(unix.AF_INET, dataplane.Protocol, flags)...)
		m.attr32(nhaID, ids[i])
		m.attr32(nhaOIF, uint32(missing[i].index))
		m.addr(nhaGateway, missing[i].gateway)
	})
	for i, o := range missing {
		switch err := failed[i]; {
		case err == nil:
			o.id = ids[i]
			t.byID[o.id] = o
		case errors.Is(err, unix.EEXIST):
			again = append(again, o)
		case errors.Is(err, unix.EOPNOTSUPP):
			t.enabled = false
		}
	}
	return again
}

// releaseNexthops takes the routes that were deleted off the number of users or of plain
// routes. done contains the operations that have succeeded. It then deletes the objects
// that no route uses any more, and those in t.idle. Their routes must be gone already: the
// kernel would delete remaining routes together with the object, slowly and without an
// announcement.
func (k *Kernel) releaseNexthops(ctx context.Context, done []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, op := range done {
		r, ok := op.Object.(dataplane.Route)
		if !ok || !op.Delete {
			continue
		}
		if o := t.use(r.NexthopID, -1); o != nil && o.users <= 0 {
			t.idle = append(t.idle, r.NexthopID)
		} else if r.NexthopID == 0 && r.Gateway.Is4() {
			t.plain[indexes[r.Dev]]--
		}
	}
	// An idle object may have been deleted, or be in use again.
	ids := slices.DeleteFunc(t.idle, func(id uint32) bool {
		o := t.byID[id]
		return o == nil || o.users > 0
	})
	t.idle = nil
	k.deleteNexthops(ctx, ids)
}

// deleteNexthops deletes the objects with these ids. The caller holds k.nexthops.mu.
func (k *Kernel) deleteNexthops(ctx context.Context, ids []uint32) {
	for _, id := range ids {
		k.nexthops.remove(id) // first, so that the announcement of the delete finds nothing to forget
	}
	// If a delete fails, the next read finds the object.
	_ = k.sock.send(ctx, len(ids), func(i int, m *message) {
		m.begin(rtmDelNexthop, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
		m.attr32(nhaID, ids[i])
	})
}

// nhmsg encodes a struct nhmsg.
func nhmsg(family, protocol uint8, flags uint32) []byte {
	b := []byte{family, 0, protocol, 0, 0, 0, 0, 0}
	binary.NativeEndian.PutUint32(b[4:], flags)
	return b
}
