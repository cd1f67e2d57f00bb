// SPDX-License-Identifier: Apache-2.0

package wait

import "sync"

// Shared is one subscription to changes that several goroutines share. It begins with the first of
// them and ends with the last one. The zero Shared is usable.
type Shared struct {
	mu        sync.Mutex
	listeners map[Signal]bool
	stop      func() // ends the subscription; nil if there is none
}

// Join returns a signal that is sent after each change, until Leave. If there is no subscription
// yet, start begins it, and first is set. start must not call wake itself. The stop that it returns
// must wait for the end of calls of wake.
func (s *Shared) Join(start func(wake func()) (stop func(), err error)) (changed Signal, first bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if first = s.stop == nil; first {
		if s.stop, err = start(s.wake); err != nil {
			return nil, first, err
		}
		s.listeners = map[Signal]bool{}
	}
	changed = NewSignal()
	s.listeners[changed] = true
	return changed, first, nil
}

func (s *Shared) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.listeners {
		l.Send()
	}
}

// Leave ends what Join began.
func (s *Shared) Leave(changed Signal) {
	s.mu.Lock()
	delete(s.listeners, changed)
	var stop func()
	if len(s.listeners) == 0 {
		stop, s.stop = s.stop, nil
	}
	s.mu.Unlock()
	if stop != nil {
		stop() // without the lock, because it waits for wake
	}
}
