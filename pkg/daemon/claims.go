// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// claims are what one of several networks needs for itself on this host.
type claims struct {
	networks []netip.Prefix
	names    []string         // of devices and files, each after its kind
	ports    map[string][]int // see backend.Description
}

// claimsOf returns the claims of a network with this configuration. d is the description of its backend.
func claimsOf(cfg subnet.Config, d backend.Description) claims {
	c := claims{networks: cfg.Prefixes(), ports: d.Ports}
	for _, name := range d.Scope.Devices {
		c.names = append(c.names, "device "+name)
	}
	for _, path := range d.Files {
		c.names = append(c.names, "file "+path)
	}
	return c
}

// beyond returns what c claims and none of the others does.
func (c claims) beyond(others []claims) claims {
	rest := claims{slices.Clone(c.networks), slices.Clone(c.names), map[string][]int{}}
	for kind, ports := range c.ports {
		rest.ports[kind] = slices.DeleteFunc(slices.Clone(ports), func(p int) bool {
			return slices.ContainsFunc(others, func(o claims) bool { return slices.Contains(o.ports[kind], p) })
		})
	}

	for _, o := range others {
		rest.names = slices.DeleteFunc(rest.names, func(name string) bool { return slices.Contains(o.names, name) })
		rest.networks = slices.DeleteFunc(rest.networks, func(n netip.Prefix) bool {
			return slices.ContainsFunc(o.networks, func(outer netip.Prefix) bool { return prefix.Contains(outer, n) })
		})
	}
	return rest
}

// clash describes the first thing that both need.
func (c claims) clash(other claims) string {
	for _, p := range c.networks {
		for _, o := range other.networks {
			if p.Overlaps(o) {
				return fmt.Sprintf("its network %s overlaps with %s", p, o)
			}
		}
	}

	for _, name := range c.names {
		if slices.Contains(other.names, name) {
			return "both have the " + name
		}
	}

	// Two devices of vxlan with one VNI have one name, which the comparison of devices above finds. Devices of different
	// families have separate sockets anyway.
	if port, clash := backend.PortClash(c.ports, other.ports); clash {
		return fmt.Sprintf("both have UDP port %d", port)
	}
	return ""
}
