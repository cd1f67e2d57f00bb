// SPDX-License-Identifier: Apache-2.0

// Package backendtest contains helpers for the tests of backends.
package backendtest

import (
	"net/netip"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// Env returns the environment of a backend on a host with the given families, each with
// a network and an address, and a link with the given MTU in bytes. All other fields
// are zero.
func Env(mtu int, families ...prefix.Family) backend.Env {
	e := backend.Env{Underlay: underlay.Interface{Name: "eth0", Index: 2, MTU: mtu}}
	for _, f := range families {
		network := "10.5.0.0/16"
		addr := "192.168.77.1"
		if f == prefix.IPv6 {
			network = "fd00:10:5::/48"
			addr = "fd00:77::1"
		}
		a := netip.MustParseAddr(addr)
		e.Config.Networks = append(e.Config.Networks, subnet.Network{Prefix: netip.MustParsePrefix(network)})
		e.Underlay.Addrs = append(e.Underlay.Addrs, underlay.Address{Local: a, Public: a})
	}
	return e
}
