// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// change makes a change as another program.
func (k *Kernel) change(how func() error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.disturbed()
	return how()
}

// changeDevice is change for a device, which must exist.
func (k *Kernel) changeDevice(dev string, how func(*device)) error {
	return k.change(func() error {
		d, ok := k.devices[dev]
		if !ok {
			return syscall.ENODEV
		}
		how(d)
		return nil
	})
}

// Append implements World.
func (k *Kernel) Append(objects ...dataplane.Object) error {
	return k.change(func() error {
		for _, o := range objects {
			if err := k.append(o); err != nil {
				return err
			}
		}
		return nil
	})
}

func (k *Kernel) append(o dataplane.Object) error {
	switch o := o.(type) {
	case dataplane.Link:
		if _, ok := k.devices[o.Name]; ok {
			return syscall.EEXIST
		}
		d := k.newDevice(o)
		if d.Up {
			k.up(d)
		}
		return nil

	case dataplane.FDB:
		return k.putFDB(o)
	case dataplane.Route:
		return k.appendRoute(o)
	}
	return k.put(o)
}

func (k *Kernel) appendRoute(r dataplane.Route) error {
	if d, ok := k.devices[r.Dev]; ok && r.NexthopID != 0 && !d.carrier {
		return syscall.ENETDOWN
	}
	if r.Multipath && r.Dst.Addr().Is6() {
		r.Multipath = false
		r.Dev = "eth0"
		for _, gw := range []string{"fd00:77::8", "fd00:77::9"} {
			r.Gateway = netip.MustParseAddr(gw)
			if err := k.routes.append(r); err != nil {
				return err
			}
		}
		return nil
	}
	if err := k.usable(r); err != nil {
		return err
	}
	return k.routes.append(r)
}

// Change implements World.
func (k *Kernel) Change(r dataplane.Route) error {
	return k.change(func() error { return k.putRoute(r) })
}

// Remove implements World.
func (k *Kernel) Remove(objects ...dataplane.Object) error {
	return k.change(func() error {
		for _, o := range objects {
			k.remove(o)
		}
		return nil
	})
}

// SetUp implements World.
func (k *Kernel) SetUp(dev string, up bool) error {
	return k.changeDevice(dev, func(d *device) {
		switch {
		case up && !d.Up:
			k.up(d)
		case !up && d.Up:
			k.down(d)
		}
	})
}

// SetCarrier implements World. When a device loses its carrier, the kernel deletes routes
// through nexthop objects without an announcement, and keeps other routes.
func (k *Kernel) SetCarrier(dev string, on bool) error {
	return k.changeDevice(dev, func(d *device) {
		d.carrier = on
		if !on {
			k.routes = slices.DeleteFunc(k.routes, func(r dataplane.Route) bool { return r.Dev == dev && r.NexthopID != 0 })
			k.silent++
		}
	})
}

// SetARP implements World.
func (k *Kernel) SetARP(dev string, on bool) error {
	return k.changeDevice(dev, func(d *device) { d.noARP = !on })
}

// RemoveNexthop implements World.
func (k *Kernel) RemoveNexthop(id uint32) error {
	return k.change(func() error {
		k.routes = slices.DeleteFunc(k.routes, func(r dataplane.Route) bool { return r.NexthopID == id })
		k.nexthopsGone = append(k.nexthopsGone, id)
		return nil
	})
}

// Learn implements World.
func (k *Kernel) Learn(n dataplane.Neigh) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.announce()
	return k.putNeigh(n, false)
}

// AcceptRA implements World.
func (k *Kernel) AcceptRA(dev string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.announce()
	d, ok := k.devices[dev]
	if !ok {
		return "", errors.New("no such device")
	}
	return d.acceptRA, nil
}
