// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// ErrInUse means that another network or daemon has the lock of a device.
var ErrInUse = statefile.ErrInUse

// Locks are the device locks of one network. They prevent two networks on a host, of one
// daemon or of two, from using the same device. The lock files are in the state directory,
// which the daemons must share. Without a state directory there are no locks.
type Locks struct {
	dir string // state directory

	mu    sync.Mutex
	taken map[string]io.Closer
}

// NewLocks returns locks in the state directory dir, none of them taken.
func NewLocks(dir string) *Locks { return &Locks{dir: dir} }

// Take takes the lock of the named device, if l does not have it already. It returns
// ErrInUse, wrapped, if another network or daemon has the lock. If the lock file cannot be
// used, Take returns nil without a lock.
func (l *Locks) Take(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, taken := l.taken[name]; taken {
		return nil
	}

	lock, err := statefile.Lock(l.dir, "device-"+name)
	if errors.Is(err, ErrInUse) {
		return fmt.Errorf("another flanneld has device %s: %w", name, err)
	}
	if err != nil { // opening the state file fails in the same way, which is logged
		return nil
	}
	if l.taken == nil {
		l.taken = map[string]io.Closer{}
	}
	l.taken[name] = lock
	return nil
}

// Release releases the lock of the named device, if l has it.
func (l *Locks) Release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lock, taken := l.taken[name]; taken {
		_ = lock.Close()
		delete(l.taken, name)
	}
}

// TakeAll takes the locks of all devices in scope s. If it fails, it keeps those that it has taken.
func (l *Locks) TakeAll(s dataplane.Scope) error {
	for _, name := range s.Devices {
		if err := l.Take(name); err != nil {
			return err
		}
	}
	return nil
}

// ReleaseAll releases all locks.
func (l *Locks) ReleaseAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lock := range l.taken {
		_ = lock.Close()
	}
	l.taken = nil
}
