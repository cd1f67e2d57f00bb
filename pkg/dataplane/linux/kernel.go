// Package linux is the rtnetlink implementation of dataplane.Kernel.
package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/oneline"
)

// Kernel is the kernel of the network namespace in which it was opened. Its
// methods may be called concurrently. Links must be made from a thread in that
// namespace: /proc/sys shows each thread the settings of its own.
type Kernel struct {
	sock     *socket
	links    *netlink.Handle
	nexthops nexthops
	exits    exits
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
	err := k.sock.ask(func(m *message) {
		m.begin(unix.RTM_GETROUTE, 0, rtmsg(netip.PrefixFrom(dst, dst.BitLen()), 0, 0, 0, 0, 0, 0)...)
		m.addr(unix.RTA_DST, dst)
	}, func(_ uint16, payload []byte) { r = parseRoute(payload) })
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH),
		errors.Is(err, unix.EINVAL), errors.Is(err, unix.EACCES): // blackhole, prohibit
		return "", nil
	case err != nil:
		return "", fmt.Errorf("look up route to %s: %w", dst, err)
	}
	if r.route.Type != dataplane.Unicast || r.route.Gateway.IsValid() || r.route.Multipath || r.oif == 0 {
		return "", nil
	}
	return k.linkName(r.oif)
}

// exits are the indexes of devices that routes in a scope leave by, as far as we have
// read, heard of or made these. When such a device goes down, IPv4 routes go without a
// word. Those to one address alone are a pod's: it does no harm not to know that they
// are gone, and pods come and go.
type exits struct{ sync.Map }

func (e *exits) add(r routeReply) {
	if r.oif != 0 && r.route.Dst.Addr().Is4() && !r.route.Dst.IsSingleIP() {
		e.Store(r.oif, nil)
	}
}

func (e *exits) has(index int) bool {
	_, ok := e.Load(index)
	return ok
}

// linkName returns the name of the device with the given index; "" if it is
// gone, or index is 0.
func (k *Kernel) linkName(index int) (string, error) {
	if index == 0 {
		return "", nil
	}
	var name string
	err := k.sock.ask(func(m *message) {
		m.begin(unix.RTM_GETLINK, 0, ifinfomsg(index)...)
		m.attr32(unix.IFLA_EXT_MASK, rtextFilterSkipStats)
	}, func(_ uint16, payload []byte) {
		if len(payload) < unix.SizeofIfInfomsg {
			return
		}
		for a := range attributes(payload[unix.SizeofIfInfomsg:]) {
			if a.typ == unix.IFLA_IFNAME {
				name = unix.ByteSliceToString(a.data)
			}
		}
	})
	if errors.Is(err, unix.ENODEV) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look up link %d: %w", index, err)
	}
	return name, nil
}

// rtextFilterSkipStats leaves counters out of link messages (RTEXT_FILTER_SKIP_STATS).
const rtextFilterSkipStats = 1 << 3
