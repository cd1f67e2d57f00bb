// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"path"
	"reflect"
	"slices"

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

// member is one of several networks. It contains the wish of the fleet and the state of this host. run makes the state
// follow the wish. It begins to serve the network when a configuration is admitted, or with the last known state, and
// passes every later configuration that is admitted to the network. When the configuration was deleted, it removes
// everything. A refused configuration does not disturb a network that is served with an earlier one.
type member struct {
	*fleet
	name     string
	wake     wait.Signal // sent when something else may be wanted
	progress *network.Progress
	end      context.CancelFunc // ends run; nil before it begins

	// The wish.
	text     []byte        // the configuration in the store; nil before the first one, and after a deletion
	promised *claims       // resources that the network may use, because text was admitted or is recalled; nil otherwise
	config   subnet.Config // that of promised
	refused  error         // why text was not admitted
	asked    *claims       // resources that text needs, if it was refused because of another network; nil otherwise
	missing  error         // why the network stays although the store has no configuration; nil if the store has one
	yields   bool          // everything of the network on this host must be removed, except for its lease, before it begins again

	// The state.
	claimed []claims           // of the configuration in use, and then of former ones that have left something; empty if this host has nothing of the network
	used    subnet.Config      // the last one that the network has used; only if claimed is not empty
	seen    subnet.Observation // last recorded observation; zero if there is none
	net     *network.Network   // while it is served
	last    *network.Network   // the last one that was served, when that has ended; nil while net is set, and since a removal began
}

// has reports whether the network has a configuration. The caller of this and of the other methods up to run
// holds m.mu.
func (m *member) has() bool { return m.text != nil || m.promised != nil }

// serves reports whether the network should be served: with the configuration that was admitted, or with its last one.
func (m *member) serves() bool {
	return m.promised != nil || len(m.claimed) > 0 && m.has() && !m.yields
}

// retires reports whether what this host has of the network should be removed.
func (m *member) retires() bool { return len(m.claimed) > 0 && (!m.has() || m.yields) }

// decided must follow every change of what is wanted.
func (m *member) decided() {
	m.progress.Decided(m.refused != nil, m.retires())
	m.wake.Send()
}

// recall makes m begin with the last known state, until the store answers.
func (m *member) recall(last lastknown.State) error {
	catalog, release, err := m.catalog()
	if err != nil {
		return err
	}
	defer release()
	for _, f := range append([]lastknown.Former{{Config: last.Config, Interface: last.Interface}}, last.Former...) {
		d := catalog.Describe(backend.Env{Network: m.name, Config: f.Config, Underlay: f.Interface})
		m.claimed = append(m.claimed, claimsOf(f.Config, d))
	}

	m.promised = new(m.claimed[0])
	m.config = last.Config
	m.used = last.Config
	m.seen = last.Seen
	return nil
}

func (m *member) catalog() (c backend.Catalog, release func(), err error) {
	c, err = m.cfg.Backends(m.cfg.Options.Network(m.name))
	if release = c.Close; release == nil {
		release = func() {}
	}
	return c, release, err
}

// offer records the configuration in the store, or nil if that was deleted. m must admit a new text before
// it uses that text, unless it is the configuration that it has recalled.
func (m *member) offer(text []byte) {
	m.missing = nil
	if text == nil && !m.has() || text != nil && m.text != nil && bytes.Equal(text, m.text) {
		return
	}
	m.text = text
	if recalled := m.promised != nil && !m.listed; recalled && text != nil {
		if cfg, _, err := m.validate(); err == nil && len(subnet.Changes(m.config.Goal(), cfg)) == 0 {
			m.config = cfg // equal, but with its warnings
			return
		}
	}

	defer m.announce(m.prefixes())
	m.promised = nil
	m.asked = nil
	m.refused = nil
	m.decided()
}

// miss records that the store has no configuration of m, but does not report its deletion either.
func (m *member) miss(ctx context.Context) {
	if m.has() && m.missing == nil {
		key := path.Join(m.cfg.Options.EtcdPrefix, m.name, "config")
		m.missing = fmt.Errorf("etcd has no configuration of it, and does not tell that it was deleted: put the configuration again, "+
			"or delete the network by etcdctl put %[1]s '{}' and etcdctl del %[1]s", key)
		klog.FromContext(ctx).Error(m.missing, "going on with the last network configuration", "network", m.name)
	}
}

// admit admits or refuses a configuration that was offered, and logs a new reason.
func (m *member) admit(ctx context.Context) {
	if m.text == nil || m.promised != nil {
		return
	}

	cfg, wanted, err := m.validate()
	if err == nil {
		err = m.promise(wanted)
	}
	if err != nil && (m.refused == nil || m.refused.Error() != err.Error()) {
		klog.FromContext(ctx).Error(err, "network refused", "network", m.name)
	}
	m.refused = err
	if err == nil { // otherwise the network stays with its last configuration
		m.config = cfg
		m.yields = false // otherwise its session would end at each wake, and never be retired
	}
	m.decided()
}

// yield makes m release what this host has of the network, because networks wait for each other.
func (m *member) yield(ctx context.Context) {
	if m.yields {
		return
	}
	klog.FromContext(ctx).Info("networks wait for each other, so this one removes its devices and routes, and then begins again", "network", m.name, "reason", m.refused)
	m.yields = true
	m.decided()
}

func (m *member) validate() (subnet.Config, claims, error) {
	catalog, release, err := m.catalog()
	if err != nil {
		return subnet.Config{}, claims{}, err
	}
	defer release()
	cfg, be, _, err := network.Validate(m.name, m.text, true, catalog.Registry)
	if err != nil {
		return cfg, claims{}, err
	}
	return cfg, claimsOf(cfg, be.Describe()), nil
}

// learn records what the network has used and seen until now.
func (m *member) learn() {
	if m.net == nil {
		return
	}
	if now, ok := m.net.State(); ok {
		m.used = now.Config
		m.seen = now.Seen
	}
}

// isUp reports whether the start need not wait for m any more.
func (m *member) isUp() bool {
	return !m.has() || m.refused != nil || m.net != nil && m.net.WasReady()
}

// ready returns the reasons why the network is not ready. counts is false for a network that has no
// configuration, or was refused before it was ever served.
func (m *member) ready() (counts bool, reasons []string) {
	if m.net == nil {
		return m.has() && (m.refused == nil || len(m.claimed) > 0), []string{"not started yet"}
	}
	_, reasons = m.net.Ready()
	return m.has(), reasons
}

// run makes what there is of the network what is wanted, until ctx ends.
func (m *member) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("network", m.name))
	var pause wait.Backoff
	for ctx.Err() == nil {
		m.mu.Lock()
		serves := m.serves()
		retires := m.retires()
		m.mu.Unlock()

		var err error
		switch {
		case serves:
			err = m.serve(ctx)
		case retires:
			err = m.retire(ctx)
		default:
			select {
			case <-m.wake:
			case <-ctx.Done():
			}
		}

		if err == nil {
			pause.Reset()
		} else if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "network failed, trying again")
			_ = wait.ForOr(ctx, pause.Next(), m.wake) // the loop notices the end of ctx
		}
	}
}

// serve serves the network until ctx ends, the configuration was deleted or the network fails.
func (m *member) serve(ctx context.Context) error {
	n, err := network.Open(ctx, m.networkConfig())
	if err != nil {
		return err
	}
	if !m.begin(n) {
		n.Close()
		return nil
	}

	running, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- n.Run(running) }()

	up := n.Up()
	for {
		if !m.pass(ctx, n) {
			stop()
		}
		select {
		case err = <-done:
			m.closed(n)
			return err
		case <-up:
			up = nil
			klog.FromContext(ctx).Info("network is ready")
			m.news.Send()
		case <-m.wake:
		}
	}
}

// begin records that n is served from now on. It returns false if that is not wanted any more.
func (m *member) begin(n *network.Network) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.serves() {
		return false
	}
	if p := m.promised; p != nil {
		m.used = m.config
		if !slices.ContainsFunc(m.claimed, func(c claims) bool { return reflect.DeepEqual(c, *p) }) {
			m.claimed = slices.Insert(m.claimed, 0, *p)
		}
	}
	m.net = n
	m.last = nil
	return true
}

// pass tells the network what was decided about its configuration. It returns false if the network should end.
func (m *member) pass(ctx context.Context, n *network.Network) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refused != nil {
		n.Refuse(m.refused)
	}
	if m.promised != nil && m.text != nil { // a recalled configuration has no text
		n.Configure(ctx, m.text)
	}
	return m.serves()
}

func (m *member) closed(n *network.Network) {
	m.mu.Lock()
	m.learn()
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

	if err := retire(ctx, m.networkConfig(), yields); err != nil {
		return err
	}
	if yields {
		klog.FromContext(ctx).Info("network has released its devices, routes, rules and files")
	} else {
		klog.FromContext(ctx).Info("network was deleted: its lease, devices, routes, rules and files are gone")
	}
	m.retired()
	return nil
}

func (m *member) retired() {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.announce(m.prefixes())
	m.claimed = nil
	m.yields = false
	m.seen = subnet.Observation{}
	m.decided()
	m.news.Send() // another network may wait for what this one has released
}

func (m *member) networkConfig() network.Config {
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
		c.Others = m.others
	}
	return c
}

// networkStore is the store of one of several networks. Its configuration is the one that the member should use,
// not the one in etcd.
type networkStore struct {
	*etcd.Manager
	member *member
}

// Config implements subnet.Manager. It waits until the store has confirmed or changed what was recalled.
func (s networkStore) Config(ctx context.Context) (subnet.Config, error) {
	select {
	case <-s.member.answered:
	case <-ctx.Done():
		return subnet.Config{}, ctx.Err()
	}
	s.member.mu.Lock()
	defer s.member.mu.Unlock()
	if s.member.promised == nil {
		return s.member.used, nil
	}
	return s.member.config, nil
}

// summary describes m, which may be a copy, so it needs no lock.
func (m *member) summary() status.NetworkSummary {
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
