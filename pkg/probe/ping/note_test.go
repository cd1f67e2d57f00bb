// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"encoding/binary"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

func TestNoteOfARequest(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.5.2.0"), netip.MustParseAddr("fd00:5:2::")
	for _, tt := range []struct {
		name string
		size int
		note Note
		want Note
	}{
		{"IPv4", 64, Note{v4, 9 * time.Second}, Note{v4, 9 * time.Second}},
		{"IPv6", 64, Note{v6, 1500 * time.Millisecond}, Note{v6, 1500 * time.Millisecond}},
		{"just enough room", icmpHeader + noteSize, Note{v4, 0}, Note{v4, 0}},
		{"an odd size", icmpHeader + noteSize + 1, Note{v4, 0}, Note{v4, 0}},
		{"too little room", icmpHeader + noteSize - 1, Note{v4, time.Second}, Note{}},
		{"no room", icmpHeader, Note{v4, time.Second}, Note{}},
		{"no note", 64, Note{Silence: time.Second}, Note{}},
		{"part of a millisecond", 64, Note{v4, 1999 * time.Microsecond}, Note{v4, time.Millisecond}},
		{"longer than the field", 64, Note{v4, 1000 * time.Hour * 24}, Note{v4, math.MaxUint32 * time.Millisecond}},
		{"negative", 64, Note{v4, -time.Second}, Note{v4, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
				k := kinds[f]
				b := k.echo(1, tt.size, tt.note)
				if got, ok := k.noteOf(b); got != tt.want || ok != tt.want.Sender.IsValid() {
					t.Errorf("%s: %v, %v, want %v", f, got, ok, tt.want)
				}
				if sum := checksum(b); len(b)%2 == 0 && sum != 0 {
					t.Errorf("%s: the checksum is wrong by %d", f, sum)
				}
				b[0] = k.reply
				if got, ok := k.noteOf(b); ok {
					t.Errorf("%s: a reply has the note %v", f, got)
				}
			}
		})
	}
}

// FuzzNote reads notes from any ICMP message. A note that is read must be the one that is written again.
func FuzzNote(f *testing.F) {
	k := kinds[prefix.IPv4]
	f.Add(k.echo(1, 64, Note{netip.MustParseAddr("10.5.2.0"), time.Second}))
	f.Add(k.echo(1, 64, Note{netip.MustParseAddr("fd00:5:2::"), time.Second}))
	f.Add(k.echo(1, 64, Note{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, ok := k.noteOf(b)
		if !ok {
			return
		}
		if !n.Sender.IsValid() || n.Sender.Is4In6() || n.Silence < 0 || n.Silence > math.MaxUint32*time.Millisecond {
			t.Fatalf("%x: the note is %v", b, n)
		}
		if again, ok := k.noteOf(k.echo(binary.BigEndian.Uint32(b[4:]), len(b), n)); !ok || again != n {
			t.Errorf("%x: %v becomes %v, %v", b, n, again, ok)
		}
	})
}
