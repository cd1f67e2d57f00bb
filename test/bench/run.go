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

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// runner runs the measures one after another.
type runner struct {
	options
	*bed
	report *report
}

type measure struct {
	name string
	run  func(*runner, context.Context) error
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

func (r *runner) all(ctx context.Context, progress io.Writer) error {
	chosen := names()
	if r.only != "" {
		chosen = strings.Split(r.only, ",")
	}

	for _, name := range chosen {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("unknown measure %q: want %s", name, strings.Join(names(), ", "))
		}
	}

	var failed error
	for _, m := range measures() {
		if !slices.Contains(chosen, m.name) {
			continue
		}

		start := time.Now()
		fmt.Fprintf(progress, "%s ... ", m.name)
		limited, cancel := context.WithTimeoutCause(ctx, measureLimit, fmt.Errorf("not finished after %s", measureLimit))
		err := m.run(r, limited)
		if errors.Is(err, context.DeadlineExceeded) && limited.Err() != nil {
			err = context.Cause(limited)
		}
		cancel()
		fmt.Fprintf(progress, "%.0f s\n", time.Since(start).Seconds())
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil { // continue with the other measures
			failed = errors.Join(failed, fmt.Errorf("measure %s: %w", m.name, err))
			r.report.Notes = append(r.report.Notes, fmt.Sprintf("The measure %s is incomplete: %v", m.name, err))
		}
	}
	return failed
}

// fresh starts the daemon on a clean host 1, waits up to a minute until all objects exist, and
// verifies them.
func (r *runner) fresh(ctx context.Context, args ...string) (start, error) {
	if err := r.clean(ctx, r.lab.Host(1)); err != nil {
		return start{}, err
	}
	if err := r.quiesce(ctx); err != nil {
		return start{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s, err := r.begin(ctx, args...)
	if err != nil {
		return s, err
	}
	return s, r.verify(ctx, r.lab.Host(1), len(r.peers))
}

// measureCold measures the time from exec to the last kernel object, and compares it with the
// kernel's limit. In each round it measures vxlan with all numbers of peers and without peers,
// and host-gw with the large number only.
func (r *runner) measureCold(ctx context.Context) error {
	for range r.rounds {
		for _, backend := range []string{"vxlan", "host-gw"} {
			for _, n := range r.cold {
				if backend == "host-gw" && n != r.large {
					continue
				}
				if err := r.coldRound(ctx, backend, n); err != nil {
					return err
				}
			}
		}
		if err := r.coldEmpty(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) coldRound(ctx context.Context, backend string, n int) error {
	if err := r.clean(ctx, r.lab.Host(1)); err != nil { // stops the previous daemon
		return err
	}
	if err := r.configure(ctx, backend, n); err != nil {
		return err
	}
	kinds := objectsOf(backend)
	limit, limitCPU, err := r.limit(ctx, nil, r.peers, kinds)
	if err != nil {
		return err
	}
	kinds.nexthop = false
	plain, _, err := r.limit(ctx, nil, r.peers, kinds)
	if err != nil {
		return err
	}
	if err := r.clean(ctx, r.lab.Host(2)); err != nil {
		return err
	}
	list, err := r.bareList(ctx)
	if err != nil {
		return err
	}
	before, err := requests(ctx, r.lab.Host(2))
	if err != nil {
		return err
	}
	s, err := r.fresh(ctx)
	if err != nil {
		return err
	}
	if err := wait.For(ctx, 200*time.Millisecond); err != nil { // etcd counts the last requests a little later
		return err
	}
	after, err := requests(ctx, r.lab.Host(2))
	if err != nil {
		return err
	}
	asked := after.Since(before)

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
	return nil
}

func (r *runner) coldEmpty(ctx context.Context) error {
	if err := r.configure(ctx, "vxlan", 0); err != nil {
		return err
	}
	s, err := r.fresh(ctx)
	if err != nil {
		return err
	}
	r.report.add("vxlan, cold start", "exec to subnet.env", 0, "ms", ms(s.file), 60)
	return nil
}

// measureBurst measures how long the daemon takes for a thousand leases that are written at
// once. It compares the kernel's limit with the time from the last event at a bare watch until
// all objects exist.
func (r *runner) measureBurst(ctx context.Context) error {
	const base, burst = 1000, 1000
	const group = "vxlan, 1000 leases in one burst"
	for range r.rounds {
		if err := r.clean(ctx, r.lab.Host(1)); err != nil {
			return err
		}
		if err := r.configure(ctx, "vxlan", base); err != nil {
			return err
		}
		all := makePeers(base + burst)
		limit, _, err := r.limit(ctx, all[:base], all[base:], objectsOf("vxlan"))
		if err != nil {
			return err
		}
		s, err := r.fresh(ctx)
		if err != nil {
			return err
		}
		if err := r.quiesce(ctx); err != nil {
			return err
		}
		began, arrived, done, cpu, err := r.burst(ctx, s.daemon, all)
		if err != nil {
			return err
		}
		r.report.add(group, "first write to all programmed", base, "ms", ms(done.Sub(began)))
		r.report.add(group, "first write to last event at a bare watch", base, "ms", ms(arrived.Sub(began)))
		r.report.add(group, "last event to all programmed", base, "ms", ms(max(0, done.Sub(arrived))))
		r.report.add(group, "limit: pipelined, nexthop objects", base, "ms", ms(limit))
		r.report.add(group, "last event to all programmed / limit", base, "×", float64(max(0, done.Sub(arrived)))/float64(limit), 3)
		r.report.add(group, "CPU", base, "ms", ms(cpu))
	}
	return nil
}

func (r *runner) burst(ctx context.Context, d *lab.Daemon, all []peer) (began, arrived, done time.Time, cpu time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	fresh := all[len(r.peers):]
	watch := r.client.Watch(ctx, etcdPrefix+"/subnets/", clientv3.WithPrefix())
	before, err := figures.ProcessCPU(d.PID())
	if err != nil {
		return
	}
	r.peers = all // so that observe waits for all of them
	s := start{daemon: d, file: 1}
	began = time.Now()
	observed := make(chan error, 1)
	go func() {
		observed <- r.lab.Host(1).Do(ctx, func() error { return r.observe(ctx, r.lab.Host(1), began, &s) })
	}()

	written := make(chan error, 1)
	go func() {
		err := r.putLeases(ctx, fresh)
		if err != nil {
			cancel(err) // otherwise the loop below would wait for events that do not arrive
		}
		written <- err
	}()

	for n := 0; n < len(fresh); {
		resp, ok := <-watch
		if !ok || resp.Err() != nil {
			err = fmt.Errorf("etcd watch ended: %w", errors.Join(resp.Err(), context.Cause(ctx)))
			return
		}
		n += len(resp.Events)
	}

	arrived = time.Now()
	if err = <-written; err != nil {
		return
	}
	if err = <-observed; err != nil {
		return
	}
	done = began.Add(s.all)
	now, err := figures.ProcessCPU(d.PID())
	if err != nil {
		return
	}
	return began, arrived, done, now - before, r.verify(ctx, r.lab.Host(1), len(all))
}

// afterStart is how long it takes after a start until the daemon is idle. About two seconds
// after it is ready it writes its state, and within two more seconds it returns memory to the
// system.
const afterStart = 8 * time.Second

// measureEvents measures how long an idle daemon takes for one lease that is added or removed.
func (r *runner) measureEvents(ctx context.Context) error {
	const group = "vxlan, one lease"
	for range r.rounds {
		for _, n := range r.eventSizes {
			if err := r.clean(ctx, r.lab.Host(1)); err != nil {
				return err
			}
			if err := r.configure(ctx, "vxlan", n); err != nil {
				return err
			}
			s, err := r.fresh(ctx)
			if err != nil {
				return err
			}
			if err := wait.For(ctx, afterStart); err != nil {
				return err
			}
			before, err := figures.ProcessCPU(s.daemon.PID())
			if err != nil {
				return err
			}
			l, err := r.events(ctx, r.eventCount)
			if err != nil {
				return err
			}
			after, err := figures.ProcessCPU(s.daemon.PID())
			if err != nil {
				return err
			}
			bare, err := r.bareEvents(ctx, r.eventCount)
			if err != nil {
				return err
			}
			r.reportEvents(group, n, l, (after-before)/time.Duration(2*r.eventCount), bare)
		}
	}
	return nil
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

// measureRestart measures restarts of a daemon whose kernel objects all exist, during traffic.
func (r *runner) measureRestart(ctx context.Context) error {
	const group = "vxlan, restart with everything in place"
	n := r.large
	for _, h := range r.lab.Hosts() {
		if err := r.clean(ctx, h); err != nil {
			return err
		}
	}
	if err := r.configure(ctx, "vxlan", n); err != nil {
		return err
	}
	var pods []*lab.Pod
	for _, h := range r.lab.Hosts() {
		d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{})
		if err != nil {
			return err
		}
		if err := d.Ready(ctx); err != nil {
			return err
		}
		pod, err := h.AddPod(ctx, "")
		if err != nil {
			return err
		}
		pods = append(pods, pod)
	}

	for i := range r.restarts {
		if err := r.quiesce(ctx); err != nil {
			return err
		}
		kill := i%2 == 1
		s, err := r.restart(ctx, pods[0], pods[1], kill)
		if err != nil {
			return err
		}
		r.report.add(group, "exec to ready", n, "ms", ms(s.ready), 400)
		r.report.add(group, "kernel changes announced", n, "", float64(s.writes), 0)
		r.report.add(group, "packets lost of a 1 kHz flow", n, "", float64(s.lost), 0)
		r.report.add(group, "packets sent", n, "", float64(s.sent))
	}
	return r.verify(ctx, r.lab.Host(1), n)
}

// measureRest measures what an idle daemon costs.
func (r *runner) measureRest(ctx context.Context) error {
	const group = "vxlan, at rest"
	for _, n := range []int{0, r.large} {
		if err := r.clean(ctx, r.lab.Host(2)); err != nil {
			return err
		}
		if err := r.clean(ctx, r.lab.Host(1)); err != nil {
			return err
		}
		if err := r.configure(ctx, "vxlan", n); err != nil {
			return err
		}
		s, err := r.fresh(ctx)
		if err != nil {
			return err
		}
		if err := wait.For(ctx, afterStart); err != nil {
			return err
		}
		cpu, asked, err := idle(ctx, r.lab.Host(2), s.daemon, r.atRest)
		if err != nil {
			return err
		}
		kids, err := children(s.daemon.PID())
		if err != nil {
			return err
		}
		m, err := figures.ProcessMemory(s.daemon.PID())
		if err != nil {
			return err
		}
		limit := 25.0
		if n > 0 {
			limit = 40
		}

		r.report.add(group, "CPU a minute", n, "ms", ms(cpu)*float64(time.Minute)/float64(r.atRest), 30)
		r.report.add(group, "processes", n, "", float64(kids), 0)
		r.report.add(group, "requests to etcd", n, "calls", asked.Total(), 0)
		r.report.add(group, "RSS", n, "MB", mb(m.Anonymous+m.File), limit)
		r.report.add(group, "RSS, anonymous", n, "MB", mb(m.Anonymous))
		r.report.add(group, "RSS, of files", n, "MB", mb(m.File))

		// Repeat the measure with a resync every two seconds, to see the cost of one resync.
		const tick, ticks = 2 * time.Second, 4
		if s, err = r.fresh(ctx, "--resync="+tick.String()); err != nil {
			return err
		}
		if err := wait.For(ctx, afterStart); err != nil {
			return err
		}
		ticking, _, err := idle(ctx, r.lab.Host(2), s.daemon, ticks*tick)
		if err != nil {
			return err
		}
		r.report.add(group, "CPU of one resync tick", n, "ms", max(0, ms(ticking)-ms(cpu)*float64(ticks*tick)/float64(r.atRest))/ticks)
	}
	return nil
}

// idle waits as long as the parameter during says. It returns the CPU time of the daemon and of
// its ended child processes in this time, and how many requests etcd has received from all
// clients. It asks etcd from host.
func idle(ctx context.Context, host *lab.Host, d *lab.Daemon, during time.Duration) (time.Duration, figures.Counts, error) {
	asked, err := requests(ctx, host)
	if err != nil {
		return 0, nil, err
	}
	before, err := treeCPU(d.PID())
	if err != nil {
		return 0, nil, err
	}
	if err := wait.For(ctx, during); err != nil {
		return 0, nil, err
	}
	after, err := treeCPU(d.PID())
	if err != nil {
		return 0, nil, err
	}
	now, err := requests(ctx, host)
	return after - before, now.Since(asked), err
}

// measureBusy measures starts and events on a quiet host, and on a busy one. The busy host has
// many routes of other programs, and neighbours that change all the time.
func (r *runner) measureBusy(ctx context.Context) error {
	const group, n, rate = "vxlan, busy host", 1000, 1000
	h := r.lab.Host(1)
	for _, busy := range []bool{false, true} {
		if err := r.clean(ctx, h); err != nil {
			return err
		}
		if err := r.configure(ctx, "vxlan", n); err != nil {
			return err
		}
		what := "quiet"
		stop := func() error { return nil }
		if busy {
			what = "busy"
			f, err := makeBusy(ctx, h, r.busyRoutes)
			if err != nil {
				return err
			}
			defer func() { _ = f.remove(ctx) }()
			stop = f.churn(ctx, rate)
		}

		for range r.rounds {
			if err := r.busyRound(ctx, group, what, n); err != nil {
				_ = stop()
				return err
			}
		}
		if err := stop(); err != nil {
			return err
		}
	}

	for _, name := range []string{"exec to all programmed", "lease added, p50"} {
		quiet := r.report.find(group, name+", quiet", n)
		busy := r.report.find(group, name+", busy", n)
		r.report.add(group, name+", busy / quiet", n, "×", busy.median()/quiet.median(), 1.25)
	}
	return nil
}

func (r *runner) busyRound(ctx context.Context, group, what string, n int) error {
	s, err := r.fresh(ctx)
	if err != nil {
		return err
	}
	r.report.add(group, "exec to all programmed, "+what, n, "ms", ms(s.all))
	if err := wait.For(ctx, afterStart); err != nil {
		return err
	}
	during := r.busyFor / time.Duration(r.rounds)
	cpu, _, err := idle(ctx, r.lab.Host(2), s.daemon, during)
	if err != nil {
		return err
	}
	target := []float64{}
	if what == "busy" {
		target = []float64{1}
	}

	r.report.add(group, "share of a core, at rest, "+what, n, "%", 100*float64(cpu)/float64(during), target...)
	l, err := r.events(ctx, r.eventCount/4)
	if err != nil {
		return err
	}
	r.report.add(group, "lease added, p50, "+what, n, "ms", quantile(l.add, 0.5))
	return nil
}

// measureGrowth measures by how much memory and other resources of the daemon grow over many
// lease changes.
func (r *runner) measureGrowth(ctx context.Context) error {
	const n = 1000
	group := fmt.Sprintf("vxlan, after %d lease changes", r.churnChange)
	if err := r.clean(ctx, r.lab.Host(1)); err != nil {
		return err
	}
	if err := r.configure(ctx, "vxlan", n); err != nil {
		return err
	}
	s, err := r.fresh(ctx)
	if err != nil {
		return err
	}
	some := makePeers(n + txnOps)[n:]
	change := func(times int) error {
		for range times {
			if err := r.putLeases(ctx, some); err != nil {
				return err
			}
			if err := r.deleteLeases(ctx, some); err != nil {
				return err
			}
		}
		return wait.For(ctx, 3*time.Second)
	}

	times := r.churnChange / (2 * len(some))
	// least makes ten groups of times/100 changes each, and returns the resources after them. If
	// a garbage collection runs during a change, it finds more live objects. So the memory is
	// the least of the ten values. All other values are the last ones.
	least := func() (h resources, err error) {
		for i := range 10 {
			if err := change(max(1, times/100)); err != nil {
				return h, err
			}
			now, err := holdings(ctx, s.daemon)
			if err != nil {
				return h, err
			}
			if i > 0 {
				now.heapGoal, now.anonymous = min(now.heapGoal, h.heapGoal), min(now.anonymous, h.anonymous)
			}
			h = now
		}
		return h, nil
	}
	if err := change(times); err != nil { // afterwards memory has its working size
		return err
	}
	before, err := least()
	if err != nil {
		return err
	}
	if err := change(times); err != nil {
		return err
	}
	after, err := least()
	if err != nil {
		return err
	}
	r.report.add(group, "size at which the heap is collected, growth", n, "MB", mb(after.heapGoal-before.heapGoal), 2)
	r.report.add(group, "anonymous RSS, growth", n, "MB", mb(after.anonymous-before.anonymous))
	r.report.add(group, "open files, growth", n, "", float64(after.files-before.files), 0)
	r.report.add(group, "goroutines, growth", n, "", after.goroutines-before.goroutines, 0)
	r.report.add(group, "CPU a change", n, "ms", ms(after.cpu-before.cpu)/(1.1*float64(r.churnChange)))
	return r.verify(ctx, r.lab.Host(1), n)
}

// measureSize measures the size of the daemon's binary, which must be stripped.
func (r *runner) measureSize(context.Context) error {
	info, err := os.Stat(r.flanneld)
	if err != nil {
		return err
	}
	binary, err := elf.Open(r.flanneld)
	if err != nil {
		return err
	}
	defer binary.Close()
	if binary.Section(".symtab") != nil {
		return fmt.Errorf("%s is not stripped: build it with make build", r.flanneld)
	}
	r.report.add("binary", "flanneld, stripped", -1, "MB", mb(float64(info.Size())), 35)
	return nil
}
