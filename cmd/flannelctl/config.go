// SPDX-License-Identifier: Apache-2.0

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

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

func newConfigCommand(h host) *cobra.Command {
	store := storeFlags{host: h}
	cmd := &cobra.Command{
		Use: "config", Short: "Show, check and change the network configuration",
		Example: "  flannelctl config get\n  flannelctl config validate net-conf.json\n  flannelctl config set net-conf.json",
	}
	store.addConfigTo(cmd)
	cmd.AddCommand(newConfigGetCommand(&store), newConfigSetCommand(&store), newConfigValidateCommand(&store))
	return cmd
}

func newConfigGetCommand(store *storeFlags) *cobra.Command {
	return &cobra.Command{
		Use: "get", Short: "Print the network configuration in the store", Args: cobra.NoArgs,
		Long: `Prints the network configuration in the store. On Kubernetes that is the file of
--net-config-path or the ConfigMap of --net-config-map. Without these flags it is
the file that flanneld reads if it exists, as in flanneld's pod, and otherwise the
ConfigMap of flannel's manifests.`,
		Example: "  flannelctl config get\n  flannelctl config get > net-conf.json\n" +
			"  flannelctl config get --kubeconfig-file ~/.kube/config",
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, _, err := currentConfig(cmd.Context(), store)
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), strings.TrimSpace(string(text)))
			}
			return err
		},
	}
}

func newConfigValidateCommand(store *storeFlags) *cobra.Command {
	return &cobra.Command{
		Use: "validate [FILE]", Short: "Check a network configuration like flanneld", Args: cobra.MaximumNArgs(1),
		Long: `Checks a network configuration like flanneld on this host. It reads the file,
standard input (-) or, without an argument, the store.`,
		Example: "  flannelctl config validate net-conf.json\n  flannelctl config validate\n" +
			"  flannelctl config validate --kubeconfig-file ~/.kube/config",
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var text []byte
			kubernetes := store.onKubernetes()
			if len(args) > 0 {
				text, err = readFile(cmd, args[0])
			} else {
				text, kubernetes, err = currentConfig(cmd.Context(), store)
			}
			if err != nil {
				return err
			}
			cfg, err := checkConfig(cmd, text, !kubernetes)
			if err != nil {
				return err
			}
			if !kubernetes {
				o, err := store.options()
				if err != nil {
					return err
				}
				if err := daemon.CheckRanges(cmd.Context(), cfg, externalInterface(cmd.Context(), cfg), o.EtcdEndpoints); err != nil {
					return err
				}
			}
			if cfg.BackendType == "udp" && !strings.Contains(strings.ToLower(string(text)), "udp") {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: without a Type in Backend the backend is udp, which is slow")
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "valid: network %s, backend %s\n", list(cfg.Prefixes()), cfg.BackendType)
			return err
		},
	}
}

func newConfigSetCommand(store *storeFlags) *cobra.Command {
	var yes bool
	set := &cobra.Command{
		Use: "set FILE", Short: "Check and write a network configuration (- reads standard input)", Args: cobra.ExactArgs(1),
		Long: `Checks the configuration like flanneld, shows the differences from the one in the
store, and writes it. It asks before a change that makes leases in use invalid.
Running daemons follow it at once. Those with --follow-config=false keep the old one
until they are restarted. On Kubernetes, change the configuration with kubectl.`,
		Example: "  flannelctl config set net-conf.json\n  echo '{\"Network\":\"10.5.0.0/16\",\"Backend\":{\"Type\":\"vxlan\"}}' | flannelctl config set - --yes",
		RunE: func(cmd *cobra.Command, args []string) error {
			if store.onKubernetes() {
				return nodes{}.SetConfig(cmd.Context(), nil, 0)
			}

			text, err := readFile(cmd, args[0])
			if err != nil {
				return err
			}
			cfg, err := checkConfig(cmd, text, true)
			if err != nil {
				return err
			}
			return store.withAdmin(func(a *etcd.Admin) error {
				ask := func(stranded int) error {
					switch {
					case yes:
						return nil
					case args[0] == "-": // standard input cannot contain an answer
						return fmt.Errorf("%d leases would no longer fit: add --yes to write it anyway", stranded)
					}
					fmt.Fprintf(cmd.OutOrStdout(), "%d leases no longer fit. Write it anyway? [y/N] ", stranded)
					if !confirmed(cmd.Context(), cmd.InOrStdin()) {
						return errors.New("nothing was written")
					}
					return nil
				}
				return setConfig(cmd, a, text, cfg, ask)
			})
		},
	}
	set.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return set
}

// currentConfig returns the network configuration in the store, and whether the store is
// Kubernetes.
func currentConfig(ctx context.Context, flags *storeFlags) (text []byte, kubernetes bool, err error) {
	err = flags.read(func(o storeOptions, from store) error {
		kubernetes = o.KubeSubnetMgr
		text, _, err = config(ctx, from)
		return err
	})
	return text, kubernetes, err
}

// readFile reads a file, or standard input for "-".
func readFile(cmd *cobra.Command, path string) ([]byte, error) {
	if path == "-" {
		return input(cmd.Context(), func() ([]byte, error) { return io.ReadAll(cmd.InOrStdin()) })
	}
	return os.ReadFile(path)
}

// allBackends returns the catalog of all backends, including the extension backend.
func allBackends() (backend.Catalog, error) {
	return builtin.New(options.Options{AllowExtensionBackend: true})
}

// checkConfig parses and validates a configuration, and prints its warnings. pools is
// true if each host chooses its subnet from the network, as with etcd, and false on
// Kubernetes.
func checkConfig(cmd *cobra.Command, text []byte, pools bool) (subnet.Config, error) {
	backends, err := allBackends()
	if err != nil {
		return subnet.Config{}, err
	}
	cfg, _, warnings, err := daemon.ValidateConfig(text, pools, backends.Registry)
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
	}
	return cfg, err
}

// externalInterface returns the addresses of the interface that flanneld uses on this host by default, as far
// as there is one.
func externalInterface(ctx context.Context, cfg subnet.Config) (all underlay.Interface) {
	for _, n := range cfg.Networks {
		one, err := underlay.Wait(ctx, underlay.Options{Families: []prefix.Family{n.Family()}}, 0)
		if err == nil {
			all.Addrs = append(all.Addrs, one.Addrs...)
		}
	}
	return all
}

// setConfig writes a network configuration. If leases do not fit it, it calls ask with their number first.
func setConfig(cmd *cobra.Command, a *etcd.Admin, text []byte, cfg subnet.Config, ask func(stranded int) error) error {
	out := cmd.OutOrStdout()
	old, revision, err := a.Config(cmd.Context())
	if err != nil {
		return err
	}
	lines := difference(old, text)
	if revision != 0 && len(lines) == 0 {
		_, err := fmt.Fprintln(out, "nothing changes")
		return err
	}
	entries, err := a.Entries(cmd.Context(), false)
	if err != nil {
		return err
	}

	for _, l := range lines {
		fmt.Fprintln(out, l)
	}
	if err := spareHosts(entries, cfg, old); err != nil {
		return err
	}

	stranded := 0
	for _, e := range entries {
		if why := misfit(e.Lease, cfg); e.Err == nil && why != "" {
			fmt.Fprintf(out, "lease %s: %s\n", e.Lease.Key, why)
			stranded++
		}
	}
	if stranded > 0 {
		if err := ask(stranded); err != nil {
			return err
		}
	}
	return writeConfig(cmd, a, text, revision)
}

// writeConfig writes a network configuration that replaces the one at revision.
func writeConfig(cmd *cobra.Command, to store, text []byte, revision int64) error {
	if err := to.SetConfig(cmd.Context(), text, revision); err != nil {
		return err
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), "written; running daemons follow it, except for those with --follow-config=false")
	return err
}

// confirmed reads the user's answer and reports whether it is y or yes. It returns false if
// ctx ends first.
func confirmed(ctx context.Context, in io.Reader) bool {
	line, _ := input(ctx, func() ([]byte, error) { return bufio.NewReader(in).ReadBytes('\n') })
	answer := strings.ToLower(strings.TrimSpace(string(line)))
	return answer == "y" || answer == "yes"
}

// input returns the result of read, or an error if ctx ends first. Reading a terminal
// cannot be interrupted, so in that case the goroutine of read stays blocked until the
// process ends.
func input(ctx context.Context, read func() ([]byte, error)) ([]byte, error) {
	done := make(chan struct{})
	var got []byte
	var failed error
	go func() {
		defer close(done)
		got, failed = read()
	}()

	select {
	case <-done:
		return got, failed
	case <-ctx.Done():
		return nil, fmt.Errorf("read standard input: %w", ctx.Err())
	}
}

// spareHosts returns an error if a host could be given a subnet of cfg that contains the address of another
// host, and if that is not so with the configuration old.
func spareHosts(entries []subnet.Entry, cfg subnet.Config, old []byte) error {
	used, _ := subnet.ParseConfig(old) // an invalid one is not in use
	for _, e := range entries {
		for _, own := range e.Lease.Endpoints {
			if err := cfg.Spares(used, "the host with the lease "+e.Lease.Key, own.PublicIP); err != nil {
				return err
			}
		}
	}
	return nil
}

// misfit returns the reason why a lease does not fit cfg, or "" if it does.
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

// leaf is a JSON value that is not an object, or a text that is not JSON.
type leaf struct {
	text   string
	hidden bool // the value may be secret, so it is not shown
}

func (l leaf) String() string {
	if l.hidden {
		return "[redacted]"
	}
	return l.text
}

// difference returns a line for each value that differs between two network
// configurations, with the path of its key, such as Backend.Type.
func difference(old, text []byte) []string {
	before := map[string]leaf{}
	after := map[string]leaf{}
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

// flatten adds the leaves of a network configuration to m, each under the path of its
// key. A text that is not JSON is one leaf. An empty text has none.
func flatten(text []byte, m map[string]leaf) {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		if len(text) > 0 {
			m["(not JSON)"] = leaf{string(text), true}
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
		text, _ := json.Marshal(v)                               // cannot fail for a decoded value
		key, below, _ := strings.Cut(strings.ToLower(path), ".") // flanneld ignores the case of keys
		m[path] = leaf{string(text), (key == "backend" || key == "nextbackend") && !subnet.Public(below, v)}
	}
	walk("", v)
}
