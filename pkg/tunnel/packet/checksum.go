package packet

import (
	"encoding/binary"
	"math/bits"
)

// sum adds the 16-bit words of b to the one's complement sum partial, in
// little-endian order: RFC 1071 lets the order be put right at the end. An odd
// last byte counts as if a zero followed, so only the last part of what is
// summed may be odd.
func sum(b []byte, partial uint64) uint64 {
	// One chain of additions waits for the carry of each. The processor has room for two.
	s, t := partial, uint64(0)
	for ; len(b) >= 128; b = b[128:] {
		s, t = addBlock(s, (*[64]byte)(b)), addBlock(t, (*[64]byte)(b[64:]))
	}
	if len(b) >= 64 {
		s, b = addBlock(s, (*[64]byte)(b)), b[64:]
	}
	s, carry := bits.Add64(s, t, 0)
	for ; len(b) >= 8; b = b[8:] {
		s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b), carry)
	}
	var rest [8]byte
	copy(rest[:], b)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(rest[:]), carry)
	s, carry = bits.Add64(s, 0, carry)
	return s + carry
}

// addBlock adds the words of b to s.
func addBlock(s uint64, b *[64]byte) uint64 {
	s, carry := bits.Add64(s, binary.LittleEndian.Uint64(b[0:]), 0)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[8:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[16:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[24:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[32:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[40:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[48:]), carry)
	s, carry = bits.Add64(s, binary.LittleEndian.Uint64(b[56:]), carry)
	s, carry = bits.Add64(s, 0, carry)
	return s + carry
}

// fold returns what sum came to, as a number to be written in network order.
func fold(s uint64) uint16 {
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return bits.ReverseBytes16(uint16(s))
}

// swap is a 16-bit word as sum sees it.
func swap(v uint16) uint64 { return uint64(bits.ReverseBytes16(v)) }

// nonzero is the checksum of a datagram: zero would mean that it has none.
func nonzero(c uint16) uint16 {
	if c == 0 {
		return 0xffff
	}
	return c
}
