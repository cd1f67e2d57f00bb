// SPDX-License-Identifier: Apache-2.0

// Package extension runs commands from the network configuration as the data path. The
// keys, variables and standard input of the commands are those of flannel's extension
// backend (pkg/backend/extension), so that scripts written for it work unchanged.
//
//   - start.go starts the network, and runs PostStartupCommand.
//   - extension.go runs PreStartupCommand, and the commands of the stop.
//   - network.go runs the commands for the subnets of peers.
//   - command.go runs a single command, and config.go decides whether a shell runs it.
//   - store.go contains the state file, which says which commands have run.
package extension

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "extension"

const (
	// setupTries is the maximum number of tries of a command at the start. The pause is setupPause
	// before the second try and twice that before the third.
	setupTries = 3
	setupPause = time.Second
	// recallWait is the time after the start of this process in which no command of a recalled
	// configuration runs again, such as after a boot or a stop.
	recallWait = 10 * time.Second
	// maxPublished limits the size of the data in the lease, in bytes of JSON, because
	// readers of leases have limits too.
	maxPublished = 16 << 10
)

// ErrNotAllowed means that this host does not run commands from the configuration.
var ErrNotAllowed = errors.New("this host does not run commands from the network configuration")

// Settings are the options of this host, in contrast to the configuration that all hosts
// share.
type Settings struct {
	// Allow permits commands. They run as root.
	Allow bool
	// StateDir and Name are the directory and the name of the state file, which records
	// the commands that have run.
	StateDir, Name string
}

// Host is the state of the backend in this process. It outlives the networks.
type Host struct {
	settings Settings
	store    *stateStore
	timeout  atomic.Int64 // CommandTimeout in nanoseconds; zero before the first network is started
	started  time.Time
	setting  sync.Mutex // held while commands set this host up, or undo everything
}

// NewHost returns the Host of a process that has not run any command yet.
func NewHost(s Settings) *Host {
	return &Host{settings: s, started: time.Now(), store: &stateStore{dir: s.StateDir, name: s.Name, boot: bootID()}}
}

// New is the backend's factory.
func (h *Host) New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	if !h.settings.Allow {
		return nil, nil, fmt.Errorf("Backend.Type is %q: %w: a user who can write it can run any command as root; "+
			"to permit that, start flanneld with --allow-extension-backend", Type, ErrNotAllowed)
	}
	c, warnings, err := parseConfig(raw)
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env: env, config: c, host: h}, warnings, nil
}

// Shutdown runs the ShutdownCommand of the last start, if it is configured and this process has
// started a network. A second call does nothing. The caller must close the network first. Shutdown
// returns soon after CommandTimeout at the latest.
func (h *Host) Shutdown(ctx context.Context) {
	if timeout := h.timeout.Load(); timeout > 0 {
		h.undo(ctx, time.Duration(timeout))
	}
}

// Retire undoes what commands have done since the boot, because the network was deleted or uses
// another backend now, or flanneld leaves this host. It runs SubnetRemoveCommand for each subnet, and
// then ShutdownCommand. It logs a command that fails, and does not repeat it. Then it deletes the state
// file. If only an earlier boot has run commands, it just deletes the state file. If this process has
// not loaded the state yet and cannot read the file, Retire logs that and does nothing.
//
// The caller must close the network first. If ctx ends, Retire returns the error of ctx. The next
// call then repeats the command that was killed, and continues. Retire also returns an error if it
// cannot delete the state file.
func (h *Host) Retire(ctx context.Context) error {
	h.setting.Lock()
	defer h.setting.Unlock()

	exists, err := h.store.exists()
	if err != nil {
		klog.FromContext(ctx).Error(err, "cannot read which commands have run, undoing none")
	}
	if !exists {
		return nil
	}

	h.store.load(ctx)
	timeout := time.Duration(cmp.Or(h.timeout.Load(), int64(defaultTimeout*time.Second)))
	err = h.removeSubnets(ctx, timeout)
	h.store.invalidateSetup() // if the network is created again, its start runs ShutdownCommand first
	h.store.flush(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}

	h.store.setup().runUndo(ctx, timeout)
	if err := ctx.Err(); err != nil { // the command may have been killed half-way
		return err
	}
	return h.store.remove()
}

// removeSubnets returns an error only if ctx ends. The state then still contains the remaining subnets.
func (h *Host) removeSubnets(ctx context.Context, timeout time.Duration) error {
	log := klog.FromContext(ctx)
	entries := h.store.entries()
	for _, s := range slices.Sorted(maps.Keys(entries)) {
		e := entries[s]
		output, err := e.Undo.run(ctx, e.Input, timeout)
		if ctx.Err() != nil { // the command may have been killed half-way
			return ctx.Err()
		}
		logOutput(log, e.Undo, output)
		if err != nil {
			log.Error(err, "subnet not removed", "subnet", s)
		}
		h.store.removeEntry(s) // there will be no second try
	}
	return ctx.Err()
}

// undo runs the ShutdownCommand of the last start, which may differ from the configured one.
func (h *Host) undo(ctx context.Context, timeout time.Duration) {
	s := h.store.setup()
	if !s.Undo.configured() {
		return
	}
	h.store.markUndone() // before the command runs, so that it never runs twice
	h.store.flush(ctx)
	s.runUndo(ctx, timeout)
}

func (s setup) runUndo(ctx context.Context, timeout time.Duration) {
	log := klog.FromContext(ctx)
	output, err := s.Undo.run(ctx, s.Input, timeout)
	logOutput(log, s.Undo, output)
	if err != nil {
		log.Error(err, "shutdown command failed, its objects may still exist")
	}
}

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	host   *Host
}

// Claim implements backend.Backend. The claim contains the output of PreStartupCommand, so Claim
// first runs that command if necessary: see prepare. If prev shows that the commands of the last
// start no longer match this host, Claim makes all of them run again.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim := b.env.Claim(Type, prev)
	b.host.store.load(ctx)
	if b.outdated(prev) {
		b.host.store.invalidateSetup()
	}
	if err := b.prepare(ctx, claim.Endpoints); err != nil {
		return claim, err
	}
	if !b.config.pre.configured() {
		return claim, nil
	}

	data, err := publication(b.host.store.setup().Output)
	if err != nil {
		return claim, err
	}

	// Other daemons expect the data in one place, with the IPv4 address if there is one.
	claim.Endpoints[0].Data = data
	return claim, nil
}

// outdated reports whether the commands of the last start no longer match this host, whose last
// published claim is prev.
func (b *Backend) outdated(prev subnet.Claim) bool {
	if prev.BackendType != Type && len(prev.Endpoints) > 0 {
		return true // another backend was in use since; some publish no type
	}

	ran := b.host.store.setup().Input.Env // empty before the host has its first subnet
	return len(ran) > 0 && slices.ContainsFunc(prev.Endpoints, func(e subnet.Endpoint) bool {
		return e.Subnet.IsValid() && !slices.Contains(ran, names[e.Family()][1]+"="+e.Subnet.String())
	})
}

// prepare runs PreStartupCommand, unless it has already run for the same external interface and
// addresses. Another setup since the boot is undone first. own is the part of this host's lease that
// is known.
func (b *Backend) prepare(ctx context.Context, own []subnet.Endpoint) error {
	b.host.setting.Lock()
	defer b.host.setting.Unlock()

	store := b.host.store
	iface := b.env.Underlay
	store.load(ctx)
	key := hash(b.config.pre, iface.Name, iface.Index, b.env.Locals())
	if store.setup().Key == key {
		return nil
	}
	if b.env.Recalled && time.Since(b.host.started) < recallWait {
		return errors.New("before commands run again, the store gets time to answer, because the configuration may have changed")
	}

	b.host.undo(ctx, b.config.timeout)
	s := setup{
		Number: store.setup().Number + 1,
		Undo:   b.config.shutdown, // now, because the configuration may change again before Start
		Input:  input{Env: b.ownVariables(own)},
	}
	store.setSetup(s)
	store.flush(ctx)

	var err error
	if s.Output, err = b.attempt(ctx, b.config.pre, input{}); err != nil {
		return err
	}
	if _, err := publication(s.Output); err != nil {
		return err
	}
	s.Key = key // stays empty until the command has succeeded
	store.setSetup(s)
	store.flush(ctx)
	return nil
}

// publication returns the output of PreStartupCommand as the lease contains it.
func publication(output string) (json.RawMessage, error) {
	data, _ := json.Marshal(output) // a text always encodes
	if len(data) > maxPublished {
		return nil, fmt.Errorf("%s: its output has %d bytes as JSON, at most %d can be published", preStartup, len(data), maxPublished)
	}
	return data, nil
}

// attempt runs a command of the start up to setupTries times, but only once if it hangs: meanwhile the network follows
// neither other hosts nor the store.
func (b *Backend) attempt(ctx context.Context, c command, in input) (output string, err error) {
	log := klog.FromContext(ctx)
	for try := 1; ; try++ {
		output, err = c.run(ctx, in, b.config.timeout)
		logOutput(log, c, output)
		if err == nil || try == setupTries || ctx.Err() != nil || errors.Is(err, errTimeout) {
			return output, err
		}
		log.Error(err, "command failed, trying again", "try", try, "of", setupTries)
		_ = wait.For(ctx, time.Duration(try)*setupPause) // if ctx has ended, the next run starts no program
	}
}

// peerVariables returns the variables for the commands of a peer's subnet. Their values are
// only addresses and prefixes, even if the lease is hostile.
func peerVariables(l subnet.Lease) []string {
	values := map[prefix.Family][3]string{}
	for _, e := range l.Endpoints {
		values[e.Family()] = [3]string{"", e.Subnet.String(), e.PublicIP.String()}
	}
	return assign(values, 1)
}

// assign returns the variables of both families with their values, from one of their indexes in names on.
func assign(values map[prefix.Family][3]string, from int) (env []string) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for i, name := range names[f][from:] {
			env = append(env, name+"="+values[f][from+i])
		}
	}
	return env
}

func (in input) subnets() (all []string) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, v := range in.Env {
			if value, ok := strings.CutPrefix(v, names[f][1]+"="); ok && value != "" {
				all = append(all, value)
			}
		}
	}
	return all
}

// names contains the names of the variables: the network, the subnet and the address of each family.
var names = map[prefix.Family][]string{
	prefix.IPv4: {"NETWORK", "SUBNET", "PUBLIC_IP"}, prefix.IPv6: {"IPV6NETWORK", "IPV6SUBNET", "PUBLIC_IPV6"},
}
