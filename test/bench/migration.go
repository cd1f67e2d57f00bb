// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
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
func (r *runner) measureMigration(ctx context.Context) error {
	const group = "vxlan to host-gw, migration of one host"
	n := r.large
	for range max(1, r.rounds/3) { // a round takes half a minute, because of the pauses
		if err := r.clean(ctx, r.lab.Host(1)); err != nil {
			return err
		}
		if err := r.configure(ctx, "vxlan", n); err != nil {
			return err
		}
		limit, limitCPU, limitChanges, err := r.migrationLimit(ctx)
		if err != nil {
			return err
		}
		m, err := r.migrationRound(ctx)
		if err != nil {
			return err
		}
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
	return nil
}

// migrationRound starts a daemon with vxlan, migrates it to host-gw, and ends the migration.
func (r *runner) migrationRound(ctx context.Context) (m migrated, err error) {
	h := r.lab.Host(1)
	if err := r.clean(ctx, r.lab.Host(2)); err != nil {
		return m, err
	}
	if _, err := r.fresh(ctx); err != nil {
		return m, err
	}
	backend := r.backend
	r.backend = "" // the next configure must write everything again
	if err := r.answerForPeers(ctx, true); err != nil {
		return m, err
	}
	defer func() {
		if failed := r.answerForPeers(ctx, false); err == nil {
			err = failed
		}
	}()
	if err := r.putLeasesOf(ctx, r.peers, backend, "host-gw"); err != nil {
		return m, err
	}
	if err := wait.For(ctx, afterStart); err != nil {
		return m, err
	}
	eth0, err := indexOf(ctx, h, "eth0")
	if err != nil {
		return m, err
	}
	w, err := watchRoutes(ctx, h, r.peers)
	if err != nil {
		return m, err
	}
	defer w.close()
	limited, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	before, err := figures.ProcessCPU(h.Daemon().PID())
	if err != nil {
		return m, err
	}
	vxlan := map[string]any{"Type": backend}
	hostGW := map[string]any{"Type": "host-gw"}
	began := time.Now()
	if err := r.putConfig(ctx, vxlan, hostGW); err != nil {
		return m, err
	}
	if err := w.until(limited, func() bool { return w.best[eth0] == len(r.peers) }); err != nil {
		return m, fmt.Errorf("%w: %s", err, h.Daemon().Log())
	}
	m.took = time.Since(began)
	m.changes = w.changes
	changed, err := figures.ProcessCPU(h.Daemon().PID())
	if err != nil {
		return m, err
	}
	m.cpu = changed - before
	if err := r.endMigration(limited, w, hostGW); err != nil {
		return m, fmt.Errorf("%w: %s", err, h.Daemon().Log())
	}
	after, err := figures.ProcessCPU(h.Daemon().PID())
	m.endCPU = after - changed
	m.without = w.without
	return m, err
}

// endMigration ends the migration: it makes host-gw the only backend in the configuration and in the
// leases of all peers. It waits until the former device of host 1 is gone. Then it compares the
// routes that w has followed with the kernel's.
func (r *runner) endMigration(ctx context.Context, w *routeWatch, backend map[string]any) error {
	if err := r.putConfig(ctx, backend, nil); err != nil {
		return err
	}
	if err := r.putLeasesOf(ctx, r.peers, "host-gw", ""); err != nil {
		return err
	}
	gone := func() bool {
		_, err := indexOf(ctx, r.lab.Host(1), "flannel.1")
		return err != nil
	}
	if err := w.until(ctx, gone); err != nil {
		return err
	}
	quiet := time.Now().Add(time.Second) // until then late announcements arrive
	if err := w.until(ctx, func() bool { return time.Now().After(quiet) }); err != nil {
		return err
	}
	return w.verify(ctx)
}

// answerForPeers makes host 2 answer in place of all peers. It gives host 1 a permanent neighbour
// for each peer, because the kernel itself resolves only about a thousand. If answer is false,
// answerForPeers undoes this.
func (b *bed) answerForPeers(ctx context.Context, answer bool) error {
	first := b.lab.Host(1)
	second := b.lab.Host(2)
	script := fmt.Sprintf("ip route add local %[1]s dev lo && ip route add local %[2]s dev lo && ip route add %[3]s via %[4]s",
		peerSubnets, peerNetwork, daemonSubnets, first.Addr(prefix.IPv4))
	if !answer {
		script = strings.ReplaceAll(script, "route add", "route del")
	}
	if out, err := second.Exec(ctx, "sh", "-c", script); err != nil {
		return fmt.Errorf("answer for peers: %w: %s", err, strings.TrimSpace(string(out)))
	}
	var mac [6]byte
	err := second.Do(ctx, func() error {
		link, err := net.InterfaceByName("eth0")
		if err == nil {
			copy(mac[:], link.HardwareAddr)
		}
		return err
	})
	if err != nil {
		return err
	}
	return withRTNL(ctx, first, func(r *rtnl) error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		return r.each(b.peers, func(p peer) {
			if answer {
				r.putNeigh(link.Index, p.ip, mac)
			} else {
				r.delNeigh(link.Index, p.ip)
			}
		})
	})
}

// indexOf returns the index of the device called name on a host. It returns an error if there is
// none.
func indexOf(ctx context.Context, h *lab.Host, name string) (index uint32, err error) {
	err = h.Do(ctx, func() error {
		link, err := net.InterfaceByName(name)
		if err == nil {
			index = uint32(link.Index)
		}
		return err
	})
	return index, err
}

// migrationLimit measures how long the kernel takes to change the routes to all peers from vxlan to
// host-gw. It does so on host 2, to which it first writes the objects of vxlan. For each peer it
// creates a nexthop object of host-gw and a route by it that stands by. Then it changes the best
// route to host-gw, and the one that stands by to vxlan. changes is the number of objects that it
// writes for all peers, not counting those of the beginning.
func (b *bed) migrationLimit(ctx context.Context) (took, cpu time.Duration, changes int, err error) {
	if _, _, err := b.limit(ctx, nil, b.peers, objectsOf("vxlan")); err != nil {
		return 0, 0, 0, err
	}
	if err := b.quiesce(ctx); err != nil {
		return 0, 0, 0, err
	}
	h := b.lab.Host(2)
	err = withRTNL(ctx, h, func(r *rtnl) error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		const ids = 1 << 24 // difference between the ids of the nexthop objects of the two backends
		start := time.Now()
		startCPU := threadCPU()

		for _, build := range []func(p peer){
			func(p peer) { r.addNexthop(p.nexthop()+ids, eth0.Index, p.ip, 0) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop()+ids, standbyMetric) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop()+ids, 0) },
			func(p peer) { r.putRouteByID(p.subnet, p.nexthop(), standbyMetric) },
		} {
			if err := r.each(b.peers, build); err != nil {
				return fmt.Errorf("write the limit: %w", err)
			}
			changes += len(b.peers)
		}
		took, cpu = time.Since(start), threadCPU()-startCPU
		return nil
	})
	return took, cpu, changes, err
}
