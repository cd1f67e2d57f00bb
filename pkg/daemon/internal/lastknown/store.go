// SPDX-License-Identifier: Apache-2.0

package lastknown

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/options"
)

// The state file helps the next start; it is not a journal. So the store pauses after each
// write in the background, for saveShare times the duration of the write, and at least
// savePause. Then writing takes at most a five hundredth of the time for any size of the
// file. savePauseMax limits the pause after a write for which the disk has hung, and
// firstPause is the one after the first write.
const (
	firstPause   = 2 * time.Second
	savePause    = 200 * time.Millisecond
	savePauseMax = time.Minute
	saveShare    = 500
)

// Store keeps the last known state in memory and on disk.
type Store struct {
	file    *statefile.File[State] // nil if there is no file
	loop    *loop.Loop
	failing bool
	wrote   bool // there was a write in the background

	mu      sync.Mutex
	now     State
	known   bool // now was set
	changed bool // now has changed since it was written
	writing sync.Mutex
}

// NewStore returns a Store that writes to file, which may be nil.
func NewStore(file *statefile.File[State]) *Store {
	s := &Store{file: file}
	s.loop = loop.New(time.Hour, s.step)
	return s
}

// Change changes the state. It writes the state before it returns, because the caller depends on the
// file from then on. It returns the changed state. If the write fails, the loop repeats it. Before the first Change
// the state is zero.
func (s *Store) Change(change func(now *State)) State {
	s.mu.Lock()
	change(&s.now)
	s.known = true
	s.changed = true
	now := s.now
	s.mu.Unlock()
	if _, err := s.flush(); err != nil {
		s.loop.Wake() // the loop tries again and reports the failure
	}
	return now
}

// Get returns the state. ok is false if it was not set yet.
func (s *Store) Get() (now State, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, s.known
}

// Update changes the state, if it was set, and lets the loop write it soon. change must replace
// slices and other data to which the state points, and not modify them, because other
// goroutines may read them.
func (s *Store) Update(change func(now *State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known {
		change(&s.now)
		s.changed = true
		s.loop.Wake()
	}
}

// Check makes the loop write the file again if another program has removed or altered it.
func (s *Store) Check() { s.loop.Wake() }

// Run writes changes until ctx ends.
func (s *Store) Run(ctx context.Context) error { return s.loop.Run(ctx) }

func (s *Store) step(ctx context.Context) error {
	start := time.Now()
	wrote, err := s.flush()
	if err != nil && !s.failing {
		klog.FromContext(ctx).Error(err, "cannot write the last known state, trying again")
	}
	s.failing = err != nil
	if wrote {
		_ = wait.For(ctx, s.pause(time.Since(start))) // the loop notices the end of ctx
	}
	return err
}

// pause returns the time to wait after a write whose duration is took. The first write
// happens during a start, when parts of the state are missing. The pause after it is short,
// because the next start needs these parts.
func (s *Store) pause(took time.Duration) time.Duration {
	if !s.wrote {
		s.wrote = true
		return firstPause
	}
	return min(max(savePause, saveShare*took), savePauseMax)
}

// Written reports whether the file is up to date, or there is none.
func (s *Store) Written() bool {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.changed || s.file == nil
}

// flush writes the state if it has changed or the file does not contain it any more.
func (s *Store) flush() (wrote bool, err error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.file == nil {
		return false, nil
	}

	intact := s.file.Intact()
	s.mu.Lock()
	now := s.now
	due := s.changed || s.known && !intact
	s.changed = false
	s.mu.Unlock()
	if !due {
		return false, nil
	}
	if now.Fresh != nil {
		now.Peers = now.Fresh()
	}

	now.Saved = time.Now()
	if err := s.file.Save(now); err != nil {
		s.mu.Lock()
		s.changed = true
		s.mu.Unlock()
		return false, err
	}
	return true, nil
}

// Close writes what has changed and closes the file. It also writes a changed revision of the
// store, so that the next start reads fewer changes from the store. The revision alone causes
// no earlier write, because it changes all the time.
func (s *Store) Close() {
	s.mu.Lock()
	s.changed = s.changed || s.now.Fresh != nil
	s.mu.Unlock()
	_, _ = s.flush()
	if s.file != nil {
		_ = s.file.Close()
	}
}

// Open opens the state file of the network with options o, and returns its content. The content
// is zero at the first start, and if the file cannot be read. If the disk fails, the state is
// only kept in memory. Open logs these failures. It returns statefile.ErrInUse, wrapped, if another
// process still uses the state file after wait.InUseLimit.
func Open(ctx context.Context, o options.Options) (*Store, State, error) {
	log := klog.FromContext(ctx)
	var file *statefile.File[State]
	var err error
	wait.WhileInUse(ctx, func() bool {
		file, err = statefile.Open[State](o.StateDir, o.StateName())
		return errors.Is(err, statefile.ErrInUse)
	})
	if errors.Is(err, statefile.ErrInUse) {
		return nil, State{}, fmt.Errorf("another flanneld runs with subnet file %s: %w", o.SubnetFile, err)
	}
	if err != nil {
		log.Error(err, "going on without a state directory: a restart will depend on the store")
		return NewStore(nil), State{}, nil
	}
	last, _, err := file.Load()
	if err != nil {
		log.Error(err, "going on without the last known state")
	}

	for i := range last.Peers.Peers { // the decoder allocates room for four endpoints, and most leases have fewer
		l := &last.Peers.Peers[i].Lease
		l.Endpoints = slices.Clone(l.Endpoints)
	}
	return NewStore(file), last, nil
}

// Remove deletes the file, and the state in memory.
func (s *Store) Remove() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	s.now = State{}
	s.known = false
	s.changed = false
	s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	return s.file.Remove()
}

// LeaseEnd returns the time at which this host's lease ends. The time is zero if there is no lease yet, and for a lease
// that never ends.
func (s *Store) LeaseEnd() time.Time {
	now, _ := s.Get()
	return now.Own.Expires
}
