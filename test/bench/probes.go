// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

// probing is what an idle daemon uses per second.
type probing struct {
	cpu     float64 // CPU time, in percent of a CPU
	packets float64 // number of packets that the host sends
}

// measureProbes compares an idle daemon that probes the paths to all peers with an
// idle one that does not. Host 2 answers in place of the peers.
func (r *runner) measureProbes(ctx context.Context) error {
	const group = "host-gw, probes of the paths"
	n := r.large
	for range max(1, r.rounds/3) {
		without, err := r.probesRound(ctx)
		if err != nil {
			return err
		}
		with, err := r.probesRound(ctx, "--probe")
		if err != nil {
			return err
		}
		r.report.add(group, "CPU without probes", n, "%", without.cpu)
		r.report.add(group, "CPU with --probe", n, "%", with.cpu)
		r.report.add(group, "CPU of the probes", n, "%", max(0, with.cpu-without.cpu), 0.5)
		r.report.add(group, "packets sent a second by the probes", n, "", max(0, with.packets-without.packets), 10)
	}
	return nil
}

func (r *runner) probesRound(ctx context.Context, args ...string) (p probing, err error) {
	h := r.lab.Host(1)
	for _, one := range r.lab.Hosts() {
		if err := r.clean(ctx, one); err != nil {
			return p, err
		}
	}
	if err := r.configure(ctx, "host-gw", r.large); err != nil {
		return p, err
	}
	s, err := r.fresh(ctx, args...)
	if err != nil {
		return p, err
	}
	if err := r.answerForPeers(ctx, true); err != nil {
		return p, err
	}
	defer func() {
		if failed := r.answerForPeers(ctx, false); err == nil {
			err = failed
		}
	}()
	if err := wait.For(ctx, afterStart); err != nil {
		return p, err
	}
	before, err := sentBy(ctx, h)
	if err != nil {
		return p, err
	}
	cpu, _, err := idle(ctx, r.lab.Host(2), s.daemon, r.atRest)
	if err != nil {
		return p, err
	}
	after, err := sentBy(ctx, h)
	if err != nil {
		return p, err
	}
	if len(args) > 0 { // all peers must answer, because one that does not costs more probes
		_, page, err := s.daemon.Get(ctx, "/metrics")
		if err != nil {
			return p, err
		}
		broken, err := figure(page, "flannel_unreachable_peers")
		if err != nil {
			return p, err
		}
		if broken > 0 {
			return p, fmt.Errorf("%.0f peers are unreachable, want none", broken)
		}
	}
	return probing{100 * cpu.Seconds() / r.atRest.Seconds(), float64(after-before) * float64(time.Second) / float64(r.atRest)}, nil
}

// sentBy returns the number of packets that eth0 of a host has sent.
func sentBy(ctx context.Context, h *lab.Host) (packets uint64, err error) {
	err = h.Netlink(ctx, func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("eth0")
		if err == nil {
			packets = link.Attrs().Statistics.TxPackets
		}
		return err
	})
	return packets, err
}
