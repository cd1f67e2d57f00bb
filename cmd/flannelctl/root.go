package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"flanneld/pkg/version"
)

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "flannelctl",
		Short:         "Operate flanneld, and try it out",
		SilenceUsage:  true, // an error is one line
		SilenceErrors: true, // which main prints
	}
	root.AddCommand(
		newConfigCommand(), newLeasesCommand(), newReserveCommand(), newUnreserveCommand(), newReservationsCommand(), newRevokeCommand(),
		newStatusCommand(), newCheckCommand(), newDoctorCommand(), newCleanupCommand(), newLabCommand(), newVersionCommand(),
	)
	return root
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print version, commit and Go release",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.String())
			return err
		},
	}
}
