// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
	answerTimeout = 2 * time.Second // time to wait for an answer
	smallPacket   = 84              // bytes
	// leastMTU is the size in bytes that every path should carry, so a search tries it first. It is less
	// than the minimum of 1280 for IPv6, because a tunnel may be in between.
	leastMTU = 576
	// searchTimeout is the time to wait for an answer in the search for the largest packet. It is
	// shorter than answerTimeout, because the peer has just answered small packets.
	searchTimeout = 500 * time.Millisecond
)

// Diagnose tries the parts of a path, from the outside to the inside, and stops at the first one that
// does not work. It needs CAP_NET_RAW. If ctx ends before Diagnose is done, Broken is Unknown.
func Diagnose(ctx context.Context, p Path, n Network) Verdict {
	return sender{ping: ping.Ping, knock: knock}.diagnose(ctx, p, n)
}

// sender sends the packets of checks.
type sender struct {
	// wait returns when one more packet may be sent. If it is nil, all packets may be sent at once.
	wait  func(context.Context) error
	ping  func(context.Context, netip.Addr, ping.Options) (time.Duration, error)
	knock func(context.Context, netip.Addr) error
}

// await returns nil when one more packet may be sent, or an error if ctx ends before.
func (s sender) await(ctx context.Context) error {
	if s.wait == nil {
		return nil
	}
	return s.wait(ctx)
}

func (s sender) diagnose(ctx context.Context, p Path, n Network) Verdict {
	v := Verdict{Path: p}
	inner := n.end(p.Subnet)
	fail := func(part Part, err error, advice string) Verdict {
		if ctx.Err() != nil { // perhaps only the end of ctx has prevented the answer
			part = Unknown
			advice = "the check was interrupted"
			v.Largest = 0
		}
		v.Broken, v.Advice = part, fmt.Sprintf("%s (%v)", advice, err)
		return v
	}

	_, outerErr := s.echo(ctx, p.PublicIP, smallPacket)
	mtu := n.mtu(p)
	r := s.reach(ctx, inner, mtu)
	v.RTT = r.rtt
	v.Largest = r.largest

	switch {
	case r.filtered:
		v.OK, v.Advice = true, inner.String()+" "+filteredText
	case r.broken == Tunnel && outerErr != nil:
		return fail(Underlay, outerErr, p.PublicIP.String()+" does not answer either: check the host and the path to it")
	case r.broken == Tunnel && !n.Devices:
		return fail(Unknown, r.err, fmt.Sprintf("the host answers, %s does not: no pods have a bridge there yet, a firewall drops packets to them, or a router or cloud in between drops packets of pods (source/destination check)", inner))
	case r.broken == Tunnel:
		return fail(Tunnel, r.err, fmt.Sprintf("the host answers, its end of the network does not: a firewall drops the packets of the backend (%s), or something on that host: run flannelctl doctor there", n.packets()))
	case r.broken == MTU:
		return fail(MTU, r.err, fmt.Sprintf("packets of up to %d bytes pass, those of %d bytes do not: the underlay, or the interface of one of both hosts, has a smaller MTU than this interface: set the interface's MTU, or with vxlan, ipip, udp and wireguard Backend.MTU to \"probe\"", v.Largest, mtu))
	case r.broken == Checksum:
		return fail(Checksum, r.err, `pings pass, TCP does not: a firewall drops it, or a network card or kernel corrupts checksums: with vxlan try "ChecksumOffload": "off"`)
	}
	v.OK = true
	return v
}

// filteredText is the advice about an address that answers only TCP.
const filteredText = "answers TCP but no pings (icmp filtered): the network works, its MTU is not checked"

// reached says which packets pass to an address.
type reached struct {
	rtt      time.Duration
	broken   Part // Tunnel, MTU or Checksum; empty if all packets pass
	err      error
	largest  int  // size in bytes of the largest packet that passes, if broken is MTU
	filtered bool // TCP passes, and pings do not
}

// reach tries small packets to dst, then packets of size bytes, then TCP, and stops at the first that do not pass.
func (s sender) reach(ctx context.Context, dst netip.Addr, size int) (r reached) {
	r.rtt, r.err = s.echo(ctx, dst, smallPacket)
	if r.err != nil {
		if s.await(ctx) == nil && s.refused(ctx, dst) {
			return reached{filtered: true}
		}
		r.broken = Tunnel
		return r
	}

	if _, r.err = s.unfragmented(ctx, dst, size); r.err != nil {
		r.broken = MTU
		r.largest = s.largest(ctx, dst, size)
		return r
	}
	if r.err = s.await(ctx); r.err == nil {
		r.err = answered(s.knock(ctx, dst))
	}
	if r.err != nil {
		r.broken = Checksum
	}
	return r
}

// try waits until one more packet may be sent, then sends an echo request and returns the time to its
// reply.
func (s sender) try(ctx context.Context, dst netip.Addr, o ping.Options) (time.Duration, error) {
	if err := s.await(ctx); err != nil {
		return 0, err
	}
	return s.ping(ctx, dst, o)
}

// twice is like try, but tries once more after an error, because the first packet may have waited for
// neighbour resolution.
func (s sender) twice(ctx context.Context, dst netip.Addr, o ping.Options) (time.Duration, error) {
	if rtt, err := s.try(ctx, dst, o); err == nil {
		return rtt, nil
	}
	return s.try(ctx, dst, o)
}

// echo sends an echo request of size bytes like twice, and waits answerTimeout for each reply.
func (s sender) echo(ctx context.Context, dst netip.Addr, size int) (time.Duration, error) {
	return s.twice(ctx, dst, ping.Options{Size: size, Timeout: answerTimeout})
}

// unfragmented is like echo for packets that must not be fragmented.
func (s sender) unfragmented(ctx context.Context, dst netip.Addr, size int) (time.Duration, error) {
	return s.twice(ctx, dst, ping.Options{Size: size, DontFragment: true, Timeout: answerTimeout})
}

// largest searches for the size in bytes of the largest packet that passes. tooBig is known not to pass.
// If ctx ends, largest returns the largest size that has passed so far, at least smallPacket.
func (s sender) largest(ctx context.Context, dst netip.Addr, tooBig int) int {
	return ping.Largest(smallPacket, tooBig, leastMTU, func(size int) (ok, more bool) {
		_, err := s.try(ctx, dst, ping.Options{Size: size, DontFragment: true, Timeout: searchTimeout})
		return err == nil, ctx.Err() == nil
	})
}

// refused reports whether dst itself answers a TCP connection. An error that this host or a router can cause
// is no answer.
func (s sender) refused(ctx context.Context, dst netip.Addr) bool {
	err := s.knock(ctx, dst)
	return err == nil || errors.Is(err, syscall.ECONNREFUSED)
}

// answered returns nil if the error of a TCP connection is an answer. A refusal by the host or by a firewall is
// one.
func answered(err error) error {
	for _, answer := range []error{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EACCES} {
		if errors.Is(err, answer) {
			return nil
		}
	}
	return err
}

// knock opens a TCP connection to port 1. If there is no answer within answerTimeout, it returns an error.
func knock(ctx context.Context, dst netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(dst, 1).String())
	if err == nil {
		return conn.Close()
	}
	return err
}
