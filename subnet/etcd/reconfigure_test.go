// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestWatchAgain ends a Watch and starts another one, as a host does when its network configuration
// changes. The second Watch must publish the leases, with the changes in between, without a list.
func TestWatchAgain(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	own := acquire(t, m, claim("192.0.2.1"))
	f.put(t, "subnets/10.5.201.0-24", leaseValue("192.0.2.9"))
	f.put(t, "subnets/10.5.202.0-24", leaseValue("192.0.2.8"))
	first, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	seen := make(chan struct{}, 100)
	go func() {
		done <- m.Watch(first, func(u subnet.Update) {
			if len(u.Snapshot().Leases) == 2 {
				seen <- struct{}{}
			}
		})
	}()
	waittest.Receive(t, patience, "both peers", seen)
	stop()
	if err := waittest.Receive(t, patience, "the end of Watch", done); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	f.delete(t, "subnets/10.5.201.0-24")
	f.put(t, "subnets/10.5.203.0-24", leaseValue("192.0.2.7"))
	m.timing.page = 0 // a list fails
	w := subnettest.Watch(t, m)
	w.Until(t, "the leases as they are now", subnettest.Has("10.5.202.0-24", "10.5.203.0-24"))
	if own.Key == "" {
		t.Error("no own lease")
	}
}

// TestAcquireOfTheSameSubnet acquires a claim that has the subnet of the manager's own lease, but
// another backend. Acquire must write the new backend to that lease without a list.
func TestAcquireOfTheSameSubnet(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	own := acquire(t, m, claim("192.0.2.1"))
	m.timing.page = 0 // a list fails
	want := own
	want.BackendType, want.Endpoints = "vxlan", slices.Clone(own.Endpoints)
	want.Endpoints[0].Data = json.RawMessage(`{"VNI":1}`)
	again := acquire(t, m, want.Claim())
	if again.Key != want.Key || describe(again) != describe(want) {
		t.Errorf("the lease is %+v, want the one of before with backend vxlan, %+v", again, want)
	}
	const stored = `{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1}}`
	if value, _, _ := f.get(t, "subnets/"+own.Key); value != stored {
		t.Errorf("the store has %s, want %s", value, stored)
	}
}

// TestKeepFollowsAcquire acquires a lease of another network while Keep runs with the former lease.
// Keep must not create the former lease again, and must create the new one again after it was
// deleted.
func TestKeepFollowsAcquire(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	old := acquire(t, m, claim("192.0.2.1"))
	k := startKeep(t, m, old)
	f.put(t, "config", `{"Network":"10.6.0.0/16"}`)
	now := acquire(t, m, claim("192.0.2.1"))
	f.delete(t, "subnets/"+now.Key)
	waittest.Until(t, patience, "the new lease is taken again", func() bool {
		v, _, _ := f.get(t, "subnets/"+now.Key)
		return v == leaseValue("192.0.2.1")
	})
	if v, _, _ := f.get(t, "subnets/"+old.Key); v != "" {
		t.Errorf("the old lease %s is there again", old.Key)
	}
	k.stillRuns(t)
}

// TestFormerSubnets expects that a host takes a subnet of an earlier configuration again, the last one
// first, unless another host has it.
func TestFormerSubnets(t *testing.T) {
	for name, tc := range map[string]struct{ taken, want string }{
		"all free":           {"10.5.203.0-24", "10.5.7.0-24"},
		"the last one taken": {"10.5.7.0-24", "10.5.8.0-24"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.put(t, "config", configV4)
			f.put(t, "subnets/"+tc.taken, leaseValue("192.0.2.9"))
			m := f.manager(t, func(c *Config) {
				c.Former = func() []netip.Prefix { return prefixtest.Parse("10.6.1.0/24", "10.5.7.0/24", "10.5.8.0/24") }
			})
			if l := acquire(t, m, claim("192.0.2.1")); l.Key != tc.want {
				t.Errorf("the lease is %s, want %s", l.Key, tc.want)
			}
		})
	}
}
