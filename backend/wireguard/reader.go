// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"
)

// reader is a TUN device that corrects the UDP checksums of the packets read from it, and
// remembers why reading has failed.
type reader struct {
	tun.Device
	failure atomic.Pointer[error]
}

// Read implements tun.Device. The kernel leaves UDP checksums to the program that reads the
// device. For one packet in 65,536 the computed checksum is 0, and wireguard-go leaves that 0
// in the packet. Over IPv4 it means that there is no checksum, but over IPv6 the receiver drops
// the packet.
func (r *reader) Read(bufs [][]byte, sizes []int, offset int) (n int, err error) {
	n, err = r.Device.Read(bufs, sizes, offset)
	for i := range n {
		completeUDP6(bufs[i][offset : offset+sizes[i]])
	}
	if err != nil && !errors.Is(err, tun.ErrTooManySegments) { // after that error wireguard-go continues to read
		r.failure.Store(&err)
	}
	return n, err
}

// ended returns why wireguard-go has ended the device.
func (r *reader) ended() error {
	err := r.failure.Load()
	if err == nil {
		return errors.New("unknown reason")
	}
	if errors.Is(*err, os.ErrClosed) {
		return errors.New("the TUN device was deleted")
	}
	return *err
}

// Lengths of headers in bytes.
const (
	ipv6Header = 40
	udpHeader  = 8
)

// completeUDP6 writes a computed UDP checksum of 0 as 0xffff in the IP packet b, as RFC 8200, section
// 8.1, requires.
func completeUDP6(b []byte) {
	const protocol, length, checksum = 6, ipv6Header + 4, ipv6Header + 6
	if len(b) < ipv6Header+udpHeader || b[checksum]|b[checksum+1] != 0 || b[0]>>4 != 6 || b[protocol] != unix.IPPROTO_UDP {
		return
	}

	size := int(binary.BigEndian.Uint16(b[length:]))
	if size < udpHeader || size > len(b)-ipv6Header {
		return
	}

	// The field is also 0 if a sender has left out the checksum. Such a packet must stay as it is.
	sum := uint32(unix.IPPROTO_UDP + size) // pseudo header without its addresses, which words contains
	const addresses = 8
	words := b[addresses : ipv6Header+size]
	for ; len(words) >= 2; words = words[2:] {
		sum += uint32(binary.BigEndian.Uint16(words))
	}
	if len(words) > 0 {
		sum += uint32(words[0]) << 8
	}
	if sum%0xffff == 0 { // sum is not 0, so its one's complement sum is 0xffff and the checksum is 0
		b[checksum] = 0xff
		b[checksum+1] = 0xff
	}
}
