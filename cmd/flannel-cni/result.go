// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// withGateways adds a gateway to each route of result that has none: the gateway of the
// address in the same family. Without it, the plugin bridge up to 1.1 looks for a route
// without a gateway, and does not find it. A result of an unexpected form is returned
// unchanged.
func withGateways(result json.RawMessage) json.RawMessage {
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
	text, err := json.Marshal(top)
	if err != nil {
		return result
	}
	return text
}
