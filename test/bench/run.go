// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// runner runs the measures one after another.
type runner struct {
	options
	*bed
	report *report
}

type measure struct {
	name string
	run  func(*runner, context.Context)
}

func measures() []measure {
	return []measure{
		{"cold", (*runner).measureCold},
		{"families", (*runner).measureFamilies},
		{"burst", (*runner).measureBurst},
		{"events", (*runner).measureEvents},
		{"restart", (*runner).measureRestart},
		{"rest", (*runner).measureRest},
		{"busy", (*runner).measureBusy},
		{"firewall", (*runner).measureFirewall},
		{"networks", (*runner).measureNetworks},
		{"migration", (*runner).measureMigration},
		{"probes", (*runner).measureProbes},
		{"growth", (*runner).measureGrowth},
		{"cloud", (*runner).measureCloud},
		{"kube", (*runner).measureKube},
		{"size", (*runner).measureSize},
		{"udp", (*runner).measureUDP},
		{"wireguard", (*runner).measureWireGuard},
	}
}

func names() []string {
	var names []string
	for _, m := range measures() {
		names = append(names, m.name)
	}
	return names
}

// measureLimit limits the time of one measure. It is several times as long as any measure needs.
const measureLimit = time.Hour

func (r *runner) all(ctx context.Context, progress io.Writer) {
	chosen := names()
	if r.only != "" {
		chosen = strings.Split(r.only, ",")
	}

	for _, name := range chosen {
		if !slices.Contains(names(), name) {
			must.Fail("unknown measure %q: want %s", name, strings.Join(names(), ", "))
		}
	}

	var failed error
	for _, m := range measures() {
		if !slices.Contains(chosen, m.name) || ctx.Err() != nil {
			continue
		}

		start := time.Now()
		fmt.Fprintf(progress, "%s ... ", m.name)
		limited, cancel := context.WithTimeoutCause(ctx, measureLimit, fmt.Errorf("not finished after %s", measureLimit))
		err := must.Catch(func() { m.run(r, limited) })
		if errors.Is(err, context.DeadlineExceeded) && limited.Err() != nil {
			err = context.Cause(limited)
		}
		cancel()
		fmt.Fprintf(progress, "%.0f s\n", time.Since(start).Seconds())
		if err != nil { // continue with the other measures
			failed = errors.Join(failed, fmt.Errorf("measure %s: %w", m.name, err))
		}
	}
	if failed != nil {
		must.Fail("%w", failed)
	}
}

// fresh starts the daemon on a clean host 1 in a network with n peers, waits up to a minute until all
// objects exist, and verifies them.
func (r *runner) fresh(ctx context.Context, backend string, n int, args ...string) start {
	r.clean(ctx, r.lab.Host(1))
	r.configure(ctx, backend, n)
	r.quiesce(ctx)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s := r.begin(ctx, lab.FlanneldOptions{Args: args})
	r.verify(ctx, r.lab.Host(1), n)
	return s
}

func (r *runner) settled(ctx context.Context, n int, args ...string) start {
	s := r.fresh(ctx, "vxlan", n, args...)
	pause(ctx, afterStart)
	return s
}

// measureCold measures the time from exec to the last kernel object, and compares it with the
// kernel's limit. In each round it measures vxlan with all numbers of peers and without peers,
// and host-gw with the large number only.
func (r *runner) measureCold(ctx context.Context) {
	for range r.rounds {
		for _, backend := range []string{"vxlan", "host-gw"} {
			for _, n := range r.cold {
				if backend == "host-gw" && n != r.large {
					continue
				}
				r.coldRound(ctx, backend, n)
			}
		}
		r.report.add("vxlan, cold start", "exec to subnet.env", 0, "ms", ms(r.fresh(ctx, "vxlan", 0).file), 60)
	}
}

func (r *runner) coldRound(ctx context.Context, backend string, n int) {
	r.clean(ctx, r.lab.Host(1)) // stops the previous daemon
	r.configure(ctx, backend, n)
	kinds := objectsOf(backend)
	limit, limitCPU := r.limit(ctx, nil, r.peers, kinds)
	kinds.nexthop = false
	plain, _ := r.limit(ctx, nil, r.peers, kinds)
	r.clean(ctx, r.lab.Host(2))
	list := r.bareList(ctx)
	before := requests(ctx, r.lab.Host(2))
	s := r.fresh(ctx, backend, n)
	pause(ctx, 200*time.Millisecond) // etcd counts the last requests a little later
	asked := requests(ctx, r.lab.Host(2)).Since(before)

	// These are not requests of the daemon: clean, which fresh calls, lists and revokes etcd
	// leases.
	for _, own := range []string{"LeaseLeases", "LeaseRevoke"} {
		delete(asked, own)
	}

	group := backend + ", cold start"
	ratio := []float64{}
	cpu := []float64{}
	if n == r.large {
		ratio = []float64{1.5}
		cpu = []float64{120}
		if backend == "host-gw" {
			ratio[0] = 1.25
		}
	}

	r.report.add(group, "exec to all programmed", n, "ms", ms(s.all))
	r.report.add(group, "limit: pipelined, nexthop objects", n, "ms", ms(limit))
	r.report.add(group, "limit: pipelined, plain routes", n, "ms", ms(plain))
	r.report.add(group, "exec to all leases read, by a bare client", n, "ms", ms(list))
	r.report.add(group, "exec to all programmed / limit", n, "×", float64(s.all)/float64(limit))
	r.report.add(group, "exec to all programmed / bare client and limit, added", n, "×", float64(s.all)/float64(list+limit), ratio...)
	r.report.add(group, "CPU until then", n, "ms", ms(s.cpu), cpu...)
	r.report.add(group, "limit: CPU", n, "ms", ms(limitCPU))
	r.report.add(group, "peak RSS", n, "MB", mb(s.peak))
	r.report.add(group, "exec to subnet.env", n, "ms", ms(s.file))
	r.report.add(group, "requests to etcd", n, "calls", asked.Total())
	r.report.add(group, "of these: reads and lists", n, "calls", asked["Range"])
}

// measureBurst measures how long the daemon takes for a thousand leases that are written at
// once. It compares the kernel's limit with the time from the last event at a bare watch until
// all objects exist.
func (r *runner) measureBurst(ctx context.Context) {
	const base, burst = 1000, 1000
	const group = "vxlan, 1000 leases in one burst"
	for range r.rounds {
		r.clean(ctx, r.lab.Host(1))
		r.configure(ctx, "vxlan", base)
		all := makePeers(base + burst)
		limit, _ := r.limit(ctx, all[:base], all[base:], objectsOf("vxlan"))
		s := r.fresh(ctx, "vxlan", base)
		r.quiesce(ctx)
		var arrived, done time.Duration
		cpu := spent(figures.ProcessCPU, s.daemon.PID(), func() { arrived, done = r.burst(ctx, s.daemon, all) })
		late := max(0, done-arrived)
		r.verify(ctx, r.lab.Host(1), len(all))
		r.report.add(group, "first write to all programmed", base, "ms", ms(done))
		r.report.add(group, "first write to last event at a bare watch", base, "ms", ms(arrived))
		r.report.add(group, "last event to all programmed", base, "ms", ms(late))
		r.report.add(group, "limit: pipelined, nexthop objects", base, "ms", ms(limit))
		r.report.add(group, "last event to all programmed / limit", base, "×", float64(late)/float64(limit), 3)
		r.report.add(group, "CPU", base, "ms", ms(cpu))
	}
}

// burst writes the leases of those peers in all that are not in etcd. It returns the time until the last event
// arrives at a bare watch, and until the kernel has all objects.
func (r *runner) burst(ctx context.Context, d *lab.Daemon, all []peer) (arrived, done time.Duration) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	fresh := all[len(r.peers):]
	watch := r.client.Watch(ctx, etcdPrefix+"/subnets/", clientv3.WithPrefix())
	r.peers = all // so that observe waits for all of them
	s := start{daemon: d, file: 1}
	began := time.Now()
	results := make(chan error, 2)
	for _, f := range []func(){
		func() { r.observe(ctx, r.lab.Host(1), began, &s) },
		func() { r.putLeases(ctx, fresh, r.backend, "") },
	} {
		go func() {
			err := must.Catch(f)
			if err != nil {
				cancel(err) // otherwise the loop below would wait for events that do not arrive
			}
			results <- err
		}()
	}

	for n := 0; n < len(fresh); {
		resp, ok := <-watch
		if !ok || resp.Err() != nil {
			must.Fail("etcd watch ended: %w", errors.Join(resp.Err(), context.Cause(ctx)))
		}
		n += len(resp.Events)
	}
	arrived = time.Since(began)
	must.Do(<-results)
	must.Do(<-results)
	return arrived, s.all
}

// afterStart is how long it takes after a start until the daemon is idle. About two seconds
// after it is ready it writes its state, and within two more seconds it returns memory to the
// system.
const afterStart = 8 * time.Second

func (r *runner) measureEvents(ctx context.Context) {
	const group = "vxlan, one lease"
	for range r.rounds {
		for _, n := range r.eventSizes {
			s := r.settled(ctx, n)
			var l latencies
			cpu := spent(figures.ProcessCPU, s.daemon.PID(), func() { l = r.events(ctx, r.eventCount) })
			bare := r.bareEvents(ctx, r.eventCount)
			r.reportEvents(group, n, l, cpu/time.Duration(2*r.eventCount), bare)
		}
	}
}

func (r *runner) reportEvents(group string, n int, l latencies, cpu, bareCPU time.Duration) {
	p50 := quantile(l.watch, 0.5)
	p99 := quantile(l.watch, 0.99)
	for _, e := range []struct {
		name   string
		values []float64
	}{{"added", l.add}, {"removed", l.remove}} {
		r.report.add(group, e.name+", p50", n, "ms", quantile(e.values, 0.5))
		r.report.add(group, e.name+", p99", n, "ms", quantile(e.values, 0.99))
		r.report.add(group, e.name+", p50 / bare watch", n, "×", quantile(e.values, 0.5)/p50, 1.5)
		r.report.add(group, e.name+", p99 / bare watch", n, "×", quantile(e.values, 0.99)/p99, 2)
	}

	r.report.add(group, "bare etcd watch, p50", n, "ms", p50)
	r.report.add(group, "bare etcd watch, p99", n, "ms", p99)
	r.report.add(group, "CPU an event", n, "ms", ms(cpu))
	r.report.add(group, "bare etcd watch, CPU an event", n, "ms", ms(bareCPU))
	r.report.add(group, "CPU an event / bare watch", n, "×", float64(cpu)/float64(bareCPU), 1.75)
}

func (r *runner) measureRestart(ctx context.Context) {
	const group = "vxlan, restart with everything in place"
	n := r.large
	for _, h := range r.lab.Hosts() {
		r.clean(ctx, h)
	}
	r.configure(ctx, "vxlan", n)
	must.Do(r.lab.StartFlanneld(ctx, lab.FlanneldOptions{}))
	must.Do(r.lab.AddPods(ctx))
	pods := r.lab.Pods()

	for i := range r.restarts {
		r.quiesce(ctx)
		s := r.restart(ctx, pods[0], pods[1], i%2 == 1)
		r.report.add(group, "exec to ready", n, "ms", ms(s.ready), 400)
		r.report.add(group, "kernel changes announced", n, "", float64(s.writes), 0)
		r.report.add(group, "packets lost of a 1 kHz flow", n, "", float64(s.lost), 0)
		r.report.add(group, "packets sent", n, "", float64(s.sent))
	}
	r.verify(ctx, r.lab.Host(1), n)
}

func (r *runner) measureRest(ctx context.Context) {
	const group = "vxlan, at rest"
	for _, n := range []int{0, r.large} {
		r.clean(ctx, r.lab.Host(2))
		d := r.settled(ctx, n).daemon
		cpu, asked := idle(ctx, r.lab.Host(2), d, r.atRest)
		m := figures.ProcessMemory(d.PID())
		limit := 25.0
		if n > 0 {
			limit = 40
		}

		r.report.add(group, "CPU a minute", n, "ms", ms(cpu)/r.atRest.Minutes(), 30)
		r.report.add(group, "processes", n, "", float64(children(d.PID())), 0)
		r.report.add(group, "requests to etcd", n, "calls", asked.Total(), 0)
		r.report.add(group, "RSS", n, "MB", mb(m.Anonymous+m.File), limit)
		r.report.add(group, "RSS, anonymous", n, "MB", mb(m.Anonymous))
		r.report.add(group, "RSS, of files", n, "MB", mb(m.File))

		// Repeat the measure with a resync every two seconds, to see the cost of one resync.
		const tick, ticks = 2 * time.Second, 4
		d = r.settled(ctx, n, "--resync="+tick.String()).daemon
		ticking, _ := idle(ctx, r.lab.Host(2), d, ticks*tick)
		r.report.add(group, "CPU of one resync tick", n, "ms", max(0, ms(ticking)-ms(cpu)*float64(ticks*tick)/float64(r.atRest))/ticks)
	}
}

// idle waits as long as the parameter during says. It returns the CPU time of the daemon and of
// its ended child processes in this time, and how many requests etcd has received from all
// clients. It asks etcd from host.
func idle(ctx context.Context, host *lab.Host, d *lab.Daemon, during time.Duration) (time.Duration, figures.Counts) {
	before := requests(ctx, host)
	cpu := spent(treeCPU, d.PID(), func() { pause(ctx, during) })
	return cpu, requests(ctx, host).Since(before)
}

// measureBusy measures starts and events on a quiet host, and on a busy one. The busy host has
// many routes of other programs, and neighbours that change all the time.
func (r *runner) measureBusy(ctx context.Context) {
	const group, n, routes, rate = "vxlan, busy host", 1000, 200_000, 1000
	h := r.lab.Host(1)
	r.clean(ctx, h)
	for range r.rounds {
		r.busyRound(ctx, group, "quiet", n)
	}
	r.clean(ctx, h)
	f := makeBusy(ctx, h, routes)
	defer f.remove(ctx)
	f.churn(ctx, rate, func() {
		for range r.rounds {
			r.busyRound(ctx, group, "busy", n)
		}
	})

	for _, name := range []string{"exec to all programmed", "lease added, p50"} {
		quiet := r.report.find(group, name+", quiet", n)
		busy := r.report.find(group, name+", busy", n)
		r.report.add(group, name+", busy / quiet", n, "×", busy.median()/quiet.median(), 1.25)
	}
}

func (r *runner) busyRound(ctx context.Context, group, what string, n int) {
	s := r.settled(ctx, n)
	r.report.add(group, "exec to all programmed, "+what, n, "ms", ms(s.all))
	during := r.busyFor / time.Duration(r.rounds)
	cpu, _ := idle(ctx, r.lab.Host(2), s.daemon, during)
	target := []float64{}
	if what == "busy" {
		target = []float64{1}
	}

	r.report.add(group, "share of a core, at rest, "+what, n, "%", 100*float64(cpu)/float64(during), target...)
	l := r.events(ctx, r.eventCount/4)
	r.report.add(group, "lease added, p50, "+what, n, "ms", quantile(l.add, 0.5))
}

func (r *runner) measureGrowth(ctx context.Context) {
	const n, changes = 1000, 100_000
	group := fmt.Sprintf("vxlan, after %d lease changes", changes)
	d := r.fresh(ctx, "vxlan", n).daemon
	some := makePeers(n + txnOps)[n:]
	change := func(times int) {
		for range times {
			r.putLeases(ctx, some, r.backend, "")
			r.deleteLeases(ctx, some)
		}
		pause(ctx, 3*time.Second)
	}

	times := changes / (2 * len(some))
	// least makes ten groups of times/100 changes each, and returns the resources after them. If
	// a garbage collection runs during a change, it finds more live objects. So the memory is
	// the least of the ten values. All other values are the last ones.
	least := func() (h resources) {
		for i := range 10 {
			change(max(1, times/100))
			now := holdings(ctx, d)
			if i > 0 {
				now.heapGoal, now.anonymous = min(now.heapGoal, h.heapGoal), min(now.anonymous, h.anonymous)
			}
			h = now
		}
		return h
	}
	change(times) // afterwards memory has its working size
	before := least()
	change(times)
	after := least()
	r.report.add(group, "size at which the heap is collected, growth", n, "MB", mb(after.heapGoal-before.heapGoal), 2)
	r.report.add(group, "anonymous RSS, growth", n, "MB", mb(after.anonymous-before.anonymous))
	r.report.add(group, "open files, growth", n, "", float64(after.files-before.files), 0)
	r.report.add(group, "goroutines, growth", n, "", after.goroutines-before.goroutines, 0)
	r.report.add(group, "CPU a change", n, "ms", ms(after.cpu-before.cpu)/(1.1*changes))
	r.verify(ctx, r.lab.Host(1), n)
}

func (r *runner) measureSize(context.Context) {
	info := must.Get(os.Stat(r.flanneld))
	binary := must.Get(elf.Open(r.flanneld))
	defer binary.Close()
	if binary.Section(".symtab") != nil {
		must.Fail("%s is not stripped: build it with make build", r.flanneld)
	}
	r.report.add("binary", "flanneld, stripped", -1, "MB", mb(float64(info.Size())), 35)
}
