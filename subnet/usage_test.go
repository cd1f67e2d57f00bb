// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"math"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPoolUsage(t *testing.T) {
	lease := func(subnet string, permanent bool) Lease {
		return Lease{Permanent: permanent, Endpoints: []Endpoint{{Subnet: netip.MustParsePrefix(subnet)}}}
	}
	for _, tc := range []struct {
		name, config string
		leases       []Lease
		want         Usage
	}{
		{"no lease", `{"Network":"10.5.0.0/16"}`, nil, Usage{Free: 255}},
		{"leases and reservations", `{"Network":"10.5.0.0/16"}`,
			[]Lease{lease("10.5.1.0/24", false), lease("10.5.2.0/24", true), lease("10.5.9.0/24", false)}, Usage{252, 2, 1}},
		{"outside, of the other family, and not known", `{"Network":"10.5.0.0/16"}`,
			[]Lease{lease("10.6.1.0/24", false), lease("fd00::/64", false), {Endpoints: []Endpoint{{}}}}, Usage{Free: 255}},
		{"another length", `{"Network":"10.5.0.0/16"}`, []Lease{lease("10.5.8.0/22", false), lease("10.5.12.0/26", true)}, Usage{250, 4, 1}},
		{"twice", `{"Network":"10.5.0.0/16"}`, []Lease{lease("10.5.8.0/24", false), lease("10.5.8.0/24", true)}, Usage{254, 0, 1}},
		{"huge", `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/16","IPv6SubnetLen":120}`,
			[]Lease{lease("fd00:0:0:1::/120", false)}, Usage{math.MaxUint64, 1, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, err := ParseConfig([]byte(tc.config))
			if err != nil {
				t.Fatal(err)
			}
			pools, err := cfg.Pools()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, pools[0].Usage(tc.leases)); diff != "" {
				t.Error(diff)
			}
		})
	}
	if got := (Pool{}).Usage([]Lease{lease("10.5.8.0/24", false)}); got != (Usage{}) {
		t.Error(fmt.Sprint("the zero pool: ", got))
	}
}
