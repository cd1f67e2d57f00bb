// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func newCleanupCommand() *cobra.Command {
	c := daemon.Cleanup{}
	cmd := &cobra.Command{
		Use: "cleanup", Short: "Remove what flanneld has left on this host", Args: cobra.NoArgs,
		Long: `Removes the devices, routes, traffic rules and files of flanneld: those that the
state files name. Objects of other programs stay. Without --yes it only lists what
it would remove. It refuses to run while flanneld runs. Without state files it
cannot remove devices and routes, and says so. The lease stays in the store:
flannelctl revoke deletes it.`,
		Example: "  flannelctl cleanup\n  flannelctl cleanup --yes",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Socket == "" {
				c.Socket = status.SocketPath(c.SubnetFile)
			}
			running := daemonFlags{socket: c.Socket}
			if _, err := running.report(cmd.Context()); err == nil {
				return fmt.Errorf("%w (it answers at %s)", daemon.ErrRuns, c.Socket)
			}
			var err error
			if c.Backends, err = allBackends(); err != nil {
				return err
			}
			c.Out = cmd.OutOrStdout()
			return c.Run(cmd.Context())
		},
	}

	cmd.Flags().StringVar(&c.StateDir, "state-dir", "/var/lib/flannel", "state directory of flanneld")
	cmd.Flags().StringVar(&c.SubnetFile, "subnet-file", "/run/flannel/subnet.env", "subnet file of flanneld")
	cmd.Flags().StringVar(&c.SubnetDir, "subnet-dir", "/run/flannel/networks", "directory of the subnet files of several networks")
	cmd.Flags().StringVar(&c.Socket, "socket", "", "local socket of the daemon (default: beside the subnet file)")
	cmd.Flags().BoolVar(&c.Yes, "yes", false, "remove instead of only listing")
	return cmd
}
