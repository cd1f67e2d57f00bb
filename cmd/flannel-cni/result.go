// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// withGateways adds the gateway of an address of the same family to each route of result that has
// none. A result that cannot be parsed stays as it is.
func withGateways(result json.RawMessage) json.RawMessage {
	// CHECK of the plugin bridge up to version 1.1 looks in the kernel for the route exactly as
	// result describes it, and the kernel's route has a gateway.
	var top object
	var ips []struct{ Gateway netip.Addr }
	var routes []object
	if json.Unmarshal(result, &top) != nil || json.Unmarshal(top["ips"], &ips) != nil || json.Unmarshal(top["routes"], &routes) != nil {
		return result
	}

	for _, r := range routes {
		var dst netip.Prefix
		if json.Unmarshal(r["dst"], &dst) != nil {
			continue
		}
		for _, ip := range ips {
			if ip.Gateway.IsValid() && prefix.FamilyOf(ip.Gateway) == prefix.FamilyOf(dst.Addr()) {
				r.preset("gw", ip.Gateway)
			}
		}
	}

	top.set("routes", routes)
	return raw(top)
}
