// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"cmp"
	"encoding/binary"
	"math/bits"
)

// sum adds the 16-bit words of b to the one's complement sum partial, in little-endian order, which
// RFC 1071 allows to be corrected at the end. Only the last part of a sum may have an odd length.
func sum(b []byte, partial uint64) uint64 {
	s := partial
	carry := uint64(0)
	carries := uint64(0)
	for ; len(b) >= 64; b = b[64:] {
		w := (*[64]byte)(b)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[0:]), 0)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[8:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[16:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[24:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[32:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[40:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[48:]), carry)
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(w[56:]), carry)
		carries += carry // counted separately, so that the next block does not depend on this carry
	}

	s, carry = bits.Add64(s, carries, 0)
	for ; len(b) >= 8; b = b[8:] {
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b), carry)
	}

	var rest [8]byte
	copy(rest[:], b)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(rest[:]), carry)
	s, carry = bits.Add64(s, 0, carry)
	return s + carry
}

// fold reduces a sum to 16 bits, in network order. The checksum is the complement.
func fold(s uint64) uint16 {
	s = s&0xffffffff + s>>32
	s = s&0xffffffff + s>>32
	s = s&0xffff + s>>16
	s = s&0xffff + s>>16
	return bits.ReverseBytes16(uint16(s))
}

// swap converts a 16-bit number to the byte order of sum.
func swap(v uint16) uint64 { return uint64(bits.ReverseBytes16(v)) }

// nonzero returns the checksum of a datagram, in which zero means that there is none.
func nonzero(c uint16) uint16 { return cmp.Or(c, 0xffff) }
