// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// ErrConfigChanged ends the daemon with --exit-on-config-change.
var ErrConfigChanged = errors.New("the network configuration has changed")

// configWatch compares the present network configuration with the one that the daemon
// uses.
type configWatch struct {
	validate func(text []byte) (subnet.Config, error)
	used     subnet.Config
	needed   atomic.Pointer[string] // the changes; nil if there are none
	changed  chan struct{}          // closed when there is a changed configuration to restart with
}

func newConfigWatch(validate func(text []byte) (subnet.Config, error)) *configWatch {
	return &configWatch{validate: validate, changed: make(chan struct{})}
}

// difference returns a description of the changes, or "" if there are none.
func (w *configWatch) difference() string {
	if s := w.needed.Load(); s != nil {
		return *s
	}
	return ""
}

// apply handles the text of the present configuration, which is nil if there is none. Only
// one goroutine at a time may call it.
func (w *configWatch) apply(ctx context.Context, text []byte) {
	log := klog.FromContext(ctx)
	now, usable := "", false
	if text == nil {
		now = "there is no configuration any more"
	} else if cfg, err := w.validate(text); err != nil {
		now = err.Error()
	} else {
		now, usable = strings.Join(configChanges(w.used, cfg), ", "), true
	}
	before := w.difference()
	if now == before {
		return
	}
	w.needed.Store(&now)
	switch {
	case now == "":
		log.Info("the network configuration is again the one in use")
	case !usable:
		log.Error(nil, "the network configuration cannot be used any more: flanneld goes on with the one that it has, but could not start again", "reason", now)
	default:
		log.Info("the network configuration has changed: restart needed", "changes", now)
		select {
		case <-w.changed:
		default:
			close(w.changed)
		}
	}
}

// exit waits for a changed configuration and returns ErrConfigChanged.
func (w *configWatch) exit(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-w.changed:
		return fmt.Errorf("%w: %s", ErrConfigChanged, w.difference())
	}
}

// followConfig makes group follow changes of the configuration, if Watch does not do so
// already, and end the daemon if the options ask for that.
func (n *network) followConfig(ctx context.Context, group *errgroup.Group) {
	if w, ok := n.store.(subnet.ConfigWatcher); ok {
		group.Go(func() error {
			return ended(ctx, w.WatchConfig(ctx, func(text []byte) { n.config.apply(ctx, text) }))
		})
	}
	if n.opts.ExitOnConfigChange {
		group.Go(func() error { return n.config.exit(ctx) })
	}
}

// configChanges describes the differences between two configurations that have a meaning.
func configChanges(from, to subnet.Config) []string {
	var changes []string
	note := func(name string, from, to any) {
		if !reflect.DeepEqual(from, to) {
			changes = append(changes, fmt.Sprintf("%s %v -> %v", name, from, to))
		}
	}
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		a, b := networkOf(from, f), networkOf(to, f)
		note(f.String()+" network", a.net, b.net)
		if a.net == b.net {
			note(f.String()+" subnets", a.pool, b.pool)
		}
	}
	note("EnableNFTables", from.NFTables, to.NFTables)
	note("NonMasqueradeCIDRs", sorted(from.NonMasquerade), sorted(to.NonMasquerade))
	note("Backend.Type", from.BackendType, to.BackendType)
	return append(changes, backendChanges(from.Backend, to.Backend)...)
}

type networkText struct{ net, pool string }

// networkOf describes the network of one family.
func networkOf(cfg subnet.Config, f prefix.Family) networkText {
	n, ok := cfg.Network(f)
	if !ok {
		return networkText{net: "none"}
	}
	pool := "no subnets to assign"
	if p, err := n.Pool(); err == nil {
		pool = p.String()
	}
	return networkText{n.Prefix.String(), pool}
}

func sorted(ps []netip.Prefix) []netip.Prefix {
	s := slices.Concat([]netip.Prefix{}, ps)
	slices.SortFunc(s, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return slices.Compact(s)
}

// backendChanges compares the Backend objects. It shows the values that are Public.
func backendChanges(from, to json.RawMessage) []string {
	a, b := backendKeys(from), backendKeys(to)
	names := map[string]string{}
	for _, keys := range []map[string]backendKey{a, b} {
		for folded, key := range keys {
			names[folded] = key.name
		}
	}
	var changes []string
	for _, folded := range slices.Sorted(maps.Keys(names)) {
		old, now := a[folded], b[folded]
		if folded == "type" || reflect.DeepEqual(old.value, now.value) {
			continue
		}
		change := "Backend." + names[folded]
		if old.public() && now.public() {
			change += fmt.Sprintf(" %s -> %s", old, now)
		}
		changes = append(changes, change)
	}
	return changes
}

type backendKey struct {
	name  string
	value any
}

// backendKeys returns the keys of a JSON object. They are compared without regard to
// case.
func backendKeys(raw json.RawMessage) map[string]backendKey {
	var object map[string]any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	_ = d.Decode(&object) // cannot fail, because the configuration was decoded before
	keys := make(map[string]backendKey, len(object))
	for name, value := range object {
		if value != nil {
			keys[strings.ToLower(name)] = backendKey{name, value}
		}
	}
	return keys
}

func (k backendKey) public() bool { return Public(k.value) }

// Public reports whether a value of the Backend object, other than its Type, may be
// shown. A string may be a secret.
func Public(value any) bool {
	switch value.(type) {
	case nil, bool, float64, json.Number:
		return true
	}
	return false
}

func (k backendKey) String() string {
	if k.value == nil {
		return "default"
	}
	return fmt.Sprint(k.value)
}
