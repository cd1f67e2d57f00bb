// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// startup obtains what the first session with the store's answers needs. Meanwhile a session may
// serve from the last known state.
type startup struct {
	*Network
	endTries func() // see resume
	stop     func()
	stored   *subnet.Config // configuration in the store; nil if it cannot be read
}

// newStartup begins a start, and the session on the last known state if it can be used.
func newStartup(ctx context.Context, n *Network) *startup {
	n.progress.waitFor(PhaseNoConfiguration)
	s := &startup{Network: n, endTries: func() {}, stop: func() {}}
	if len(n.past.Own.Endpoints) > 0 && !errors.Is(n.past.Usable(time.Now()), lastknown.ErrExpired) {
		s.endTries, s.stop = n.resume(ctx, n.past)
	}
	return s
}

// prepare obtains the first change: the configuration, the interface, a backend and this host's lease. It waits for the
// configuration, the interface and the lease. It returns ErrConfigChanged, wrapped, if the configuration in the store
// changes while prepare waits for a subnet or for a cloud.
//
// If this host cannot use one of two address families, prepare uses the other one alone.
//
// If the configuration in the store cannot be used, and the network is served from the last known
// state, prepare uses the configuration of that state. So the host follows its peers and keeps its
// lease, like a running daemon that refuses a changed configuration. If neither configuration has a
// subnet for this host, prepare waits for a subnet of the one in the store.
func (s *startup) prepare(ctx context.Context) (c *change, err error) {
	s.progress.waitFor(PhaseNoConfiguration)
	s.stored = nil
	stored, err := s.readConfig(ctx)
	if former := s.former(); former != nil && errors.Is(err, subnet.ErrInvalidConfig) { // the watch of the configuration logs the reason
		return s.prepareWith(ctx, *former, true)
	}
	if err != nil {
		return nil, err
	}

	s.stored = &stored
	last := s.last()
	cfg := last.Config.Toward(stored)
	if cfg.Stage == "" && !s.config.follow { // nothing would make the next step
		cfg = stored
	}
	cfg = last.Withdrawn(cfg)
	c, err = s.prepareWith(ctx, cfg, false)

	// Otherwise a node would lose IPv4 when IPv6 is enabled in the cluster and it has no podCIDR for it.
	var part *subnet.FamilyError
	if errors.As(err, &part) && len(cfg.Networks) > 1 {
		cfg = cfg.Without(part.Family)
		c, err = s.prepareWith(ctx, cfg, !s.differs(cfg))
		if err == nil {
			s.config.refuse(ctx, stored, fmt.Errorf("only %s is used: %w", cfg.Networks[0].Family(), part))
		}
	}
	if err == nil || ctx.Err() != nil || errors.Is(err, ErrConfigChanged) || !s.differs(cfg) {
		return c, err
	}

	full := errors.Is(err, subnet.ErrNoSubnets)
	c, errFormer := s.prepareWith(ctx, *s.former(), !full)
	switch {
	case errFormer == nil:
		s.config.refuse(ctx, stored, err)
		return c, nil
	case errors.Is(errFormer, ErrConfigChanged):
		return nil, errFormer
	case full:
		return s.prepareWith(ctx, cfg, true)
	}
	return nil, err
}

// prepareWith obtains what prepare returns, for one configuration. It returns ErrNoSubnets, wrapped,
// if no subnet is free and the attempt does not wait for one.
func (s *startup) prepareWith(ctx context.Context, cfg subnet.Config, waits bool) (c *change, err error) {
	log := klog.FromContext(ctx)
	s.progress.waitFor(PhaseNoConfiguration)
	s.config.use(cfg)
	public, err := s.store.PublicIPs(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.readLocation(ctx); err != nil {
		return nil, err
	}

	s.progress.waitFor(PhaseNoInterface)
	iface, err := s.awaitInterface(ctx, cfg, public)
	if err != nil {
		return nil, err
	}
	s.endTries() // otherwise two sessions could run the backend's commands at the same time
	log.Info("using interface", "name", iface.Name, "reason", iface.Reason, "mtu", iface.MTU, "addresses", describe(iface))
	env := s.env(iface, cfg)
	be, warnings, err := s.newBackend(ctx, env)
	if err != nil {
		return nil, err
	}
	s.config.logWarnings(ctx, slices.Concat(cfg.Warnings, warnings))

	before := s.last() // the session on the last known state may have changed the interface
	if before.Fresh != nil {
		before.Peers = before.Fresh()
		before.Fresh = nil
	}
	if !s.proven() && lastknown.OtherHost(before.Interface, iface) {
		before.Peers = subnet.LedgerState{}
	}

	s.progress.waitFor(PhaseNoLease)
	if s.differs(cfg) { // so that Renewed keeps the data in Own, that of the last known state, although acquire may publish other data
		s.state.Update((*lastknown.State).Differ)
	}
	prev, err := s.recall(ctx, be, env, before)
	if err != nil {
		return nil, err
	}
	own, err := s.acquire(ctx, be, env, before, prev, waits)
	if err != nil {
		return nil, err
	}

	if len(before.Own.Endpoints) == 0 {
		before.Former = append(before.Former, published(prev, cfg, iface)...)
	}
	before.PublicIPs = public
	before.Location = env.Location
	before.LocationLabel = s.opts.LocationLabel
	before.Recalled = false
	if s.name != "" {
		before.Name = s.name
		before.Prefix = strings.TrimSuffix(s.opts.EtcdPrefix, "/"+s.name)
	}
	return &change{before: before, config: cfg, iface: iface, be: be, own: &own}, nil
}

// awaitInterface waits for the external interface. While the last known state serves the pods of this
// host, it does not give up.
func (s *startup) awaitInterface(ctx context.Context, cfg subnet.Config, public []netip.Addr) (underlay.Interface, error) {
	options := s.underlayOptions(cfg, public)
	if len(s.past.Interface.Addrs) == 0 {
		before, err := s.store.Recall(ctx, subnet.Claim{})
		if err != nil {
			return underlay.Interface{}, fmt.Errorf("recall what this host has published: %w", err)
		}
		for _, e := range before.Endpoints {
			options.Published = append(options.Published, e.PublicIP)
		}
		options.Pods = previousSubnets(ctx, s.opts.SubnetFile)
	}

	limit := s.opts.IfaceWait
	for {
		iface, err := s.chooseUplink(ctx, options, limit)
		if err == nil || ctx.Err() != nil || s.serving.Load() == nil {
			return iface, err
		}
		limit = max(limit, time.Minute)
	}
}

// readConfig waits for a valid network configuration. It returns ErrInvalidConfig, wrapped, if there is
// an invalid one and the network can continue with the configuration of the last known state.
func (s *startup) readConfig(ctx context.Context) (cfg subnet.Config, err error) {
	err = retry(ctx, "waiting for the network configuration", func() (err error) {
		cfg, err = s.store.Config(ctx)
		if errors.Is(err, subnet.ErrInvalidConfig) && s.former() != nil {
			return final{err}
		}
		return err
	})
	if err != nil {
		return cfg, err
	}
	klog.FromContext(ctx).Info("Found network config", "backend", cfg.BackendType, "networks", cfg.Prefixes())
	return cfg, nil
}

// recall returns what this host has published before, or the zero Claim if that is not known.
func (s *startup) recall(ctx context.Context, be backend.Backend, env backend.Env, last lastknown.State) (subnet.Claim, error) {
	same := s.proven() || lastknown.SameHost(last.Interface, env.Underlay) || hasHardware(last.Interface.Hardware)
	if err := s.recognize(ctx, be, env, last, same); err != nil {
		return subnet.Claim{}, err
	}
	prev, err := s.store.Recall(ctx, env.Claim("", subnet.Claim{}))
	if err != nil {
		return prev, fmt.Errorf("recall this host's lease: %w", err)
	}
	if len(prev.Endpoints) == 0 && same {
		prev = last.Own.Claim()
	}
	return prev, nil
}

// published returns the configuration with which a host has published prev. Only the data of vxlan tells the
// name of the device, by the key VNI. With two backends peers may still send by both.
func published(prev subnet.Claim, cfg subnet.Config, iface underlay.Interface) []lastknown.Former {
	if prev.BackendType != "vxlan" || prev.NextType != "" {
		return nil
	}
	cfg = cfg.Present()
	cfg.BackendType = prev.BackendType
	cfg.Backend = prev.Endpoints[0].Data
	return []lastknown.Former{{Config: cfg, Interface: iface}}
}

// acquire takes this host's lease. It waits for a free subnet like waitForSubnet, and for a cloud that
// does not answer. If the configuration in the store changes meanwhile, acquire returns
// ErrConfigChanged, wrapped. It does not wait for a cloud if the last known state has another
// configuration, because the network can continue with that one.
func (s *startup) acquire(
	ctx context.Context, be backend.Backend, env backend.Env, last lastknown.State, prev subnet.Claim, waits bool,
) (subnet.Lease, error) {
	log := klog.FromContext(ctx)
	if outside := s.outsideOf(env.Config); outside != nil {
		log.Error(outside, "the subnet of the last known state does not fit the network configuration")
		s.ready.report(partSubnet, outside)
	}

	// A host that already has a subnet in the range works, and so do its peers: flannel accepts such ranges.
	used := last.Config
	if len(last.Own.Endpoints) == 0 && s.fits(env.Config, subnet.Lease{Endpoints: prev.Endpoints}) {
		used = env.Config
	}
	if err := s.checkRanges(ctx, env.Config, used, env.Underlay); err != nil {
		return subnet.Lease{}, err
	}

	var backoff wait.Backoff
	logged := ""
	for {
		own, err := claimAndAcquire(ctx, be, prev, func(c subnet.Claim) (subnet.Lease, error) {
			return s.waitForSubnet(ctx, env.Config, c, waits)
		})
		if ctx.Err() != nil || !cloud.Transient(err) || s.differs(env.Config) {
			return own, err
		}
		if logged != err.Error() {
			logged = err.Error()
			log.Error(err, "waiting for the cloud before taking a subnet")
		}
		s.ready.report(partSubnet, err)
		if err := s.unchanged(ctx); err != nil {
			return own, err
		}
		if err := backoff.Wait(ctx, 0); err != nil {
			return own, err
		}
	}
}

// recognize tells the store what identifies this host beside its address, which may have changed
// while flanneld was stopped: the last known state, if it is of the same host, or else the devices of
// the backend, which no cloned disk has.
func (s *startup) recognize(ctx context.Context, be backend.Backend, env backend.Env, last lastknown.State, same bool) error {
	store, ok := s.store.(subnet.Resumer)
	if !ok {
		return nil
	}
	if same {
		store.Resumed(*cmp.Or(last.Stored, &last.Own))
		return nil
	}

	devices, err := env.Links(ctx, be.Describe().Scope.Devices...)
	if err == nil && len(devices) > 0 {
		store.Resumed(subnet.Lease{})
	}
	return err
}

// proven reports whether a session on the last known state uses the external interface. It then had the
// addresses in that state, so the state is of this host, even if it has others now.
func (s *startup) proven() bool {
	return s.serving.Load() != nil && s.last().Interface.Index != 0
}

// hasHardware reports whether an interface of this host has the hardware address addr.
func hasHardware(addr string) bool {
	links, err := net.Interfaces()
	return err == nil && addr != "" &&
		slices.ContainsFunc(links, func(l net.Interface) bool { return l.HardwareAddr.String() == addr })
}

// unchanged returns ErrConfigChanged, wrapped, if the store has a valid configuration that differs from s.stored. It
// returns nil if the store has no configuration that can be read.
func (s *startup) unchanged(ctx context.Context) error {
	now, err := s.store.Config(ctx)
	if err != nil {
		return nil //nolint:nilerr // s.stored is the last one that is known
	}
	if s.stored == nil {
		return fmt.Errorf("%w: it can be read now", ErrConfigChanged)
	}
	if changes := subnet.Changes(*s.stored, now); len(changes) > 0 {
		return fmt.Errorf("%w: %s", ErrConfigChanged, oneline.List(changes, ", "))
	}
	return nil
}

// waitForSubnet acquires a lease for claim. If no subnet is free, waitForSubnet calls leaveLast and waits
// for a subnet. But if the network can continue with another configuration and waits is not set, it returns
// ErrNoSubnets, wrapped, at once. It returns ErrConfigChanged, wrapped, if the configuration in the store
// changes while it waits.
func (s *startup) waitForSubnet(
	ctx context.Context, cfg subnet.Config, claim subnet.Claim, waits bool,
) (own subnet.Lease, err error) {
	var left error
	err = retry(ctx, "waiting for a subnet", func() (err error) {
		if own, err = s.store.Acquire(ctx, cfg, claim); ctx.Err() != nil {
			return err
		}
		if errors.Is(err, subnet.ErrNoSubnets) {
			if !waits && s.differs(*s.stored) {
				return final{err}
			}
			if left == nil {
				left = s.leaveLast(ctx, cfg)
			}
		}
		if err == nil {
			s.ready.report(partSubnet, nil)
			return nil
		}
		s.ready.report(partSubnet, oneline.Join(left, err))
		if changed := s.unchanged(ctx); changed != nil {
			return changed
		}
		return err
	})
	return own, err
}

// outsideOf returns an error if the last known state is in use and cfg cannot assign all of
// its subnets. With Kubernetes it returns nil, because the API assigns the subnets.
func (s *startup) outsideOf(cfg subnet.Config) error {
	if s.serving.Load() == nil || s.opts.KubeSubnetMgr {
		return nil
	}
	return outside(cfg, s.last().Own)
}

// leaveLast ends the session on the last known state, if there is one, and removes the
// subnet file, because the store has answered and has no subnet for this host. Without
// the file no pod gets an address of the old subnet. The kernel stays unchanged until
// there is another subnet. leaveLast logs and returns the reason, or returns nil if there
// is no session.
func (s *startup) leaveLast(ctx context.Context, cfg subnet.Config) error {
	if s.serving.Load() == nil {
		return nil
	}

	own := s.last().Own.Subnets()
	why := s.outsideOf(cfg)
	if why == nil {
		why = fmt.Errorf("%v is not this host's any more", own)
	}

	s.stop()
	s.serving.Store(nil)
	s.progress.enter("")
	s.ready.health.Pause()
	s.ready.report(partSubnetFile, errNoSubnet)
	log := klog.FromContext(ctx)
	if err := os.Remove(s.opts.SubnetFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Error(err, "cannot remove the subnet file, which still contains the subnet that was left")
	}
	log.Error(why, "the subnet of the last known state was left", "subnets", own)
	return why
}

// errNoSubnet is the state of the subnet file while this host has no subnet.
var errNoSubnet = errors.New("this host has no subnet")
