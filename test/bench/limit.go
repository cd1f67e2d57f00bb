// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// batch is how many rtnetlink messages one datagram contains. Above about twenty, the
// number makes no difference.
const batch = 200

// writeLimit writes the kernel objects of peers as fast as the kernel accepts them:
// messages of one kind after another, many in a datagram, with one acknowledgement
// per datagram. No program that writes these objects can be faster. cpu is the CPU
// time of the calling thread, which must be locked.
func writeLimit(ifindex int, peers []peer, kinds objects) (took, cpu time.Duration) {
	start := time.Now()
	startCPU := threadCPU()
	r := openRTNL()
	defer r.close()
	each := func(build func(p peer)) { inBatches(r, peers, build) }

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
		each(func(p peer) { r.putRouteByID(p.subnet, p.nexthop()) })
	} else {
		each(func(p peer) { r.putRoute(p.subnet, ifindex, p.gateway(kinds), flags) })
	}
	return time.Since(start), threadCPU() - startCPU
}

// inBatches calls build for each element, which adds one message, and sends them in datagrams of
// batch messages.
func inBatches[T any](r *rtnl, elements []T, build func(T)) {
	for some := range slices.Chunk(elements, batch) {
		for _, one := range some {
			build(one)
		}
		r.flush()
	}
}

func threadCPU() time.Duration {
	var ts unix.Timespec
	must.Do(unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}
