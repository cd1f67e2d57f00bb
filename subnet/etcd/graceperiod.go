// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// gracePeriod retains leases that the store has deleted, for a short time after a long outage. If a
// store was unavailable for so long that nodes could not renew their leases, it deletes the leases
// as soon as it is available again. The nodes have run all the time and take their leases again
// within seconds. A host that applied those deletions would disconnect all nodes for these seconds.
type gracePeriod struct {
	lastContact time.Time           // when the store last sent something
	until       time.Time           // end of the present or last grace period; zero if there was none
	expiring    map[string]struct{} // keys that the store has deleted and whose leases are retained
}

// streamWasUp records that a stream was up until now, even if the store has sent nothing on it.
// unnoticed is how long a connection can be dead before that is noticed, so the last contact counts
// as that long ago at most.
func (g *gracePeriod) streamWasUp(now time.Time, unnoticed time.Duration) {
	if latest := now.Add(-unnoticed); g.lastContact.Before(latest) {
		g.lastContact = latest
	}
}

// contact records that the store has sent something. If the contact before was longer ago than
// margin, a grace period of the length grace begins.
func (g *gracePeriod) contact(now time.Time, margin, grace time.Duration) {
	if !g.lastContact.IsZero() && now.Sub(g.lastContact) > margin {
		g.until = now.Add(grace)
	}
	g.lastContact = now
}

// retain reports whether the lease of a key that the store has deleted is retained. During a grace
// period it is, and retain records the key.
func (g *gracePeriod) retain(key string) bool {
	if !g.lastContact.Before(g.until) {
		return false
	}
	if g.expiring == nil {
		g.expiring = map[string]struct{}{}
	}
	g.expiring[key] = struct{}{}
	return true
}

// replaced records that the store has the entry in now. It returns the keys of the retained leases
// that this entry replaces, and stops retaining them. These leases overlap its subnets or have one
// of its public addresses. entries has the entries of all retained leases.
func (g *gracePeriod) replaced(now *entry, entries map[string]*entry) (gone []string) {
	delete(g.expiring, now.key)
	for key := range g.expiring {
		e := entries[key]
		sameNode := slices.ContainsFunc(e.lease.Endpoints, func(old subnet.Endpoint) bool {
			ep, ok := now.lease.Endpoint(prefix.FamilyOf(old.PublicIP))
			return ok && ep.PublicIP == old.PublicIP && old.PublicIP.IsValid() && !old.PublicIP.IsUnspecified()
		})
		if sameNode || overlap(e.subnets, now.subnets) {
			delete(g.expiring, key)
			gone = append(gone, key)
		}
	}
	return gone
}

// expired returns the retained keys when the grace period is over, and nothing before. It stops
// retaining them.
func (g *gracePeriod) expired(ctx context.Context) (gone []string) {
	if len(g.expiring) == 0 || g.lastContact.Before(g.until) {
		return nil
	}
	gone = slices.Sorted(maps.Keys(g.expiring))
	g.expiring = nil
	klog.FromContext(ctx).Info("leases that ran out while the store was away were not taken again", "leases", len(gone), "first", gone[0])
	return gone
}
