// Package linux is the rtnetlink implementation of dataplane.Kernel.
package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/oneline"
	"flanneld/pkg/prefix"
)

// Kernel is the kernel of the network namespace in which it was opened. Its
// methods may be called concurrently. Links must be made from a thread in that
// namespace: /proc/sys shows each thread the settings of its own.
type Kernel struct {
	sock     *socket
	links    *netlink.Handle
	nexthops nexthops
	supports supports
}

var _ dataplane.Kernel = (*Kernel)(nil)

// Options say how to use the kernel.
type Options struct {
	// NexthopObjects lets IPv4 routes go through nexthop objects where a device
	// has many of them, if the kernel has such objects.
	NexthopObjects bool
}

// Open returns the kernel of the calling thread's network namespace.
func Open(o Options) (*Kernel, error) {
	sock, err := openSocket()
	if err != nil {
		return nil, err
	}
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("open rtnetlink socket: %w", err), sock.close())
	}
	k := &Kernel{sock: sock, links: links}
	k.nexthops.enabled, k.nexthops.threshold, k.nexthops.linger = o.NexthopObjects, nexthopThreshold, nexthopLinger
	k.nexthops.reset()
	return k, nil
}

// Close releases the kernel's sockets.
func (k *Kernel) Close() error {
	k.links.Close()
	return k.sock.close()
}

// OnLink implements dataplane.Kernel.
func (k *Kernel) OnLink(_ context.Context, dst netip.Addr) (string, error) {
	r := routeReply{}
	err := k.sock.ask(func(m *message) { // for the route as it stands in the table
		m.begin(unix.RTM_GETROUTE, 0, rtmsg(prefix.Host(dst), 0, 0, 0, 0, 0, rtmFibMatch)...)
		m.addr(unix.RTA_DST, dst)
	}, func(_ uint16, payload []byte) { r = parseRoute(payload) })
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH),
		errors.Is(err, unix.EINVAL), errors.Is(err, unix.EACCES): // blackhole, prohibit
		return "", nil
	case err != nil:
		return "", fmt.Errorf("look up route to %s: %w", dst, err)
	}
	if r.route.Type != dataplane.Unicast || r.route.Gateway.IsValid() || r.route.Multipath || !dataplane.IsNetwork(r.route.Dst) {
		return "", nil
	}
	l, err := k.link(r.oif)
	if !l.resolves() {
		return "", err
	}
	return l.name, err
}

// rtmFibMatch is RTM_F_FIB_MATCH, which x/sys does not name.
const rtmFibMatch = 0x2000

// supports are what routes in a scope need, as far as we have read, heard of or made these:
// when it goes, they may go without an announcement. It is the index of the device that a
// route leaves by, or the source address of its packets, on whatever device that is. A
// route to one address is a pod's: its loss does no harm, and pods come and go. Nothing is
// ever taken out: the hosts' devices and addresses are few, and what is in vain costs a read.
type supports struct{ sync.Map }

func (s *supports) add(r routeReply) {
	if r.route.Dst.IsSingleIP() {
		return
	}
	if r.oif != 0 {
		s.Store(r.oif, nil)
	}
	if r.source.IsValid() {
		s.Store(r.source, nil)
	}
}

func (s *supports) hasDevice(index int) bool {
	_, ok := s.Load(index)
	return ok
}

func (s *supports) hasSource(a netip.Addr) bool {
	_, ok := s.Load(a)
	return ok
}

// link is what identifies a device, and its flags (IFF_*).
type link struct {
	name  string
	flags uint32
}

// resolves reports whether the gateway of a route decides which host on l gets a packet.
func (l link) resolves() bool {
	return l.flags&(unix.IFF_NOARP|unix.IFF_POINTOPOINT|unix.IFF_LOOPBACK) == 0
}

// linkName returns the name of the device with the given index; "" if it is
// gone, or index is 0.
func (k *Kernel) linkName(index int) (string, error) {
	l, err := k.link(index)
	return l.name, err
}

// link returns the device with the given index; the zero link if it is gone, or index is 0.
func (k *Kernel) link(index int) (l link, err error) {
	if index == 0 {
		return link{}, nil
	}
	err = k.sock.ask(func(m *message) {
		m.begin(unix.RTM_GETLINK, 0, ifinfomsg(index)...)
		m.attr32(unix.IFLA_EXT_MASK, rtextFilterSkipStats)
	}, func(_ uint16, payload []byte) {
		if len(payload) < unix.SizeofIfInfomsg {
			return
		}
		l.flags = linkFlags(payload)
		for a := range attributes(payload[unix.SizeofIfInfomsg:]) {
			if a.typ == unix.IFLA_IFNAME {
				l.name = unix.ByteSliceToString(a.data)
			}
		}
	})
	if errors.Is(err, unix.ENODEV) {
		return link{}, nil
	}
	if err != nil {
		return link{}, fmt.Errorf("look up link %d: %w", index, err)
	}
	return l, nil
}

// linkFlags returns the flags in a message with at least a struct ifinfomsg.
func linkFlags(payload []byte) uint32 { return binary.NativeEndian.Uint32(payload[8:]) }

// rtextFilterSkipStats leaves counters out of link messages (RTEXT_FILTER_SKIP_STATS).
const rtextFilterSkipStats = 1 << 3
