// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

// audit compares a cache that was restored from the last known state with a full list, once and at
// a random time. It lists the leases at the revision that the cache has then. So a difference is an
// error of the last known state, and not a change whose event has not come yet.
type audit struct {
	m *Manager

	mu    sync.Mutex // guards cache while a watch runs
	cache *leaseCache
	due   time.Time // when to list the leases; zero before begin has chosen the time, and if no audit is needed
	found *findings
	wg    sync.WaitGroup
}

// findings contains the entries that differ, by key: was has the entries of the cache, and is those
// of the store. was has all keys that differ, with nil for a key that is not in the cache. A key
// that is not in the store is missing in is.
type findings struct {
	was, is map[string]*entry
}

// errDiffers ends a watch because the cache has to be repaired.
var errDiffers = errors.New("the cache differs from the store")

func (m *Manager) newAudit(cache *leaseCache) *audit { return &audit{m: m, cache: cache} }

// begin starts a goroutine that makes the audit when its time comes while a watch runs. If the
// cache needs no audit, begin only returns ctx. The watch must use the returned context, which ends
// with errDiffers as its cause if the audit finds a difference. The caller must call end when the
// watch has ended.
func (a *audit) begin(ctx context.Context) (watch context.Context, end func()) {
	if a.cache.restored == 0 {
		a.due = time.Time{}
		return ctx, func() {}
	}
	if a.due.IsZero() {
		// All hosts may have started at once. No audit begins in the first sixth of the time, which
		// is ten minutes, so that the store has time for those starts.
		first := a.m.timing.audit / 6
		a.due = time.Now().Add(first + rand.N(a.m.timing.audit-first))
	}
	watch, cancel := context.WithCancelCause(ctx)
	if a.cache.partial() {
		a.wg.Go(func() { a.complete(watch, cancel) })
	}
	a.wg.Go(func() {
		for pause := time.Until(a.due); wait.For(watch, pause) == nil; pause = wait.Vary(a.m.timing.audit/10, 0.5) {
			if done, differs := a.run(watch); differs {
				cancel(errDiffers)
				return
			} else if done {
				return
			}
		}
	})
	return watch, func() {
		cancel(nil)
		a.wg.Wait()
	}
}

// complete ends the watch so that all leases are listed, if the cache stays partial. That happens if
// no lease changes, because before 3.4.25 and 3.5.8 etcd does not say when it has sent all events,
// and its grpc-proxy never does. The random time keeps the hosts that start together from listing at
// the same moment.
func (a *audit) complete(ctx context.Context, end context.CancelCauseFunc) {
	if wait.For(ctx, a.m.timing.unconfirmed) != nil || a.m.client.turn(ctx) != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cache.partial() {
		a.cache.stale = true
		end(nil)
	}
}

func (a *audit) stop() { a.wg.Wait() }

// run compares the cache with a list, without the leases that the cache only retains. It stores the
// differences in a.found; differs means that there are some. Equal entries get the revision of
// their last write, and the cache no longer counts as restored. done is false if the comparison
// must be repeated, because the list failed, the revision was compacted, or the store is another
// one.
func (a *audit) run(ctx context.Context) (done, differs bool) {
	a.mu.Lock()
	entries, revision, store := maps.Clone(a.cache.entries), a.cache.store.Revision, a.cache.store.ID
	maps.DeleteFunc(entries, func(key string, _ *entry) bool {
		_, expiring := a.cache.expiring[key]
		return expiring
	})
	a.mu.Unlock()
	l, err := a.m.listAt(ctx, revision, a.m.timing.auditPage)
	if err != nil || l.store.ID != store {
		return false, false
	}
	f := findings{map[string]*entry{}, map[string]*entry{}}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range l.entries {
		is := &l.entries[i]
		is.value = nil
		was := entries[is.key]
		delete(entries, is.key)
		switch {
		case was == nil || !alike(was, is):
			f.was[is.key], f.is[is.key] = was, is
		case a.cache.entries[is.key] == was && was.modRevision == 0:
			a.cache.replace(is) // the listed entry has the revision of its last write, which the old one does not have
		}
	}
	maps.Copy(f.was, entries)
	a.cache.restored = 0
	if len(f.was) == 0 {
		return true, false
	}
	a.found = &f
	return true, true
}

// alike reports whether two entries of one key have the same content. was may come from the state
// file, which has no revision of the last write, and has JSON in another form.
func alike(was, is *entry) bool {
	if was.modRevision != 0 {
		return was.is(is.modRevision, is.leaseID)
	}
	x, y := was.lease, is.lease
	return is.err == nil && was.createRevision == is.createRevision && x.BackendType == y.BackendType && x.NextType == y.NextType && x.Permanent == y.Permanent &&
		slices.EqualFunc(x.Endpoints, y.Endpoints, func(x, y subnet.Endpoint) bool {
			return x.Subnet == y.Subnet && x.PublicIP == y.PublicIP && sameJSON(x.Data, y.Data) && sameJSON(x.NextData, y.NextData)
		})
}

func sameJSON(x, y json.RawMessage) bool {
	if bytes.Equal(x, y) {
		return true
	}
	var a, b any
	return json.Unmarshal(x, &a) == nil && json.Unmarshal(y, &b) == nil && reflect.DeepEqual(a, b)
}

// repair corrects the cache by the findings of the audit, publishes the corrections, and reports
// whether there were findings. It must not be called while a watch runs. Entries that have changed
// since the audit stay as they are.
func (a *audit) repair(ctx context.Context, sink func(subnet.Update)) bool {
	if a.found == nil {
		return false
	}
	f := *a.found
	a.found = nil
	changed := map[string]*subnet.Lease{}
	var unreadable []string
	for key, was := range f.was {
		is := f.is[key]
		switch {
		case a.cache.entries[key] != was:
		case is == nil:
			delete(a.cache.entries, key)
			changed[key] = nil
		case is.err != nil:
			a.cache.replace(is)
			unreadable = append(unreadable, key)
		default:
			a.cache.replace(is)
			changed[key] = &is.lease
		}
	}
	keys := slices.Sorted(maps.Keys(f.was))
	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from those of etcd and were corrected", "leases", len(keys), "first", subnet.Shorten(keys[0]))
	if a.m.cfg.OnRepaired != nil {
		a.m.cfg.OnRepaired(len(keys))
	}
	u := a.cache.update(a.m.self.Load(), changed)
	u.Undecodable = unreadable
	sink(u)
	return true
}
