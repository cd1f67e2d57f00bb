package backend

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"flanneld/pkg/loop"
	"flanneld/pkg/parallel"
	"flanneld/subnet"
)

// While the data path is not in order another error than the one before is logged
// at once. Errors that never read alike, as when many changes fail in any order,
// are logged once in errorEvery.
const (
	errorEvery = time.Minute
	errorBurst = 5
)

// SyncerConfig is what a Syncer works with. All fields but the functions are
// required.
type SyncerConfig struct {
	Config  subnet.Config
	Own     subnet.Lease
	Network Network
	Ledger  *subnet.Ledger // the Syncer's alone from now on
	Resync  time.Duration
	// OnSync is called after every pass.
	OnSync func(Pass)
	// OnRefused is called when a lease, by its key, is refused for a reason that
	// it was not refused for before.
	OnRefused func(key, reason string)
}

// Pass is the result of one pass.
type Pass struct {
	Complete bool // the store had answered
	News     bool // complete, and what Peers returns may differ from what it was at the pass before
	Err      error
	Took     time.Duration
	Repaired int // what others had changed behind our back
}

// Syncer is the one lease-watch loop: it turns what a manager says about
// other nodes into calls of Network.Sync. A change costs what it changes; only
// where leases contradict each other, or the store is not the one it was, are
// all of them looked at again.
type Syncer struct {
	SyncerConfig
	loop     *loop.Loop
	arbiter  *subnet.Arbiter
	unusable map[string]string // why a lease was not even put to the arbiter
	kernel   map[string]string // why the network refused a peer
	refused  map[string]string // all reasons, as logged
	err      error             // of the last pass
	logged   string            // the error that was logged last
	limit    *rate.Limiter     // of errors that are logged without a success between them
	lastSync time.Time         // when a pass last succeeded
	held     int
	drift    *drift
	retry    loop.Backoff // of what was refused for a cause that may pass

	mu       sync.Mutex // guards Ledger as well
	changed  map[string]struct{}
	all      bool
	complete bool // a snapshot was applied
	news     bool // see Pass
}

// NewSyncer returns a syncer. Until the first snapshot it serves the peers
// that the ledger remembers, and removes nothing.
func NewSyncer(c SyncerConfig) *Syncer {
	own := subnet.Claimant{Lease: &c.Own}
	own.Identities, _ = c.Network.Check(c.Own) // one that fails this has been refused long before
	s := &Syncer{
		SyncerConfig: c, arbiter: subnet.NewArbiter(c.Config, own), all: true, changed: map[string]struct{}{},
		refused: map[string]string{}, kernel: map[string]string{}, drift: newDrift(),
		limit: rate.NewLimiter(rate.Every(errorEvery), errorBurst),
	}
	s.loop = loop.New(c.Resync, s.step)
	return s
}

// Publish takes what a manager's Watch tells.
func (s *Syncer) Publish(u subnet.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if dropped, ok := s.Ledger.Follow(u, time.Now()); ok {
		for key := range u.Changed {
			s.changed[key] = struct{}{}
		}
		for _, key := range dropped {
			s.changed[key] = struct{}{}
		}
		if len(s.changed) > 0 { // otherwise only the revision of the store has changed
			s.news = true
			s.loop.Wake()
		}
		return
	}
	s.Ledger.Apply(u.Snapshot(), time.Now())
	s.complete, s.news, s.all = true, true, true
	s.loop.Wake()
}

// Peers returns what is known of the other nodes, to be kept on disk.
func (s *Syncer) Peers() subnet.LedgerState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Ledger.State()
}

// Run blocks until ctx ends, and returns nil then.
func (s *Syncer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.drift.forward(ctx, s.Network.Changed(), s.loop.Wake) })
	return s.loop.Run(ctx)
}

// step makes one pass. It logs and reports its result; the error that it
// returns only says that it should run again soon.
func (s *Syncer) step(ctx context.Context) error {
	begin := time.Now()
	set, news := s.advance(ctx)
	outcome, err := s.Network.Sync(ctx, set)
	if ctx.Err() != nil {
		return nil
	}
	s.drift.note(ctx, outcome.Repaired)
	s.logRefused(ctx, set, outcome.Refused, err != nil)
	if set.Complete { // until then the leases are those of the run before, which has logged it
		s.logShared(ctx)
	}
	s.logResult(ctx, err)
	if s.OnSync != nil {
		s.OnSync(Pass{Complete: set.Complete, News: news, Err: err, Took: time.Since(begin), Repaired: outcome.Repaired})
	}
	if err != nil {
		return err
	}
	return s.again(outcome)
}

// again says when to look again after a pass that has not failed. A peer that may be
// refused for good has a backoff of its own: the loop's is for the failures of all.
func (s *Syncer) again(o Outcome) error {
	after := o.Again
	if !o.Retry {
		s.retry.Reset()
	} else if pause := s.retry.Next(); after == 0 || pause < after {
		after = pause
	}
	if after == 0 {
		return nil
	}
	return loop.After(after)
}

// advance takes in what was published, and returns the peers that can be served,
// and whether there was news: leases of another backend, with data that cannot be
// used, or in conflict with one that was there first are refused; the rest are not
// affected.
func (s *Syncer) advance(ctx context.Context) (set Set, news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	expired := s.Ledger.Expire(time.Now())
	set = Set{All: s.all || expired, Complete: s.complete}
	news = s.news || expired
	// First the leases that are gone: what takes their place does not contradict them then.
	set.Changed = slices.SortedFunc(maps.Keys(s.changed), func(a, b string) int {
		return compareBool(s.Ledger.Lease(a) != nil, s.Ledger.Lease(b) != nil)
	})
	for _, key := range set.Changed {
		set.All = set.All || !s.judge(key)
	}
	if set.All {
		s.judgeAll()
	}
	set.Leases = s.arbiter.Accepted()
	s.all, s.news = false, false
	clear(s.changed)
	s.logHeld(ctx)
	return set, news
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// judge looks at one lease, and reports whether that was enough.
func (s *Syncer) judge(key string) bool {
	c := subnet.Claimant{Lease: &subnet.Lease{Key: key}}
	delete(s.unusable, key)
	if l := s.Ledger.Lease(key); l != nil {
		if ids, why := s.check(*l); why != "" {
			s.unusable[key] = why
		} else {
			c = subnet.Claimant{Lease: l, Identities: ids}
		}
	}
	return s.arbiter.Change(c)
}

func (s *Syncer) judgeAll() {
	n := s.Ledger.Len()
	all := make([]subnet.Claimant, 0, n)
	for l := range s.Ledger.Leases() {
		all = append(all, subnet.Claimant{Lease: l})
	}
	why := make([]string, n)
	parallel.For(n, func(i int) { all[i].Identities, why[i] = s.check(*all[i].Lease) })
	s.unusable = map[string]string{}
	usable := all[:0]
	for i, c := range all {
		if why[i] != "" {
			s.unusable[c.Lease.Key] = why[i]
		} else {
			usable = append(usable, c)
		}
	}
	s.arbiter.Reset(usable)
}

// check looks at a lease by itself, and says why it cannot be used, if so.
func (s *Syncer) check(l subnet.Lease) (identities []string, unusable string) {
	if l.BackendType != s.Own.BackendType {
		return nil, fmt.Sprintf("its backend type is %q, ours %q", l.BackendType, s.Own.BackendType)
	}
	identities, err := s.Network.Check(l)
	if err != nil {
		return nil, err.Error()
	}
	return identities, ""
}

// logHeld logs when the ledger holds more peers than before, and when it holds none any more.
// In a store that was emptied peers come back one by one, which is not worth a line each.
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

// logRefused logs refusals that are new or have another reason, and those
// that have ended. Only what may have changed is looked at. A pass that failed may
// not have come to all peers: what it does not say of one is as it was.
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

// logShared logs once when leases come to share a public address, and once when no
// two have it any more. All of them are served, but one of them may be a leftover.
func (s *Syncer) logShared(ctx context.Context) {
	log := klog.FromContext(ctx)
	for _, shared := range s.arbiter.SharingNews() {
		if len(shared.Keys) == 0 {
			log.Info("leases no longer share a public address", "publicIP", shared.PublicIP)
			continue
		}
		log.Error(nil, "leases share a public address", "publicIP", shared.PublicIP, "leases", shared.Keys[:2], "count", len(shared.Keys))
	}
}

// reason is why a lease is not served, or not in all families.
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
