// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"sync"
	"testing"
)

// TestBroadcast expects that one Send wakes all goroutines that wait, and none that asks after it.
func TestBroadcast(t *testing.T) {
	var b Broadcast
	b.Send() // while no goroutine waits
	one, two := b.Changed(), b.Changed()
	for _, c := range []<-chan struct{}{one, two} {
		if closed(c) {
			t.Error("a channel is closed before the next Send")
		}
	}
	b.Send()
	if !closed(one) || !closed(two) {
		t.Error("Send did not wake all that wait")
	}
	if closed(b.Changed()) {
		t.Error("a goroutine that asks after Send is woken, want that it waits for the next one")
	}
	b.Send()
	b.Send()
}

// TestBroadcastMissesNoChange expects that each goroutine that gets the channel before it reads the state
// sees the last change.
func TestBroadcastMissesNoChange(t *testing.T) {
	const changes = 1000
	var b Broadcast
	var mu sync.Mutex
	state := 0
	read := func() int {
		mu.Lock()
		defer mu.Unlock()
		return state
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for changed := b.Changed(); read() < changes; changed = b.Changed() {
				<-changed
			}
		})
	}
	for range changes {
		mu.Lock()
		state++
		mu.Unlock()
		b.Send()
	}
	group.Wait()
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
