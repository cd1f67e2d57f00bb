package main

import (
	"encoding/json"
	"net/netip"

	"flanneld/pkg/prefix"
)

// withGateways returns a result in which each route names its gateway, where
// it is that of the address of its family. Releases of bridge up to 1.1 look
// for a route without one otherwise, and do not find it. What is no result as
// expected is returned as it is.
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
