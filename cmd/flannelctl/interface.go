// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/pkg/underlay"
)

func newInterfaceCommand() *cobra.Command {
	var (
		network    *string
		out        output
		socket     string
		local      localChoice
		withoutOne bool
	)
	cmd := &cobra.Command{
		Use: "interface", Short: "Show which external interface is chosen, and why", Args: cobra.NoArgs,
		Long: `Lists the interfaces of this host with what speaks for and against each as the external
interface, best first. The one that flanneld uses has a star. Without a running daemon it shows what
flanneld would choose, so that you can check that before you replace flannel.`,
		Example: "  flannelctl interface\n  flannelctl interface --no-daemon --published 192.0.2.11\n  flannelctl interface --no-daemon --iface-regex '^10\\.'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var failed error
			var candidates []status.Candidate
			if !withoutOne {
				r, err := fetchOne(cmd.Context(), status.Client(socket), *network)
				if err != nil {
					return fmt.Errorf("%w (without a running daemon use --no-daemon)", err)
				}
				candidates = r.Interface.Candidates
			} else {
				candidates, failed = local.candidates(cmd.Context())
			}
			err := out.print(cmd.OutOrStdout(), candidates, func(w io.Writer) { printCandidates(w, candidates) })
			if err == nil {
				err = failed
			}
			return err
		},
	}
	out.addTo(cmd)
	network = addNetworkTo(cmd)
	f := cmd.Flags()
	f.StringVar(&socket, "socket", status.SocketPath(defaultSubnetFile), "local socket of the daemon")
	f.BoolVar(&withoutOne, "no-daemon", false, "choose as a daemon would that starts now with the following flags")
	f.StringArrayVar(&local.Ifaces, "iface", nil, "as for flanneld")
	f.StringArrayVar(&local.IfaceRegexes, "iface-regex", nil, "as for flanneld")
	f.StringVar(&local.CanReach, "iface-can-reach", "", "as for flanneld")
	f.StringVar(&local.publicIP, "public-ip", "", "as for flanneld")
	f.StringVar(&local.publicIPv6, "public-ipv6", "", "as for flanneld")
	f.StringSliceVar(&local.published, "published", nil, "addresses that flannel has published for this host: PublicIP in its lease, or the annotation public-ip of its Node")
	f.StringVar(&local.subnetFile, "subnet-file", defaultSubnetFile, "as for flanneld")
	f.StringVar(&local.stateDir, "state-dir", "/var/lib/flannel", "as for flanneld")
	f.BoolVar(&local.ipv6, "ipv6", false, "the network has IPv6; the default is what the subnet file says")
	return cmd
}

const defaultSubnetFile = "/run/flannel/subnet.env"

func printCandidates(w io.Writer, candidates []status.Candidate) {
	fmt.Fprintln(w, "\tINTERFACE\tADDRESSES\tFOR\tAGAINST")
	for _, c := range candidates {
		star := " "
		if c.Chosen {
			star = "*"
		}
		against := c.Against
		if c.Never != "" {
			against = []string{"only --iface chooses it: " + c.Never}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", star, c.Name, dash(list(c.Addresses)), dash(strings.Join(c.For, "; ")), dash(strings.Join(against, "; ")))
	}
}

// localChoice is the choice without a daemon.
type localChoice struct {
	underlay.Options
	publicIP, publicIPv6 string
	published            []string
	subnetFile, stateDir string
	ipv6                 bool
}

// candidates returns the interfaces of this host, and an error if none can be chosen.
func (l localChoice) candidates(ctx context.Context) ([]status.Candidate, error) {
	o := l.Options
	previous, err := subnetfile.Read(l.subnetFile)
	if err != nil {
		return nil, err
	}
	for _, e := range previous.Entries {
		o.Pods = append(o.Pods, e.Subnet)
		o.Families = append(o.Families, prefix.FamilyOf(e.Subnet.Addr()))
	}
	switch {
	case l.ipv6:
		o.Families = []prefix.Family{prefix.IPv4, prefix.IPv6}
	case len(o.Families) == 0:
		o.Families = []prefix.Family{prefix.IPv4}
	}
	for flag, to := range map[string]*netip.Addr{l.publicIP: &o.PublicIP, l.publicIPv6: &o.PublicIPv6} {
		if flag == "" {
			continue
		}
		if *to, err = netip.ParseAddr(flag); err != nil {
			return nil, fmt.Errorf("--public-ip: %w", err)
		}
	}
	for _, text := range l.published {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("--published: %w", err)
		}
		o.Published = append(o.Published, a)
	}
	// A daemon that ran here before has written its choice.
	last, err := state.Read[struct{ Interface underlay.Interface }](l.stateDir, "flanneld")
	if err == nil {
		o.InUse = last.Interface
	}
	all, _, err := underlay.Inspect(ctx, o)
	var candidates []status.Candidate
	for _, c := range all {
		candidates = append(candidates, status.Candidate(c))
	}
	return candidates, err
}
