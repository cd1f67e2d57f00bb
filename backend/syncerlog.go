// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// This file contains the log of a Syncer. Each refusal, failure and held peer is logged
// when it begins and when it ends, and not at every pass.

// logHeld logs when the ledger holds more peers than before, and when it holds none any more. It
// does not log each peer that comes back: after a store was emptied, all peers come back one by
// one.
func (s *Syncer) logHeld(ctx context.Context) {
	n := s.Ledger.NumHeld()
	switch {
	case n > s.held:
		klog.FromContext(ctx).Error(nil, "the store has forgotten peers that it did not remove: they are kept until it contradicts them or their lease has run out",
			"kept", n, "first", s.Ledger.Held()[0])
	case n == 0 && s.held > 0:
		klog.FromContext(ctx).Info("no peer is kept any more that the store does not have")
	}
	s.held = n
}

// logRefused logs new refusals, refusals with a new reason, and the end of refusals. It only checks
// leases that may have changed. byKernel contains the refusals of the pass. If the pass failed, it
// may not have reached all peers, so a peer that is not in byKernel keeps its refusal.
func (s *Syncer) logRefused(ctx context.Context, set Set, byKernel []subnet.Refusal, failed bool) {
	keys := map[string]struct{}{}
	add := func(reasons map[string]string) {
		for key := range reasons {
			keys[key] = struct{}{}
		}
	}
	add(s.kernel)
	if set.All {
		add(s.refused)
		add(s.unusable)
	}
	maps.DeleteFunc(s.kernel, func(key, _ string) bool { return !failed || set.Leases[key] == nil })
	for _, r := range byKernel {
		s.kernel[r.Key] = r.Reason
		keys[r.Key] = struct{}{}
	}
	if set.All {
		for _, r := range s.arbiter.AllRefused() {
			keys[r.Key] = struct{}{}
		}
	}
	for _, key := range set.Changed {
		keys[key] = struct{}{}
	}
	log := klog.FromContext(ctx)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		switch reason := s.reason(key); reason {
		case s.refused[key]:
		case "":
			delete(s.refused, key)
			log.Info("lease no longer refused", "lease", key)
		default:
			s.refused[key] = reason
			log.Error(nil, "lease refused", "lease", key, "reason", reason)
			if s.OnRefused != nil {
				s.OnRefused(key, reason)
			}
		}
	}
}

// logShared logs once when several leases begin to share a public address, and once when they no
// longer do. All of these leases are served, but one of them may be that of a host that is gone.
func (s *Syncer) logShared(ctx context.Context) {
	log := klog.FromContext(ctx)
	for _, shared := range s.arbiter.SharedChanges() {
		if len(shared.Keys) == 0 {
			log.Info("leases no longer share a public address", "publicIP", shared.PublicIP)
			continue
		}
		log.Error(nil, "leases share a public address", "publicIP", shared.PublicIP, "leases", shared.Keys[:2], "count", len(shared.Keys))
	}
}

// reason returns the reason why a lease is not served in all families, or "" if it is.
func (s *Syncer) reason(key string) string {
	if why, ok := s.unusable[key]; ok {
		return why
	}
	why := strings.Join(s.arbiter.Refused(key), "; ")
	if k, ok := s.kernel[key]; ok && why != "" {
		return why + "; " + k
	} else if ok {
		return k
	}
	return why
}

func (s *Syncer) logResult(ctx context.Context, err error) {
	log := klog.FromContext(ctx)
	switch {
	case err != nil && (s.err == nil || err.Error() != s.logged && s.limit.Allow()):
		log.Error(err, "data path not in order, trying again")
		s.logged = err.Error()
	case err == nil && s.err != nil:
		log.Info("data path in order again")
	}
	if s.err = err; err == nil {
		s.lastSync = time.Now()
	}
}
