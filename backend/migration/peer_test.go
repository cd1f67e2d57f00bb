// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// TestWaitingPeersAreNamedOnce checks which peers the log names because they do not follow to the next
// backend, and when.
func TestWaitingPeersAreNamedOnce(t *testing.T) {
	n := start(t, dataplanetest.New(), vni1, vni7)
	now := time.Now()
	add := func(key string, since time.Duration) { n.peers[key] = &peer{due: now.Add(since + patience)} }
	expect := func(after, again time.Duration, want ...string) {
		t.Helper()
		waited := map[string]bool{}
		for key, p := range n.peers {
			waited[key] = !p.due.IsZero()
		}
		got := n.nameWaiting(t.Context(), now.Add(after))
		var named []string
		for key, p := range n.peers {
			if waited[key] && p.due.IsZero() {
				named = append(named, key)
			}
		}
		slices.Sort(named)
		if !slices.Equal(named, want) || got != again {
			t.Errorf("after %s: %q and again after %s, want %q and %s", after, named, got, want, again)
		}
	}
	expect(0, 0)
	add("one", 0)
	add("two", 0)
	add("three", 20*time.Second)
	expect(20*time.Second, 40*time.Second)
	n.peers["two"].due = time.Time{} // the peer has followed to the next backend
	expect(patience, 20*time.Second, "one")
	add("two", patience) // the peer has gone back to the present backend
	expect(2*patience-time.Second, time.Second, "three")
	expect(2*patience, 0, "two")
	expect(time.Hour, 0)
}

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
		n.nameWaiting(b.Context(), time.Now())
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
