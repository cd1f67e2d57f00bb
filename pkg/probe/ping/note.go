// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"encoding/binary"
	"math"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Note is what an echo request can tell the host that receives it. An answer shows that packets pass in both
// directions. If there is none, notes show which direction fails.
type Note struct {
	Sender  netip.Addr    // first address of the sender's subnet; if zero, there is no note
	Silence time.Duration // for how long the sender has received nothing from the receiver
}

// The payload of a request with a note, in network byte order. Hosts read each other's notes, so a changed
// layout needs another noteMagic.
//
//	0      4        8                   24
//	| magic | Silence | Sender, as IPv6 |
//	          in ms
const (
	noteMagic = 0x666c6e31 // "fln1"
	noteSize  = 24
)

// put writes the note to the payload of a request, if that has room for it.
func (n Note) put(payload []byte) {
	if !n.Sender.IsValid() || len(payload) < noteSize {
		return
	}
	sender := n.Sender.As16()
	binary.BigEndian.PutUint32(payload, noteMagic)
	binary.BigEndian.PutUint32(payload[4:], uint32(min(max(n.Silence.Milliseconds(), 0), math.MaxUint32))) //nolint:gosec // it is in the range
	copy(payload[8:], sender[:])
}

// noteOf returns the note in the ICMP message b, which has no IP header. Any host can send one.
func (k icmpKind) noteOf(b []byte) (n Note, ok bool) {
	if len(b) < icmpHeader+noteSize || b[0] != k.request {
		return n, false
	}
	payload := b[icmpHeader:]
	if binary.BigEndian.Uint32(payload) != noteMagic {
		return n, false
	}
	return Note{
		Sender:  netip.AddrFrom16([16]byte(payload[8:])).Unmap(),
		Silence: time.Duration(binary.BigEndian.Uint32(payload[4:])) * time.Millisecond,
	}, true
}

// admitNotes makes a socket receive only those echo requests that have a note. Otherwise everyone who pings
// this host would wake the process.
func (k icmpKind) admitNotes(fd int) error {
	// A raw socket gets the packet with its IP header, whose length varies, but without that of IPv6: see
	// raw_rcv and ipv6_raw_deliver of Linux.
	header := unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH}
	if k.level == unix.IPPROTO_IPV6 {
		header = unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_W | unix.BPF_IMM}
	}

	program := []unix.SockFilter{
		header, // X = length of the IP header
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_IND},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(k.request), Jf: 2},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_IND, K: icmpHeader},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: noteMagic, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: math.MaxUint32}, // the whole packet
		{Code: unix.BPF_RET | unix.BPF_K},
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}) //nolint:gosec // seven instructions
}
