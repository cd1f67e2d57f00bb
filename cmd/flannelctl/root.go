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
	addCompletion(root)
	for _, cmd := range root.Commands() {
		refuseUnknown(cmd)
	}
	return root
}

// refuseUnknown makes an unknown command below cmd an error: cobra does so below
// the root alone, and shows help elsewhere as if that had been asked for.
func refuseUnknown(cmd *cobra.Command) {
	if !cmd.HasSubCommands() || cmd.Runnable() {
		return
	}
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// addCompletion adds cobra's command for shells, which comes without examples.
func addCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Example = "  flannelctl completion bash > /etc/bash_completion.d/flannelctl\n" +
				"  source <(flannelctl completion zsh)\n  flannelctl completion fish | source"
		}
	}
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print version, commit and Go release",
		Args:    cobra.NoArgs,
		Example: "  flannelctl version",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.String())
			return err
		},
	}
}
