// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
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

// Append creates objects as another program, beside existing ones: a route becomes a duplicate of a route
// with the same key.
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
	if err := k.usable(r); err != nil {
		return err
	}
	return k.routes.append(r)
}

// Remove deletes objects as another program.
func (k *Kernel) Remove(objects ...dataplane.Object) error {
	return k.change(func() error {
		for _, o := range objects {
			k.remove(o)
		}
		return nil
	})
}

// SetUp sets a device up or down.
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
