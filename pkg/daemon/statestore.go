// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/wait"
)

// The state file helps the next start; it is not a journal. After a write in the
// background there is a pause, which is long enough that writing takes a small part of
// the time for any size of the file. A disk that once hangs makes the pause at most a
// minute.
const (
	savePause    = 2 * time.Second
	savePauseMax = time.Minute
	saveShare    = 500
)

// stateStore keeps the last known state in memory and on disk.
type stateStore struct {
	file    *state.File[lastKnown] // nil if there is no file
	loop    *loop.Loop
	failing bool
	wrote   bool // the state was written in the background

	mu      sync.Mutex
	now     lastKnown
	known   bool // now was set
	changed bool // changed since it was written
	writing sync.Mutex
}

func newStateStore(file *state.File[lastKnown]) *stateStore {
	s := &stateStore{file: file}
	s.loop = loop.New(time.Hour, s.step)
	return s
}

// set replaces the state and writes it before other parts depend on it.
func (s *stateStore) set(now lastKnown) {
	s.mu.Lock()
	s.now, s.known, s.changed = now, true, true
	s.mu.Unlock()
	if _, err := s.flush(); err != nil {
		s.loop.Wake() // the loop tries again and reports the failure
	}
}

// get returns the state. ok is false if it was not set yet.
func (s *stateStore) get() (now lastKnown, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, s.known
}

// update changes the state, if it was set, and lets the loop write it soon. Data that the
// state refers to must not change any more.
func (s *stateStore) update(change func(now *lastKnown)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known {
		change(&s.now)
		s.changed = true
		s.loop.Wake()
	}
}

// check makes the loop write the file again if another program has removed or altered it.
func (s *stateStore) check() { s.loop.Wake() }

func (s *stateStore) run(ctx context.Context) error { return s.loop.Run(ctx) }

func (s *stateStore) step(ctx context.Context) error {
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

// pause returns the time to wait after a write that took took. The first write happens
// during a start. The missing parts follow soon after it, because the start needs them.
func (s *stateStore) pause(took time.Duration) time.Duration {
	if !s.wrote {
		s.wrote = true
		return savePause
	}
	return min(max(savePause, saveShare*took), savePauseMax)
}

// written reports whether the file is up to date.
func (s *stateStore) written() bool {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.changed || s.file == nil
}

// flush writes the state if it has changed or the file does not contain it any more.
func (s *stateStore) flush() (wrote bool, err error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.file == nil {
		return false, nil
	}
	intact := s.file.Intact()
	s.mu.Lock()
	now, due := s.now, s.changed || s.known && !intact
	s.changed = false
	s.mu.Unlock()
	if !due {
		return false, nil
	}
	if now.peers != nil {
		now.Peers = now.peers()
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

// close writes what has changed and closes the file. It also writes a changed revision of the
// store, so that the next start reads fewer changes from the store. The revision alone causes
// no earlier write, because it changes all the time.
func (s *stateStore) close() {
	s.mu.Lock()
	s.changed = s.changed || s.now.peers != nil
	s.mu.Unlock()
	_, _ = s.flush()
	if s.file != nil {
		_ = s.file.Close()
	}
}

// openState opens the state file of this daemon and returns its content, which is zero at the
// first start. If the disk fails, the state is only kept in memory. openState returns an error if
// another daemon uses the same files.
func openState(ctx context.Context, o options.Options) (*stateStore, lastKnown, error) {
	log := klog.FromContext(ctx)
	file, err := state.Open[lastKnown](o.StateDir, o.StateName())
	if errors.Is(err, state.ErrInUse) {
		return nil, lastKnown{}, fmt.Errorf("another flanneld runs with subnet file %s: %w", o.SubnetFile, err)
	}
	if err != nil {
		log.Error(err, "going on without a state directory: a restart will depend on the store")
		return newStateStore(nil), lastKnown{}, nil
	}
	last, _, err := file.Load()
	if err != nil {
		log.Error(err, "going on without the last known state")
	}
	for i := range last.Peers.Peers { // the decoder allocates room for four
		l := &last.Peers.Peers[i].Lease
		l.Endpoints = slices.Clone(l.Endpoints)
	}
	return newStateStore(file), last, nil
}

// remove deletes the file, and the state in memory.
func (s *stateStore) remove() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	s.now, s.known, s.changed = lastKnown{}, false, false
	s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	return s.file.Remove()
}

// leaseEnd returns when the own lease ends. It is zero if there is no lease yet, and for a lease
// that never ends.
func (s *stateStore) leaseEnd() time.Time {
	now, _ := s.get()
	return now.Own.Expires
}
