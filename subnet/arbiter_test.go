// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	gocmp "cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// lease makes a lease from pairs of subnet and public IP. An empty public IP means none.
func lease(key string, order uint64, pairs ...string) subnet.Lease {
	l := subnet.Lease{Key: key, Order: order}
	for i := 0; i < len(pairs); i += 2 {
		e := subnet.Endpoint{Subnet: netip.MustParsePrefix(pairs[i])}
		if pairs[i+1] != "" {
			e.PublicIP = netip.MustParseAddr(pairs[i+1])
		}
		l.Endpoints = append(l.Endpoints, e)
	}
	return l
}

func keys(leases []subnet.Lease) []string {
	out := []string{}
	for _, l := range leases {
		out = append(out, l.Key)
	}
	return out
}

// arbitrate lets an Arbiter decide about leases without identities. It returns the accepted leases
// in the order of their age, and the refusals.
func arbitrate(cfg subnet.Config, own subnet.Lease, leases []subnet.Lease) ([]subnet.Lease, []subnet.Refusal) {
	var all []subnet.Claimant
	for _, l := range subnettest.Pointers(leases...) {
		all = append(all, subnet.Claimant{Lease: l})
	}
	a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &own})
	a.Broadcasts = []netip.Addr{netip.MustParseAddr("192.0.2.255")}
	a.Reset(all)
	var accepted []subnet.Lease
	for _, l := range a.Accepted() {
		accepted = append(accepted, *l)
	}
	slices.SortFunc(accepted, func(x, y subnet.Lease) int {
		return gocmp.Or(gocmp.Compare(x.Order, y.Order), gocmp.Compare(x.Key, y.Key))
	})
	return accepted, a.AllRefused()
}

func TestArbitrate(t *testing.T) {
	v4 := `{"Network":"10.5.0.0/16"}`
	dual := `{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`
	own := lease("own", 50, "10.5.1.0/24", "192.0.2.1")
	good := lease("good", 10, "10.5.2.0/24", "192.0.2.2")
	for _, tc := range []struct {
		name    string
		config  string
		own     subnet.Lease
		leases  []subnet.Lease
		want    []string
		refused []subnet.Refusal
	}{
		{
			name: "in the order of age, then by key", config: v4, own: own,
			leases: []subnet.Lease{
				lease("c", 7, "10.5.3.0/24", "192.0.2.3"), lease("b", 7, "10.5.4.0/24", "192.0.2.4"), lease("a", 9, "10.5.5.0/24", "192.0.2.5"),
			},
			want: []string{"b", "c", "a"},
		},
		{
			name: "outside the network", config: v4, own: own,
			leases: []subnet.Lease{
				good, lease("a", 1, "10.6.0.0/24", "192.0.2.3"), lease("b", 2, "0.0.0.0/1", "192.0.2.4"), lease("c", 3, "10.4.0.0/15", "192.0.2.5"),
			},
			want: []string{"good"},
			refused: []subnet.Refusal{
				{"a", "10.6.0.0/24 is outside the Network 10.5.0.0/16"},
				{"b", "0.0.0.0/1 is outside the Network 10.5.0.0/16"},
				{"c", "10.4.0.0/15 is outside the Network 10.5.0.0/16"},
			},
		},
		{
			name: "our own subnet comes first, however old the other is", config: v4, own: own,
			leases: []subnet.Lease{
				lease("same", 1, "10.5.1.0/24", "192.0.2.3"), lease("part", 2, "10.5.1.128/25", "192.0.2.4"),
				lease("all", 3, "10.5.0.0/16", "192.0.2.5"), good,
			},
			want: []string{"good"},
			refused: []subnet.Refusal{
				{"same", "10.5.1.0/24 overlaps our own 10.5.1.0/24, and was there first: other hosts prefer it"},
				{"part", "10.5.1.128/25 overlaps our own 10.5.1.0/24"},
				{"all", "10.5.0.0/16 overlaps our own 10.5.1.0/24"},
			},
		},
		{
			name: "our own subnet has an older lease", config: v4, own: lease("own", 5, "10.5.1.0/24", "192.0.2.1"),
			leases: []subnet.Lease{lease("older", 4, "10.5.1.0/24", "192.0.2.3"), lease("younger", 6, "10.5.1.0/24", "192.0.2.4"), good},
			want:   []string{"good"},
			refused: []subnet.Refusal{
				{"older", "10.5.1.0/24 overlaps our own 10.5.1.0/24, and was there first: other hosts prefer it"},
				{"younger", "10.5.1.0/24 overlaps our own 10.5.1.0/24"},
			},
		},
		{
			name: "loopback and multicast", config: `{"Network":"96.0.0.0/3"}`, own: lease("own", 1, "100.0.1.0/24", "192.0.2.1"),
			leases: []subnet.Lease{
				lease("lo", 1, "127.0.1.0/24", "192.0.2.3"), lease("wide", 2, "124.0.0.0/6", "192.0.2.4"), lease("ok", 3, "100.0.2.0/24", "192.0.2.5"),
			},
			want: []string{"ok"},
			refused: []subnet.Refusal{
				{"lo", "127.0.1.0/24 overlaps 127.0.0.0/8, which is not for pods"},
				{"wide", "124.0.0.0/6 overlaps 127.0.0.0/8, which is not for pods"},
			},
		},
		{
			name: "link-local", config: `{"Network":"160.0.0.0/3"}`, own: lease("own", 1, "172.16.1.0/24", "192.0.2.1"),
			leases:  []subnet.Lease{lease("metadata", 1, "169.254.169.0/24", "192.0.2.3"), lease("ok", 2, "172.16.2.0/24", "192.0.2.4")},
			want:    []string{"ok"},
			refused: []subnet.Refusal{{"metadata", "169.254.169.0/24 overlaps 169.254.0.0/16, which is not for pods"}},
		},
		{
			name: "public addresses to which no host can send", config: v4, own: own,
			leases: []subnet.Lease{
				lease("none", 1, "10.5.3.0/24", ""), lease("zero", 2, "10.5.4.0/24", "0.0.0.0"), lease("multi", 3, "10.5.5.0/24", "239.0.0.1"),
				lease("lo", 4, "10.5.6.0/24", "127.0.0.1"), lease("ours", 5, "10.5.7.0/24", "192.0.2.1"), lease("six", 6, "10.5.8.0/24", "fd00::1"),
				lease("bcast", 7, "10.5.9.0/24", "255.255.255.255"), lease("link", 8, "10.5.10.0/24", "192.0.2.255"), good,
			},
			want: []string{"good"},
			refused: []subnet.Refusal{
				{"none", "10.5.3.0/24 has no public IPv4 address"},
				{"zero", "10.5.4.0/24 has no public IPv4 address"},
				{"multi", "10.5.5.0/24 has public IP 239.0.0.1, which is not the address of a host"},
				{"lo", "10.5.6.0/24 has public IP 127.0.0.1, which is not the address of a host"},
				{"ours", "10.5.7.0/24 has public IP 192.0.2.1, which is our own"},
				{"link", "10.5.10.0/24 has public IP 192.0.2.255, which is a broadcast address"},
				{"six", "10.5.8.0/24 has public IP fd00::1, which is not an IPv4 address"},
				{"bcast", "10.5.9.0/24 has public IP 255.255.255.255, which is not the address of a host"},
			},
		},
		{
			name: "a route must not swallow the address of a host", config: `{"Network":"10.0.0.0/8","SubnetMin":"10.5.0.0","SubnetMax":"10.5.255.0"}`,
			own: lease("own", 9, "10.5.1.0/24", "10.99.0.1"),
			leases: []subnet.Lease{
				lease("ours", 1, "10.99.0.0/24", "10.98.0.1"), lease("itself", 2, "10.97.0.0/24", "10.97.0.7"), lease("ok", 3, "10.5.2.0/24", "10.96.0.2"),
				lease("peer", 4, "10.96.0.0/24", "10.95.0.1"), lease("inside", 5, "10.5.3.0/24", "10.5.2.9"), lease("in ours", 6, "10.5.4.0/24", "10.5.1.9"),
			},
			want: []string{"ok"},
			refused: []subnet.Refusal{
				{"ours", "10.99.0.0/24 contains the public IP of our own 10.5.1.0/24"},
				{"itself", "10.97.0.0/24 contains its own public IP 10.97.0.7"},
				{"peer", "10.96.0.0/24 contains the public IP of 10.5.2.0/24 of ok"},
				{"inside", "10.5.3.0/24 has public IP 10.5.2.9, which lies in 10.5.2.0/24 of ok"},
				{"in ours", "10.5.4.0/24 has public IP 10.5.1.9, which lies in our own 10.5.1.0/24"},
			},
		},
		{
			name: "of overlapping leases the first in the store stays", config: v4, own: own,
			leases: []subnet.Lease{
				lease("young", 30, "10.5.2.0/23", "192.0.2.3"), good, lease("old", 5, "10.5.3.0/24", "192.0.2.5"), lease("twin", 10, "10.5.2.0/24", "192.0.2.6"),
			},
			want: []string{"old", "good"},
			refused: []subnet.Refusal{
				{"twin", "10.5.2.0/24 overlaps 10.5.2.0/24 of good, which was there first"},
				{"young", "10.5.2.0/23 overlaps 10.5.2.0/24 of good, which was there first"},
			},
		},
		{
			name: "a refused lease takes nothing from others", config: v4, own: own,
			leases: []subnet.Lease{
				lease("bad", 1, "10.5.0.0/20", "192.0.2.7"), lease("next", 2, "10.5.3.0/24", "192.0.2.7"),
			},
			want:    []string{"next"},
			refused: []subnet.Refusal{{"bad", "10.5.0.0/20 overlaps our own 10.5.1.0/24"}},
		},
		{
			name: "one public IP with several subnets", config: dual, own: own,
			leases: []subnet.Lease{
				good, lease("next", 20, "10.5.3.0/24", "192.0.2.2", "fd00:10:5:3::/64", "2001:db8::2"),
				lease("third", 30, "10.5.4.0/24", "192.0.2.2", "fd00:10:5:4::/64", "2001:db8::2"),
			},
			want: []string{"good", "next", "third"},
		},
		{
			name: "a public IP that several have must not be swallowed", own: own,
			config: `{"Network":"10.0.0.0/8","SubnetMin":"10.5.0.0","SubnetMax":"10.5.255.0"}`,
			leases: []subnet.Lease{
				lease("b", 5, "10.5.2.0/24", "10.96.0.2"), lease("a", 5, "10.5.3.0/24", "10.96.0.2"), lease("c", 6, "10.96.0.0/24", "192.0.2.9"),
			},
			want:    []string{"a", "b"},
			refused: []subnet.Refusal{{"c", "10.96.0.0/24 contains the public IP of 10.5.3.0/24 of a"}},
		},
		{
			name: "an old lease that names an address in the subnet of a young one harms only itself", config: dual, own: own,
			leases: []subnet.Lease{
				lease("old", 1, "10.5.2.0/24", "10.5.9.7", "fd00:10:5:2::/64", "fd00:10:5:9::7"),
				lease("young", 9, "10.5.9.0/24", "192.0.2.9", "fd00:10:5:9::/64", "2001:db8::9"),
			},
			want: []string{"young"},
			refused: []subnet.Refusal{
				{"old", "10.5.2.0/24 has public IP 10.5.9.7, which lies in 10.5.9.0/24 of young"},
				{"old", "fd00:10:5:2::/64 has public IP fd00:10:5:9::7, which lies in fd00:10:5:9::/64 of young"},
			},
		},
		{
			name: "without SubnetMin and SubnetMax any subnet may be assigned, even the first one", config: v4, own: own,
			leases:  []subnet.Lease{lease("old", 1, "10.5.2.0/24", "10.5.0.7"), lease("young", 9, "10.5.0.0/24", "192.0.2.9")},
			want:    []string{"young"},
			refused: []subnet.Refusal{{"old", "10.5.2.0/24 has public IP 10.5.0.7, which lies in 10.5.0.0/24 of young"}},
		},
		{
			name: "below SubnetMin no subnet may be assigned", config: `{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0"}`, own: own,
			leases:  []subnet.Lease{lease("old", 1, "10.5.2.0/24", "10.5.0.7"), lease("young", 9, "10.5.0.0/24", "192.0.2.9")},
			want:    []string{"old"},
			refused: []subnet.Refusal{{"young", "10.5.0.0/24 contains the public IP of 10.5.2.0/24 of old"}},
		},
		{
			name: "above SubnetMax no subnet may be assigned", config: `{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0"}`, own: own,
			leases:  []subnet.Lease{lease("old", 1, "10.5.2.0/24", "10.5.10.7"), lease("young", 9, "10.5.10.0/24", "192.0.2.9")},
			want:    []string{"old"},
			refused: []subnet.Refusal{{"young", "10.5.10.0/24 contains the public IP of 10.5.2.0/24 of old"}},
		},
		{
			name: "a network that cannot be divided: any subnet may be assigned", config: `{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.7"}`, own: own,
			leases:  []subnet.Lease{lease("old", 1, "10.5.2.0/24", "10.5.9.7"), lease("young", 9, "10.5.9.0/24", "192.0.2.9")},
			want:    []string{"young"},
			refused: []subnet.Refusal{{"old", "10.5.2.0/24 has public IP 10.5.9.7, which lies in 10.5.9.0/24 of young"}},
		},
		{
			name: "two leases that name addresses in each other's subnets", config: v4, own: own,
			leases: []subnet.Lease{lease("a", 1, "10.5.2.0/24", "10.5.3.9"), lease("b", 2, "10.5.3.0/24", "10.5.2.9"), good},
			want:   []string{},
			refused: []subnet.Refusal{
				{"a", "10.5.2.0/24 has public IP 10.5.3.9, which lies in 10.5.3.0/24 of b"},
				{"b", "10.5.3.0/24 has public IP 10.5.2.9, which lies in 10.5.2.0/24 of a"},
				{"good", "10.5.2.0/24 overlaps 10.5.2.0/24 of a, which was there first"},
			},
		},
		{
			name: "dual stack: each family for itself", config: dual,
			own: lease("own", 1, "10.5.1.0/24", "192.0.2.1", "fd00:10:5:1::/64", "2001:db8::1"),
			leases: []subnet.Lease{
				lease("both", 2, "10.5.2.0/24", "192.0.2.2", "fd00:10:5:2::/64", "2001:db8::2"),
				lease("four", 3, "10.5.3.0/24", "192.0.2.3"), lease("six", 4, "fd00:10:5:4::/64", "2001:db8::4"),
				lease("half", 5, "10.5.5.0/24", "192.0.2.5", "fd00:10:5:5::/64", ""),
			},
			want:    []string{"both", "four", "six", "half"},
			refused: []subnet.Refusal{{"half", "fd00:10:5:5::/64 has no public IPv6 address"}},
		},
		{
			name: "families that are off are dropped silently", config: v4, own: own,
			leases: []subnet.Lease{
				lease("both", 2, "10.5.2.0/24", "192.0.2.2", "fd00:10:5:2::/64", "::"), lease("six", 4, "fd00:10:5:4::/64", "2001:db8::4"), lease("empty", 5),
			},
			want: []string{"both"},
			refused: []subnet.Refusal{
				{"six", "has no subnet of an enabled address family"}, {"empty", "has no subnet of an enabled address family"},
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, err := subnet.ParseConfig([]byte(tc.config))
			if err != nil {
				t.Fatal(err)
			}
			before := fmt.Sprint(tc.leases)
			accepted, refused := arbitrate(cfg, tc.own, tc.leases)
			if diff := cmp.Diff(tc.want, keys(accepted)); diff != "" {
				t.Errorf("accepted differ (-want +got):\n%s", diff)
			}
			slices.SortStableFunc(tc.refused, func(x, y subnet.Refusal) int { return gocmp.Compare(x.Key, y.Key) })
			if diff := cmp.Diff(tc.refused, refused); diff != "" {
				t.Errorf("refused differ (-want +got):\n%s", diff)
			}
			for _, l := range accepted {
				for _, e := range l.Endpoints {
					if _, ok := cfg.Network(e.Family()); !ok {
						t.Errorf("%s keeps %s, whose family is off", l.Key, e.Subnet)
					}
				}
			}
			if after := fmt.Sprint(tc.leases); before != after {
				t.Errorf("arguments changed from %s to %s", before, after)
			}
		})
	}
}

func TestArbitrateKeepsTheGoodFamily(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`))
	if err != nil {
		t.Fatal(err)
	}
	l := lease("half", 1, "10.5.5.0/24", "192.0.2.5", "fd00:10:6::/64", "2001:db8::5")
	accepted, refused := arbitrate(cfg, subnet.Lease{}, []subnet.Lease{l})
	if len(accepted) != 1 || len(refused) != 1 || !slices.EqualFunc(accepted[0].Endpoints, l.Endpoints[:1],
		func(a, b subnet.Endpoint) bool { return a.Subnet == b.Subnet }) {
		t.Errorf("accepted %v, refused %v", accepted, refused)
	}
}

// TestIdentityBelongsToTheFirstClaim lets leases have the same identity. The age of a lease must not
// matter, because its host can write the identity of another one into it at any time.
func TestIdentityBelongsToTheFirstClaim(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	claimant := func(key string, created, claimed uint64, n int, identities ...string) subnet.Claimant {
		l := lease(key, created, fmt.Sprintf("10.5.%d.0/24", n), fmt.Sprintf("192.0.2.%d", n))
		l.Claimed = claimed
		return subnet.Claimant{Lease: &l, Identities: identities}
	}
	kept := func(c subnet.Claimant, identity string, since uint64) subnet.Claimant {
		c.Lease.Kept = map[string]uint64{identity: since}
		return c
	}
	migrating := func(c subnet.Claimant, identity string) subnet.Claimant {
		less := c
		l := *c.Lease
		l.NextType = "wireguard"
		return subnet.Claimant{Lease: &l, Identities: append(slices.Clone(c.Identities), identity), Less: &less}
	}
	for _, tc := range []struct {
		name    string
		all     []subnet.Claimant
		want    []string
		refused []subnet.Refusal
	}{
		{
			name: "an old lease that claims it later", want: []string{"young"},
			all:     []subnet.Claimant{claimant("old", 1, 30, 2, "MAC 7"), claimant("young", 10, 10, 3, "MAC 7")},
			refused: []subnet.Refusal{{"old", "its MAC 7 is that of young"}},
		},
		{
			name: "an old lease that is written later, and had it before", want: []string{"old"},
			all:     []subnet.Claimant{kept(claimant("old", 1, 30, 2, "MAC 7"), "MAC 7", 5), claimant("young", 10, 10, 3, "MAC 7")},
			refused: []subnet.Refusal{{"young", "its MAC 7 is that of old"}},
		},
		{
			name: "an old lease that is written later, and had another one before", want: []string{"young"},
			all:     []subnet.Claimant{kept(claimant("old", 1, 30, 2, "MAC 7"), "MAC 1", 5), claimant("young", 10, 10, 3, "MAC 7")},
			refused: []subnet.Refusal{{"old", "its MAC 7 is that of young"}},
		},
		{
			name: "unknown times: the older lease", want: []string{"old"},
			all:     []subnet.Claimant{claimant("young", 10, 0, 3, "MAC 7"), claimant("old", 1, 0, 2, "MAC 7")},
			refused: []subnet.Refusal{{"young", "its MAC 7 is that of old"}},
		},
		{
			name: "one that is known to be later, with another of unknown time", want: []string{"young"},
			all:     []subnet.Claimant{claimant("old", 1, 30, 2, "MAC 7"), claimant("young", 10, 0, 3, "MAC 7")},
			refused: []subnet.Refusal{{"old", "its MAC 7 is that of young"}},
		},
		{
			name: "of several identities one is another's", want: []string{"b", "c"},
			all: []subnet.Claimant{
				claimant("a", 1, 30, 2, "MAC 1", "MAC 2", "MAC 3"), claimant("b", 10, 10, 3, "MAC 2"), claimant("c", 11, 11, 4, "MAC 4"),
			},
			refused: []subnet.Refusal{{"a", "its MAC 2 is that of b"}},
		},
		{
			name: "of the next backend: the lease is used without it", want: []string{"first by wireguard", "second"},
			all: []subnet.Claimant{
				migrating(claimant("second", 1, 30, 2, "MAC 1"), "key 7"), migrating(claimant("first", 10, 10, 3, "MAC 2"), "key 7"),
			},
			refused: []subnet.Refusal{{"second", "its key 7 is that of first"}},
		},
		{
			name: "of the next backend and of the present one", want: []string{"first by wireguard"},
			all: []subnet.Claimant{
				migrating(claimant("second", 1, 30, 2, "MAC 2"), "key 7"), migrating(claimant("first", 10, 10, 3, "MAC 2"), "key 7"),
			},
			refused: []subnet.Refusal{{"second", "its MAC 2 is that of first"}},
		},
		{
			name: "of the next backend, in this host's lease", want: []string{"second"},
			all:     []subnet.Claimant{migrating(claimant("second", 1, 30, 2, "MAC 1"), "own key")},
			refused: []subnet.Refusal{{"second", "its own key is that of this node"}},
		},
		{
			name:    "in this host's lease",
			all:     []subnet.Claimant{claimant("second", 1, 1, 2, "own key")},
			refused: []subnet.Refusal{{"second", "its own key is that of this node"}},
		},
		{
			name: "a lease whose subnet is refused has no identity", want: []string{"first", "other"},
			all: []subnet.Claimant{
				claimant("first", 1, 1, 2, "MAC 1"), claimant("twin", 2, 2, 2, "MAC 7"), claimant("other", 3, 3, 3, "MAC 7"),
			},
			refused: []subnet.Refusal{{"twin", "10.5.2.0/24 overlaps 10.5.2.0/24 of first, which was there first"}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &subnet.Lease{}, Identities: []string{"own key"}})
			a.Reset(tc.all)
			var got []string
			for key, l := range a.Accepted() {
				if l.NextType != "" {
					key += " by " + l.NextType
				}
				got = append(got, key)
			}
			if slices.Sort(got); !slices.Equal(got, tc.want) {
				t.Errorf("accepted %v, want %v", got, tc.want)
			}
			if diff := cmp.Diff(tc.refused, a.AllRefused()); diff != "" {
				t.Errorf("refused differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestKept writes a lease again. Each of its identities must keep its time, but not one that is new.
func TestKept(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	written := func(revision uint64, identities ...string) subnet.Claimant {
		l := lease("a", 1, "10.5.2.0/24", "192.0.2.2")
		l.Claimed = revision
		return subnet.Claimant{Lease: &l, Identities: identities}
	}
	a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &subnet.Lease{}})
	a.Reset([]subnet.Claimant{written(3, "MAC 1", "MAC 2")})
	want := map[string]uint64{"MAC 1": 3, "MAC 2": 3}
	if diff := cmp.Diff(want, a.Kept(written(7, "MAC 1", "MAC 2", "MAC 3"))); diff != "" {
		t.Errorf("kept differ (-want +got):\n%s", diff)
	}
	again := written(7, "MAC 1", "MAC 2")
	again.Lease.Kept = map[string]uint64{"MAC 1": 3}
	a.Reset([]subnet.Claimant{again})
	if diff := cmp.Diff(map[string]uint64{"MAC 1": 3, "MAC 2": 7}, a.Kept(written(9, "MAC 1", "MAC 2"))); diff != "" {
		t.Errorf("kept from two earlier revisions (-want +got):\n%s", diff)
	}

	a.Reset([]subnet.Claimant{written(3, "MAC 1", "MAC 2")})
	if kept := a.Kept(written(3, "MAC 1", "MAC 2")); kept != nil {
		t.Errorf("it keeps %v from the same revision", kept)
	}
}

// TestIsHost checks the addresses that mean that there is none.
func TestIsHost(t *testing.T) {
	for _, a := range []netip.Addr{{}, netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if subnet.IsHost(a) {
			t.Errorf("%v is the address of a host", a)
		}
	}
}

// TestChangeAlone expects that a change of a lease that contradicts no other one needs no decision about
// all leases, although others are refused.
func TestChangeAlone(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	own := lease("own", 1, "10.5.1.0/24", "192.0.2.1")
	claim := func(key string, endpoint ...string) subnet.Claimant {
		l := lease(key, 5, endpoint...)
		return subnet.Claimant{Lease: &l}
	}
	a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &own})
	a.Reset([]subnet.Claimant{
		claim("first", "10.5.2.0/24", "192.0.2.2"), claim("second", "10.5.2.0/24", "192.0.2.3"),
		claim("wide", "10.5.0.0/20", "192.0.2.4"), claim("apart", "10.5.9.0/24", "192.0.2.9"),
	})
	for _, c := range []struct {
		what string
		subnet.Claimant
	}{
		{"it has another address, and one that contradicts this host's lease contains it", claim("apart", "10.5.9.0/24", "192.0.2.10")},
		{"it is gone", claim("apart")},
		{"a refused one is gone", claim("second")},
		{"the other one changes after that", claim("first", "10.5.2.0/24", "192.0.2.5")},
	} {
		if !a.Change(c.Claimant) {
			t.Errorf("%s: it needs a decision about all leases", c.what)
		}
	}
}

func TestArbitrateManyIsFast(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.0.0.0/8"}`))
	if err != nil {
		t.Fatal(err)
	}
	leases := many(5000)
	start := time.Now()
	accepted, refused := arbitrate(cfg, subnet.Lease{}, leases)
	if len(accepted) != 5000 || refused != nil {
		t.Errorf("%d accepted, refused: %v", len(accepted), refused)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
}

func many(n int) []subnet.Lease {
	leases := make([]subnet.Lease, n)
	for i := range leases {
		s := fmt.Sprintf("10.%d.%d.0", i>>8, i&255)
		leases[i] = lease(s+"-24", uint64(i), s+"/24", fmt.Sprintf("172.16.%d.%d", i>>8, i&255))
	}
	return leases
}

func BenchmarkArbitrate(b *testing.B) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.0.0.0/8"}`))
	if err != nil {
		b.Fatal(err)
	}
	leases := many(5000)
	for b.Loop() {
		arbitrate(cfg, subnet.Lease{}, leases)
	}
}
