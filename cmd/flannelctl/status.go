// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func newStatusCommand(h host) *cobra.Command {
	var (
		daemon  daemonFlags
		out     output
		where   string
		all     bool
		brief   bool
		waits   bool
		timeout time.Duration
	)

	cmd := &cobra.Command{
		Use: "status", Short: "Show the status of the daemon on this host or another one", Args: cobra.NoArgs,
		Long: `Shows the status of this host's flanneld, through its local socket, or of another
one, at the address of its --statusz-address. Peers without a problem are only
counted unless --peers is given. With -o name only their leases are named. The status of
this host also contains the problems that flannelctl doctor finds. With --wait the command
ends when the daemon is ready, or after --timeout. The exit code is 1 if the daemon is not
ready, and 2 if it cannot be asked.`,
		Example: "  flannelctl status\n  flannelctl status --peers -o wide\n  flannelctl status --wait --timeout=2m --brief\n" +
			"  flannelctl status --url http://192.0.2.12:8287 -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			client := status.Client(daemon.socket)
			base := socketURL
			if where != "" {
				if u, err := url.Parse(where); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
					return openError{fmt.Errorf("--url %q is invalid: expected a URL such as http://host:port", where)}
				}
				// Another host must not make this one send requests to arbitrary addresses.
				client = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
				base = where
			}

			if timeout <= 0 {
				return openError{fmt.Errorf("--timeout %s is invalid: expected a time above zero", timeout)}
			}
			var r status.Report
			var err error
			ask := func(ctx context.Context) (status.Report, error) { return fetch(ctx, client, base, daemon.network) }
			if waits {
				r, err = untilReady(cmd, timeout, ask)
			} else {
				r, err = ask(cmd.Context())
			}
			switch {
			case err != nil:
				return err
			case brief:
				_, err = fmt.Fprintln(cmd.OutOrStdout(), summaryOf(r))
			case len(r.Networks) > 0:
				err = printOverview(cmd.OutOrStdout(), r, &out)
				if where == "" && (out.format == "table" || out.format == "wide") {
					printProblems(cmd, daemon)
				}
				return err
			default:
				err = out.print(cmd.OutOrStdout(), r, func(w io.Writer) {
					if out.format != "name" {
						var findings []doctor.Finding
						if where == "" {
							findings = doctor.Examine(linux.Gather(cmd.Context(), r))
						}
						printStatus(w, r, findings, all)
						if r.Paths != nil {
							printPaths(w, &out, r.Paths.Worst, all)
						}
					}
					printPeers(w, &out, r.Peers, all)
				})
			}
			if err == nil && !r.Ready {
				err = errNotReady
			}
			return err
		},
	}

	out.addTo(cmd, "wide", "name")
	daemon.addTo(cmd, h)
	cmd.Flags().StringVar(&where, "url", "", "address of another daemon, as http://host:port")
	cmd.Flags().BoolVar(&all, "peers", false, "list every peer and its kernel objects")
	cmd.Flags().BoolVar(&brief, "brief", false, "print one line: the state, and how many peers and paths are in which state")
	cmd.Flags().BoolVar(&waits, "wait", false, "wait until the daemon is ready")
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "with --wait: time after which the command gives up")
	cmd.MarkFlagsMutuallyExclusive("socket", "url")
	cmd.MarkFlagsMutuallyExclusive("brief", "output")
	cmd.MarkFlagsMutuallyExclusive("brief", "peers")
	return cmd
}

// printProblems prints the problems of pods of all networks.
func printProblems(cmd *cobra.Command, daemon daemonFlags) {
	reports, err := daemon.all(cmd.Context())
	if err != nil {
		return // the daemon has just ended
	}
	for _, f := range doctor.Examine(gather(cmd.Context(), reports)...) {
		if f.Word != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "problem: %s (see flannelctl doctor)\n", f.Problem)
		}
	}
}

// readyPause is the time between two questions with --wait.
const readyPause = time.Second

// untilReady asks a daemon until it is ready or the time is over, and returns its last answer. It prints what it waits
// for.
func untilReady(cmd *cobra.Command, limit time.Duration, ask func(context.Context) (status.Report, error)) (r status.Report, err error) {
	ctx, cancel := context.WithTimeout(cmd.Context(), limit)
	defer cancel()
	err = awayError{fmt.Errorf("no answer within %s", limit)}
	_ = follow(ctx, cmd.ErrOrStderr(), readyPause, func() string {
		now, failed := ask(ctx)
		if failed != nil && ctx.Err() != nil {
			return "" // the last answer says more than the end of this question
		}
		r = now
		err = failed
		unknown := awayError{}
		switch {
		case errors.As(err, &unknown):
			return "waiting until flanneld answers: " + unknown.cause.Error()
		case err != nil || r.Ready:
			return ""
		}
		return "waiting until flanneld is ready: " + strings.Join(r.Reasons, "; ")
	})
	return r, cmp.Or(cmd.Context().Err(), err)
}

// summaryOf returns the report in one line.
func summaryOf(r status.Report) string {
	s := stateOf(r)
	if len(r.Reasons) > 0 {
		s += ": " + strings.Join(r.Reasons, "; ")
	}
	if len(r.Networks) > 0 {
		counts := map[string]int{}
		for _, n := range r.Networks {
			counts[n.Phase]++
		}
		return s + "; networks: " + numbers(counts)
	}
	s += "; peers: " + numbers(r.PeerStates())
	if r.Paths != nil {
		s += "; paths: " + numbers(r.Paths.Results)
	}
	return s
}

func stateOf(r status.Report) string {
	if r.Ready {
		return "ready"
	}
	return "not ready"
}

func printStatus(w io.Writer, r status.Report, findings []doctor.Finding, all bool) {
	row := func(name string, value ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, strings.TrimSpace(fmt.Sprintln(value...)))
	}

	row("flanneld", stateOf(r)+", version", r.Version)
	for _, reason := range r.Reasons {
		row("", reason)
	}

	for _, f := range findings {
		if f.Word != "" {
			row("problem", f.Problem+" (see flannelctl doctor)")
		}
	}
	if p := r.Network.Phase; p != "" && p != "serving" {
		row("phase", p)
	}
	if r.RestartNeeded != "" {
		row("restart needed", r.RestartNeeded)
	}
	if r.ConfigRejected != "" {
		row("configuration rejected", r.ConfigRejected)
	}

	row("subnet", dash(list(r.Lease.Subnets)))
	row("lease", dash(r.Lease.Key), validity(r))
	var addresses []string
	for _, a := range r.Interface.Addresses {
		addresses = append(addresses, a.Public.String())
	}

	row("interface", r.Interface.Name, strings.Join(addresses, ","), "mtu", r.Interface.MTU, "("+r.Interface.Reason+")")
	row("backend", strings.TrimSpace(r.Network.BackendType+" "+r.Network.Mode)+", network", list(r.Network.Prefixes)+", mtu", r.Network.MTU)
	if next := r.Network.NextBackendType; next != "" {
		moved := 0
		for _, p := range r.Peers {
			if p.Waiting == "" {
				moved++
			}
		}
		row("migration", fmt.Sprintf("to %s: sends to %d of %d peers by it", next, moved, len(r.Peers)))
	}
	if p := r.Network.Pool; p != nil {
		row("pool", fmt.Sprintf("%d free, %d leased, %d reserved", p.Free, p.Leased, p.Reserved))
	}
	if c := r.Network.Cloud; c != nil {
		row("cloud", goodCloud(*c))
		for _, route := range c.Routes {
			row("", route.String()+map[bool]string{false: "  MISSING"}[route.Present])
		}
		if c.Overflow != nil {
			printOverflow(row, *c.Overflow, r.Peers, all)
		}
	}
	if l := r.Network.Location; l != nil {
		row("location", cmp.Or(l.Name, "none")+":", fmt.Sprintf("sends to %s by %s, to %d by %s", peersOf(l.ByInside), l.Inside, l.ByBetween, l.Between))
		if r.Network.NextBackendType == "" { // during a migration, Waiting is about the next backend
			printWaiting(row, r.Peers, all)
		}
	}

	row("datastore", r.Datastore.Kind, connection(r.Datastore))
	row("firewall", firewall(r.Firewall))
	row("kernel", kernel(r))
	row("peers", numbers(r.PeerStates()))
	printNarrow(row, r.Peers)
	if r.Paths != nil {
		row("paths", numbers(r.Paths.Results))
	}
}

// printPeers prints a table of the peers, with their kernel objects. Unless all is set, the table contains
// only those with a problem.
func printPeers(w io.Writer, out *output, peers []status.Peer, all bool) {
	peers = slices.DeleteFunc(slices.Clone(peers), func(p status.Peer) bool {
		return !all && (p.State == status.InPlace || p.State == status.Reserved)
	})
	if len(peers) == 0 {
		return
	}
	t := out.table(w, "\nSUBNET\tPUBLIC IP\tTYPE\tSTATE\t+KEY\t+BACKEND\t+CHANGED\tERROR")
	for _, p := range peers {
		t.row(p.Key, cmp.Or(list(p.Subnets), p.Key), dash(list(p.PublicIPs)), dash(p.Type), p.State, p.Key, dash(p.Backend), moment(p.Changed), p.Error)
		for _, o := range p.Objects {
			if missing := !o.Present; out.format != "name" && (all || missing) {
				fmt.Fprintf(w, "  %s%s\n", o.Text, map[bool]string{true: "  MISSING"}[missing])
			}
		}
	}
}

// printOverflow prints to how many peers this host sends by the cloud and to how many by the tunnel.
// Then it lists the peers that need the tunnel, with the reason.
func printOverflow(row func(string, ...any), o status.Overflow, peers []status.Peer, all bool) {
	row("overflow", fmt.Sprintf("sends to %s by the cloud, to %d by %s", peersOf(o.ByCloud), o.ByTunnel, o.Tunnel))
	if o.Problem != "" {
		row("", o.Problem)
	}
	printWaiting(row, peers, all)
}

func peersOf(n int) string {
	if n == 1 {
		return "1 peer"
	}
	return fmt.Sprint(n, " peers")
}

// printWaiting lists the peers that the preferred backend does not serve, with the backend that serves
// them and the reason. Unless all is set, it lists only the first ten.
func printWaiting(row func(string, ...any), peers []status.Peer, all bool) {
	const some = 10
	waiting := slices.DeleteFunc(slices.Clone(peers), func(p status.Peer) bool { return p.Waiting == "" })
	for i, p := range waiting {
		if i == some && !all {
			row("", "and others: see --peers")
			return
		}
		row("", list(p.Subnets), "by", p.Backend+":", p.Waiting)
	}
}

// printNarrow lists the peers to which only packets smaller than the MTU pass, with the largest size.
func printNarrow(row func(string, ...any), peers []status.Peer) {
	name := "narrow paths"
	for _, p := range peers {
		for _, s := range p.Subnets {
			if mtu := p.PathMTU[s]; mtu > 0 {
				row(name, s, "by", list(p.PublicIPs), "mtu", mtu)
				name = ""
			}
		}
	}
}

// printPaths prints a table of the paths in the report, which are the worst ones. Unless all is set, the table contains
// only those that do not work.
func printPaths(w io.Writer, out *output, worst []paths.Result, all bool) {
	worst = slices.DeleteFunc(slices.Clone(worst), func(p paths.Result) bool { return !all && p.OK })
	if len(worst) == 0 {
		return
	}
	t := out.table(w, "\nPATH TO\tPUBLIC IP\tRESULT\tRTT\t+KEY\t+LARGEST\t+SINCE\t+CHECKED\tADVICE")
	for _, p := range worst {
		t.row("", p.Subnet, p.PublicIP, p.Result(), dash(p.RoundTrip()), p.Peer, number(p.Largest), moment(p.Since), moment(p.Checked), dash(p.Text()))
	}
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// numbers describes how many there are of each kind.
func numbers[K ~string](counts map[K]int) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		if n := counts[kind]; n > 0 {
			parts = append(parts, fmt.Sprint(n, " ", kind))
		}
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}

func validity(r status.Report) string {
	switch {
	case r.Lease.Permanent:
		return "(permanent)"
	case r.Lease.Expires.IsZero():
		return ""
	default:
		return "until " + moment(r.Lease.Expires) + " unless renewed"
	}
}

func connection(d status.Datastore) string {
	s := "connected"
	if !d.Connected {
		s = "away"
	}
	if !d.Since.IsZero() {
		s += " since " + moment(d.Since)
	}
	if d.Error != "" {
		s += ": " + d.Error
	}
	return s
}

func goodCloud(c status.Cloud) string {
	if c.LastGood.IsZero() {
		return "not in order since the start"
	}
	return "in order at " + moment(c.LastGood)
}

func firewall(f status.Firewall) string {
	switch {
	case f.Error == "":
		return cmp.Or(f.Kind, "no rules asked for")
	case f.Kind == "":
		return f.Error
	default:
		return f.Kind + ": " + f.Error
	}
}

func kernel(r status.Report) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(r.Kernel.Objects)) {
		c := r.Kernel.Objects[kind]
		parts = append(parts, fmt.Sprintf("%s %d/%d", kind, c.Present, c.Wanted))
	}

	s := strings.Join(parts, ", ")
	if !r.Kernel.LastSync.IsZero() {
		s += "; checked at " + moment(r.Kernel.LastSync)
	}
	if r.Kernel.Error != "" {
		s += "; " + r.Kernel.Error
	}
	return strings.TrimPrefix(s, "; ")
}
