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
			default:
				unread = away
				findings = examine(cmd.Context(), reports, away, func(r status.Report) []netip.Prefix {
					r.Peers = r.Peers[:min(len(r.Peers), checkAtOnce)] // these need seconds if they do not answer
					var silent []netip.Prefix
					for v := range diagnose(cmd.Context(), r, toCheck(r, nil)) {
						if v.silent() {
							silent = append(silent, v.Subnet)
						}
					}
					return silent
				})
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

// examine returns the problems of this host. If away is not nil it says why no daemon answers, and there are no
// reports. silent, which may be nil, returns the subnets of peers that do not answer; it is called only if that counts.
func examine(ctx context.Context, reports []status.Report, away error, silent func(status.Report) []netip.Prefix) []doctor.Finding {
	if away != nil {
		if e, ok := errors.AsType[awayError](away); ok {
			away = e.cause
		}
		return doctor.Examine(linux.Host(away))
	}
	var networks []doctor.Facts
	for _, r := range reports {
		facts := linux.Gather(ctx, r)
		if silent != nil && len(facts.Attached) > 0 {
			facts.Silent = silent(r)
		}
		networks = append(networks, facts)
	}
	return doctor.Examine(networks...)
}
