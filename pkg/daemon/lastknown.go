// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// lastKnown is the state that a start can use before the store has answered.
type lastKnown struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
	Own       subnet.Lease       `json:"own"`
	Stored    *subnet.Lease      `json:"stored,omitempty"` // Own as it was published; nil if it is the same
	Peers     subnet.LedgerState `json:"peers"`
	Former    []former           `json:"former,omitempty"` // earlier configurations whose objects may still be in the kernel
	Rules     []netip.Prefix     `json:"rules,omitempty"`  // networks outside of Config that the firewall may still contain

	// Prefix and Name are those of one of several networks.
	Prefix string `json:"prefix,omitempty"`
	Name   string `json:"name,omitempty"`
	// Seen is the revision at which the store had its configuration.
	Seen int64 `json:"seen,omitempty"`

	// Saved is when the file was written, by the wall clock. A clock that is earlier is wrong.
	Saved time.Time `json:"saved,omitzero"`

	// PublicIPs are the addresses that peers send to, if the store and not the flags set
	// them.
	PublicIPs []netip.Addr `json:"publicIPs,omitempty"`

	peers func() subnet.LedgerState // returns newer peers than Peers; may be nil

	// recalled is set if Config comes from an earlier process, and the store has not
	// returned a configuration to this process yet.
	recalled bool
}

// renewed updates the own lease to what the store has. If its addresses have changed here and
// the store does not know it yet, the state keeps the new addresses: a renewal of the lease as
// it was must not bring the old ones back.
func (last *lastKnown) renewed(own subnet.Lease) {
	if last.Stored != nil {
		stored := own
		last.Stored = &stored
		own.Endpoints = last.Own.Endpoints
	}
	last.Own = own
}

// clockSlack is by how much the clock may have been set back since the state was written.
const clockSlack = time.Minute

// errExpired means that the lease of the last known state has run out.
var errExpired = fmt.Errorf("%w: the lease of the last known state has run out", subnet.ErrUnfit)

// usable returns nil if the own lease has not run out at the time now. A host without a
// real-time clock boots with a time that is long ago. If the clock is earlier than the time at
// which the state was written, it does not tell whether the lease has run out.
func (last *lastKnown) usable(now time.Time) error {
	switch {
	case last.Own.Permanent:
		return nil
	case now.Before(last.Saved.Add(-clockSlack)):
		return fmt.Errorf("the clock is wrong: it is at %s, and the state was written at %s", now.UTC().Format(time.RFC3339), last.Saved.UTC().Format(time.RFC3339))
	case now.After(last.Own.Expires):
		return errExpired
	}
	return nil
}

// sameNode reports whether the state with interface a belongs to the node that has b now.
// Cloned hosts have the same disk, but different addresses.
func sameNode(a, b underlay.Interface) bool {
	return len(a.Addrs) > 0 && reflect.DeepEqual(a.Addrs, b.Addrs)
}

// otherNode reports whether the state with interface a belongs to another node than the
// one that has b now: they have no address in common.
func otherNode(a, b underlay.Interface) bool {
	return !slices.ContainsFunc(a.Addrs, func(one underlay.Address) bool { return slices.Contains(b.Addrs, one) })
}
