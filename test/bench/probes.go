// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/flanneld/flanneld/test/must"
)

// probing is what an idle daemon uses per second.
type probing struct {
	cpu     float64 // CPU time, in percent of a CPU
	packets float64 // number of packets that the host sends
}

// measureProbes compares an idle daemon that probes the paths to all peers with an
// idle one that does not. Host 2 answers in place of the peers.
func (r *runner) measureProbes(ctx context.Context) {
	const group = "host-gw, probes of the paths"
	n := r.large
	for range max(1, r.rounds/3) {
		without := r.probesRound(ctx)
		with := r.probesRound(ctx, "--probe")
		r.report.add(group, "CPU without probes", n, "%", without.cpu)
		r.report.add(group, "CPU with --probe", n, "%", with.cpu)
		r.report.add(group, "CPU of the probes", n, "%", max(0, with.cpu-without.cpu), 0.5)
		r.report.add(group, "packets sent a second by the probes", n, "", max(0, with.packets-without.packets), 10)
	}
}

func (r *runner) probesRound(ctx context.Context, args ...string) probing {
	h := r.lab.Host(1)
	r.clean(ctx, r.lab.Host(2))
	d := r.fresh(ctx, "host-gw", r.large, args...).daemon
	r.answerForPeers(ctx, true)
	defer r.answerForPeers(ctx, false)
	pause(ctx, afterStart)
	before := eth0(ctx, h).Statistics.TxPackets
	cpu, _ := idle(ctx, r.lab.Host(2), d, r.atRest)
	sent := eth0(ctx, h).Statistics.TxPackets - before
	if len(args) > 0 { // all peers must answer, because one that does not costs more probes
		if broken := figure(metrics(ctx, d), "flannel_unreachable_peers"); broken > 0 {
			must.Fail("%.0f peers are unreachable, want none", broken)
		}
	}
	return probing{100 * cpu.Seconds() / r.atRest.Seconds(), float64(sent) / r.atRest.Seconds()}
}
