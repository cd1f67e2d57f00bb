// SPDX-License-Identifier: Apache-2.0

package linux

import "sync"

// Buffers are receive buffers for sockets. Several Kernels can share them, because a socket needs
// its buffer only while it receives. The zero Buffers is usable.
type Buffers struct{ unused sync.Pool }

const bufferLength = 64 << 10 // in bytes, longer than any datagram of the kernel

// get returns a buffer. The caller must give it back with put.
func (b *Buffers) get() *[]byte {
	if buf, ok := b.unused.Get().(*[]byte); ok {
		return buf
	}
	buf := make([]byte, bufferLength)
	return &buf
}

func (b *Buffers) put(buf *[]byte) { b.unused.Put(buf) }
