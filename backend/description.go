// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/subnet"
)

// Description is what a backend tells about itself before it starts.
type Description struct {
	Scope     dataplane.Scope // the part of the kernel's state that belongs to the backend
	LeaseType string          // type in leases, which may differ from the one in the configuration
	// MTU is the size in bytes of the largest packets that pods may send, for all enabled families. The path to a peer
	// may be narrower: see NetworkReport.PathMTU.
	MTU int
	// Ports contains the UDP ports of this host that peers send to, by the type of the backend that receives the packets.
	Ports map[string][]int
	// Tunnels contains the packets in which hosts carry the network's packets between addresses of a family, and which
	// they accept without authenticating the sender.
	Tunnels      map[prefix.Family][]firewall.Payload
	Files        []string   // paths of files that no other network of this host may use; they belong to an operator
	Kept         []string   // paths of the network's own files, which are kept until the network is deleted
	Leftovers    []Leftover // those that may exist
	SameLocation Inner      // the backend between hosts of one location; zero if there is none
	Overflow     Inner      // the tunnel to hosts that the routers of a cloud do not reach; zero if there is none
	// Inside contains the types of the backends between hosts of one location. It is empty if the configuration has
	// no locations.
	Inside []string
	// CheckPublicEndpoint returns an error if peers of this host cannot send to that name or address. It is nil if
	// peers send to no names.
	CheckPublicEndpoint func(endpoint.Named) error
	// Usable returns an error if the host lacks something that Start needs, such as a kernel module. It may create and
	// delete a device. It is nil if only Start finds that out.
	Usable func(context.Context) error
	// Matches reports whether the data of a lease of type LeaseType fits this backend, and not one of the same type with
	// another configuration: for vxlan, whether the VNI is the same. It returns true if the data does not tell. It is
	// pure, and safe for concurrent use. It is nil if the type alone decides.
	Matches func(subnet.Lease) bool
	// Sides contains the sides of the present and of the next backend of a migration. Any other backend has one side,
	// and Sides is empty.
	Sides []Side
}

// Join returns the description of a backend that consists of d and other. Its LeaseType is that of d, and both have the
// same networks and external interface. Peers can send to a public endpoint if they can do that by one of the two.
// Usable, Matches and Sides concern a single backend, so Join leaves them empty.
func (d Description) Join(other Description) Description {
	all := Description{
		Scope: d.Scope, LeaseType: d.LeaseType, MTU: least.Of(d.MTU, other.MTU), CheckPublicEndpoint: d.CheckPublicEndpoint,
		Ports: union(d.Ports, other.Ports), Tunnels: union(d.Tunnels, other.Tunnels),
		Files: slices.Concat(d.Files, other.Files), Kept: slices.Concat(d.Kept, other.Kept), Leftovers: slices.Concat(d.Leftovers, other.Leftovers),
		Inside: slices.Concat(d.Inside, other.Inside),
	}
	all.Scope.Devices = slices.Concat(d.Scope.Devices, other.Scope.Devices)
	if d.CheckPublicEndpoint == nil {
		all.CheckPublicEndpoint = other.CheckPublicEndpoint
	} else if other.CheckPublicEndpoint != nil {
		all.CheckPublicEndpoint = func(e endpoint.Named) error {
			if d.CheckPublicEndpoint(e) == nil {
				return nil
			}
			return other.CheckPublicEndpoint(e)
		}
	}
	return all
}

// union returns the values of both maps, each once.
func union[K, V comparable](a, b map[K][]V) map[K][]V {
	all := map[K][]V{}
	for _, one := range []map[K][]V{a, b} {
		for key, values := range one {
			for _, v := range values {
				if !slices.Contains(all[key], v) {
					all[key] = append(all[key], v)
				}
			}
		}
	}
	return all
}

// Covers reports whether a backend with the description d needs all objects that one with other can have led to.
func (d Description) Covers(other Description) bool {
	return d.Scope.Covers(other.Scope) && len(d.Beyond(other)) == 0
}

// Beyond returns the leftovers that only other has.
func (d Description) Beyond(other Description) []Leftover {
	return slices.DeleteFunc(slices.Clone(other.Leftovers), func(l Leftover) bool {
		return slices.ContainsFunc(d.Leftovers, func(own Leftover) bool { return own.String() == l.String() })
	})
}

// AllPorts returns the UDP ports of this host that peers send to, sorted.
func (d Description) AllPorts() (all []int) {
	for _, ports := range d.Ports {
		all = append(all, ports...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// PortClash returns the lowest port, as in Description.Ports, that only one of two backends can have. The kernel lets
// devices of vxlan listen on one port if their VNIs differ, so that their names do, and both or neither have GBP: see
// vxlan_find_sock, which compares the flags.
func PortClash(a, b map[string][]int) (port int, clash bool) {
	for kind, ports := range a {
		for other, others := range b {
			if kind == other && strings.HasPrefix(kind, "vxlan") {
				continue
			}
			for _, p := range ports {
				if slices.Contains(others, p) && (!clash || p < port) {
					port = p
					clash = true
				}
			}
		}
	}
	return port, clash
}

// CheckPublicEndpoint returns an error if e is not zero, and peers of this host cannot send to e by
// backend b. configured is the type of b in the configuration.
func CheckPublicEndpoint(b Backend, configured string, e endpoint.Named) error {
	check := b.Describe().CheckPublicEndpoint
	if e.IsZero() {
		return nil
	}
	if check == nil {
		return fmt.Errorf("the backend %s does not send to names: expected wireguard as Backend.Type", configured)
	}
	return check(e)
}

// CheckLocations returns an error if hosts with backend b cannot have locations. configured is the
// type of b in the configuration.
func CheckLocations(b Backend, configured string) error {
	if len(b.Describe().Inside) > 0 {
		return nil
	}
	return fmt.Errorf("the backend %s has no locations: expected wireguard with SameLocation as Backend", configured)
}

// Usable returns an error if b finds out that it cannot start on this host.
func Usable(ctx context.Context, b Backend) error {
	if usable := b.Describe().Usable; usable != nil {
		return usable(ctx)
	}
	return nil
}

// Leftover is something that a backend creates outside of its Scope: a kernel object of a kind that
// the data plane does not know, or what commands have done. When another configuration replaces that
// of the backend, it stays on the host. String describes it. Two leftovers with the same text are
// the same.
type Leftover interface {
	fmt.Stringer
	// Present reports whether it exists.
	Present() (bool, error)
	// Remove removes it. It returns nil if it does not exist. If ctx ends before, Remove returns an
	// error, and the next call continues.
	Remove(ctx context.Context) error
}
