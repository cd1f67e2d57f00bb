// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// manyOf returns the lease of host n, with data for vxlan and host-gw. n may be up to 8191, because
// each host has a /29 of 10.5.0.0/16.
func manyOf(n int) *subnet.Lease {
	hi, lo := byte(n>>8), byte(n)
	return &subnet.Lease{Key: fmt.Sprintf("host%d", n), BackendType: "vxlan", NextType: "host-gw", Endpoints: []subnet.Endpoint{{
		Subnet:   netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n >> 5), lo << 3}), 29),
		PublicIP: netip.AddrFrom4([4]byte{192, 168, 80 + hi, lo}),
		Data:     fmt.Appendf(nil, `{"VNI":1,"VtepMAC":"02:00:00:00:%02x:%02x"}`, hi, lo),
	}}}
}

// BenchmarkLeaseEvent measures a pass after one of 5,000 leases has changed, while all peers wait
// for probes. The pass does not change the kernel.
func BenchmarkLeaseEvent(b *testing.B) {
	be, err := newBackend(b, newEnv(dataplanetest.New(), vni1, hostGW))
	if err != nil {
		b.Fatal(err)
	}
	started, err := be.Start(b.Context(), *lease(1, "vxlan", dataOf(1, 1), "host-gw", nil))
	if err != nil {
		b.Fatal(err)
	}
	defer started.Close()
	n := started.(*network)
	pass := func(set backend.Set) {
		changed := n.update(set)
		if _, err := n.syncParts(b.Context(), set, nil); err != nil {
			b.Fatal(err)
		}
		n.decide(changed, nil)
		n.aim(changed)
	}
	leases := map[string]*subnet.Lease{}
	for i := 2; i < 5002; i++ {
		l := manyOf(i)
		leases[l.Key] = l
	}
	pass(backend.Set{Leases: leases, All: true, Complete: true})
	set := backend.Set{Leases: leases, Changed: []string{manyOf(7).Key}, Complete: true}
	for b.Loop() {
		pass(set)
	}
}
