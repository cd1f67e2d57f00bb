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
			if err != nil || kubernetes {
				return err
			}
			o, err := store.options()
			if err != nil {
				return err
			}
			return daemon.CheckRanges(cmd.Context(), cfg, externalInterface(cmd.Context(), cfg), o.EtcdEndpoints)
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
				return errors.New("on Kubernetes the configuration is a ConfigMap: " +
					"kubectl --namespace=kube-flannel edit configmap kube-flannel-cfg changes it")
			}

			text, err := readFile(cmd, args[0])
			if err != nil {
				return err
			}
			cfg, err := checkConfig(cmd, text, true)
			if err != nil {
				return err
			}
			return withAdmin(*store, func(a *etcd.Admin) error {
				return setConfig(cmd, a, change{text: text, cfg: cfg, yes: yes, piped: args[0] == "-"})
			})
		},
	}
	set.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return set
}

// currentConfig returns the network configuration in the store, and whether the store is
// Kubernetes. The error wraps subnet.ErrNoConfig if etcd has no configuration.
func currentConfig(ctx context.Context, store *storeFlags) (text []byte, kubernetes bool, err error) {
	o, err := store.options()
	if err != nil {
		return nil, false, err
	}
	if o.KubeSubnetMgr {
		text, err = store.netConfig(ctx, o)
		return text, true, err
	}

	err = withAdmin(*store, func(a *etcd.Admin) error {
		var revision int64
		text, revision, err = a.Config(ctx)
		if err == nil && revision == 0 {
			err = subnet.ErrNoConfig
		}
		return err
	})
	return text, false, err
}

// withAdmin opens etcd, calls f and closes it. It returns an error on Kubernetes.
func withAdmin(store storeFlags, f func(*etcd.Admin) error) error {
	a, err := store.admin()
	if err != nil {
		return err
	}
	return errors.Join(f(a), a.Close())
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

// change is a new configuration to write. If yes is set, the user is not asked. piped is
// set if the configuration comes from standard input, which therefore cannot contain an
// answer.
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
	if err := spareHosts(cmd.Context(), a, c.cfg, old); err != nil {
		return err
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
			return fmt.Errorf("%d leases would no longer fit: add --yes to write it anyway", len(stranded))
		}
		fmt.Fprintf(out, "%d leases no longer fit. Write it anyway? [y/N] ", len(stranded))
		if !confirmed(cmd.Context(), cmd.InOrStdin()) {
			return errors.New("nothing was written")
		}
	}
	if err := a.SetConfig(cmd.Context(), c.text, revision); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "written; running daemons follow it, except for those with --follow-config=false")
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
func spareHosts(ctx context.Context, a *etcd.Admin, cfg subnet.Config, old []byte) error {
	entries, err := a.Entries(ctx, false)
	if err != nil {
		return err
	}
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

// strandedBy returns a line for each readable lease that does not fit cfg.
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
