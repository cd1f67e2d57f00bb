package app

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"flanneld/pkg/loop"
	"flanneld/pkg/state"
	"flanneld/pkg/subnetfile"
)

// fileCheck is how often the subnet file is compared with what it should be.
const fileCheck = 30 * time.Second

// fileKeeper writes the subnet file, and again when it was lost or altered.
type fileKeeper struct {
	path    string
	file    subnetfile.File
	report  func(error)
	failing bool
}

func (k *fileKeeper) run(ctx context.Context) {
	_ = loop.New(fileCheck, k.step).Run(ctx)
}

func (k *fileKeeper) step(ctx context.Context) error {
	log := klog.FromContext(ctx)
	if subnetfile.UpToDate(k.path, k.file) {
		k.failing = false
		k.report(nil)
		return nil
	}
	err := subnetfile.Write(k.path, k.file)
	switch {
	case err == nil:
		log.Info("Wrote subnet file to "+k.path, "mtu", k.file.MTU)
	case !k.failing:
		log.Error(err, "no subnet file, trying again")
	}
	k.failing = err != nil
	k.report(err)
	return err
}

// savePause is the least time between two writes of the state file in the
// background: it is a help for the next start, not a journal.
const savePause = 2 * time.Second

// saver writes the state file. A nil saver does nothing.
type saver struct {
	file    *state.File[lastKnown]
	loop    *loop.Loop
	failing bool

	mu      sync.Mutex
	pending *lastKnown // newer than the file; nil if nothing is
	writing sync.Mutex // held over a write
}

func newSaver(file *state.File[lastKnown]) *saver {
	s := &saver{file: file}
	s.loop = loop.New(time.Hour, s.step)
	return s
}

// save has the state written before long; what it refers to must not change
// any more.
func (s *saver) save(now lastKnown) {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.pending = &now
	s.mu.Unlock()
	s.loop.Wake()
}

func (s *saver) run(ctx context.Context) error { return s.loop.Run(ctx) }

func (s *saver) step(ctx context.Context) error {
	wrote, err := s.flush()
	if err != nil && !s.failing {
		klog.FromContext(ctx).Error(err, "the last known state is not kept, trying again")
	}
	s.failing = err != nil
	if wrote {
		select {
		case <-ctx.Done():
		case <-time.After(savePause):
		}
	}
	return err
}

// flush writes what is pending now.
func (s *saver) flush() (wrote bool, err error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	pending := s.pending
	s.pending = nil
	s.mu.Unlock()
	if pending == nil {
		return false, nil
	}
	if err := s.file.Save(*pending); err != nil {
		s.mu.Lock()
		if s.pending == nil {
			s.pending = pending
		}
		s.mu.Unlock()
		return false, err
	}
	return true, nil
}

// saveNow writes the state before anybody depends on it.
func (s *saver) saveNow(now lastKnown) {
	if s == nil {
		return
	}
	s.save(now)
	_, _ = s.flush() // the loop tries again, and reports
}

// close writes what is pending and lets the file go.
func (s *saver) close() {
	if s == nil {
		return
	}
	_, _ = s.flush()
	_ = s.file.Close()
}
