// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// claims are what one of several networks needs for itself on this host.
type claims struct {
	backend  string // type
	devices  []string
	ports    []int // UDP
	networks []netip.Prefix
	files    []string
}

// claimsOf returns the claims of a network with this configuration.
func claimsOf(cfg subnet.Config, be backend.Backend) claims {
	return claims{backend: cfg.BackendType, devices: be.Scope().Devices, ports: backend.Ports(be), networks: cfg.Prefixes(), files: backend.Files(be)}
}

// clash returns a description of the first thing that both need, or "" if there is none.
func (c claims) clash(other claims) string {
	for _, p := range c.networks {
		for _, o := range other.networks {
			if p.Overlaps(o) {
				return fmt.Sprintf("its network %s overlaps with %s", p, o)
			}
		}
	}
	for _, d := range c.devices {
		if slices.Contains(other.devices, d) {
			return "both have the device " + d
		}
	}
	for _, f := range c.files {
		if slices.Contains(other.files, f) {
			return "both have the file " + f
		}
	}
	// The kernel shares a port between vxlan devices of different VNIs.
	if c.backend == "vxlan" && other.backend == "vxlan" {
		return ""
	}
	for _, p := range c.ports {
		if slices.Contains(other.ports, p) {
			return fmt.Sprintf("both have UDP port %d", p)
		}
	}
	return ""
}
