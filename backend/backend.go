// SPDX-License-Identifier: Apache-2.0

// Package backend defines the contract between the lease-watch loop and the backends that
// configure the data path. It also contains the loop, the Syncer.
//
//   - backend.go is the contract: a Factory creates a Backend, which starts a Network. Its
//     Sync gets the full Set of peers.
//   - syncer.go is the loop. syncerlog.go contains its log, inspect.go its report for
//     /statusz, and repairlimiter.go the limit of repairs.
//   - programmer.go is the part that all networks with kernel objects have in common.
//     notifier.go serves networks with several sources of changes.
//   - pathmtu.go gives the route to a peer the MTU of the path to it.
//   - cloud.go is the backend of all clouds, which differ in their cloud.Cloud.
//   - leftover.go, listener.go and tunneler.go are interfaces that some backends have in
//     addition.
//
// The smallest backend is backend/hostgw.
package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// Env is the environment of a backend: the network configuration and the host.
type Env struct {
	Network  string             // name of the network, if this process serves several
	Underlay underlay.Interface // the external interface
	Config   subnet.Config
	Kernel   dataplane.Kernel
	// Resync is the interval at which the whole kernel state is read again.
	Resync time.Duration
	// StateDir is the folder for files that must survive a reboot. If it is empty,
	// nothing is stored.
	StateDir string
	// Blackhole requests a blackhole route to the own subnet.
	Blackhole bool
	// Used contains the types of the backends whose data this host has published until now. It
	// is empty if that is not known.
	Used []string
	// Connected returns the time since which the store is connected; zero if it is not.
	Connected func() time.Time
	// FreePorts is that of the Catalog. It may be nil.
	FreePorts func(ports []int) error
	// ProbesMTU is set if Backend.MTU is "probe". The Registry sets it.
	ProbesMTU bool
	// PathLimit is what all probers of path MTUs on this host may send together. Nil means a limit for
	// this network alone.
	PathLimit *rate.Limiter
	// Warn reports something to operators beside the log, for example as an Event. It may be nil.
	Warn func(reason, message string)
	// NewReconciler makes the Reconciler of the backend's network. Nil means one of its own.
	// The two backends of a migration share one.
	NewReconciler func(dataplane.Scope) (Reconciler, error)
}

// Locals returns the addresses of the external interface, one for each family.
func (e Env) Locals() []netip.Addr {
	var all []netip.Addr
	for _, a := range e.Underlay.Addrs {
		all = append(all, a.Local)
	}
	return all
}

// Base returns the state that the kernel should have for the own lease with every
// backend.
func (e Env) Base(own subnet.Lease) dataplane.State {
	base := dataplane.NewState()
	if e.Blackhole {
		for _, ep := range own.Endpoints {
			base.Add(dataplane.NewBlackhole(ep.Subnet))
		}
	}
	return base
}

// Scope returns the scope that contains the networks of all enabled families and the
// given devices, which the backend owns.
func (e Env) Scope(devices ...string) dataplane.Scope {
	s := dataplane.Scope{Devices: devices, Shared: []string{e.Underlay.Name}}
	for _, n := range e.Config.Networks {
		s.Networks = append(s.Networks, n.Prefix)
	}
	return s
}

// Reconciler returns a Reconciler for scope. The caller closes it. With ProbesMTU it also finds the MTUs
// of paths, for a Programmer.
func (e Env) Reconciler(ctx context.Context, scope dataplane.Scope) (r Reconciler, err error) {
	if e.NewReconciler != nil {
		r, err = e.NewReconciler(scope)
	} else {
		r, err = dataplane.NewReconciler(dataplane.Config{Kernel: e.Kernel, Scope: scope, Resync: e.Resync})
	}
	if err != nil || !e.ProbesMTU {
		return r, err
	}
	return e.narrowing(ctx, r, scope)
}

// Links returns those of the given devices that exist, by name. It reads nothing else,
// because a router may have a million routes.
func (e Env) Links(ctx context.Context, devices ...string) (map[string]dataplane.Link, error) {
	have, err := e.Kernel.Read(ctx, dataplane.Scope{Devices: devices})
	if err != nil {
		return nil, fmt.Errorf("read kernel state: %w", err)
	}
	return have.Links, nil
}

// TryDevice returns an error if a device like l cannot be created. Only creating one loads the
// module of the kernel.
func (e Env) TryDevice(ctx context.Context, l dataplane.Link) error {
	for _, failed := range e.Kernel.Apply(ctx, []dataplane.Op{{Object: l}, {Object: l, Delete: true}}) {
		return fmt.Errorf("create a device of type %s: %w", l.Kind, failed.Err)
	}
	return nil
}

// DeviceConflict returns the error about a device that has the name of one of the
// backend's devices, but a type that flanneld never creates under that name. flanneld
// does not remove it. want is the expected type.
func DeviceConflict(l dataplane.Link, want string) error {
	return fmt.Errorf("device %s is of type %s, want %s: remove it (ip link delete %s) if nothing else needs it",
		l.Name, l.Kind, want, l.Name)
}

// Claim returns a claim with the public address of every enabled family and the subnets
// of prev. It contains no backend data.
func (e Env) Claim(backendType string, prev subnet.Claim) subnet.Claim {
	c := subnet.Claim{BackendType: backendType}
	for _, n := range e.Config.Networks {
		f := n.Family()
		addr, _ := e.Underlay.Family(f)
		before, _ := prev.Endpoint(f)
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{Subnet: before.Subnet, PublicIP: addr.Public})
	}
	return c
}

// Backend is a way to carry packets between hosts.
type Backend interface {
	// Scope returns the part of the kernel's state that belongs to the backend. It is
	// pure.
	Scope() dataplane.Scope
	// Claim returns the claim that this node publishes. prev is its last published claim,
	// or zero if none is known. Data that peers have learned from prev, such as a VTEP
	// MAC, should stay the same. Claim changes nothing, except that it may run a
	// configured command that must run first. It does not wait for a cloud: it returns an
	// error for which cloud.Transient is true.
	Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error)
	// Start prepares the backend's devices for the own lease and returns the network. It
	// removes only objects that it replaces.
	Start(ctx context.Context, own subnet.Lease) (Network, error)
}

// Network is a started backend. Its methods are called from one goroutine.
type Network interface {
	// MTU returns the maximum packet size in bytes that every path allows, for all
	// enabled families.
	MTU() int
	// Check returns an error if a lease's backend data is unusable. Otherwise it returns
	// the identities that the lease claims and that no other lease may have, such as VTEP
	// MACs or public keys. It is pure, and safe for concurrent use.
	Check(l subnet.Lease) (identities []string, err error)
	// Sync makes the kernel carry packets to exactly these peers. It may be repeated with
	// an equal set. It returns refusals for peers that cannot be served. Unless it
	// returns an error, all others are configured.
	Sync(ctx context.Context, peers Set) (Outcome, error)
	// Changed returns a channel that receives when the kernel may have drifted, or nil if
	// the network cannot find out.
	Changed() <-chan struct{}
	// Close releases the resources of the process. The data path stays.
	Close() error
}

// Set is the full set of peers, with a hint about the changes since the last one.
type Set struct {
	// Leases contains the leases that have passed all checks. The map and the leases are
	// read-only, and the map is valid until Sync returns.
	Leases map[string]*subnet.Lease
	// Changed contains the keys of the leases that differ from the previous set, even if
	// Sync failed for that set. If All is set, any lease may differ. A network may ignore
	// the hint.
	Changed []string
	All     bool
	// Complete is set when the store has answered. Before that, Sync must not remove an
	// object because its lease is not in the set.
	Complete bool
	// Unreadable is set if the store has a lease that cannot be read and that is not in the
	// set. A host of which nothing else is known may need an object outside of this host.
	Unreadable bool
	// Refused returns the leases that have not passed the checks, for networks whose objects
	// outside of this host must stay for them. It may be called until Sync returns. If it is
	// nil, there are none.
	Refused func() []*subnet.Lease
}

// Outcome is the result of Sync besides its error.
type Outcome struct {
	// Refused contains all peers that cannot be served, with the reasons.
	Refused []subnet.Refusal
	// Retry is set if the cause of a refusal may disappear by itself.
	Retry bool
	// Again is the time after which Sync should be called again, although nothing is
	// wrong. Zero means that there is no such need.
	Again time.Duration
	// Repaired is the number of repaired changes by other programs.
	Repaired int
}

// Factory creates a backend from the backend's part of the network configuration, which
// is nil if there is none. It validates everything and changes nothing. It returns
// warnings, for example about unknown keys.
type Factory func(raw json.RawMessage, env Env) (b Backend, warnings []string, err error)

// Migrate creates the backend for a configuration with a next backend. create creates one of
// the two backends, for the configuration in its argument.
type Migrate func(env Env, create func(Env) (Backend, []string, error)) (Backend, []string, error)

// Registry contains the backends by type name.
type Registry struct {
	entries map[string]Entry
	migrate Migrate
}

// Entry is a backend of a registry.
type Entry struct {
	Type    string // in lower case
	Factory Factory
	// ProbesMTU is set if Backend.MTU may be "probe": the network has a device, and a Programmer.
	ProbesMTU bool
}

// NewRegistry returns a Registry of entries. It returns an error for an empty or
// duplicate name and for a missing factory.
func NewRegistry(entries ...Entry) (Registry, error) {
	r := Registry{entries: map[string]Entry{}, migrate: noMigration}
	for _, e := range entries {
		switch {
		case e.Type == "" || e.Type != strings.ToLower(e.Type):
			return Registry{}, fmt.Errorf("backend type %q is not a lower-case name", e.Type)
		case e.Factory == nil:
			return Registry{}, fmt.Errorf("backend type %q has no factory", e.Type)
		case r.entries[e.Type].Factory != nil:
			return Registry{}, fmt.Errorf("backend type %q is registered twice", e.Type)
		}
		r.entries[e.Type] = e
	}
	return r, nil
}

// WithMigration returns r with the backend for configurations with a next backend.
func (r Registry) WithMigration(m Migrate) Registry {
	r.migrate = m
	return r
}

// noMigration refuses configurations with a next backend.
func noMigration(Env, func(Env) (Backend, []string, error)) (Backend, []string, error) {
	return nil, nil, errors.New("NextBackend is not supported")
}

// ErrUnknownType means that no backend has the configured type.
var ErrUnknownType = errors.New("unknown backend type")

// New returns the backend that the configuration in env names, and warnings about the
// configuration. It returns ErrUnknownType, wrapped, or the error of the factory.
func (r Registry) New(env Env) (Backend, []string, error) {
	if env.Config.Migrates() {
		return r.migrate(env, r.one)
	}
	return r.one(env)
}

// one returns the present backend of the configuration in env.
func (r Registry) one(env Env) (Backend, []string, error) {
	cfg := env.Config
	entry, ok := r.entries[cfg.BackendType]
	switch {
	case ok:
		raw, probes, err := r.probesMTU(cfg.Backend, entry)
		if err != nil {
			return nil, nil, err
		}
		env.ProbesMTU = probes
		return entry.Factory(raw, env)
	case cfg.Backend == nil:
		return nil, nil, fmt.Errorf("%w: the network configuration has no Backend, which means %q: set Backend.Type to one of %s",
			ErrUnknownType, cfg.BackendType, strings.Join(r.Types(), ", "))
	default:
		return nil, nil, fmt.Errorf("%w %q: Backend.Type must be one of %s", ErrUnknownType, cfg.BackendType, strings.Join(r.Types(), ", "))
	}
}

// Types returns the names of all backends in alphabetical order.
func (r Registry) Types() []string { return slices.Sorted(maps.Keys(r.entries)) }

// Catalog is a registry with the state that its backends keep in the process while
// networks begin and end.
type Catalog struct {
	Registry
	// Shutdown does what must be done on the host when the daemon is told to stop. It may
	// be nil.
	Shutdown func(ctx context.Context)
	// Retire undoes what backends have done outside of Scope and Leftovers, when the network was
	// deleted. It may be nil.
	Retire func(ctx context.Context) error
	// CloseUnused ends what runs in the process and belongs to no started network. A network may
	// leave it running at its end, so that packets go on until the next network takes it over. It
	// may be nil.
	CloseUnused func() error
	// FreePorts does the same for what listens on one of these UDP ports. It may be nil.
	FreePorts func(ports []int) error
	// Close releases the state, after the end of all networks. It may be nil.
	Close func()
	// Files returns the paths of files outside of stateDir that the backends have written,
	// for a cleanup. It may be nil.
	Files func(stateDir string) ([]string, error)
}
