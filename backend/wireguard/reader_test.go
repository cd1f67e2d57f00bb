// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"
)

// packetTUN is a TUN device with packets to read. Its other methods panic.
type packetTUN struct {
	tun.Device
	packets [][]byte
	err     error
}

// Read implements tun.Device.
func (f *packetTUN) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	for i, p := range f.packets {
		sizes[i] = copy(bufs[i][offset:], p)
	}
	return len(f.packets), f.err
}

// sum6 returns the one's complement sum of an IPv6 pseudo header and a UDP datagram.
func sum6(b []byte) uint16 {
	all := slices.Concat(b[8:ipv6Header], []byte{0, unix.IPPROTO_UDP}, b[ipv6Header+4:ipv6Header+6], b[ipv6Header:])
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(all); i += 2 {
		if sum += uint32(binary.BigEndian.Uint16(all[i:])); sum > 0xffff {
			sum -= 0xffff
		}
	}
	return uint16(sum)
}

// zeroUDP6 returns an IPv6 packet whose computed UDP checksum is 0, and whose checksum field is
// 0. The payload has size bytes, at least 2.
func zeroUDP6(size int) []byte {
	b := make([]byte, ipv6Header+udpHeader+size)
	b[0], b[6], b[7] = 6<<4, unix.IPPROTO_UDP, 64
	binary.BigEndian.PutUint16(b[4:], uint16(udpHeader+size))
	copy(b[8:], netip.MustParseAddr("fd00:5:1::2").AsSlice())
	copy(b[24:], netip.MustParseAddr("fd00:5:2::2").AsSlice())
	copy(b[ipv6Header:], []byte{0x30, 0x39, 0, 53})
	copy(b[ipv6Header+4:], b[4:6])
	for i := ipv6Header + udpHeader + 2; i < len(b); i++ {
		b[i] = byte(i)
	}
	binary.BigEndian.PutUint16(b[ipv6Header+udpHeader:], ^sum6(b))
	return b
}

// TestReaderWritesZeroChecksums checks that Read writes a computed checksum of 0 as 0xffff, and
// does not change any other packet.
func TestReaderWritesZeroChecksums(t *testing.T) {
	const checksum = ipv6Header + 6
	edited := func(size int, edit func(b []byte)) []byte {
		b := zeroUDP6(size)
		edit(b)
		return b
	}
	for _, tt := range []struct {
		name    string
		packet  []byte
		changes bool
	}{
		{"shortest payload", zeroUDP6(2), true},
		{"odd payload", zeroUDP6(3), true},
		{"large payload of the largest words", edited(9000, func(b []byte) {
			for i := ipv6Header + udpHeader + 2; i < len(b); i++ {
				b[i] = 0xff
			}
			b[ipv6Header+udpHeader], b[ipv6Header+udpHeader+1] = 0, 0
			binary.BigEndian.PutUint16(b[ipv6Header+udpHeader:], ^sum6(b))
		}), true},
		{"padded", append(zeroUDP6(4), 1, 2, 3), true},
		{"no checksum although it has a value", edited(4, func(b []byte) { b[checksum+3]++ }), false},
		{"written checksum", edited(4, func(b []byte) { b[checksum] = 0xff; b[checksum+1] = 0xff }), false},
		{"TCP", edited(40, func(b []byte) { b[6] = unix.IPPROTO_TCP }), false},
		{"fragment", edited(4, func(b []byte) { b[6] = unix.IPPROTO_FRAGMENT }), false},
		{"IPv4", edited(4, func(b []byte) { b[0] = 4<<4 | 5 }), false},
		{"truncated datagram", zeroUDP6(4)[:ipv6Header+udpHeader+3], false},
		{"truncated header", zeroUDP6(4)[:ipv6Header+udpHeader-1], false},
		{"length below that of the header", edited(4, func(b []byte) { b[ipv6Header+5] = 7 }), false},
		{"length above that of the packet", edited(4, func(b []byte) { b[ipv6Header+4] = 0xff }), false},
		{"empty", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const offset = 16
			bufs, sizes := [][]byte{make([]byte, 1<<16), make([]byte, 1<<16)}, make([]int, 2)
			r := &reader{Device: &packetTUN{packets: [][]byte{tt.packet, tt.packet}}}
			n, err := r.Read(bufs, sizes, offset)
			if n != 2 || err != nil {
				t.Fatalf("read %d packets, %v", n, err)
			}
			want := slices.Clone(tt.packet)
			if tt.changes {
				if sum6(want[:ipv6Header+int(want[5])+int(want[4])<<8]) != 0xffff {
					t.Fatal("the checksum of the packet is not 0")
				}
				want[checksum], want[checksum+1] = 0xff, 0xff
			}
			for i := range n {
				if got := bufs[i][offset : offset+sizes[i]]; !bytes.Equal(got, want) {
					t.Errorf("packet %d is\n%x, want\n%x", i, got, want)
				}
			}
		})
	}
}

// TestReaderRemembersFailure checks the reason that ended returns after an error of the device,
// and that Read still corrects the packets that come with the error.
func TestReaderRemembersFailure(t *testing.T) {
	failed := errors.New("unsupported virtio GSO type: 7")
	for _, tt := range []struct {
		err  error
		want string
	}{
		{tun.ErrTooManySegments, "unknown reason"},
		{os.ErrClosed, "the TUN device was deleted"},
		{failed, failed.Error()},
	} {
		bufs, sizes := [][]byte{make([]byte, 100)}, make([]int, 1)
		r := &reader{Device: &packetTUN{packets: [][]byte{zeroUDP6(2)}, err: tt.err}}
		if n, err := r.Read(bufs, sizes, 0); n != 1 || !errors.Is(err, tt.err) || bufs[0][ipv6Header+6] != 0xff {
			t.Errorf("read %d packets, %v, want one with a checksum, %v", n, err, tt.err)
		}
		if got := r.ended().Error(); got != tt.want {
			t.Errorf("after %v the reason is %q, want %q", tt.err, got, tt.want)
		}
	}
}
