package app

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"flanneld/backend"
	"flanneld/pkg/dataplane/linux"
	"flanneld/pkg/health"
	"flanneld/pkg/metrics"
	"flanneld/pkg/oneline"
	"flanneld/pkg/state"
	"flanneld/pkg/status"
	"flanneld/pkg/underlay"
	"flanneld/subnet"
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

// interfaceGrace is how long packets may be unable to leave by the external interface
// before that counts: a link that goes down and up, or a DHCP client that starts
// anew, takes an address away and puts it back. Another interface is taken sooner.
const interfaceGrace = 10 * time.Second

// retryPause is the pause between questions that were answered, but not in a
// way that helps: no configuration yet, no free subnet.
const retryPause = time.Second

// lastKnown is what a start can go on from before the store has answered.
type lastKnown struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
	Own       subnet.Lease       `json:"own"`
	Stored    *subnet.Lease      `json:"stored,omitempty"` // Own as it was published; nil: as it is
	Peers     subnet.LedgerState `json:"peers"`
	Former    []former           `json:"former,omitempty"` // that may still show in the kernel
	Rules     []netip.Prefix     `json:"rules,omitempty"`  // networks besides Config's that the firewall may still name

	// Saved is when the file was written, by the wall clock. A clock that is earlier is wrong.
	Saved time.Time `json:"saved,omitzero"`

	// PublicIPs are what the store says that peers send to, if not the flags.
	PublicIPs []netip.Addr `json:"publicIPs,omitempty"`

	peers func() subnet.LedgerState // has newer ones than Peers; may be nil

	// recalled means that Config is what an earlier run used, and that the store has
	// not given this run a configuration yet.
	recalled bool
}

// daemon is one run of flanneld.
type daemon struct {
	opts     Options
	registry backend.Registry
	group    *errgroup.Group
	health   *health.Status
	notifier health.Notifier
	kernel   *linux.Kernel
	fit      *runtimeFit
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
	public   []netip.Addr                 // that the store gives, in place of the flags
	warn     func(reason, message string) // tells those who look at this node in the store; may be nil
}

func newHealth(o Options) *health.Status {
	// A pass is due in every resync period, give or take a fifth.
	s := health.New(2*o.Resync+time.Minute, partSubnetFile, partDatapath, partRules)
	s.SetGrace(partDatastore, o.ReadyzDatastoreGrace)
	s.SetGrace(partInterface, interfaceGrace)
	return s
}

// report notes the state of a component, and tells the world when the last of
// them has become good for the first time.
func (d *daemon) report(ctx context.Context, part string, err error) {
	d.health.Set(part, err)
	if ready, _ := d.health.Ready(); !ready {
		return
	}
	d.ready.Do(func() {
		klog.FromContext(ctx).Info("flannel is ready")
		close(d.up)
		if err := d.notifier.Ready(); err != nil {
			klog.FromContext(ctx).Error(err, "systemd was not told")
		}
	})
}

// reportStore notes that the store has gone or come. Gone it may be for the grace, but
// no longer than half of what is left of the lease then: it must not run out unseen.
func (d *daemon) reportStore(ctx context.Context, err error) {
	if _, before := d.health.Part(partDatastore); err != nil && before == nil {
		d.health.SetGrace(partDatastore, d.storeGrace())
	}
	d.report(ctx, partDatastore, err)
}

func (d *daemon) storeGrace() time.Duration {
	now, _ := d.record.get()
	if now.Own.Expires.IsZero() { // no lease yet, or one for good
		return d.opts.ReadyzDatastoreGrace
	}
	return min(d.opts.ReadyzDatastoreGrace, time.Until(now.Own.Expires)/2)
}

// wasReady reports whether the daemon has become ready, whatever it is now.
func (d *daemon) wasReady() bool {
	select {
	case <-d.up:
		return true
	default:
		return false
	}
}

// written reports whether the state file has all that is known, or there is no need
// to wait for it: before the daemon was ready.
func (d *daemon) written() bool { return !d.wasReady() || d.record.written() }

// run starts the daemon's work, member by member, and then keeps the lease.
func (d *daemon) run(ctx context.Context) error {
	kernel, err := linux.Open(linux.Options{NexthopObjects: d.opts.NexthopObjects == nexthopsAuto})
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
	for errors.Is(err, errConfigChanged) {
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

// prepare gets all that a session needs, and waits for it: the configuration, the
// interface, a backend and the own lease. last is what the daemon knew when it ran
// before. It returns errConfigChanged, wrapped, if the configuration that it waits
// for a subnet of is not the one in the store any more.
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
	d.resumed.settle() // or two would start what a backend runs
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
		last = now // the interface has changed meanwhile, perhaps
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

// watchInterface follows the external interface until ctx ends: changed takes the
// latest.
func (d *daemon) watchInterface(ctx context.Context, o underlay.Options, now underlay.Interface, changed chan underlay.Interface) error {
	usable := func(err error) { d.report(ctx, partInterface, err) }
	return underlay.Watch(ctx, o, now, latest(changed), usable)
}

// env is what backends are built on.
func (d *daemon) env(iface underlay.Interface, cfg subnet.Config) backend.Env {
	return backend.Env{Underlay: iface, Config: cfg, Kernel: d.kernel, Resync: d.opts.Resync, StateDir: d.opts.StateDir, Blackhole: d.opts.IPBlackholeRoute}
}

// ended is nil if what ended did so because it was asked to.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// readConfig waits for a network configuration that can be used.
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

// acquire takes the own lease; it waits for a subnet to become free, as long as the
// configuration is the one of env: else it returns errConfigChanged, wrapped.
func (d *daemon) acquire(ctx context.Context, m subnet.Manager, be backend.Backend, env backend.Env, last lastKnown) (subnet.Lease, error) {
	log := klog.FromContext(ctx)
	if misfit := d.misfit(env.Config); misfit != nil {
		log.Error(misfit, "the subnet of the last known state cannot stay")
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
	if lost(claim.Endpoints, own.Endpoints) { // what is published may depend on the subnet
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

// lost reports whether a host had a subnet before that it has not now.
func lost(before, now []subnet.Endpoint) bool {
	return slices.ContainsFunc(before, func(b subnet.Endpoint) bool {
		return b.Subnet.IsValid() && !slices.ContainsFunc(now, func(n subnet.Endpoint) bool { return n.Subnet == b.Subnet })
	})
}

func sameData(a, b []subnet.Endpoint) bool {
	return slices.EqualFunc(a, b, func(a, b subnet.Endpoint) bool { return bytes.Equal(a.Data, b.Data) })
}

// waitForSubnet acquires a lease for claim, as acquire does.
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
				return fmt.Errorf("%w: %s", errConfigChanged, strings.Join(changes, ", "))
			}
		}
		return err
	})
	return own, err
}

// retry repeats try until it succeeds or ctx ends; a success is one even then. What
// keeps it from succeeding is logged once.
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
		if errors.Is(err, subnet.ErrUnfit) || errors.Is(err, errConfigChanged) {
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

// underlayOptions are those that cfg and the flags make, with what this run of the
// daemon, or else the last one, has used.
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
		// A subnet of a network that was given up may be the hosts' own.
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

// describe renders the interface's addresses for the log.
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

// sameNode reports whether the state that goes with interface a is of the
// node that now has b: cloned hosts share their disk, but not their address.
func sameNode(a, b underlay.Interface) bool {
	return len(a.Addrs) > 0 && reflect.DeepEqual(a.Addrs, b.Addrs)
}

// otherNode reports whether the state that goes with interface a is of another node
// than the one that now has b: they have no address in common.
func otherNode(a, b underlay.Interface) bool {
	return !slices.ContainsFunc(a.Addrs, func(one underlay.Address) bool { return slices.Contains(b.Addrs, one) })
}

// stateName tells daemons of one host apart: each has a network and a subnet
// file of its own.
func (o Options) stateName() string {
	network := o.EtcdPrefix
	if o.KubeSubnetMgr {
		network = "Kubernetes " + o.KubeAnnotationPrefix
	}
	sum := sha256.Sum256([]byte(filepath.Clean(o.SubnetFile) + "\x00" + network))
	return "flanneld-" + hex.EncodeToString(sum[:6])
}

// loadState opens the state file and returns what it holds. A disk that does
// not work is a pity, another daemon with the same files is an error.
func (d *daemon) loadState(ctx context.Context) (lastKnown, error) {
	log := klog.FromContext(ctx)
	file, err := state.Open[lastKnown](d.opts.StateDir, d.opts.stateName())
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
	for i := range last.Peers.Peers { // the decoder leaves room for four
		l := &last.Peers.Peers[i].Lease
		l.Endpoints = slices.Clone(l.Endpoints)
	}
	return last, nil
}
