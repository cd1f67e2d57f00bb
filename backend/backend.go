// Package backend is the contract between the lease-watch loop and the
// backends that program the data path, and that one loop.
package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/underlay"
	"flanneld/subnet"
)

// Env is what a backend is built on.
type Env struct {
	Underlay underlay.Interface
	Config   subnet.Config
	Kernel   dataplane.Kernel
	// Resync is how often all kernel state is read again.
	Resync time.Duration
	// StateDir is where a backend may keep what must survive a reboot; empty means
	// nowhere.
	StateDir string
	// Blackhole asks for a blackhole route to the own subnet.
	Blackhole bool
}

// Base returns what the kernel holds for the own lease whatever the backend.
func (e Env) Base(own subnet.Lease) dataplane.State {
	base := dataplane.NewState()
	if e.Blackhole {
		for _, ep := range own.Endpoints {
			base.Add(dataplane.NewBlackhole(ep.Subnet))
		}
	}
	return base
}

// Scope returns the scope of the networks of all enabled families, with the
// given devices of our own.
func (e Env) Scope(devices ...string) dataplane.Scope {
	s := dataplane.Scope{Devices: devices, Shared: []string{e.Underlay.Name}}
	for _, n := range e.Config.Networks {
		s.Networks = append(s.Networks, n.Prefix)
	}
	return s
}

// Reconciler returns a reconciler for that scope.
func (e Env) Reconciler(devices ...string) (*dataplane.Reconciler, error) {
	return dataplane.NewReconciler(dataplane.Config{Kernel: e.Kernel, Scope: e.Scope(devices...), Resync: e.Resync})
}

// Links returns those of our devices that the kernel has. It reads nothing else: a
// router may hold a million routes.
func (e Env) Links(ctx context.Context, devices ...string) (map[string]dataplane.Link, error) {
	have, err := e.Kernel.Read(ctx, dataplane.Scope{Devices: devices})
	if err != nil {
		return nil, fmt.Errorf("read kernel state: %w", err)
	}
	return have.Links, nil
}

// InTheWay is the error of a device that has a name of ours and is not what we
// want there, nor what we have left: it is not for us to remove.
func InTheWay(l dataplane.Link, want string) error {
	return fmt.Errorf("device %s is of type %s, want %s: remove it (ip link delete %s) if nothing else needs it",
		l.Name, l.Kind, want, l.Name)
}

// Claim returns a claim with the public address of every enabled family and
// the subnets of prev, and no backend data.
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

// Backend is one way to carry packets between hosts.
type Backend interface {
	// Scope says what of the kernel is the backend's. It is pure.
	Scope() dataplane.Scope
	// Claim returns what this node publishes. prev is what it published
	// before, zero if nothing is known: what peers have learnt, such as a
	// VTEP MAC, stays the same where it can. Claim changes nothing, but for
	// what a configured command does that has to run before.
	Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error)
	// Start makes the backend's devices ready for the own lease and returns
	// the network. It removes nothing but what it replaces.
	Start(ctx context.Context, own subnet.Lease) (Network, error)
}

// Network is a started backend. Its methods are called from one goroutine.
type Network interface {
	// MTU returns the packet size in bytes that every path carries, for all
	// enabled families.
	MTU() int
	// Check says whether a lease's backend data can be used, and which
	// identities it claims that no other lease may have: VTEP MACs, public
	// keys. It is pure, and safe for concurrent use.
	Check(l subnet.Lease) (identities []string, err error)
	// Sync makes the kernel carry packets to exactly these peers. It may be
	// called any number of times. Peers that cannot be served are returned
	// as refusals; all others are in place unless err says otherwise.
	Sync(ctx context.Context, peers Set) (Outcome, error)
	// Changed delivers when the kernel may have drifted; nil if never.
	Changed() <-chan struct{}
	// Close releases what the process holds. The data path stays.
	Close() error
}

// Set is the full set of peers, and as a hint what has changed in it.
type Set struct {
	// Leases have passed all checks. They are read-only, and so is the map, which is
	// good until Sync returns.
	Leases map[string]*subnet.Lease
	// Changed has the keys of the leases that differ from the set before,
	// whatever became of that Sync. With All set any may, and so the hint may
	// always be ignored.
	Changed []string
	All     bool
	// Complete is set once the store has answered: only then may something be
	// removed because it is not in the set.
	Complete bool
}

// Outcome is what Sync has to say beside an error.
type Outcome struct {
	// Refused are all peers that cannot be served, and why.
	Refused []subnet.Refusal
	// Retry is set when the cause of a refusal may pass by itself.
	Retry bool
	// Again is when to look again although nothing is wrong; zero means at the
	// next occasion.
	Again time.Duration
	// Repaired counts what others had changed behind our back.
	Repaired int
}

// Factory makes a backend of its part of the network configuration, which is
// nil if there is none. It checks everything and changes nothing. Unknown keys
// and the like are returned as warnings.
type Factory func(raw json.RawMessage, env Env) (b Backend, warnings []string, err error)

// Registry knows the backends by type name.
type Registry struct{ entries map[string]Entry }

// Entry is one backend of a registry.
type Entry struct {
	Type    string // lower case
	Factory Factory
	// OneThread says that one thread does what there is to do once the start is over:
	// packets do not go through this process, or are best off with one.
	OneThread bool
}

// NewRegistry returns a registry of the entries. Empty and duplicate names and
// missing factories are errors.
func NewRegistry(entries ...Entry) (Registry, error) {
	r := Registry{entries: map[string]Entry{}}
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

// ErrUnknownType means that no backend has the configured type.
var ErrUnknownType = errors.New("unknown backend type")

// New builds the backend that env's configuration names.
func (r Registry) New(env Env) (Backend, []string, error) {
	cfg := env.Config
	entry, ok := r.entries[cfg.BackendType]
	switch {
	case ok:
		return entry.Factory(cfg.Backend, env)
	case cfg.Backend == nil:
		return nil, nil, fmt.Errorf("%w: the network configuration has no Backend, which means %q: set Backend.Type to one of %s",
			ErrUnknownType, cfg.BackendType, strings.Join(r.Types(), ", "))
	default:
		return nil, nil, fmt.Errorf("%w %q: Backend.Type must be one of %s", ErrUnknownType, cfg.BackendType, strings.Join(r.Types(), ", "))
	}
}

// Types returns the names of all backends in alphabetical order.
func (r Registry) Types() []string { return slices.Sorted(maps.Keys(r.entries)) }

// OneThread reports whether the backend of that type does with one thread.
func (r Registry) OneThread(backendType string) bool { return r.entries[backendType].OneThread }
