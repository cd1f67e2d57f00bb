// SPDX-License-Identifier: Apache-2.0

// Package statefile stores states of a daemon on disk: the last known state, from which the
// daemon continues after a restart or a reboot before any store has answered, and the state
// of the extension backend. Lock takes other locks in the same directory.
package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/google/renameio/v2"
)

// version is the version of the file format. Load refuses a file of another version.
const version = 1

// ErrInUse means that another process has taken the lock, or that this process has taken
// it before.
var ErrInUse = errors.New("in use by another process")

// File is a state file. It cannot be opened again until Close, by this or another
// process. It is not safe for concurrent use.
type File[T any] struct {
	path  string
	lock  *os.File
	saved os.FileInfo // the file after the last Save; nil before the first
}

type envelope[T any] struct {
	Version int `json:"version"`
	State   T   `json:"state"`
}

// Open creates dir with mode 0700 if it does not exist, and locks the state file called
// name in it. It returns ErrInUse, wrapped, if the file is open, in this or another
// process.
func Open[T any](dir, name string) (*File[T], error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create state directory: %w", err)
	}
	path := filepath.Join(dir, name+".json")
	lock, err := takeLock(dir, name)
	if err != nil {
		return nil, fmt.Errorf("state file %s: %w", path, err)
	}
	return &File[T]{path: path, lock: lock}, nil
}

// Lock creates dir with mode 0700 if it does not exist, and takes the lock called name in
// it. The lock lasts until Close or the end of the process. Lock returns ErrInUse, wrapped,
// if another process has taken it, or this process has taken it before.
func Lock(dir, name string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create state directory: %w", err)
	}
	lock, err := takeLock(dir, name)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", filepath.Join(dir, name+lockSuffix), err)
	}
	return fileLock{lock}, nil
}

// fileLock is a lock whose file is removed with it.
type fileLock struct{ *os.File }

// Close implements io.Closer.
func (l fileLock) Close() error {
	_ = os.Remove(l.Name()) // still locked, see takeLock
	return l.File.Close()
}

const lockSuffix = ".lock"

func takeLock(dir, name string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, name+lockSuffix), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrInUse
		}
		return nil, err
	}

	// Between open and flock, the holder may have removed the file:
	//   A has the lock; B opens the file; A removes the file and closes it; B locks a file that no C finds
	// So the lock counts only if the path still leads to the file.
	opened, err := lock.Stat()
	if err != nil {
		_ = lock.Close()
		return nil, err
	}
	if now, err := os.Lstat(lock.Name()); err != nil || !os.SameFile(opened, now) {
		_ = lock.Close()
		return takeLock(dir, name)
	}
	return lock, nil
}

// Read returns the state in the file called name in dir, without taking its lock. If
// there is no file, the state is zero and there is no error.
func Read[T any](dir, name string) (T, error) {
	last, _, err := (&File[T]{path: filepath.Join(dir, name+".json")}).Load()
	return last, err
}

// Load returns the last saved state. ok is false if there is no state, or none that this
// version can read. err gives the reason, and is nil if there is no file.
func (f *File[T]) Load() (last T, ok bool, err error) {
	var none T
	raw, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, false, nil
	}
	if err != nil {
		return none, false, fmt.Errorf("read state: %w", err)
	}
	var e envelope[T]
	if err := json.Unmarshal(raw, &e); err != nil {
		return none, false, fmt.Errorf("state file %s is damaged: %w", f.path, err)
	}
	if e.Version != version {
		return none, false, fmt.Errorf("state file %s has version %d, want %d", f.path, e.Version, version)
	}
	return e.State, true, nil
}

// Save replaces the file atomically: after a crash it contains either the old or the new
// state.
func (f *File[T]) Save(s T) error {
	raw, err := json.Marshal(envelope[T]{version, s})
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	if err := renameio.WriteFile(f.path, raw, 0o600, renameio.WithTempDir(filepath.Dir(f.path)), renameio.IgnoreUmask()); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	f.saved, _ = os.Lstat(f.path)
	return nil
}

// Intact reports whether the file is still the one that the last Save wrote: not removed,
// replaced or changed by another program. It returns false before the first Save and
// after Remove.
func (f *File[T]) Intact() bool {
	now, err := os.Lstat(f.path)
	return err == nil && f.saved != nil && os.SameFile(now, f.saved) && now.Size() == f.saved.Size() && now.ModTime().Equal(f.saved.ModTime())
}

// Remove deletes the file, if there is one. A later Save writes it again.
func (f *File[T]) Remove() error {
	f.saved = nil
	if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove state: %w", err)
	}
	return nil
}

// Close releases the lock, so that another process can open the file. If there is no state, it also removes
// the file of the lock.
func (f *File[T]) Close() error {
	if _, err := os.Lstat(f.path); errors.Is(err, fs.ErrNotExist) {
		return fileLock{f.lock}.Close()
	}
	return f.lock.Close()
}
