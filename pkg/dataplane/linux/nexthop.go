package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/prefix"
)

// A route names its next hop by device and gateway, or by the id of a nexthop
// object. The kernel looks for an equal next hop among all of a device each
// time a plain IPv4 route is added, so thousands of them through one device
// take quadratic time; through objects they take linear time. Few routes are
// plain, because then ip(8) shows what everybody's scripts expect.
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
)

// hop is what a nexthop object stands for.
type hop struct {
	gateway netip.Addr
	index   int // of the device
	onLink  bool
}

// nexthops knows the nexthop objects that carry our protocol number.
type nexthops struct {
	enabled   bool
	threshold int // how many routes a device has before they go through objects

	mu    sync.Mutex
	byID  map[uint32]hop
	ids   map[hop]uint32
	users map[uint32]int // routes through an object
	idle  []uint32       // without any
	via   map[int]int    // IPv4 routes with a gateway, by device
	next  uint32
}

func (t *nexthops) reset() {
	t.byID, t.ids, t.users, t.via, t.idle = map[uint32]hop{}, map[hop]uint32{}, map[uint32]int{}, map[int]int{}, nil
}

func (t *nexthops) add(id uint32, h hop) {
	t.byID[id] = h
	t.ids[h] = id
	t.next = max(t.next, id+1)
}

func (t *nexthops) remove(id uint32) {
	if h, ok := t.byID[id]; ok {
		delete(t.byID, id)
		delete(t.users, id)
		if t.ids[h] == id {
			delete(t.ids, h)
		}
	}
}

// forgot takes note of a deleted object; attrs are those of the message. It
// reports whether the object meant nothing to us: not ours, or deleted by us.
func (t *nexthops) forgot(attrs []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for a := range attributes(attrs) {
		if a.typ == nhaID {
			_, ours := t.byID[a.uint32()]
			t.remove(a.uint32())
			return !ours
		}
	}
	return true
}

// readNexthops learns which nexthop objects there are. Read calls it before it
// reads routes.
func (k *Kernel) readNexthops(ctx context.Context) error {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reset()
	if !t.enabled {
		return nil
	}
	err := k.sock.dump(ctx, func(m *message) {
		m.begin(rtmGetNexthop, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
	}, t.reset, func(typ uint16, payload []byte) {
		if typ != rtmNewNexthop || len(payload) < sizeofNhmsg || payload[2] != dataplane.Protocol {
			return
		}
		h := hop{onLink: binary.NativeEndian.Uint32(payload[4:])&unix.RTNH_F_ONLINK != 0}
		var id uint32
		for a := range attributes(payload[sizeofNhmsg:]) {
			switch a.typ {
			case nhaID:
				id = a.uint32()
			case nhaOIF:
				h.index = int(a.uint32())
			case nhaGateway:
				h.gateway = a.addr()
			}
		}
		t.add(id, h)
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

// used takes note of a route that was read, and completes it where the kernel
// shows the object's id alone.
func (t *nexthops) used(r *routeReply) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id := r.route.NexthopID; id != 0 {
		t.users[id]++
		if h, ours := t.byID[id]; ours && !r.route.Gateway.IsValid() {
			r.route.Gateway, r.oif, r.route.OnLink = h.gateway, h.index, h.onLink
		}
	}
	if r.route.Gateway.Is4() {
		t.via[r.oif]++
	}
}

// usedByOthers takes note of the objects of routes that are not of our concern.
func (t *nexthops) usedByOthers(ids []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range ids {
		t.users[id]++
	}
}

// orphaned takes note of our objects that no route uses, after a read.
func (t *nexthops) orphaned() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id := range t.byID {
		if t.users[id] == 0 {
			t.idle = append(t.idle, id)
		}
	}
}

// wanted reports whether a route belongs on a nexthop object.
func wanted(op dataplane.Op) (dataplane.Route, bool) {
	r, ok := op.Object.(dataplane.Route)
	return r, ok && !op.Delete && r.Gateway.IsValid() && prefix.FamilyOf(r.Dst.Addr()) == prefix.IPv4
}

// provide makes the objects for the routes that ops put, where a device has
// many, and sets their ids in ops. Where that fails the routes stay plain.
func (k *Kernel) provideNexthops(ctx context.Context, ops []dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
		return
	}
	for _, op := range ops {
		if r, ok := wanted(op); ok {
			t.via[indexes[r.Dev]]++
		}
	}
	var missing []hop
	asked := map[hop]bool{}
	for _, op := range ops {
		r, ok := wanted(op)
		h := hop{r.Gateway, indexes[r.Dev], r.OnLink}
		if _, have := t.ids[h]; !ok || have || asked[h] || t.via[h.index] < t.threshold {
			continue
		}
		asked[h] = true
		missing = append(missing, h)
	}
	for range nexthopRetries {
		if len(missing) == 0 || !t.enabled {
			break
		}
		missing = k.createNexthops(ctx, missing)
	}
	for i, op := range ops {
		if r, ok := wanted(op); ok {
			r.NexthopID = t.ids[hop{r.Gateway, indexes[r.Dev], r.OnLink}]
			t.users[r.NexthopID]++
			ops[i].Object = r
		}
	}
}

// createNexthops makes one object each and returns those whose id another
// program has.
func (k *Kernel) createNexthops(ctx context.Context, hops []hop) (again []hop) {
	t := &k.nexthops
	ids := make([]uint32, len(hops))
	for i := range hops {
		if t.next < nexthopFirst || t.next > nexthopLast {
			t.next = nexthopFirst
		}
		ids[i] = t.next
		t.next++
	}
	failed := k.sock.send(ctx, len(hops), func(i int, m *message) {
		var flags uint32
		if hops[i].onLink {
			flags = unix.RTNH_F_ONLINK
		}
		m.begin(rtmNewNexthop, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nhmsg(unix.AF_INET, dataplane.Protocol, flags)...)
		m.attr32(nhaID, ids[i])
		m.attr32(nhaOIF, uint32(hops[i].index))
		m.addr(nhaGateway, hops[i].gateway)
	})
	for i, h := range hops {
		switch err := failed[i]; {
		case err == nil:
			t.add(ids[i], h)
		case errors.Is(err, unix.EEXIST):
			again = append(again, h)
		case errors.Is(err, unix.EOPNOTSUPP):
			t.enabled = false
		}
	}
	return again
}

// releaseNexthops deletes the objects of routes that were deleted, and those
// that are left over. The routes must be gone: deleting an object takes its
// routes along, without a word and slowly.
func (k *Kernel) releaseNexthops(ctx context.Context, done []dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, op := range done {
		r, ok := op.Object.(dataplane.Route)
		if !ok || !op.Delete {
			continue
		}
		if r.Gateway.Is4() {
			t.via[indexes[r.Dev]]--
		}
		if _, ours := t.byID[r.NexthopID]; ours {
			if t.users[r.NexthopID]--; t.users[r.NexthopID] <= 0 {
				t.idle = append(t.idle, r.NexthopID)
			}
		}
	}
	// An idle object may have been taken into use again.
	ids := slices.DeleteFunc(t.idle, func(id uint32) bool { return t.users[id] > 0 })
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
	return binary.NativeEndian.AppendUint32([]byte{family, 0, protocol, 0}, flags)
}
