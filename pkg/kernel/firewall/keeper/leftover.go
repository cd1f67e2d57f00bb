// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// Remove removes the traffic rules of networks from every firewall of this host. If it
// fails in one firewall, it continues with the others and returns all errors. No Keeper
// can write rules while Remove runs. Otherwise a Keeper could write removed rules again,
// because it has read them before the removal.
func (h *Host) Remove(ctx context.Context, networks []netip.Prefix) error {
	h.writing.Lock()
	defer h.writing.Unlock()
	var errs []error
	for _, l := range leftovers("", firewall.Policy{Former: networks}, nil) {
		_, err := l.applier.Apply(ctx, l.gone)
		errs = append(errs, err)
	}
	return oneline.Join(errs...)
}

// Remove is like Host.Remove.
func (k *Keeper) Remove(ctx context.Context, networks []netip.Prefix) error {
	return k.host.Remove(ctx, networks)
}

// leftover is a firewall that may contain rules which it should not contain.
type leftover struct {
	name    string // of the firewall
	applier firewall.Applier
	gone    firewall.Policy // removes them
}

// leftovers returns the firewalls that may contain rules of the networks in gone.Former, without those
// that contain the present rules: inUse, and variants for each family.
func leftovers(inUse Flavour, gone firewall.Policy, variants map[prefix.Family]iptables.Variant) []leftover {
	var all []leftover
	for _, v := range []iptables.Variant{iptables.Legacy, iptables.NFT} {
		if !v.Present() {
			continue
		}

		l := leftover{name: v.Program(prefix.IPv4), applier: iptables.New(v)}
		for _, n := range gone.Former {
			if variants[prefix.FamilyOf(n.Addr())] != v {
				l.gone.Former = append(l.gone.Former, n)
			}
		}
		all = append(all, l)
	}
	if len(all) == 0 && len(variants) == 0 && iptables.Default.Present() { // only under its plain name
		all = append(all, leftover{iptables.Default.Program(prefix.IPv4), iptables.New(iptables.Default), gone})
	}
	if inUse != NFTables {
		all = append(all, leftover{string(NFTables), nftables.New(), gone})
	}
	return all
}
