// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

func newRolesCommand(h host) *cobra.Command {
	store := storeFlags{host: h}
	cmd := &cobra.Command{
		Use: "roles HOSTS", Short: "Print the etcdctl commands that give each host a key of its own", Args: cobra.ExactArgs(1),
		Long: `Prints commands for etcdctl that create a role and a user for each of so many
hosts. The user can write the lease of one subnet, and read those of all hosts. The
subnets of present leases come first, then the first free ones of the network. The
name of a user contains its subnet. The users have no password: each host needs a
client certificate with the name of its user.`,
		Example: "  flannelctl roles 50 >roles.sh\n  flannelctl roles 50 | sed 's/ --no-password//' # asks for passwords",
		RunE: func(cmd *cobra.Command, args []string) error {
			hosts, err := strconv.ParseUint(args[0], 10, 16)
			if err != nil {
				return fmt.Errorf("%q is not a number of hosts from 0 to 65535", args[0])
			}
			o, err := store.options()
			if err != nil {
				return err
			}
			return o.withAdmin(func(a *etcd.Admin) error {
				text, _, err := a.Config(cmd.Context())
				if err != nil {
					return err
				}
				cfg, err := subnet.ParseConfig(text)
				if err != nil {
					return err
				}
				entries, err := a.Entries(cmd.Context(), false)
				if err != nil {
					return err
				}
				own, err := ownSubnets(cfg, entries, int(hosts))
				if err == nil {
					printRoles(cmd.OutOrStdout(), o.EtcdPrefix, own)
				}
				return err
			})
		},
	}
	store.addTo(cmd)
	return cmd
}

// ownSubnets returns the subnets of so many hosts: those in entries, then the first free ones of the
// network.
func ownSubnets(cfg subnet.Config, entries []subnet.Entry, hosts int) (own [][]netip.Prefix, err error) {
	pools, err := cfg.Pools()
	if err != nil {
		return nil, err
	}
	var taken []netip.Prefix
	for _, e := range entries {
		if s := e.Lease.Subnets(); slices.EqualFunc(pools, s, subnet.Pool.Contains) {
			own = append(own, s)
			taken = append(taken, s...)
		}
	}

	free := make([]func() (netip.Prefix, bool), len(pools))
	for i, p := range pools {
		next, stop := iter.Pull(p.All())
		defer stop()
		free[i] = func() (netip.Prefix, bool) {
			s, ok := next()
			for ok && slices.ContainsFunc(taken, s.Overlaps) {
				s, ok = next()
			}
			return s, ok
		}
	}

	for len(own) < hosts {
		var subnets []netip.Prefix
		for i, next := range free {
			s, ok := next()
			if !ok {
				return nil, fmt.Errorf("%s has %d subnets, want %d", pools[i], len(own), hosts)
			}
			subnets = append(subnets, s)
		}
		own = append(own, subnets)
	}
	return own, nil
}

// printRoles prints the commands. Keys contain characters that mean something to a shell.
func printRoles(w io.Writer, prefix string, own [][]netip.Prefix) {
	const reader = "flannel-read"
	fmt.Fprintf(w, "etcdctl role add %s\n", reader)
	fmt.Fprintf(w, "etcdctl role grant-permission %s read '%s/config'\n", reader, prefix)
	fmt.Fprintf(w, "etcdctl role grant-permission %s read --prefix=true '%s/subnets/'\n", reader, prefix)
	inName := strings.NewReplacer("/", "-", ":", ".") // etcdctl takes what follows a colon for a password
	for _, subnets := range own {
		name := "flannel-" + inName.Replace(subnets[0].String())
		fmt.Fprintf(w, "etcdctl role add %s\n", name)
		fmt.Fprintf(w, "etcdctl role grant-permission %s readwrite '%s/subnets/%s'\n", name, prefix, codec.FormatKey(subnets))
		fmt.Fprintf(w, "etcdctl user add %s --no-password\n", name)
		fmt.Fprintf(w, "etcdctl user grant-role %s %s\n", name, reader)
		fmt.Fprintf(w, "etcdctl user grant-role %s %s\n", name, name)
	}
}
