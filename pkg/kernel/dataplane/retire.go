// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// PlanRetire returns the changes that Retire would make, in their order.
func PlanRetire(ctx context.Context, k Kernel, former, present Scope) ([]Op, error) {
	have, err := k.Read(ctx, former)
	if err != nil {
		return nil, fmt.Errorf("read kernel state: %w", err)
	}
	var links []Op
	var deleted []string
	for _, name := range slices.Sorted(maps.Keys(have.Links)) {
		if l := have.Links[name]; l.ours() && !l.belongsTo(present) {
			links = append(links, Op{Delete: true, Object: l})
			deleted = append(deleted, name)
		}
	}

	ops := slices.DeleteFunc(Plan(have, NewState(), former, nil, true).Ops, func(op Op) bool {
		return op.Object.belongsTo(present) || slices.Contains(deleted, op.Object.Device())
	})
	return append(ops, links...), nil
}

// Retire removes the objects that belong to former but not to present, such as those of an
// earlier configuration. Of the routes that are not on the devices of former, it removes
// only those with flanneld's protocol number. It also deletes the devices of former that
// are not in present, with all objects on them, if they are of a kind that flanneld
// creates. The caller should have applied the state of present before, so that
// destinations in both scopes keep a route. A failure does not stop the changes after it.
// removed is the number of changes that succeeded. The error wraps the first few causes.
func Retire(ctx context.Context, k Kernel, former, present Scope) (removed int, err error) {
	ops, err := PlanRetire(ctx, k, former, present)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, e := range k.Apply(ctx, ops) {
		errs = append(errs, e)
	}
	return len(ops) - len(errs), opErrors(errs)
}
