// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// start is the result of one start of the daemon.
type start struct {
	file   time.Duration // from exec to subnet.env
	all    time.Duration // from exec until all objects exist
	cpu    time.Duration // CPU time of the process, until all objects exist
	peak   float64       // largest RSS in bytes, until all objects exist
	daemon *lab.Daemon
}

// pollEvery is the pause of the observer between two polls. A poll takes microseconds.
const pollEvery = 300 * time.Microsecond

// samples is how many routes the observer checks before it counts all objects. A daemon
// writes routes last, because they need the other objects, and in no particular order.
// So when the routes of all samples exist, on average one in a hundred routes is still
// missing. With five times as many samples, the checks would add two milliseconds to the
// measured time.
const samples = 100

func (b *bed) begin(ctx context.Context, o lab.FlanneldOptions) (s start) {
	h := b.lab.Host(1)
	began := time.Now()
	s.daemon = must.Get(h.StartFlanneld(ctx, o))
	b.observe(ctx, h, began, &s)
	s.cpu = figures.ProcessCPU(s.daemon.PID())
	s.peak = figures.ProcessMemory(s.daemon.PID()).Peak
	return s
}

// observe polls for subnet.env and for the routes of a sample of the peers, and then
// counts all objects. It returns when the file and all objects exist, and sets s.file
// and s.all to the time that this took since began.
func (b *bed) observe(ctx context.Context, h *lab.Host, began time.Time, s *start) {
	sample := 0
	last := min(samples, len(b.peers))
	file := h.Path(lab.SubnetFile)
	withRTNL(ctx, h, func(r *rtnl) {
		for ; s.all == 0 || s.file == 0; nap() {
			if ctx.Err() != nil {
				must.Fail("wait for flanneld to program %d peers: %w: %s", len(b.peers), context.Cause(ctx), s.daemon.Log())
			}
			must.Do(s.daemon.Ended())
			if s.file == 0 {
				if _, err := os.Stat(file); err == nil {
					s.file = time.Since(began)
				}
			}

			for sample < last && r.hasRoute(b.peers[sample*(len(b.peers)-1)/max(1, last-1)].subnet) {
				sample++
			}
			if s.all == 0 && sample == last {
				now := time.Since(began) // taken before the count, which itself takes ten milliseconds
				if b.complete(r) {
					s.all = now
				}
			}
		}
	})
}

// nap makes the calling thread pause between two polls. It takes less time to wake up than a timer of Go.
func nap() {
	every := unix.NsecToTimespec(int64(pollEvery))
	_ = unix.Nanosleep(&every, nil)
}

func (b *bed) complete(r *rtnl) bool {
	link, err := net.InterfaceByName(b.device())
	if err != nil {
		return false
	}
	want := len(b.peers)
	if b.backend == "vxlan" {
		for _, family := range []uint8{unix.AF_INET, unix.AF_BRIDGE} {
			n := 0
			r.dumpNeighs(family, link.Index, func(netip.Addr, [6]byte) { n++ })
			if n < want {
				return false
			}
		}
	}

	pods := netip.MustParsePrefix(podNetwork)
	n := 0
	r.dumpRoutes(link.Index, func(dst netip.Prefix, _ kernelRoute) {
		if dst.Bits() == 24 && pods.Contains(dst.Addr()) {
			n++
		}
	})
	return n >= want
}
