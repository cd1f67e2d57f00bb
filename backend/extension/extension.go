// Package extension leaves the data path to commands of the network
// configuration.
package extension

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/pkg/prefix"
	"flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "extension"

const (
	// setupTries is how often a command of the start is tried, with setupPause
	// before the second time, twice that before the third.
	setupTries = 3
	setupPause = time.Second
	// maxPublished bounds what a host publishes, in bytes of JSON: readers of
	// leases have bounds of their own.
	maxPublished = 16 << 10
)

// ErrNotAllowed means that this node runs no commands of the configuration.
var ErrNotAllowed = errors.New("this host runs no commands of the network configuration")

// Settings are what the node has to say, as opposed to the configuration that
// all nodes share.
type Settings struct {
	// Allow says that commands may be run. They are run as root.
	Allow bool
	// StateDir and Name are the directory and name of the file that remembers
	// what was run.
	StateDir, Name string
}

// Host is what this process has of the backend.
type Host struct {
	settings Settings
	book     *book
	timeout  atomic.Int64 // of commands, nanoseconds; zero until a network was started
}

// NewHost returns a host on which nothing has been run yet.
func NewHost(s Settings) *Host {
	return &Host{settings: s, book: &book{dir: s.StateDir, name: s.Name, boot: bootID()}}
}

// New is the backend's factory.
func (h *Host) New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	if !h.settings.Allow {
		return nil, nil, fmt.Errorf("Backend.Type is %q: %w: whoever writes it could run anything as root; "+
			"if that is as it should be start flanneld with --allow-extension-backend", Type, ErrNotAllowed)
	}
	c, warnings, err := parseConfig(raw)
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env: env, config: c, host: h}, warnings, nil
}

// Shutdown runs ShutdownCommand, if there is one and this process has started
// a network. That network must have been closed. It returns at the latest
// after CommandTimeout.
func (h *Host) Shutdown(ctx context.Context) {
	if timeout := h.timeout.Load(); timeout > 0 {
		h.undo(ctx, time.Duration(timeout))
	}
}

// undo runs the recorded ShutdownCommand.
func (h *Host) undo(ctx context.Context, timeout time.Duration) {
	s := h.book.setup()
	if !s.Undo.configured() {
		return
	}
	log := klog.FromContext(ctx)
	h.book.closeDown()
	h.book.flush(ctx)
	output, err := s.Undo.run(ctx, s.Input, timeout)
	logOutput(log, s.Undo, output)
	if err != nil {
		log.Error(err, "not everything may have been taken down")
	}
}

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	host   *Host
}

// Scope implements backend.Backend: what commands make is theirs.
func (b *Backend) Scope() dataplane.Scope { return b.env.Scope() }

// Claim implements backend.Backend. What this host publishes is the output of
// PreStartupCommand, so that is run here, unless it has been.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim := b.env.Claim(Type, prev)
	b.host.book.load(ctx)
	if b.outdated(prev) {
		b.host.book.distrust()
	}
	if err := b.prepare(ctx); err != nil {
		return claim, err
	}
	if !b.config.pre.configured() {
		return claim, nil
	}
	data, err := publication(b.host.book.setup().Output)
	if err != nil {
		return claim, err
	}
	// Other daemons look for it in one place, beside the IPv4 address if any.
	claim.Endpoints[0].Data = data
	return claim, nil
}

// outdated reports whether what was run on this host since the boot is not what it
// has now, given what it published last: another backend has taken its place, or
// it was for another subnet.
func (b *Backend) outdated(prev subnet.Claim) bool {
	if prev.BackendType != Type && len(prev.Endpoints) > 0 { // some publish no type
		return true
	}
	told := b.host.book.setup().Input.Env // empty until the host has had a subnet
	for _, e := range prev.Endpoints {
		if e.Subnet.IsValid() && len(told) > 0 && !slices.Contains(told, namesOf(e.Family()).subnet+"="+e.Subnet.String()) {
			return true
		}
	}
	return false
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	book := b.host.book
	s := book.setup()
	s.Undo, s.Input = b.config.shutdown, input{Env: b.ownVariables(own)}
	if post := hash(s.Number, b.config.post, s.Input); s.Post != post {
		again := s
		again.Key = "" // where this fails the next attempt starts from the beginning
		book.setSetup(again)
		book.flush(ctx)
		if _, err := b.attempt(ctx, b.config.post, s.Input); err != nil {
			return nil, err
		}
		s.Post = post
	}
	book.setSetup(s)
	book.flush(ctx)
	b.host.timeout.Store(int64(b.config.timeout))
	reconciler, err := b.env.Reconciler()
	if err != nil {
		return nil, err
	}
	return newNetwork(b, s.Number, &backend.Programmer{Base: b.env.Base(own), Reconciler: reconciler}), nil
}

// prepare sees to it that PreStartupCommand has been run on this host as it is.
// A host whose external interface is another starts from the beginning.
func (b *Backend) prepare(ctx context.Context) error {
	book, iface := b.host.book, b.env.Underlay
	book.load(ctx)
	var addrs []string
	for _, a := range iface.Addrs {
		addrs = append(addrs, a.Local.String())
	}
	key := hash(b.config.pre, iface.Name, iface.Index, addrs)
	if book.setup().Key == key {
		return nil
	}
	b.host.undo(ctx, b.config.timeout)
	s := setup{Number: book.setup().Number + 1}
	book.setSetup(s) // without a key: it is not known to be done
	book.flush(ctx)
	var err error
	if s.Output, err = b.attempt(ctx, b.config.pre, input{}); err != nil {
		return err
	}
	if _, err := publication(s.Output); err != nil {
		return err
	}
	s.Key = key
	book.setSetup(s)
	book.flush(ctx)
	return nil
}

// publication is the output of PreStartupCommand as it stands in the lease.
func publication(output string) (json.RawMessage, error) {
	data, err := json.Marshal(output)
	if err != nil {
		return nil, fmt.Errorf("encode the output of %s: %w", preStartup, err)
	}
	if len(data) > maxPublished {
		return nil, fmt.Errorf("%s: its output has %d bytes as JSON, at most %d can be published", preStartup, len(data), maxPublished)
	}
	return data, nil
}

// attempt runs a command of the start, a few times if need be.
func (b *Backend) attempt(ctx context.Context, c command, in input) (output string, err error) {
	log := klog.FromContext(ctx)
	for try := 1; ; try++ {
		output, err = c.run(ctx, in, b.config.timeout)
		logOutput(log, c, output)
		if err == nil || try == setupTries || ctx.Err() != nil {
			return output, err
		}
		log.Error(err, "command failed, trying again", "try", try, "of", setupTries)
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(try) * setupPause):
		}
	}
}

// Variables that a host without IPv6 hands to PostStartupCommand: scripts that
// were written for flannel know them.
const (
	noSubnet  = "::/0"
	noAddress = "<nil>"
)

// ownVariables are what PostStartupCommand and ShutdownCommand are told.
func (b *Backend) ownVariables(own subnet.Lease) []string {
	values := map[string]string{"IPV6SUBNET": noSubnet, "PUBLIC_IPV6": noAddress}
	for _, e := range own.Endpoints {
		names := namesOf(e.Family())
		values[names.subnet] = e.Subnet.String()
		if n, ok := b.env.Config.Network(e.Family()); ok {
			values[names.network] = n.Prefix.String()
		}
		if a, ok := b.env.Underlay.Family(e.Family()); ok {
			values[names.address] = a.Local.String()
		}
	}
	var env []string
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		n := namesOf(f)
		for _, name := range []string{n.network, n.subnet, n.address} {
			env = append(env, name+"="+values[name])
		}
	}
	return env
}

// peerVariables are what the commands for a subnet are told. Nothing in them
// is other than an address or a prefix, whatever the lease says.
func peerVariables(l subnet.Lease) []string {
	values := map[string]string{}
	for _, e := range l.Endpoints {
		names := namesOf(e.Family())
		values[names.subnet], values[names.address] = e.Subnet.String(), e.PublicIP.String()
	}
	var env []string
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		n := namesOf(f)
		env = append(env, n.subnet+"="+values[n.subnet], n.address+"="+values[n.address])
	}
	return env
}

// names are the names of one family's variables.
type names struct{ network, subnet, address string }

func namesOf(f prefix.Family) names {
	if f == prefix.IPv4 {
		return names{"NETWORK", "SUBNET", "PUBLIC_IP"}
	}
	return names{"IPV6NETWORK", "IPV6SUBNET", "PUBLIC_IPV6"}
}
