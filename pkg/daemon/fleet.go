// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/network"
	"github.com/flanneld/flanneld/pkg/health"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// fleet is a daemon with several networks. It follows their configurations in the store, and
// admits each network that does not clash with another one. Each network then starts, fails,
// changes and ends on its own: see member.
type fleet struct {
	host *network.Host
	cfg  Config
	etcd *etcd.Manager // its connection is that of all networks
	up   chan struct{} // closed when the first networks are serving or refused
	once sync.Once

	mu      sync.Mutex
	members map[string]*member
	listed  bool          // the store has answered
	joined  int           // number of networks so far
	moved   chan struct{} // closed and replaced when the prefixes of admitted networks change
}

func openFleet(h *network.Host, cfg Config) (served, error) {
	o := cfg.Options
	f := &fleet{host: h, cfg: cfg, up: make(chan struct{}), members: map[string]*member{}, moved: make(chan struct{})}
	m, err := etcd.New(network.EtcdConfig(o))
	if err != nil {
		return nil, err
	}
	f.etcd = m
	for _, name := range slices.Sorted(slices.Values(o.Networks)) {
		f.member(name)
	}
	if err := f.recall(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// parentPrefix returns the prefix of all networks in the form in which state files have it.
func parentPrefix(o options.Options) string { return strings.TrimRight(o.EtcdPrefix, "/") }

// recall adds the networks that the last process has served. They are served from their last known
// state until the store answers.
func (f *fleet) recall() error {
	names, err := lastknown.Files(f.cfg.Options.StateDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		last, err := state.Read[lastknown.State](f.cfg.Options.StateDir, name)
		if err != nil || last.Name == "" || last.Prefix != parentPrefix(f.cfg.Options) {
			continue // a damaged file is reported when the network is opened
		}
		m := f.member(last.Name)
		m.config, m.admitted, m.recalled, m.seen = last.Config, true, make(chan struct{}), last.Seen
		uses := claims{networks: last.Config.Prefixes()}
		m.wanted, m.uses = uses, &uses
	}
	return nil
}

// member returns the network with that name, and adds it if it is new. The caller holds f.mu, or
// is alone.
func (f *fleet) member(name string) *member {
	m, known := f.members[name]
	if !known {
		f.joined++
		m = &member{fleet: f, name: name, order: f.joined, wake: wait.NewSignal()}
		f.members[name] = m
	}
	return m
}

// sorted returns all networks in the order in which they have joined, which is that of their
// names for those that join together. The caller holds f.mu.
func (f *fleet) sorted() []*member {
	return slices.SortedFunc(maps.Values(f.members), func(a, b *member) int { return cmp.Compare(a.order, b.order) })
}

// Run implements served.
func (f *fleet) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	running := map[string]bool{}
	start := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, m := range f.sorted() {
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
		select {
		case <-f.up:
			announceReady(ctx)
		case <-ctx.Done():
		}
		return nil
	})
	group.Go(func() error {
		err := f.etcd.Networks(ctx, f.cfg.Options.Networks, f.known, func(now etcd.NetworkConfigs) {
			f.apply(ctx, now)
			start()
		})
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
	return group.Wait()
}

// known returns when the store last had the configurations of networks, as far as this node has
// recorded it.
func (f *fleet) known() map[string]subnet.Sighting {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := map[string]subnet.Sighting{}
	for _, m := range f.members {
		if s := m.sighting(); s.Revision != 0 {
			known[m.name] = s
		}
	}
	return known
}

// apply takes in the configurations of all networks. A network that is missing although it was not
// deleted goes on with what it has: the store was emptied or replaced.
//
// It may also have been deleted so long ago that the store does not tell it any more. The host serves
// it nevertheless, because the pods of a network that is needed must not be cut off.
func (f *fleet) apply(ctx context.Context, now etcd.NetworkConfigs) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(now.Texts)) {
		f.member(name)
	}
	f.listed = true
	for _, m := range f.members {
		text, exists := now.Texts[m.name]
		if !exists && !f.left(m, now) {
			m.miss(ctx)
			continue
		}
		m.missing = nil
		unchanged := !m.has()
		if exists {
			unchanged = m.text != nil && bytes.Equal(text, m.text)
		}
		if unchanged && m.recalled == nil {
			continue
		}
		m.text = text
		if m.recalled != nil && m.text != nil && f.confirm(m) {
			continue
		}
		m.generation, m.admitted, m.refused = m.generation+1, false, nil
		m.wake.Send()
	}
	f.admit(ctx)
}

// left reports whether this host has to leave a network without a configuration: it was deleted, or
// the flags of this process do not name it. The caller holds f.mu.
func (f *fleet) left(m *member, now etcd.NetworkConfigs) bool {
	listed := f.cfg.Options.Networks
	return slices.Contains(now.Deleted, m.name) || len(listed) > 0 && !slices.Contains(listed, m.name)
}

// admit decides about all networks whose configuration was not admitted yet. The caller holds
// f.mu.
func (f *fleet) admit(ctx context.Context) {
	for _, m := range f.sorted() {
		if m.text == nil || m.admitted {
			continue
		}
		cfg, wanted, err := f.validate(m, m.text)
		if err == nil {
			err = f.clash(m, wanted)
		}
		if err != nil {
			if m.refused == nil || m.refused.Error() != err.Error() {
				klog.FromContext(ctx).Error(err, "network refused", "network", m.name)
			}
			m.refused = err
			m.confirmed() // it goes on with what it has
			m.wake.Send()
			continue
		}
		m.refused, m.admitted, m.config, m.wanted = nil, true, cfg, wanted
		m.confirmed()
		f.changed()
		m.wake.Send()
	}
	f.settled()
}

// changed tells all networks that the prefixes of others have changed. The caller holds f.mu.
func (f *fleet) changed() {
	close(f.moved)
	f.moved = make(chan struct{})
}

// validate parses a configuration of m.
func (f *fleet) validate(m *member, text []byte) (subnet.Config, claims, error) {
	backends, err := f.cfg.Backends(f.cfg.Options.Network(m.name))
	if err != nil {
		return subnet.Config{}, claims{}, err
	}
	if backends.Close != nil {
		defer backends.Close()
	}
	cfg, be, _, err := network.Validate(m.name, text, true, backends.Registry)
	if err != nil {
		return cfg, claims{}, err
	}
	return cfg, claimsOf(cfg, be), nil
}

// confirm reports whether the store has the configuration that m is served with since the last
// process. The caller holds f.mu.
func (f *fleet) confirm(m *member) bool {
	cfg, wanted, err := f.validate(m, m.text)
	if err != nil || len(subnet.Changes(m.config, cfg)) > 0 {
		return false
	}
	m.wanted = wanted
	m.confirmed()
	return true
}

// clash returns an error if another network has something that m wants.
func (f *fleet) clash(m *member, wanted claims) error {
	for _, other := range f.sorted() {
		if other == m {
			continue
		}
		for _, has := range other.claims() {
			if why := wanted.clash(has); why != "" {
				return fmt.Errorf("it clashes with network %s, which was there first: %s", other.name, why)
			}
		}
	}
	return nil
}

// settled closes up once when the first networks are serving or refused. The caller holds f.mu.
func (f *fleet) settled() {
	if !f.listed {
		return
	}
	for _, m := range f.members {
		if m.has() && m.refused == nil && !m.wasReady() {
			return
		}
	}
	f.once.Do(func() { close(f.up) })
}

// others returns the addresses of the other networks on this host, in as few prefixes as possible,
// and a channel that is closed when they change. Each prefix becomes a rule of every network.
func (f *fleet) others(m *member) (prefixes []netip.Prefix, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, other := range f.sorted() {
		if other == m {
			continue
		}
		for _, has := range other.claims() {
			prefixes = append(prefixes, has.networks...)
		}
	}
	return prefix.Merge(prefixes), f.moved
}

// Close implements served.
func (f *fleet) Close() { _ = f.etcd.Close() }

// Shutdown implements served.
func (f *fleet) Shutdown(ctx context.Context) {
	for _, m := range f.list() {
		if n := m.present(); n != nil {
			n.Shutdown(ctx)
		}
	}
}

func (f *fleet) list() []*member {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sorted()
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

// Ready implements health.Source. A network that was refused, or that has no configuration, does
// not count.
func (f *fleet) Ready() (ready bool, reasons []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.listed && len(f.members) == 0 {
		reasons = append(reasons, "networks: not known yet")
	}
	for _, m := range f.sorted() {
		if !m.has() && f.listed || m.refused != nil && m.net == nil {
			continue
		}
		_, why := m.ready()
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

// all implements served.
func (f *fleet) all() []*metrics.Metrics {
	var all []*metrics.Metrics
	for _, m := range f.list() {
		if n := m.present(); n != nil {
			all = append(all, n.Metrics())
		}
	}
	return all
}

// status implements served.
func (f *fleet) status(ctx context.Context, name string) (status.Report, error) {
	f.mu.Lock()
	m := f.members[name]
	f.mu.Unlock()
	switch {
	case name == "":
		return f.overview(), nil
	case m == nil:
		return status.Report{}, fmt.Errorf("%w: %s", status.ErrNoNetwork, name)
	}
	if n := m.present(); n != nil {
		return n.Report(ctx)
	}
	r := f.process()
	r.Network.Name, r.Network.Phase = m.name, m.summary().Phase
	r.Ready, r.Reasons = false, m.summary().Reasons
	return r, nil
}

// process returns a report with the fields that are not about a network.
func (f *fleet) process() status.Report {
	r := network.EmptyReport(f.host, f.cfg.Options)
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

var errNotStarted = errors.New("not started yet")
