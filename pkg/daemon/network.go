// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

// network is one flat network on this host. All fields except for serving are set when it is
// opened.
type network struct {
	host    *host
	name    string // empty if it is the only network
	opts    options.Options
	kernel  *linux.Kernel
	devices *deviceLocks
	catalog backend.Catalog
	state   *stateStore
	past    lastKnown // of the last process, when the network was opened
	store   store
	config  *configWatch
	ready   *readiness
	metrics *metrics.Metrics
	rules   *rules.Keeper
	// others returns the prefixes of other networks of this daemon, and a channel that is closed
	// when they change. Packets to them are not masqueraded. It is nil if there are none.
	others   func() ([]netip.Prefix, <-chan struct{})
	progress progress

	seen    atomic.Int64            // revision at which the store had the configuration, if there are several networks
	serving atomic.Pointer[session] // the present session; nil before the first
}

// openNetwork opens the state file and creates the connection to the store. It starts nothing.
func openNetwork(ctx context.Context, h *host, opts options.Options, name string, backends BackendsFunc, open storeOpener) (n *network, err error) {
	n = &network{host: h, name: name, opts: opts, devices: &deviceLocks{dir: opts.StateDir}}
	defer func() {
		if err != nil {
			n.close()
			n = nil
		}
	}()
	if n.catalog, err = backends(opts); err != nil {
		return n, err
	}
	if n.kernel, err = linux.Open(linux.Options{NexthopObjects: opts.NexthopObjects == options.NexthopsAuto, Buffers: &h.buffers}); err != nil {
		return n, err
	}
	n.config = newConfigWatch(func(text []byte) (subnet.Config, error) {
		now, _, err := ValidateConfig(text, !opts.KubeSubnetMgr, n.catalog.Registry)
		return now, err
	})
	n.progress.entered = func(p phase) { klog.FromContext(ctx).V(1).Info("network", "phase", p) }
	if n.state, n.past, err = openState(ctx, opts); err != nil {
		return n, err
	}
	n.past.Rules = append(n.past.Rules, networksOfFile(opts.SubnetFile)...)
	n.ready = newReadiness(opts, n.state.leaseEnd)
	n.metrics = metrics.New(name, n.look)
	n.rules = n.newRuleKeeper(h.firewall)
	n.store, err = open(ctx, n)
	return n, err
}

// close releases what openNetwork and sessions have taken. The kernel stays unchanged.
func (n *network) close() {
	if n.store != nil {
		_ = n.store.Close()
	}
	n.devices.releaseAll()
	if n.state != nil {
		n.state.close()
	}
	if n.catalog.Close != nil {
		n.catalog.Close()
	}
	if n.kernel != nil {
		_ = n.kernel.Close()
	}
}

// shutdown does what must be done on the host when the daemon is told to stop.
func (n *network) shutdown(ctx context.Context) {
	if n.catalog.Shutdown != nil {
		n.catalog.Shutdown(ctx)
	}
}

// run starts the network and serves it until ctx ends. It then returns nil.
func (n *network) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return n.state.run(ctx) })
	group.Go(func() error { return n.startAndServe(ctx) })
	return group.Wait()
}

func (n *network) startAndServe(ctx context.Context) error {
	start := newStartup(ctx, n)
	defer start.stop()
	be, now, err := start.prepare(ctx)
	for errors.Is(err, ErrConfigChanged) {
		be, now, err = start.prepare(ctx)
	}
	if err != nil {
		return err
	}
	start.stop()
	s, err := n.serve(ctx, be, now)
	if err != nil {
		return err
	}
	changed := make(chan underlay.Interface, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return n.watchInterface(ctx, n.underlayOptions(now.Config, now), now.Interface, changed)
	})
	group.Go(func() error { return n.work(ctx, n.store, s, changed) })
	group.Go(func() error { return ended(ctx, n.store.Keep(ctx, now.Own)) })
	n.followConfig(ctx, group)
	return group.Wait()
}

// stateIsWritten reports whether the state file is up to date. Before the daemon is ready it
// returns true, because there is no need to wait then.
func (n *network) stateIsWritten() bool { return !n.ready.wasReady() || n.state.written() }

// env returns the environment of backends.
func (n *network) env(iface underlay.Interface, cfg subnet.Config) backend.Env {
	return backend.Env{
		Network: n.name, Underlay: iface, Config: cfg, Kernel: n.kernel, Resync: n.opts.Resync, StateDir: n.opts.StateDir, Blackhole: n.opts.IPBlackholeRoute,
	}
}

// underlayOptions returns the options from cfg and the flags, and the interface that this
// process, or the last one, has used. last has the addresses from the store, which replace those
// of the flags.
func (n *network) underlayOptions(cfg subnet.Config, last lastKnown) underlay.Options {
	public := last.PublicIPs
	if now, ok := n.state.get(); ok {
		last = now
	}
	o := underlay.Options{
		Ifaces: n.opts.Iface, IfaceRegexes: n.opts.IfaceRegex, CanReach: n.opts.IfaceCanReach,
		PublicIP: n.opts.PublicIP, PublicIPv6: n.opts.PublicIPv6,
		InUse: last.Interface, Reader: n.host.underlay,
	}
	for _, one := range cfg.Networks {
		o.Families = append(o.Families, one.Family())
		// The hosts may use a subnet of a former network themselves.
		if e, ok := last.Own.Endpoint(one.Family()); ok && one.Prefix.Contains(e.Subnet.Addr()) {
			o.Pods = append(o.Pods, e.Subnet)
		}
	}
	for _, a := range public {
		if a.Is4() {
			o.PublicIP = a
		} else {
			o.PublicIPv6 = a
		}
	}
	return o
}

// watchInterface follows the external interface until ctx ends. It sends the latest state
// to changed.
func (n *network) watchInterface(ctx context.Context, o underlay.Options, now underlay.Interface, changed chan underlay.Interface) error {
	usable := func(err error) { n.ready.report(ctx, partInterface, err) }
	return underlay.Watch(ctx, o, now, latest(changed), usable)
}

// latest returns a function that sends a value to ch and replaces a value that was not
// received yet. Only this function may send to ch.
func latest[T any](ch chan T) func(T) {
	return func(v T) {
		select {
		case <-ch:
		default:
		}
		ch <- v
	}
}

// ended returns nil if ctx has ended, because a member that ends then was told to.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// retryPause is the pause after an answer that does not help, such as no configuration
// yet or no free subnet.
const retryPause = time.Second

// retry repeats try until it succeeds or ctx ends. It logs each new error once. A success
// counts even if ctx has ended.
func retry(ctx context.Context, what string, try func() error) error {
	logged := ""
	for {
		err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return oneline.Join(err, ctx.Err())
		}
		if errors.Is(err, subnet.ErrUnfit) || errors.Is(err, ErrConfigChanged) {
			return err
		}
		if logged != err.Error() {
			logged = err.Error()
			klog.FromContext(ctx).Error(err, what)
		}
		_ = wait.For(ctx, retryPause) // after the end of ctx there is one more try
	}
}

// networks returns the prefixes of a configuration. It is not nil.
func networks(cfg subnet.Config) []netip.Prefix {
	ps := []netip.Prefix{}
	for _, n := range cfg.Networks {
		ps = append(ps, n.Prefix)
	}
	return ps
}
