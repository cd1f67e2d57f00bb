// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// withIdentity returns the claim of a vxlan node.
func withIdentity(ip, mac string) subnet.Claim {
	c := claim(ip)
	c.Endpoints[0].Data = json.RawMessage(fmt.Sprintf(`{"VNI":1,"VtepMAC":"%s"}`, mac))
	return c
}

// TestRolesOfSingleKeys gives each of several users of a real etcd a single key. The others
// must keep the key that they may write, even if one writes their addresses into its own.
func TestRolesOfSingleKeys(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	enableAuth(t, f)
	root := f.root(t)
	f.kv = root
	key := func(n int) string { return fmt.Sprintf("10.5.%d.0-24", n) }
	addr := func(n int) string { return fmt.Sprintf("192.0.2.%d", n) }
	user := func(n int) string { return fmt.Sprintf("host%d", n) }
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(n int, own ...string) {
		t.Helper()
		must(root.RoleAdd(t.Context(), user(n)))
		all := f.prefix + "/"
		must(root.RoleGrantPermission(t.Context(), user(n), all, clientv3.GetPrefixRangeEnd(all), clientv3.PermissionType(clientv3.PermRead)))
		for _, key := range own {
			must(root.RoleGrantPermission(t.Context(), user(n), all+"subnets/"+key, "", clientv3.PermissionType(clientv3.PermReadWrite)))
		}
		must(root.UserAdd(t.Context(), user(n), "secret"))
		must(root.UserGrantRole(t.Context(), user(n), user(n)))
	}
	host := func(n int, options ...func(*Config)) *Manager {
		return f.manager(t, append(options, func(c *Config) { c.Username, c.Password = user(n), "secret" })...)
	}
	expectKey := func(m *Manager, n int, c subnet.Claim) subnet.Lease {
		t.Helper()
		own := acquire(t, m, c)
		if own.Key != key(n) {
			t.Errorf("%s has taken %s, want %s", user(n), own.Key, key(n))
		}
		return own
	}
	add(1, key(1))
	add(2, key(2))
	add(3)
	expectKey(host(2), 2, claim(addr(2)))
	_, lease, _ := f.get(t, "subnets/"+key(2))

	// Host 2 names the address of host 1, which has not joined yet. Host 1 must not recall the MAC.
	hostile := fmt.Sprintf(`{"PublicIP":%q,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}}`, addr(1))
	f.put(t, "subnets/"+key(2), hostile, clientv3.WithLease(clientv3.LeaseID(lease)))
	if recalled, err := host(1).Recall(t.Context(), claim(addr(1))); err != nil || len(recalled.Endpoints) > 0 {
		t.Errorf("a new host recalls %+v, %v, which is the lease of another", recalled, err)
	}
	own := expectKey(host(1), 1, withIdentity(addr(1), "02:00:00:00:00:01"))

	// Host 2 writes each of these to its key, and host 1 starts again.
	for name, op := range map[string][]clientv3.OpOption{"lease": {clientv3.WithLease(clientv3.LeaseID(lease))}, "reservation": nil} {
		f.put(t, "subnets/"+key(2), leaseValue(addr(1)), op...)
		for _, resumed := range []bool{true, false} {
			m := host(1)
			if resumed {
				m.Resumed(own)
			}
			if now := expectKey(m, 1, withIdentity(addr(1), "02:00:00:00:00:01")); now.Order != own.Order {
				t.Errorf("%s: the lease is another one: %+v, want %+v", name, now, own)
			}
		}
		if text, _, _ := f.get(t, "subnets/"+key(2)); text != leaseValue(addr(1)) {
			t.Errorf("%s: host 1 has changed the key of host 2 to %s", name, text)
		}
	}

	// Host 1 is installed again, and has another identity.
	expectKey(host(1), 1, withIdentity(addr(1), "02:00:00:00:00:ff"))

	// Host 1 has lost its key and takes it again, although an older lease has its address.
	m := host(1)
	l := expectKey(m, 1, withIdentity(addr(1), "02:00:00:00:00:ff"))
	startKeep(t, m, l)
	f.delete(t, "subnets/"+key(1))
	waittest.Until(t, patience, "the key", func() bool {
		text, _, _ := f.get(t, "subnets/"+key(1))
		return text != ""
	})

	var status statuses
	none := host(3, status.option)
	go func() { _, _ = subnettest.Acquire(t.Context(), none, claim(addr(3))) }()
	waittest.Until(t, patience, "the report of the missing permission", func() bool {
		_, err := status.last()
		return err != nil && strings.Contains(err.Error(), f.prefix+"/subnets/10.5.") && strings.Contains(err.Error(), `the roles ["host3"]`)
	})
	must(root.RoleGrantPermission(t.Context(), user(3), f.prefix+"/subnets/"+key(3), "", clientv3.PermissionType(clientv3.PermReadWrite)))
	expectKey(host(3), 3, claim(addr(3)))
}

// TestMayWrite checks that an operator is told whether a user may write leases, and that nothing is written.
func TestMayWrite(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	enableAuth(t, f)
	root := f.root(t)
	for user, want := range map[string]bool{"flannel": true, "nobody": false} {
		a := &Admin{f.manager(t, func(c *Config) { c.Username, c.Password = user, "secret" })}
		if may, err := a.MayWrite(t.Context()); may != want || err != nil {
			t.Errorf("%s: %v, %v, want %v", user, may, err, want)
		}
	}
	if resp, err := root.Get(t.Context(), f.prefix+"/subnets/", clientv3.WithPrefix()); err != nil || resp.Count != 0 {
		t.Errorf("%v, %v, want no key", resp, err)
	}
}
