// SPDX-License-Identifier: Apache-2.0

package wait

import "sync"

// Broadcast wakes all goroutines that wait for it, while a Signal wakes one. It is safe for concurrent use,
// and the zero Broadcast is usable.
type Broadcast struct {
	mu      sync.Mutex
	changed chan struct{} // closed at the next Send; nil until Changed is called after a Send
}

// Changed returns a channel that is closed at the next Send. To miss no change, a goroutine gets the channel
// before it reads the state, or while it holds the lock under which the state is changed and Send is called.
func (b *Broadcast) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.changed
}

// Send closes the channel that Changed has returned since the last Send. It never blocks.
func (b *Broadcast) Send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}
