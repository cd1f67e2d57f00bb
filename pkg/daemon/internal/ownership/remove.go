// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"errors"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Remove removes the objects of a former configuration, except for those in present, which the present
// configuration needs, for devices that another network or daemon uses now, and for objects on such devices.
// If there is such a device, all leftovers stay too. Remove keeps the locks of the other devices.
func Remove(ctx context.Context, kernel dataplane.Kernel, devices *Locks, present, former Objects) error {
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
