// SPDX-License-Identifier: Apache-2.0

package health

import (
	"net"
	"net/netip"
	"sync"
)

// Limits on the connections of one port. A process has 1,024 file descriptors on many systems, and
// the daemon needs the rest to repair routes and rules. kubelet connects from this host, so a pod
// that opens all connections it gets must not use up those of the host.
const (
	maxOfSource = 8  // of one other address
	maxOfOthers = 64 // of all other addresses
	maxOfHost   = 64 // from this host, or through a socket without addresses
)

// limited is a listener that closes the connections beyond the limits as soon as it has accepted them.
type limited struct {
	net.Listener

	mu     sync.Mutex
	open   map[netip.Addr]int // numbers of open connections by the result of sourceOf
	others int                // number of those from other addresses
}

func limit(ln net.Listener) *limited {
	return &limited{Listener: ln, open: map[netip.Addr]int{}}
}

// Accept implements net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}

		source := sourceOf(c)
		if l.add(source) {
			return &limitedConn{Conn: c, release: sync.OnceFunc(func() { l.remove(source) })}, nil
		}
		c.Close()
	}
}

// sourceOf returns the address that has connected, or the zero Addr if that is one of this host's own
// addresses.
func sourceOf(c net.Conn) netip.Addr {
	from, errFrom := netip.ParseAddrPort(c.RemoteAddr().String())
	to, errTo := netip.ParseAddrPort(c.LocalAddr().String())
	if errFrom != nil || errTo != nil || from.Addr() == to.Addr() || from.Addr().Unmap().IsLoopback() {
		return netip.Addr{}
	}
	return from.Addr().Unmap()
}

func (l *limited) add(source netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	most := maxOfHost
	if source.IsValid() {
		most = maxOfSource
	}
	if l.open[source] == most || source.IsValid() && l.others == maxOfOthers {
		return false
	}
	l.count(source, 1)
	return true
}

func (l *limited) remove(source netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count(source, -1)
}

// count adds n connections. The caller holds l.mu.
func (l *limited) count(source netip.Addr, n int) {
	if l.open[source] += n; l.open[source] == 0 {
		delete(l.open, source)
	}
	if source.IsValid() {
		l.others += n
	}
}

// limitedConn gives its place back when it is closed.
type limitedConn struct {
	net.Conn

	release func()
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
