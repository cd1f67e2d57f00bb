// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

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
type ways struct{ vxlan, udp, many map[string]carried }

// measureUDP compares the udp backend with vxlan, and with itself beside 5,000 peers. It measures TCP
// between hosts and between pods behind a bridge, and UDP between hosts. In each round each backend has
// a lab of its own. Ratios are computed within a round.
//
// TCP uses the congestion control of this machine. BBR works in timers, and the kernel charges their CPU
// time to the process that happens to run, often a daemon. CUBIC has no such timers.
func (r *runner) measureUDP(ctx context.Context) {
	for range r.rounds {
		r.reportWays(ways{vxlan: r.measureWay(ctx, "vxlan", 0), udp: r.measureWay(ctx, "udp", 0), many: r.measureWay(ctx, "udp", 5000)})
	}
}

func (r *runner) measureWay(ctx context.Context, backend string, peers int) map[string]carried {
	b := newBed(ctx, r.flanneld)
	defer b.close()
	b.configure(ctx, backend, peers)
	b.connect(ctx)
	results := map[string]carried{}
	pods := b.lab.Pods()
	hosts := b.lab.Hosts()
	bridge := pods[1].Addrs()[0].Prev() // the address of the bridge on host 2
	for _, n := range []string{"1 stream", "4 streams"} {
		results["TCP, "+n+", hosts"] = r.iperf(ctx, b, hosts[0].Namespace, hosts[1].Namespace, bridge, "-P", n[:1])
		results["TCP, "+n+", pods"] = r.iperf(ctx, b, pods[0].Namespace, pods[1].Namespace, pods[1].Addrs()[0], "-P", n[:1])
	}
	for _, what := range []string{smallPackets, gatheredPackets} {
		results[what] = r.flood(ctx, b, hosts[0].Namespace, hosts[1].Namespace, bridge, what == gatheredPackets)
	}
	return results
}

func (b *bed) connect(ctx context.Context) {
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	must.Do(b.lab.StartFlanneld(ready, lab.FlanneldOptions{}))
	must.Do(b.lab.AddPods(ready))
	pods := b.lab.Pods()
	for {
		_, err := pods[0].Ping(ready, pods[1].Addrs()[0], lab.Echo{})
		if err == nil {
			return
		}
		if ready.Err() != nil {
			must.Do(err)
		}
	}
}

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

func (r *runner) reportWays(w ways) {
	for _, way := range []string{"1 stream, hosts", "4 streams, hosts", "1 stream, pods", "4 streams, pods"} {
		what := "TCP, " + way
		least := 0.6
		if way[0] == '4' {
			least = 0.4
		}

		r.report.add(udpGroup, what, -1, "Gbit/s", w.udp[what].gbps)
		r.atLeast(what+" / vxlan", "", w.udp[what].gbps/w.vxlan[what].gbps, least)
		r.report.add(udpGroup, what+", CPU of both daemons", -1, "s/Gbit", w.udp[what].cpuPerGbit, 0.18)
		r.report.add(udpGroup, what+", 5,000 peers / none", -1, "", w.many[what].gbps/w.udp[what].gbps)
	}

	for _, what := range []string{smallPackets, gatheredPackets} {
		udp := w.udp[what]
		r.atLeast(what, "packets/s", udp.pps, 300_000)
		r.report.add(udpGroup, what+", 5,000 peers / none", -1, "", w.many[what].pps/udp.pps)
		r.report.add(udpGroup, what+", vxlan", -1, "packets/s", w.vxlan[what].pps)
		r.report.add(udpGroup, what+", CPU of both daemons", -1, "s/Mpacket", udp.cpuPerMpkt)
	}
}

// atLeast records the value of a metric in one round. Its target is a minimum.
func (r *runner) atLeast(name, unit string, value, target float64) {
	r.report.add(udpGroup, name, -1, unit, value, target)
	r.report.find(udpGroup, name, -1).Floor = true
}
