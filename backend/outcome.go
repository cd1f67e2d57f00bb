package backend

import (
	"net/netip"

	"flanneld/pkg/dataplane"
	"flanneld/subnet"
)

// OutcomeOf says in terms of leases what a reconciler reports in terms of
// routes. keys has the lease of each subnet that was asked for.
func OutcomeOf(r dataplane.Report, keys map[netip.Prefix]string) Outcome {
	o := Outcome{Retry: r.Unreachable}
	for _, refusal := range r.Refused {
		o.Refused = append(o.Refused, subnet.Refusal{Key: keys[refusal.Route.Dst], Reason: refusal.Reason})
	}
	return o
}
