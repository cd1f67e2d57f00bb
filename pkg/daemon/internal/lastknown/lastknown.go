// SPDX-License-Identifier: Apache-2.0

// Package lastknown keeps what a network of this host has used: its configuration, interface, own
// lease and peers. They are in the state file, so that a start can use them before the store
// answers.
package lastknown

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// State is what a start can use before the store has answered.
type State struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
	Own       subnet.Lease       `json:"own"`
	Stored    *subnet.Lease      `json:"stored,omitempty"` // own lease as the store has it; nil if that is Own
	// Subnets are those that this host had in earlier configurations, last first.
	Subnets []netip.Prefix     `json:"subnets,omitempty"`
	Peers   subnet.LedgerState `json:"peers"`
	Former  []Former           `json:"former,omitempty"` // earlier configurations whose objects may still be in the kernel
	Rules   []netip.Prefix     `json:"rules,omitempty"`  // networks outside of Config that the firewall may still contain

	// Name is the name of one of several networks, and Prefix is the etcd prefix of all of them. Both are
	// empty if there is only one network, which has no name.
	Prefix string `json:"prefix,omitempty"`
	Name   string `json:"name,omitempty"`
	// Seen is the last recorded moment at which the store had the configuration of one of several
	// networks.
	Seen subnet.Observation `json:"sighting,omitzero"`

	// Saved is when the file was written, by the wall clock. A clock that shows an earlier time is
	// wrong.
	Saved time.Time `json:"saved,omitzero"`

	// PublicIPs are the addresses that peers send to, if the store and not the flags set
	// them.
	PublicIPs []netip.Addr `json:"publicIPs,omitempty"`
	// Location is the location of this host. LocationLabel is the label of its Node from which Location
	// was read, or empty if Location is from an option.
	Location      string `json:"location,omitempty"`
	LocationLabel string `json:"locationLabel,omitempty"`

	// Fresh returns newer peers than Peers. It may be nil.
	Fresh func() subnet.LedgerState `json:"-"`

	// Recalled is set if Config comes from an earlier process, and the store has not
	// returned a configuration to this process yet.
	Recalled bool `json:"-"`
}

// Former is an earlier configuration and interface of this host, whose objects may still
// be in the kernel.
type Former struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
}

// Renewed records own, this host's lease as the store has it. If Stored is set, the addresses or backend
// data have changed here and the store does not have the new ones yet. Own then keeps the new ones. If
// own has another key, Renewed records only the etcd lease: the host has taken that key for another
// configuration, and the state is still that of the former configuration.
func (last *State) Renewed(own subnet.Lease) {
	if own.Key != last.Own.Key {
		last.Own.LeaseID = own.LeaseID
		return
	}
	if last.Stored != nil {
		stored := own
		last.Stored = &stored
		own.BackendType = last.Own.BackendType
		own.NextType = last.Own.NextType
		own.Endpoints = last.Own.Endpoints
	}
	last.Own = own
}

// Differ records that the store may have another lease of this host than Own. The next session publishes Own again.
func (last *State) Differ() { last.Stored = cmp.Or(last.Stored, new(last.Own)) }

// maxSubnets is how many subnets of earlier configurations a host remembers.
const maxSubnets = 16

// Take makes own, which the store has, the lease of this host, and remembers the subnets that the host
// leaves.
func (last *State) Take(own subnet.Lease) {
	var left []netip.Prefix
	for _, s := range slices.Concat(last.Own.Subnets(), last.Subnets) {
		if !slices.Contains(own.Subnets(), s) && !slices.Contains(left, s) && len(left) < maxSubnets {
			left = append(left, s)
		}
	}
	last.Subnets = left
	last.Own = own
	last.Stored = nil
}

// clockSlack is by how much the clock may have been set back since the state was written.
const clockSlack = time.Minute

// ErrExpired means that the lease of the last known state has run out. It wraps subnet.ErrUnfit,
// because a retry cannot succeed.
var ErrExpired = fmt.Errorf("%w: the lease of the last known state has run out", subnet.ErrUnfit)

// Attempt records that the host begins to use the state next, which has another configuration. Until the
// backend has started, a restart begins with last, so the configuration of next becomes a former one,
// which may have left objects. Stored becomes the lease of next that the store has.
func (last *State) Attempt(next State) {
	failed := Former{Config: next.Config, Interface: next.Interface}
	if !slices.ContainsFunc(last.Former, func(f Former) bool {
		return len(subnet.Changes(f.Config, failed.Config)) == 0 && reflect.DeepEqual(f.Interface, failed.Interface)
	}) {
		last.Former = append(slices.Clone(last.Former), failed)
	}
	last.Stored = cmp.Or(next.Stored, &next.Own)
	last.Peers = next.Peers
	last.Fresh = next.Fresh
}

// Usable returns nil if this host's lease has not run out at the time now, and ErrExpired if it has. It
// returns another error if now is more than clockSlack earlier than the time at which the state was
// written, because the clock is then wrong and cannot tell whether the lease has run out. Such a clock
// is that of a host without a real-time clock that has just booted. A permanent lease is always usable.
func (last *State) Usable(now time.Time) error {
	switch {
	case last.Own.Permanent:
		return nil
	case now.Before(last.Saved.Add(-clockSlack)):
		return fmt.Errorf("the clock is wrong: it is at %s, and the state was written at %s", now.UTC().Format(time.RFC3339), last.Saved.UTC().Format(time.RFC3339))
	case now.After(last.Own.Expires):
		return ErrExpired
	}
	return nil
}

// SameHost reports whether the state with interface a belongs to the host that has b now.
// Cloned hosts have the same disk, but different addresses.
func SameHost(a, b underlay.Interface) bool {
	return len(a.Addrs) > 0 && reflect.DeepEqual(a.Addrs, b.Addrs)
}

// OtherHost reports whether the state with interface a belongs to another host than the
// one that has b now: they have no address in common.
func OtherHost(a, b underlay.Interface) bool {
	return !slices.ContainsFunc(a.Addrs, func(one underlay.Address) bool { return slices.Contains(b.Addrs, one) })
}

// Withdrawn returns cfg, in the stage Withdrawn if this host has no next backend and had another one than cfg until a
// moment ago. A peer that has not read that it is gone still sends over its device, which cfg may change.
func (last *State) Withdrawn(cfg subnet.Config) subnet.Config {
	if last.Config.NextBackend != nil || cfg.Stage != "" {
		return cfg
	}

	for _, f := range last.Former {
		if f.Config.Toward(cfg).Stage == subnet.Withdrawn {
			cfg.Stage = subnet.Withdrawn
		}
	}
	return cfg
}

// All returns the former configurations, and then the present one.
func (last *State) All() []Former {
	return append(slices.Clone(last.Former), Former{Config: last.Config, Interface: last.Interface})
}

// FormerNetworks returns the networks for which an earlier process may have created rules,
// except for those in cfg.
func (last *State) FormerNetworks(cfg subnet.Config) []netip.Prefix {
	all := append(slices.Clone(last.Rules), last.Config.Prefixes()...)
	for _, f := range last.Former {
		all = append(all, f.Config.Prefixes()...)
	}
	present := cfg.Prefixes()
	var former []netip.Prefix
	for _, n := range all {
		if !slices.Contains(present, n) && !slices.Contains(former, n) {
			former = append(former, n)
		}
	}
	return former
}

// Files returns the names of the files in dir with a State, without .json, as state.Open expects them. It
// leaves out the state files of the extension backend.
func Files(dir string) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(dir, "flanneld-*.json"))
	if err != nil {
		return nil, fmt.Errorf("look for state files: %w", err)
	}
	var names []string
	for _, path := range found {
		if name := strings.TrimSuffix(filepath.Base(path), ".json"); !strings.HasSuffix(name, "-commands") {
			names = append(names, name)
		}
	}
	return names, nil
}

// Each calls do with each state of Files, by this name, until do returns an error. It leaves out files that cannot be
// read.
func Each(dir string, do func(file string, last State) error) error {
	names, err := Files(dir)
	for _, name := range names {
		if last, failed := statefile.Read[State](dir, name); err == nil && failed == nil {
			err = do(name, last)
		}
	}
	return err
}
