// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// backup copies the data of an etcd and returns the folder of the copy. It stops the etcd for that,
// and starts it again.
func (s *server) backup(tb testing.TB) (dir string) {
	tb.Helper()
	dir = tb.TempDir()
	s.stop()
	if err := os.CopyFS(dir, os.DirFS(s.dir)); err != nil {
		tb.Fatal(err)
	}
	s.start(tb)
	return dir
}

// restore stops an etcd, replaces its data by those of a backup, and starts it again. If its
// address for members has changed, the restored etcd has a new cluster id.
func (s *server) restore(tb testing.TB, backup string) {
	tb.Helper()
	s.stop()
	err := os.RemoveAll(s.dir)
	if err == nil {
		err = os.CopyFS(s.dir, os.DirFS(backup))
	}
	if err != nil {
		tb.Fatal(err)
	}
	s.start(tb)
}

// TestRestoredBackupHasAnOlderLease restores a backup that contains an earlier lease of a host,
// with another subnet, but not its present one. Peers accept the older of two leases with one VTEP
// MAC, so the host must delete the earlier lease when it takes its present subnet again.
func TestRestoredBackupHasAnOlderLease(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, config        string
		claim               subnet.Claim
		others, before, had []string // subnets of another host, and the earlier and the present ones of the host
	}{
		{"IPv4", configV4, claim("192.0.2.1"), []string{"10.5.5.0/24"}, []string{"10.5.6.0/24"}, []string{"10.5.77.0/24"}},
		{
			"IPv6", configV6, claim("2001:db8::1"),
			[]string{"fd00:10:5:5::/64"}, []string{"fd00:10:5:6::/64"}, []string{"fd00:10:5:77::/64"},
		},
		{
			"dual stack", configDual, claim("192.0.2.1", "2001:db8::1"),
			[]string{"10.5.5.0/24", "fd00:10:5:5::/64"}, []string{"10.5.6.0/24", "fd00:10:5:6::/64"}, []string{"10.5.77.0/24", "fd00:10:5:77::/64"},
		},
	} {
		for _, running := range []bool{true, false} {
			name := tc.name + ", restarted"
			if running {
				name = tc.name + ", running"
			}
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, newServer(t))
				f.put(t, "config", tc.config)
				other := acquire(t, f.manager(t, withPrevious(tc.others...)), claim("192.0.2.7", "2001:db8::7"))
				before := acquire(t, f.manager(t, withPrevious(tc.before...)), tc.claim)
				backup := f.backup(t)
				f.delete(t, "subnets/"+before.Key)

				m := f.manager(t, withPrevious(tc.had...))
				now := acquire(t, m, tc.claim)
				if !slices.Equal(subnetsOf(now), prefixtest.Parse(tc.had...)) {
					t.Fatalf("took %v, want %v", subnetsOf(now), tc.had)
				}
				if running {
					startKeep(t, m, now)
				}
				f.restore(t, backup)
				if !running {
					again := acquire(t, f.manager(t, withPrevious(tc.had...)), tc.claim)
					if again.Key != now.Key {
						t.Errorf("took %s again, want %s", again.Key, now.Key)
					}
				}
				w := subnettest.Watch(t, f.manager(t))
				w.Until(t, "one lease of each host", subnettest.Has(other.Key, now.Key))
			})
		}
	}
}

func subnetsOf(l subnet.Lease) []netip.Prefix {
	var all []netip.Prefix
	for _, e := range l.Endpoints {
		all = append(all, e.Subnet)
	}
	return all
}

// TestRetakeSparesOthers deletes the lease of a running host, and expects that the host creates it
// again. The host must delete an older lease with its address, but no lease of another host, no
// reservation and no younger lease.
func TestRetakeSparesOthers(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configDual)
	spared := map[string]string{
		"10.5.1.0-24&fd00:10:5:1::-64": `{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::9"}`, // a lease of another host
		"10.5.2.0-24&fd00:10:5:2::-64": `{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::1"}`, // only its IPv6 address is that of the host
		"0.0.0.0-0&fd00:10:5:3::-64":   `{"PublicIP":"0.0.0.0","PublicIPv6":"2001:db8::8"}`,
		"10.5.4.0-24&fd00:10:5:4::-64": "{",
	}
	for key, v := range spared {
		f.put(t, "subnets/"+key, v, f.grant(t, 60))
	}
	const older, reserved, younger = "10.5.5.0-24&fd00:10:5:5::-64", "10.5.6.0-24&fd00:10:5:6::-64", "10.5.7.0-24&fd00:10:5:7::-64"
	const own = `{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8::1"}`
	m := f.manager(t, withPrevious("10.5.77.0/24", "fd00:10:5:77::/64"))
	l := acquire(t, m, claim("192.0.2.1", "2001:db8::1"))
	f.delete(t, "subnets/"+l.Key)
	f.put(t, "subnets/"+older, own, f.grant(t, 60))
	spared[reserved], spared[younger] = own, own
	f.put(t, "subnets/"+reserved, own)
	again, err := subnettest.Acquire(t.Context(), m, claim("192.0.2.1", "2001:db8::1")) // creates this host's lease after older
	if err != nil || again.Key != l.Key {
		t.Fatalf("took %s again, %v, want %s", again.Key, err, l.Key)
	}
	if v, _, _ := f.get(t, "subnets/"+older); v != own {
		t.Errorf("a lease that was made since the own one is gone")
	}
	f.put(t, "subnets/"+younger, own, f.grant(t, 60))
	k := startKeep(t, m, again)
	f.delete(t, "subnets/"+l.Key)
	waittest.Until(t, patience, "this host's lease again, and the older one gone", func() bool {
		k.stillRuns(t)
		old, _, _ := f.get(t, "subnets/"+older)
		now, _, _ := f.get(t, "subnets/"+l.Key)
		return old == "" && now != ""
	})
	for key, want := range spared {
		if v, _, _ := f.get(t, "subnets/"+key); v != want {
			t.Errorf("%s has %q, want %q", key, v, want)
		}
	}
}

// TestRetakeSparesTheHostThatHadThisAddress deletes the lease of a running host, which has the address of a host that is
// down, but other data. The host must create its lease again, and leave the other one, which is older.
func TestRetakeSparesTheHostThatHadThisAddress(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	other := acquire(t, f.manager(t, withPrevious("10.5.5.0/24")), withIdentity("192.0.2.1", "02:00:00:00:00:0a"))
	m := f.manager(t, withPrevious("10.5.77.0/24"))
	before := acquire(t, m, withIdentity("192.0.2.2", "02:00:00:00:00:0b"))
	c := withIdentity("192.0.2.1", "02:00:00:00:00:0b")
	c.Endpoints[0].Subnet = before.Endpoints[0].Subnet
	l := acquire(t, m, c)
	k := startKeep(t, m, l)
	f.delete(t, "subnets/"+l.Key)
	waittest.Until(t, patience, "this host's lease again", func() bool {
		k.stillRuns(t)
		now, _, _ := f.get(t, "subnets/"+l.Key)
		return now != ""
	})
	if v, _, _ := f.get(t, "subnets/"+other.Key); v == "" {
		t.Errorf("the lease %s of the other host is gone", other.Key)
	}
}

// TestHostsOfOneAddressDoNotFight runs two hosts with one public address and different subnets, and
// empties the store. Each host must create its lease again, and must not delete the other's.
func TestHostsOfOneAddressDoNotFight(t *testing.T) {
	t.Parallel()
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	var leases []subnet.Lease
	for _, s := range []string{"10.5.1.0/24", "10.5.2.0/24"} {
		m := f.manager(t, withPrevious(s))
		l := acquire(t, m, claim("192.0.2.1"))
		startKeep(t, m, l)
		leases = append(leases, l)
	}
	both := func() (first, second int64) {
		_, _, first = f.get(t, "subnets/"+leases[0].Key)
		_, _, second = f.get(t, "subnets/"+leases[1].Key)
		return first, second
	}
	waittest.Until(t, patience, "both leases", func() bool {
		first, second := both()
		return first != 0 && second != 0
	})
	f.wipe(t)
	first, second := int64(0), int64(0)
	start := time.Now()
	waittest.Until(t, patience, "both leases, unchanged for a second", func() bool {
		if a, b := both(); a != first || b != second || a == 0 || b == 0 {
			first, second, start = a, b, time.Now()
		}
		return time.Since(start) > time.Second
	})
}

// TestRetakeAcrossAChangeOfFamilies restores a backup that is older than the second family of the
// network. The backup has a lease of the host with the same IPv4 subnet under another key. The host
// must replace it by its present lease.
func TestRetakeAcrossAChangeOfFamilies(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	before := acquire(t, f.manager(t), claim("192.0.2.1"))
	backup := f.backup(t)
	f.put(t, "config", configDual)
	m := f.manager(t)
	now := acquire(t, m, claim("192.0.2.1", "2001:db8::1"))
	if now.Endpoints[0].Subnet != before.Endpoints[0].Subnet {
		t.Fatalf("took %v, want %v", subnetsOf(now), subnetsOf(before))
	}
	k := startKeep(t, m, now)
	f.restore(t, backup)
	waittest.Until(t, patience, "the present lease and not the earlier one", func() bool {
		k.stillRuns(t)
		resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/", clientv3.WithPrefix())
		return err == nil && len(resp.Kvs) == 1 && string(resp.Kvs[0].Key) == f.prefix+"/subnets/"+now.Key
	})
}
