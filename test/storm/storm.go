// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// storm is a store with the hosts that use it.
type storm struct {
	lab    *lab.Lab
	store  server
	n      int
	limit  time.Duration // limit of one scenario
	minute time.Duration // time in which a tenth of the hosts leaves and as many join
	renew  time.Duration // time after which each lease is renewed, in the scenario renew
	child  *exec.Cmd
	hosts  *rpc.Client
	report *report
	out    io.Writer // gets a line for each result
}

// startHosts starts the process with all managers inside host 1. The process has the lowest priority,
// because in a real cluster hosts do not use the CPUs of the store.
func (s *storm) startHosts(ctx context.Context) {
	s.child = exec.Command("nice", "-n", "19", must.Get(os.Executable()), hostsChild)
	s.child.Stderr = os.Stderr
	in := must.Get(s.child.StdinPipe())
	out := must.Get(s.child.StdoutPipe())
	must.Do(s.lab.Host(1).Do(ctx, func() error { return must.Catch(morePorts) }))
	must.Do(s.lab.Host(1).Start(s.child))
	s.hosts = rpc.NewClient(pipes{out, in})
}

// morePorts lets new connections from the calling thread's network namespace use more ports, and those
// of closed connections. All managers share one address. Without morePorts, thousands of closed
// connections would occupy their ports for a minute, and the kernel's search for a free port would take
// much of a CPU.
func morePorts() {
	for file, value := range map[string]string{"ip_local_port_range": "1024 65535", "tcp_tw_reuse": "1"} {
		must.Do(os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0))
	}
}

func (s *storm) stopHosts() {
	if s.child != nil {
		_ = s.child.Process.Kill() // it may have ended
		_ = s.child.Wait()
	}
}

// call calls a method of Hosts in the other process, and waits for its reply. The measurement ends
// if ctx ends first.
func (s *storm) call(ctx context.Context, method string, args, reply any) {
	c := s.hosts.Go("Hosts."+method, args, reply, make(chan *rpc.Call, 1))
	select {
	case <-c.Done:
		if c.Error != nil {
			must.Fail("hosts: %s: %w", method, c.Error)
		}
	case <-ctx.Done():
		must.Do(context.Cause(ctx))
	}
}

// result is what one scenario has cost.
type result struct {
	Store    string `json:"store"`
	N        int    `json:"n"`
	Scenario string `json:"scenario"`

	Right      int            `json:"right"`           // number of hosts, of N, that were right at the end
	Seconds    float64        `json:"seconds"`         // seconds until the last host was right, or until the limit
	Half       float64        `json:"half,omitzero"`   // seconds until half of them were right
	Leased     float64        `json:"leased,omitzero"` // seconds until all hosts had their own leases; 0 if hosts ran before
	StoreCPU   float64        `json:"storeCPU"`        // CPU time in seconds
	HostsCPU   float64        `json:"hostsCPU"`        // CPU time in seconds of the process with all managers
	Sent       float64        `json:"sent"`            // bytes that the store sent to hosts
	Received   float64        `json:"received"`        // bytes that the store received from hosts
	Peak       float64        `json:"peak"`            // largest memory of the store in bytes
	HostsPeak  float64        `json:"hostsPeak"`       // largest memory of the process with all managers in bytes, since its start
	Calls      figures.Counts `json:"calls"`           // number of requests by kind, without those of the bystander
	Slowest    float64        `json:"slowest"`         // seconds that the slowest request of the bystander took
	P99        float64        `json:"p99"`             // 99th percentile of the bystander's requests, in seconds
	Bystanding int            `json:"bystanding"`      // number of times that the bystander touched the store
	Failed     int            `json:"failed"`          // of these, how many failed
	Outages    int            `json:"-"`               // how often a host has lost its store
	Example    string         `json:"example,omitempty"`
}

// reading is what the processes of a storm have used up to one moment.
type reading struct {
	store, hosts   usage
	calls          figures.Counts
	sent, received float64 // bytes from the store to hosts, and from hosts to the store
}

// read reads what all processes have used so far. The hosts have received what the store has sent.
func (s *storm) read(ctx context.Context) reading {
	var eth0 *netlink.LinkStatistics
	must.Do(s.lab.Host(1).Netlink(ctx, func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("eth0")
		if err == nil {
			eth0 = link.Attrs().Statistics
		}
		return err
	}))
	return reading{usageOf(s.store.pid()), usageOf(s.child.Process.Pid), s.store.calls(ctx), float64(eth0.RxBytes), float64(eth0.TxBytes)}
}

// meter measures what a scenario costs.
type meter struct {
	s         *storm
	began     time.Time
	first     reading        // values at the beginning of the scenario; those of the store are zero after a restart of it
	spent     time.Duration  // CPU time of the store's processes that have ended in this scenario
	ended     figures.Counts // requests that these processes have received
	peak      float64        // largest memory of these processes, in bytes
	bystander *bystander
	earlier   State
}

func (s *storm) measure(ctx context.Context) (m *meter) {
	figures.ResetPeak(s.store.pid())
	m = &meter{s: s, ended: figures.Counts{}, began: time.Now()}
	m.first = s.read(ctx)
	s.call(ctx, "State", struct{}{}, &m.earlier)
	m.bystander = s.bystand(ctx)
	return m
}

// restart restarts the store. The cost of the old process counts too.
func (m *meter) restart(ctx context.Context) {
	now := m.s.read(ctx)
	m.spent += now.store.cpu - m.first.store.cpu
	m.peak = max(m.peak, now.store.peak)
	m.ended.Add(now.calls.Since(m.first.calls))
	m.first.store = usage{}
	m.first.calls = figures.Counts{}
	m.s.store.restart(ctx)
}

func (m *meter) end(ctx context.Context, scenario string) *result {
	s := m.s
	now := s.wait(ctx, time.Time{})
	r := &result{Store: s.store.name(), N: s.n, Scenario: scenario, Right: now.Right, Seconds: now.Last.Sub(m.began).Seconds(), Example: now.Example}
	r.Half = now.Half.Sub(m.began).Seconds()
	if m.earlier.Running == 0 {
		r.Leased = now.Leased.Sub(m.began).Seconds()
	}

	r.Outages = now.Outages - m.earlier.Outages
	if now.Right < now.Running {
		r.Seconds = time.Since(m.began).Seconds()
	}

	m.bystander.finish(r)
	last := s.read(ctx)
	r.StoreCPU = (m.spent + last.store.cpu - m.first.store.cpu).Seconds()
	r.HostsCPU = (last.hosts.cpu - m.first.hosts.cpu).Seconds()
	r.Peak = max(m.peak, last.store.peak)
	r.HostsPeak = last.hosts.peak
	r.Sent = last.sent - m.first.sent
	r.Received = last.received - m.first.received
	r.Calls = m.ended
	r.Calls.Add(last.calls.Since(m.first.calls))
	for _, kind := range s.store.bystanderCalls() {
		r.Calls[kind] = max(0, r.Calls[kind]-float64(r.Bystanding))
	}
	return r
}

func (s *storm) record(r *result) {
	s.report.Results = append(s.report.Results, r)
	fmt.Fprintln(s.out, r)
	if r.Right < s.n {
		must.Fail("%s: %d of %d hosts are right after %s: %s", r.Scenario, r.Right, s.n, s.limit, r.Example)
	}
}

func (s *storm) wait(ctx context.Context, renewed time.Time) (now State) {
	s.call(ctx, "Wait", Wait{Limit: s.limit, Renewed: renewed}, &now)
	return now
}

// bystander is another user of the store, which measures how long its requests take.
type bystander struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	took   []time.Duration
	failed int
}

// bystandEvery is the time from one writeAndRead of the bystander to the next.
const bystandEvery = 100 * time.Millisecond

func (s *storm) bystand(ctx context.Context) *bystander {
	b := &bystander{}
	ctx, b.cancel = context.WithCancel(ctx)
	b.wg.Go(func() {
		tick := time.NewTicker(bystandEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}

			began := time.Now()
			limited, cancel := context.WithTimeout(ctx, time.Minute)
			err := must.Catch(func() { s.store.writeAndRead(limited) })
			cancel()
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				b.failed++
			}
			b.took = append(b.took, time.Since(began))
		}
	})
	return b
}

func (b *bystander) finish(r *result) {
	b.cancel()
	b.wg.Wait()
	slices.Sort(b.took)
	r.Bystanding = len(b.took)
	r.Failed = b.failed
	if n := len(b.took); n > 0 {
		r.Slowest, r.P99 = b.took[n-1].Seconds(), b.took[n*99/100].Seconds()
	}
}

// startAll calls Start or Load, for hosts that use the store of s.
func (s *storm) startAll(ctx context.Context, method string, a Start) {
	a.Store = s.store.reach()
	s.call(ctx, method, a, &struct{}{})
}

func (s *storm) stopAll(ctx context.Context, a Range) (leases []subnet.Lease) {
	s.call(ctx, "Stop", a, &leases)
	return leases
}

func (s *storm) expect(ctx context.Context, gone bool, leases ...subnet.Lease) {
	s.call(ctx, "Expect", Expect{Leases: leases, Gone: gone}, &struct{}{})
}

// scenario is a situation in which many hosts use the store at once.
type scenario struct {
	name string
	run  func(*storm, context.Context)
	etcd bool // the scenario exists only with etcd
}

// scenarios returns all scenarios in their order. Each begins with the hosts and leases that the one
// before has left.
func scenarios() []scenario {
	return []scenario{
		{name: "boot", run: (*storm).boot},
		{name: "churn", run: (*storm).churn},
		{name: "restart", run: (*storm).restart},
		{name: "reboot", run: (*storm).reboot},
		{name: "renew", run: (*storm).renewAll, etcd: true},
	}
}

func (s *storm) boot(ctx context.Context) {
	m := s.measure(ctx)
	s.startAll(ctx, "Start", Start{Range: Range{To: s.n}, Forget: true})
	s.record(m.end(ctx, "boot"))
}

// reboot starts all hosts at once after a power failure: they have their last known state, and the store
// has their leases.
func (s *storm) reboot(ctx context.Context) {
	all := Range{To: s.n}
	s.stopAll(ctx, all)
	s.startAll(ctx, "Load", Start{Range: all})
	m := s.measure(ctx)
	s.startAll(ctx, "Start", Start{Range: all})
	s.record(m.end(ctx, "reboot"))
}

// restart restarts the store while all hosts run. They are right when they know a lease that was written
// after the restart.
func (s *storm) restart(ctx context.Context) {
	m := s.measure(ctx)
	m.restart(ctx)
	one := s.store.putExtra(ctx)
	s.expect(ctx, false, one)
	s.record(m.end(ctx, "restart"))
	s.store.leave(ctx, []subnet.Lease{one}, extra, extra+1)
	s.expect(ctx, true, one)
	s.settle(ctx, "after the extra lease is gone")
}

// churn makes a tenth of the hosts leave within s.minute, while as many new ones join. After the
// measurement the new hosts leave and the former ones join again, so that the hosts have the numbers
// from 0 to N-1 again.
func (s *storm) churn(ctx context.Context) {
	tenth := max(1, s.n/10)
	m := s.measure(ctx)
	s.replace(ctx, 0, s.n, tenth, s.minute)
	s.record(m.end(ctx, "churn"))
	s.replace(ctx, s.n, 0, tenth, 0)
	s.settle(ctx, "after churn")
}

// settle waits until all hosts are right. The measurement ends with the
// moment when if some are not right at the limit.
func (s *storm) settle(ctx context.Context, when string) {
	if now := s.wait(ctx, time.Time{}); now.Right < s.n {
		must.Fail("%s %d of %d hosts are right: %s", when, now.Right, s.n, now.Example)
	}
}

// replace makes some hosts leave the cluster and as many others join. The parameter count is how many
// leave. old is the number of the first host that leaves, and fresh is the number of the first one that
// joins. If within is not zero, replace does this step by step, one step per second, and takes the time
// within. Otherwise it makes one step.
func (s *storm) replace(ctx context.Context, old, fresh, count int, within time.Duration) {
	steps := max(1, int(within/time.Second))
	tick := time.NewTicker(max(within/time.Duration(steps), time.Millisecond))
	defer tick.Stop()

	for i := range steps {
		from := count * i / steps
		to := count * (i + 1) / steps
		if from < to {
			gone := s.stopAll(ctx, Range{old + from, old + to})
			s.store.leave(ctx, gone, old+from, old+to)
			s.expect(ctx, true, gone...)
			s.store.join(ctx, fresh+from, fresh+to)
			s.startAll(ctx, "Start", Start{Range: Range{fresh + from, fresh + to}, Forget: true})
		}

		select {
		case <-tick.C:
		case <-ctx.Done():
			must.Do(context.Cause(ctx))
		}
	}
}

// extra is the number of a host that does not exist.
const extra = 20_000

// renewAll makes all hosts renew their leases. For that it starts the hosts again, with leases that they
// renew after the time s.renew instead of 23 hours.
func (s *storm) renewAll(ctx context.Context) {
	leases := s.stopAll(ctx, Range{To: s.n})

	// The leases that the former scenario has left have another TTL, so each host would first replace
	// its own lease.
	s.store.leave(ctx, leases, 0, s.n)
	s.expect(ctx, true, leases...)
	ttl := time.Hour
	if s.renew < time.Minute { // with a TTL of an hour, managers would not renew leases that early
		ttl = 3 * s.renew
	}
	s.startAll(ctx, "Start", Start{Range: Range{To: s.n}, TTL: ttl, Margin: ttl - s.renew})
	s.settle(ctx, "before the leases are renewed")
	m := s.measure(ctx)
	now := s.wait(ctx, m.began)
	took := time.Since(m.began)
	r := m.end(ctx, "renew")
	r.Seconds, r.Half = took.Seconds(), 0 // the hosts were right all the time
	s.record(r)
	if now.Renewed < s.n {
		must.Fail("renew: %d of %d leases were renewed in %s", now.Renewed, s.n, took)
	}
}

func (s *storm) run(ctx context.Context, names []string) {
	_, isEtcd := s.store.(*etcdServer)
	for _, sc := range scenarios() {
		if (len(names) == 0 || slices.Contains(names, sc.name)) && (isEtcd || !sc.etcd) {
			sc.run(s, ctx)
		}
	}
}
