// SPDX-License-Identifier: Apache-2.0

// Package prefixtest parses prefixes in tests.
package prefixtest

import "net/netip"

// Parse returns the prefixes in texts. It panics if one of them is not a prefix.
func Parse(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}
