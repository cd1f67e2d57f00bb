// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/figures"
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
	changes int           // number of announced changes of routes and nexthop objects, until then
	endCPU  time.Duration // CPU time of the daemon from then on, until a second after the former device is gone
	without int           // how often a peer had no route, until the end
}

// measureMigration measures the migration of one host from vxlan to host-gw. All of its peers have
// published data for both backends, and host 2 answers the probes in their place.
func (r *runner) measureMigration(ctx context.Context) {
	const group = "vxlan to host-gw, migration of one host"
	n := r.large
	for range max(1, r.rounds/3) { // a round takes half a minute, because of the pauses
		r.clean(ctx, r.lab.Host(1))
		r.configure(ctx, "vxlan", n)
		limit, limitCPU := r.migrationLimit(ctx)
		limitChanges := 4 * n // those of migrationLimit
		m := r.migrationRound(ctx)
		pauses := time.Duration(n) * probePause
		r.report.add(group, "configuration written to all peers changed", n, "ms", ms(m.took))
		r.report.add(group, "pauses between probes", n, "ms", ms(pauses))
		r.report.add(group, "configuration written to all peers changed / pauses", n, "×", float64(m.took)/float64(pauses), 1.5)
		r.report.add(group, "limit: pipelined, nexthop objects", n, "ms", ms(limit))
		r.report.add(group, "CPU until all peers changed", n, "ms", ms(m.cpu))
		r.report.add(group, "limit: CPU", n, "ms", ms(limitCPU))
		r.report.add(group, "CPU until all peers changed, for each peer", n, "ms", ms(m.cpu)/float64(n))
		r.report.add(group, "kernel changes announced", n, "", float64(m.changes))
		r.report.add(group, "limit: kernel changes announced", n, "", float64(limitChanges))
		r.report.add(group, "kernel changes announced / limit", n, "×", float64(m.changes)/float64(limitChanges), 1.25)
		r.report.add(group, "CPU of the end", n, "ms", ms(m.endCPU))
		r.report.add(group, "peers without a route at any moment", n, "", float64(m.without), 0)
	}
}

// migrationRound starts a daemon with vxlan, migrates it to host-gw, and ends the migration.
func (r *runner) migrationRound(ctx context.Context) (m migrated) {
	h := r.lab.Host(1)
	r.clean(ctx, r.lab.Host(2))
	d := r.fresh(ctx, "vxlan", r.large).daemon
	r.backend = "" // the next configure must write everything again
	r.answerForPeers(ctx, true)
	defer r.answerForPeers(ctx, false)
	r.putLeases(ctx, r.peers, "vxlan", "host-gw")
	pause(ctx, afterStart)
	w := watchRoutes(ctx, h, r.peers)
	defer w.close()
	limited, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	device := uint32(eth0(ctx, h).Index)
	hostGW := map[string]any{"Type": "host-gw"}
	began := time.Now()
	m.cpu = spent(figures.ProcessCPU, d.PID(), func() {
		r.putConfig(ctx, map[string]any{"Type": "vxlan"}, hostGW)
		w.until(limited, func() bool { return w.best[device] == len(r.peers) })
	})
	m.took = time.Since(began)
	m.changes = w.changes
	m.endCPU = spent(figures.ProcessCPU, d.PID(), func() { r.endMigration(limited, w, hostGW) })
	m.without = w.without
	return m
}

// endMigration ends the migration: it makes host-gw the only backend in the configuration and in the
// leases of all peers. It waits until the former device of host 1 is gone. Then it compares the
// routes that w has followed with the kernel's.
func (r *runner) endMigration(ctx context.Context, w *routeWatch, backend map[string]any) {
	r.putConfig(ctx, backend, nil)
	r.putLeases(ctx, r.peers, "host-gw", "")
	w.until(ctx, func() bool {
		return r.lab.Host(1).Do(ctx, func() error {
			_, err := net.InterfaceByName("flannel.1")
			return err
		}) != nil
	})
	quiet := time.Now().Add(time.Second) // until then late announcements arrive
	w.until(ctx, func() bool { return time.Now().After(quiet) })
	w.verify(ctx)
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

// migrationLimit measures how long the kernel takes to change the routes to all peers from vxlan to
// host-gw. It does so on host 2, to which it first writes the objects of vxlan. For each peer it
// creates a nexthop object of host-gw and a route by it that stands by. Then it changes the best
// route to host-gw, and the one that stands by to vxlan. changes is the number of objects that it
// writes for all peers, not counting those of the beginning.
func (b *bed) migrationLimit(ctx context.Context) (took, cpu time.Duration) {
	b.limit(ctx, nil, b.peers, objectsOf("vxlan"))
	b.quiesce(ctx)
	withRTNL(ctx, b.lab.Host(2), func(r *rtnl) {
		device := link("eth0").Index
		const ids = 1 << 24 // difference between the ids of the nexthop objects of the two backends
		start := time.Now()
		startCPU := threadCPU()

		for _, build := range []func(p peer){
			func(p peer) { r.addNexthop(p.nexthop()+ids, device, p.ip, 0) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop()+ids, standbyMetric) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop()+ids, 0) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop(), standbyMetric) },
		} {
			inBatches(r, b.peers, build)
		}
		took, cpu = time.Since(start), threadCPU()-startCPU
	})
	return took, cpu
}
