// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"net/netip"
	"slices"
	"time"
)

// While there is no answer, WireGuard sends the first packet of a handshake every 5 s
// (REKEY_TIMEOUT of the protocol). A trial of an endpoint lasts for firstTrial in the first round,
// and in each later round twice as long as in the round before, up to lastTrial. After trialRounds
// rounds without a handshake, the peer keeps the endpoint of its lease for trialRest.
//
// If a trial ends and the device has sent nothing, either there was no packet for the peer, or the host has
// no route to the endpoint. The first packet should go to the first candidate, so the trial of the first
// candidate is then prolonged by firstTrial, up to idleTrials times. After that the next endpoint is tried,
// because otherwise a candidate without a route would stay forever.
//
// If two hosts are behind NAT, they must try each other within the same half minute: the first packet of a
// host only makes its own NAT let in the packets of the other host. On both hosts all trials of a round
// last equally long, so that the trials of each other soon overlap.
const (
	firstTrial  = 15 * time.Second
	lastTrial   = 2 * time.Minute
	trialRounds = 6
	idleTrials  = 8
	trialRest   = 30 * time.Minute
)

// trial is the search for an endpoint of a peer without a session.
type trial struct {
	endpoints []netip.AddrPort // the endpoint of the lease, then the candidates
	at        int              // index of the endpoint that is tried at present
	round     int              // number of finished rounds
	began     time.Duration    // start of the present trial
	until     time.Duration    // end of the present trial
	sent      int64            // bytes that the device had sent to the peer when the present trial began
	idle      int              // how often the present trial was prolonged because nothing was sent
	tried     bool             // something was sent in this round
}

func (t *trial) endpoint() netip.AddrPort { return t.endpoints[t.at] }

// next returns the search at the time now; nil if there is only the endpoint of the lease. t may be nil.
// sent is the number of bytes that the device has sent to the peer.
func (t *trial) next(now time.Duration, endpoints []netip.AddrPort, sent int64) *trial {
	if len(endpoints) == 1 {
		return nil
	}
	if t == nil { // the device has used the endpoint of the lease until now, so start with a candidate
		return &trial{endpoints: endpoints, at: 1, began: now, until: now + firstTrial, sent: sent}
	}
	if !slices.Equal(t.endpoints, endpoints) {
		t.replace(now, endpoints)
	}
	t.advance(now, sent)
	return t
}

// replace replaces the endpoints, and begins with the first round again. The present trial does not:
// a host that often changes what it shares would then prevent the trials of the other endpoints.
func (t *trial) replace(now time.Duration, endpoints []netip.AddrPort) {
	t.endpoints = endpoints
	t.round = 0
	switch {
	case t.at == 0: // the endpoint of the lease, even if it has changed
		t.until = min(t.until, t.began+firstTrial)
	case t.at < len(endpoints):
		t.until = min(t.until, now+firstTrial)
	default: // this index is gone: advance continues with the endpoint of the lease
		t.at = len(endpoints) - 1
		t.idle = idleTrials
		t.until = now
	}
}

func (t *trial) advance(now time.Duration, sent int64) {
	if now < t.until {
		return
	}
	if sent == t.sent && t.at == 1 && t.idle < idleTrials {
		t.idle++
		t.until = now + firstTrial
		return
	}

	t.tried = t.tried || sent != t.sent
	t.began = now
	t.sent = sent
	t.idle = 0
	if t.round == trialRounds { // trialRest is over
		t.round = 0
	}
	if t.at++; t.at == len(t.endpoints) {
		t.at = 0
		if t.tried {
			t.round++
		}
		t.tried = false
	}

	t.until = now + min(firstTrial<<t.round, lastTrial)
	if t.round == trialRounds {
		t.until = now + trialRest
	}
}
