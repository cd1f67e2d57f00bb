// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
	answerTimeout = 2 * time.Second // time to wait for an answer
	smallPacket   = 84              // bytes
	// leastMTU is the size in bytes that every path should carry, so a search tries it first. It is less
	// than the minimum of 1280 for IPv6, because a tunnel may be in between.
	leastMTU = 576
	// searchTimeout is the time to wait for an answer in the search for the largest packet. It is
	// shorter than answerTimeout, because the peer has just answered other packets.
	searchTimeout = 500 * time.Millisecond
)

// Diagnose tries the parts of a path, from the outside to the inside, and stops at the first one that
// does not work. It needs CAP_NET_RAW. If ctx ends before Diagnose is done, Broken is Unknown.
func Diagnose(ctx context.Context, p Path, n Network) Verdict {
	pinger := ping.NewPinger()
	defer pinger.Close()
	return sender{wait: freely, ping: pinger.Ping, knock: knock}.diagnose(ctx, p, n)
}

// sender sends the packets of checks.
type sender struct {
	wait  func(context.Context) error // returns when one more packet may be sent
	ping  func(ctx context.Context, dst netip.Addr, way ping.Path, timeout time.Duration) (time.Duration, error)
	knock func(ctx context.Context, dst netip.Addr, hops int) error
	// likeTCP sends large packets as pods send TCP: if a router reports a smaller MTU, the next one is smaller.
	likeTCP bool
}

// freely permits all packets at once.
func freely(ctx context.Context) error { return ctx.Err() }

func (s sender) diagnose(ctx context.Context, p Path, n Network) Verdict {
	inner := n.end(p.Subnet)
	mtu := n.mtu(p)
	_, outerErr := s.echo(ctx, p.PublicIP, smallPacket)
	v, err := s.reach(ctx, inner, mtu)
	fail := func(part Part, because error, advice string) Verdict {
		if ctx.Err() != nil { // perhaps only the end of ctx has prevented the answer
			part = Unknown
			advice = "the check was interrupted"
			v.Largest = 0
		}
		v.Broken = part
		v.Advice = fmt.Sprintf("%s (%v)", advice, because)
		return v
	}

	_, unreachable := errors.AsType[ping.UnreachableError](err)
	silent := v.Broken == Tunnel && outerErr == nil && !unreachable
	switch {
	case (silent || v.Broken == Checksum) && s.forwards(ctx, p, v.Broken == Checksum):
		return fail(Unknown, err, fmt.Sprintf("%s does not answer, but its host gets packets through the network: a firewall there drops those to its own addresses, and may drop those to pods (flannelctl doctor on that host names it)", inner))
	case v.OK && v.Advice != "":
		v.Advice = inner.String() + " " + v.Advice
	case errors.Is(err, syscall.EINVAL):
		return fail(Tunnel, err, "this host itself drops packets to "+inner.String()+": look for a rule or route that does: ip rule show; ip route show table all")
	case v.Broken == Tunnel && errors.Is(outerErr, ping.ErrNoSocket): // the host was not asked
		return fail(Unknown, outerErr, "this host cannot send checks")
	case v.Broken == Tunnel && outerErr != nil:
		return fail(Underlay, outerErr, p.PublicIP.String()+" does not answer either: check the host and the path to it")
	case v.Broken == Tunnel && !n.Devices:
		return fail(Unknown, err, fmt.Sprintf("the host answers, %s does not: no pods have a bridge there yet, a firewall drops packets to them, or a router or cloud in between drops packets of pods (source/destination check)", inner))
	case v.Broken == Tunnel:
		return fail(Tunnel, err, fmt.Sprintf("the host answers, its end of the network does not: a firewall drops the packets of the backend (%s), or something on that host: run flannelctl doctor there", n.packets()))
	case v.Broken == MTU:
		return fail(MTU, err, fmt.Sprintf("packets of up to %d bytes pass, those of %d bytes do not: the underlay, or the interface of one of both hosts, has a smaller MTU than this interface: set the interface's MTU, or with vxlan, ipip, udp and wireguard Backend.MTU to \"probe\"", v.Largest, mtu))
	case v.Broken == Checksum:
		return fail(Checksum, err, `pings pass, TCP does not: a firewall drops it (flannelctl doctor on that host names it), or a network card or kernel corrupts checksums: with vxlan try "ChecksumOffload": "off"`)
	}
	return v
}

// filteredText is the advice about an address that answers only TCP.
const filteredText = "answers TCP but no pings (icmp filtered): the network works, its MTU is not checked"

// forwards reports whether the host of a path receives packets through the network, and this host its answers.
// It sends packets to the address of a pod, with a hop limit that ends at that host. The host reports that the
// limit was exceeded. Its firewall rules for its own addresses do not apply to such packets, and no pod gets
// them. tcp selects TCP instead of a ping.
func (s sender) forwards(ctx context.Context, p Path, tcp bool) bool {
	pod := prefix.Last(p.Subnet).Prev() // hardly the address of a pod
	for range 2 {
		if s.wait(ctx) != nil {
			return false
		}
		if tcp {
			if errors.Is(s.knock(ctx, pod, 1), syscall.EHOSTUNREACH) {
				return true
			}
			continue
		}
		_, err := s.ping(ctx, pod, ping.Path{Size: smallPacket, Hops: 1}, searchTimeout)
		// A router in between is not the host of the path.
		if e, ok := errors.AsType[ping.ExpiredError](err); ok && (e.At == p.PublicIP || p.Subnet.Contains(e.At)) {
			return true
		}
	}
	return false
}

// reach tries small packets to dst, then packets of size bytes, then TCP, and stops at the first that do not
// pass. The advice in the verdict is empty, unless TCP passes and pings do not. err says
// why Broken is set.
func (s sender) reach(ctx context.Context, dst netip.Addr, size int) (v Verdict, err error) {
	rtt, err := s.echo(ctx, dst, smallPacket)
	if err != nil {
		// A firewall on the way that rejects pings rejects TCP in the same way, which looks like an answer of dst.
		rejected, ok := errors.AsType[ping.UnreachableError](err)
		onTheWay := ok && rejected.At != dst
		if !onTheWay && s.wait(ctx) == nil && s.refused(ctx, dst) {
			return Verdict{OK: true, Advice: filteredText}, nil
		}
		return Verdict{Broken: Tunnel}, err
	}

	v.RTT = milliseconds(rtt)
	if _, err = s.echo(ctx, dst, size); err != nil {
		v.Broken = MTU
		v.Largest = s.largest(ctx, dst, size)
		return v, err
	}
	if err = s.wait(ctx); err == nil {
		err = answered(s.knock(ctx, dst, 0))
	}
	if err != nil {
		v.Broken = Checksum
	}
	v.OK = err == nil
	return v, err
}

// try waits until one more packet may be sent, then sends an echo request of size bytes and returns the time to its
// reply.
func (s sender) try(ctx context.Context, dst netip.Addr, size int, timeout time.Duration) (time.Duration, error) {
	if err := s.wait(ctx); err != nil {
		return 0, err
	}
	return s.ping(ctx, dst, ping.Path{Size: size, Whole: !s.likeTCP}, timeout)
}

// echo is like try, but tries once more after an error, because the first packet may have waited for
// neighbour resolution.
func (s sender) echo(ctx context.Context, dst netip.Addr, size int) (time.Duration, error) {
	if rtt, err := s.try(ctx, dst, size, answerTimeout); err == nil {
		return rtt, nil
	}
	return s.try(ctx, dst, size, answerTimeout)
}

// largest searches for the size in bytes of the largest packet that passes. tooBig is known not to pass.
// If ctx ends, largest returns the largest size that has passed so far, at least smallPacket.
func (s sender) largest(ctx context.Context, dst netip.Addr, tooBig int) int {
	return ping.Largest(smallPacket, tooBig, leastMTU, func(size int) (ok, more bool) {
		_, err := s.try(ctx, dst, size, searchTimeout)
		return err == nil, ctx.Err() == nil
	})
}

// refused reports whether dst itself answers a TCP connection. An error that this host or a router can cause
// is no answer.
func (s sender) refused(ctx context.Context, dst netip.Addr) bool {
	err := s.knock(ctx, dst, 0)
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

// knock opens a TCP connection to port 1, with packets that have the given hop limit; 0 means the default. If
// there is no answer within answerTimeout, it returns an error.
func knock(ctx context.Context, dst netip.Addr, hops int) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var d net.Dialer
	if hops != 0 {
		d.Control = func(_, _ string, c syscall.RawConn) (err error) {
			failed := c.Control(func(fd uintptr) { err = ping.SetHops(int(fd), prefix.FamilyOf(dst), hops) })
			return cmp.Or(failed, err)
		}
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(dst, 1).String())
	if err == nil {
		return conn.Close()
	}
	return err
}
