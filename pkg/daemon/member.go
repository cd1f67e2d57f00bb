// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/network"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// member is one of several networks. It serves the network from the first configuration that the
// fleet admits, and removes everything when the configuration was deleted. It passes on every
// later configuration that the fleet admits. One that the fleet refuses does not disturb a network
// that is served with an earlier one.
type member struct {
	fleet *fleet
	name  string
	order int // in which the networks have joined
	wake  wait.Signal

	// guarded by fleet.mu:
	text       []byte // configuration in the store; nil if there is none
	generation int    // of text
	admitted   bool   // text was admitted, with the two next fields
	config     subnet.Config
	wanted     claims
	refused    error            // why text was not admitted
	missing    error            // why it goes on without a configuration in the store; nil if there is one
	seen       subnet.Sighting  // of the last process; zero if there is none
	recalled   chan struct{}    // config is of the last process; closed when the store has confirmed it
	uses       *claims          // of the configuration that is served, and of what it has left; nil if there is nothing
	net        *network.Network // while it is served
}

// confirmed lets the start of a network from an earlier process continue. The caller holds
// fleet.mu.
func (m *member) confirmed() {
	if m.recalled != nil {
		close(m.recalled)
		m.recalled = nil
	}
}

// has reports whether m has a configuration. The caller holds fleet.mu.
func (m *member) has() bool { return m.text != nil || m.admitted }

// miss notes that the store has no configuration of m, and does not tell that it was deleted. m goes
// on with the one that it has. The caller holds fleet.mu.
func (m *member) miss(ctx context.Context) {
	if m.has() && m.missing == nil {
		key := path.Join(m.fleet.cfg.Options.EtcdPrefix, m.name, "config")
		m.missing = fmt.Errorf("etcd has no configuration of it, and does not tell that it was deleted: put the configuration again, "+
			"or delete the network by etcdctl put %[1]s '{}' and etcdctl del %[1]s", key)
		klog.FromContext(ctx).Error(m.missing, "going on with the last network configuration", "network", m.name)
	}
	m.confirmed()
}

// sighting returns when the store last had the configuration, as far as this node has recorded it. The
// caller holds fleet.mu.
func (m *member) sighting() subnet.Sighting {
	if m.net != nil {
		if now, ok := m.net.State(); ok {
			return now.Seen
		}
	}
	return m.seen
}

// claims returns what m has or was promised.
func (m *member) claims() []claims {
	var all []claims
	if m.uses != nil {
		all = append(all, *m.uses)
	}
	if m.admitted {
		all = append(all, m.wanted)
	}
	return all
}

// task is what a member has to do.
type task struct {
	generation int
	serve      bool // the configuration was admitted
	retire     bool // the network was deleted, and has left something
	text       []byte
	config     subnet.Config
	refused    error           // why text was not admitted
	confirmed  <-chan struct{} // closed when config is that of the store
}

// next returns what is to be done now.
func (m *member) next() task {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	t := task{generation: m.generation, serve: m.admitted, text: m.text, config: m.config, refused: m.refused, confirmed: m.recalled}
	t.retire = m.fleet.listed && m.text == nil && m.uses != nil
	return t
}

// run serves the network whenever it can be, until ctx ends.
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
		select {
		case <-m.wake:
		case <-time.After(pause.Next()):
		case <-ctx.Done():
		}
	}
}

// serve serves the network, beginning with an admitted configuration. It returns nil when the
// configuration was deleted.
func (m *member) serve(ctx context.Context, t task) error {
	n, err := m.open(ctx, t)
	if err != nil {
		return err
	}
	m.fleet.mu.Lock()
	uses := m.wanted
	m.uses, m.net = &uses, n
	m.fleet.mu.Unlock()
	running, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- n.Run(running) }()
	for {
		select {
		case err = <-done:
			m.closed(n)
			return err
		case <-m.wake:
		}
		switch now := m.next(); {
		case now.retire:
			stop()
			err = <-done
			m.closed(n)
			return err
		case now.refused != nil:
			n.Refuse(now.refused)
		case now.serve && now.generation != t.generation:
			t = now
			n.Configure(ctx, now.text)
		}
	}
}

// using records the configuration that the network begins to use. Another network may have waited for
// what this one does not need any more.
func (m *member) using(ctx context.Context, cfg subnet.Config, be backend.Backend) {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	now := claimsOf(cfg, be)
	if m.uses == nil || !slices.Equal(m.uses.networks, now.networks) {
		m.fleet.changed()
	}
	m.uses = &now
	m.fleet.admit(ctx)
}

// open opens the network with a configuration.
func (m *member) open(ctx context.Context, t task) (*network.Network, error) {
	f := m.fleet
	c := network.Config{
		Host: f.host, Options: f.cfg.Options.Network(m.name), Name: m.name, Backends: f.cfg.Backends,
		OpenStore: func(c etcd.Config) (network.Store, error) {
			manager, err := f.etcd.Network(m.name, c)
			if err != nil {
				return nil, err
			}
			return networkStore{manager, m, t.confirmed}, nil
		},
		Using: m.using,
		Announce: func(ctx context.Context) {
			klog.FromContext(ctx).Info("network is ready")
			f.mu.Lock()
			defer f.mu.Unlock()
			f.settled()
		},
	}
	if f.cfg.Options.IPMasq && !f.cfg.Options.MasqueradeBetweenNetworks {
		c.Others = func() ([]netip.Prefix, <-chan struct{}) { return f.others(m) }
	}
	return network.Open(ctx, c)
}

// networkStore is the store of one of several networks. The fleet follows the configuration.
type networkStore struct {
	*etcd.Manager
	member    *member
	confirmed <-chan struct{} // closed when the configuration is that of the store; nil if it is
}

// Config implements subnet.Manager.
func (s networkStore) Config(ctx context.Context) (subnet.Config, error) {
	if s.confirmed != nil {
		select {
		case <-s.confirmed:
		case <-ctx.Done():
			return subnet.Config{}, ctx.Err()
		}
	}
	return s.member.next().config, nil
}

// closed releases a network that is not served any more.
func (m *member) closed(n *network.Network) {
	m.fleet.mu.Lock()
	m.seen, m.net = m.sighting(), nil
	m.fleet.mu.Unlock()
	n.Close()
	m.fleet.host.Tuner.Backend(m.name, "")
}

// retire removes everything of a network whose configuration was deleted.
func (m *member) retire(ctx context.Context) error {
	n, err := m.open(ctx, task{})
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.Retire(ctx); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("network was deleted: its lease, devices, routes, rules and files are gone")
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	m.uses, m.seen = nil, subnet.Sighting{}
	m.fleet.changed()
	m.fleet.admit(ctx) // another network may have waited for what this one had
	return nil
}

// present returns the network while it is served, or nil.
func (m *member) present() *network.Network {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	return m.net
}

// wasReady reports whether the network has been ready with its present configuration. The caller
// holds fleet.mu.
func (m *member) wasReady() bool { return m.net != nil && m.net.WasReady() }

// ready reports whether the network is ready, and the reasons why not. The caller holds fleet.mu.
func (m *member) ready() (ready bool, reasons []string) {
	if m.net == nil {
		return false, []string{errNotStarted.Error()}
	}
	return m.net.Ready()
}

// phaseRefused is the phase of a network that the fleet does not admit.
const phaseRefused network.Phase = "refused"

// summary returns the entry of the overview.
func (m *member) summary() status.NetworkSummary {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	s := status.NetworkSummary{Name: m.name, Prefixes: []netip.Prefix{}, Subnets: []netip.Prefix{}}
	if m.net != nil {
		s.Phase = string(m.net.Phase())
		s.Ready, s.Reasons = m.ready()
		if now, ok := m.net.State(); ok {
			s.BackendType, s.Prefixes = now.Config.BackendType, now.Config.Prefixes()
			s.Subnets = append(s.Subnets, now.Own.Subnets()...)
		}
	} else {
		s.Phase = string(network.PhaseNoConfiguration)
	}
	if m.missing != nil {
		s.Reasons = append(s.Reasons, m.missing.Error())
	}
	switch {
	case m.refused != nil:
		s.Reasons = append(s.Reasons, m.refused.Error())
		if m.net == nil {
			s.Phase = string(phaseRefused)
		}
	case m.net != nil && m.net.Rejected() != "":
		s.Reasons = append(s.Reasons, m.net.Rejected())
	}
	return s
}
