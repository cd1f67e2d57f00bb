// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"testing"
	"time"
)

// FuzzDestination expects no panic, and an address of the family of the packet.
func FuzzDestination(f *testing.F) {
	for _, n := range []int{0, 1, 19, 20, 39, 40} {
		for _, version := range []byte{0x45, 0x60} {
			b := make([]byte, n)
			if n > 0 {
				b[0] = version
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, ok := destination(b); ok != a.IsValid() || ok && a.Is4() != (b[0]>>4 == 4) {
			t.Errorf("%x: %v, %v", b, a, ok)
		}
	})
}

// TestListenFor expects a shorter sample of a faster device, because a sample slows down each packet.
func TestListenFor(t *testing.T) {
	for n, want := range map[uint32]time.Duration{
		0: 2 * time.Second, 1: 2 * time.Second, 20: 2 * time.Second, // 1,000 packets in a second
		40: time.Second, 400: 100 * time.Millisecond, 1 << 31: 100 * time.Millisecond,
	} {
		if got := listenFor(n, 2*time.Second); got != want {
			t.Errorf("%d packets within %s: listen for %s, want %s", n, countFor, got, want)
		}
	}
}
