// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/probe/pathmtu"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// Host is what a daemon has once, however many networks it serves.
type Host struct {
	Firewall *keeper.Host
	Underlay *underlay.Reader
	Buffers  linux.Buffers // for the kernel sockets of all networks
	Journal  *status.Journal
	Tuner    *tune.Tuner
	Started  time.Time
	Probes   *paths.Limit  // limits the probes of paths of all networks
	PathMTUs *rate.Limiter // limits the probes of path MTUs of all networks
	pods     podSources    // of all networks
}

// NewHost returns the Host of a process that begins now. tuner may be nil: the Go runtime then stays as it
// is.
func NewHost(journal *status.Journal, tuner *tune.Tuner) *Host {
	h := &Host{
		Firewall: keeper.NewHost(), Underlay: &underlay.Reader{}, Journal: journal, Tuner: cmp.Or(tuner, &tune.Tuner{}),
		Started: time.Now(), Probes: paths.NewLimit(), PathMTUs: pathmtu.NewLimit(),
	}
	h.pods.addresses.Rest = addressesRest
	return h
}

// surroundings is what else a network uses of its host. The scripts of tests have another one.
type surroundings struct {
	chooseUplink func(context.Context, underlay.Options, time.Duration) (underlay.Interface, error)
	watchUplink  func(context.Context, underlay.Options, underlay.Interface, func(underlay.Interface), func(error)) error
	openKernel   func(linux.Options) (kernel, error)    // for the removal of objects
	random       func(most time.Duration) time.Duration // from 0 to most, so that hosts do not act at the same moment
}

// kernel is a dataplane.Kernel that is closed after use.
type kernel interface {
	dataplane.Kernel
	Close() error
}

// ruleKeeper is a keeper.Keeper.
type ruleKeeper interface {
	Keep(ctx context.Context, c keeper.Choice, p firewall.Policy, tried func())
	Remove(ctx context.Context, networks []netip.Prefix) error
	Flavour() keeper.Flavour
}

// realSurroundings returns the real one.
func realSurroundings() surroundings {
	return surroundings{
		chooseUplink: underlay.Wait, watchUplink: underlay.Watch,
		openKernel: func(o linux.Options) (kernel, error) { return linux.Open(o) },
		random:     func(most time.Duration) time.Duration { return rand.N(most + 1) },
	}
}

// last returns the last known state: that of this process, or before its first session that of the last one.
func (n *Network) last() lastknown.State {
	if now, ok := n.state.Get(); ok {
		return now
	}
	return n.past
}

// retryTime returns the time until something is tried again that was refused. Its mean is refusedPause.
func (n *Network) retryTime() time.Duration { return refusedPause/2 + n.random(refusedPause) }

// env returns the environment of the backend of cfg on the external interface iface.
func (n *Network) env(iface underlay.Interface, cfg subnet.Config) backend.Env {
	return backend.Env{
		PathLimit: n.host.PathMTUs, Warn: n.store.Warn,
		PublicEndpoint: n.opts.PublicEndpoint, Location: n.location(),
		Used: used(n.last()), Connected: n.connected, FreePorts: n.catalog.FreePorts,
		Network: n.name, Underlay: iface, Config: cfg, Kernel: n.kernel, Resync: n.opts.Resync, StateDir: n.opts.StateDir, Blackhole: n.opts.IPBlackholeRoute,
	}
}

// location returns the location of this host, or "" if there is none. With --location-label the store has
// it. Until the location was read from the store, the last known one counts if it comes from the same
// label.
func (n *Network) location() string {
	now := n.labelled.Load()
	switch {
	case n.opts.LocationLabel == "":
		return n.opts.Location
	case now != nil:
		return *now
	case n.past.LocationLabel == n.opts.LocationLabel:
		return n.past.Location
	}
	return ""
}

// readLocation reads the location of this host from the store if --location-label is set.
func (n *Network) readLocation(ctx context.Context) error {
	if n.opts.LocationLabel == "" {
		return nil
	}
	name, err := n.store.Location(ctx)
	if err == nil {
		n.labelled.Store(&name)
	}
	return err
}

// newBackend returns the backend of a configuration that the network is about to use. It returns an error
// if the backend cannot use one of the flags, or finds out that it cannot start on this host.
func (n *Network) newBackend(ctx context.Context, env backend.Env) (be backend.Backend, warnings []string, err error) {
	be, warnings, err = n.catalog.New(env)
	if err != nil {
		return nil, nil, err
	}
	if err := checkIPv6(be, env.Config); err != nil {
		return nil, nil, err
	}
	if err := backend.CheckPublicEndpoint(be, env.Config.BackendType, env.PublicEndpoint); err != nil {
		return nil, nil, fmt.Errorf("--public-endpoint %s cannot be used: %w", env.PublicEndpoint, err)
	}

	for _, flag := range [][2]string{{"--location", n.opts.Location}, {"--location-label", n.opts.LocationLabel}} {
		if err := backend.CheckLocations(be, env.Config.BackendType); flag[1] != "" && err != nil {
			return nil, nil, fmt.Errorf("%s %s cannot be used: %w", flag[0], flag[1], err)
		}
	}
	if err := backend.Usable(ctx, be); err != nil {
		return nil, nil, fmt.Errorf("start backend: %w", err)
	}
	return be, warnings, nil
}

// checkIPv6 returns a FamilyError if cfg has IPv6, but the device of be that carries it cannot have an IPv6 address.
func checkIPv6(be backend.Backend, cfg subnet.Config) error {
	devices := be.Describe().Scope.Devices
	if _, ok := cfg.Network(prefix.IPv6); !ok || len(devices) == 0 {
		return nil
	}
	off := linux.IPv6Off(devices[len(devices)-1]) // a device of IPv6 alone follows that of IPv4
	if off == "" {
		return nil
	}
	return &subnet.FamilyError{Family: prefix.IPv6, Err: fmt.Errorf("%s is 1 and flanneld may not change it, want 0", off)}
}

// Claimed is a configuration whose objects a network has on this host, or is about to create.
type Claimed struct {
	Config      subnet.Config
	Description backend.Description // zero if this version does not know the backend
}

// claim calls Config.Claims, unless it is nil, with what the network claims on this host from now on.
func (n *Network) claim(all []Claimed) error {
	if n.claims == nil {
		return nil
	}
	return n.claims(all)
}

// lockFor locks the devices of be, with which a change is being prepared. The locks last at least until
// claimOnly is called.
func (n *Network) lockFor(be backend.Backend) error {
	n.claiming.Lock()
	defer n.claiming.Unlock()
	n.prepared = be.Describe().Scope.Devices
	return n.devices.Take(n.prepared...)
}

// claimOnly is claimLess when no change is prepared any more.
func (n *Network) claimOnly(be backend.Backend) {
	n.claiming.Lock()
	n.prepared = nil
	n.claiming.Unlock()
	n.claimLess(be)
}

// claimLess claims the configuration in use, with its backend be, and what former ones have left, and nothing else any
// more. It also releases the locks of all devices except for these and prepared ones.
func (n *Network) claimLess(be backend.Backend) {
	n.claiming.Lock() // otherwise an earlier state could be claimed last
	defer n.claiming.Unlock()
	all := n.claimed(n.last(), be)
	devices := slices.Clone(n.prepared)
	for _, c := range all {
		devices = append(devices, c.Description.Scope.Devices...)
	}
	n.devices.Keep(devices...)
	_ = n.claim(all) // cannot be refused, because it is not more than before
}

// claimed returns what the network claims on this host: the configuration of now, with its backend be,
// and what former ones have left.
func (n *Network) claimed(now lastknown.State, be backend.Backend) []Claimed {
	all := []Claimed{{now.Config, be.Describe()}}
	for _, f := range now.Former {
		all = append(all, Claimed{f.Config, n.describe(f)})
	}
	return all
}

// describe returns the description of the backend of f, or a zero one if this version does not know that backend.
func (n *Network) describe(f lastknown.Former) backend.Description {
	return n.catalog.Describe(n.env(f.Interface, f.Config))
}

// used returns the types of the backends whose data this host has published, according to last.
func used(last lastknown.State) []string {
	return slices.DeleteFunc([]string{last.Config.BackendType, last.Own.NextType}, func(t string) bool { return t == "" })
}

// connected returns the time since which the store is connected; zero if it is not.
func (n *Network) connected() time.Time {
	since, err := n.ready.health.Part(partDatastore)
	if err != nil {
		return time.Time{}
	}
	return since
}

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

// ended returns nil if ctx has ended, and otherwise err. It hides every error after the end of ctx,
// because the end may be the cause.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// retryPause is the pause after an answer that does not help, such as no configuration
// yet or no free subnet.
const retryPause = time.Second

// final is an error after which retry gives up.
type final struct{ error }

// retry repeats try until it succeeds or ctx ends. It logs an error with the message what, if
// the error differs from the one logged before. A success counts even if ctx has ended. retry
// returns at once if the error is final, ErrUnfit or ErrConfigChanged. At the end of ctx it returns
// the last error, joined with that of ctx.
func retry(ctx context.Context, what string, try func() error) error {
	logged := ""
	for {
		err := try()
		if err == nil {
			return nil
		}
		if last := (final{}); errors.As(err, &last) {
			return last.error
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
