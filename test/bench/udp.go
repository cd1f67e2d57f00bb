// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

const udpGroup = "udp"

const (
	smallPackets    = "UDP, 200 bytes, hosts"
	gatheredPackets = "UDP, 200 bytes, gathered by the sender, hosts"
)

// carried is the result of one test of traffic between two hosts or pods.
type carried struct {
	gbps, pps  float64
	sent       float64 // packets per second that were sent in a flood
	cpuPerGbit float64 // CPU seconds of both daemons for each gigabit
	cpuPerMpkt float64
}

// way is a way for packets to the other host: a backend, with that number of further peers.
type way struct {
	name    string
	backend string
	peers   int
}

// flow is traffic that iperf3 generates with args.
type flow struct {
	what     string
	from, to *lab.Namespace
	addr     netip.Addr
	args     []string
}

// congestion selects a congestion control algorithm of TCP.
type congestion struct {
	suffix string // appended to the names of metrics
	args   []string
}

// congestions returns the congestion control algorithms with which udp is measured: the one
// that this machine uses and, if that is another one, cubic, which is Linux's default. BBR
// works in timers, and the kernel charges their CPU time to the process that happens to run,
// often a daemon. cubic has no such timers.
func congestions() ([]congestion, error) {
	const linux = "cubic"
	own, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	all := []congestion{{}}
	if strings.TrimSpace(string(own)) != linux {
		all = append(all, congestion{", " + linux, []string{"-C", linux}})
	}
	return all, err
}

// measureUDP compares the udp backend with vxlan, with the bare underlay, and with a program
// that carries packets one by one. It measures TCP between hosts and between pods behind a
// bridge, and UDP between hosts. In each round the program and each backend have a lab of
// their own. Ratios are computed within a round.
func (r *runner) measureUDP(ctx context.Context) error {
	both, err := congestions()
	if err != nil {
		return err
	}

	for range r.rounds {
		round := map[string]map[string]carried{}
		for _, w := range []way{{"vxlan", "vxlan", 0}, {"udp", "udp", 0}, {"udp, 5,000 peers", "udp", 5000}} {
			with := both
			if w.peers > 0 {
				with = both[:1]
			}
			if err := r.measureWay(ctx, w, with, round); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}

		single, err := r.measureSingle(ctx)
		if err != nil {
			return fmt.Errorf("packet by packet: %w", err)
		}
		round["packet by packet"] = single
		r.reportWays(both, round)
	}
	return nil
}

func (r *runner) measureWay(ctx context.Context, w way, with []congestion, round map[string]map[string]carried) error {
	b, err := newBed(ctx, r.flanneld)
	if err != nil {
		return err
	}
	defer b.close()
	if err := b.configure(ctx, w.backend, w.peers); err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	o := lab.FlanneldOptions{}
	if err := b.lab.StartFlanneld(ready, o); err != nil {
		return err
	}
	if err := b.lab.AddPods(ready); err != nil {
		return err
	}
	if err := r.pingWay(ctx, b, w.name); err != nil {
		return err
	}
	results := map[string]carried{}
	round[w.name] = results
	pods := b.lab.Pods()
	hosts := b.lab.Hosts()
	bridge := pods[1].Addrs()[0].Prev() // the address of the bridge on host 2
	under := hosts[1].Addr(prefix.IPv4)
	flows := []flow{{"UDP, full packets, hosts", hosts[0].Namespace, hosts[1].Namespace, bridge, []string{"-u", "-b", "0", "-l", strconv.Itoa(pods[0].MTU() - 28)}}}
	for _, c := range with {
		for _, n := range []string{"1 stream", "4 streams"} {
			args := append([]string{"-P", n[:1]}, c.args...)
			flows = append(flows,
				flow{"TCP, " + n + ", hosts" + c.suffix, hosts[0].Namespace, hosts[1].Namespace, bridge, args},
				flow{"TCP, " + n + ", pods" + c.suffix, pods[0].Namespace, pods[1].Namespace, pods[1].Addrs()[0], args},
				flow{"raw TCP, " + n + c.suffix, hosts[0].Namespace, hosts[1].Namespace, under, args},
			)
		}
	}

	for _, f := range flows {
		if results[f.what], err = r.iperf(ctx, b, f.from, f.to, f.addr, f.args...); err != nil {
			return fmt.Errorf("%s: %w", f.what, err)
		}
	}

	for _, m := range []struct {
		what     string
		addr     netip.Addr
		gathered bool
	}{
		{smallPackets, bridge, false},
		{gatheredPackets, bridge, true},
		{"raw UDP, 200 bytes", under, false},
	} {
		if results[m.what], err = r.flood(ctx, b, hosts[0].Namespace, hosts[1].Namespace, m.addr, m.gathered); err != nil {
			return fmt.Errorf("%s: %w", m.what, err)
		}
	}

	mem, err := figures.ProcessMemory(hosts[0].Daemon().PID())
	if err != nil {
		return err
	}
	r.report.add(udpGroup, "anonymous RSS after that, "+w.name, -1, "MB", mb(mem.Anonymous))
	return nil
}

// measureSingle floods the tunnel of the program that carries packets one by one.
func (r *runner) measureSingle(ctx context.Context) (map[string]carried, error) {
	b, err := newBed(ctx, r.flanneld)
	if err != nil {
		return nil, err
	}
	defer b.close()
	stop, err := b.startPlain(ctx, plainUDP, b.udpPair())
	defer stop()
	if err != nil {
		return nil, err
	}
	hosts := b.lab.Hosts()
	results := map[string]carried{}
	for _, what := range []string{smallPackets, gatheredPackets} {
		results[what], err = r.flood(ctx, b, hosts[0].Namespace, hosts[1].Namespace, plainAddr(2), what == gatheredPackets)
		if err != nil {
			return nil, err
		}
	}
	return results, nil
}

// meet waits until the pods of both hosts reach each other. After 21 pings without an answer
// it returns an error.
func (b *bed) meet(ctx context.Context) error {
	pods := b.lab.Pods()
	for tries := 0; ; tries++ {
		_, err := pods[0].Ping(ctx, pods[1].Addrs()[0], ping.Options{})
		if err == nil || tries == 20 {
			return err
		}
	}
}

// pingWay records the median round-trip time of a hundred pings between pods.
func (r *runner) pingWay(ctx context.Context, b *bed, name string) error {
	if err := b.meet(ctx); err != nil {
		return err
	}
	pods := b.lab.Pods()
	var times []float64
	for range 100 {
		took, err := pods[0].Ping(ctx, pods[1].Addrs()[0], ping.Options{})
		if err != nil {
			return err
		}
		times = append(times, float64(took)/float64(time.Microsecond))
	}
	r.report.add(udpGroup, "ping between pods, "+name, -1, "µs", quantile(times, 0.5))
	return nil
}

// iperf runs iperf3 between two namespaces. It returns what was received per second, and the
// CPU time of the daemons meanwhile.
func (r *runner) iperf(ctx context.Context, b *bed, from, to *lab.Namespace, addr netip.Addr, args ...string) (c carried, err error) {
	if err := b.quiesce(ctx); err != nil {
		return c, err
	}
	const most = 30 * time.Second
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	served := make(chan struct{})
	go func() {
		defer close(served)
		_, _ = to.Exec(ctx, "iperf3", "-s", "-1", "-B", addr.String()) // the client reports errors
	}()
	if err := wait.For(ctx, 200*time.Millisecond); err != nil { // until the server listens
		return c, err
	}
	before, err := r.daemonCPU(b)
	if err != nil {
		return c, err
	}
	seconds := "3"
	if r.quick {
		seconds = "1"
	}

	out, err := from.Exec(ctx, "iperf3", append([]string{"-J", "-c", addr.String(), "-t", seconds}, args...)...)
	if err != nil {
		return c, errors.Join(err, fmt.Errorf("%.300s", out))
	}
	after, err := r.daemonCPU(b)
	if err != nil {
		return c, err
	}
	cancel()
	<-served
	var result struct {
		End struct {
			Received struct {
				Bytes   float64
				Seconds float64
			} `json:"sum_received"`
			Sum struct {
				Bytes, Seconds, Packets float64
				Lost                    float64 `json:"lost_packets"`
			}
		}
	}
	if err := json.Unmarshal(out[max(bytes.IndexByte(out, '{'), 0):], &result); err != nil {
		return c, fmt.Errorf("read iperf3's result: %w", err)
	}
	got := result.End.Received
	packets := result.End.Sum.Packets - result.End.Sum.Lost
	if packets > 0 {
		got.Bytes = result.End.Sum.Bytes * packets / result.End.Sum.Packets
		got.Seconds = result.End.Sum.Seconds
	}
	if got.Bytes <= 0 || got.Seconds <= 0 {
		return c, fmt.Errorf("iperf3 says that nothing was received: %.300s", out)
	}

	used := (after - before).Seconds()
	c.gbps = got.Bytes * 8 / 1e9 / got.Seconds
	c.pps = packets / got.Seconds
	c.cpuPerGbit = used / (got.Bytes * 8 / 1e9)
	c.cpuPerMpkt = used / (packets / 1e6)
	return c, nil
}

// daemonCPU returns the CPU time of the processes that carry packets on both hosts: the
// programs of startPlain, or else the daemons.
func (r *runner) daemonCPU(b *bed) (time.Duration, error) {
	pids := b.plain
	if pids == nil {
		for _, h := range b.lab.Hosts() {
			pids = append(pids, h.Daemon().PID())
		}
	}

	var sum time.Duration
	for _, pid := range pids {
		cpu, err := figures.ProcessCPU(pid)
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	return sum, nil
}

// reportWays records the results of one round, and their ratios.
func (r *runner) reportWays(both []congestion, round map[string]map[string]carried) {
	runtime.GC()
	udp := round["udp"]
	vxlan := round["vxlan"]
	many := round["udp, 5,000 peers"]
	single := round["packet by packet"]

	for _, c := range both {
		for _, way := range []string{"1 stream, hosts", "4 streams, hosts", "1 stream, pods", "4 streams, pods"} {
			n, _, _ := strings.Cut(way, ",")
			what := "TCP, " + way + c.suffix
			raw := "raw TCP, " + n + c.suffix
			r.report.add(udpGroup, what, -1, "Gbit/s", udp[what].gbps)
			r.report.add(udpGroup, what+" / raw", -1, "", udp[what].gbps/udp[raw].gbps)
			ofVXLAN := udp[what].gbps / vxlan[what].gbps
			cpu := what + ", CPU of both daemons"
			if c.suffix != "" {
				r.report.add(udpGroup, what+" / vxlan", -1, "", ofVXLAN)
				r.report.add(udpGroup, cpu, -1, "s/Gbit", udp[what].cpuPerGbit)
				continue
			}

			least := 0.6
			if n == "4 streams" {
				least = 0.4
			}

			r.atLeast(what+" / vxlan", "", ofVXLAN, least)
			r.report.add(udpGroup, cpu, -1, "s/Gbit", udp[what].cpuPerGbit, 0.18)
			r.report.add(udpGroup, what+", 5,000 peers / none", -1, "", many[what].gbps/udp[what].gbps)
		}
	}

	full := "UDP, full packets, hosts"
	r.report.add(udpGroup, full, -1, "Gbit/s", udp[full].gbps)
	r.report.add(udpGroup, full+" / vxlan", -1, "", udp[full].gbps/vxlan[full].gbps)
	r.atLeast(smallPackets, "packets/s", udp[smallPackets].pps, 300_000)
	r.report.add(udpGroup, smallPackets+" / raw", -1, "", udp[smallPackets].pps/udp["raw UDP, 200 bytes"].pps)
	r.report.add(udpGroup, smallPackets+", 5,000 peers / none", -1, "", many[smallPackets].pps/udp[smallPackets].pps)
	r.report.add(udpGroup, "raw UDP, 200 bytes", -1, "packets/s", udp["raw UDP, 200 bytes"].pps)
	r.report.add(udpGroup, "raw UDP, 200 bytes, sent", -1, "packets/s", udp["raw UDP, 200 bytes"].sent)
	r.atLeast(gatheredPackets, "packets/s", udp[gatheredPackets].pps, 300_000)

	for _, what := range []string{smallPackets, gatheredPackets} {
		r.report.add(udpGroup, what+", sent", -1, "packets/s", udp[what].sent)
		r.report.add(udpGroup, what+", vxlan", -1, "packets/s", vxlan[what].pps)
		r.report.add(udpGroup, what+", packet by packet", -1, "packets/s", single[what].pps)
		r.report.add(udpGroup, what+", CPU of both daemons", -1, "s/Mpacket", udp[what].cpuPerMpkt)
		r.report.add(udpGroup, what+", CPU, packet by packet", -1, "s/Mpacket", single[what].cpuPerMpkt)
		r.atLeast(what+", for a CPU second, udp / packet by packet", "", single[what].cpuPerMpkt/udp[what].cpuPerMpkt, 4)
	}
}

// atLeast records the value of a metric in one round. Its target is a minimum.
func (r *runner) atLeast(name, unit string, value, target float64) {
	r.report.add(udpGroup, name, -1, unit, value, target)
	r.report.find(udpGroup, name, -1).Floor = true
}
