// SPDX-License-Identifier: Apache-2.0

// Package backend defines the contract between the lease-watch loop and the backends that
// configure the data path. It also contains the loop, the Syncer.
//
//   - backend.go is the contract: a Backend starts a Network, whose Sync gets the full Set of peers.
//   - registry.go creates the Backend that a configuration names, from two if a key names a second one: inner.go.
//   - syncer.go is the loop. syncerlog.go contains its log, inspect.go its report for
//     /statusz, and repairs.go its limit of repairs.
//   - programmer.go is the part that all networks with kernel objects have in common.
//     notifier.go serves networks with several sources of changes.
//   - pathmtu.go gives the route to a peer the MTU of the path to it.
//   - description.go is what a backend tells about itself before it starts, and the contract of what it creates
//     outside of its Scope.
//   - side.go is the contract of the two backends of a migration.
//
// The smallest backend that writes routes to peers is backend/hostgw.
package backend

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// Env is the environment of a backend: the network configuration, the flags and addresses of this
// host, and access to the kernel and to the store.
type Env struct {
	Network  string             // name of the network, if this process serves several
	Underlay underlay.Interface // the external interface
	Config   subnet.Config
	Kernel   dataplane.Kernel
	// Resync is the interval at which the network reads its whole part of the kernel's state again.
	// It varies by up to a fifth.
	Resync time.Duration
	// StateDir is the folder for files that must survive a reboot. If it is empty,
	// nothing is stored.
	StateDir string
	// Blackhole requests an unreachable route to this host's subnet.
	Blackhole bool
	// Elsewhere is set if packets to peers may take routes that are not on this host: those of a cloud.
	Elsewhere bool
	// Used contains the types of the backends whose data this host has published until now. It is
	// empty if they are unknown.
	Used []string
	// Connected returns the time since which the store has been connected. It returns zero if the
	// store is not connected.
	Connected func() time.Time
	// FreePorts is Catalog.FreePorts. It may be nil.
	FreePorts func(ports []int) error
	// PublicEndpoint is a name or address, with an optional port, to which peers can send instead
	// of to the published address of this host. It is zero if there is none.
	PublicEndpoint endpoint.Named
	// Location is the name of the location of this host; empty if it has none.
	Location string
	// ProbesMTU is set if Backend.MTU is "probe". The Registry sets it.
	ProbesMTU bool
	// PathLimit limits the packets that all probers of path MTUs on this host send together. If it
	// is nil, this network has a limit of its own.
	PathLimit *rate.Limiter
	// Warn reports something to operators beside the log, for example as an Event. It may be nil.
	Warn func(reason, message string)
	// Recalled is set if the network starts from the last known state, because the store has not
	// answered yet. Its configuration may no longer be in use.
	Recalled bool
	// Part returns the Programmer of the backend's network. It is set if the backend shares one with
	// another, as in a migration.
	Part func(context.Context) *Programmer
}

// Locals returns the local addresses of the external interface: one for each enabled family, IPv4
// first.
func (e Env) Locals() []netip.Addr {
	var all []netip.Addr
	for _, a := range e.Underlay.Addrs {
		all = append(all, a.Local)
	}
	return all
}

// MTU returns the size of the largest packets that pods may send in all enabled families. inside returns that of a family.
func (e Env) MTU(inside func(prefix.Family) int) int {
	mtu := e.Underlay.MTU
	for _, n := range e.Config.Networks {
		mtu = min(mtu, inside(n.Family()))
	}
	return mtu
}

// Reachable reports whether a may be the address of another host: a host address without a zone that
// is not link-local, not on the external interface, and in none of the networks. The route to an
// address in a network leads into the tunnel, so the tunnel's own packets to that address would
// enter the tunnel again.
func (e Env) Reachable(a netip.Addr) bool {
	inside := func(n subnet.Network) bool { return n.Prefix.Contains(a) }
	return subnet.IsHost(a) && !a.Is4In6() && a.Zone() == "" && !a.IsLinkLocalUnicast() &&
		!slices.ContainsFunc(e.Config.Networks, inside) && !slices.Contains(e.Locals(), a)
}

// Direct returns the device whose directly connected network contains the peer with address dst, or ""
// if there is none or routing, the value of Backend.DirectRouting, is false. The routes to pods are in the main
// table, so peers of a VRF are not directly connected.
func (e Env) Direct(ctx context.Context, routing bool, dst netip.Addr) (dev string, err error) {
	if !routing || e.Underlay.VRF != "" {
		return "", nil
	}
	return e.Kernel.OnLink(ctx, dst, e.Underlay.Name)
}

// Base returns the state that the kernel should have for this host's lease with any backend: unreachable
// routes to this host's subnets if Blackhole is set, and otherwise nothing.
func (e Env) Base(own subnet.Lease) dataplane.State {
	base := dataplane.NewState()
	if e.Blackhole {
		for _, ep := range own.Endpoints {
			base.Add(dataplane.NewUnreachable(ep.Subnet))
		}
	}
	return base
}

// TunnelBase replaces Base for a backend that has a route to each peer: it contains an unreachable
// route to each network, which includes this host's subnet. So a packet to a pod never follows another
// route, such as the default route: in clear text if the tunnel's device is gone, or in a loop if no
// host has the subnet. TunnelBase is Base if packets may have to follow other routes: to peers by way
// of a cloud, or to hosts with addresses in the network, which flannel accepts.
func (e Env) TunnelBase(own subnet.Lease) dataplane.State {
	base := dataplane.NewState()
	for _, n := range e.Config.Networks {
		if e.Elsewhere || slices.ContainsFunc(e.Locals(), n.Prefix.Contains) {
			return e.Base(own)
		}
		base.Add(dataplane.NewUnreachable(n.Prefix))
	}
	return base
}

// Scope returns the scope that contains the networks of all enabled families and the
// given devices, which the backend owns. Routes in it may also use the external interface.
func (e Env) Scope(devices ...string) dataplane.Scope {
	s := dataplane.Scope{Devices: devices, Shared: []string{e.Underlay.Name}}
	for _, n := range e.Config.Networks {
		s.Networks = append(s.Networks, n.Prefix)
	}
	return s
}

// Links returns the given devices that exist, by name. It reads nothing else, because a router may
// have a million routes.
func (e Env) Links(ctx context.Context, devices ...string) (map[string]dataplane.Link, error) {
	have, err := e.Kernel.Read(ctx, dataplane.Scope{Devices: devices})
	if err != nil {
		return nil, fmt.Errorf("read kernel state: %w", err)
	}
	return have.Links, nil
}

// TryDevice creates and deletes a device like l. It returns an error if the creation or the
// deletion fails. Looking for the module is not sufficient, because the kernel loads it only when a
// device is created.
func (e Env) TryDevice(ctx context.Context, l dataplane.Link) error {
	failed := e.Kernel.Apply(ctx, []dataplane.Op{{Object: l}, {Object: l, Delete: true}})
	if len(failed) == 0 {
		return nil
	}
	verb := "create"
	if failed[0].Op.Delete {
		verb = "delete"
	}
	return fmt.Errorf("%s a device of type %s: %w", verb, l.Kind, failed[0].Err)
}

// DeviceConflict returns the error about device l, which has the name of one of the backend's
// devices, but a type that flanneld never creates under that name. flanneld does not remove the
// device. want is the expected type.
func DeviceConflict(l dataplane.Link, want string) error {
	return fmt.Errorf("device %s is of type %s, want %s: remove it (ip link delete %s) if nothing else needs it",
		l.Name, l.Kind, want, l.Name)
}

// Claim returns a claim of the backend type, with one endpoint for each enabled family: the public
// address of this host, and the subnet that prev has in that family, if any. The claim contains no
// backend data.
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
	// Describe returns what is known of the backend before it starts. It is pure.
	Describe() Description
	// Claim returns the claim that this node publishes. prev is its last published claim, or zero
	// if none is known. Data that peers have learned from prev, such as a VTEP MAC, should stay the
	// same. Claim changes nothing, with two exceptions: it may run a configured command whose
	// output is part of the claim, and it may store a new private key. If a cloud does not answer,
	// Claim does not try again, but returns an error for which cloud.Transient is true, because a
	// later call may succeed.
	Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error)
	// Start prepares the backend's devices for this host's lease and returns the network. It removes
	// only objects that it replaces. The caller closes the network.
	Start(ctx context.Context, own subnet.Lease) (Network, error)
}

// Network is a started backend. Check and Changed may be called while another method runs. All
// other methods are called one at a time.
type Network interface {
	// Check returns an error if a lease's backend data is unusable. Otherwise it returns
	// the identities that the lease claims and that no other lease may have, such as VTEP
	// MACs or public keys. It is pure, and safe for concurrent use.
	Check(l subnet.Lease) (identities []string, err error)
	// Sync makes the kernel carry packets to exactly these peers. It may be called again with an
	// equal set. The Outcome contains the peers that cannot be served. If there is no error, all
	// other peers are served.
	Sync(ctx context.Context, peers Set) (Outcome, error)
	// Report returns the state between two calls of Sync.
	Report() NetworkReport
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
	// Changed contains the keys of the leases that were added, changed or removed since the
	// previous set, or that the network must examine for another reason. The next set does not
	// repeat them if Sync fails. If All is set, any lease may differ. A network may ignore the
	// hint.
	Changed []string
	All     bool
	// Complete is set when the store has answered and no lease is missing. Before that, Sync must
	// not remove an object because its lease is not in the set.
	Complete bool
	// Unreadable is set if the store has a lease that cannot be read and that is not in the set.
	// The host of that lease may need objects outside of this host, such as routes in a cloud. It is
	// unknown which ones, so as long as Unreadable is set, a network must remove none of them.
	Unreadable bool
	// Refused returns the leases of which at least one endpoint has not passed the checks. A
	// network with objects outside of this host, such as routes in a cloud, keeps the objects of
	// these leases. Refused may be called until Sync returns. If it is nil, there are no such
	// leases.
	Refused func() []*subnet.Lease
	// Published is the claim of this host, with the data for all its backends, that was published since the last set
	// because of Outcome.Republish. It is nil if there is none.
	Published *subnet.Claim
}

// KeysToSync returns the keys of the leases that may differ from the previous set: Changed, or if
// All is set, the keys of all leases in s and the keys in known that have no lease in s.
func KeysToSync[V any](s Set, known map[string]V) []string {
	if !s.All {
		return s.Changed
	}
	keys := slices.AppendSeq(make([]string, 0, len(s.Leases)), maps.Keys(s.Leases))
	for key := range known {
		if s.Leases[key] == nil {
			keys = append(keys, key)
		}
	}
	return keys
}

// Outcome is the result of Sync besides its error.
type Outcome struct {
	// Refused contains all peers that cannot be served, with the reasons.
	Refused []subnet.Refusal
	// Retry is set if the cause of a refusal may disappear by itself.
	Retry bool
	// Again is the time after which Sync must be called again at the latest, although nothing is
	// wrong. Zero means that there is no such time.
	Again time.Duration
	// Repaired is the number of repaired changes by other programs.
	Repaired int
	// Recheck is set if the results of Check or CheckNext may have changed for leases that have not.
	Recheck bool
	// Republish is set if Claim of the backend returns other data than this host's lease has. The owner of the network
	// then publishes the new claim, and does not restart the network.
	Republish bool
	// Reclaim is set if Claim of the backend may now return data for one more backend, or if no peer keeps this
	// host from the next subnet.Stage. The owner of the network then publishes the new claim, and replaces the
	// network by one with the new lease or stage.
	Reclaim bool
	// Choice returns how the peer with the lease key is served, by a network that chooses one of two backends for each
	// peer. It is called from the goroutine that calls Sync. It is nil if there is only one backend.
	Choice func(key string) Choice
}

// Choice is the backend that carries the packets to a peer. A network prefers the next backend in a migration, the
// cloud with Overflow, and the backend of SameLocation for peers at the location of this host.
type Choice struct {
	Backend string // type; empty if no backend carries them
	Waiting string // the reason why Backend is not the preferred one; empty if it is
}

// Add adds the outcome of another network with the same peers to o, except for its refusals and choices.
func (o *Outcome) Add(other Outcome) {
	o.Retry = o.Retry || other.Retry
	o.Recheck = o.Recheck || other.Recheck
	o.Republish = o.Republish || other.Republish
	o.Reclaim = o.Reclaim || other.Reclaim
	o.Again = least.Of(o.Again, other.Again)
	o.Repaired += other.Repaired
}
