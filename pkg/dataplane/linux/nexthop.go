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

	"flanneld/pkg/dataplane"
	"flanneld/pkg/prefix"
)

// A route names its next hop by device and gateway, or by the id of a nexthop
// object. The kernel looks for an equal next hop among all of a device each
// time a plain IPv4 route is added, so thousands of them through one device
// take quadratic time; through objects they take linear time. Few are plain, or
// come one by one: ip(8) shows them as everybody's scripts expect, and one alone is
// less work that way.
// https://docs.kernel.org/networking/nexthop-group-resilient.html has the
// terms, include/uapi/linux/nexthop.h the format.
const (
	nexthopThreshold = 256

	// Ids are a space that all programs of a namespace share. Ours start high
	// up, and one that is taken is passed over.
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

// hop is what a nexthop object stands for. There are thousands: without a pointer
// in them the collector does not look into them.
type hop struct {
	via    [16]byte // the gateway, an IPv4 one as IPv6 has it; zero: none
	index  int      // of the device
	onLink bool
}

func newHop(gateway netip.Addr, index int, onLink bool) hop {
	return hop{gateway.As16(), index, onLink}
}

// gateway is invalid if there is none.
func (h hop) gateway() netip.Addr {
	if h.via == [16]byte{} {
		return netip.Addr{}
	}
	return netip.AddrFrom16(h.via).Unmap()
}

// object is a nexthop object.
type object struct {
	hop
	id     uint32 // 0: yet to be made
	others bool   // routes of another flanneld lead through it
	users  int    // routes through it, also those
}

// nexthops knows the nexthop objects that carry our protocol number. Another flanneld
// on this host has such as well: it cannot know who uses what it has made. So we use
// only what we have made, or what routes of ours alone lead through.
type nexthops struct {
	enabled   bool
	threshold int           // a device has fewer plain routes
	linger    time.Duration // an object without users may be about to get some

	mu     sync.Mutex
	byID   map[uint32]*object
	byHop  map[hop]*object      // those for us to use
	unused map[uint32]time.Time // without users in all reads since then
	idle   []uint32             // to be deleted
	plain  map[int]int          // IPv4 routes with a gateway and without an object, by device
	next   uint32
}

func (t *nexthops) reset() {
	n := len(t.byID) // as many are likely to be there again
	t.byID, t.byHop, t.plain, t.idle = make(map[uint32]*object, n), make(map[hop]*object, n), map[int]int{}, nil
}

func (t *nexthops) add(o *object) {
	t.byID[o.id] = o
	t.next = max(t.next, o.id+1)
}

// use takes note of n more routes through an object, and returns it; nil if it does
// not carry our protocol number.
func (t *nexthops) use(id uint32, n int) *object {
	o := t.byID[id]
	if o != nil {
		o.users += n
	}
	return o
}

func (t *nexthops) remove(id uint32) {
	delete(t.unused, id) // it may be another's next time
	if o, ok := t.byID[id]; ok {
		delete(t.byID, id)
		if t.byHop[o.hop] == o {
			delete(t.byHop, o.hop)
		}
	}
}

// forget takes note of an object that another program has deleted or replaced.
func (t *nexthops) forget(id uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(id)
}

// readNexthops learns which nexthop objects there are. Read calls it before it
// reads routes.
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
		t.add(&object{hop: newHop(gateway, int(index), onLink), id: id})
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

// used takes note of a route that was read, and completes it.
func (t *nexthops) used(r *routeReply) {
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

// complete adds to a route through an object of ours what the kernel leaves out where it
// shows the id alone, as with net.ipv4.nexthop_compat_mode=0.
func (t *nexthops) complete(r *routeReply) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o, ours := t.byID[r.route.NexthopID]; ours && r.oif == 0 {
		r.route.Gateway, r.oif, r.route.OnLink = o.gateway(), o.index, o.onLink
	}
}

// usedByOthers takes note of the objects of routes that are not of our concern, before
// those of routes that are.
func (t *nexthops) usedByOthers(ids []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range ids {
		if o := t.use(id, 1); o != nil {
			o.others = true
		}
	}
}

// orphaned takes note of the objects that no route uses, after a read. Who makes objects
// makes routes through them next: one that was unused for some time is left over.
func (t *nexthops) orphaned() {
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

// wanted reports whether a route belongs on a nexthop object.
func wanted(op *dataplane.Op) (dataplane.Route, bool) {
	r, ok := op.Object.(dataplane.Route)
	return r, ok && !op.Delete && r.Gateway.IsValid() && prefix.FamilyOf(r.Dst.Addr()) == prefix.IPv4
}

// provideNexthops makes the objects for the routes that ops put, where a device
// would have too many plain ones, and sets their ids in ops. Where that fails
// the routes stay plain.
func (k *Kernel) provideNexthops(ctx context.Context, ops []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
		return
	}
	puts := map[int]int{} // by device
	for _, op := range ops {
		if r, ok := wanted(op); ok {
			puts[indexes[r.Dev]]++
		}
	}
	for index, n := range puts {
		t.plain[index] += n
		if t.plain[index] >= t.threshold {
			k.provideFor(ctx, index, n, ops, indexes)
		}
	}
}

// provideFor does it for the n routes through one device. t.mu is held.
func (k *Kernel) provideFor(ctx context.Context, index, n int, ops []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	if len(t.byID) == 0 { // room for all of them at once
		t.byID, t.byHop = make(map[uint32]*object, n), make(map[hop]*object, n)
	}
	type route struct {
		op  *dataplane.Op
		via *object
	}
	routes, missing := make([]route, 0, n), make([]*object, 0, n)
	for _, op := range ops {
		r, ok := wanted(op)
		if !ok || indexes[r.Dev] != index {
			continue
		}
		h := newHop(r.Gateway, index, r.OnLink)
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

// notMade takes note that the put of a plain route has failed. One through an object is
// for the next read to count, as that failure is for the Reconciler to look into.
func (t *nexthops) notMade(op *dataplane.Op, indexes map[string]int) {
	if r, ok := wanted(op); ok && r.NexthopID == 0 {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.plain[indexes[r.Dev]]--
	}
}

// createNexthops makes these objects, which are known by hop already, and returns
// those whose id another program has.
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
		m.addr(nhaGateway, missing[i].gateway())
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

// releaseNexthops deletes the objects of routes that were deleted, and those
// that are left over. The routes must be gone: deleting an object takes its
// routes along, without a word and slowly.
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
	// An idle object may have gone, or have been taken into use again.
	ids := slices.DeleteFunc(t.idle, func(id uint32) bool {
		o := t.byID[id]
		return o == nil || o.users > 0
	})
	t.idle = nil
	k.deleteNexthops(ctx, ids)
}

// deleteNexthops deletes objects of ours. t.mu is held.
func (k *Kernel) deleteNexthops(ctx context.Context, ids []uint32) {
	for _, id := range ids {
		k.nexthops.remove(id) // first, so that the announcement means nothing
	}
	// One that stays is found by the next read.
	_ = k.sock.send(ctx, len(ids), func(i int, m *message) {
		m.begin(rtmDelNexthop, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
		m.attr32(nhaID, ids[i])
	})
}

// nhmsg is struct nhmsg.
func nhmsg(family, protocol uint8, flags uint32) []byte {
	b := []byte{family, 0, protocol, 0, 0, 0, 0, 0}
	binary.NativeEndian.PutUint32(b[4:], flags)
	return b
}
