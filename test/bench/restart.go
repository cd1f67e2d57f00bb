// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
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
func (b *bed) restart(ctx context.Context, from, to *lab.Pod, kill bool) (s restarted, err error) {
	h := b.lab.Host(1)
	flow, err := from.StartFlow(ctx, to, prefix.IPv4, 1000)
	if err != nil {
		return s, err
	}
	defer func() {
		stats := flow.Stop()
		s.lost = len(stats.Lost)
		s.sent = stats.Sent
	}()

	count, err := b.countWrites(ctx, h)
	if err != nil {
		return s, err
	}
	if kill {
		h.Daemon().Kill()
	} else if _, err := h.Daemon().Stop(ctx); err != nil {
		return s, err
	}

	began := time.Now()
	d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{})
	if err != nil {
		return s, err
	}
	if err := untilReady(ctx, d); err != nil {
		return s, err
	}
	s.ready = time.Since(began)
	if err := wait.For(ctx, 500*time.Millisecond); err != nil { // late packets and announcements arrive meanwhile
		return s, err
	}
	s.writes, err = count()
	return s, err
}

func untilReady(ctx context.Context, d *lab.Daemon) error {
	for {
		if _, _, err := d.Get(ctx, "/readyz"); err == nil {
			return nil
		}
		if err := d.Ended(); err != nil {
			return err
		}
		if err := wait.For(ctx, 2*time.Millisecond); err != nil {
			return fmt.Errorf("wait for flanneld to be ready: %w: %s", err, d.Log())
		}
	}
}

// countWrites subscribes to the kernel's announcements on host about links, addresses,
// nexthop objects, routes to pods, and neighbour and FDB entries of the daemon's
// device. count returns how many there were, and ends the subscription.
func (b *bed) countWrites(ctx context.Context, host *lab.Host) (count func() (int, error), err error) {
	var r *rtnl
	var device int
	err = host.Do(ctx, func() error {
		link, err := net.InterfaceByName(b.device())
		if err != nil {
			return err
		}
		device = link.Index
		r, err = openRTNL(unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_IFADDR, rtnlgrpNexthop)
		return err
	})
	if err != nil {
		return nil, err
	}
	pods := netip.MustParsePrefix(podNetwork)
	return func() (n int, err error) {
		defer r.close()
		if err := unix.SetNonblock(r.fd, true); err != nil {
			return 0, err
		}

		for {
			err := r.receive(func(typ uint16, _ uint32, payload []byte) error {
				switch typ {
				case unix.RTM_NEWLINK, unix.RTM_DELLINK: // not those of a bridge, which announces changes of its ports at any time
					if payload[0] != unix.AF_BRIDGE {
						n++
					}

				case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH: // only those of the daemon's device, because the kernel resolves pods and hosts on others all the time
					if int(binary.NativeEndian.Uint32(payload[4:])) == device {
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
				return nil
			})
			if errors.Is(err, unix.EAGAIN) {
				return n, nil
			}
			if err != nil {
				return n, fmt.Errorf("count kernel changes: %w", err)
			}
		}
	}, nil
}
