// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

const udpGroup = "udp"

const (
	smallPackets    = "UDP, 200 bytes, hosts"
	gatheredPackets = "UDP, 200 bytes, gathered by the sender, hosts"
)

// carried is the result of one test of traffic between two hosts or pods.
type carried struct {
	gbps, pps  float64
	cpuPerGbit float64 // CPU seconds of both daemons for each gigabit
	cpuPerMpkt float64
}

// ways are the ways for packets to the other host that are compared.
type ways struct{ vxlan, udp, many, single map[string]carried }

// congestion selects a congestion control algorithm of TCP.
type congestion struct {
	suffix string // appended to the names of metrics
	args   []string
}

// congestions returns the congestion control algorithms with which udp is measured: the one
// that this machine uses and, if that is another one, cubic, which is Linux's default. BBR
// works in timers, and the kernel charges their CPU time to the process that happens to run,
// often a daemon. cubic has no such timers.
func congestions() []congestion {
	const linux = "cubic"
	own := must.Get(os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"))
	all := []congestion{{}}
	if strings.TrimSpace(string(own)) != linux {
		all = append(all, congestion{", " + linux, []string{"-C", linux}})
	}
	return all
}

// measureUDP compares the udp backend with vxlan, with itself beside 5,000 peers, and with a program
// that carries packets one by one. It measures TCP between hosts and between pods behind a
// bridge, and UDP between hosts. In each round the program and each backend have a lab of
// their own. Ratios are computed within a round.
func (r *runner) measureUDP(ctx context.Context) {
	both := congestions()
	for range r.rounds {
		r.reportWays(both, ways{
			vxlan:  r.measureWay(ctx, "vxlan", 0, both),
			udp:    r.measureWay(ctx, "udp", 0, both),
			many:   r.measureWay(ctx, "udp", 5000, both[:1]),
			single: r.measureSingle(ctx),
		})
	}
}

// measureWay measures a backend with that number of further peers.
func (r *runner) measureWay(ctx context.Context, backend string, peers int, with []congestion) map[string]carried {
	b := newBed(ctx, r.flanneld)
	defer b.close()
	b.configure(ctx, backend, peers)
	b.connect(ctx)
	results := map[string]carried{}
	pods := b.lab.Pods()
	hosts := b.lab.Hosts()
	bridge := pods[1].Addrs()[0].Prev() // the address of the bridge on host 2
	for _, c := range with {
		for _, n := range []string{"1 stream", "4 streams"} {
			args := append([]string{"-P", n[:1]}, c.args...)
			results["TCP, "+n+", hosts"+c.suffix] = r.iperf(ctx, b, hosts[0].Namespace, hosts[1].Namespace, bridge, args...)
			results["TCP, "+n+", pods"+c.suffix] = r.iperf(ctx, b, pods[0].Namespace, pods[1].Namespace, pods[1].Addrs()[0], args...)
		}
	}
	r.floods(ctx, b, bridge, results)
	return results
}

// measureSingle floods the tunnel of the program that carries packets one by one.
func (r *runner) measureSingle(ctx context.Context) map[string]carried {
	b := newBed(ctx, r.flanneld)
	defer b.close()
	b.startPlain(ctx, plainUDP, b.udpPair())
	results := map[string]carried{}
	r.floods(ctx, b, plainAddr(2), results)
	return results
}

func (r *runner) floods(ctx context.Context, b *bed, to netip.Addr, results map[string]carried) {
	hosts := b.lab.Hosts()
	for _, what := range []string{smallPackets, gatheredPackets} {
		results[what] = r.flood(ctx, b, hosts[0].Namespace, hosts[1].Namespace, to, what == gatheredPackets)
	}
}

// connect starts a daemon and a pod on each host, and waits until the pods reach each other.
func (b *bed) connect(ctx context.Context) {
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	must.Do(b.lab.StartFlanneld(ready, lab.FlanneldOptions{}))
	must.Do(b.lab.AddPods(ready))
	pods := b.lab.Pods()
	for {
		_, err := pods[0].Ping(ready, pods[1].Addrs()[0], ping.Options{})
		if err == nil {
			return
		}
		if ready.Err() != nil {
			must.Do(err)
		}
	}
}

// flowTime is how long packets flow in one test.
func (r *runner) flowTime() time.Duration {
	if r.quick {
		return time.Second
	}
	return 3 * time.Second
}

// iperf runs iperf3 between two namespaces. It returns what was received per second, and the
// CPU time of the daemons meanwhile.
func (r *runner) iperf(ctx context.Context, b *bed, from, to *lab.Namespace, addr netip.Addr, args ...string) (c carried) {
	b.quiesce(ctx)
	const most = 30 * time.Second
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	served := make(chan struct{})
	go func() {
		defer close(served)
		_, _ = to.Exec(ctx, "iperf3", "-s", "-1", "-B", addr.String()) // the client reports errors
	}()
	defer func() {
		cancel()
		<-served
	}()
	pause(ctx, 200*time.Millisecond) // until the server listens
	var out []byte
	used := b.carriersSpend(func() {
		out = must.Get(from.Exec(ctx, "iperf3", append([]string{"-J", "-c", addr.String(), "-t", fmt.Sprint(r.flowTime().Seconds())}, args...)...))
	})
	var result struct {
		End struct {
			Received struct{ Bytes, Seconds float64 } `json:"sum_received"`
		}
	}
	must.Do(json.Unmarshal(out[max(bytes.IndexByte(out, '{'), 0):], &result))
	got := result.End.Received
	if got.Bytes <= 0 || got.Seconds <= 0 {
		must.Fail("iperf3 says that nothing was received: %.300s", out)
	}

	gbit := got.Bytes * 8 / 1e9
	return carried{gbps: gbit / got.Seconds, cpuPerGbit: used.Seconds() / gbit}
}

// carriersSpend returns the CPU time that the processes which carry packets on both hosts use while f runs: the
// programs of startPlain, or else the daemons.
func (b *bed) carriersSpend(f func()) time.Duration {
	var pids []int
	for i, h := range b.lab.Hosts() {
		if b.plain != nil {
			pids = append(pids, b.plain[i].Process.Pid)
		} else {
			pids = append(pids, h.Daemon().PID())
		}
	}
	before := figures.ProcessCPU(pids[0]) + figures.ProcessCPU(pids[1])
	f()
	return figures.ProcessCPU(pids[0]) + figures.ProcessCPU(pids[1]) - before
}

// reportWays records the results of one round, and their ratios.
func (r *runner) reportWays(both []congestion, w ways) {
	for _, c := range both {
		for _, way := range []string{"1 stream, hosts", "4 streams, hosts", "1 stream, pods", "4 streams, pods"} {
			what := "TCP, " + way + c.suffix
			r.report.add(udpGroup, what, -1, "Gbit/s", w.udp[what].gbps)
			ofVXLAN := w.udp[what].gbps / w.vxlan[what].gbps
			cpu := what + ", CPU of both daemons"
			if c.suffix != "" {
				r.report.add(udpGroup, what+" / vxlan", -1, "", ofVXLAN)
				r.report.add(udpGroup, cpu, -1, "s/Gbit", w.udp[what].cpuPerGbit)
				continue
			}

			least := 0.6
			if way[0] == '4' {
				least = 0.4
			}

			r.atLeast(what+" / vxlan", "", ofVXLAN, least)
			r.report.add(udpGroup, cpu, -1, "s/Gbit", w.udp[what].cpuPerGbit, 0.18)
			r.report.add(udpGroup, what+", 5,000 peers / none", -1, "", w.many[what].gbps/w.udp[what].gbps)
		}
	}

	for _, what := range []string{smallPackets, gatheredPackets} {
		udp, single := w.udp[what], w.single[what]
		r.atLeast(what, "packets/s", udp.pps, 300_000)
		r.report.add(udpGroup, what+", 5,000 peers / none", -1, "", w.many[what].pps/udp.pps)
		r.report.add(udpGroup, what+", vxlan", -1, "packets/s", w.vxlan[what].pps)
		r.report.add(udpGroup, what+", packet by packet", -1, "packets/s", single.pps)
		r.report.add(udpGroup, what+", CPU of both daemons", -1, "s/Mpacket", udp.cpuPerMpkt)
		r.report.add(udpGroup, what+", CPU, packet by packet", -1, "s/Mpacket", single.cpuPerMpkt)
		r.atLeast(what+", for a CPU second, udp / packet by packet", "", single.cpuPerMpkt/udp.cpuPerMpkt, 4)
	}
}

// atLeast records the value of a metric in one round. Its target is a minimum.
func (r *runner) atLeast(name, unit string, value, target float64) {
	r.report.add(udpGroup, name, -1, unit, value, target)
	r.report.find(udpGroup, name, -1).Floor = true
}
