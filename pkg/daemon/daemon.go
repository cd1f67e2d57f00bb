// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/tune"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/health"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// The components of readiness.
const (
	partDatapath   = "data path"
	partDatastore  = "datastore"
	partSubnetFile = "subnet file"
	partRules      = "traffic rules"
	partInterface  = "external interface"
	partSubnet     = "subnet"
)

// interfaceGrace is the time without a usable external interface after which the daemon
// is not ready. A link that goes down and up, or a restarted DHCP client, removes an
// address only for a moment. The daemon switches to another interface sooner.
const interfaceGrace = 10 * time.Second

// retryPause is the pause after an answer that does not help, such as no configuration
// yet or no free subnet.
const retryPause = time.Second

// lastKnown is the state that a start can use before the store has answered.
type lastKnown struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
	Own       subnet.Lease       `json:"own"`
	Stored    *subnet.Lease      `json:"stored,omitempty"` // Own as it was published; nil if it is the same
	Peers     subnet.LedgerState `json:"peers"`
	Former    []former           `json:"former,omitempty"` // earlier configurations whose objects may still be in the kernel
	Rules     []netip.Prefix     `json:"rules,omitempty"`  // networks outside of Config that the firewall may still contain

	// Saved is when the file was written, by the wall clock. A clock that is earlier is wrong.
	Saved time.Time `json:"saved,omitzero"`

	// PublicIPs are the addresses that peers send to, if the store and not the flags set
	// them.
	PublicIPs []netip.Addr `json:"publicIPs,omitempty"`

	peers func() subnet.LedgerState // returns newer peers than Peers; may be nil

	// recalled is set if Config comes from an earlier process, and the store has not
	// returned a configuration to this process yet.
	recalled bool
}

// daemon is a running flanneld.
type daemon struct {
	opts     options.Options
	registry backend.Registry
	group    *errgroup.Group
	health   *health.Status
	notifier health.Notifier
	kernel   *linux.Kernel
	tuner    *tune.Tuner
	resumed  resumption
	ready    sync.Once
	record   *record
	devices  deviceLocks
	flavour  flavourChoice
	started  time.Time
	journal  *status.Journal
	metrics  *metrics.Metrics
	serving  atomic.Pointer[session] // nil until there is one
	config   *configKeeper
	up       chan struct{}                // closed when the daemon has become ready
	public   []netip.Addr                 // addresses from the store, which replace those of the flags
	warn     func(reason, message string) // publishes a warning about this node in the store; may be nil
}

func newHealth(o options.Options) *health.Status {
	// There is a pass in every resync period, with a jitter of a fifth.
	s := health.New(2*o.Resync+time.Minute, partSubnetFile, partDatapath, partRules)
	s.SetGrace(partDatastore, o.ReadyzDatastoreGrace)
	s.SetGrace(partInterface, interfaceGrace)
	return s
}

// report records the state of a component. When all components are good for the first
// time, it announces that the daemon is ready.
func (d *daemon) report(ctx context.Context, part string, err error) {
	d.health.Set(part, err)
	if ready, _ := d.health.Ready(); !ready {
		return
	}
	d.ready.Do(func() {
		klog.FromContext(ctx).Info("flannel is ready")
		close(d.up)
		if err := d.notifier.Ready(); err != nil {
			klog.FromContext(ctx).Error(err, "cannot notify systemd")
		}
	})
}

// reportStore records whether the store is available. The store may be unavailable for
// the grace period, capped at half of the remaining lease time, so that the host becomes
// unready before the lease expires.
func (d *daemon) reportStore(ctx context.Context, err error) {
	if _, before := d.health.Part(partDatastore); err != nil && before == nil {
		d.health.SetGrace(partDatastore, d.storeGrace())
	}
	d.report(ctx, partDatastore, err)
}

func (d *daemon) storeGrace() time.Duration {
	now, _ := d.record.get()
	if now.Own.Expires.IsZero() { // no lease yet, or one that never expires
		return d.opts.ReadyzDatastoreGrace
	}
	return min(d.opts.ReadyzDatastoreGrace, time.Until(now.Own.Expires)/2)
}

// wasReady reports whether the daemon has been ready at some time.
func (d *daemon) wasReady() bool {
	select {
	case <-d.up:
		return true
	default:
		return false
	}
}

// written reports whether the state file is up to date. Before the daemon is ready it
// returns true, because there is no need to wait then.
func (d *daemon) written() bool { return !d.wasReady() || d.record.written() }

// run starts the parts of the daemon one after another, and then keeps the lease.
func (d *daemon) run(ctx context.Context) error {
	kernel, err := linux.Open(linux.Options{NexthopObjects: d.opts.NexthopObjects == options.NexthopsAuto})
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()
	d.kernel = kernel

	last, err := d.loadState(ctx)
	if err != nil {
		return err
	}
	defer d.record.close()
	defer d.devices.releaseAll()
	last.Rules = append(last.Rules, d.fileNetworks()...)
	manager, err := d.manager(ctx, last)
	if err != nil {
		return err
	}
	defer func() { _ = manager.Close() }()
	if k, ok := manager.(interface{ Warn(reason, message string) }); ok {
		d.warn = k.Warn
	}

	d.flavour.background = func(f func(context.Context)) {
		d.group.Go(func() error {
			f(ctx)
			return nil
		})
	}
	d.resumed = d.resume(ctx, manager, last)
	defer d.resumed.stop()
	be, now, err := d.prepare(ctx, manager, last)
	for errors.Is(err, ErrConfigChanged) {
		be, now, err = d.prepare(ctx, manager, last)
	}
	if err != nil {
		return err
	}
	d.resumed.stop()
	sess, err := d.serve(ctx, be, now)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	changed := make(chan underlay.Interface, 1)
	group.Go(func() error {
		return d.watchInterface(ctx, d.underlayOptions(now.Config, now), now.Interface, changed)
	})
	group.Go(func() error { return d.work(ctx, manager, sess, changed) })
	group.Go(func() error { return ended(ctx, manager.Keep(ctx, now.Own)) })
	d.followConfig(ctx, group, manager)
	return group.Wait()
}

// prepare obtains what a session needs: the configuration, the interface, a backend and
// the own lease. It waits for each. last is the state of the last process. prepare
// returns ErrConfigChanged, wrapped, if the configuration in the store changes while it
// waits for a subnet.
func (d *daemon) prepare(ctx context.Context, m store, last lastKnown) (backend.Backend, lastKnown, error) {
	log := klog.FromContext(ctx)
	cfg, err := d.readConfig(ctx, m)
	if err != nil {
		return nil, last, err
	}
	d.config.used = cfg
	if d.public, err = publicIPs(ctx, m); err != nil {
		return nil, last, err
	}
	iface, err := underlay.Wait(ctx, d.underlayOptions(cfg, last), d.opts.IfaceWait)
	if err != nil {
		return nil, last, err
	}
	d.resumed.settle() // otherwise two sessions could run a backend's commands
	log.Info("using interface", "name", iface.Name, "reason", iface.Reason, "mtu", iface.MTU, "addresses", describe(iface))
	env := d.env(iface, cfg)
	be, warnings, err := d.registry.New(env)
	if err != nil {
		return nil, last, err
	}
	for _, w := range warnings {
		log.Error(nil, "network configuration", "warning", w)
	}
	if now, ok := d.record.get(); ok {
		last = now // the interface may have changed
		if now.peers != nil {
			last.Peers, last.peers = now.peers(), nil
		}
	} else if otherNode(last.Interface, iface) {
		last.Peers = subnet.LedgerState{}
	}
	own, err := d.acquire(ctx, m, be, env, last)
	if err != nil {
		return nil, last, err
	}
	last.Former, last.Rules = d.outlived(last, be), formerNetworks(last, cfg)
	last.Config, last.Interface, last.Own, last.Stored, last.PublicIPs = cfg, iface, own, nil, d.public
	last.recalled = false
	return be, last, nil
}

// watchInterface follows the external interface until ctx ends. It sends the latest state
// to changed.
func (d *daemon) watchInterface(ctx context.Context, o underlay.Options, now underlay.Interface, changed chan underlay.Interface) error {
	usable := func(err error) { d.report(ctx, partInterface, err) }
	return underlay.Watch(ctx, o, now, latest(changed), usable)
}

// env returns the environment of backends.
func (d *daemon) env(iface underlay.Interface, cfg subnet.Config) backend.Env {
	return backend.Env{Underlay: iface, Config: cfg, Kernel: d.kernel, Resync: d.opts.Resync, StateDir: d.opts.StateDir, Blackhole: d.opts.IPBlackholeRoute}
}

// ended returns nil if ctx has ended, because a member that ends then was told to.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// readConfig waits for a valid network configuration.
func (d *daemon) readConfig(ctx context.Context, m subnet.Manager) (subnet.Config, error) {
	var cfg subnet.Config
	err := d.retry(ctx, "waiting for the network configuration", func() (err error) {
		cfg, err = m.Config(ctx)
		return err
	})
	if err != nil {
		return cfg, err
	}
	klog.FromContext(ctx).Info("Found network config", "backend", cfg.BackendType, "networks", networks(cfg))
	return cfg, nil
}

func networks(cfg subnet.Config) []netip.Prefix {
	ps := []netip.Prefix{}
	for _, n := range cfg.Networks {
		ps = append(ps, n.Prefix)
	}
	return ps
}

// acquire takes the own lease. It waits for a free subnet while the configuration in the
// store is that of env. If it changes, acquire returns ErrConfigChanged, wrapped.
func (d *daemon) acquire(ctx context.Context, m subnet.Manager, be backend.Backend, env backend.Env, last lastKnown) (subnet.Lease, error) {
	log := klog.FromContext(ctx)
	if misfit := d.misfit(env.Config); misfit != nil {
		log.Error(misfit, "the subnet of the last known state does not fit the network configuration")
		d.report(ctx, partSubnet, misfit)
	}
	var own subnet.Lease
	prev, err := m.Recall(ctx, env.Claim("", subnet.Claim{}))
	if err != nil {
		return own, fmt.Errorf("recall the own lease: %w", err)
	}
	if len(prev.Endpoints) == 0 && sameNode(last.Interface, env.Underlay) {
		prev = subnet.Claim{BackendType: last.Own.BackendType, Endpoints: last.Own.Endpoints}
	}
	claim, err := be.Claim(ctx, prev)
	if err != nil {
		return own, err
	}
	if own, err = d.waitForSubnet(ctx, m, env.Config, claim); err != nil {
		return own, err
	}
	if lost(claim.Endpoints, own.Endpoints) { // the published data may depend on the subnet
		again, err := be.Claim(ctx, subnet.Claim{BackendType: own.BackendType, Endpoints: own.Endpoints})
		if err != nil {
			return own, err
		}
		if !sameData(claim.Endpoints, again.Endpoints) {
			if own, err = d.waitForSubnet(ctx, m, env.Config, again); err != nil {
				return own, err
			}
		}
	}
	log.Info("subnet lease acquired", "lease", own.Key, "permanent", own.Permanent)
	return own, nil
}

// lost reports whether a host no longer has one of its subnets.
func lost(before, now []subnet.Endpoint) bool {
	return slices.ContainsFunc(before, func(b subnet.Endpoint) bool {
		return b.Subnet.IsValid() && !slices.ContainsFunc(now, func(n subnet.Endpoint) bool { return n.Subnet == b.Subnet })
	})
}

func sameData(a, b []subnet.Endpoint) bool {
	return slices.EqualFunc(a, b, func(a, b subnet.Endpoint) bool { return bytes.Equal(a.Data, b.Data) })
}

// waitForSubnet acquires a lease for claim, and waits for a free subnet like acquire.
func (d *daemon) waitForSubnet(ctx context.Context, m subnet.Manager, cfg subnet.Config, claim subnet.Claim) (own subnet.Lease, err error) {
	var left error
	err = d.retry(ctx, "waiting for a subnet", func() (err error) {
		if own, err = m.Acquire(ctx, cfg, claim); ctx.Err() != nil {
			return err
		}
		if errors.Is(err, subnet.ErrNoSubnets) && left == nil {
			left = d.leaveLast(ctx, cfg)
		}
		if err == nil {
			d.report(ctx, partSubnet, nil)
			return nil
		}
		d.report(ctx, partSubnet, oneline.Join(left, err))
		if now, e := m.Config(ctx); e == nil {
			if changes := configChanges(cfg, now); len(changes) > 0 {
				return fmt.Errorf("%w: %s", ErrConfigChanged, strings.Join(changes, ", "))
			}
		}
		return err
	})
	return own, err
}

// retry repeats try until it succeeds or ctx ends. It logs each new error once. A success
// counts even if ctx has ended.
func (d *daemon) retry(ctx context.Context, what string, try func() error) error {
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
		select {
		case <-ctx.Done():
		case <-time.After(retryPause):
		}
	}
}

// underlayOptions returns the options from cfg and the flags, and the interface that this
// process, or the last one, has used.
func (d *daemon) underlayOptions(cfg subnet.Config, last lastKnown) underlay.Options {
	if now, ok := d.record.get(); ok {
		last = now
	}
	o := underlay.Options{
		Ifaces: d.opts.Iface, IfaceRegexes: d.opts.IfaceRegex, CanReach: d.opts.IfaceCanReach,
		PublicIP: d.opts.PublicIP, PublicIPv6: d.opts.PublicIPv6,
		InUse: last.Interface,
	}
	for _, n := range cfg.Networks {
		// The hosts may use a subnet of a former network themselves.
		if e, ok := last.Own.Endpoint(n.Family()); ok && n.Prefix.Contains(e.Subnet.Addr()) {
			o.Pods = append(o.Pods, e.Subnet)
		}
	}
	for _, a := range d.public {
		if a.Is4() {
			o.PublicIP = a
		} else {
			o.PublicIPv6 = a
		}
	}
	for _, n := range cfg.Networks {
		o.Families = append(o.Families, n.Family())
	}
	return o
}

// describe returns the interface's addresses for the log.
func describe(i underlay.Interface) []string {
	var s []string
	for _, a := range i.Addrs {
		if a.Public == a.Local {
			s = append(s, a.Local.String())
		} else {
			s = append(s, fmt.Sprintf("%s (public %s)", a.Local, a.Public))
		}
	}
	return s
}

// sameNode reports whether the state with interface a belongs to the node that has b now.
// Cloned hosts have the same disk, but different addresses.
func sameNode(a, b underlay.Interface) bool {
	return len(a.Addrs) > 0 && reflect.DeepEqual(a.Addrs, b.Addrs)
}

// otherNode reports whether the state with interface a belongs to another node than the
// one that has b now: they have no address in common.
func otherNode(a, b underlay.Interface) bool {
	return !slices.ContainsFunc(a.Addrs, func(one underlay.Address) bool { return slices.Contains(b.Addrs, one) })
}

// loadState opens the state file and returns its content. It continues without the file
// if the disk fails, and returns an error if another daemon uses the same files.
func (d *daemon) loadState(ctx context.Context) (lastKnown, error) {
	log := klog.FromContext(ctx)
	file, err := state.Open[lastKnown](d.opts.StateDir, d.opts.StateName())
	if errors.Is(err, state.ErrInUse) {
		return lastKnown{}, fmt.Errorf("another flanneld runs with subnet file %s: %w", d.opts.SubnetFile, err)
	}
	d.record = newRecord(file)
	if err != nil {
		log.Error(err, "going on without a state directory: a restart will depend on the store")
		return lastKnown{}, nil
	}
	d.group.Go(func() error { return d.record.run(ctx) })
	last, _, err := file.Load()
	if err != nil {
		log.Error(err, "going on without the last known state")
	}
	for i := range last.Peers.Peers { // the decoder allocates room for four
		l := &last.Peers.Peers[i].Lease
		l.Endpoints = slices.Clone(l.Endpoints)
	}
	return last, nil
}
