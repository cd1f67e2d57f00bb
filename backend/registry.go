// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/subnet"
)

// Factory creates a backend from the backend's part of the network configuration, which
// is nil if there is none. It validates everything and changes nothing. It returns
// warnings, for example about unknown keys.
type Factory func(raw json.RawMessage, env Env) (b Backend, warnings []string, err error)

// Create creates the backend that the Config of an Env names. It returns warnings like those of a Factory.
type Create func(Env) (Backend, []string, error)

// within returns a Create like c for the backend that a key of the configuration names. Warnings and errors
// begin with the key.
func (c Create) within(key string) Create {
	return func(env Env) (Backend, []string, error) {
		b, warnings, err := c(env)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", key, err)
		}
		for i := range warnings {
			warnings[i] = key + ": " + warnings[i]
		}
		return b, warnings, nil
	}
}

// Compose creates the backend that consists of two.
type Compose func(env Env, first, second Create) (Backend, []string, error)

// Registry contains the backends by type name, and the functions that combine two of them. Each function
// may be nil. The key of the configuration that needs it is then not supported.
type Registry struct {
	entries map[string]Entry
	Migrate Compose // the present and the next backend: NextBackend
	Combine Compose // the routers of a cloud, and a tunnel to hosts that they do not reach: Overflow
	Locate  Compose // the backends between locations and inside of one: SameLocation
}

// Entry is a backend of a registry.
type Entry struct {
	Type    string // in lower case
	Factory Factory
	// ProbesMTU is set if Backend.MTU may be "probe". The network must then have a device and a
	// Programmer.
	ProbesMTU bool
	// Overflows is set if the backend may be the tunnel of a cloud.
	Overflows bool
	// Inside is set if the backend may be the one inside of a location.
	Inside bool
	// OneThread is set if one thread of Go code is sufficient once the start is over, because the
	// process does not carry packets itself or does it best with one thread.
	OneThread bool
}

// NewRegistry returns a Registry of entries. It returns an error for a type that is empty,
// duplicate or not in lower case, and for a missing factory.
func NewRegistry(entries ...Entry) (Registry, error) {
	r := Registry{entries: map[string]Entry{}}
	for _, e := range entries {
		switch {
		case e.Type == "" || e.Type != strings.ToLower(e.Type):
			return Registry{}, fmt.Errorf("backend type %q is not a lower-case name", e.Type)
		case e.Factory == nil:
			return Registry{}, fmt.Errorf("backend type %q has no factory", e.Type)
		case r.entries[e.Type].Factory != nil:
			return Registry{}, fmt.Errorf("backend type %q is registered twice", e.Type)
		}
		r.entries[e.Type] = e
	}
	return r, nil
}

// ErrUnknownType means that no backend has the configured type.
var ErrUnknownType = errors.New("unknown backend type")

// New creates the backend for the configuration in env, and returns it with warnings about the
// configuration. The error wraps ErrUnknownType if no backend has the configured type. Other errors
// say what is wrong with the configuration.
func (r Registry) New(env Env) (Backend, []string, error) {
	if !env.Config.Migrates() {
		return r.one(env)
	}
	if r.Migrate == nil {
		return nil, nil, errors.New("NextBackend is not supported")
	}
	return r.Migrate(env, r.one, Create(r.one).within("NextBackend"))
}

// Describe returns the description of the backend for the configuration in env. It is zero if this version cannot
// create the backend, and so has none of its objects.
func (r Registry) Describe(env Env) Description {
	b, _, err := r.New(env)
	if err != nil {
		return Description{}
	}
	return b.Describe()
}

// one ignores a next backend.
func (r Registry) one(env Env) (Backend, []string, error) {
	cfg := env.Config
	entry, ok := r.entries[cfg.BackendType]
	if !ok {
		types := strings.Join(r.Types(), ", ")
		if cfg.Backend == nil {
			return nil, nil, fmt.Errorf("%w: the network configuration has no Backend, which means %q: set Backend.Type to one of %s",
				ErrUnknownType, cfg.BackendType, types)
		}
		return nil, nil, fmt.Errorf("%w %q: Backend.Type must be one of %s", ErrUnknownType, cfg.BackendType, types)
	}

	raw, probes, err := r.probesMTU(cfg.Backend, entry)
	if err != nil {
		return nil, nil, err
	}
	env.ProbesMTU = probes
	create := Create(func(env Env) (Backend, []string, error) { return entry.Factory(raw, env) })
	b, warnings, err := create(env)
	if err != nil {
		return nil, nil, err
	}

	switch d := b.Describe(); {
	case d.Overflow.given():
		return r.compose(r.Combine, env, create, "Overflow", d.Overflow, func(e Entry) bool { return e.Overflows })
	case d.SameLocation.given():
		if _, inside, _ := r.probesMTU(d.SameLocation.Raw, r.entries[d.SameLocation.Type]); inside || probes {
			// The MTU of a path needs a route to the peer alone. With locations only the backend inside
			// may have such a route.
			return nil, nil, fmt.Errorf("Backend has both MTU %q and SameLocation, which do not work together: remove one of them", probe)
		}
		return r.compose(r.Locate, env, create, "SameLocation", d.SameLocation, func(e Entry) bool { return e.Inside })
	}
	return b, warnings, nil
}

// compose creates the backend of first and of inner, the value of a key of its Backend object. may reports whether a
// backend can be the value.
func (r Registry) compose(c Compose, env Env, first Create, key string, inner Inner, may func(Entry) bool) (Backend, []string, error) {
	if c == nil || !may(r.entries[inner.Type]) {
		return nil, nil, fmt.Errorf("Backend.%s is %q: want one of %s, or an object with this Type and its keys",
			key, subnet.Shorten(inner.Type), r.list(may))
	}
	second := Create(func(env Env) (Backend, []string, error) {
		env.Config.BackendType = inner.Type
		env.Config.Backend = inner.Raw
		return r.one(env)
	})
	return c(env, first, second.within(key))
}

// Types returns the types of all backends in alphabetical order.
func (r Registry) Types() []string { return slices.Sorted(maps.Keys(r.entries)) }

func (r Registry) list(has func(Entry) bool) string {
	types := slices.DeleteFunc(r.Types(), func(t string) bool { return !has(r.entries[t]) })
	return strings.Join(types, ", ")
}

// OneThread reports whether Entry.OneThread is set for all backends of cfg. A backend that Overflow or
// SameLocation names does not count.
func (r Registry) OneThread(cfg subnet.Config) bool {
	return r.entries[cfg.BackendType].OneThread && (cfg.NextType == "" || r.entries[cfg.NextType].OneThread)
}

// Catalog is a registry, with the state that its backends keep in the process while networks begin
// and end.
type Catalog struct {
	Registry
	// Shutdown does what the backends must do on the host before the daemon stops, such as running
	// ShutdownCommand. The daemon calls it when it was told to stop. It may be nil.
	Shutdown func(ctx context.Context)
	// Leftovers contains those leftovers of which the host itself records whether they exist. They
	// are removed when the present backend does not have them, even if the former one is unknown.
	Leftovers []Leftover
	// CloseUnused closes the devices and tunnels of this process that no started network uses. A
	// network that ends may leave them running, so that they carry packets until the next network
	// takes them over. It may be nil.
	CloseUnused func() error
	// FreePorts is like CloseUnused, but closes only what listens on one of these UDP ports. It may
	// be nil.
	FreePorts func(ports []int) error
	// Close releases the state, after the end of all networks. It may be nil.
	Close func()
	// Recorded returns the leftovers of all networks that files in stateDir record, for a cleanup. It may
	// be nil.
	Recorded func(stateDir string) ([]Leftover, error)
	// Files returns the paths of files outside of stateDir that the backends have written,
	// for a cleanup. It may be nil.
	Files func(stateDir string) ([]string, error)
}

// probe is the value of Backend.MTU that makes each host find the MTU of each path.
const probe = "probe"

func (r Registry) probesMTU(raw json.RawMessage, e Entry) (_ json.RawMessage, probes bool, err error) {
	var keys struct{ MTU json.RawMessage }
	var text string
	if json.Unmarshal(raw, &keys) != nil || len(keys.MTU) == 0 || keys.MTU[0] != '"' || json.Unmarshal(keys.MTU, &text) != nil {
		return raw, false, nil // the factory says what is wrong
	}

	switch known := strings.EqualFold(text, probe); {
	case known && e.ProbesMTU:
		// No factory knows the value. Without the key devices have the default MTU.
		return subnet.WithoutKey(raw, "MTU"), true, nil
	case known:
		return nil, false, fmt.Errorf("Backend.MTU is %q, which the backend %s does not know: want one of %s as Backend.Type", probe, e.Type, r.list(func(e Entry) bool { return e.ProbesMTU }))
	case e.ProbesMTU:
		return nil, false, fmt.Errorf("Backend.MTU is %q: want %q or a number of bytes", subnet.Shorten(text), probe)
	}
	return raw, false, nil
}
