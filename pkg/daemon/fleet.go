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

	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/health"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// fleet is a daemon with several networks. It follows their configurations in the store, and offers
// them to its members. Each network then starts, fails, changes and ends on its own: see member.
type fleet struct {
	*shared
	up   chan struct{} // closed after the store has answered, when each network is ready, was refused or has no configuration
	once sync.Once

	mu      sync.Mutex
	members []*member // in the order in which they have joined; those that join at the same time are sorted by name
	listed  bool      // the store has answered
}

func openFleet(ctx context.Context, h *network.Host, cfg Config) (served, error) {
	o := cfg.Options
	m, err := etcd.New(network.EtcdConfig(o))
	if err != nil {
		return nil, err
	}
	f := &fleet{
		shared: &shared{host: h, cfg: cfg, etcd: m, roster: newRoster(), news: wait.NewSignal(), log: klog.FromContext(ctx)},
		up:     make(chan struct{}),
	}

	for _, name := range slices.Sorted(slices.Values(o.Networks)) {
		f.join(name)
	}
	if err := f.recall(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// parentPrefix is the prefix of all networks, as state files contain it.
func parentPrefix(o options.Options) string { return strings.TrimRight(o.EtcdPrefix, "/") }

// recall adds the networks of an earlier process with the same etcd prefix. They are served from their last
// known state until the store answers.
func (f *fleet) recall() error {
	names, err := lastknown.Files(f.cfg.Options.StateDir)
	if err != nil {
		return err
	}

	for _, name := range names {
		last, err := statefile.Read[lastknown.State](f.cfg.Options.StateDir, name)
		if err != nil || last.Name == "" || last.Prefix != parentPrefix(f.cfg.Options) {
			continue // a damaged file is reported when the network is opened
		}
		if err := f.join(last.Name).recall(last); err != nil {
			return err
		}
	}
	return nil
}

// join adds a network if it is new. The caller holds f.mu, unless no other goroutine uses f yet.
func (f *fleet) join(name string) *member {
	if m := f.find(name); m != nil {
		return m
	}
	m := newMember(f.shared, name)
	f.members = append(f.members, m)
	return m
}

// The caller holds f.mu, unless no other goroutine uses f yet.
func (f *fleet) find(name string) *member {
	if i := slices.IndexFunc(f.members, func(m *member) bool { return m.name == name }); i >= 0 {
		return f.members[i]
	}
	return nil
}

// Run implements served.
func (f *fleet) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	running := map[string]bool{}
	start := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, m := range f.members {
			if !running[m.name] {
				running[m.name] = true
				group.Go(func() error {
					m.run(ctx)
					return nil
				})
			}
		}
	}

	start()
	group.Go(func() error {
		for {
			select {
			case <-f.news:
				f.admit(ctx)
			case <-ctx.Done():
				return nil
			}
		}
	})

	group.Go(func() error {
		err := f.etcd.Networks(ctx, f.cfg.Options.Networks, f.known, func(now etcd.NetworkConfigs) {
			f.apply(ctx, now)
			f.admit(ctx)
			start()
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
	known := map[string]subnet.Observation{}
	for _, m := range f.list() {
		if s := m.observation(); s.Revision != 0 {
			known[m.name] = s
		}
	}
	return known
}

// apply passes the configurations in the store to the members, and adds members for new networks.
func (f *fleet) apply(ctx context.Context, now etcd.NetworkConfigs) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(now.Texts)) {
		f.join(name)
	}

	f.listed = true
	for _, m := range f.members {
		text, exists := now.Texts[m.name]
		if exists || f.left(m.name, now) {
			m.offer(text)
			continue
		}

		// The store may have been emptied or replaced, and the pods of a network that is needed must not
		// be cut off. A deletion of long ago, which the store no longer reports, looks the same.
		m.miss(ctx)
	}
}

// left reports whether this host has to remove what it has of a network without a configuration.
func (f *fleet) left(name string, now etcd.NetworkConfigs) bool {
	listed := f.cfg.Options.Networks
	return slices.Contains(now.Deleted, name) || len(listed) > 0 && !slices.Contains(listed, name)
}

// admit makes all members decide about configurations that were not admitted yet, in the order in which
// they have joined. If networks wait for each other, it makes one of them release what it has.
func (f *fleet) admit(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		m.admit(ctx)
	}
	if name := f.roster.knot(); f.listed && name != "" {
		f.find(name).yield(ctx)
	}
	if f.listed && !slices.ContainsFunc(f.members, func(m *member) bool { return !m.isUp() }) {
		f.once.Do(func() { close(f.up) })
	}
}

// Close implements served.
func (f *fleet) Close() { _ = f.etcd.Close() }

// Shutdown implements served. The members have closed their networks by then, unless Run of the daemon has
// stopped waiting for them.
func (f *fleet) Shutdown(ctx context.Context) {
	for _, m := range f.list() {
		if n := m.served(); n != nil {
			n.Shutdown(ctx)
		}
	}
}

func (f *fleet) list() []*member {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.members)
}

// Alive implements health.Source.
func (f *fleet) Alive() error {
	for _, m := range f.list() {
		if n := m.present(); n != nil {
			if err := n.Alive(); err != nil {
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
	return !slices.ContainsFunc(f.list(), func(m *member) bool {
		n := m.present()
		return n != nil && !n.StateIsWritten()
	})
}

// Metrics implements served.
func (f *fleet) Metrics() []metrics.Source {
	var all []metrics.Source
	for _, m := range f.list() {
		if n := m.present(); n != nil {
			all = append(all, n.Metrics()...)
		}
	}
	return all
}

// Report implements served.
func (f *fleet) Report(ctx context.Context, q status.Query) (status.Report, error) {
	f.mu.Lock()
	m := f.find(q.Network)
	f.mu.Unlock()

	if q.Network == "" {
		return f.overview(), nil
	}
	if m == nil {
		return status.Report{}, fmt.Errorf("%w: %s", status.ErrNoNetwork, q.Network)
	}
	if n := m.present(); n != nil {
		return n.Report(ctx, q)
	}

	r := f.process()
	s := m.summary()
	r.Network.Name = m.name
	r.Network.Phase = s.Phase
	r.Ready = false
	r.Reasons = s.Reasons
	return r, nil
}

// process returns a report with the fields that are not about a network.
func (f *fleet) process() status.Report {
	r := status.NewReport(f.host.Started, f.host.Journal, f.cfg.Options.StoreKind())
	r.Ready, r.Reasons = f.Ready()
	return r
}

func (f *fleet) overview() status.Report {
	r := f.process()
	for _, m := range f.list() {
		r.Networks = append(r.Networks, m.summary())
	}
	slices.SortFunc(r.Networks, func(a, b status.NetworkSummary) int { return cmp.Compare(a.Name, b.Name) })
	return r
}

var _ health.Source = (*fleet)(nil)
