// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestDualStackNodesShareNoSubnet starts as many nodes at once as there are IPv4 subnets. No two
// nodes may get the same subnet of either family. Nodes that choose the same IPv4 subnet rarely
// write the same key, because each of them also chooses one of 65,535 IPv6 subnets.
func TestDualStackNodesShareNoSubnet(t *testing.T) {
	const nodes = 16
	f := newFixture(t, newServer(t))
	f.put(t, "config", `{"Network":"10.5.0.0/20","SubnetMin":"10.5.0.0","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`)
	leases := f.etcdLeases(t)
	ctx, cancel := context.WithTimeout(t.Context(), endless)
	defer cancel()
	var mu sync.Mutex
	owner := map[netip.Prefix]int{}
	var wg sync.WaitGroup
	for n := range nodes {
		m := f.manager(t)
		wg.Go(func() {
			var l subnet.Lease
			var err error
			for l.Key == "" && ctx.Err() == nil { // another node may hold the last free subnet until it yields
				l, err = subnettest.Acquire(ctx, m, claim(fmt.Sprintf("192.0.2.%d", n+1), fmt.Sprintf("2001:db8::%d", n+1)))
			}
			if err != nil {
				t.Errorf("node %d: %v", n, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			for _, e := range l.Endpoints {
				if other, taken := owner[e.Subnet]; taken {
					t.Errorf("nodes %d and %d share %s", other, n, e.Subnet)
				}
				owner[e.Subnet] = n
			}
		})
	}
	wg.Wait()
	if len(owner) != 2*nodes {
		t.Errorf("%d subnets for %d nodes of both families", len(owner), nodes)
	}
	if resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/", withPrefix()); err != nil || len(resp.Kvs) != nodes {
		t.Errorf("%d keys, %v", len(resp.Kvs), err)
	}
	if n := f.etcdLeases(t) - leases; n != nodes {
		t.Errorf("%d etcd leases for %d nodes", n, nodes)
	}
}

// TestRecreatedLeaseIsComparedLater puts this host's key as if an earlier try of Keep had created it
// again, but had failed before it compared the key with older leases. Keep must make that
// comparison, and must leave the subnet to the older lease.
func TestRecreatedLeaseIsComparedLater(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configDual)
	p := newProxy(t, f.server)
	m := f.manager(t, throughProxy(p))
	l := acquire(t, m, claim("192.0.2.1", "2001:db8::1"))
	own, _, _ := f.get(t, "subnets/"+l.Key)
	k := startKeep(t, m, l)
	p.cut()
	f.delete(t, "subnets/"+l.Key)
	_, v6, _ := strings.Cut(l.Key, "&")
	rival := "10.5.200.0-24&" + v6
	f.put(t, "subnets/"+rival, leaseValue("192.0.2.9"), f.grant(t, 60))
	f.put(t, "subnets/"+l.Key, own, f.grant(t, 60))
	p.open(t)
	if err := k.waitUntilLost(t); !strings.HasSuffix(err.Error(), "now belongs to 192.0.2.9, as part of "+rival) {
		t.Errorf("error is %v", err)
	}
	if v, _, _ := f.get(t, "subnets/"+l.Key); v != "" {
		t.Errorf("this host's key has %s yet", v)
	}
}

// TestHostsOfOneAndTwoFamiliesShareNoSubnet tests a race for one subnet while a network gets its
// second family. A host reads the leases, a rival takes the subnet that the host wants, and then
// the host acquires a lease. One lease has one family and the other has two, so their keys differ
// and both writes succeed. The host must take another subnet.
func TestHostsOfOneAndTwoFamiliesShareNoSubnet(t *testing.T) {
	for _, tc := range []struct {
		name, config, wanted, rival string
		claim                       subnet.Claim
	}{
		{"IPv4", configV4, "10.5.77.0/24", "10.5.77.0-24&fd00:10:5:9::-64", claim("192.0.2.1")},
		{"IPv6", configV6, "fd00:10:5:77::/64", "10.5.9.0-24&fd00:10:5:77::-64", claim("2001:db8::1")},
		{"both", configDual, "10.5.77.0/24", "10.5.77.0-24", claim("192.0.2.1", "2001:db8::1")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t, newServer(t))
			f.put(t, "config", tc.config)
			m := f.manager(t, withPrevious(tc.wanted))
			before, err := m.list(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			rival := `{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::9"}`
			f.put(t, "subnets/"+tc.rival, rival, f.grant(t, 60))
			m.cache.Store(new(leaseCache).successor(before, unknown))
			l := acquire(t, m, tc.claim)
			if slices.Contains(subnetsOf(l), netip.MustParsePrefix(tc.wanted)) {
				t.Errorf("took %s, of which %s was first", l.Key, tc.rival)
			}
			resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/", withPrefix())
			if err != nil || len(resp.Kvs) != 2 {
				t.Errorf("%d leases, %v, want that of the rival and the own one", len(resp.Kvs), err)
			}
		})
	}
}

// TestLeaseStaysUntilAnotherReplacesIt enables IPv6 while the host has an IPv4 lease. Another host takes
// the IPv6 subnet that the host chooses, between its list and its write, under another key. Until the
// host has a lease with another IPv6 subnet, the store must have one with its IPv4 subnet at every
// revision. Otherwise peers would remove their routes to the pods of the host.
func TestLeaseStaysUntilAnotherReplacesIt(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	const wanted = "fd00:10:5:77::/64"
	m := f.manager(t, func(c *Config) { c.Former = func() []netip.Prefix { return prefixtest.Parse(wanted) } })
	v4 := acquire(t, m, claim("192.0.2.1"))
	startKeep(t, m, v4)
	f.put(t, "config", configDual)
	before, err := m.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first := f.put(t, "subnets/10.5.201.0-24&fd00:10:5:77::-64", `{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::9"}`, f.grant(t, 60))
	m.cache.Store(new(leaseCache).successor(before, unknown))

	dual := claim("192.0.2.1", "2001:db8::1")
	dual.Endpoints[0].Subnet = v4.Endpoints[0].Subnet
	l := acquire(t, m, dual)
	if l.Endpoints[0].Subnet != v4.Endpoints[0].Subnet || slices.Contains(subnetsOf(l), netip.MustParsePrefix(wanted)) {
		t.Errorf("took %s after %s, want the same IPv4 subnet and another IPv6 subnet than the rival's", l.Key, v4.Key)
	}
	if keys := f.keys(t, "subnets/"); len(keys) != 2 {
		t.Errorf("the store has %q, want the leases of the rival and of the host", keys)
	}
	_, _, last := f.get(t, "subnets/"+l.Key)
	for r := first; r <= last; r++ {
		resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/"+v4.Key, withPrefix(), clientv3.WithRev(r))
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) != 1 {
			t.Errorf("revision %d, of %d to %d, has %d leases of %s, want one", r, first, last, len(resp.Kvs), v4.Endpoints[0].Subnet)
		}
	}
}
