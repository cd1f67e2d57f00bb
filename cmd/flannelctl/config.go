package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"flanneld/cmd/flanneld/app"
	"flanneld/subnet"
	"flanneld/subnet/etcd"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Show, check and change the network configuration"}
	var store storeFlags
	store.addTo(cmd)

	get := &cobra.Command{
		Use: "get", Short: "Print the network configuration as it stands in the store", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withAdmin(store, func(a *etcd.Admin) error {
				text, revision, err := a.Config(cmd.Context())
				if err == nil && revision == 0 {
					err = subnet.ErrNoConfig
				}
				if err == nil {
					_, err = fmt.Fprintln(cmd.OutOrStdout(), strings.TrimSpace(string(text)))
				}
				return err
			})
		},
	}
	validate := &cobra.Command{
		Use: "validate FILE", Short: "Check a network configuration as flanneld would (- reads standard input)", Args: cobra.ExactArgs(1),
		Example: "  flannelctl config validate net-conf.json",
		RunE: func(cmd *cobra.Command, args []string) error {
			_, _, err := readConfig(cmd, args[0])
			return err
		},
	}
	var yes bool
	set := &cobra.Command{
		Use: "set FILE", Short: "Write a network configuration that flanneld will take (- reads standard input)", Args: cobra.ExactArgs(1),
		Long: `Checks the configuration as flanneld would, shows what differs from the one in
the store, and writes it. It asks before a change after which leases that are in
use no longer fit. Running daemons go on with the old configuration until they
are restarted.`,
		Example: "  flannelctl config set net-conf.json\n  echo '{\"Network\":\"10.5.0.0/16\",\"Backend\":{\"Type\":\"vxlan\"}}' | flannelctl config set - --yes",
		RunE: func(cmd *cobra.Command, args []string) error {
			text, cfg, err := readConfig(cmd, args[0])
			if err != nil {
				return err
			}
			return withAdmin(store, func(a *etcd.Admin) error {
				return setConfig(cmd, a, change{text: text, cfg: cfg, yes: yes, piped: args[0] == "-"})
			})
		},
	}
	set.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.AddCommand(get, set, validate)
	return cmd
}

// withAdmin opens the store for f.
func withAdmin(store storeFlags, f func(*etcd.Admin) error) error {
	a, err := store.admin()
	if err != nil {
		return err
	}
	return errors.Join(f(a), a.Close())
}

// readConfig reads and checks a configuration, and prints the warnings.
func readConfig(cmd *cobra.Command, path string) (text []byte, cfg subnet.Config, err error) {
	if path == "-" {
		text, err = io.ReadAll(cmd.InOrStdin())
	} else {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, cfg, err
	}
	cfg, warnings, err := app.ValidateConfig(text)
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
	}
	return text, cfg, err
}

// change is a new configuration.
type change struct {
	text       []byte
	cfg        subnet.Config
	yes, piped bool
}

func setConfig(cmd *cobra.Command, a *etcd.Admin, c change) error {
	out := cmd.OutOrStdout()
	old, revision, err := a.Config(cmd.Context())
	if err != nil {
		return err
	}
	lines := difference(old, c.text)
	if revision != 0 && len(lines) == 0 {
		_, err := fmt.Fprintln(out, "nothing changes")
		return err
	}
	for _, l := range lines {
		fmt.Fprintln(out, l)
	}
	stranded, err := strandedBy(cmd.Context(), a, c.cfg)
	if err != nil {
		return err
	}
	for _, s := range stranded {
		fmt.Fprintln(out, s)
	}
	if len(stranded) > 0 && !c.yes {
		if c.piped {
			return fmt.Errorf("%d leases would no longer fit: add --yes if that is meant", len(stranded))
		}
		fmt.Fprintf(out, "%d leases no longer fit. Write it nevertheless? [y/N] ", len(stranded))
		answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
		if a := strings.ToLower(strings.TrimSpace(answer)); a != "y" && a != "yes" {
			return errors.New("nothing was written")
		}
	}
	if err := a.SetConfig(cmd.Context(), c.text, revision); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "written; running daemons take it when they are restarted")
	return err
}

// strandedBy says which leases do not fit cfg, a line each.
func strandedBy(ctx context.Context, a *etcd.Admin, cfg subnet.Config) ([]string, error) {
	entries, err := a.Entries(ctx, false)
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, e := range entries {
		if why := misfit(e.Lease, cfg); e.Err == nil && why != "" {
			lines = append(lines, fmt.Sprintf("lease %s: %s", e.Lease.Key, why))
		}
	}
	return lines, nil
}

// misfit says why a lease does not fit cfg; empty if it does.
func misfit(l subnet.Lease, cfg subnet.Config) string {
	for _, n := range cfg.Networks {
		e, ok := l.Endpoint(n.Family())
		if !ok {
			return fmt.Sprintf("it has no %s subnet", n.Family())
		}
		if pool, err := n.Pool(); err == nil && !pool.Contains(e.Subnet) {
			return fmt.Sprintf("%s is not one of the subnets from %s", e.Subnet, pool)
		}
	}
	if len(l.Endpoints) > len(cfg.Networks) {
		return "it has subnets of a family that is not enabled"
	}
	return ""
}

// difference lists the keys that differ between two JSON objects, by path.
func difference(old, text []byte) []string {
	before, after := map[string]string{}, map[string]string{}
	flatten(old, before)
	flatten(text, after)
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(after)) {
		was, known := before[key]
		switch {
		case !known:
			lines = append(lines, fmt.Sprintf("+ %s: %s", key, after[key]))
		case was != after[key]:
			lines = append(lines, fmt.Sprintf("~ %s: %s (was %s)", key, after[key], was))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(before)) {
		if _, stays := after[key]; !stays {
			lines = append(lines, fmt.Sprintf("- %s: %s", key, before[key]))
		}
	}
	return lines
}

// flatten puts the leaves of a JSON value into m, by path. What is not JSON is
// one leaf.
func flatten(text []byte, m map[string]string) {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		if len(text) > 0 {
			m["(not JSON)"] = string(text)
		}
		return
	}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		if o, ok := v.(map[string]any); ok {
			for k, child := range o {
				walk(strings.TrimPrefix(path+"."+k, "."), child)
			}
			return
		}
		leaf, _ := json.Marshal(v) // of what was just read
		m[path] = string(leaf)
	}
	walk("", v)
}
