// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"net"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
	// doubt is the time for which a missing note may be underway, or lost by chance.
	doubt = 5 * time.Second
	// lostFor is the time for which the word of a peer counts. It is longer than the pause between its checks of
	// a broken path.
	lostFor = 3 * againMost
)

// direction is what this host learns, on a path that gives no answers, from the notes of the peer. It learns most
// if only its own packets are lost:
//
//	this host   peer
//	  ping ---> x        asked
//	       <--- ping     "I have received nothing for 9 s", which covers the ping above: lost
//
// The hosts need no common clock, because notes have durations. A host sends notes only on paths that do not
// work, so a network without faults has none.
type direction struct {
	heard time.Time // when this host last received a packet, or has begun to listen
	asked time.Time // when this host sent the first note of which it does not know that the peer has received it
	lost  time.Time // when the peer last said that it has not received that; zero if it has
}

// note returns the note for a request on a path that does not work.
func (p *Prober) note(s *state) (n ping.Note) {
	own, ok := prefix.OfFamily(p.Own, prefix.FamilyOf(s.Subnet.Addr()))
	receives := ok && p.local(p.Network.end(own))
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if !receives { // there is no bridge yet, so the silence is no news
		s.direction = direction{heard: now}
		return n
	}
	if s.asked.IsZero() {
		s.asked = now
	}
	return ping.Note{Sender: own.Masked().Addr(), Silence: now.Sub(s.heard)}
}

// hear takes in a note. Any host can forge one, so it only adds a word to a path that does not work anyway.
func (p *Prober) hear(from netip.Addr, n ping.Note) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.senders[n.Sender]
	if s == nil || from != s.PublicIP && !s.Subnet.Contains(from) {
		return
	}

	now := time.Now()
	s.heard = now
	switch {
	case s.asked.IsZero() || now.Sub(s.asked) < doubt:
	case now.Add(-n.Silence).Before(s.asked):
		s.lost = now
	default: // the peer has received a packet since then, or has only begun to listen
		s.asked = time.Time{}
		s.lost = time.Time{}
	}
}

// passed records that a packet has passed in both directions.
func (p *Prober) passed(s *state) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.direction = direction{heard: time.Now()}
}

// result returns what is known of the path at the time now.
func (s *state) result(now time.Time) Result {
	r := s.Result
	// Notes are in packets of the full MTU, so with MTU they say nothing about small ones.
	r.OneWay = !s.OK && s.Broken != MTU && s.Broken != Checksum && now.Sub(s.lost) < lostFor
	return r
}

// isLocal reports whether this host has the address a.
func isLocal(a netip.Addr) bool {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}
