// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// fleet is a daemon with several networks. It follows their configurations in the store, and decides which of them
// the networks may use. Each member then makes its network do that.
type fleet struct {
	host     *network.Host
	cfg      Config
	etcd     *etcd.Manager  // its connection is that of all networks
	log      klog.Logger    // for the phases of the networks
	news     wait.Signal    // sent when a network may claim less than before, and when one has become ready
	moved    wait.Broadcast // sent when the prefixes of a network change
	answered chan struct{}  // closed when the store has answered, and each network was decided about
	up       chan struct{}  // closed after that, when each network is ready, was refused or has no configuration
	allUp    func()         // closes up

	mu      sync.Mutex // also for all fields of the members that change
	members []*member  // in the order in which they have joined; those that join at the same time are sorted by name
	listed  bool       // the store has answered
}

func newFleet(h *network.Host, cfg Config, m *etcd.Manager, log klog.Logger) *fleet {
	f := &fleet{host: h, cfg: cfg, etcd: m, log: log, news: wait.NewSignal(), answered: make(chan struct{}), up: make(chan struct{})}
	f.allUp = sync.OnceFunc(func() { close(f.up) })
	return f
}

func openFleet(ctx context.Context, h *network.Host, cfg Config) (served, error) {
	o := cfg.Options
	m, err := etcd.New(network.EtcdConfig(o))
	if err != nil {
		return nil, err
	}
	f := newFleet(h, cfg, m, klog.FromContext(ctx))
	for _, name := range slices.Sorted(slices.Values(o.Networks)) {
		f.join(name)
	}
	if err := f.recall(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// recall adds the networks of an earlier process with the same etcd prefix. They are served from their last
// known state until the store answers.
func (f *fleet) recall() error {
	return lastknown.Each(f.cfg.Options.StateDir, func(_ string, last lastknown.State) error {
		if last.Name == "" || last.Prefix != parentPrefix(f.cfg.Options) {
			return nil
		}
		return f.join(last.Name).recall(last)
	})
}

// parentPrefix is the prefix of all networks, as state files contain it.
func parentPrefix(o options.Options) string { return strings.TrimRight(o.EtcdPrefix, "/") }

// join adds a network if it is new. The caller of this and of the other methods up to Run holds f.mu, unless no other
// goroutine uses f yet.
func (f *fleet) join(name string) *member {
	if i := slices.IndexFunc(f.members, func(m *member) bool { return m.name == name }); i >= 0 {
		return f.members[i]
	}
	m := &member{fleet: f, name: name, wake: wait.NewSignal(), progress: network.NewProgress(f.log.WithValues("network", name))}
	f.members = append(f.members, m)
	return m
}

// apply passes the configurations in the store to the members, and adds members for new networks.
func (f *fleet) apply(ctx context.Context, now etcd.NetworkConfigs) {
	for _, name := range slices.Sorted(maps.Keys(now.Texts)) {
		f.join(name)
	}

	listed := f.cfg.Options.Networks
	for _, m := range f.members {
		text, exists := now.Texts[m.name]
		if exists || slices.Contains(now.Deleted, m.name) || len(listed) > 0 && !slices.Contains(listed, m.name) {
			m.offer(text)
			continue
		}

		// The store may have been emptied or replaced, and the pods of a network that is needed must not
		// be cut off. A deletion of long ago, which the store no longer reports, looks the same.
		m.miss(ctx)
	}

	first := !f.listed
	f.listed = true
	f.decide(ctx)
	if first {
		close(f.answered)
	}
}

// decide admits or refuses the configurations that were not admitted yet, in the order in which the networks have
// joined. If networks wait for each other, it makes one of them release what it has.
func (f *fleet) decide(ctx context.Context) {
	for _, m := range f.members {
		m.admit(ctx)
	}
	if !f.listed {
		return
	}
	if m := f.knot(); m != nil {
		m.yield(ctx)
	}
	if !slices.ContainsFunc(f.members, func(m *member) bool { return !m.isUp() }) {
		f.allUp()
	}
}

// forget ends the members whose networks were deleted, when nothing of these is left on this host. Otherwise a host
// would list each network that has ever been there. Those of --networks are waited for.
func (f *fleet) forget() {
	f.members = slices.DeleteFunc(f.members, func(m *member) bool {
		left := m.has() || len(m.claimed) > 0 || m.net != nil || m.last != nil
		gone := f.listed && !left && !slices.Contains(f.cfg.Options.Networks, m.name)
		if gone {
			m.end()
		}
		return gone
	})
}

// Run implements served.
func (f *fleet) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	update := func(change func()) {
		f.mu.Lock()
		defer f.mu.Unlock()
		change()
		for _, m := range f.members {
			if m.end != nil {
				continue
			}
			running, end := context.WithCancel(ctx)
			m.end = end
			group.Go(func() error {
				defer end()
				m.run(running)
				return nil
			})
		}
		f.forget()
	}

	update(func() {})
	group.Go(func() error {
		for {
			select {
			case <-f.news:
				update(func() { f.decide(ctx) })
			case <-ctx.Done():
				return nil
			}
		}
	})

	group.Go(func() error {
		err := f.etcd.Networks(ctx, f.cfg.Options.Networks, f.known, func(now etcd.NetworkConfigs) {
			update(func() { f.apply(ctx, now) })
		})
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
	return group.Wait()
}

// known returns the last recorded moments at which the store had the configurations.
func (f *fleet) known() map[string]subnet.Observation {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := map[string]subnet.Observation{}
	for _, m := range f.members {
		if m.learn(); m.seen.Revision != 0 {
			known[m.name] = m.seen
		}
	}
	return known
}

// Close implements served.
func (f *fleet) Close() { _ = f.etcd.Close() }

// present returns copies of the members as they are now, so that their networks can be asked without f.mu.
func (f *fleet) present() (all []member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		all = append(all, *m)
	}
	return all
}

// Shutdown implements served. The members have closed their networks by then, unless Run of the daemon has
// stopped waiting for them.
func (f *fleet) Shutdown(ctx context.Context) {
	for _, m := range f.present() {
		if n := cmp.Or(m.net, m.last); n != nil {
			n.Shutdown(ctx)
		}
	}
}

// Alive implements health.Source.
func (f *fleet) Alive() error {
	for _, m := range f.present() {
		if m.net != nil {
			if err := m.net.Alive(); err != nil {
				return fmt.Errorf("network %s: %w", m.name, err)
			}
		}
	}
	return nil
}

// Ready implements health.Source. After the store has answered, a network does not count if it has no
// configuration, or was refused before it was ever served.
func (f *fleet) Ready() (ready bool, reasons []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.listed && len(f.members) == 0 {
		reasons = append(reasons, "networks: not known yet")
	}

	for _, m := range f.members {
		counts, why := m.ready()
		if f.listed && !counts {
			continue
		}
		for _, reason := range why {
			reasons = append(reasons, "network "+m.name+": "+reason)
		}
	}
	return len(reasons) == 0, reasons
}

// Up implements served.
func (f *fleet) Up() <-chan struct{} { return f.up }

// StateIsWritten implements served.
func (f *fleet) StateIsWritten() bool {
	return !slices.ContainsFunc(f.present(), func(m member) bool { return m.net != nil && !m.net.StateIsWritten() })
}

// Metrics implements served.
func (f *fleet) Metrics() []*metrics.Metrics {
	var all []*metrics.Metrics
	for _, m := range f.present() {
		if m.net != nil {
			all = append(all, m.net.Metrics()...)
		}
	}
	return all
}

// Report implements served.
func (f *fleet) Report(ctx context.Context, q status.Query) (status.Report, error) {
	r := status.NewReport(f.host.Started, f.host.Journal, f.cfg.Options.StoreKind())
	all := f.present()
	if q.Network == "" {
		r.Ready, r.Reasons = f.Ready()
		for _, m := range all {
			r.Networks = append(r.Networks, m.summary())
		}
		slices.SortFunc(r.Networks, func(a, b status.NetworkSummary) int { return cmp.Compare(a.Name, b.Name) })
		return r, nil
	}

	i := slices.IndexFunc(all, func(m member) bool { return m.name == q.Network })
	if i < 0 {
		return status.Report{}, fmt.Errorf("%w: %s", status.ErrNoNetwork, q.Network)
	}
	if n := all[i].net; n != nil {
		return n.Report(ctx, q)
	}
	s := all[i].summary()
	r.Network.Name = s.Name
	r.Network.Phase = s.Phase
	r.Reasons = s.Reasons
	return r, nil
}
