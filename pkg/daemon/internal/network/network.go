// SPDX-License-Identifier: Apache-2.0

// Package network serves one flat network on this host. Three values describe it. lastknown.State is what it uses:
// configuration, interface and lease. It is in memory and on disk, and every session shares it. configWatch is what the
// store wants, and why the network cannot use that. A change is what the next session needs to bring both together.
//
// network.go contains the sequence from the start to the end: startup.go obtains the first change, resume.go
// serves from the last known state meanwhile, move.go follows the store and the external interface, and
// change.go obtains later changes. session.go starts the sessions for all of them, and publish.go makes the
// store have this host's lease. phase.go has the phases of a network, and report.go describes the network to
// operators. A file refers only to files below it in this order: network, startup, resume, move, change,
// session, publish and what they use; nothing refers back.
package network

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// Config is what Open needs.
type Config struct {
	Host    *Host
	Options options.Options
	Name    string // empty if it is the only network
	// Backends returns the backends that the network may use.
	Backends func(options.Options) (backend.Catalog, error)
	// Progress gets the phases of the network. If it is nil, Open creates one.
	Progress *Progress
	// OpenStore opens the store of one of several networks, which share a connection to etcd. If
	// it is nil, the options select the store.
	OpenStore func(etcd.Config) (Store, error)
	// Others returns the prefixes of the daemon's other networks, and a channel that is closed when
	// these prefixes change. Packets to them are not masqueraded. The field is nil if there are no
	// other networks, or if their prefixes are not exempt from masquerading.
	Others func() ([]netip.Prefix, <-chan struct{})
	// Claims is called with everything that the network claims on this host from then on. The network
	// calls it before it begins to use a configuration, and when it needs less than before, such as after
	// it has removed objects of a former configuration. The first Claimed is the configuration that the
	// network uses or is about to use. Claims returns an error if another network claims something that
	// this network has not claimed yet. This network then does not use the configuration. Claims may be
	// nil.
	Claims func([]Claimed) error
}

// Network is one flat network on this host.
type Network struct {
	host     *Host
	name     string // empty if it is the only network
	opts     options.Options
	kernel   *linux.Kernel
	devices  *ownership.Locks
	catalog  backend.Catalog
	state    *lastknown.Store
	past     lastknown.State // state file of the last process; Rules also has the networks of the subnet file
	store    Store
	config   *configWatch
	ready    *readiness
	metrics  *metrics.Metrics
	rules    ruleKeeper
	others   func() ([]netip.Prefix, <-chan struct{}) // see Config.Others
	claims   func([]Claimed) error                    // see Config.Claims
	claiming sync.Mutex                               // see claimLess
	prepared []string                                 // devices of a change that is being prepared; guarded by claiming
	progress *Progress
	labelled atomic.Pointer[string]  // location of this host according to the store; nil before it was read
	serving  atomic.Pointer[session] // the last session that was started; nil before the first and after leaveLast
	writing  sync.Mutex              // held by the goroutine that writes this host's lease while a session serves
	surroundings
}

// Open opens the kernel and the state file, and creates the backends and the connection to the store. It
// starts nothing. The caller must call Close, unless Open returns an error.
func Open(ctx context.Context, c Config) (_ *Network, err error) {
	opts := c.Options
	n := &Network{
		host: c.Host, name: c.Name, opts: opts, devices: ownership.NewLocks(opts.StateDir),
		others: c.Others, claims: c.Claims, progress: cmp.Or(c.Progress, NewProgress(klog.FromContext(ctx))), surroundings: realSurroundings(),
	}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()

	if n.kernel, err = linux.Open(linux.Options{NexthopObjects: opts.NexthopObjects == options.NexthopsAuto, Buffers: &c.Host.Buffers}); err != nil {
		return nil, err
	}
	if n.state, n.past, err = lastknown.Open(ctx, opts); err != nil {
		return nil, err
	}
	n.past.Rules = append(n.past.Rules, subnetfile.Networks(opts.SubnetFile)...)
	if n.catalog, err = c.Backends(opts); err != nil {
		return nil, err
	}
	n.ready = newReadiness(opts, n.state.LeaseEnd)
	n.metrics = metrics.New(c.Name, opts.Probe, n.values)
	n.rules = newRuleKeeper(n.host.Firewall, opts, n.state, n.ready, n.metrics)
	return n, n.openStore(ctx, c.OpenStore)
}

// Close releases what Open and sessions have taken. The kernel stays unchanged.
func (n *Network) Close() {
	if n.store != nil {
		_ = n.store.Close()
	}
	if n.catalog.Close != nil {
		n.catalog.Close() // before the locks, after which another daemon may take the devices
	}
	n.devices.Keep()
	if n.state != nil {
		n.state.Close()
	}
	if n.kernel != nil {
		_ = n.kernel.Close()
	}
}

// Shutdown lets the backends do what they must do on the host when the daemon stops, such as running
// ShutdownCommand.
func (n *Network) Shutdown(ctx context.Context) {
	if n.catalog.Shutdown != nil {
		n.catalog.Shutdown(ctx)
	}
}

// Run starts the network and serves it until ctx ends. It then returns nil, even if the start was
// not over, because the caller wanted that end. It returns an error earlier if the network cannot start or
// go on. With --exit-on-config-change it returns ErrConfigChanged, wrapped, when the configuration has
// changed.
func (n *Network) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = n.state.Run(ctx) })
	wg.Go(func() { n.watchPods(ctx) })
	return n.startAndServe(ctx)
}

func (n *Network) startAndServe(ctx context.Context) error {
	start := newStartup(ctx, n)
	defer start.stop()
	first, err := start.prepare(ctx)
	for errors.Is(err, ErrConfigChanged) {
		first, err = start.prepare(ctx)
	}
	if err != nil {
		return ended(ctx, err)
	}
	start.stop()
	s, err := n.serveFirst(ctx, first)
	if err != nil {
		return ended(ctx, err)
	}
	defer n.stopServing()
	return n.follow(ctx, s)
}

// serveFirst starts the first session with the store's answers. If that session does not start, and
// there was a session from the last known state with another configuration, serveFirst returns that session, like
// change.
func (n *Network) serveFirst(ctx context.Context, first *change) (*session, error) {
	differs := n.differs(first.config)
	s, err := n.serveChanged(ctx, first)
	if err == nil || ctx.Err() != nil || !differs {
		return s, err
	}

	n.config.use(first.before.Config)
	if errors.Is(err, ownership.ErrInUse) { // another process may release the device, and an attempt loses nothing
		n.config.refuse(ctx, first.config, err)
	} else {
		n.config.giveUp(ctx, first.config, err)
	}
	first.before.Stored = first.own
	s = n.serving.Load()
	n.restore(s, first)
	return s, nil
}

// Configure tells the network the text of the configuration in the store. It is for one of several
// networks, which do not watch their configurations themselves. Only one goroutine at a time may
// call it.
func (n *Network) Configure(ctx context.Context, text []byte) { n.config.apply(ctx, text) }

// Refuse records why the configuration in the store cannot be used. It is for a caller that has
// checked the configuration and logged the reason.
func (n *Network) Refuse(why error) { n.config.recordRefusal(why) }

// Refusal returns why the configuration in the store cannot be used, or "" if it can.
func (n *Network) Refusal() string { return n.config.refusal() }

// Alive implements health.Source.
func (n *Network) Alive() error { return n.ready.health.Alive() }

// Ready implements health.Source.
func (n *Network) Ready() (ready bool, reasons []string) { return n.ready.health.Ready() }

// Up returns a channel that is closed when the network has become ready for the first time.
func (n *Network) Up() <-chan struct{} { return n.ready.up }

// WasReady reports whether Up is closed.
func (n *Network) WasReady() bool { return n.ready.wasReady() }

// StateIsWritten reports whether the state file is up to date. Before the network is ready it
// returns true, because there is no need to wait then.
func (n *Network) StateIsWritten() bool { return !n.WasReady() || n.state.Written() }

// State returns the present state. ok is false before the first session.
func (n *Network) State() (now lastknown.State, ok bool) { return n.state.Get() }

// Metrics returns the metrics of the network.
func (n *Network) Metrics() []*metrics.Metrics { return []*metrics.Metrics{n.metrics} }
