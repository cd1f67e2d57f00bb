// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"errors"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Remover removes the objects of former configurations, except for those in Present, which the present
// configuration needs.
type Remover struct {
	Present Objects
	Devices *Locks
	// CloseUnused closes tunnels that a network which has ended has left in this process, so that they
	// carried packets until now. It may be nil.
	CloseUnused func() error
}

// Remove first calls CloseUnused. Then it removes the objects of former configurations, except for
// devices that another network or daemon uses now, and the objects on them. If a configuration has such a
// device, all its leftovers stay too. Remove keeps the locks of the other devices until Release.
func (r Remover) Remove(ctx context.Context, kernel dataplane.Kernel, former ...Objects) error {
	if r.CloseUnused != nil {
		if err := r.CloseUnused(); err != nil {
			return err
		}
	}
	for _, f := range former {
		if err := r.remove(ctx, kernel, f); err != nil {
			return err
		}
	}
	return nil
}

func (r Remover) remove(ctx context.Context, kernel dataplane.Kernel, former Objects) error {
	scope := former.Scope
	scope.Devices = slices.DeleteFunc(slices.Clone(scope.Devices), func(name string) bool {
		return errors.Is(r.Devices.Take(name), ErrInUse)
	})

	removed, err := dataplane.Retire(ctx, kernel, scope, r.Present.Scope)
	if err != nil {
		return err
	}
	if len(scope.Devices) == len(former.Scope.Devices) {
		one, err := discard(ctx, r.Present.Beyond(former))
		if removed += one; err != nil {
			return err
		}
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("removed what a former configuration had left", "objects", removed,
			"devices", scope.Devices, "networks", scope.Networks)
	}
	return nil
}

// Release releases the locks of the devices of former configurations that are not in Present.
func (r Remover) Release(former ...Objects) {
	for _, f := range former {
		r.Devices.Release(f.Scope.Devices, r.Present.Scope.Devices)
	}
}
