// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
)

func network(t *testing.T, raw string) subnet.Network {
	t.Helper()
	cfg, err := subnet.ParseConfig([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return cfg.Networks[0]
}

func v6Config(rest string) string { return `{"EnableIPv4":false,"EnableIPv6":true,` + rest + `}` }

func TestPool(t *testing.T) {
	for _, tc := range []struct{ raw, want string }{
		{`{"Network":"10.0.0.0/8"}`, "10.0.1.0/24 to 10.255.255.0/24"},
		{`{"Network":"10.5.0.0/22"}`, "10.5.1.0/24 to 10.5.3.0/24"},
		{`{"Network":"10.5.0.0/23"}`, "10.5.0.128/25 to 10.5.1.128/25"},
		{`{"Network":"10.5.0.0/24"}`, "10.5.0.64/26 to 10.5.0.192/26"},
		{`{"Network":"10.5.0.0/28"}`, "10.5.0.4/30 to 10.5.0.12/30"},
		{`{"Network":"255.255.0.0/16"}`, "255.255.1.0/24 to 255.255.255.0/24"},
		{`{"Network":"10.5.0.0/16","SubnetMin":"10.5.0.0"}`, "10.5.0.0/24 to 10.5.255.0/24"},
		{`{"Network":"10.5.0.0/16","SubnetLen":30,"SubnetMin":"10.5.0.8","SubnetMax":"10.5.0.8"}`, "10.5.0.8/30 to 10.5.0.8/30"},
		{v6Config(`"IPv6Network":"fd00::/48"`), "fd00:0:0:1::/64 to fd00:0:0:ffff::/64"},
		{v6Config(`"IPv6Network":"fd00::/63"`), "fd00::8000:0:0:0/65 to fd00:0:0:1:8000::/65"},
		{v6Config(`"IPv6Network":"fd00::/124"`), "fd00::4/126 to fd00::c/126"},
		{v6Config(`"IPv6Network":"fdff::/16","IPv6SubnetLen":126`),
			"fdff::4/126 to fdff:ffff:ffff:ffff:ffff:ffff:ffff:fffc/126"},
		{`{"Network":"120.0.0.0/5","SubnetMax":"126.255.255.0"}`, "120.0.1.0/24 to 126.255.255.0/24"},
		{`{"Network":"168.0.0.0/6","SubnetMin":"169.255.0.0"}`, "169.255.0.0/24 to 171.255.255.0/24"},
		{v6Config(`"IPv6Network":"::/48"`), "0:0:0:1::/64 to 0:0:0:ffff::/64"},
	} {
		pool, err := network(t, tc.raw).Pool()
		if err != nil || pool.String() != tc.want {
			t.Errorf("%s: got %v, %v, want %s", tc.raw, pool, err, tc.want)
		}
	}
}

func TestPoolRefuses(t *testing.T) {
	for _, tc := range []struct{ raw, want string }{
		{`{"Network":"10.5.0.0/16","SubnetLen":31}`, "SubnetLen must be less than /31, is 31"},
		{`{"Network":"10.5.0.0/23","SubnetLen":24}`, "network must be able to accommodate at least four subnets"},
		{`{"Network":"10.5.0.0/29"}`, "network is too small. Minimum useful network prefix is /28"},
		{`{"Network":"10.5.0.0/16","SubnetMin":"10.6.0.0"}`, "SubnetMin is not in the range of the Network: 10.6.0.0 is outside 10.5.0.0/16"},
		{`{"Network":"10.5.0.0/16","SubnetMax":"10.4.0.0"}`, "SubnetMax is not in the range of the Network"},
		{`{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.7"}`, "SubnetMin is not on a SubnetLen boundary: 10.5.1.7"},
		{`{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.1"}`, "SubnetMax is not on a SubnetLen boundary: 10.5.9.1"},
		{`{"Network":"10.5.0.0/16","SubnetMin":"10.5.9.0","SubnetMax":"10.5.8.0"}`, "SubnetMin 10.5.9.0 is above SubnetMax 10.5.8.0"},
		{`{"Network":"10.5.0.0/16","SubnetMax":"10.5.0.0"}`, "SubnetMin 10.5.1.0 is above SubnetMax 10.5.0.0"},
		{`{"Network":"120.0.0.0/5"}`, "Network: a host could get a subnet of 127.0.0.0/8, which is loopback"},
		{`{"Network":"168.0.0.0/6"}`, "a subnet of 169.254.0.0/16, which is link-local"},
		{v6Config(`"IPv6Network":"fc00::/6"`), "a subnet of fe80::/10, which is link-local"},
		{v6Config(`"IPv6Network":"fd00::/48","IPv6SubnetLen":127`), "IPv6SubnetLen must be less than /127, is 127"},
		{v6Config(`"IPv6Network":"fd00::/48","IPv6SubnetLen":49`), "network must be able to accommodate at least four subnets"},
		{v6Config(`"IPv6Network":"fd00::/125"`), "IPv6Network is too small. Minimum useful network prefix is /124"},
		{v6Config(`"IPv6Network":"fd00::/48","IPv6SubnetMin":"fd01::"`), "IPv6SubnetMin is not in the range of the Network"},
		{v6Config(`"IPv6Network":"fd00::/48","IPv6SubnetMax":"fd00::1"`), "IPv6SubnetMax is not on a SubnetLen boundary"},
	} {
		cfg, err := subnet.ParseConfig([]byte(tc.raw))
		if err != nil {
			t.Fatal(err)
		}
		_, err = cfg.Pools()
		checkInvalid(t, tc.raw, err, tc.want)
	}
}

func TestPoolContains(t *testing.T) {
	pool, err := network(t, `{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0"}`).Pool()
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range map[string]bool{
		"10.5.1.0/24": true, "10.5.9.0/24": true,
		"10.5.0.0/24": false, "10.5.10.0/24": false, "10.5.2.0/25": false, "10.5.2.1/24": false, "fd00::/24": false,
	} {
		if got := pool.Contains(netip.MustParsePrefix(s)); got != want {
			t.Errorf("Contains(%s) is %v, want %v", s, got, want)
		}
	}
	if pool.Contains(netip.Prefix{}) || (subnet.Pool{}).Contains(netip.Prefix{}) {
		t.Error("the zero prefix is in a pool")
	}
}

// TestPickAgainstBruteForce finds the free subnets of a pool by a check of each subnet. Pick must return
// only free subnets, and each of them at some time.
//
//stages:rest it counts the free subnets of many pools
func TestPickAgainstBruteForce(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		last := []int{128, 192}[rnd.IntN(2)] // taken prefixes reach beyond some of the pools
		raw := fmt.Sprintf(`{"Network":"10.5.0.0/24","SubnetLen":%d,"SubnetMax":"10.5.0.%d"}`, 26+rnd.IntN(5), last)
		family, base := prefix.IPv4, netip.MustParseAddr("10.5.0.0")
		if seed%2 == 1 {
			raw = v6Config(fmt.Sprintf(`"IPv6Network":"fd00::/120","IPv6SubnetLen":%d,"IPv6SubnetMax":"fd00::%x"`, 122+rnd.IntN(5), last))
			family, base = prefix.IPv6, netip.MustParseAddr("fd00::")
		}
		pool, err := network(t, raw).Pool()
		if err != nil {
			t.Fatal(err)
		}
		var taken []netip.Prefix
		for range rnd.IntN(12) {
			b := base.AsSlice()
			b[len(b)-1] = byte(rnd.Uint32())
			a, _ := netip.AddrFromSlice(b)
			taken = append(taken, netip.PrefixFrom(a, family.Bits()-rnd.IntN(8)))
		}
		taken = append(taken, netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32"), netip.Prefix{})
		checkPick(t, pool, taken)
	}
}

func checkPick(t *testing.T, pool subnet.Pool, taken []netip.Prefix) {
	t.Helper()
	var first, last netip.Prefix
	if err := scan(pool, &first, &last); err != nil {
		t.Fatal(err)
	}
	free := map[netip.Prefix]int{}
	for s := first; ; s = netip.PrefixFrom(prefix.Last(s).Next(), s.Bits()) {
		if !slices.ContainsFunc(taken, s.Overlaps) {
			free[s] = 0
		}
		if s == last {
			break
		}
	}
	for range 50 * (len(free) + 1) {
		s, ok := pool.Pick(taken)
		if ok != (len(free) > 0) {
			t.Fatalf("%v, taken %v: Pick says %v, %d are free", pool, taken, ok, len(free))
		}
		if _, isFree := free[s]; ok && !isFree {
			t.Fatalf("%v, taken %v: picked %v", pool, taken, s)
		}
		if ok {
			free[s]++
		}
	}
	for s, n := range free {
		if n == 0 {
			t.Errorf("%v, taken %v: %v was never picked", pool, taken, s)
		}
	}
}

func scan(pool subnet.Pool, first, last *netip.Prefix) error {
	var a, b string
	if _, err := fmt.Sscanf(pool.String(), "%s to %s", &a, &b); err != nil {
		return err
	}
	*first, *last = netip.MustParsePrefix(a), netip.MustParsePrefix(b)
	return nil
}

func TestPickFromVastPool(t *testing.T) {
	pool, err := network(t, v6Config(`"IPv6Network":"2000::/3","IPv6SubnetLen":126`)).Pool()
	if err != nil {
		t.Fatal(err)
	}
	var taken []netip.Prefix
	for range 200 {
		s, ok := pool.Pick(taken)
		if !ok || !pool.Contains(s) || slices.Contains(taken, s) {
			t.Fatalf("picked %v, %v", s, ok)
		}
		taken = append(taken, s)
	}
}

func TestAllocate(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(
		`{"Network":"10.5.0.0/28","EnableIPv6":true,"IPv6Network":"fd00::/48"}`))
	if err != nil {
		t.Fatal(err)
	}
	pools, err := cfg.Pools()
	if err != nil {
		t.Fatal(err)
	}
	wanted := prefixtest.Parse("10.5.0.8/30", "fd00:0:0:7::/64", "10.5.0.12/30")
	got, err := subnet.Allocate(pools, wanted, prefixtest.Parse("10.5.0.0/29"))
	if err != nil || !slices.Equal(got, prefixtest.Parse("10.5.0.8/30", "fd00:0:0:7::/64")) {
		t.Errorf("got %v, %v", got, err)
	}
	got, err = subnet.Allocate(pools, wanted, prefixtest.Parse("10.5.0.8/32", "fd00:0:0:7::/65"))
	if err != nil || got[0] != wanted[2] || got[1] == wanted[1] {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = subnet.Allocate(pools, wanted, prefixtest.Parse("10.5.0.0/16"))
	if want := "out of subnets: all 3 from 10.5.0.4/30 to 10.5.0.12/30 are taken"; !errors.Is(err, subnet.ErrNoSubnets) || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
}

func BenchmarkPick(b *testing.B) {
	pool, err := subnet.Network{Prefix: netip.MustParsePrefix("10.0.0.0/8")}.Pool()
	if err != nil {
		b.Fatal(err)
	}
	var taken []netip.Prefix
	for range 5000 {
		s, _ := pool.Pick(nil)
		taken = append(taken, s)
	}
	for b.Loop() {
		pool.Pick(taken)
	}
}
