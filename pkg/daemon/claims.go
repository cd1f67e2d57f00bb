// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
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
	names    []string // of devices and files, each after its kind
	ports    []port
}

type port struct {
	number  int
	backend string // its type, as in backend.Description.Ports
}

// claimsOf returns the claims of a network with this configuration. be is nil if this version does not know
// the backend.
func claimsOf(cfg subnet.Config, be backend.Backend) claims {
	c := claims{networks: cfg.Prefixes()}
	if be == nil {
		return c
	}

	for _, name := range be.Scope().Devices {
		c.names = append(c.names, "device "+name)
	}
	d := be.Describe()
	for _, path := range d.Files {
		c.names = append(c.names, "file "+path)
	}
	for kind, numbers := range d.Ports {
		for _, n := range numbers {
			c.ports = append(c.ports, port{n, kind})
		}
	}
	slices.SortFunc(c.ports, func(a, b port) int { return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(a.backend, b.backend)) })
	return c
}

// beyond returns what c claims and none of the others does.
func (c claims) beyond(others []claims) claims {
	rest := claims{slices.Clone(c.networks), slices.Clone(c.names), slices.Clone(c.ports)}

	for _, o := range others {
		rest.names = slices.DeleteFunc(rest.names, func(name string) bool { return slices.Contains(o.names, name) })
		rest.ports = slices.DeleteFunc(rest.ports, func(p port) bool { return slices.Contains(o.ports, p) })
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

	for _, p := range c.ports {
		for _, o := range other.ports {
			// Devices with equal VNIs have equal names, which the comparison of devices above finds. Devices of
			// different families have separate sockets anyway.
			if p.number == o.number && !backend.SharePort(p.backend, o.backend) {
				return fmt.Sprintf("both have UDP port %d", p.number)
			}
		}
	}
	return ""
}
