// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const task = "test-task"

// leaseOf returns an own lease of host n, with the public address 192.0.2.n.
func leaseOf(n byte) subnet.Lease {
	return subnet.Lease{Key: "10.5.1.0-24", Endpoints: []subnet.Endpoint{{PublicIP: netip.AddrFrom4([4]byte{192, 0, 2, n})}}}
}

// TestLeaderLosesTheStore separates the leader from the store. The term of the leader must end
// before another node becomes the leader, and that must happen within twice timing.leader.
func TestLeaderLosesTheStore(t *testing.T) {
	t.Parallel()
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	first := f.manager(t, func(c *Config) { c.Endpoints = []string{p.url()} })
	term := subnettest.Lead(t, first, task, leaseOf(1))
	p.stall()
	term.ExpectTakeover(t, f.manager(t), leaseOf(2), 2*first.timing.leader)
	p.cut() // so that the first manager does not wait for an answer
}

// TestLeaderIsRestarted separates a leader from the store, as if its process were killed. The next
// process of this node must lead at once, and the term of the first one must end.
func TestLeaderIsRestarted(t *testing.T) {
	t.Parallel()
	f := newFixture(t, sharedServer(t))
	p := newProxy(t, f.server)
	killed := subnettest.Lead(t, f.manager(t, func(c *Config) { c.Endpoints = []string{p.url()} }), task, leaseOf(1))
	p.cut()
	next := f.manager(t)
	var leader subnet.Leader
	err := next.Lead(t.Context(), task, leaseOf(1), func(ctx context.Context, announce subnet.Announce) {
		err := announce(ctx, json.RawMessage(`{"of":"the next process"}`))
		if err == nil {
			leader, err = next.Leader(ctx, task)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err != nil || leader.Name != "192.0.2.1" || string(leader.Announced) != `{"of":"the next process"}` {
		t.Errorf("error %v, want the next process to lead at once", err)
	}
	killed.ExpectOver(t)
}

// TestLeaderKey expects that an operator can end a term by deleting the key, that a key without an
// etcd lease names no leader, and that the Name of a leader says so if the value of the key cannot
// be read.
func TestLeaderKey(t *testing.T) {
	t.Parallel()
	f := newFixture(t, sharedServer(t))
	f.put(t, "leaders/"+task, `{"name":"192.0.2.9"}`)
	m := f.manager(t)
	subnettest.ExpectLeader(t, m, task, subnet.Leader{})
	term := subnettest.Lead(t, m, task, leaseOf(1))
	if value, lease, _ := f.get(t, "leaders/"+task); value != `{"name":"192.0.2.1"}` || lease == 0 {
		t.Errorf("the key is %s with the lease %x", value, lease)
	}
	f.delete(t, "leaders/"+task)
	term.ExpectOver(t)
	f.put(t, "leaders/"+task, "nonsense", f.grant(t, 60))
	subnettest.ExpectLeader(t, m, task, subnet.Leader{Name: "a node that has written an unreadable value"})
}

// TestTermsLeaveNothing expects that no etcd lease remains, neither of a term nor of a node that has
// found another leader.
func TestTermsLeaveNothing(t *testing.T) {
	f := newFixture(t, newServer(t))
	term := subnettest.Lead(t, f.manager(t), task, leaseOf(1))
	second := f.manager(t)
	for range 3 {
		if err := second.Lead(t.Context(), task, leaseOf(2), nil); !errors.Is(err, subnet.ErrLed) || !strings.Contains(err.Error(), "192.0.2.1") {
			t.Errorf("error %v, want ErrLed with the leader", err)
		}
	}
	if n := f.etcdLeases(t); n != 1 {
		t.Errorf("%d etcd leases during the term, want 1", n)
	}
	term.End()
	if n := f.etcdLeases(t); n != 0 {
		t.Errorf("%d etcd leases after the term, want none", n)
	}
}

// TestPermissionsOfALeader leads with permission to read and write only the key of the leader, as
// the page about etcd says. With less permission, the error must name the key.
func TestPermissionsOfALeader(t *testing.T) {
	f := newFixture(t, newServer(t))
	enableAuth(t, f)
	root := f.root(t)
	ctx := t.Context()
	if _, err := root.RoleRevokePermission(ctx, "flannel", f.prefix+"/", clientv3.GetPrefixRangeEnd(f.prefix+"/")); err != nil {
		t.Fatal(err)
	}
	m := f.manager(t, func(c *Config) { c.Username, c.Password = "flannel", "secret" })
	key := f.prefix + "/leaders/" + task
	refused := func(what string) {
		t.Helper()
		err := m.Lead(ctx, task, leaseOf(1), func(context.Context, subnet.Announce) { t.Errorf("%s: the node leads", what) })
		if err == nil || !strings.Contains(err.Error(), "etcd key "+key) || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("%s: error %v, want one that names the key", what, err)
		}
	}
	grant := func(p clientv3.PermissionType) {
		t.Helper()
		if _, err := root.RoleGrantPermission(ctx, "flannel", key, "", p); err != nil {
			t.Fatal(err)
		}
	}
	refused("without a permission")
	grant(clientv3.PermissionType(clientv3.PermRead))
	refused("with the permission to read")
	subnettest.ExpectLeader(t, m, task, subnet.Leader{})
	grant(clientv3.PermissionType(clientv3.PermReadWrite))
	term := subnettest.Lead(t, m, task, leaseOf(1))
	if err := term.Announce(ctx, json.RawMessage(`{}`)); err != nil {
		t.Error(err)
	}
	term.End()
	subnettest.ExpectLeader(t, m, task, subnet.Leader{})
}

// TestLeaderWithoutAStore expects that Leader and Lead return errors that name the key if the store
// refuses connections.
func TestLeaderWithoutAStore(t *testing.T) {
	t.Parallel()
	m := newFixture(t, sharedServer(t)).manager(t, func(c *Config) { c.Endpoints, c.Prefix = []string{"http://" + freeAddr(t)}, "/net" })
	_, err := m.Leader(t.Context(), task)
	led := m.Lead(t.Context(), task, leaseOf(1), nil)
	for _, err := range []error{err, led} {
		if err == nil || !strings.Contains(err.Error(), "read the leader from etcd key /net/leaders/test-task: etcd http://") {
			t.Errorf("error %v, want one that names the key", err)
		}
	}
}
