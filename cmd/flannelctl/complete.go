// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// completeFrom completes the value of a flag with texts from the report of this host's daemon.
func completeFrom(cmd *cobra.Command, flag string, daemon *daemonFlags, texts func(status.Report) []string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		r, _ := daemon.report(cmd.Context()) // without a daemon there is nothing to offer
		return texts(r), cobra.ShellCompDirectiveNoFileComp
	}) // fails only without the flag
}

// networkNames returns the names of the networks of a daemon that serves several.
func networkNames(r status.Report) (names []string) {
	for _, n := range r.Networks {
		names = append(names, n.Name)
	}
	return names
}

// peerNames returns the values of check --peer.
func peerNames(r status.Report) (names []string) {
	for _, p := range r.Peers {
		for _, s := range p.Subnets {
			names = append(names, s.String())
		}
		for _, a := range p.PublicIPs {
			if !slices.Contains(names, a.String()) {
				names = append(names, a.String())
			}
		}
	}
	return names
}

// completeKeys completes an argument with the keys of the reservations, or of the other leases.
func completeKeys(store *storeFlags, reservation bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) (keys []string, _ cobra.ShellCompDirective) {
		if len(args) == 0 {
			_ = store.withAdmin(func(a *etcd.Admin) error { // without a store there is nothing to offer
				entries, err := a.Entries(cmd.Context(), false)
				for _, e := range entries {
					if e.Lease.Permanent == reservation {
						keys = append(keys, e.Lease.Key)
					}
				}
				return err
			})
		}
		return keys, cobra.ShellCompDirectiveNoFileComp
	}
}
