// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"net/netip"
	"testing"
)

// TestAnswerIsForItsRequest checks which answers reach the caller that waits for the answer to request 1.
func TestAnswerIsForItsRequest(t *testing.T) {
	for _, tt := range []struct {
		name, to, from string
		id             uint32
		err            error
		want           bool
	}{
		{"IPv4", "10.5.2.0", "10.5.2.0", 1, nil, true},
		{"IPv4, another request", "10.5.2.0", "10.5.2.0", 2, nil, false},
		{"IPv4, another host", "10.5.2.0", "10.5.3.0", 1, nil, false},
		{"IPv4, error of a router", "10.5.2.0", "192.0.2.1", 1, ErrTooBig, true},
		{"IPv6", "fd00:5:2::", "fd00:5:2::", 1, nil, true},
		{"IPv6, another address of the host", "fd00:5:2::", "fd00::2", 1, nil, true},
		{"IPv6, another request", "fd00:5:2::", "fd00::2", 2, nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, answer := NewPinger(), make(chan error, 1)
			p.waiting[1] = request{netip.MustParseAddr(tt.to), answer}
			p.answer(Answer{tt.id, netip.MustParseAddr(tt.from), tt.err})
			if (len(answer) == 1) != tt.want {
				t.Fatalf("%d answers, want one: %v", len(answer), tt.want)
			}
			if tt.want {
				if err := <-answer; err != tt.err { //nolint:errorlint // answer must pass on exactly this error
					t.Errorf("error %v, want %v", err, tt.err)
				}
			}
		})
	}
}
