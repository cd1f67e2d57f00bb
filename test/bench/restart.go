// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// restarted is the result of one restart.
type restarted struct {
	ready  time.Duration // from exec to /readyz
	writes int           // kernel announcements that the restart caused
	lost   int           // number of lost packets of a flow with a thousand packets per second
	sent   int
}

// restart ends the daemon on host 1, by SIGKILL if kill is true and otherwise by
// SIGTERM, and starts it again. Meanwhile the pod from sends a flow of packets to the
// pod to, which is on host 2.
func (b *bed) restart(ctx context.Context, from, to *lab.Pod, kill bool) (s restarted) {
	h := b.lab.Host(1)
	flow := must.Get(from.StartFlow(ctx, to, prefix.IPv4, 1000))
	defer func() {
		stats := flow.Stop()
		s.lost = len(stats.Lost)
		s.sent = stats.Sent
	}()

	count := b.countWrites(ctx, h)
	if kill {
		h.Daemon().Kill()
	} else {
		must.Get(h.Daemon().Stop(ctx))
	}

	began := time.Now()
	untilReady(ctx, must.Get(h.StartFlanneld(ctx, lab.FlanneldOptions{})))
	s.ready = time.Since(began)
	pause(ctx, 500*time.Millisecond) // late packets and announcements arrive meanwhile
	s.writes = count()
	return s
}

func untilReady(ctx context.Context, d *lab.Daemon) {
	for {
		if _, _, err := d.Get(ctx, "/readyz"); err == nil {
			return
		}
		must.Do(d.Ended())
		if err := wait.For(ctx, 2*time.Millisecond); err != nil {
			must.Fail("wait for flanneld to be ready: %w: %s", err, d.Log())
		}
	}
}

// countWrites subscribes to the kernel's announcements on host about links, addresses,
// nexthop objects, routes to pods, and neighbour and FDB entries of the daemon's
// device. count returns how many there were, and ends the subscription.
func (b *bed) countWrites(ctx context.Context, host *lab.Host) (count func() int) {
	var r *rtnl
	var device int
	inside(ctx, host.Namespace, func() {
		device = link(b.device()).Index
		r = openRTNL(unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_IFADDR, rtnlgrpNexthop)
	})
	pods := netip.MustParsePrefix(podNetwork)
	return func() (n int) {
		defer r.close()
		must.Do(unix.SetNonblock(r.fd, true))

		for {
			err := r.receive(func(typ uint16, _ uint32, payload []byte) {
				switch typ {
				case unix.RTM_NEWLINK, unix.RTM_DELLINK: // not those of a bridge, which announces changes of its ports at any time
					if payload[0] != unix.AF_BRIDGE {
						n++
					}

				case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH: // only those of the daemon's device, because the kernel resolves pods and hosts on others all the time
					if parseNeigh(payload).ifindex == device {
						n++
					}

				case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
					attrs(payload[unix.SizeofRtMsg:], func(typ uint16, data []byte) {
						if dst, ok := netip.AddrFromSlice(data); ok && typ == unix.RTA_DST && pods.Contains(dst) {
							n++
						}
					})
				default:
					n++
				}
			})
			if errors.Is(err, unix.EAGAIN) {
				return n
			}
			must.Do(err)
		}
	}
}
