// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
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
			p.answer(tt.id, netip.MustParseAddr(tt.from), tt.err)
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

// TestAnswerThatIsReadLate checks that an answer counts until lastRead after the timeout, as with the
// function Ping.
func TestAnswerThatIsReadLate(t *testing.T) {
	const timeout = time.Second
	for _, tt := range []struct {
		name  string
		after time.Duration
		want  error
	}{
		{"in time", timeout / 2, ErrTooBig},
		{"a little late", timeout + lastRead/2, ErrTooBig},
		{"too late", timeout + 2*lastRead, errNoAnswer},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				answer := make(chan error, 1)
				time.AfterFunc(tt.after, func() { answer <- ErrTooBig })
				if err := await(t.Context(), answer, timeout); !errors.Is(err, tt.want) {
					t.Errorf("error %v, want %v", err, tt.want)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), timeout/2)
		defer cancel()
		if err := await(ctx, nil, timeout); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v after the context has ended, want %v", err, context.DeadlineExceeded)
		}
	})
}
