// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"path"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// shared is what all networks of a daemon use.
type shared struct {
	host   *network.Host
	cfg    Config
	etcd   *etcd.Manager // its connection is that of all networks
	roster *roster
	news   wait.Signal // sent when a network may claim less than before, and when one has become ready
	log    klog.Logger // for the phases of the networks
}

// member is one of several networks. It begins to serve the network when a configuration is admitted, or
// with the last known state, and passes every later configuration that is admitted to the network. When
// the configuration was deleted, it removes everything. A refused configuration does not disturb a network
// that is served with an earlier one. The methods of a member are safe for concurrent use.
type member struct {
	*shared
	name     string
	wake     wait.Signal
	progress *network.Progress

	mu         sync.Mutex
	text       []byte // last configuration that the store had; nil before the first one, and after a deletion
	admitted   bool   // text was admitted, and config is its content; or config is recalled
	config     subnet.Config
	generation int                // number of admitted configurations until config
	used       subnet.Config      // the last one that the network has used; only if began is set
	refused    error              // why text was not admitted
	missing    error              // why m goes on although the store has no configuration; nil if the store has one
	seen       subnet.Observation // last recorded observation before net was opened; zero if there is none
	recalled   chan struct{}      // closed when the start may go on after the store has answered; nil unless config is of the last process
	yields     bool               // m must remove what this host has of the network, except for its lease, and begin again
	began      bool               // this host may have objects, files or a lease of the network
	net        *network.Network   // while it is served
	last       *network.Network   // the last one that was served, when that has ended; nil while net is set, and since a removal began
}

func newMember(s *shared, name string) *member {
	s.roster.join(name)
	progress := network.NewProgress(s.log.WithValues("network", name))
	return &member{shared: s, name: name, wake: wait.NewSignal(), progress: progress}
}

// recall makes m begin with the last known state, until the store answers.
func (m *member) recall(last lastknown.State) error {
	catalog, err := m.cfg.Backends(m.cfg.Options.Network(m.name))
	if err != nil {
		return err
	}
	if catalog.Close != nil {
		defer catalog.Close()
	}

	var claimed []claims
	for _, f := range append([]lastknown.Former{{Config: last.Config, Interface: last.Interface}}, last.Former...) {
		be, _, err := catalog.New(backend.Env{Network: m.name, Config: f.Config, Underlay: f.Interface})
		if err != nil {
			be = nil
		}
		claimed = append(claimed, claimsOf(f.Config, be))
	}

	m.roster.recall(m.name, claimed...)

	m.mu.Lock()
	defer m.mu.Unlock()
	m.config = last.Config
	m.used = last.Config
	m.admitted = true
	m.recalled = make(chan struct{})
	m.seen = last.Seen
	m.began = true
	return nil
}

// offer records the configuration in the store, or nil if that was deleted. m must admit a new text before
// it uses that text, but not the configuration that it has recalled.
func (m *member) offer(text []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()

	m.missing = nil
	unchanged := !m.has()
	if text != nil {
		unchanged = m.text != nil && bytes.Equal(text, m.text)
	}
	if unchanged && m.recalled == nil {
		return
	}

	m.text = text
	if m.recalled != nil && text != nil && m.confirm() {
		return
	}

	m.admitted = false
	m.refused = nil
	m.roster.withdraw(m.name)
	m.decided()
}

// decided must follow every change of the task. The caller holds m.mu.
func (m *member) decided() {
	m.progress.Decided(m.refused != nil, m.task().retire)
	m.wake.Send()
}

// miss records that the store has no configuration of m, but does not report its deletion either.
func (m *member) miss(ctx context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.has() && m.missing == nil {
		key := path.Join(m.cfg.Options.EtcdPrefix, m.name, "config")
		m.missing = fmt.Errorf("etcd has no configuration of it, and does not tell that it was deleted: put the configuration again, "+
			"or delete the network by etcdctl put %[1]s '{}' and etcdctl del %[1]s", key)
		klog.FromContext(ctx).Error(m.missing, "going on with the last network configuration", "network", m.name)
	}
	m.confirmed()
}

// admit admits or refuses a configuration that was offered, and logs a new reason.
func (m *member) admit(ctx context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.text == nil || m.admitted {
		return
	}

	cfg, wanted, err := m.validate(m.text)
	if err == nil {
		err = m.roster.promise(m.name, wanted)
	}
	if err != nil && (m.refused == nil || m.refused.Error() != err.Error()) {
		klog.FromContext(ctx).Error(err, "network refused", "network", m.name)
	}
	m.refused = err
	m.admitted = err == nil
	if m.admitted { // otherwise m goes on with its last configuration
		m.config = cfg
		m.generation++
		m.yields = false // otherwise its session would end at each wake, and never be retired
	}
	m.confirmed()
	m.decided()
}

// yield makes m release what this host has of the network, because networks wait for each other.
func (m *member) yield(ctx context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.yields || m.admitted || !m.began {
		return
	}
	klog.FromContext(ctx).Info("networks wait for each other, so this one removes its devices and routes, and then begins again", "network", m.name, "reason", m.refused)
	m.yields = true
	m.decided()
}

func (m *member) validate(text []byte) (subnet.Config, claims, error) {
	catalog, err := m.cfg.Backends(m.cfg.Options.Network(m.name))
	if err != nil {
		return subnet.Config{}, claims{}, err
	}
	if catalog.Close != nil {
		defer catalog.Close()
	}
	cfg, be, _, err := network.Validate(m.name, text, true, catalog.Registry)
	if err != nil {
		return cfg, claims{}, err
	}
	return cfg, claimsOf(cfg, be), nil
}

// confirm reports whether text is the configuration that m has recalled. The caller holds m.mu.
func (m *member) confirm() bool {
	cfg, _, err := m.validate(m.text)
	if err != nil || len(subnet.Changes(m.config.Goal(), cfg)) > 0 {
		return false
	}
	m.config = cfg // equal, but with its warnings
	m.confirmed()
	return true
}

// confirmed lets the start of a network that m has recalled continue. The caller holds m.mu.
func (m *member) confirmed() {
	if m.recalled != nil {
		close(m.recalled)
		m.recalled = nil
	}
}

// has reports whether m has a configuration. The caller holds m.mu.
func (m *member) has() bool { return m.text != nil || m.admitted }

// observation is the last recorded moment at which the store had the configuration.
func (m *member) observation() subnet.Observation {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lastSeen()
}

// lastSeen is observation for a caller that holds m.mu.
func (m *member) lastSeen() subnet.Observation {
	if m.net != nil {
		if now, ok := m.net.State(); ok {
			return now.Seen
		}
	}
	return m.seen
}

// task is the work of a member at a moment.
type task struct {
	serve      bool // the network has a configuration that it can use
	retire     bool // the network was deleted or yields, and has left something
	admitted   bool // text was admitted
	text       []byte
	config     subnet.Config   // that of text if it was admitted, otherwise the one that the network has used last
	generation int             // of the last configuration that was admitted
	refused    error           // why text was not admitted
	confirmed  <-chan struct{} // closed when the start with config may go on; nil if it may at once
}

// next returns the present task.
func (m *member) next() task {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.task()
}

// task is next for a caller that holds m.mu.
func (m *member) task() task {
	t := task{
		serve: m.admitted || m.began && m.has() && !m.yields, retire: m.began && (!m.has() || m.yields), admitted: m.admitted,
		text: m.text, config: m.config, generation: m.generation, refused: m.refused, confirmed: m.recalled,
	}
	if !m.admitted {
		t.config = m.used
	}
	return t
}

func (m *member) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("network", m.name))
	var pause wait.Backoff
	for ctx.Err() == nil {
		var err error
		switch t := m.next(); {
		case t.serve:
			err = m.serve(ctx, t)
		case t.retire:
			err = m.retire(ctx)
		default:
			select {
			case <-m.wake:
			case <-ctx.Done():
			}
		}

		if err == nil {
			pause.Reset()
			continue
		}
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "network failed, trying again")
		_ = wait.ForOr(ctx, pause.Next(), m.wake) // the loop notices the end of ctx
	}
}

// serve serves the network, beginning with the configuration of t, until ctx ends, the configuration was
// deleted or the network fails.
func (m *member) serve(ctx context.Context, t task) error {
	n, err := m.open(ctx)
	if err != nil {
		return err
	}
	if !m.begin(t, n) { // the task has changed meanwhile
		n.Close()
		return nil
	}
	if t.refused != nil {
		n.Refuse(t.refused)
	}

	running, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- n.Run(running) }()

	up := n.Up()
	for {
		select {
		case err = <-done:
			m.closed(n)
			return err
		case <-up:
			up = nil
			klog.FromContext(ctx).Info("network is ready")
			m.news.Send()
			continue
		case <-m.wake:
		}

		now := m.next()
		if now.retire {
			stop()
			err = <-done
			m.closed(n)
			return err
		}
		if now.refused != nil {
			n.Refuse(now.refused)
		} else if now.admitted && now.generation != t.generation { // another configuration
			t = now
			n.Configure(ctx, now.text)
		}
	}
}

// begin records that n is served with the configuration of t. It returns false if the roster may not
// reserve the claims of t any more.
func (m *member) begin(t task, n *network.Network) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := m.task(); !now.serve || now.admitted != t.admitted || now.generation != t.generation {
		return false
	}
	m.roster.begin(m.name)
	m.began = true
	m.net = n
	m.last = nil
	m.used = t.config
	return true
}

// claim implements network.Config.Claims.
func (m *member) claim(all []network.Claimed) error {
	var claimed []claims
	for _, c := range all {
		claimed = append(claimed, claimsOf(c.Config, c.Backend))
	}
	err := m.roster.claim(m.name, claimed...)
	m.news.Send() // another network may wait for something that this one has released
	return err
}

func (m *member) open(ctx context.Context) (*network.Network, error) {
	c := network.Config{
		Host: m.host, Options: m.cfg.Options.Network(m.name), Name: m.name, Backends: m.cfg.Backends,
		OpenStore: func(c etcd.Config) (network.Store, error) {
			manager, err := m.etcd.Network(m.name, c)
			if err != nil {
				return nil, err
			}
			return networkStore{manager, m}, nil
		},
		Claims: m.claim, Progress: m.progress,
	}
	if m.cfg.Options.IPMasq && !m.cfg.Options.MasqueradeBetweenNetworks {
		c.Others = func() ([]netip.Prefix, <-chan struct{}) { return m.roster.others(m.name) }
	}
	return network.Open(ctx, c)
}

// networkStore is the store of one of several networks. Its configuration is that of the
// member's task, not the one in etcd.
type networkStore struct {
	*etcd.Manager
	member *member
}

// Config implements subnet.Manager.
func (s networkStore) Config(ctx context.Context) (subnet.Config, error) {
	if confirmed := s.member.next().confirmed; confirmed != nil {
		select {
		case <-confirmed:
		case <-ctx.Done():
			return subnet.Config{}, ctx.Err()
		}
	}
	return s.member.next().config, nil
}

func (m *member) closed(n *network.Network) {
	m.mu.Lock()
	if now, ok := n.State(); ok {
		m.used = now.Config
	}
	m.seen = m.lastSeen()
	m.net = nil
	m.last = n
	m.progress.Stopped()
	m.mu.Unlock()

	n.Close()
	m.host.Tuner.Ended(m.name)
}

// retire removes everything of a network whose configuration was deleted, or that yields. A network that
// yields keeps its lease in the store, and so its subnets, but no last known state.
func (m *member) retire(ctx context.Context) error {
	m.mu.Lock()
	m.last = nil // Retire does what its Shutdown would do
	yields := m.has()
	m.mu.Unlock()

	n, err := m.open(ctx)
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.Retire(ctx, yields); err != nil {
		return err
	}
	if yields {
		klog.FromContext(ctx).Info("network has released its devices, routes, rules and files")
	} else {
		klog.FromContext(ctx).Info("network was deleted: its lease, devices, routes, rules and files are gone")
	}
	return m.retired()
}

func (m *member) retired() error {
	m.mu.Lock()
	m.began = false
	m.yields = false
	m.seen = subnet.Observation{}
	m.decided()
	m.mu.Unlock()
	return m.claim(nil)
}

func (m *member) present() *network.Network {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.net
}

func (m *member) served() *network.Network {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cmp.Or(m.net, m.last)
}

// isUp reports whether the start need not wait for m any more.
func (m *member) isUp() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.has() || m.refused != nil || m.net != nil && m.net.WasReady()
}

// ready returns the reasons why the network is not ready. counts is false for a network that has no
// configuration, or was refused before it was ever served.
func (m *member) ready() (counts bool, reasons []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.net == nil {
		return m.has() && (m.refused == nil || m.began), []string{"not started yet"}
	}
	_, reasons = m.net.Ready()
	return m.has(), reasons
}

func (m *member) summary() status.NetworkSummary {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := status.NetworkSummary{Name: m.name, Phase: string(m.progress.Phase()), Prefixes: []netip.Prefix{}, Subnets: []netip.Prefix{}}
	if m.net != nil {
		s.Ready, s.Reasons = m.net.Ready()
		if now, ok := m.net.State(); ok {
			s.BackendType = now.Config.BackendType
			s.Prefixes = now.Config.Prefixes()
			s.Subnets = append(s.Subnets, now.Own.Subnets()...)
		}
	}

	if m.missing != nil {
		s.Reasons = append(s.Reasons, m.missing.Error())
	}
	if m.refused != nil {
		s.Reasons = append(s.Reasons, oneline.Text(m.refused))
	} else if m.net != nil && m.net.Refusal() != "" {
		s.Reasons = append(s.Reasons, m.net.Refusal())
	}
	return s
}
