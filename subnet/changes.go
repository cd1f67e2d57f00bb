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
		a, poolA := networkOf(from, f)
		b, poolB := networkOf(to, f)
		note(f.String()+" network", a, b)
		if a == b {
			note(f.String()+" subnets", poolA, poolB)
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

// networkOf describes the network of one family and its subnets. Without a network of that family the
// text is "none".
func networkOf(cfg Config, f prefix.Family) (network, pool string) {
	n, ok := cfg.Network(f)
	if !ok {
		return "none", ""
	}
	p, err := n.Pool()
	if err != nil {
		return n.Prefix.String(), "no subnets to assign"
	}
	return n.Prefix.String(), p.String()
}

func sortedPrefixes(ps []netip.Prefix) []netip.Prefix {
	return slices.Compact(slices.SortedFunc(slices.Values(ps), netip.Prefix.Compare))
}

// backendChanges compares two objects of key, which is "Backend" or "NextBackend", without their
// Type. It shows the two values of a key only if Public returns true for both.
func backendChanges(key string, from, to json.RawMessage) []string {
	was := lastMembers(from)
	is := lastMembers(to)
	both := maps.Clone(was)
	maps.Copy(both, is)

	var changes []string
	for _, folded := range slices.Sorted(maps.Keys(both)) {
		old := decodeAny(was[folded])
		now := decodeAny(is[folded])
		if folded == "type" || reflect.DeepEqual(old, now) {
			continue
		}
		name := both[folded].key
		change := key + "." + name
		if Public(name, old) && Public(name, now) {
			change += fmt.Sprintf(" %v -> %v", orDefault(old), orDefault(now))
		}
		changes = append(changes, change)
	}
	return changes
}

// decodeAny returns the value of a member, with numbers as they are written. The value of an absent member
// is null as well.
func decodeAny(m member) (value any) {
	d := json.NewDecoder(bytes.NewReader(m.value))
	d.UseNumber()
	_ = d.Decode(&value) // cannot fail for a present member, because members has decoded it
	return value
}

func orDefault(value any) any {
	if value == nil {
		return "default"
	}
	return value
}

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
