// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/version"
)

func newRoot(h host) *cobra.Command {
	root := &cobra.Command{
		Use:           "flannelctl",
		Short:         "Operate flanneld",
		SilenceUsage:  true, // an error is one line
		SilenceErrors: true, // main prints the error
	}

	root.AddCommand(
		newConfigCommand(h), newMigrateCommand(h), newLeasesCommand(h), newReserveCommand(h), newUnreserveCommand(h), newReservationsCommand(h), newRevokeCommand(h), newRolesCommand(h),
		newStatusCommand(h), newNetworksCommand(h), newCheckCommand(h), newMeshCommand(h), newConnectivityCommand(h), newDoctorCommand(h), newInterfaceCommand(h), newSysdumpCommand(h), newCleanupCommand(), newVersionCommand(), newProbeCommand(),
	)

	addCompletion(root)
	checkArguments(root)
	addHelp(root)
	root.SetFlagErrorFunc(wrongUsage)
	return root
}

func wrongUsage(cmd *cobra.Command, err error) error {
	return openError{fmt.Errorf("%w: the usage is %s", err, cmd.UseLine())}
}

// checkArguments makes cmd and its subcommands name their usage when they get wrong arguments, and return an error if they
// are called with an unknown subcommand. cobra does that only for the root, and prints the help for other commands.
func checkArguments(cmd *cobra.Command) {
	if cmd.HasParent() && cmd.HasSubCommands() && !cmd.Runnable() {
		cmd.Args = cobra.NoArgs
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return wrongUsage(cmd, err)
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		checkArguments(sub)
	}
}

// addCompletion adds cobra's command for shell completion, with examples.
func addCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	if cmd, _, err := root.Find([]string{"completion"}); err == nil {
		cmd.Example = "  flannelctl completion bash > /etc/bash_completion.d/flannelctl\n" +
			"  source <(flannelctl completion zsh)\n  flannelctl completion fish | source"
	}
}

// addHelp adds cobra's command for help. For an unknown command it returns an error: cobra prints the usage where the
// output goes, with exit code 0.
func addHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"})
	show := help.Run
	help.Run = nil
	help.RunE = func(cmd *cobra.Command, args []string) error {
		if _, _, err := root.Find(args); err != nil {
			return wrongUsage(cmd, fmt.Errorf("unknown command %q", args[0]))
		}
		show(cmd, args)
		return nil
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
