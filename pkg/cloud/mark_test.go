// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/cloud"
)

func TestDescribe(t *testing.T) {
	networks := []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("fd00:5::/48")}
	for _, tt := range []struct{ cluster, dst, want string }{
		{"blue", "10.5.1.0/24", "flanneld cluster=blue network=10.5.0.0/16"},
		{"blue", "fd00:5::/64", "flanneld cluster=blue network=fd00:5::/48"},
		{"", "10.5.1.0/24", "flanneld cluster= network=10.5.0.0/16"},
	} {
		got := cloud.Describe(tt.cluster, networks, netip.MustParsePrefix(tt.dst))
		if by, ok := cloud.MarkedBy(got); got != tt.want || !ok || by != tt.cluster {
			t.Errorf("the description is %q, and marks the cluster %q (%v), want %q", got, by, ok, tt.want)
		}
	}
}

func TestOfOther(t *testing.T) {
	for description, want := range map[string]bool{
		"flanneld cluster=blue network=10.5.0.0/16":  false,
		"flanneld cluster=green network=10.5.0.0/16": true,
		"flanneld cluster=green":                     true,
		"flanneld cluster= network=10.5.0.0/16":      false,
		"flanneld network=10.5.0.0/16":               false,
		"flanneld":                                   false,
		"":                                           false,
		" ":                                          false,
		"made by cluster=green":                      false,
		"flanneldcluster=green":                      false,
	} {
		if got := cloud.OfOther(description, "blue"); got != want {
			t.Errorf("%q is the mark of another cluster: %v, want %v", description, got, want)
		}
	}
	if !cloud.OfOther("flanneld cluster=green", "") {
		t.Error("a cluster without a name does not know the mark of another one")
	}
}
