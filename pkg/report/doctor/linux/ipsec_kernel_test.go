// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// TestKernelPolicies reads policies about prefixes of both families, among them IPv6 prefixes that could be taken for
// IPv4 ones because only their first bits are set.
func TestKernelPolicies(t *testing.T) {
	enterNamespace(t)
	if have, err := policies(); err != nil || len(have) > 0 {
		t.Fatalf("without a policy: %v, %v", have, err)
	}

	var want []doctor.Policy
	for _, pair := range [][2]string{
		{"10.0.0.0/8", "10.5.2.0/24"}, {"0.0.0.0/0", "192.0.2.1/32"},
		{"fd00:5::/48", "fd00:9::/32"}, {"::/0", "fd00::/8"}, {"fd00:5:0:1::/64", "fd00:5::2/128"},
	} {
		if out, err := exec.Command("ip", "xfrm", "policy", "add", "src", pair[0], "dst", pair[1], "dir", "out", "action", "block").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		want = append(want, doctor.Policy{Direction: "out", Src: netip.MustParsePrefix(pair[0]), Dst: netip.MustParsePrefix(pair[1]), Blocks: true})
	}

	have, err := policies()
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range [][]doctor.Policy{have, want} {
		slices.SortFunc(list, func(a, b doctor.Policy) int { return a.Src.Compare(b.Src) })
	}
	if !slices.Equal(have, want) {
		t.Errorf("the policies are\n%v, want\n%v", have, want)
	}
}
