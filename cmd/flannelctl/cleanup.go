package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"flanneld/cmd/flanneld/app"
	"flanneld/pkg/status"
)

func newCleanupCommand() *cobra.Command {
	c := app.Cleanup{}
	var socket string
	cmd := &cobra.Command{
		Use: "cleanup", Short: "Remove what flanneld has left on this host", Args: cobra.NoArgs,
		Long: `Removes devices, routes, traffic rules, the state directory's files and the subnet
file, going by the state files: what is somebody else's stays. Without --yes it
only says what it would remove. It refuses while flanneld runs. Without state files
devices and routes stay, and it says so. The lease stays in the store: flannelctl
revoke deletes it.`,
		Example: "  flannelctl cleanup\n  flannelctl cleanup --yes",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if socket == "" {
				socket = status.SocketPath(c.SubnetFile)
			}
			if _, err := fetch(cmd.Context(), status.Client(socket), "http://flanneld"); err == nil {
				return fmt.Errorf("%w (it answers at %s)", app.ErrRuns, socket)
			}
			c.Out = cmd.OutOrStdout()
			return c.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&c.StateDir, "state-dir", "/var/lib/flannel", "state directory of flanneld")
	cmd.Flags().StringVar(&c.SubnetFile, "subnet-file", "/run/flannel/subnet.env", "subnet file of flanneld")
	cmd.Flags().StringVar(&socket, "socket", "", "local socket of the daemon; without it: beside the subnet file")
	cmd.Flags().BoolVar(&c.Yes, "yes", false, "remove it")
	return cmd
}
