// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// announcement is what the leader tells the other hosts about their routes.
type announcement struct {
	Routed   []netip.Prefix `json:"routed"`             // destinations that are in order; nil if the leader does not know them yet
	Unrouted []unrouted     `json:"unrouted,omitempty"` // others, by the reason
	Error    string         `json:"error,omitempty"`    // the error of the leader's last comparison
}

type unrouted struct {
	Reason  string         `json:"reason"`
	Subnets []netip.Prefix `json:"subnets"`
}

// mostReason limits a reason, in bytes: all hosts read the announcement.
const mostReason = 300

// announce returns the announcement after a comparison of the leader that ended with err, as JSON. Equal
// states give equal texts.
func announce(r Report, err error) (json.RawMessage, error) {
	a := announcement{Routed: slices.Clone(r.Routed)}
	slices.SortFunc(a.Routed, comparePrefixes)
	for _, u := range r.Unrouted {
		reason := u.Reason[:min(len(u.Reason), mostReason)]
		i := slices.IndexFunc(a.Unrouted, func(have unrouted) bool { return have.Reason == reason })
		if i < 0 {
			i, a.Unrouted = len(a.Unrouted), append(a.Unrouted, unrouted{Reason: reason})
		}
		a.Unrouted[i].Subnets = append(a.Unrouted[i].Subnets, u.Dst)
	}
	if err != nil {
		text := err.Error()
		a.Error = text[:min(len(text), mostReason)]
	}
	return json.Marshal(a)
}

func comparePrefixes(a, b netip.Prefix) int { return a.Compare(b) }

// check returns an error unless the routes to all of these subnets are in order. leader is the name of
// the leader, for the error.
func (a announcement) check(subnets []netip.Prefix, leader string) error {
	for _, dst := range subnets {
		if slices.Contains(a.Routed, dst) {
			continue
		}
		for _, u := range a.Unrouted {
			if slices.Contains(u.Subnets, dst) {
				return fmt.Errorf("no route to %s, says the leader %s: %s", dst, leader, u.Reason)
			}
		}
		if a.Error != "" {
			return fmt.Errorf("no route to %s, because the leader %s cannot write: %s", dst, leader, a.Error)
		}
		return fmt.Errorf("waiting for the leader %s, which has not put the route to %s yet", leader, dst)
	}
	return nil
}
