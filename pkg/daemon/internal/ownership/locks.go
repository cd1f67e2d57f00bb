// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/statefile"
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
func NewLocks(dir string) *Locks { return &Locks{dir: dir, taken: map[string]io.Closer{}} }

// Take takes the locks of the named devices that l does not have already. It returns ErrInUse, wrapped, if another
// network or daemon has one of them, and keeps those that it has taken. If a lock file cannot be used, Take
// continues without that lock.
func (l *Locks) Take(names ...string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range names {
		if _, taken := l.taken[name]; taken {
			continue
		}

		lock, err := statefile.Lock(l.dir, "device-"+name)
		if errors.Is(err, ErrInUse) {
			return fmt.Errorf("another flanneld has device %s: %w", name, err)
		}
		if err == nil { // opening the state file fails in the same way, which is logged
			l.taken[name] = lock
		}
	}
	return nil
}

// Keep releases all locks except for those of the named devices.
func (l *Locks) Keep(names ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, lock := range l.taken {
		if !slices.Contains(names, name) {
			_ = lock.Close()
			delete(l.taken, name)
		}
	}
}
