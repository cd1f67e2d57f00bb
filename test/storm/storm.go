// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
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
}

// startHosts starts the process with all managers inside host 1. The process has the lowest priority,
// because in a real cluster hosts do not use the CPUs of the store.
func (s *storm) startHosts(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	s.child = exec.Command("nice", "-n", "19", self, hostsChild)
	s.child.Stderr = os.Stderr
	in, err := s.child.StdinPipe()
	if err != nil {
		return err
	}
	out, err := s.child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := s.lab.Host(1).Do(ctx, morePorts); err != nil {
		return fmt.Errorf("start hosts: %w", err)
	}
	if err := s.lab.Host(1).Start(s.child); err != nil {
		return fmt.Errorf("start hosts: %w", err)
	}
	s.hosts = rpc.NewClient(pipes{out, in})
	return nil
}

// morePorts lets new connections from the calling thread's network namespace use more ports, and those
// of closed connections. All managers share one address. Without morePorts, thousands of closed
// connections would occupy their ports for a minute, and the kernel's search for a free port would take
// much of a CPU.
func morePorts() error {
	for file, value := range map[string]string{"ip_local_port_range": "1024 65535", "tcp_tw_reuse": "1"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0); err != nil {
			return fmt.Errorf("set the ports of connections: %w", err)
		}
	}
	return nil
}

func (s *storm) stopHosts() {
	if s.child != nil {
		_ = s.child.Process.Kill() // it may have ended
		_ = s.child.Wait()
	}
}

// call calls a method of Hosts in the other process, and waits for its reply. It returns an error if ctx
// ends first.
func (s *storm) call(ctx context.Context, method string, args, reply any) error {
	c := s.hosts.Go("Hosts."+method, args, reply, make(chan *rpc.Call, 1))
	select {
	case <-c.Done:
		if c.Error != nil {
			return fmt.Errorf("hosts: %s: %w", method, c.Error)
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// result is what one scenario has cost.
type result struct {
	Store    string `json:"store"`
	N        int    `json:"n"`
	Scenario string `json:"scenario"`

	Right      int            `json:"right"`               // number of hosts, of N, that were right at the end
	Seconds    float64        `json:"seconds"`             // seconds until the last host was right, or until the limit
	Half       float64        `json:"half,omitzero"`       // seconds until half of them were right
	Leased     float64        `json:"leased,omitzero"`     // seconds until all hosts had their own leases; 0 if hosts ran before
	StoreCPU   float64        `json:"storeCPU"`            // CPU time in seconds, without the proxy
	ProxyCPU   float64        `json:"proxyCPU,omitempty"`  // CPU time in seconds of the proxy in front of the store
	ProxyPeak  float64        `json:"proxyPeak,omitempty"` // largest memory of the proxy in bytes, since its start
	HostsCPU   float64        `json:"hostsCPU"`            // CPU time in seconds of the process with all managers
	Sent       float64        `json:"sent"`                // bytes that the store sent to hosts
	Received   float64        `json:"received"`            // bytes that the store received from hosts
	Peak       float64        `json:"peak"`                // largest memory of the store in bytes
	HostsPeak  float64        `json:"hostsPeak"`           // largest memory of the process with all managers in bytes, since its start
	Calls      figures.Counts `json:"calls"`               // number of requests by kind, without those of the bystander
	Slowest    float64        `json:"slowest"`             // seconds that the slowest request of the bystander took
	P99        float64        `json:"p99"`                 // 99th percentile of the bystander's requests, in seconds
	Bystanding int            `json:"bystanding"`          // number of times that the bystander touched the store
	Failed     int            `json:"failed"`              // of these, how many failed
	Outages    int            `json:"-"`                   // how often a host has lost its store
	Example    string         `json:"example,omitempty"`
}

// reading is what the processes of a storm have used up to one moment.
type reading struct {
	store, hosts, proxy usage // proxy is zero if there is none
	calls               figures.Counts
	sent, received      float64 // bytes from the store to hosts, and from hosts to the store
}

// read reads what all processes have used so far.
func (s *storm) read(ctx context.Context) (now reading, err error) {
	if now.store, err = usageOf(s.store.pid()); err != nil {
		return now, err
	}
	if now.hosts, err = usageOf(s.child.Process.Pid); err != nil {
		return now, err
	}
	if e, ok := s.store.(*etcdServer); ok && e.proxy != nil {
		if now.proxy, err = usageOf(e.proxy.cmd.Process.Pid); err != nil {
			return now, err
		}
	}
	if now.sent, now.received, err = s.traffic(ctx); err != nil {
		return now, err
	}
	now.calls, err = s.store.calls(ctx)
	return now, err
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

func (s *storm) measure(ctx context.Context) (m *meter, err error) {
	if err := figures.ResetPeak(s.store.pid()); err != nil {
		return nil, err
	}
	m = &meter{s: s, ended: figures.Counts{}, began: time.Now()}
	if m.first, err = s.read(ctx); err != nil {
		return nil, err
	}
	if err := s.call(ctx, "State", struct{}{}, &m.earlier); err != nil {
		return nil, err
	}
	m.bystander = s.bystand(ctx)
	return m, nil
}

// restart restarts the store. The cost of the old process counts too.
func (m *meter) restart(ctx context.Context) error {
	now, err := m.s.read(ctx)
	if err != nil {
		return err
	}
	m.spent += now.store.cpu - m.first.store.cpu
	m.peak = max(m.peak, now.store.peak)
	m.ended.Add(now.calls.Since(m.first.calls))
	m.first.store = usage{}
	m.first.calls = figures.Counts{}
	return m.s.store.restart(ctx)
}

// end waits until the hosts are right, but no longer than the limit. It returns what the scenario has
// cost, together with an error if some hosts are not right.
func (m *meter) end(ctx context.Context, scenario string) (*result, error) {
	s := m.s
	var now State
	if err := s.call(ctx, "Wait", Wait{Limit: s.limit}, &now); err != nil {
		return nil, err
	}
	r := &result{N: s.n, Scenario: scenario, Right: now.Right, Seconds: now.Last.Sub(m.began).Seconds(), Example: now.Example}
	r.Half = now.Half.Sub(m.began).Seconds()
	if m.earlier.Running == 0 {
		r.Leased = now.Leased.Sub(m.began).Seconds()
	}

	r.Outages = now.Outages - m.earlier.Outages
	if now.Right < now.Running {
		r.Seconds = time.Since(m.began).Seconds()
	}

	m.bystander.finish(r)
	last, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	r.StoreCPU = (m.spent + last.store.cpu - m.first.store.cpu).Seconds()
	r.HostsCPU = (last.hosts.cpu - m.first.hosts.cpu).Seconds()
	r.ProxyCPU = (last.proxy.cpu - m.first.proxy.cpu).Seconds()
	r.Peak = max(m.peak, last.store.peak)
	r.HostsPeak = last.hosts.peak
	r.ProxyPeak = last.proxy.peak
	r.Sent = last.sent - m.first.sent
	r.Received = last.received - m.first.received
	r.Calls = m.ended
	r.Calls.Add(last.calls.Since(m.first.calls))
	for _, kind := range s.store.bystanderCalls() {
		r.Calls[kind] = max(0, r.Calls[kind]-float64(r.Bystanding))
	}
	if now.Right < now.Running {
		return r, fmt.Errorf("%s: %d of %d hosts are right after %s: %s", scenario, now.Right, now.Running, s.limit, now.Example)
	}
	return r, nil
}

// traffic returns how many bytes the store has sent to the hosts, and how many it has received from
// them.
func (s *storm) traffic(ctx context.Context) (sent, received float64, err error) {
	var text []byte
	err = s.lab.Host(1).Do(ctx, func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/dev")
		return err
	})
	if err != nil {
		return 0, 0, err
	}

	for line := range strings.Lines(string(text)) {
		name, rest, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "eth0" {
			continue
		}
		fields := strings.Fields(rest) // received bytes are first: the hosts have received what the store has sent
		if sent, err = strconv.ParseFloat(fields[0], 64); err != nil {
			return 0, 0, err
		}
		received, err = strconv.ParseFloat(fields[8], 64)
		return sent, received, err
	}
	return 0, 0, errors.New("/proc/net/dev has no eth0")
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
			err := s.store.writeAndRead(limited)
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

// loadAll makes hosts read their last known state. It replaces a.Store by the store of s, except TTL and
// Margin.
func (s *storm) loadAll(ctx context.Context, a Start) error {
	a.Store.merge(s.store.reach())
	return s.call(ctx, "Load", a, &struct{}{})
}

// startAll starts hosts. It replaces a.Store by the store of s, except TTL and Margin.
func (s *storm) startAll(ctx context.Context, a Start) error {
	a.Store.merge(s.store.reach())
	return s.call(ctx, "Start", a, &struct{}{})
}

// merge copies other to s. s keeps its TTL and Margin.
func (s *Store) merge(other Store) {
	ttl := s.TTL
	margin := s.Margin
	*s = other
	s.TTL = ttl
	s.Margin = margin
}

// stopAll stops hosts and returns the leases that they leave behind.
func (s *storm) stopAll(ctx context.Context, a Stop) ([]subnet.Lease, error) {
	var r Stopped
	err := s.call(ctx, "Stop", a, &r)
	return r.Leases, err
}

// scenario is a situation in which many hosts use the store at once.
type scenario struct {
	name string
	run  func(*storm, context.Context) (*result, error)
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

// boot starts all hosts at once with an empty store.
func (s *storm) boot(ctx context.Context) (*result, error) {
	m, err := s.measure(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.startAll(ctx, Start{To: s.n, Forget: true}); err != nil {
		return nil, err
	}
	return m.end(ctx, "boot")
}

// reboot starts all hosts at once after a power failure: they have their last known state, and the store
// has their leases.
func (s *storm) reboot(ctx context.Context) (*result, error) {
	if _, err := s.stopAll(ctx, Stop{To: s.n}); err != nil {
		return nil, err
	}
	if err := s.loadAll(ctx, Start{To: s.n}); err != nil {
		return nil, err
	}
	m, err := s.measure(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.startAll(ctx, Start{To: s.n}); err != nil {
		return nil, err
	}
	return m.end(ctx, "reboot")
}

// restart restarts the store while all hosts run. They are right when they know a lease that was written
// after the restart.
func (s *storm) restart(ctx context.Context) (*result, error) {
	m, err := s.measure(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.restart(ctx); err != nil {
		return nil, err
	}
	extra, err := s.putExtra(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.call(ctx, "Expect", Expect{Leases: []subnet.Lease{extra}}, &struct{}{}); err != nil {
		return nil, err
	}
	r, err := m.end(ctx, "restart")
	return r, errors.Join(err, s.dropExtra(ctx, extra))
}

// churn makes a tenth of the hosts leave within s.minute, while as many new ones join. After the
// measurement the new hosts leave and the former ones join again, so that the hosts have the numbers
// from 0 to N-1 again.
func (s *storm) churn(ctx context.Context) (*result, error) {
	tenth := max(1, s.n/10)
	m, err := s.measure(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.replace(ctx, 0, s.n, tenth, s.minute); err != nil {
		return nil, err
	}
	r, err := m.end(ctx, "churn")
	if err != nil {
		return r, err
	}
	if err := s.replace(ctx, s.n, 0, tenth, 0); err != nil {
		return r, err
	}
	return r, s.settle(ctx, "after churn")
}

// settle waits until all hosts are right, but no longer than the limit. It returns an error with the
// moment when if some are not right then.
func (s *storm) settle(ctx context.Context, when string) error {
	var now State
	if err := s.call(ctx, "Wait", Wait{Limit: s.limit}, &now); err != nil {
		return err
	}
	if now.Right < s.n {
		return fmt.Errorf("%s %d of %d hosts are right: %s", when, now.Right, s.n, now.Example)
	}
	return nil
}

// replace makes some hosts leave the cluster and as many others join. The parameter count is how many
// leave. old is the number of the first host that leaves, and fresh is the number of the first one that
// joins. If within is not zero, replace does this step by step, one step per second, and takes the time
// within. Otherwise it makes one step.
func (s *storm) replace(ctx context.Context, old, fresh, count int, within time.Duration) error {
	steps := max(1, int(within/time.Second))
	tick := time.NewTicker(max(within/time.Duration(steps), time.Millisecond))
	defer tick.Stop()

	for i := range steps {
		from := count * i / steps
		to := count * (i + 1) / steps
		if from < to {
			gone, err := s.stopAll(ctx, Stop{From: old + from, To: old + to})
			if err != nil {
				return err
			}
			if err := s.remove(ctx, gone, old+from, old+to); err != nil {
				return err
			}
			if err := s.call(ctx, "Expect", Expect{Leases: gone, Gone: true}, &struct{}{}); err != nil {
				return err
			}
			if k, ok := s.store.(*apiServer); ok {
				if err := k.addNodes(ctx, fresh+from, fresh+to); err != nil {
					return err
				}
			}
			if err := s.startAll(ctx, Start{From: fresh + from, To: fresh + to, Forget: true}); err != nil {
				return err
			}
		}

		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// remove deletes leases from etcd, as if they had expired. On Kubernetes it ignores leases, and deletes
// the Nodes of the hosts whose number n has from <= n < to.
func (s *storm) remove(ctx context.Context, leases []subnet.Lease, from, to int) error {
	if k, ok := s.store.(*apiServer); ok {
		return k.removeNodes(ctx, from, to)
	}
	e := s.store.(*etcdServer)
	for _, l := range leases {
		if _, err := e.client.Delete(ctx, lab.Prefix+"/subnets/"+l.Key); err != nil {
			return fmt.Errorf("delete lease %s: %w", l.Key, err)
		}
	}
	return nil
}

// extra is the number of a host that does not exist.
const extra = 20_000

// putExtra writes a lease for the host extra, and returns it. On Kubernetes it also creates the Node.
func (s *storm) putExtra(ctx context.Context) (subnet.Lease, error) {
	l := subnet.Lease{Key: nodeName(extra), Endpoints: []subnet.Endpoint{{PublicIP: publicIP(extra)}}}
	if k, ok := s.store.(*apiServer); ok {
		if err := k.addNodes(ctx, extra, extra+1); err != nil {
			return l, err
		}
		return l, k.do(ctx, adminToken, "PATCH", nodesPath+"/"+l.Key, map[string]any{"metadata": map[string]any{"annotations": map[string]string{
			"flannel.alpha.coreos.com/kube-subnet-manager": "true", "flannel.alpha.coreos.com/backend-type": "vxlan",
			"flannel.alpha.coreos.com/public-ip": publicIP(extra).String(), "flannel.alpha.coreos.com/backend-data": string(vtep(extra)),
		}}})
	}

	l.Key = extraSubnet
	value := fmt.Sprintf(`{"PublicIP":"%s","PublicIPv6":null,"BackendType":"vxlan","BackendData":%s}`, publicIP(extra), vtep(extra))
	_, err := s.store.(*etcdServer).client.Put(ctx, lab.Prefix+"/subnets/"+l.Key, value)
	return l, err
}

// dropExtra deletes what putExtra has written, and waits until all hosts have seen that. It returns
// an error if some have not within the limit.
func (s *storm) dropExtra(ctx context.Context, l subnet.Lease) error {
	if err := s.remove(ctx, []subnet.Lease{l}, extra, extra+1); err != nil {
		return err
	}
	if err := s.call(ctx, "Expect", Expect{Leases: []subnet.Lease{l}, Gone: true}, &struct{}{}); err != nil {
		return err
	}
	return s.settle(ctx, "after the extra lease is gone")
}

// renewAll makes all hosts renew their leases. For that it starts the hosts again, with leases that they
// renew after the time s.renew instead of 23 hours.
func (s *storm) renewAll(ctx context.Context) (*result, error) {
	leases, err := s.stopAll(ctx, Stop{To: s.n})
	if err != nil {
		return nil, err
	}
	e := s.store.(*etcdServer)

	// The leases that the former scenario has left have another TTL, so each host would first replace
	// its own lease.
	if _, err := e.client.Delete(ctx, lab.Prefix+"/subnets/", clientv3.WithPrefix()); err != nil {
		return nil, err
	}
	if err := s.call(ctx, "Expect", Expect{Leases: leases, Gone: true}, &struct{}{}); err != nil {
		return nil, err
	}
	ttl := time.Hour
	if s.renew < time.Minute { // with a TTL of an hour, managers would not renew leases that early
		ttl = 3 * s.renew
	}
	if err := s.startAll(ctx, Start{To: s.n, Store: Store{TTL: ttl, Margin: ttl - s.renew}}); err != nil {
		return nil, err
	}
	if err := s.settle(ctx, "before the leases are renewed"); err != nil {
		return nil, err
	}
	m, err := s.measure(ctx)
	if err != nil {
		return nil, err
	}
	var now State
	if err := s.call(ctx, "Wait", Wait{Limit: s.limit, Renewed: m.began}, &now); err != nil {
		return nil, err
	}
	took := time.Since(m.began)
	r, err := m.end(ctx, "renew")
	if err == nil && now.Renewed < s.n {
		err = fmt.Errorf("renew: %d of %d leases were renewed in %s", now.Renewed, s.n, took)
	}
	if r != nil {
		r.Seconds, r.Half = took.Seconds(), 0 // the hosts were right all the time
	}
	return r, err
}

// run runs the scenarios with these names, or all if names is empty. It leaves out those that the store
// does not have. It adds their results to the report, and stops after a failure.
func (s *storm) run(ctx context.Context, names []string, progress io.Writer) error {
	e, isEtcd := s.store.(*etcdServer)
	for _, sc := range scenarios() {
		if len(names) > 0 && !slices.Contains(names, sc.name) || sc.etcd && !isEtcd {
			continue
		}

		r, err := sc.run(s, ctx)
		if r != nil {
			switch {
			case !isEtcd:
				r.Store = "Kubernetes"
			case e.proxy != nil:
				r.Store = "etcd behind its proxy"
			default:
				r.Store = "etcd"
			}
			s.report.Results = append(s.report.Results, r)
			fmt.Fprintln(progress, r)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
