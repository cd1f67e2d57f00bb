// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// reprieve keeps leases that the store has deleted for a while. If a store was unavailable for so
// long that nodes could not renew their leases, it deletes the leases as soon as it is back, and
// the nodes, which have run all the time, take them again within seconds. Following those
// deletions would disconnect all nodes for that time.
type reprieve struct {
	heard  time.Time // when the store last sent something
	until  time.Time // zero: there is none
	doomed map[string]struct{}
}

// alive records that a stream was up until now, even if the store has sent nothing. unnoticed is
// the time for which a dead connection is not noticed.
func (r *reprieve) alive(now time.Time, unnoticed time.Duration) {
	if latest := now.Add(-unnoticed); r.heard.Before(latest) {
		r.heard = latest
	}
}

// hear records that the store has sent something.
func (r *reprieve) hear(now time.Time, margin, grace time.Duration) {
	if !r.heard.IsZero() && now.Sub(r.heard) > margin {
		r.until = now.Add(grace)
	}
	r.heard = now
}

// spares records that a key is gone, and reports whether its lease is kept nevertheless.
func (r *reprieve) spares(key string) bool {
	if !r.heard.Before(r.until) {
		return false
	}
	if r.doomed == nil {
		r.doomed = map[string]struct{}{}
	}
	r.doomed[key] = struct{}{}
	return true
}

// renewed records that a key exists, and returns the kept leases that it replaces: those of the
// same subnet, or of the same node.
func (r *reprieve) renewed(now *entry, entries map[string]*entry) (gone []string) {
	delete(r.doomed, now.key)
	for key := range r.doomed {
		e := entries[key]
		sameNode := slices.ContainsFunc(e.lease.Endpoints, func(old subnet.Endpoint) bool {
			ep, ok := now.lease.Endpoint(prefix.FamilyOf(old.PublicIP))
			return ok && ep.PublicIP == old.PublicIP && old.PublicIP.IsValid() && !old.PublicIP.IsUnspecified()
		})
		if sameNode || overlap(e.subnets, now.subnets) {
			delete(r.doomed, key)
			gone = append(gone, key)
		}
	}
	return gone
}

// ended returns the keys whose reprieve is over.
func (r *reprieve) ended(ctx context.Context) (gone []string) {
	if len(r.doomed) == 0 || r.heard.Before(r.until) {
		return nil
	}
	gone = slices.Sorted(maps.Keys(r.doomed))
	r.doomed = nil
	klog.FromContext(ctx).Info("leases that ran out while the store was away were not taken again", "leases", len(gone), "first", gone[0])
	return gone
}
