// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

const (
	// All programs in a namespace share the ids. The ids of this process start at a high
	// number, and an id that is in use is skipped.
	nexthopFirst   = 0x62000000
	nexthopLast    = nexthopFirst + 1<<20
	nexthopRetries = 16
)

// readNexthops replaces what this process knows about nexthop objects by those with flanneld's protocol
// number, without users. Read then counts the users while it reads the routes.
func (k *Kernel) readNexthops(ctx context.Context) error {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
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

// provideNexthops creates nexthop objects for the routes that ops put, if a device would have too many
// plain routes otherwise, and sets the ids in ops. It counts these routes as users of an object or as
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

// provideFor gives the routes in ops that go through the device with this index nexthop objects. A route
// stays plain if it must, or if its object cannot be created. The caller has counted all these routes as
// plain, and holds t.mu.
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

// createNexthops creates the missing objects, which byHop already contains. It returns those whose id
// another program uses. The id of an object that could not be created stays 0. The caller holds t.mu.
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
		case errors.Is(err, unix.EOPNOTSUPP): // Linux before 5.3
			t.enabled = false
		}
	}
	return again
}

// releaseNexthops deletes the objects that no route uses any more. done are the operations that have
// succeeded. It must follow the deletes of routes: the kernel would delete remaining routes together
// with the object, slowly and without an announcement.
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

// The caller holds k.nexthops.mu.
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
