// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

func TestPodCIDRs(t *testing.T) {
	with := func(one string, all ...string) *wire.Node {
		n := &wire.Node{PodCIDR: []byte(one)}
		for _, s := range all {
			n.PodCIDRs = append(n.PodCIDRs, []byte(s))
		}
		return n
	}
	for _, tt := range []struct {
		n    *wire.Node
		want []netip.Prefix
		err  string
	}{
		{with("10.5.1.0/24"), prefixtest.Parse("10.5.1.0/24"), ""},
		{with("10.5.1.0/24", "10.5.1.0/24"), prefixtest.Parse("10.5.1.0/24"), ""},
		{with("10.5.1.7/24"), prefixtest.Parse("10.5.1.0/24"), ""},
		{with("fd00::/64", "fd00::/64", "10.5.1.0/24"), prefixtest.Parse("10.5.1.0/24", "fd00::/64"), ""},
		{with(""), nil, "no podCIDR assigned yet"},
		{with("", "nonsense"), nil, `podCIDR "nonsense" is not a subnet`},
		{with("", "0.0.0.0/0"), nil, "is not a subnet"},
		{with("", "10.5.1.0/24", "10.5.2.0/24"), nil, "two podCIDRs of one family"},
		{with("", "10.5.1.0/24", "fd00::/64", "fd01::/64"), nil, "3 podCIDRs"},
	} {
		got, err := podCIDRs(tt.n)
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s %s: error is %v, want %q", tt.n.PodCIDR, tt.n.PodCIDRs, err, tt.err)
		}
		if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%s %s (-want +got):\n%s", tt.n.PodCIDR, tt.n.PodCIDRs, diff)
		}
	}
}
