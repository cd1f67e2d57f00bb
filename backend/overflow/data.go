// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/subnet"
)

// data is the backend data of a lease for one family. It says what the routers of the cloud do with
// packets from and to the host. Other daemons ignore it.
type data struct {
	// Table is the route table that packets of the host follow. It is empty if the cloud carries no
	// packets of the host, or if the host does not know the table.
	Table string `json:",omitempty"`
	// Routed are the tables that have a route to the subnet of the host, sorted.
	Routed []string `json:",omitempty"`
	// Why is the reason why Table is not one of Routed, if the host knows it: a result of
	// cloud.Kind. It is never "waiting", because the lease of each new host would then change once
	// more.
	Why string `json:",omitempty"`
	// Overflow is the data for the tunnel.
	Overflow json.RawMessage `json:",omitempty"`
}

func (d data) encode() json.RawMessage {
	raw, _ := json.Marshal(d) // fails only if Overflow is not JSON
	return raw
}

// decode returns known false if there is no data: the host has no tunnel, like a host with flannel.
func decode(raw json.RawMessage) (d data, known bool, err error) {
	if len(raw) == 0 {
		return d, false, nil
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return data{}, false, fmt.Errorf("backend data: %w", err)
	}
	return d, true, nil
}

// routed reports whether hosts that follow the same table as this one reach it through the cloud.
func (d data) routed() bool { return d.Table != "" && slices.Contains(d.Routed, d.Table) }

// obstacle says why the routers of the cloud do not carry the packets between this host and a peer.
// It returns "" if they do. Both hosts come to the same decision, because both know both leases.
func obstacle(own, peer data) string {
	because := func(what string, d data) string {
		if why := reasons[d.Why]; why != "" {
			what += ": " + why
		}
		return what
	}

	// Only both directions together: a firewall between the hosts may expect to see both, and the
	// reverse path filter of the external interface may be strict.
	switch {
	case own.Table == "":
		return because("this host has found no route table that its packets follow", own)
	case !slices.Contains(peer.Routed, own.Table):
		return because(fmt.Sprintf("table %q has no route to it", subnet.Shorten(own.Table)), peer)
	case peer.Table == "":
		return because("it has found no route table that its packets follow", peer)
	case !slices.Contains(own.Routed, peer.Table):
		return because(fmt.Sprintf("table %q, which its packets follow, has no route to this host", subnet.Shorten(peer.Table)), own)
	}
	return ""
}

var reasons = map[string]string{
	"quota":       "the quota of routes is used up",
	"denied":      "permissions are missing",
	"throttled":   "the cloud refuses calls because there are too many",
	"unavailable": "the cloud does not answer",
	"failed":      "another error",
}

// after returns the data that replaces d after a comparison of the routes to dst, which err ended. r
// describes the last comparison that could read the tables.
func (d data) after(r cloud.Report, dst netip.Prefix, err error) data {
	next := data{Table: d.Table, Routed: d.Routed, Overflow: d.Overflow}
	if r.Dropped { // the packets are dropped even if the last comparison has failed for another reason
		r.Tables = nil
	}
	if r.Dropped || len(r.Tables) > 0 {
		next.Table = ""
		next.Routed = nil
	}

	for _, t := range r.Tables {
		if t.Own {
			next.Table = t.Name
		}

		// The routers may not follow a route yet that a call has just put. It counts if it counted before.
		right := func(route cloud.RouteReport) bool {
			return route.Table == t.ID && route.Dst == dst && route.Present && (route.Seen || slices.Contains(d.Routed, t.Name))
		}
		if slices.ContainsFunc(r.Routes, right) {
			next.Routed = append(next.Routed, t.Name)
		}
	}

	slices.Sort(next.Routed)
	if next.routed() || err == nil {
		return next
	}

	next.Why = cloud.Kind(err)
	if d.Why != "" && cloud.Transient(err) || cloud.Kind(err) == "waiting" {
		next.Why = d.Why // so that an outage does not change all leases
	}
	return next
}
