package backend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"flanneld/pkg/loop"
	"flanneld/subnet"
)

// SyncerConfig is what a Syncer works with. All fields but OnSync are required.
type SyncerConfig struct {
	Config  subnet.Config
	Own     subnet.Lease
	Network Network
	Ledger  *subnet.Ledger // the Syncer's alone while it runs
	Resync  time.Duration
	// OnSync is called after every pass with its result, and with whether the
	// set was complete.
	OnSync func(complete bool, err error)
}

// Syncer is the one lease-watch loop: it turns what a manager says about
// other nodes into calls of Network.Sync.
type Syncer struct {
	SyncerConfig
	loop    *loop.Loop
	refused map[string]string // lease key to reason, as logged
	failing bool
	held    int
	// complete is set once a snapshot was applied.
	complete bool

	mu       sync.Mutex
	snapshot *subnet.Snapshot // the newest; nil before the first
}

// NewSyncer returns a syncer. Until the first snapshot it serves the peers
// that the ledger remembers, and removes nothing.
func NewSyncer(c SyncerConfig) *Syncer {
	s := &Syncer{SyncerConfig: c, refused: map[string]string{}}
	s.loop = loop.New(c.Resync, s.step)
	return s
}

// Publish takes the newest snapshot. It does not block.
func (s *Syncer) Publish(snapshot subnet.Snapshot) {
	s.mu.Lock()
	s.snapshot = &snapshot
	s.mu.Unlock()
	s.loop.Wake()
}

// Run blocks until ctx ends, and returns nil then.
func (s *Syncer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-s.Network.Changed():
				s.loop.Wake()
			}
		}
	})
	return s.loop.Run(ctx)
}

// step makes one pass. It logs and reports its result; the error that it
// returns only says that it should run again soon.
func (s *Syncer) step(ctx context.Context) error {
	leases := s.leases(ctx)
	peers, refused := s.admit(leases)
	outcome, err := s.Network.Sync(ctx, Set{Leases: peers, Complete: s.complete})
	if ctx.Err() != nil {
		return nil
	}
	s.logRefused(ctx, append(refused, outcome.Refused...))
	s.logResult(ctx, err)
	if s.OnSync != nil {
		s.OnSync(s.complete, err)
	}
	if err == nil && outcome.Retry {
		return errRetry
	}
	return err
}

var errRetry = errors.New("refused for a cause that may pass")

// leases brings the ledger up to date and returns what it holds.
func (s *Syncer) leases(ctx context.Context) []subnet.Lease {
	s.mu.Lock()
	snapshot := s.snapshot
	s.mu.Unlock()
	if snapshot == nil {
		var leases []subnet.Lease
		for _, p := range s.Ledger.State().Peers {
			leases = append(leases, p.Lease)
		}
		return leases
	}
	leases, held := s.Ledger.Apply(*snapshot, time.Now())
	s.complete = true
	if len(held) == s.held {
		return leases
	}
	s.held = len(held)
	if s.held > 0 {
		klog.FromContext(ctx).Error(nil, "the store has forgotten peers that it did not remove: they are kept until it contradicts them or their lease has run out",
			"kept", s.held, "first", held[0])
	} else {
		klog.FromContext(ctx).Info("no peer is kept any more that the store does not have")
	}
	return leases
}

// admit returns the leases that can be served. Leases of another backend, with
// data that cannot be used, or in conflict with one that was there first are
// refused; the rest are not affected.
func (s *Syncer) admit(leases []subnet.Lease) ([]subnet.Lease, []subnet.Refusal) {
	var refused []subnet.Refusal
	refuse := func(l subnet.Lease, format string, args ...any) {
		refused = append(refused, subnet.Refusal{Key: l.Key, Reason: fmt.Sprintf(format, args...)})
	}
	identities := map[string][]string{}
	var usable []subnet.Lease
	for _, l := range leases {
		if l.BackendType != s.Own.BackendType {
			refuse(l, "its backend type is %q, ours %q", l.BackendType, s.Own.BackendType)
			continue
		}
		ids, err := s.Network.Check(l)
		if err != nil {
			refuse(l, "%v", err)
			continue
		}
		identities[l.Key] = ids
		usable = append(usable, l)
	}
	accepted, conflicts := subnet.Arbitrate(s.Config, s.Own, usable)
	refused = append(refused, conflicts...)

	owner := map[string]string{}
	if ids, err := s.Network.Check(s.Own); err == nil {
		for _, id := range ids {
			owner[id] = "this node"
		}
	}
	peers := slices.DeleteFunc(accepted, func(l subnet.Lease) bool {
		ids := identities[l.Key]
		if i := slices.IndexFunc(ids, func(id string) bool { return owner[id] != "" }); i >= 0 {
			refuse(l, "its %s is that of %s", ids[i], owner[ids[i]])
			return true
		}
		for _, id := range ids {
			owner[id] = l.Key
		}
		return false
	})
	return peers, refused
}

// logRefused logs refusals that are new or have another reason, and those
// that have ended.
func (s *Syncer) logRefused(ctx context.Context, refused []subnet.Refusal) {
	log := klog.FromContext(ctx)
	now := map[string]string{}
	for _, r := range refused {
		if now[r.Key] != "" {
			r.Reason = now[r.Key] + "; " + r.Reason
		}
		now[r.Key] = r.Reason
	}
	for _, key := range slices.Sorted(maps.Keys(now)) {
		if s.refused[key] != now[key] {
			log.Error(nil, "lease refused", "lease", key, "reason", now[key])
		}
	}
	for _, key := range slices.Sorted(maps.Keys(s.refused)) {
		if _, still := now[key]; !still {
			log.Info("lease no longer refused", "lease", key)
		}
	}
	s.refused = now
}

func (s *Syncer) logResult(ctx context.Context, err error) {
	log := klog.FromContext(ctx)
	switch {
	case err != nil && !s.failing:
		log.Error(err, "data path not in order, trying again")
	case err == nil && s.failing:
		log.Info("data path in order again")
	}
	s.failing = err != nil
}
