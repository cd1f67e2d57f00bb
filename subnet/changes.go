// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Changes describes the differences between two configurations, one text each. It ignores
// differences without an effect, and does not show values that may be secrets.
func Changes(from, to Config) []string {
	var changes []string
	note := func(name string, from, to any) {
		if !reflect.DeepEqual(from, to) {
			changes = append(changes, fmt.Sprintf("%s %v -> %v", name, from, to))
		}
	}

	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		a := networkOf(from, f)
		b := networkOf(to, f)
		note(f.String()+" network", a.net, b.net)
		if a.net == b.net {
			note(f.String()+" subnets", a.pool, b.pool)
		}
	}

	note("EnableNFTables", from.NFTables, to.NFTables)
	note("NonMasqueradeCIDRs", sortedPrefixes(from.NonMasquerade), sortedPrefixes(to.NonMasquerade))
	note("Backend.Type", from.BackendType, to.BackendType)
	changes = append(changes, backendChanges("Backend", from.Backend, to.Backend)...)
	note("NextBackend.Type", cmp.Or(from.NextType, "none"), cmp.Or(to.NextType, "none"))
	changes = append(changes, backendChanges("NextBackend", from.NextBackend, to.NextBackend)...)
	note("stage of the migration", cmp.Or(from.Stage, "none"), cmp.Or(to.Stage, "none"))
	return changes
}

type networkText struct{ net, pool string }

// networkOf describes the network of one family. Without a network of that family the text is
// "none".
func networkOf(cfg Config, f prefix.Family) networkText {
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

func sortedPrefixes(ps []netip.Prefix) []netip.Prefix {
	s := slices.Concat([]netip.Prefix{}, ps)
	slices.SortFunc(s, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return slices.Compact(s)
}

// backendChanges compares two objects of key, which is "Backend" or "NextBackend", without their
// Type. It shows the two values of a key only if Public returns true for both.
func backendChanges(key string, from, to json.RawMessage) []string {
	a := backendKeys(from)
	b := backendKeys(to)
	names := map[string]string{}
	for _, keys := range []map[string]backendKey{a, b} {
		for folded, key := range keys {
			names[folded] = key.name
		}
	}

	var changes []string
	for _, folded := range slices.Sorted(maps.Keys(names)) {
		old := a[folded]
		now := b[folded]
		if folded == "type" || reflect.DeepEqual(old.value, now.value) {
			continue
		}
		change := key + "." + names[folded]
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

// backendKeys returns the keys and values of a JSON object, by key in lower case, because keys
// are compared without regard to case. The value of an absent key is null as well.
func backendKeys(raw json.RawMessage) map[string]backendKey {
	keys := map[string]backendKey{}
	for _, m := range members(raw) {
		var value any
		d := json.NewDecoder(bytes.NewReader(m.value))
		d.UseNumber()
		_ = d.Decode(&value) // cannot fail, because members has decoded it
		keys[strings.ToLower(m.key)] = backendKey{m.key, value}
	}
	return keys
}

func (k backendKey) public() bool { return Public(k.name, k.value) }

// words are the keys of the Backend object, in lower case, whose values are words and no secrets.
var words = []string{"type", "mode", "implementation", "mtu", "samelocation", "overflow"}

// Public reports whether a value of the Backend object may be shown. name is its key. A string may be a
// secret, unless its key is known to have words only.
func Public(name string, value any) bool {
	switch value := value.(type) {
	case nil, bool, float64, json.Number:
		return true
	case string:
		return slices.Contains(words, strings.ToLower(name)) && value == Shorten(value)
	}
	return false
}

func (k backendKey) String() string {
	if k.value == nil {
		return "default"
	}
	return fmt.Sprint(k.value)
}
