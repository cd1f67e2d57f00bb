// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/report/status"
)

func newNetworksCommand(h host) *cobra.Command {
	var (
		daemon daemonFlags
		out    output
	)

	cmd := &cobra.Command{
		Use: "networks", Short: "List the networks of this host's daemon", Args: cobra.NoArgs,
		Long: `Lists the networks of a flanneld that serves several: what each does, the reason if
it is not ready or was refused, and the subnet of this host. The exit code is 1 if
a network is not ready.`,
		Example: "  flannelctl networks\n  flannelctl networks -o name | xargs -n 1 flannelctl status --network",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := daemon.report(cmd.Context())
			if err != nil {
				return err
			}
			if r.Network.SubnetFile != "" {
				return fmt.Errorf("this daemon serves one network: see flannelctl status")
			}
			return printOverview(cmd.OutOrStdout(), r, &out)
		},
	}

	out.addTo(cmd, "name")
	daemon.addSocketTo(cmd, h)
	return cmd
}

// printOverview prints the networks of a daemon that serves several. It returns
// errNotReady if the daemon is not ready.
func printOverview(w io.Writer, r status.Report, out *output) error {
	networks := r.Networks
	if networks == nil {
		networks = []status.NetworkSummary{}
	}

	err := out.print(w, networks, func(w io.Writer) {
		t := out.table(w, "NETWORK\tPHASE\tBACKEND\tPREFIXES\tSUBNET\tREASON")
		for _, n := range networks {
			t.row(n.Name, n.Name, n.Phase, dash(n.BackendType), dash(list(n.Prefixes)), dash(list(n.Subnets)), dash(strings.Join(n.Reasons, "; ")))
		}
	})
	if err == nil && !r.Ready {
		err = errNotReady
	}
	return err
}
