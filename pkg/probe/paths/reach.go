// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// Target is what a pod tries to reach.
type Target struct {
	Addr netip.Addr
	Port int // TCP; 0 means pings
}

// ParseTarget parses an address, or an address with a TCP port.
func ParseTarget(text string) (Target, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return Target{Addr: a.Unmap()}, nil
	}
	if a, err := netip.ParseAddrPort(text); err == nil && a.Addr().Zone() == "" && a.Port() != 0 {
		return Target{a.Addr().Unmap(), int(a.Port())}, nil
	}
	return Target{}, fmt.Errorf("%q is invalid: expected an address such as 10.5.7.2, or with a TCP port as in 10.96.0.1:443", text)
}

// String returns the form that ParseTarget parses.
func (t Target) String() string {
	if t.Port == 0 {
		return t.Addr.String()
	}
	return netip.AddrPortFrom(t.Addr, uint16(t.Port)).String() //nolint:gosec // ParseTarget has read 16 bits
}

// Reach tries what passes from the network namespace of this process to a target: small pings, pings of size bytes and
// TCP, or with a port only a TCP connection. It needs CAP_NET_RAW.
func Reach(ctx context.Context, p *ping.Pinger, t Target, size int) Verdict {
	if t.Port != 0 {
		return connect(ctx, t)
	}
	v, err := sender{wait: freely, ping: p.Ping, knock: knock, likeTCP: true}.reach(ctx, t.Addr, size)
	switch {
	case ctx.Err() != nil:
		v = Verdict{Broken: Unknown, Advice: "the check was interrupted"}
	case v.Broken == Tunnel:
		v.Advice = err.Error()
	case v.Broken == MTU:
		v.Advice = fmt.Sprintf("packets of up to %d bytes pass, those of %d bytes do not (%v)", v.Largest, size, err)
	case v.Broken == Checksum:
		v.Advice = fmt.Sprintf("pings pass, TCP does not (%v)", err)
	}
	return v
}

// connect opens a TCP connection to a target. A new Service has no rules of kube-proxy for some seconds: it refuses
// connections, has no route, or its packets go elsewhere. Such a connection is never translated later, because conntrack
// remembers it, so each try is a new one.
func connect(ctx context.Context, t Target) Verdict {
	within, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	for {
		begin := time.Now()
		try, end := context.WithTimeout(within, answerTimeout) // TCP repeats a lost packet after a second
		conn, err := (&net.Dialer{}).DialContext(try, "tcp", t.String())
		end()
		if err == nil {
			took := time.Since(begin)
			_ = conn.Close()
			return Verdict{OK: true, RTT: milliseconds(took)}
		}
		if wait.For(within, connectPause) == nil {
			continue
		}

		cause := err
		if e := (*net.OpError)(nil); errors.As(err, &e) {
			cause = e.Err // without the address, which the caller knows
		}
		return Verdict{Broken: Tunnel, Advice: "no TCP connection: " + cause.Error()}
	}
}

const (
	connectTime  = 8 * time.Second        // time for all connections to a target
	connectPause = 200 * time.Millisecond // between two of them
)
