// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

const (
	// probePause is the pause of the daemon between two probes in a migration. See
	// backend/migration.
	probePause = 2 * time.Millisecond
	// standbyMetric is the metric that the daemon gives a route that stands by.
	standbyMetric = 1 << 20
	// peerSubnets contains the subnets of all peers, but not those of daemons.
	peerSubnets = "10.128.0.0/10"
	// daemonSubnets contains the subnets of daemons.
	daemonSubnets = ownSubnets + "/12"
)

// migrated is the cost of a migration on the host that migrates.
type migrated struct {
	took    time.Duration // from the new configuration to the last changed route
	cpu     time.Duration // of the daemon, until then
	changes int           // number of announced changes in the kernel, until then
	endCPU  time.Duration // CPU time of the daemon from then on, until a second after the former device is gone
}

// measureMigration measures the migration of one host from vxlan to host-gw. All of its peers have
// published data for both backends, and host 2 answers the probes in their place.
func (r *runner) measureMigration(ctx context.Context) {
	const group = "vxlan to host-gw, migration of one host"
	n := r.large
	for range max(1, r.rounds/3) { // a round takes half a minute, because of the pauses
		r.clean(ctx, r.lab.Host(1))
		r.configure(ctx, "vxlan", n)
		m := r.migrationRound(ctx)
		pauses := time.Duration(n) * probePause
		// A peer needs a nexthop object and three changes of routes: one that stands by, the best one changed to
		// host-gw, and vxlan's in its place.
		least := float64(4 * n)
		r.report.add(group, "configuration written to all peers changed", n, "ms", ms(m.took))
		r.report.add(group, "pauses between probes", n, "ms", ms(pauses))
		r.report.add(group, "configuration written to all peers changed / pauses", n, "×", float64(m.took)/float64(pauses), 1.5)
		r.report.add(group, "CPU until all peers changed", n, "ms", ms(m.cpu))
		r.report.add(group, "CPU until all peers changed, for each peer", n, "ms", ms(m.cpu)/float64(n))
		r.report.add(group, "kernel changes announced", n, "", float64(m.changes))
		r.report.add(group, "kernel changes announced / least", n, "×", float64(m.changes)/least, 1.25)
		r.report.add(group, "CPU of the end", n, "ms", ms(m.endCPU))
	}
}

func (r *runner) migrationRound(ctx context.Context) (m migrated) {
	h := r.lab.Host(1)
	r.clean(ctx, r.lab.Host(2))
	d := r.fresh(ctx, "vxlan", r.large).daemon
	r.answerForPeers(ctx, true)
	defer r.answerForPeers(ctx, false)
	r.putLeases(ctx, r.peers, "vxlan", "host-gw")
	pause(ctx, afterStart)
	count := r.countWrites(ctx, h)
	r.backend = "" // the next configure must write everything again

	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, errors.New("the migration has not ended after ten minutes"))
	defer cancel()
	hostGW := map[string]any{"Type": "host-gw"}
	began := time.Now()
	m.cpu = spent(figures.ProcessCPU, d.PID(), func() {
		r.putConfig(ctx, map[string]any{"Type": "vxlan"}, hostGW)
		for carriedByHostGW(ctx, h) < len(r.peers) {
			pause(ctx, 100*time.Millisecond)
		}
	})
	m.took = time.Since(began)
	m.changes = count()

	m.endCPU = spent(figures.ProcessCPU, d.PID(), func() {
		r.putConfig(ctx, hostGW, nil)
		r.putLeases(ctx, r.peers, "host-gw", "")
		for hasDevice(ctx, h, "flannel.1") {
			pause(ctx, 100*time.Millisecond)
		}
		pause(ctx, time.Second)
	})
	return m
}

func hasDevice(ctx context.Context, h *lab.Host, name string) bool {
	return must.Catch(func() { inside(ctx, h.Namespace, func() { link(name) }) }) == nil
}

// carriedByHostGW returns the number of peers to which packets leave h directly.
func carriedByHostGW(ctx context.Context, h *lab.Host) (n int) {
	pods := netip.MustParsePrefix(podNetwork)
	withRTNL(ctx, h, func(r *rtnl) {
		r.dumpRoutes(link("eth0").Index, func(dst netip.Prefix, one kernelRoute) {
			if pods.Contains(dst.Addr()) && one.metric < standbyMetric {
				n++
			}
		})
	})
	return n
}

// answerForPeers makes host 2 answer in place of all peers. It gives host 1 a permanent neighbour
// for each peer, because the kernel itself resolves only about a thousand. If answer is false,
// answerForPeers undoes this.
func (b *bed) answerForPeers(ctx context.Context, answer bool) {
	first := b.lab.Host(1)
	second := b.lab.Host(2)
	script := fmt.Sprintf("ip route add local %[1]s dev lo && ip route add local %[2]s dev lo && ip route add %[3]s via %[4]s",
		peerSubnets, peerNetwork, daemonSubnets, first.Addr(prefix.IPv4))
	if !answer {
		script = strings.ReplaceAll(script, "route add", "route del")
	}
	must.Get(second.Exec(ctx, "sh", "-c", script))
	mac := [6]byte(eth0(ctx, second).HardwareAddr)
	withRTNL(ctx, first, func(r *rtnl) {
		device := link("eth0").Index
		inBatches(r, b.peers, func(p peer) {
			if answer {
				r.putNeigh(device, p.ip, mac)
			} else {
				r.delNeigh(device, p.ip)
			}
		})
	})
}
