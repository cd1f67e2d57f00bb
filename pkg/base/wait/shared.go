// SPDX-License-Identifier: Apache-2.0

package wait

import "sync"

// Shared lets several goroutines share one subscription to changes. The subscription begins when the
// first goroutine joins, and ends when the last one leaves. The zero Shared is usable.
type Shared struct {
	mu        sync.Mutex
	listeners map[Signal]bool
	stop      func() // ends the subscription; nil if there is none
}

// Join returns a signal that is sent after each change, until Leave. If there is no subscription, Join
// begins one by start, and first is set. The subscription calls wake after each change, but start itself
// must not call wake. stop ends the subscription, and must wait until calls of wake have returned. If
// start fails, Join returns the error.
func (s *Shared) Join(start func(wake func()) (stop func(), err error)) (changed Signal, first bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	first = s.stop == nil
	if first {
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

// Leave makes Shared send no more signals to changed, which Join has returned. When all goroutines have
// left, the subscription has ended.
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
