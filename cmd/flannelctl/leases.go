// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// lease is the output form of a lease.
type lease struct {
	Key         string         `json:"key"`
	Subnets     []netip.Prefix `json:"subnets"`
	PublicIPs   []netip.Addr   `json:"publicIPs"`
	Type        string         `json:"type,omitempty"`
	NextType    string         `json:"nextType,omitempty"`
	Reservation bool           `json:"reservation,omitempty"`
	TTLSeconds  int            `json:"ttlSeconds,omitempty"`
	Error       string         `json:"error,omitempty"`

	data []string // of the backend, one for each subnet
}

func newLease(e subnet.Entry) lease {
	// Other hosts have written the key, and it need not be that of a subnet.
	l := lease{
		Key: oneline.Collapse(e.Lease.Key), Type: e.Lease.BackendType, NextType: e.Lease.NextType, Subnets: []netip.Prefix{}, PublicIPs: []netip.Addr{},
		Reservation: e.Lease.Permanent, TTLSeconds: int(e.TTL.Seconds()),
	}
	for _, ep := range e.Lease.Endpoints {
		l.Subnets = append(l.Subnets, ep.Subnet)
		l.PublicIPs = append(l.PublicIPs, ep.PublicIP)
		if ep.Data != nil {
			l.data = append(l.data, oneline.Collapse(string(ep.Data)))
		}
	}
	if e.Err != nil {
		l.Error = oneline.Collapse(e.Err.Error())
	}
	return l
}

func newLeasesCommand(h host) *cobra.Command {
	var (
		flags = storeFlags{host: h}
		out   output
		watch bool
	)

	cmd := &cobra.Command{
		Use: "leases", Short: "List the leases of all hosts", Args: cobra.NoArgs,
		Long: `Lists the leases of all hosts. On Kubernetes these are the Nodes that have flannel's
annotations.`,
		Example: "  flannelctl leases\n  flannelctl leases -w\n  flannelctl leases -o wide\n  flannelctl leases -o json | jq -r '.[].publicIPs[]'\n" +
			"  flannelctl leases --kubeconfig-file ~/.kube/config",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.read(func(o storeOptions, from store) error {
				if watch {
					return watchLeases(cmd.Context(), cmd.OutOrStdout(), from.Watch)
				}
				return listLeases(cmd, from, out, o.KubeSubnetMgr, func(subnet.Entry) bool { return true })
			})
		},
	}

	flags.addKubeTo(cmd)
	out.addTo(cmd, "wide", "name")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print every change, a line each, until Ctrl-C")
	cmd.MarkFlagsMutuallyExclusive("watch", "output")
	return cmd
}

func newReservationsCommand(h host) *cobra.Command {
	var (
		flags = storeFlags{host: h}
		out   output
	)

	cmd := &cobra.Command{
		Use: "reservations", Short: "List the reserved subnets", Args: cobra.NoArgs,
		Example: "  flannelctl reservations\n  flannelctl reservations -o name | xargs -n 1 flannelctl unreserve",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.withAdmin(func(a *etcd.Admin) error {
				return listLeases(cmd, a, out, false, func(e subnet.Entry) bool { return e.Lease.Permanent })
			})
		},
	}

	flags.addTo(cmd)
	out.addTo(cmd, "wide", "name")
	return cmd
}

// listLeases prints leases. Those of Nodes do not expire, and are not reservations.
func listLeases(cmd *cobra.Command, from store, out output, ofNodes bool, which func(subnet.Entry) bool) error {
	entries, err := from.Entries(cmd.Context(), true)
	if err != nil {
		return err
	}
	leases := []lease{}
	for _, e := range entries {
		if which(e) {
			e.Lease.Permanent = e.Lease.Permanent && !ofNodes
			leases = append(leases, newLease(e))
		}
	}

	return out.print(cmd.OutOrStdout(), leases, func(w io.Writer) {
		titles := "SUBNET\tPUBLIC IP\tTYPE\tEXPIRES\t+KEY"
		if ofNodes {
			titles = "NODE\tSUBNET\tPUBLIC IP\tTYPE"
		}
		t := out.table(w, titles+"\t+NEXT TYPE\t+DATA\tERROR")
		for _, l := range leases {
			subnets := list(l.Subnets)
			addresses := dash(list(l.PublicIPs))
			next, data := dash(l.NextType), dash(strings.Join(l.data, ","))
			if ofNodes {
				t.row(l.Key, l.Key, dash(subnets), addresses, dash(l.Type), next, data, l.Error)
			} else {
				t.row(l.Key, cmp.Or(subnets, l.Key), addresses, dash(l.Type), expires(l), l.Key, next, data, l.Error)
			}
		}
	})
}

func expires(l lease) string {
	if l.Reservation {
		return "never (reserved)"
	}
	return (time.Duration(l.TTLSeconds) * time.Second).String()
}

// watchLeases prints all leases and then every change. It returns nil when ctx ends.
func watchLeases(ctx context.Context, w io.Writer, watch func(context.Context, func(subnet.Update)) error) error {
	known := map[string]*subnet.Lease{} // one without endpoints cannot be read
	line := func(sign string, l *subnet.Lease) {
		p := newLease(subnet.Entry{Lease: *l})
		what := dash(list(p.PublicIPs)) + " " + dash(p.Type)
		if sign == "!" {
			what = "cannot be read"
		}
		fmt.Fprintln(w, time.Now().Format(time.TimeOnly), sign, p.Key, what)
	}

	err := watch(ctx, func(u subnet.Update) {
		s := u.Snapshot()
		now := map[string]*subnet.Lease{}
		for _, l := range s.Leases {
			now[l.Key] = l
		}
		for _, key := range s.Undecodable {
			now[key] = &subnet.Lease{Key: key}
		}

		for _, key := range slices.Sorted(maps.Keys(now)) {
			l := now[key]
			switch was, ok := known[key]; {
			case ok && was.Same(l):
			case len(l.Endpoints) == 0:
				line("!", l)
			case ok:
				line("~", l)
			default:
				line("+", l)
			}
		}

		for _, key := range slices.Sorted(maps.Keys(known)) {
			if now[key] == nil {
				line("-", known[key])
			}
		}
		known = now
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func newReserveCommand(h host) *cobra.Command {
	store := storeFlags{host: h}
	cmd := &cobra.Command{
		Use: "reserve SUBNET[,SUBNET6] PUBLIC-IP[,PUBLIC-IP6]", Short: "Reserve a subnet for one host", Args: cobra.ExactArgs(2),
		Long: `Reserves a subnet, or one of each family, for the host with that public address.
The reservation never expires. The host takes the subnet when flanneld starts. If
it had a lease of another subnet, its pods must be recreated. A lease of the same
subnet becomes a reservation without a change.

The command refuses the subnet of another host, and a subnet that the network
configuration does not allow. A host can have one reservation: unreserve the old
one first. To take subnets out of use, reserve each for a different address that
no host has.`,
		Example: "  flannelctl reserve 10.5.7.0/24 192.0.2.12\n  flannelctl reserve 10.5.7.0/24,fd00:10:5:7::/64 192.0.2.12,2001:db8::12",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := claim(args[0], args[1])
			if err != nil {
				return err
			}
			return store.withAdmin(func(a *etcd.Admin) error {
				if err := attainable(cmd.Context(), a, c); err != nil {
					return fmt.Errorf("reserve %s: %w", args[0], err)
				}
				key, err := a.Reserve(cmd.Context(), c)
				if err == nil {
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is reserved for %s\n", key, args[1])
				}
				return err
			})
		},
	}
	store.addTo(cmd)
	return cmd
}

// attainable returns an error if the network configuration does not allow the subnets of
// c. The host could never use such a reservation: flanneld ignores it or, when it takes another
// subnet, deletes it. attainable accepts any subnet if the store has no configuration.
func attainable(ctx context.Context, a *etcd.Admin, c subnet.Claim) error {
	text, revision, err := a.Config(ctx)
	if err != nil || revision == 0 {
		return err
	}
	cfg, err := subnet.ParseConfig(text)
	if err == nil {
		_, err = cfg.Pools()
	}
	if err != nil {
		return err
	}
	if why := misfit(subnet.Lease{Endpoints: c.Endpoints}, cfg); why != "" {
		return errors.New(why)
	}
	return nil
}

// claim parses the arguments SUBNET[,SUBNET6] and PUBLIC-IP[,PUBLIC-IP6], in any order of
// the families. Each subnet needs an address of its family, and each address a subnet.
func claim(subnets, addresses string) (c subnet.Claim, err error) {
	publics := map[prefix.Family]netip.Addr{}
	for text := range strings.SplitSeq(addresses, ",") {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return c, fmt.Errorf("%q is not an IP address", text)
		}
		if other, ok := publics[prefix.FamilyOf(a)]; ok {
			return c, fmt.Errorf("%s and %s: expected one public address of each family at most", other, a)
		}
		publics[prefix.FamilyOf(a)] = a
	}

	for text := range strings.SplitSeq(subnets, ",") {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() {
			return c, fmt.Errorf("%q is not a subnet such as 10.5.7.0/24", text)
		}
		public, ok := publics[prefix.FamilyOf(p.Addr())]
		if !ok {
			return c, fmt.Errorf("%s needs a public %s address beside it", p, prefix.FamilyOf(p.Addr()))
		}
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{Subnet: p, PublicIP: public})
	}

	slices.SortFunc(c.Endpoints, func(a, b subnet.Endpoint) int { return cmp.Compare(a.Family(), b.Family()) })
	if n := len(c.Endpoints); n > 2 || n == 2 && c.Endpoints[0].Family() == c.Endpoints[1].Family() {
		return c, errors.New("expected one subnet of each family at most")
	}

	for f, a := range publics {
		if _, ok := c.Endpoint(f); !ok {
			return c, fmt.Errorf("%s needs an %s subnet beside it", a, f)
		}
	}
	return c, nil
}

func newUnreserveCommand(h host) *cobra.Command {
	return newDeleteCommand(h, true, &cobra.Command{
		Use: "unreserve SUBNET|KEY", Short: "End a reservation",
		Long: `Deletes a reservation. If its host runs, it takes the subnet again at once, with a
lease that expires.`,
		Example: "  flannelctl unreserve 10.5.7.0/24",
	}, "is no longer reserved")
}

func newRevokeCommand(h host) *cobra.Command {
	return newDeleteCommand(h, false, &cobra.Command{
		Use: "revoke SUBNET|KEY", Short: "Delete a lease, for example that of a removed host",
		Long: `Deletes a lease, so that another host can take the subnet before the lease
expires. Other hosts drop their routes to it. If the host still runs, it takes the
same subnet again at once. To move a running host to another subnet, stop it and
reserve its subnet for another owner.`,
		Example: "  flannelctl revoke 10.5.43.0/24\n  flannelctl revoke '10.5.2.0-24&fd00:8:0:93f8::-64'",
	}, "is revoked")
}

func newDeleteCommand(h host, reservation bool, cmd *cobra.Command, done string) *cobra.Command {
	store := storeFlags{host: h}
	cmd.Args = cobra.ExactArgs(1)
	cmd.ValidArgsFunction = completeKeys(&store, reservation)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return store.withAdmin(func(a *etcd.Admin) error {
			key, err := find(cmd.Context(), a, args[0])
			if err == nil {
				err = a.Revoke(cmd.Context(), key, reservation)
			}
			if err == nil && !reservation {
				err = expectGone(cmd.Context(), a, key)
			}
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), key, done)
			}
			return err
		})
	}
	store.addTo(cmd)
	return cmd
}

// expectGone returns an error if a lease that was deleted is back soon, because its host runs and has taken it again.
func expectGone(ctx context.Context, a *etcd.Admin, key string) error {
	for range 10 {
		if err := wait.For(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		entries, err := a.Entries(ctx, false)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(entries, func(e subnet.Entry) bool { return e.Lease.Key == key }) {
			return fmt.Errorf("%s was revoked, and its host has taken it again: stop flanneld there first", key)
		}
	}
	return nil
}

// find returns the key of the lease that name identifies. If name is a subnet, this is
// the lease that has the subnet, and find returns an error if there is none. An address is
// refused, because several hosts may have it. Otherwise find takes name for a key and returns
// it unchecked.
func find(ctx context.Context, a *etcd.Admin, name string) (string, error) {
	p, noSubnet := netip.ParsePrefix(name)
	public, noAddress := netip.ParseAddr(name)
	if noSubnet != nil && noAddress != nil {
		return name, nil
	}
	entries, err := a.Entries(ctx, false)
	if err != nil {
		return "", err
	}

	for _, e := range entries {
		for _, ep := range e.Lease.Endpoints {
			switch {
			case noSubnet == nil && ep.Subnet == p:
				return e.Lease.Key, nil
			case noAddress == nil && ep.PublicIP == public:
				return "", fmt.Errorf("%s is an address: expected a subnet, such as %s of that host", name, ep.Subnet)
			}
		}
	}
	return "", fmt.Errorf("no lease has %s", name)
}
