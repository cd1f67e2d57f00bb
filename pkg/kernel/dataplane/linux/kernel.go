// SPDX-License-Identifier: Apache-2.0

// Package linux implements dataplane.Kernel with rtnetlink.
package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Kernel is the kernel of the network namespace in which it was opened. Its methods may be
// called concurrently. To create or change a link, the caller must call Apply on a thread in
// that namespace, because Apply then also writes a setting in /proc/sys, which shows each
// thread the settings of its own namespace. Monitor must be called on such a thread as well.
type Kernel struct {
	sock         *socket
	buffers      *Buffers
	links        *netlink.Handle
	nexthops     nexthops
	dependencies routeDependencies
}

var _ dataplane.Kernel = (*Kernel)(nil)

// Options configure how a Kernel is used.
type Options struct {
	// NexthopObjects makes IPv4 routes use nexthop objects if a device has many routes
	// and the kernel supports such objects.
	NexthopObjects bool
	// Buffers may be shared with other Kernels. If Buffers is nil, the Kernel has its own.
	Buffers *Buffers
}

// Open returns the kernel of the calling thread's network namespace. It returns an error on
// Linux before 4.20. Changes need CAP_NET_ADMIN; without it Apply fails with EPERM.
func Open(o Options) (*Kernel, error) {
	if o.Buffers == nil {
		o.Buffers = &Buffers{}
	}

	sock, err := openSocket(o.Buffers)
	if err != nil {
		return nil, err
	}
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("open rtnetlink socket: %w", err), sock.close())
	}
	k := &Kernel{sock: sock, buffers: o.Buffers, links: links}
	k.nexthops.enabled = o.NexthopObjects
	k.nexthops.threshold = nexthopThreshold
	k.nexthops.linger = nexthopLinger
	k.nexthops.reset()
	return k, nil
}

// Close closes the sockets of k.
func (k *Kernel) Close() error {
	k.links.Close()
	return k.sock.close()
}

// OnLink implements dataplane.Kernel.
func (k *Kernel) OnLink(_ context.Context, dst netip.Addr, external string) (string, error) {
	r, err := k.lookup(dst)
	for _, none := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EINVAL, unix.EACCES} { // the last two: blackhole, prohibit
		if errors.Is(err, none) {
			return "", nil
		}
	}
	if err != nil {
		return "", err
	}
	if r.route.Type != dataplane.Unicast || r.route.Gateway.IsValid() || r.route.Multipath || !dataplane.IsNetwork(r.route.Dst) {
		return "", nil
	}

	l, err := k.link(r.oif)
	connected := r.route.Protocol == unix.RTPROT_KERNEL || r.route.Protocol == unix.RTPROT_RA
	if !l.resolves() || l.name != external && !connected {
		return "", err
	}
	return l.name, err
}

// lookup returns the route that packets from this host to dst take, as it is in the routing table. The
// destination of a default route is invalid.
func (k *Kernel) lookup(dst netip.Addr) (r routeReply, err error) {
	err = k.sock.ask(func(m *message) {
		m.begin(unix.RTM_GETROUTE, 0, rtmsg(prefix.Host(dst), 0, 0, 0, 0, 0, unix.RTM_F_FIB_MATCH)...)
		m.addr(unix.RTA_DST, dst)
	}, func(_ uint16, payload []byte) { r = parseRoute(payload) })
	if err != nil {
		return r, fmt.Errorf("look up route to %s: %w", dst, err)
	}
	return r, nil
}

// routeDependencies contains the devices, by index, and the source addresses that known routes depend
// on. If one of them goes, the kernel may delete the routes without an announcement. Entries are never
// removed: a host has few devices and addresses, and an unnecessary entry only costs a read.
type routeDependencies struct{ sync.Map }

func (d *routeDependencies) add(r routeReply) {
	if r.route.Dst.IsSingleIP() { // usually a pod: these come and go, and losing such a route does no harm
		return
	}
	if r.oif != 0 {
		d.Store(r.oif, nil)
	}
	if r.source.IsValid() {
		d.Store(r.source, nil)
	}
}

// has takes the index of a device or a source address.
func (d *routeDependencies) has(key any) bool {
	_, ok := d.Load(key)
	return ok
}

// link contains the name of a device and its flags (IFF_*).
type link struct {
	name  string
	flags uint32
}

// resolves reports whether the gateway of a route through the device decides which host gets a packet.
func (l link) resolves() bool {
	return l.flags&(unix.IFF_NOARP|unix.IFF_POINTOPOINT|unix.IFF_LOOPBACK) == 0
}

// linkName returns "" if the device does not exist or index is 0.
func (k *Kernel) linkName(index int) (string, error) {
	l, err := k.link(index)
	return l.name, err
}

// link returns the zero link if the device does not exist or index is 0.
func (k *Kernel) link(index int) (l link, err error) {
	if index == 0 {
		return link{}, nil
	}

	err = k.sock.ask(func(m *message) {
		m.begin(unix.RTM_GETLINK, 0, ifinfomsg(index)...)
		m.attr32(unix.IFLA_EXT_MASK, rtextFilterSkipStats)
	}, func(_ uint16, payload []byte) {
		if len(payload) >= unix.SizeofIfInfomsg {
			details, _ := newLinkDetails(payload)
			l = link{details.name, linkFlags(payload)}
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

// rtextFilterSkipStats (RTEXT_FILTER_SKIP_STATS) makes the kernel leave the counters out
// of link messages.
const rtextFilterSkipStats = 1 << 3
