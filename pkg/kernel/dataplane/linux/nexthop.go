// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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

	before := t.byID
	err := k.sock.dump(ctx, func(m *message) {
		m.begin(unix.RTM_GETNEXTHOP, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
	}, t.reset, func(typ uint16, payload []byte) {
		if typ != unix.RTM_NEWNEXTHOP || len(payload) < unix.SizeofNhmsg || payload[2] != dataplane.Protocol {
			return
		}

		var id uint32
		o := &nexthop{onLink: binary.NativeEndian.Uint32(payload[4:])&unix.RTNH_F_ONLINK != 0}
		for a := range attributes(payload[unix.SizeofNhmsg:]) {
			switch a.typ {
			case unix.NHA_ID:
				id = a.uint32()
			case unix.NHA_OIF:
				o.index = int(a.uint32())
			case unix.NHA_GATEWAY:
				o.gateway = a.addr()
			}
		}
		if known := before[id]; known != nil {
			o.unused = known.unused
		}
		t.byID[id] = o
		t.next = max(t.next, id+1)
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

// provideNexthops creates a nexthop object for each route that ops put, if a device would have too many
// plain routes otherwise, and sets the ids in ops. A route stays plain if it must, or if its object cannot
// be created. indexes contains the index of each device.
func (k *Kernel) provideNexthops(ctx context.Context, ops []*dataplane.Op, indexes map[string]int) {
	t := &k.nexthops
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enabled {
		return
	}

	puts := map[int][]*dataplane.Op{} // by index of the device
	for _, op := range ops {
		if r, ok := viaNexthop(op); ok {
			puts[indexes[r.Dev]] = append(puts[indexes[r.Dev]], op)
		}
	}

	for index, ops := range puts {
		t.plain[index] += len(ops)
		if t.plain[index] < t.threshold {
			continue
		}

		ops = slices.DeleteFunc(ops, func(op *dataplane.Op) bool {
			r, _ := viaNexthop(op)
			return r.Plain || r.MTU != 0
		})
		for try := 0; try < nexthopRetries && len(ops) > 0 && t.enabled; try++ {
			ops = k.createNexthops(ctx, index, ops)
		}
	}
}

// createNexthops creates objects for the routes in ops, all through one device, and returns the ops for
// which another program uses the id. The caller has counted all these routes as plain, and holds t.mu.
func (k *Kernel) createNexthops(ctx context.Context, index int, ops []*dataplane.Op) (again []*dataplane.Op) {
	t := &k.nexthops
	ids := make([]uint32, len(ops))
	for i := range ops {
		if t.next < nexthopFirst || t.next > nexthopLast {
			t.next = nexthopFirst
		}
		ids[i] = t.next
		t.next++
	}

	failed := k.sock.send(ctx, len(ops), func(i int, m *message) {
		r, _ := viaNexthop(ops[i])
		var flags uint32
		if r.OnLink {
			flags = unix.RTNH_F_ONLINK
		}
		m.begin(unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nhmsg(unix.AF_INET, dataplane.Protocol, flags)...)
		m.attr32(unix.NHA_ID, ids[i])
		m.attr32(unix.NHA_OIF, uint32(index))
		m.addr(unix.NHA_GATEWAY, r.Gateway)
	})

	for i, op := range ops {
		switch err := failed[i]; {
		case err == nil:
			r, _ := viaNexthop(op)
			t.byID[ids[i]] = &nexthop{gateway: r.Gateway, index: index, onLink: r.OnLink, users: 1}
			t.plain[index]--
			r.NexthopID = ids[i]
			op.Object = r
		case errors.Is(err, unix.EEXIST):
			again = append(again, op)
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
		t.release(r.NexthopID)
		if r.NexthopID == 0 && r.Gateway.Is4() {
			t.plain[indexes[r.Dev]]--
		}
	}

	// An idle object may have been deleted, or be in use.
	ids := slices.DeleteFunc(t.idle, func(id uint32) bool {
		o := t.byID[id]
		return o == nil || o.users > 0
	})
	t.idle = nil
	for _, id := range ids {
		delete(t.byID, id) // first, so that the announcement of the delete finds nothing to forget
	}

	// If a delete fails, the next read finds the object.
	_ = k.sock.send(ctx, len(ids), func(i int, m *message) {
		m.begin(unix.RTM_DELNEXTHOP, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
		m.attr32(unix.NHA_ID, ids[i])
	})
}
