// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// writer applies the policies of all Keepers that use the same firewall, in one pass. Otherwise a
// hundred networks would need a hundred passes, and each pass would read the rules of all networks.
type writer struct {
	applier firewall.Applier
	turn    *sync.Mutex // see Host.writing
	batch   wait.Batch[written]

	mu       sync.Mutex
	policies map[any]firewall.Policy // by Keeper
	joined   bool                    // a policy was added since the last pass that succeeded
}

// written is the result of one pass.
type written struct {
	changed bool
	joined  bool // the pass was the first one with one of the policies
	err     error
}

// apply applies the policy of k, together with those of other Keepers. Later passes contain it as well,
// until k leaves.
func (w *writer) apply(ctx context.Context, k any, p firewall.Policy) written {
	w.mu.Lock()
	_, known := w.policies[k]
	w.joined = w.joined || !known
	w.policies[k] = p
	w.mu.Unlock()
	return w.batch.Do(ctx, w.pass)
}

// comparePolicies makes the order of rules independent of the order in which networks start.
func comparePolicies(a, b firewall.Policy) int {
	return slices.CompareFunc(a.Networks, b.Networks, func(a, b firewall.Network) int {
		return cmp.Or(a.Network.Addr().Compare(b.Network.Addr()), cmp.Compare(a.Network.Bits(), b.Network.Bits()))
	})
}

// pass applies all policies, when no other writer of the Host and no Remove reads or writes rules.
func (w *writer) pass(ctx context.Context) written {
	w.turn.Lock()
	defer w.turn.Unlock()

	w.mu.Lock()
	policies := slices.SortedFunc(maps.Values(w.policies), comparePolicies)
	result := written{joined: w.joined}
	w.joined = false
	w.mu.Unlock()

	result.changed, result.err = w.applier.Apply(ctx, policies...)
	if result.err != nil && result.joined {
		w.mu.Lock()
		w.joined = true // the next pass writes the new policies
		w.mu.Unlock()
	}
	return result
}

// leave removes the policy of k from later passes. Its rules stay.
func (w *writer) leave(k any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.policies, k)
}
