// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
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

// begin starts the daemon on host 1 and waits until the kernel has all objects of the
// peers.
func (b *bed) begin(ctx context.Context, args ...string) (s start, err error) {
	h := b.lab.Host(1)
	began := time.Now()
	if s.daemon, err = h.StartFlanneld(ctx, lab.FlanneldOptions{Args: args}); err != nil {
		return s, err
	}
	return s, b.follow(ctx, h, began, &s)
}

// follow waits until the kernel of h has all objects of the peers. It records in s how
// long that took since began, and what s.daemon has used until then.
func (b *bed) follow(ctx context.Context, h *lab.Host, began time.Time, s *start) error {
	err := h.Do(ctx, func() error { return b.observe(ctx, h, began, s) })
	if err != nil {
		return err
	}
	if s.cpu, err = figures.ProcessCPU(s.daemon.PID()); err != nil {
		return err
	}
	m, err := figures.ProcessMemory(s.daemon.PID())
	s.peak = m.Peak
	return err
}

// observe polls for subnet.env and for the routes of a sample of the peers, and then
// counts all objects. It returns when the file and all objects exist, and sets s.file
// and s.all. It must run on a locked thread in the host's namespace.
func (b *bed) observe(ctx context.Context, h *lab.Host, began time.Time, s *start) error {
	r, err := openRTNL()
	if err != nil {
		return err
	}
	defer r.close()
	sample := 0
	file := h.Path(lab.SubnetFile)
	every := unix.NsecToTimespec(int64(pollEvery))
	for s.all == 0 || s.file == 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("wait for flanneld to program %d peers: %w: %s", len(b.peers), context.Cause(ctx), s.daemon.Log())
		}
		if err := s.daemon.Ended(); err != nil {
			return err
		}
		if s.file == 0 {
			if _, err := os.Stat(file); err == nil {
				s.file = time.Since(began)
			}
		}

		for s.all == 0 && sample < min(samples, len(b.peers)) {
			found, err := r.hasRoute(b.peers[sample*(len(b.peers)-1)/max(1, min(samples, len(b.peers))-1)].subnet)
			if err != nil {
				return err
			}
			if !found {
				break
			}
			sample++
		}
		if s.all == 0 && sample == min(samples, len(b.peers)) {
			now := time.Since(began) // taken before the count, which itself takes ten milliseconds
			all, err := b.complete(r)
			if err != nil {
				return err
			}
			if all {
				s.all = now
				continue
			}
		}
		_ = unix.Nanosleep(&every, nil)
	}
	return nil
}

// complete reports whether the kernel has at least as many entries of each kind as the
// peers need.
func (b *bed) complete(r *rtnl) (bool, error) {
	link, err := net.InterfaceByName(b.device())
	if err != nil {
		return false, nil
	}
	want := len(b.peers)
	if b.backend == "vxlan" {
		for _, family := range []uint8{unix.AF_INET, unix.AF_BRIDGE} {
			n := 0
			if err := r.dumpNeighs(family, link.Index, func(netip.Addr, [6]byte) { n++ }); err != nil || n < want {
				return false, err
			}
		}
	}

	pods := netip.MustParsePrefix(podNetwork)
	n := 0
	err = r.dumpRoutes(link.Index, func(dst netip.Prefix, _ netip.Addr) {
		if dst.Bits() == 24 && pods.Contains(dst.Addr()) {
			n++
		}
	})
	return n >= want, err
}
