// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func newDoctorCommand(h host) *cobra.Command {
	var (
		daemon    daemonFlags
		out       output
		preflight bool
	)

	cmd := &cobra.Command{
		Use: "doctor [-- FLAGS-OF-FLANNELD]", Short: "Find problems of this host that affect the network, and name a remedy",
		Long: `Asks the kernel how it carries packets between pods of this host and those of each
peer, and checks peers, the bridges of pods, forwarding, reverse-path filtering, bridge
filtering, other firewalls, Docker's rules, udev's MAC policy, ports, kernel modules, and
public addresses that several leases have. It changes nothing. The exit code is 1 if
there is a serious problem, and 2 if only root can find out.

With --preflight it examines a host on which no flanneld runs yet, for one with the
flags behind -- and the variables of this environment and of flanneld.env: also the
kernel, the store and the rights there, the external interface, the programs for the
firewall, ports that are taken, and routes of other networks to addresses of pods.`,
		Example: "  flannelctl doctor\n  flannelctl doctor -o json\n  flannelctl doctor --preflight\n" +
			"  flannelctl doctor --preflight -- --etcd-endpoints=http://192.0.2.21:2379 --iface=eth1",
		RunE: func(cmd *cobra.Command, args []string) error {
			reports, away := daemon.all(cmd.Context())
			var findings []doctor.Finding
			var unread error // set if something is missing that root may read
			switch {
			case preflight && away == nil:
				return errors.New("a flanneld runs on this host: flannelctl doctor without --preflight examines it")
			case preflight:
				facts, err := h.before(cmd.Context(), args)
				if err != nil {
					return err
				}
				findings = doctor.Examine(facts)
				unread = facts.Unread
			case len(args) > 0:
				return errors.New("the flags of flanneld need --preflight: a running daemon has its own")
			case away != nil:
				unread = away
				if e, ok := errors.AsType[awayError](away); ok {
					away = e.cause
				}
				findings = doctor.Examine(linux.Host(away))
			default:
				networks := gather(cmd.Context(), reports)
				for i, facts := range networks {
					if len(facts.Attached) > 0 { // otherwise it does not count
						networks[i].Silent = silent(cmd.Context(), facts.Report)
					}
				}
				findings = doctor.Examine(networks...)
			}

			err := out.print(cmd.OutOrStdout(), findings, func(w io.Writer) {
				if len(findings) == 0 {
					fmt.Fprintln(w, "nothing found")
				}
				for _, f := range findings {
					weight := "note"
					if f.Serious {
						weight = "PROBLEM"
					}
					fmt.Fprintf(w, "%s\t%s\n\tfix: %s\n", weight, f.Problem, f.Fix)
				}
			})
			switch {
			case err != nil:
				return err
			case slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.Serious }):
				return errors.New("there are problems")
			case unread != nil && os.Geteuid() != 0:
				return openError{errors.New("whether there are problems is not known: run flannelctl doctor as root")}
			}
			return nil
		},
	}

	out.addTo(cmd)
	daemon.addTo(cmd, h)
	cmd.Flags().BoolVar(&preflight, "preflight", false, "examine this host before flanneld is installed or started")
	return cmd
}

// gather returns the facts about this host and each of its networks.
func gather(ctx context.Context, reports []status.Report) (networks []doctor.Facts) {
	for _, r := range reports {
		networks = append(networks, linux.Gather(ctx, r))
	}
	return networks
}

// silent returns the subnets of those of the first peers whose hosts answer, and whose ends of the network do not.
func silent(ctx context.Context, r status.Report) (subnets []netip.Prefix) {
	r.Peers = r.Peers[:min(len(r.Peers), checkAtOnce)] // these need seconds if they do not answer
	for v := range diagnose(ctx, r, toCheck(r, nil)) {
		if v.silent() {
			subnets = append(subnets, v.Subnet)
		}
	}
	return subnets
}
