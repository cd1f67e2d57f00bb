// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// keys returns the last components of all keys below dir, which is relative to the prefix.
func (f *fixture) keys(tb testing.TB, dir string) (keys []string) {
	tb.Helper()
	resp, err := f.client(tb).Get(tb.Context(), f.prefix+"/"+dir, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		tb.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		keys = append(keys, path.Base(string(kv.Key)))
	}
	return keys
}

var ownIP = netip.MustParseAddr("192.0.2.1")

// configs receives the configurations that Networks passes to sink, as texts by the name of the
// network.
type configs struct {
	t     *testing.T
	calls chan map[string]string
}

func followNetworks(t *testing.T, m *Manager, names ...string) *configs {
	c := &configs{t: t, calls: make(chan map[string]string, 100)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- m.Networks(ctx, names, nil, func(now NetworkConfigs) {
			texts := map[string]string{}
			for name, text := range now.Texts {
				texts[name] = string(text)
			}
			c.calls <- texts
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := waittest.Receive(t, patience, "the end of Networks", ended); err == nil {
			t.Error("Networks returned nil")
		}
	})
	return c
}

// expect waits until the configurations are exactly these.
func (c *configs) expect(want map[string]string) {
	c.t.Helper()
	deadline := time.After(patience)
	var last map[string]string
	for {
		select {
		case last = <-c.calls:
			if maps.Equal(last, want) {
				return
			}
		case <-deadline:
			c.t.Fatalf("the networks are %v, want %v", last, want)
		}
	}
}

// TestNetworks follows the configurations of all networks, and of those with given names, while
// configurations are put, changed and deleted, and after an outage.
func TestNetworks(t *testing.T) {
	s := newServer(t)
	f := newFixture(t, s)
	f.put(t, "red/config", "r1")
	for i := range 20 {
		f.put(t, fmt.Sprintf("red/subnets/10.5.%d.0-24", i), "{}")
	}
	f.put(t, "green/config", "g1")
	f.put(t, "config", "of a single network")
	f.put(t, "subnets/10.6.1.0-24", "{}")
	f.put(t, "subnets/config", "no network")
	f.put(t, "empty/subnets/10.7.1.0-24", "{}")
	f.put(t, "a/b/config", "too deep")

	m := f.manager(t)
	all := followNetworks(t, m)
	some := followNetworks(t, m, "green", "blue")
	all.expect(map[string]string{"red": "r1", "green": "g1"})
	some.expect(map[string]string{"green": "g1"})

	f.put(t, "blue/config", "b1")
	all.expect(map[string]string{"red": "r1", "green": "g1", "blue": "b1"})
	some.expect(map[string]string{"green": "g1", "blue": "b1"})

	f.put(t, "green/subnets/10.8.1.0-24", "{}") // the key of a lease, which Networks does not report
	f.put(t, "green/config", "g2")
	f.delete(t, "red/config")
	all.expect(map[string]string{"green": "g2", "blue": "b1"})
	some.expect(map[string]string{"green": "g2", "blue": "b1"})

	// The configurations are listed again after an outage.
	s.stop()
	s.start(t)
	f.put(t, "blue/config", "b2")
	all.expect(map[string]string{"green": "g2", "blue": "b2"})
	some.expect(map[string]string{"green": "g2", "blue": "b2"})
	s.wipe(t)
	all.expect(map[string]string{})
	some.expect(map[string]string{})
}

// TestNetworksAfterACompaction compacts the store between the listing of the configurations and the
// watch, as when a host comes back after a long time. The configurations must be listed again, and
// that must not count as an outage.
func TestNetworksAfterACompaction(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "red/config", "r1")
	f.put(t, "green/config", "g1")
	var status statuses
	m := f.manager(t, status.option)
	listings := 0
	known := func() map[string]subnet.Observation { // Networks calls it after each listing
		if listings++; listings == 1 {
			f.delete(t, "green/config")
			compact(t, f, f.put(t, "blue/config", "b1"))
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var texts []map[string][]byte
	err := m.Networks(ctx, nil, known, func(now NetworkConfigs) {
		if texts = append(texts, now.Texts); len(texts) == 2 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("Networks returned %v after %q, want two listings", err, texts)
	}
	want := []map[string][]byte{{"red": []byte("r1"), "green": []byte("g1")}, {"red": []byte("r1"), "blue": []byte("b1")}}
	if diff := cmp.Diff(want, texts); diff != "" {
		t.Errorf("configurations (-want +got):\n%s", diff)
	}
	for _, err := range status.list() {
		if err != nil {
			t.Errorf("the compaction was reported as an outage: %v", err)
		}
	}
}

// TestNetworkPutAfterTheListing lists a store without configurations. Then a configuration is put,
// at the revision at which the host had seen it, as in a store that was emptied and used again. The
// network must not count as deleted.
func TestNetworkPutAfterTheListing(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	listed, err := m.listConfigs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]subnet.Observation{"red": {Revision: f.put(t, "red/config", "r1")}}
	if names, err := m.deleted(t.Context(), known, listed); err != nil || len(names) > 0 {
		t.Errorf("deleted %v, %v, want none", names, err)
	}
}

// TestNetworkShares takes leases in two networks through one connection, and releases one.
func TestNetworkShares(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	if _, err := m.Network("subnets", Config{}); err == nil {
		t.Error("a network may have the name subnets")
	}
	var networks []*Manager
	var leases []subnet.Lease
	for i, name := range []string{"red", "green"} {
		f.put(t, name+"/config", fmt.Sprintf(`{"Network":"10.%d.0.0/16"}`, 5+i))
		n, err := m.Network(name, Config{})
		if err != nil {
			t.Fatal(err)
		}
		networks = append(networks, n)
		claim := subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{{PublicIP: ownIP}}}
		own, err := subnettest.Acquire(t.Context(), n, claim)
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, own)
		if got := f.keys(t, name+"/subnets/"); len(got) != 1 || got[0] != own.Key {
			t.Errorf("network %s has the leases %v, want %s", name, got, own.Key)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := networks[0].Release(t.Context(), leases[0]); err != nil {
		t.Fatal(err)
	}
	if err := networks[0].Release(t.Context(), leases[0]); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if red, green := f.keys(t, "red/subnets/"), f.keys(t, "green/subnets/"); len(red) != 0 || len(green) != 1 {
		t.Errorf("after the release there are the leases %v and %v, want none and one", red, green)
	}
}

// TestReleaseOfAReservation expects that Release does not delete a reservation.
func TestReleaseOfAReservation(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.7.0-24", fmt.Sprintf(`{"PublicIP":"%s"}`, ownIP))
	m := f.manager(t)
	own, err := subnettest.Acquire(t.Context(), m, subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{{PublicIP: ownIP}}})
	if err != nil || !own.Permanent {
		t.Fatalf("%+v, %v, want the reservation", own, err)
	}
	if err := m.Release(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	if got := f.keys(t, "subnets/"); len(got) != 1 {
		t.Errorf("the reservation was deleted: %v", got)
	}
}

// TestObserveDuringAnOutage calls Observe while the store is unavailable. Observe must return an Observation
// when the store is available again.
func TestObserveDuringAnOutage(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "red/config", configV4)
	p := newProxy(t, f.server)
	red, err := f.manager(t, throughProxy(p)).Network("red", Config{})
	if err != nil {
		t.Fatal(err)
	}
	own := acquire(t, red, claim("192.0.2.1"))
	p.cut()
	type answer struct {
		seen subnet.Observation
		err  error
	}
	answered := make(chan answer, 1)
	go func() {
		seen, err := red.Observe(t.Context(), own)
		answered <- answer{seen, err}
	}()
	select {
	case a := <-answered:
		t.Errorf("without the store the answer is %+v", a)
	case <-time.After(500 * time.Millisecond):
		p.open(t)
		if a := waittest.Receive(t, patience, "an answer from the store that is back", answered); a.err != nil || a.seen.Key != own.Key || a.seen.LeaseID == 0 {
			t.Errorf("%+v, want the lease %s", a, own.Key)
		}
	}
}

// TestNetworkMissingAfterAnAbsence makes a network lose its configuration while a host does not
// watch. Networks must report the network as deleted if its configuration was deleted, and not if
// the store was emptied or replaced. If the store has no history of that time, a deletion must be
// recognized by this host's lease. It is not recognized if that lease is gone or a reservation.
func TestNetworkMissingAfterAnAbsence(t *testing.T) {
	const lease, config = "red/subnets/10.5.7.0-24", `{"Network":"10.5.0.0/16"}`
	age := func(t *testing.T, f *fixture, beyond int64) {
		for f.put(t, "other", "") <= beyond {
			continue
		}
	}
	compact := func(t *testing.T, f *fixture, beyond int64) {
		age(t, f, beyond)
		if _, err := f.kv.Compact(t.Context(), f.put(t, "other", "")); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name     string
		reserved bool
		absence  func(t *testing.T, f *fixture, seen int64, backup string)
		deleted  bool
	}{
		{"deleted", false, func(t *testing.T, f *fixture, _ int64, _ string) {
			f.delete(t, "red/config")
		}, true},
		{"deleted and compacted", false, func(t *testing.T, f *fixture, seen int64, _ string) {
			f.delete(t, "red/config")
			compact(t, f, seen)
		}, true},
		{"deleted, without the lease", false, func(t *testing.T, f *fixture, _ int64, _ string) {
			f.delete(t, "red/config")
			f.delete(t, lease)
		}, true},
		{"deleted and compacted, without the lease", false, func(t *testing.T, f *fixture, seen int64, _ string) {
			f.delete(t, "red/config")
			f.delete(t, lease)
			compact(t, f, seen)
		}, false},
		{"deleted and compacted, with a reservation", true, func(t *testing.T, f *fixture, seen int64, _ string) {
			f.delete(t, "red/config")
			compact(t, f, seen)
		}, false},
		{"emptied", false, func(t *testing.T, f *fixture, _ int64, _ string) {
			f.wipe(t)
		}, false},
		{"emptied and used since", false, func(t *testing.T, f *fixture, seen int64, _ string) {
			f.wipe(t)
			age(t, f, seen)
		}, false},
		{"emptied and compacted, with a new lease at the same revision", false, func(t *testing.T, f *fixture, seen int64, _ string) {
			f.wipe(t)
			age(t, f, seen-2)
			f.put(t, lease, `{"PublicIP":"192.0.2.1"}`, f.grant(t, 60))
			compact(t, f, seen)
		}, false},
		{"replaced by an older backup and compacted", false, func(t *testing.T, f *fixture, seen int64, backup string) {
			f.restore(t, backup)
			compact(t, f, seen)
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, newServer(t))
			f.put(t, "other", "")
			backup := f.backup(t)
			f.put(t, "red/config", config)
			if tc.reserved {
				f.put(t, lease, `{"PublicIP":"192.0.2.1"}`)
			}
			m := f.manager(t)
			red, err := m.Network("red", Config{Previous: prefixtest.Parse("10.5.7.0/24")})
			if err != nil {
				t.Fatal(err)
			}
			own := acquire(t, red, claim("192.0.2.1"))
			seen, err := red.Observe(t.Context(), own)
			if err != nil || seen.Revision == 0 || "red/subnets/"+own.Key != lease {
				t.Fatalf("this host's lease is %s, recorded as %+v, %v", own.Key, seen, err)
			}
			tc.absence(t, f, seen.Revision, backup)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var now NetworkConfigs
			known := func() map[string]subnet.Observation { return map[string]subnet.Observation{"red": seen} }
			if err := m.Networks(ctx, nil, known, func(n NetworkConfigs) { now = n; cancel() }); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			if got := slices.Contains(now.Deleted, "red"); got != tc.deleted || len(now.Texts) > 0 {
				t.Errorf("configurations %v, deleted %v, want that red was deleted: %v", now.Texts, now.Deleted, tc.deleted)
			}
			if again, err := red.Observe(t.Context(), own); err != nil || again != (subnet.Observation{}) {
				t.Errorf("%+v, %v: recorded although there is no configuration", again, err)
			}
		})
	}
}
