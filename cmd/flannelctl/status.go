// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func newStatusCommand(h host) *cobra.Command {
	var (
		daemon daemonFlags
		out    output
		where  string
		all    bool
	)

	cmd := &cobra.Command{
		Use: "status", Short: "Show the status of the daemon on this host or another one", Args: cobra.NoArgs,
		Long: `Shows the status of this host's flanneld, through its local socket, or of another
one, at the address of its --statusz-address. Peers without a problem are only
counted unless --peers is given. The status of this host also contains the problems that
flannelctl doctor finds. The exit code is 1 if the daemon is not ready, and 2 if it
cannot be asked.`,
		Example: "  flannelctl status\n  flannelctl status --peers\n  flannelctl status --url http://192.0.2.12:8287 -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			client := status.Client(daemon.socket)
			base := socketURL
			if where != "" {
				if u, err := url.Parse(where); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
					return fmt.Errorf("--url %q is invalid: expected a URL such as http://host:port", where)
				}
				// Another host must not make this one send requests to arbitrary addresses.
				client = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
				base = where
			}

			r, err := fetch(cmd.Context(), client, base, daemon.network)
			if err != nil {
				return err
			}
			if len(r.Networks) > 0 {
				return printOverview(cmd.OutOrStdout(), r, &out)
			}

			err = out.print(cmd.OutOrStdout(), r, func(w io.Writer) {
				var findings []doctor.Finding
				if where == "" {
					findings = examine(cmd.Context(), []status.Report{r}, nil, nil)
				}
				printStatus(w, r, findings, all)
			})
			if err != nil {
				return err
			}
			if !r.Ready {
				return errNotReady
			}
			return nil
		},
	}

	out.addTo(cmd)
	daemon.addTo(cmd, h)
	cmd.Flags().StringVar(&where, "url", "", "address of another daemon, as http://host:port")
	cmd.Flags().BoolVar(&all, "peers", false, "list every peer and its kernel objects")
	cmd.MarkFlagsMutuallyExclusive("socket", "url")
	return cmd
}

func printStatus(w io.Writer, r status.Report, findings []doctor.Finding, all bool) {
	row := func(name string, value ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, strings.TrimSpace(fmt.Sprintln(value...)))
	}

	state := "ready"
	if !r.Ready {
		state = "not ready"
	}

	row("flanneld", state+", version", r.Version)
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
		row("location", cmp.Or(l.Name, "none")+":", fmt.Sprintf("sends to %d peers by %s, to %d by %s", l.ByInside, l.Inside, l.ByBetween, l.Between))
		if r.Network.NextBackendType == "" { // during a migration, Waiting is about the next backend
			printWaiting(row, r.Peers, all)
		}
	}

	row("datastore", r.Datastore.Kind, connection(r.Datastore))
	row("firewall", firewall(r.Firewall))
	row("kernel", kernel(r))
	counts := map[status.State]int{}
	for _, p := range r.Peers {
		counts[p.State]++
	}
	row("peers", numbers(counts))

	printNarrow(row, r.Peers)
	if r.Paths != nil {
		printPaths(w, row, *r.Paths, all)
	}

	header := false
	for _, p := range r.Peers {
		if !all && p.State == status.InPlace {
			continue
		}
		if !header {
			fmt.Fprintln(w, "\nSUBNET\tPUBLIC IP\tTYPE\tSTATE\tERROR")
			header = true
		}

		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", cmp.Or(list(p.Subnets), p.Key), dash(list(p.PublicIPs)), dash(p.Type), p.State, p.Error)
		for _, o := range p.Objects {
			if missing := !o.Present; all || missing {
				fmt.Fprintf(w, "  %s%s\n", o.Text, map[bool]string{true: "  MISSING"}[missing])
			}
		}
	}
}

// printOverflow prints to how many peers this host sends by the cloud and to how many by the tunnel.
// Then it lists the peers that need the tunnel, with the reason.
func printOverflow(row func(string, ...any), o status.Overflow, peers []status.Peer, all bool) {
	row("overflow", fmt.Sprintf("sends to %d peers by the cloud, to %d by %s", o.ByCloud, o.ByTunnel, o.Tunnel))
	if o.Problem != "" {
		row("", o.Problem)
	}
	printWaiting(row, peers, all)
}

// printWaiting lists the peers that the preferred backend does not serve, with the backend that serves
// them and the reason. Unless all is set, it lists only the first ten.
func printWaiting(row func(string, ...any), peers []status.Peer, all bool) {
	const some = 10
	shown := 0
	for _, p := range peers {
		switch {
		case p.Waiting == "":
		case all || shown < some:
			shown++
			row("", list(p.Subnets), "by", p.Backend+":", p.Waiting)
		case shown == some:
			shown++
			row("", "and others: see --peers")
		}
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

// printPaths prints the number of paths with each result, and then a table of the paths in the report,
// which are the worst ones. Unless all is set, the table contains only those that do not work.
func printPaths(w io.Writer, row func(string, ...any), p status.Paths, all bool) {
	row("paths", numbers(p.Results))
	header := false
	for _, one := range p.Worst {
		if one.OK && !all {
			continue
		}
		if !header {
			fmt.Fprintln(w, "\nPATH TO\tPUBLIC IP\tRESULT\tRTT\tADVICE")
			header = true
		}

		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", one.Subnet, one.PublicIP, one.Result(), dash(one.RoundTrip()), dash(one.Text()))
	}
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
		return "until " + r.Lease.Expires.UTC().Format(time.RFC3339) + " unless renewed"
	}
}

func connection(d status.Datastore) string {
	s := "connected"
	if !d.Connected {
		s = "away"
	}
	if !d.Since.IsZero() {
		s += " since " + d.Since.UTC().Format(time.RFC3339)
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
	return "in order at " + c.LastGood.UTC().Format(time.RFC3339)
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
		s += "; checked at " + r.Kernel.LastSync.UTC().Format(time.RFC3339)
	}
	if r.Kernel.Error != "" {
		s += "; " + r.Kernel.Error
	}
	return strings.TrimPrefix(s, "; ")
}
