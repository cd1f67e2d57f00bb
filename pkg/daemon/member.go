// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/netip"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/network"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// member is one of several networks. It serves the network while the fleet has admitted its
// configuration, and removes everything when the configuration was deleted. A configuration that
// the fleet refuses does not disturb a network that is served with an earlier one.
type member struct {
	fleet *fleet
	name  string
	order int // in which the networks have joined
	wake  wait.Signal

	// guarded by fleet.mu:
	text       []byte // configuration in the store; nil if there is none
	seen       int64  // revision at which the store was read last
	generation int    // of text
	admitted   bool   // text was admitted, with the two next fields
	config     subnet.Config
	wanted     claims
	refused    error            // why text was not admitted
	recalled   chan struct{}    // config is of the last process; closed when the store has confirmed it
	uses       *claims          // of the session, and of what it has left; nil if there is nothing
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
	config     subnet.Config
	confirmed  <-chan struct{} // closed when config is that of the store
	seen       int64           // revision at which the store was read last
}

// next returns what is to be done now.
func (m *member) next() task {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	t := task{generation: m.generation, serve: m.admitted, config: m.config, confirmed: m.recalled, seen: m.seen}
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

// serve serves the network with an admitted configuration. It returns nil if another one was
// admitted, or if there is none any more. A configuration that was refused leaves it as it is.
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
	for waiting := true; waiting; {
		select {
		case err = <-done:
			m.closed(n)
			return err
		case <-m.wake:
			now := m.next()
			waiting = now.generation == t.generation || !now.serve && !now.retire
		}
	}
	stop()
	err = <-done
	m.closed(n)
	return err
}

// open opens the network with a configuration.
func (m *member) open(ctx context.Context, t task) (*network.Network, error) {
	f := m.fleet
	c := network.Config{
		Host: f.host, Options: f.cfg.Options.Network(m.name), Name: m.name, Backends: f.cfg.Backends, Seen: t.seen,
		OpenStore: func(c etcd.Config) (network.Store, error) {
			manager, err := f.etcd.Network(m.name, c)
			if err != nil {
				return nil, err
			}
			return networkStore{manager, t}, nil
		},
		Announce: func(ctx context.Context) {
			klog.FromContext(ctx).Info("network is ready")
			f.mu.Lock()
			defer f.mu.Unlock()
			f.settled()
		},
	}
	if !f.cfg.Options.MasqueradeBetweenNetworks {
		c.Others = func() ([]netip.Prefix, <-chan struct{}) { return f.others(m) }
	}
	return network.Open(ctx, c)
}

// networkStore is the store of one of several networks. The fleet follows the configuration.
type networkStore struct {
	*etcd.Manager
	task
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
	return s.config, nil
}

// closed releases a network that is not served any more.
func (m *member) closed(n *network.Network) {
	m.fleet.mu.Lock()
	m.net = nil
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
	m.uses = nil
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
	if m.refused != nil {
		s.Reasons = append(s.Reasons, m.refused.Error())
		if m.net == nil {
			s.Phase = string(phaseRefused)
		}
	}
	return s
}
