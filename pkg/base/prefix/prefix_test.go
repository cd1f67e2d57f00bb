// SPDX-License-Identifier: Apache-2.0

package prefix_test

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
)

func TestOfFamily(t *testing.T) {
	dual := prefixtest.Parse("fd00:5::/64", "10.5.1.0/24", "10.5.2.0/24")
	for _, tt := range []struct {
		name     string
		prefixes []netip.Prefix
		family   prefix.Family
		want     string // empty if there is none
	}{
		{"IPv4", dual, prefix.IPv4, "10.5.1.0/24"},
		{"IPv6", dual, prefix.IPv6, "fd00:5::/64"},
		{"no IPv6", dual[1:], prefix.IPv6, ""},
		{"none at all", nil, prefix.IPv4, ""},
	} {
		got, ok := prefix.OfFamily(tt.prefixes, tt.family)
		if ok != (tt.want != "") || ok && got.String() != tt.want {
			t.Errorf("%s: got %v, %v, want %q", tt.name, got, ok, tt.want)
		}
	}
}
