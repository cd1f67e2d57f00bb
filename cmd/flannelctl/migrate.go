// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

func newMigrateCommand(h host) *cobra.Command {
	store := storeFlags{host: h}
	cmd := &cobra.Command{
		Use: "migrate", Short: "Change the backend of a running network without losing packets",
		Long: `Changes the backend of a running network. start adds the next backend to the
configuration, as NextBackend. Hosts that have read the configuration bring it up
beside the present one, and send to each other by it as soon as it works. finish
makes it the only one, abort removes it. On Kubernetes, start, finish and abort
print the configuration for the ConfigMap.`,
		Example: "  flannelctl migrate plan '{\"Type\":\"wireguard\"}'\n  flannelctl migrate start '{\"Type\":\"wireguard\"}'\n" +
			"  flannelctl migrate status\n  flannelctl migrate finish",
	}

	store.addConfigTo(cmd)
	start := &cobra.Command{
		Use: "start BACKEND", Short: "Add the next backend to the configuration", Args: cobra.ExactArgs(1),
		Long:    `Adds a backend, given as JSON, to the configuration as NextBackend.`,
		Example: "  flannelctl migrate start '{\"Type\":\"wireguard\"}'\n  flannelctl migrate start '{\"Type\":\"vxlan\",\"VNI\":7}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			return rewriteConfig(cmd, &store, func(text []byte) ([]byte, error) { return startMigration(text, args[0]) })
		},
	}
	abort := &cobra.Command{
		Use: "abort", Short: "Remove the next backend from the configuration", Args: cobra.NoArgs,
		Long:    `Removes NextBackend from the configuration. Hosts go back to the present backend.`,
		Example: "  flannelctl migrate abort",
		RunE:    func(cmd *cobra.Command, _ []string) error { return rewriteConfig(cmd, &store, abortMigration) },
	}
	cmd.AddCommand(newMigratePlanCommand(&store), start, newMigrateStatusCommand(h, &store), newMigrateFinishCommand(&store), abort)
	return cmd
}

func newMigratePlanCommand(store *storeFlags) *cobra.Command {
	return &cobra.Command{
		Use: "plan BACKEND", Short: "Check the next backend and print the configurations of the migration", Args: cobra.ExactArgs(1),
		Long:    `Checks whether the network can migrate to a backend, given as JSON, and prints the configuration of each step. It writes nothing.`,
		Example: "  flannelctl migrate plan '{\"Type\":\"wireguard\"}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			text, kubernetes, err := currentConfig(cmd.Context(), store)
			if err != nil {
				return err
			}
			during, err := startMigration(text, args[0])
			if err != nil {
				return err
			}
			if _, err := checkConfig(cmd, during, !kubernetes); err != nil {
				return err
			}
			after, err := finishMigration(during)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "1. start: %s\n2. wait until `flannelctl migrate status` shows on each host that it sends to all others by the next backend\n3. finish: %s\nabort at any time: %s\n",
				during, after, strings.TrimSpace(string(text)))
			return err
		},
	}
}

func newMigrateFinishCommand(store *storeFlags) *cobra.Command {
	var yes bool
	var f meshFlags
	cmd := &cobra.Command{
		Use: "finish", Short: "Make the next backend the only one", Args: cobra.NoArgs,
		Long: `Makes the next backend the only one. Before that it asks every host, as flannelctl
mesh does, so the daemons need --statusz-address. It refuses if a host does not
publish data for the next backend, does not answer, or still sends to a peer by
the present backend. With --yes it asks no host and finishes anyway: hosts then keep
the present backend until they reach all peers through the next one.`,
		Example: "  flannelctl migrate finish\n  flannelctl migrate finish --yes",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !yes {
				f.store = *store
				m, err := readMigration(cmd, store)
				if err != nil {
					return err
				}
				if m.Ended {
					return rewriteConfig(cmd, store, finishMigration) // which says that there is no NextBackend
				}
				if n := m.Phases[phaseBefore]; n > 0 {
					return fmt.Errorf("hosts that do not publish data for %s: %d (flannelctl migrate status names them): add --yes to finish anyway", m.To, n)
				}
				if err := f.checkFinish(cmd); err != nil {
					return fmt.Errorf("%w: add --yes to finish anyway", err)
				}
			}
			return rewriteConfig(cmd, store, finishMigration)
		},
	}

	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "finish although hosts still need the present backend")
	f.addTo(cmd)
	return cmd
}

// checkFinish asks all hosts, and returns an error if one still needs the present backend or does not answer. It
// prints a line for each of the first such hosts.
func (f *meshFlags) checkFinish(cmd *cobra.Command) error {
	m, err := f.ask(cmd.Context(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}

	const shown = 10
	held := 0
	for i, h := range m.Hosts {
		why := m.Held(i)
		if why == "" {
			continue
		}
		held++
		if held <= shown {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", h.Name, why)
		}
	}
	if held > 0 {
		return fmt.Errorf("%d of %d hosts still need the present backend, or do not answer", held, len(m.Hosts))
	}
	return nil
}

func newMigrateStatusCommand(h host, store *storeFlags) *cobra.Command {
	var (
		daemon daemonFlags
		out    output
		waits  bool
	)

	cmd := &cobra.Command{
		Use: "status", Short: "Show how far the hosts are, and what holds them up", Args: cobra.NoArgs,
		Long: `Shows how many hosts are in which phase of the migration, according to their
leases, and names those that do not publish data for the next backend. A host
that does need not have it in order: look there too. If a daemon runs on this
host, the output also shows which peers it does not send to by the next backend,
and why. After finish and abort, the output names the hosts that have not
followed yet: all others keep the former devices for them. With --wait the
command ends when all have followed.`,
		Example: "  flannelctl migrate status\n  flannelctl migrate status --wait",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var m migration
			var err error
			over := follow(cmd.Context(), cmd.ErrOrStderr(), migrationPause, func() string {
				if m, err = readMigration(cmd, store); err != nil || !waits {
					return ""
				}
				return m.waiting()
			})
			err = cmp.Or(err, over)
			if errors.Is(err, errNoMigration) {
				return out.print(cmd.OutOrStdout(), m, func(w io.Writer) { fmt.Fprintln(w, err) })
			}
			if err != nil {
				return err
			}
			daemon.network = store.network
			if r, err := daemon.one(cmd.Context()); err == nil {
				m.addHost(r)
			}
			return out.print(cmd.OutOrStdout(), m, m.print)
		},
	}

	out.addTo(cmd)
	daemon.addSocketTo(cmd, h)
	cmd.Flags().BoolVar(&waits, "wait", false, "wait until the network does not migrate any more")
	return cmd
}

// migrationPause is the time between two looks at the leases with --wait.
const migrationPause = 2 * time.Second

// errNoMigration means that the configuration has one backend, and all leases are for it.
var errNoMigration = errors.New("the network does not migrate")

// The phases of a host in a migration: the backends for which its lease has data.
const (
	phaseBefore   = "present backend only"
	phaseBoth     = "both backends"
	phaseFinished = "next backend only"
)

// migration is the state of a migration, as the command prints it.
type migration struct {
	From   string         `json:"from"`
	To     string         `json:"to"`
	Phases map[string]int `json:"phases"` // number of hosts by phase
	Behind []string       `json:"behind"` // leases without data for the next backend, and unreadable ones
	// Ended is set if the configuration has only one backend, To, but some leases still have data for
	// another one. Leaving then lists the leases that have data for both.
	Ended   bool           `json:"ended,omitempty"`
	Leaving []string       `json:"leaving,omitempty"`
	Host    *hostMigration `json:"host,omitempty"`
}

// hostMigration is the state of this host.
type hostMigration struct {
	MTU     int               `json:"mtu"`            // of new pods: the smaller MTU of the two backends
	Mode    string            `json:"mode,omitempty"` // of the next backend, if it can carry packets in several ways
	Moved   int               `json:"moved"`          // number of peers to which the host sends by the next backend
	Waiting map[string]string `json:"waiting"`        // by lease, why the host sends to the peer by the present backend
	Refused map[string]string `json:"refused"`        // by lease, why the host sends to the peer by neither backend
	// ClearText is the number of peers to which this host sends by the backend of the key SameLocation,
	// because they are at its location. That backend does not encrypt.
	ClearText int `json:"clearText,omitempty"`
}

// readMigration reads the configuration and all leases, and returns the result of migrationOf.
func readMigration(cmd *cobra.Command, flags *storeFlags) (m migration, err error) {
	err = flags.read(func(_ storeOptions, from store) error {
		text, _, err := config(cmd.Context(), from)
		if err != nil {
			return err
		}
		entries, err := from.Entries(cmd.Context(), false)
		if err != nil {
			return err
		}
		cfg, err := subnet.ParseConfig(text)
		if err == nil {
			m, err = migrationOf(cfg, entries)
		}
		return err
	})
	return m, err
}

// migrationOf returns the state of a migration, according to the configuration and all leases. It returns errNoMigration,
// wrapped, if the network does not migrate, and all readable leases have data for its backend and for no other one.
func migrationOf(cfg subnet.Config, entries []subnet.Entry) (m migration, err error) {
	backends, err := allBackends()
	if err != nil {
		return m, err
	}
	const usualMTU = 1500
	be, _, err := backends.New(backend.Env{Config: cfg, Underlay: underlay.Interface{Name: "any", MTU: usualMTU}})
	if err != nil {
		return m, err
	}

	sides := backend.SidesOf(be, cfg.BackendType)
	from := sides[0]
	to := sides[len(sides)-1]
	m = migration{
		To: to.Type, Ended: !cfg.Migrates(), Behind: []string{},
		Phases: map[string]int{phaseBefore: 0, phaseBoth: 0, phaseFinished: 0},
	}
	if m.Ended {
		to.Strict = true // the former backend may be of the same type
	} else {
		m.From = from.Type
	}

	for _, e := range entries {
		l := &e.Lease
		used := slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool { return subnet.IsHost(e.PublicIP) })
		unreadable := len(l.Endpoints) == 0 // it does not keep hosts from ending the migration
		if !used && l.Permanent || unreadable && m.Ended {
			continue
		}

		_, byFrom := from.Of(l)
		_, byTo := to.Of(l)
		if m.Ended {
			byFrom = !byTo || l.NextType != ""
			former := cmp.Or(l.BackendType, "udp") // leases of the backend udp have no type
			if l.NextType != "" && l.NextType != m.To {
				former = l.NextType
			}
			if former == m.To { // another VNI of vxlan
				former = "the former " + former
			}
			if byFrom {
				m.From = cmp.Or(m.From, former)
			}
		}

		switch {
		case byFrom && byTo:
			m.Phases[phaseBoth]++
			if m.Ended {
				m.Leaving = append(m.Leaving, l.Key)
			}
		case byTo:
			m.Phases[phaseFinished]++
		default: // a lease with data for neither counts as one that has only that for From
			m.Phases[phaseBefore]++
			m.Behind = append(m.Behind, l.Key)
		}
	}
	slices.Sort(m.Behind)
	slices.Sort(m.Leaving)

	switch devices := be.Describe().Scope.Devices; {
	case m.Ended && len(m.Behind)+len(m.Leaving) == 0:
		err = fmt.Errorf("%w: its configuration has no NextBackend, its backend is %s, and no lease has data for another one", errNoMigration, cfg.BackendType)
	case !m.Ended && m.From == m.To: // two VNIs of vxlan, whose devices tell them apart
		m.From += " (" + devices[0] + ")"
		m.To += " (" + devices[len(devices)/2] + ")"
	}
	return m, err
}

// addHost adds the state of this host, from the report of its daemon. It adds nothing if the daemon
// does not migrate.
func (m *migration) addHost(r status.Report) {
	if r.Network.NextBackendType == "" {
		return
	}

	m.Host = &hostMigration{
		MTU: r.Network.MTU, Mode: r.Network.NextMode,
		Waiting: map[string]string{}, Refused: map[string]string{},
	}
	if l := r.Network.Location; l != nil {
		m.Host.ClearText = l.ByInside
	}

	for _, p := range r.Peers {
		switch {
		case p.State == status.Reserved:
		case p.Backend == "":
			m.Host.Refused[p.Key] = p.Error
		case p.Waiting == "":
			m.Host.Moved++
		default:
			m.Host.Waiting[p.Key] = p.Waiting
		}
	}
}

// waiting says in one line how far the hosts are.
func (m migration) waiting() string {
	return fmt.Sprintf("waiting: hosts with %s: %d, with %s: %d, with %s: %d",
		phaseBefore, m.Phases[phaseBefore], phaseBoth, m.Phases[phaseBoth], phaseFinished, m.Phases[phaseFinished])
}

func (m migration) print(w io.Writer) {
	if m.Ended {
		fmt.Fprintf(w, "migration\tto %s alone: hosts keep their former devices until the last lease has followed\n", m.To)
	} else {
		fmt.Fprintf(w, "migration\tfrom %s to %s\n", m.From, m.To)
	}

	for _, phase := range []string{phaseBefore, phaseBoth, phaseFinished} {
		fmt.Fprintf(w, "hosts with %s\t%d\n", phase, m.Phases[phase])
	}
	for _, key := range m.Behind {
		fmt.Fprintf(w, "\t%s does not publish data for %s\n", key, m.To)
	}

	for _, key := range m.Leaving {
		fmt.Fprintf(w, "\t%s still publishes data for %s\n", key, m.From)
	}
	h := m.Host
	if h == nil {
		return
	}

	fmt.Fprintf(w, "this host\tpeers to which it sends by %[2]s: %[1]d, by %[4]s: %[3]d; MTU of new pods: %[5]d\n", h.Moved, m.To, len(h.Waiting), m.From, h.MTU)
	if m.To == "wireguard" && h.Mode == "userspace" {
		fmt.Fprintln(w, "\twireguard runs in user space on this host: a restart of flanneld interrupts packets")
	}
	for _, key := range slices.Sorted(maps.Keys(h.Waiting)) {
		fmt.Fprintf(w, "\t%s: %s\n", key, h.Waiting[key])
	}

	for _, key := range slices.Sorted(maps.Keys(h.Refused)) {
		fmt.Fprintf(w, "\t%s is refused: %s\n", key, h.Refused[key])
	}
	if m.To == "wireguard" && h.ClearText == 0 && len(h.Waiting)+len(h.Refused) == 0 && m.Phases[phaseBefore] == 0 {
		fmt.Fprintln(w, "\tno packet to a peer leaves this host in clear text")
	}
}

// rewriteConfig replaces the configuration by the result of edit, and prints the difference. It writes nothing if the
// result is invalid, or if another program has changed the configuration since rewriteConfig read it. On Kubernetes it
// only prints the result, which the operator must write to the ConfigMap.
func rewriteConfig(cmd *cobra.Command, flags *storeFlags, edit func([]byte) ([]byte, error)) error {
	return flags.read(func(o storeOptions, in store) error { return replaceConfig(cmd, in, o.KubeSubnetMgr, edit) })
}

func replaceConfig(cmd *cobra.Command, in store, kubernetes bool, edit func([]byte) ([]byte, error)) error {
	old, revision, err := config(cmd.Context(), in)
	if err != nil {
		return err
	}
	text, err := edit(old)
	if err != nil {
		return err
	}
	if _, err := checkConfig(cmd, text, !kubernetes); err != nil {
		return err
	}

	if kubernetes {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "write this to net-conf.json of the ConfigMap (kubectl --namespace=kube-flannel edit configmap kube-flannel-cfg):\n%s\n", text)
		return err
	}
	for _, l := range difference(old, text) {
		fmt.Fprintln(cmd.OutOrStdout(), l)
	}
	return writeConfig(cmd, in, text, revision)
}

// The keys of the configuration that a migration changes.
const (
	backendKey = "Backend"
	nextKey    = "NextBackend"
)

// startMigration returns the configuration text with next as NextBackend. It returns an error if text
// already has a NextBackend.
func startMigration(text []byte, next string) ([]byte, error) {
	if !json.Valid([]byte(next)) {
		return nil, fmt.Errorf("%q is not JSON: want a backend such as {\"Type\":\"wireguard\"}", next)
	}
	return withKeys(text, func(keys map[string]json.RawMessage) error {
		if _, has := keys[nextKey]; has {
			return errors.New("a migration is in progress: finish or abort it first")
		}
		keys[nextKey] = json.RawMessage(next)
		return nil
	})
}

// finishMigration returns the configuration text with NextBackend as the only backend. It returns an
// error if there is none.
func finishMigration(text []byte) ([]byte, error) {
	return withKeys(text, func(keys map[string]json.RawMessage) error {
		next, has := keys[nextKey]
		if !has {
			return errors.New("there is no NextBackend to finish with")
		}
		keys[backendKey] = next
		delete(keys, nextKey)
		return nil
	})
}

// abortMigration returns the configuration text without NextBackend. It returns an error if there is
// none.
func abortMigration(text []byte) ([]byte, error) {
	return withKeys(text, func(keys map[string]json.RawMessage) error {
		if _, has := keys[nextKey]; !has {
			return errors.New("there is no NextBackend to remove")
		}
		delete(keys, nextKey)
		return nil
	})
}

// withKeys applies change to the keys of the JSON object text, and returns the result. Keys such as
// backend and NEXTBACKEND are renamed first, so that change finds them as Backend and NextBackend.
func withKeys(text []byte, change func(map[string]json.RawMessage) error) ([]byte, error) {
	keys, err := subnet.Keys(text)
	if err != nil {
		return nil, fmt.Errorf("the configuration in the store: %w", err)
	}

	for name, value := range keys {
		for _, known := range []string{backendKey, nextKey} {
			if name != known && strings.EqualFold(name, known) {
				delete(keys, name)
				keys[known] = value
			}
		}
	}
	if err := change(keys); err != nil {
		return nil, err
	}
	return json.Marshal(keys)
}
