// SPDX-License-Identifier: Apache-2.0

// Package ownership lets only one network on a host use a device, and removes the kernel objects of former
// configurations.
package ownership

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Remove removes the objects of a former configuration, except for those in present, which the present
// configuration needs, for devices that another network or daemon uses now, and for objects on such devices.
// If there is such a device, all leftovers stay too. Remove keeps the locks of the other devices.
func Remove(ctx context.Context, kernel dataplane.Kernel, devices *Locks, present, former backend.Description) error {
	scope := former.Scope
	scope.Devices = slices.DeleteFunc(slices.Clone(scope.Devices), func(name string) bool {
		return errors.Is(devices.Take(name), ErrInUse)
	})

	removed, err := dataplane.Retire(ctx, kernel, scope, present.Scope)
	if err != nil {
		return err
	}
	if len(scope.Devices) == len(former.Scope.Devices) {
		one, err := discard(ctx, present.Beyond(former))
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

// discard removes the leftovers that exist, and returns their number. It stops at the first error.
func discard(ctx context.Context, leftovers []backend.Leftover) (removed int, err error) {
	for _, r := range leftovers {
		present, err := r.Present()
		if err == nil && present {
			removed++
			err = r.Remove(ctx)
		}
		if err != nil {
			return removed, fmt.Errorf("remove %s: %w", r, err)
		}
	}
	return removed, nil
}
