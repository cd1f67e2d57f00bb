// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestParse checks what messages of ICMP mean. Any host can send them, so none may end the process.
func TestParse(t *testing.T) {
	const id = 0x01020304
	from := netip.MustParseAddr("192.0.2.1")
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		k := kinds[f]
		request := k.echo(id, 64, Note{})
		message := func(kind, code byte, rest []byte) []byte {
			return append([]byte{kind, code, 0, 0, 0, 0, 5, 0x14}, rest...) // an MTU of 1300
		}
		quoted := append(make([]byte, k.header), request[:icmpHeader]...)
		reply := slices.Clone(request)
		reply[0] = k.reply
		tooBigCode := map[prefix.Family]byte{prefix.IPv4: 4}[f]
		unreachable := UnreachableError{from, 1}

		for _, tt := range []struct {
			name    string
			message []byte
			ok      bool
			err     error
		}{
			{"reply", reply, true, nil},
			{"shortest reply", reply[:icmpHeader], true, nil},
			{"cut reply", reply[:icmpHeader-1], false, nil},
			{"request", request, false, nil},
			{"request with a quote", message(k.request, 0, quoted), false, nil},
			{"unreachable", message(k.unreachable, 1, quoted), true, unreachable},
			{"too big", message(k.tooBig, tooBigCode, quoted), true, ErrTooBig},
			{"expired", message(k.expired, 0, quoted), true, ExpiredError{from}},
			{"cut quote", message(k.unreachable, 1, quoted[:len(quoted)-1]), false, nil},
			{"cut quote, too big", message(k.tooBig, tooBigCode, quoted[:len(quoted)-1]), false, nil},
			{"cut quote, expired", message(k.expired, 0, quoted[:len(quoted)-1]), false, nil},
			{"no quote", message(k.unreachable, 1, nil), false, nil},
		} {
			got, ok, err := k.parse(tt.message, from)
			if ok != tt.ok || ok && got != id {
				t.Errorf("%s, %s: id %#x, %v", f, tt.name, got, ok)
			}
			if !errors.Is(err, tt.err) {
				t.Errorf("%s, %s: %v, want %v", f, tt.name, err, tt.err)
			}
		}
	}
}
