// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/subnet"
)

// fileCheck is the interval at which the subnet file is compared with its wanted content.
const fileCheck = 30 * time.Second

// errStale is the state until the subnet file of a new session is written.
var errStale = errors.New("the file is not written yet")

// fileKeeper writes the subnet file, and writes it again if it was lost or altered.
type fileKeeper struct {
	path    string
	file    subnetfile.File
	report  func(error)
	failing bool
}

// expect reports the component as not ready if the file must be written.
func (k *fileKeeper) expect() {
	if !subnetfile.UpToDate(k.path, k.file) {
		k.report(errStale)
	}
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

// The state file helps the next start; it is not a journal. After a write in the
// background there is a pause, which is long enough that writing takes a small part of
// the time for any size of the file. A disk that once hangs makes the pause at most a
// minute.
const (
	savePause    = 2 * time.Second
	savePauseMax = time.Minute
	saveShare    = 500
)

// record keeps the last known state in memory and on disk.
type record struct {
	file    *state.File[lastKnown] // nil if there is no file
	loop    *loop.Loop
	failing bool
	wrote   bool // the record was written in the background

	mu      sync.Mutex
	now     lastKnown
	known   bool // now was set
	changed bool // changed since it was written
	writing sync.Mutex
}

func newRecord(file *state.File[lastKnown]) *record {
	r := &record{file: file}
	r.loop = loop.New(time.Hour, r.step)
	return r
}

// set replaces the state and writes it before other parts depend on it.
func (r *record) set(now lastKnown) {
	r.mu.Lock()
	r.now, r.known, r.changed = now, true, true
	r.mu.Unlock()
	if _, err := r.flush(); err != nil {
		r.loop.Wake() // the loop tries again and reports the failure
	}
}

// get returns the state. ok is false if it was not set yet.
func (r *record) get() (now lastKnown, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now, r.known
}

// update changes the state, if it was set, and lets the loop write it soon. Data that the
// state refers to must not change any more.
func (r *record) update(change func(now *lastKnown)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known {
		change(&r.now)
		r.changed = true
		r.loop.Wake()
	}
}

// check makes the loop write the file again if another program has removed or altered it.
func (r *record) check() { r.loop.Wake() }

func (r *record) run(ctx context.Context) error { return r.loop.Run(ctx) }

func (r *record) step(ctx context.Context) error {
	start := time.Now()
	wrote, err := r.flush()
	if err != nil && !r.failing {
		klog.FromContext(ctx).Error(err, "cannot write the last known state, trying again")
	}
	r.failing = err != nil
	if wrote {
		select {
		case <-ctx.Done():
		case <-time.After(r.pause(time.Since(start))):
		}
	}
	return err
}

// pause returns the time to wait after a write that took took. The first write happens
// during a start. The missing parts follow soon after it, because the start needs them.
func (r *record) pause(took time.Duration) time.Duration {
	if !r.wrote {
		r.wrote = true
		return savePause
	}
	return min(max(savePause, saveShare*took), savePauseMax)
}

// written reports whether the file is up to date.
func (r *record) written() bool {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.changed || r.file == nil
}

// flush writes the state if it has changed or the file does not contain it any more.
func (r *record) flush() (wrote bool, err error) {
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.file == nil {
		return false, nil
	}
	intact := r.file.Intact()
	r.mu.Lock()
	now, due := r.now, r.changed || r.known && !intact
	r.changed = false
	r.mu.Unlock()
	if !due {
		return false, nil
	}
	if now.peers != nil {
		now.Peers = now.peers()
	}
	now.Saved = time.Now()
	if err := r.file.Save(now); err != nil {
		r.mu.Lock()
		r.changed = true
		r.mu.Unlock()
		return false, err
	}
	return true, nil
}

// close writes what has changed and closes the file. The revision of the store alone, which
// changes all the time, is not worth a write before: with a recent one the next start needs
// fewer changes from the store.
func (r *record) close() {
	r.mu.Lock()
	r.changed = r.changed || r.now.peers != nil
	r.mu.Unlock()
	_, _ = r.flush()
	if r.file != nil {
		_ = r.file.Close()
	}
}

// renewed updates the own lease to what the store has. If its addresses have changed here and
// the store does not know it yet, the state keeps the new addresses: a renewal of the lease as
// it was must not bring the old ones back.
func (last *lastKnown) renewed(own subnet.Lease) {
	if last.Stored != nil {
		stored := own
		last.Stored = &stored
		own.Endpoints = last.Own.Endpoints
	}
	last.Own = own
}

// clockSlack is by how much the clock may have been set back since the state was written.
const clockSlack = time.Minute

// errExpired means that the lease of the last known state has run out.
var errExpired = fmt.Errorf("%w: the lease of the last known state has run out", subnet.ErrUnfit)

// usable returns nil if the own lease has not run out at the time now. A host without a
// real-time clock boots with a time that is long ago. If the clock is earlier than the time at
// which the state was written, it does not tell whether the lease has run out.
func (last *lastKnown) usable(now time.Time) error {
	switch {
	case last.Own.Permanent:
		return nil
	case now.Before(last.Saved.Add(-clockSlack)):
		return fmt.Errorf("the clock is wrong: it is at %s, and the state was written at %s", now.UTC().Format(time.RFC3339), last.Saved.UTC().Format(time.RFC3339))
	case now.After(last.Own.Expires):
		return errExpired
	}
	return nil
}
