// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// batch is how many rtnetlink messages one datagram contains. Above about twenty, the
// number makes no difference.
const batch = 200

// writeLimit writes the kernel objects of peers as fast as the kernel accepts them:
// messages of one kind after another, many in a datagram, with one acknowledgement
// per datagram. No program that writes these objects can be faster. cpu is the CPU
// time of the calling thread, which must be locked.
func writeLimit(ifindex int, peers []peer, kinds objects) (took, cpu time.Duration, err error) {
	start := time.Now()
	startCPU := threadCPU()
	r, err := openRTNL()
	if err != nil {
		return 0, 0, err
	}
	defer r.close()
	each := func(build func(p peer)) {
		if err == nil {
			err = r.each(peers, build)
		}
	}

	var flags uint32
	if kinds.onLink {
		flags = unix.RTNH_F_ONLINK
	}
	if kinds.vtep {
		each(func(p peer) { r.putNeigh(ifindex, p.gateway(kinds), p.mac) })
		each(func(p peer) { r.putFDB(ifindex, p.mac, p.ip) })
	}
	if kinds.nexthop {
		each(func(p peer) { r.addNexthop(p.nexthop(), ifindex, p.gateway(kinds), flags) })
		each(func(p peer) { r.putRouteByID(p.subnet, p.nexthop(), 0) })
	} else {
		each(func(p peer) { r.putRoute(p.subnet, ifindex, p.gateway(kinds), flags) })
	}
	if err != nil {
		return 0, 0, fmt.Errorf("write the limit: %w", err)
	}
	return time.Since(start), threadCPU() - startCPU, nil
}

// each calls build for each peer, which adds messages, and sends them in datagrams of
// batch peers.
func (r *rtnl) each(peers []peer, build func(p peer)) error {
	for some := range slices.Chunk(peers, batch) {
		for _, p := range some {
			build(p)
		}
		if err := r.flush(); err != nil {
			return err
		}
	}
	return nil
}

func threadCPU() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
