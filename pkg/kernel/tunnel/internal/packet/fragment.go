// SPDX-License-Identifier: Apache-2.0

package packet

import "encoding/binary"

// Fragment calls emit with each fragment of the IPv4 packet b, whose parsed header is h
// (RFC 791, 3.2). Each fragment has at most mtu bytes. All fragments use buf, which
// must have at least mtu bytes, so a fragment is valid only until emit returns.
// Fragment reports false, without a call of emit, if b must not be fragmented or mtu is
// too small.
func Fragment(buf, b []byte, h Header, mtu int, emit func([]byte)) bool {
	room := (mtu - h.Len) &^ 7
	if h.DontFragment || room <= 0 {
		return false
	}

	const moreFragments, offsetMask = 0x2000, 0x1fff
	field := binary.BigEndian.Uint16(b[6:])
	base := field & offsetMask
	more := field&moreFragments != 0
	for at := h.Len; at < h.Total; at += room {
		n := min(room, h.Total-at)
		f := buf[:h.Len+n]
		copy(f, b[:h.Len])
		copy(f[h.Len:], b[at:at+n])
		field := base + uint16((at-h.Len)/8)
		if more || at+n < h.Total {
			field |= moreFragments
		}
		if at > h.Len {
			dropOptions(f[header4:h.Len])
		}

		binary.BigEndian.PutUint16(f[6:], field)
		setTotal(f, false)
		emit(f)
	}
	return true
}

// dropOptions replaces the options that must be only in the first fragment by padding (RFC 791, 3.1).
func dropOptions(o []byte) {
	const end, padding, copied = 0, 1, 0x80
	for len(o) > 0 && o[0] != end {
		n := 1
		if o[0] != padding {
			if len(o) < 2 || o[1] < 2 || int(o[1]) > len(o) {
				return
			}
			n = int(o[1])
		}
		if o[0]&copied == 0 {
			for i := range n {
				o[i] = padding
			}
		}
		o = o[n:]
	}
}
