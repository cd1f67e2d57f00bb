// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/base/parallel"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// SyncerConfig configures a Syncer. OnSync and OnRefused may be nil.
type SyncerConfig struct {
	Config  subnet.Config
	Own     subnet.Lease
	Network Network
	Sides   []Side         // of the backend. A network with two gets each lease with the data for both
	Ledger  *subnet.Ledger // owned by the Syncer
	Resync  time.Duration  // maximum time between two passes
	// Broadcasts returns the broadcast addresses of the networks to which this host belongs. It is called
	// before all leases are checked, and otherwise once in Resync. If it is nil, there are none.
	Broadcasts func() []netip.Addr
	// Migrated is set if hosts of the network may use another backend because of a migration.
	// Pass.OneBackend then tells when they have left it. If Migrated is not set, no lease is decoded
	// for Pass.OneBackend.
	Migrated bool
	// OnSync is called after every pass, except for a pass that the end of ctx interrupts.
	OnSync func(Pass)
	// OnRefused is called when a lease is refused for a new reason. key is the key of the
	// lease.
	OnRefused func(key, reason string)
}

// Pass is the result of a pass.
type Pass struct {
	Outcome
	Answered bool // the store has answered
	News     bool // Answered is set, and Peers may return another result than after the last pass
	Err      error
	// OneBackend is set if Answered is set and no known lease of a host has data for another
	// backend than that of this host. All hosts have then finished the migration, or have all gone
	// back to the former backend. OneBackend is only set if SyncerConfig.Migrated is.
	OneBackend bool
	Took       time.Duration // duration of the pass
}

// Syncer is the lease-watch loop. It turns the updates of a manager about other nodes into calls of
// Network.Sync. The cost of an update depends on the number of changes. The Syncer checks all
// leases only in its first pass, if leases contradict each other, if it gets a whole snapshot, or
// if the lease of a held peer expires.
type Syncer struct {
	SyncerConfig
	loop     *loop.Loop
	arbiter  *subnet.Arbiter
	unusable map[string]string // reasons why leases were not passed to the arbiter, by key; or reserved
	kernel   map[string]string // reasons why the network refused peers, by lease key
	err      error             // error of the last pass
	lastSync time.Time         // time of the last successful pass
	lastRead time.Time         // time of the last call of Broadcasts
	log      syncLog
	repairs  *loglimit.Repairs
	retry    wait.Backoff            // pauses before further passes for refusals whose cause may disappear
	choice   func(key string) Choice // see Outcome

	mu        sync.Mutex          // guards Ledger and the fields up to published
	changed   map[string]struct{} // keys of leases that have changed since the last pass
	all       bool                // the next pass must check all leases
	answered  bool                // a snapshot was applied
	news      bool                // see Pass
	published *subnet.Claim       // see Set

	moving map[string]struct{} // keys of the known leases because of which Pass.OneBackend is not set
}

// NewSyncer returns a Syncer. Until the first snapshot it serves the peers in the ledger
// and removes nothing.
func NewSyncer(c SyncerConfig) *Syncer {
	s := &Syncer{
		SyncerConfig: c, arbiter: subnet.NewArbiter(c.Config, claimantOf(c.Network, c.Own)), all: true, changed: map[string]struct{}{},
		unusable: map[string]string{}, kernel: map[string]string{}, log: newSyncLog(c.OnRefused), repairs: newRepairs(),
		moving: map[string]struct{}{},
	}
	s.loop = loop.New(c.Resync, s.step)
	return s
}

func claimantOf(n Network, own subnet.Lease) subnet.Claimant {
	c := subnet.Claimant{Lease: &own}
	c.Identities, _ = n.Check(own) // without identities no peer contradicts this host
	if s, ok := n.(NextChecker); ok {
		ids, _ := s.CheckNext(own)
		c.Identities = slices.Concat(c.Identities, ids)
	}
	return c
}

// Publish applies an update of a manager's Watch to the ledger, and wakes the loop. It does not
// wake the loop if only the revision of the store has changed.
func (s *Syncer) Publish(u subnet.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dropped, ok := s.Ledger.Follow(u, time.Now())
	if ok {
		for key := range u.Changed {
			s.changed[key] = struct{}{}
		}
		for _, key := range dropped {
			s.changed[key] = struct{}{}
		}
	} else {
		s.Ledger.Apply(u.Snapshot(), time.Now())
		s.answered = true
		s.all = true
	}

	if s.all || len(s.changed) > 0 { // otherwise only the revision of the store has changed
		s.news = true
		s.loop.Wake()
	}
}

// Published tells the network that the store now has the claim c.
func (s *Syncer) Published(c subnet.Claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.published = &c
	s.loop.Wake()
}

// Peers returns the known state of the other nodes, for storing it on disk.
func (s *Syncer) Peers() subnet.LedgerState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Ledger.State()
}

// Some returns a few peers: always the same ones, as long as the peers are the same.
func (s *Syncer) Some() []*subnet.Lease {
	const few = 32
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Ledger.First(few)
}

// Run runs the loop until ctx ends, and then returns nil.
func (s *Syncer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { forward(ctx, s.Network.Changed(), s.repairs, s.loop.Wake) })
	return s.loop.Run(ctx)
}

// step makes one pass. Its error only makes the loop run it again.
func (s *Syncer) step(ctx context.Context) error {
	begin := time.Now()
	set, pass := s.advance(ctx)
	outcome, err := s.Network.Sync(ctx, set)
	if ctx.Err() != nil {
		return nil // err may be about the end of ctx
	}

	s.repairs.Note(ctx, outcome.Repaired)
	s.log.refusals(ctx, s.mayDiffer(set, outcome.Refused, err != nil), s.reason)
	if set.Complete { // before that, the leases are those on disk, which the last process has logged
		s.log.shared(ctx, s.arbiter.Shared())
	}
	s.log.result(ctx, err)
	if outcome.Choice != nil {
		s.choice = outcome.Choice
		outcome.Again = least.Of(outcome.Again, s.log.choices.log(ctx, time.Now(), set.Leases, s.choice))
	}

	s.err = err
	if err == nil {
		s.lastSync = time.Now()
	}
	if s.OnSync != nil {
		pass.Err = err
		pass.OneBackend = s.Migrated && set.Complete && len(s.moving) == 0
		pass.Took = time.Since(begin)
		pass.Outcome = outcome
		s.OnSync(pass)
	}
	if err != nil {
		return err
	}
	return s.again(outcome)
}

// again returns loop.After if another pass is needed although this one had no error.
func (s *Syncer) again(o Outcome) error {
	after := o.Again
	if o.Recheck {
		s.mu.Lock()
		s.arbiter.SetOwn(claimantOf(s.Network, s.Own))
		s.all = true
		s.mu.Unlock()
		after = time.Nanosecond
	}

	// A peer may be refused forever, so refusals have a backoff of their own. The backoff of the loop
	// is for passes that fail.
	if !o.Retry {
		s.retry.Reset()
	} else {
		after = least.Of(after, s.retry.Next())
	}
	if after == 0 {
		return nil
	}
	return loop.After(after)
}

// advance passes the published changes to the arbiter. It returns the peers to serve, and what the
// pass knows before it begins.
func (s *Syncer) advance(ctx context.Context) (set Set, pass Pass) {
	s.mu.Lock()
	defer s.mu.Unlock()
	expired := s.Ledger.Expire(time.Now())
	set = Set{All: s.all || expired, Complete: s.answered, Unreadable: s.Ledger.HasUnreadable(), Published: s.published}
	pass = Pass{Answered: s.answered, News: s.news || expired}

	// The leases that are gone come first, so that leases in their place do not contradict them.
	var present []string
	for key := range s.changed {
		if s.Ledger.Lease(key) == nil {
			set.Changed = append(set.Changed, key)
		} else {
			present = append(present, key)
		}
	}
	set.Changed = append(set.Changed, present...)
	// To list the addresses of this host can take longer than the rest of a pass. They rarely change.
	if now := time.Now(); s.Broadcasts != nil && (set.All || now.Sub(s.lastRead) >= s.Resync) {
		s.arbiter.Broadcasts = s.Broadcasts()
		s.lastRead = now
	}

	for _, key := range set.Changed {
		set.All = set.All || !s.validate(key)
	}
	if set.All {
		s.validateAll()
	}

	set.Leases = s.arbiter.Accepted()
	set.Refused = s.refusedLeases
	s.all = false
	s.news = false
	s.published = nil
	clear(s.changed)
	s.log.held(ctx, s.Ledger.Held())
	return set, pass
}

// mayDiffer updates the refusals in kernel. It returns the keys of the leases that may be refused for
// another reason than at the last pass, or no longer.
func (s *Syncer) mayDiffer(set Set, byKernel []subnet.Refusal, failed bool) map[string]struct{} {
	keys := map[string]struct{}{}
	add := func(reasons map[string]string) {
		for key := range reasons {
			keys[key] = struct{}{}
		}
	}

	// A pass that failed may not have reached all peers. Those that it does not name keep their refusal.
	add(s.kernel)
	maps.DeleteFunc(s.kernel, func(key, _ string) bool { return !failed || set.Leases[key] == nil })
	for _, r := range byKernel {
		s.kernel[r.Key] = r.Reason
	}
	add(s.kernel)

	if set.All {
		add(s.log.refused)
		add(s.unusable)
		for _, r := range s.arbiter.AllRefused() {
			keys[r.Key] = struct{}{}
		}
	}
	for _, key := range set.Changed {
		keys[key] = struct{}{}
	}
	return keys
}

// reason says why a lease is not served in all families. It returns "" for one that is, and for a
// reservation, because no host waits for packets there.
func (s *Syncer) reason(key string) string {
	if s.unusable[key] == reserved {
		return ""
	}
	if why, ok := s.unusable[key]; ok {
		return why
	}
	reasons := s.arbiter.Refused(key)
	if why, ok := s.kernel[key]; ok {
		reasons = append(slices.Clone(reasons), why)
	}
	return strings.Join(reasons, "; ")
}

// validate passes the lease with the key, or its end, to the arbiter. It returns false if that is not
// sufficient, and all leases must be validated.
func (s *Syncer) validate(key string) bool {
	c := subnet.Claimant{Lease: &subnet.Lease{Key: key}}
	delete(s.unusable, key)
	delete(s.moving, key)
	if l := s.Ledger.Lease(key); l != nil {
		if usable := s.examine([]*subnet.Lease{l}); len(usable) > 0 {
			c = usable[0]
		}
	}
	return s.arbiter.Change(c)
}

func (s *Syncer) validateAll() {
	clear(s.unusable)
	clear(s.moving)
	s.arbiter.Reset(s.examine(slices.Collect(s.Ledger.Leases())))
}

// examine returns the usable ones of leases, and records why the others are not.
func (s *Syncer) examine(leases []*subnet.Lease) (usable []subnet.Claimant) {
	all := make([]subnet.Claimant, len(leases))
	why := make([]string, len(leases)) // by index, so that goroutines share nothing
	parallel.For(len(leases), func(i int) { all[i], why[i] = s.check(leases[i]) })

	usable = all[:0]
	for i, l := range leases {
		if s.Migrated {
			s.noteMoving(l)
		}
		if why[i] != "" {
			s.unusable[l.Key] = why[i]
		} else {
			usable = append(usable, s.backdate(all[i]))
		}
	}
	return usable
}

// backdate sets the times at which the lease of c claimed the identities that it keeps. A host that
// moves, or enables another family, writes its lease again, and must not lose an identity to a lease
// that claimed it in the meantime.
func (s *Syncer) backdate(c subnet.Claimant) subnet.Claimant {
	kept := s.arbiter.Kept(c)
	if kept == nil {
		return c
	}

	s.Ledger.Keep(c.Lease.Key, kept) // so that it is stored too
	lease := *c.Lease
	lease.Kept = kept
	c.Lease = &lease
	if c.Less != nil {
		less := *c.Less.Lease
		less.Kept = kept
		c.Less = &subnet.Claimant{Lease: &less, Identities: c.Less.Identities}
	}
	return c
}

// refusedLeases implements Set.Refused. A lease may occur more than once.
func (s *Syncer) refusedLeases() []*subnet.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := slices.Collect(maps.Keys(s.unusable))
	for _, r := range s.arbiter.AllRefused() {
		keys = append(keys, r.Key)
	}

	var leases []*subnet.Lease
	for _, key := range keys {
		if l := s.Ledger.Lease(key); l != nil {
			leases = append(leases, l)
		}
	}
	return leases
}

func (s *Syncer) noteMoving(l *subnet.Lease) {
	hasHost := slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool { return subnet.IsHost(e.PublicIP) })
	if !hasHost {
		return // a reservation: no daemon will ever rewrite it
	}
	if l.NextType != "" || l.BackendType != s.Own.BackendType || !s.Sides[0].matches(*l) {
		s.moving[l.Key] = struct{}{}
	}
}

// reserved is why a lease is unusable that only reserves a subnet. It is not a refusal.
const reserved = "reserved"

// check validates a lease without regard to others. It says why the lease is unusable, or "".
func (s *Syncer) check(l *subnet.Lease) (c subnet.Claimant, unusable string) {
	c.Lease = l
	used, ok := s.choose(l)
	if !ok && l.Reservation() {
		return c, reserved
	}
	if !ok {
		return c, fmt.Sprintf("its backend type is %q, ours %q", subnet.Shorten(l.BackendType), s.Config.BackendType)
	}

	c.Lease = used
	checked := *used
	if checked.Endpoints = s.enabled(used.Endpoints); len(checked.Endpoints) == 0 {
		return c, "" // the arbiter refuses it
	}

	identities, err := s.Network.Check(checked)
	if err != nil {
		return c, err.Error()
	}

	c.Identities = identities
	if n, ok := s.Network.(NextChecker); ok {
		if more, without := n.CheckNext(checked); len(more) > 0 {
			c.Less = &subnet.Claimant{Lease: without, Identities: identities}
			c.Identities = slices.Concat(identities, more)
		}
	}
	return c, ""
}

// choose returns l as the network uses it.
func (s *Syncer) choose(l *subnet.Lease) (used *subnet.Lease, ok bool) {
	if len(s.Sides) == 1 {
		return s.Sides[0].Of(l)
	}
	return l, slices.ContainsFunc(s.Sides, func(side Side) bool {
		_, ok := side.Of(l)
		return ok
	})
}

func (s *Syncer) enabled(es []subnet.Endpoint) []subnet.Endpoint {
	// The arbiter ignores disabled families, so their data must not make a lease unusable.
	disabled := func(e subnet.Endpoint) bool {
		_, ok := s.Config.Network(e.Family())
		return !ok
	}
	if !slices.ContainsFunc(es, disabled) {
		return es // without a copy for each of thousands of peers
	}
	return slices.DeleteFunc(slices.Clone(es), disabled)
}
