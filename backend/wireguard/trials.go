// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// WireGuard sends the first packet of a handshake every 5 s (REKEY_TIMEOUT of the protocol). A trial of
// an endpoint lasts for firstTrial, and in each later round twice as long, up to lastTrial. After
// trialRounds rounds without a handshake, the peer keeps the endpoint of its lease for trialRest.
//
// Both hosts behind NAT must try each other within the same half minute, because the first packet only
// makes the own NAT let in those of the other host. As each of them tries the endpoint for the same
// part of the time, they meet soon.
const (
	firstTrial  = 15 * time.Second
	lastTrial   = 2 * time.Minute
	trialRounds = 6
	trialRest   = 30 * time.Minute
)

// trial is the search for an endpoint of a peer without a session.
type trial struct {
	endpoints []netip.AddrPort // that of the lease, then the candidates
	at        int              // index of the present one
	round     int              // number of finished rounds
	until     time.Duration    // end of the present trial, on the steady clock
	sent      int64            // bytes that the device had sent to the peer when it began
}

// trials contains the searches of a device, by the public key of the peer.
type trials map[wgtypes.Key]*trial

// next returns the endpoint to try for each peer without a session for which there are candidates. It
// ends the search for a peer that has a session.
func (ts trials) next(now time.Duration, d diff, candidates func(peer) []netip.AddrPort) map[wgtypes.Key]netip.AddrPort {
	try := map[wgtypes.Key]netip.AddrPort{}
	had := make(map[wgtypes.Key]bool, len(ts))
	for _, h := range d.have.Peers {
		w, wanted := d.want[h.PublicKey]
		if !wanted || d.ages[h.PublicKey] <= sessionLife {
			continue
		}
		endpoints := []netip.AddrPort{w.endpoint}
		for _, c := range candidates(w) {
			if c != w.endpoint {
				endpoints = append(endpoints, c)
			}
		}
		if len(endpoints) == 1 {
			continue
		}
		had[w.key] = true
		t := ts[w.key]
		if t == nil || !slices.Equal(t.endpoints, endpoints) {
			// The device has tried the endpoint of the lease, or the last one, until now.
			t = &trial{endpoints: endpoints, at: 1, until: now + firstTrial, sent: h.TransmitBytes}
			ts[w.key] = t
		}
		t.advance(now, h.TransmitBytes)
		try[w.key] = t.endpoints[t.at]
	}
	for key := range ts {
		if !had[key] {
			delete(ts, key)
		}
	}
	return try
}

// advance goes on to the next endpoint if the present trial has ended. sent is the number of bytes that
// the device has sent to the peer. Without any, nothing was tried.
func (t *trial) advance(now time.Duration, sent int64) {
	if now < t.until {
		return
	}
	if sent == t.sent {
		t.until = now + firstTrial
		return
	}
	t.sent = sent
	if t.round == trialRounds { // the rest is over
		t.round = 0
	}
	if t.at++; t.at == len(t.endpoints) {
		t.at = 0
		t.round++
	}
	t.until = now + min(firstTrial<<t.round, lastTrial)
	if t.round == trialRounds {
		t.until = now + trialRest
	}
}

// pause returns the time until the next trial begins; zero if there is none.
func (ts trials) pause(now time.Duration) (pause time.Duration) {
	for _, t := range ts {
		left := max(t.until-now, 1)
		if pause == 0 || left < pause {
			pause = left
		}
	}
	return pause
}
