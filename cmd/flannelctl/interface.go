// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
)

func newInterfaceCommand(h host) *cobra.Command {
	var (
		daemon   daemonFlags
		out      output
		local    localChoice
		noDaemon bool
	)

	cmd := &cobra.Command{
		Use: "interface [-- FLAGS-OF-FLANNELD]", Short: "Show which external interface is chosen, and why",
		Long: `Lists the interfaces of this host with what speaks for and against each as the external
interface, best first. The one that flanneld uses has a star. With --no-daemon it shows what a flanneld
with the flags behind -- and the variables of this environment and of flanneld.env would choose, so that
you can check that before you replace flannel.`,
		Example: "  flannelctl interface\n  flannelctl interface --no-daemon --published 192.0.2.11\n" +
			"  flannelctl interface --no-daemon -- --kube-subnet-mgr --iface-regex='^10\\.'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && !noDaemon {
				return errors.New("the flags of flanneld need --no-daemon: a running daemon has its own")
			}

			var candidates []underlay.Candidate
			var failed error
			if noDaemon {
				o, err := h.startOptions(args)
				if err != nil {
					return err
				}
				candidates, failed = local.choose(cmd.Context(), o.Options)
			} else {
				r, err := daemon.one(cmd.Context())
				if err != nil {
					return fmt.Errorf("%w (without a running daemon use --no-daemon)", err)
				}
				if candidates = r.Interface.Candidates; candidates == nil && r.Interface.Name != "" {
					return fmt.Errorf("this flanneld has chosen %s (%s) and is too old to list all: version %s", r.Interface.Name, r.Interface.Reason, r.Version)
				}
			}

			err := out.print(cmd.OutOrStdout(), candidates, func(w io.Writer) { printCandidates(w, &out, candidates) })
			return cmp.Or(err, failed)
		},
	}

	out.addTo(cmd, "name")
	daemon.addTo(cmd, h)
	f := cmd.Flags()
	f.BoolVar(&noDaemon, "no-daemon", false, "choose as a flanneld would that starts now")
	f.StringSliceVar(&local.published, "published", nil, "addresses that flannel has published for this host: PublicIP in its lease, or the annotation public-ip of its Node")
	f.BoolVar(&local.ipv6, "ipv6", false, "the network has IPv6; the default is what the subnet file says")
	return cmd
}

func printCandidates(w io.Writer, out *output, candidates []underlay.Candidate) {
	t := out.table(w, "\tINTERFACE\tADDRESSES\tFOR\tAGAINST")
	for _, c := range candidates {
		star := " "
		if c.Chosen {
			star = "*"
		}
		against := c.Against
		if c.Never != "" {
			against = []string{"only --iface chooses it: " + c.Never}
		}
		t.row(c.Name, star, c.Name, dash(list(c.Addresses)), dash(strings.Join(c.For, "; ")), dash(strings.Join(against, "; ")))
	}
}

// localChoice is the choice without a daemon.
type localChoice struct {
	published []string
	ipv6      bool
}

// choose returns the interfaces of this host, and an error if a daemon with these options could choose none.
func (l localChoice) choose(ctx context.Context, opts options.Options) ([]underlay.Candidate, error) {
	o := underlay.Options{
		Ifaces: opts.Iface, IfaceRegexes: opts.IfaceRegex, CanReach: opts.IfaceCanReach,
		PublicIP: opts.PublicIP, PublicIPv6: opts.PublicIPv6,
	}

	previous, err := subnetfile.Read(opts.SubnetFile)
	if err != nil {
		return nil, err
	}

	for _, e := range previous.Entries {
		o.Pods = append(o.Pods, e.Subnet)
		o.Families = append(o.Families, prefix.FamilyOf(e.Subnet.Addr()))
	}

	// A daemon that ran here before has written its choice.
	last, err := statefile.Read[struct{ Interface underlay.Interface }](opts.StateDir, opts.StateName())
	if err == nil {
		o.InUse = last.Interface
	}
	if len(o.Families) == 0 { // a boot has removed the subnet file
		for _, a := range o.InUse.Addrs {
			o.Families = append(o.Families, prefix.FamilyOf(a.Local))
		}
	}

	switch {
	case l.ipv6:
		o.Families = []prefix.Family{prefix.IPv4, prefix.IPv6}
	case len(o.Families) == 0:
		o.Families = []prefix.Family{prefix.IPv4}
	}

	for _, text := range l.published {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("--published: %w", err)
		}
		o.Published = append(o.Published, a)
	}

	return underlay.Inspect(ctx, o)
}
