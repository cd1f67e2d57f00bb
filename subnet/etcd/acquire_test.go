// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// With these configurations managers take no IPv4 subnet from 10.5.200.0 upwards. Tests use such
// subnets for leases of other hosts.
const (
	configV4   = `{"Network":"10.5.0.0/16","SubnetMax":"10.5.199.0","Backend":{"Type":"vxlan"}}`
	configDual = `{"Network":"10.5.0.0/16","SubnetMax":"10.5.199.0","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`
	configV6   = `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`
)

// claim returns the claim of a host-gw node with these public addresses, without subnets.
func claim(ips ...string) subnet.Claim {
	c := subnet.Claim{BackendType: "host-gw"}
	for _, ip := range ips {
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{PublicIP: netip.MustParseAddr(ip)})
	}
	return c
}

func leaseValue(ip string) string {
	return fmt.Sprintf(`{"PublicIP":"%s","PublicIPv6":null,"BackendType":"host-gw"}`, ip)
}

func withPrevious(s ...string) func(*Config) {
	return func(c *Config) { c.Previous = prefixtest.Parse(s...) }
}

func acquire(tb testing.TB, m *Manager, c subnet.Claim) subnet.Lease {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), endless)
	defer cancel()
	l, err := subnettest.Acquire(ctx, m, c)
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

func TestFiftyAtOnce(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for n := range 50 {
		m := f.manager(t)
		wg.Go(func() {
			l, err := subnettest.Acquire(t.Context(), m, claim(fmt.Sprintf("192.0.2.%d", n+1)))
			mu.Lock()
			defer mu.Unlock()
			if err != nil || seen[l.Key] {
				t.Errorf("node %d: %v, %v", n, l.Key, err)
			}
			seen[l.Key] = true
		})
	}
	wg.Wait()
	resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/10.5.", withPrefix())
	if err != nil || len(resp.Kvs) != 50 || len(seen) != 50 {
		t.Errorf("%d distinct subnets, %d keys, %v", len(seen), len(resp.Kvs), err)
	}
}

func TestTwentyInSixteen(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", `{"Network":"10.5.0.0/20","SubnetMin":"10.5.0.0"}`)
	leases := f.etcdLeases(t)
	var mu sync.Mutex
	var have []subnet.Lease
	waiting := map[int]*Manager{}
	var wg sync.WaitGroup
	for n := range 20 {
		m := f.manager(t)
		wg.Go(func() {
			l, err := subnettest.Acquire(t.Context(), m, claim(fmt.Sprintf("192.0.2.%d", n+1)))
			mu.Lock()
			defer mu.Unlock()
			const want = "acquire lease: out of subnets: all 16 from 10.5.0.0/24 to 10.5.15.0/24 are taken"
			switch {
			case err == nil:
				have = append(have, l)
			case errors.Is(err, subnet.ErrNoSubnets) && err.Error() == want:
				waiting[n] = m
			default:
				t.Errorf("node %d: %v, want %q", n, err, want)
			}
		})
	}
	wg.Wait()
	if len(have) != 16 || len(waiting) != 4 {
		t.Fatalf("%d leases and %d nodes without, want 16 and 4", len(have), len(waiting))
	}
	for n, m := range waiting {
		f.delete(t, "subnets/"+have[0].Key)
		if l := acquire(t, m, claim(fmt.Sprintf("192.0.2.%d", n+1))); l.Key != have[0].Key {
			t.Errorf("got %s, want %s, which is the only free one", l.Key, have[0].Key)
		}
		have = have[1:]
	}
	// The test has deleted keys of four owners, but not their etcd leases: four of the 20 belong to
	// no key. There may be no other.
	if n := f.etcdLeases(t) - leases; n != 20 {
		t.Errorf("%d etcd leases for 20 acquisitions", n)
	}
}

func TestRestartKeepsSubnet(t *testing.T) {
	for _, tc := range []struct {
		name, config string
		claim        subnet.Claim
	}{
		{"IPv4", configV4, claim("192.0.2.1")},
		{"IPv6", configV6, claim("2001:db8::1")},
		{"dual", configDual, claim("192.0.2.1", "2001:db8::1")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.put(t, "config", tc.config)
			acquire(t, f.manager(t), claim("192.0.2.7", "2001:db8::7")) // another node
			first := acquire(t, f.manager(t), tc.claim)
			_, _, before := f.get(t, "subnets/"+first.Key)
			m := f.manager(t)
			m.Resumed(first)
			if again := acquire(t, m, tc.claim); again.Key != first.Key {
				t.Errorf("by the last known state: got %s, want %s", again.Key, first.Key)
			}
			if _, _, after := f.get(t, "subnets/"+first.Key); after != before {
				t.Errorf("key was written although it was right: revision %d, then %d", before, after)
			}
			if again := acquire(t, f.manager(t), tc.claim); again.Key != first.Key {
				t.Errorf("by public IP: got %s, want %s", again.Key, first.Key)
			}
			f.delete(t, "subnets/"+first.Key)
			m = f.manager(t, func(c *Config) {
				for _, e := range first.Endpoints {
					c.Previous = append(c.Previous, e.Subnet)
				}
			})
			if again := acquire(t, m, tc.claim); again.Key != first.Key {
				t.Errorf("by previous subnet: got %s, want %s", again.Key, first.Key)
			}
		})
	}
}

func TestExpiredNodeNeverOverwrites(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.7.0-24", leaseValue("192.0.2.9"), f.grant(t, 60))
	_, _, before := f.get(t, "subnets/10.5.7.0-24")
	l := acquire(t, f.manager(t, withPrevious("10.5.7.0/24")), claim("192.0.2.1"))
	if l.Key == "10.5.7.0-24" {
		t.Error("took the subnet of its new owner")
	}
	if v, _, after := f.get(t, "subnets/10.5.7.0-24"); after != before {
		t.Errorf("wrote %s over the new owner", v)
	}
}

func TestUnreadableLeaseIsTaken(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", `{"Network":"10.5.0.0/28"}`)
	f.put(t, "subnets/10.5.0.4-30", "{")
	f.put(t, "subnets/10.5.0.8-30&fd00::-64", "null")
	for n := range 3 {
		m := f.manager(t, withPrevious("10.5.0.4/30"))
		l, err := subnettest.Acquire(t.Context(), m, claim(fmt.Sprintf("192.0.2.%d", n+1)))
		if n == 0 && (err != nil || l.Key != "10.5.0.12-30") || n > 0 && !errors.Is(err, subnet.ErrNoSubnets) {
			t.Errorf("node %d: got %v, %v", n, l.Key, err)
		}
	}
}

func TestReservation(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.9.0-24", `{"PublicIP":"192.0.2.1"}`)
	for range 2 {
		m := f.manager(t)
		l := acquire(t, m, claim("192.0.2.1"))
		if l.Key != "10.5.9.0-24" || !l.Permanent || !l.Expires.IsZero() {
			t.Errorf("got %+v, want the reservation", l)
		}
		startKeep(t, m, l)
	}
	v, lease, _ := f.get(t, "subnets/10.5.9.0-24")
	if v != leaseValue("192.0.2.1") || lease != 0 {
		t.Errorf("key has %s and etcd lease %x, want our value and none", v, lease)
	}
}

// TestReservationOfAHostThatRan reserves another subnet for a host that has a lease. The host must
// get the reserved subnet at its next start. Other hosts must never see two leases of the host in
// use.
func TestReservationOfAHostThatRan(t *testing.T) {
	s := newServer(t)
	for name, gone := range map[string]bool{"its lease is there yet": false, "its lease has run out": true} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", configV4)
			before := f.etcdLeases(t)
			had := acquire(t, f.manager(t, withPrevious("10.5.5.0/24")), claim("192.0.2.1"))
			if _, err := f.admin(t).Reserve(t.Context(), reserve("192.0.2.1", "10.5.9.0/24")); err != nil {
				t.Fatal(err)
			}
			if gone {
				_, lease, _ := f.get(t, "subnets/"+had.Key)
				if _, err := f.kv.Revoke(t.Context(), clientv3.LeaseID(lease)); err != nil {
					t.Fatal(err)
				}
			}
			w := subnettest.Watch(t, f.manager(t))
			w.Until(t, "the reservation", func(s subnet.Snapshot) bool { return len(s.Leases) > 0 })

			m := f.manager(t, withPrevious("10.5.5.0/24"))
			recalled, err := m.Recall(t.Context(), claim("192.0.2.1"))
			if err != nil {
				t.Fatal(err)
			}
			recalled.BackendType = "host-gw"
			l := acquire(t, m, recalled)
			if l.Key != "10.5.9.0-24" || !l.Permanent {
				t.Errorf("got %+v, want the reservation", l)
			}
			inUse := func(s subnet.Snapshot) bool {
				return slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Permanent && l.BackendType != "" })
			}
			w.Until(t, "it in use", inUse)
			for _, s := range w.All() {
				if inUse(s) && len(s.Leases) != 1 {
					t.Errorf("others see two leases of one address in use: %v", s.Leases)
				}
			}
			startKeep(t, m, l)
			waittest.Until(t, patience, "no etcd lease left", func() bool { return f.etcdLeases(t) == before })
		})
	}
}

func TestEtcdLeasesDoNotGrow(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	before := f.etcdLeases(t)
	for n := range 10 {
		c := claim("192.0.2.1")
		c.Endpoints[0].Data = json.RawMessage(fmt.Sprint(n / 2)) // only every other start has something to write
		l := acquire(t, f.manager(t), c)
		if v, _, _ := f.get(t, "subnets/"+l.Key); !strings.Contains(v, fmt.Sprintf(`"BackendData":%d`, n/2)) {
			t.Errorf("start %d: value is %s", n, v)
		}
	}
	if after := f.etcdLeases(t); after != before+1 {
		t.Errorf("%d etcd leases after ten starts, want 1", after-before)
	}
}

// TestGrantsWithoutAnAnswer loses the answers to the first three requests for an etcd lease. The
// store must have one etcd lease after the fourth.
func TestGrantsWithoutAnAnswer(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	var requests atomic.Int64
	m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoke(ctx, method, req, reply, cc, opts...)
			if _, ok := req.(*pb.LeaseGrantRequest); ok && requests.Add(1) <= 3 {
				return status.Error(codes.DeadlineExceeded, "the answer is lost")
			}
			return err
		}))
	l := acquire(t, m, claim("192.0.2.1"))
	if _, lease, _ := f.get(t, "subnets/"+l.Key); lease == 0 {
		t.Error("the key has no etcd lease")
	}
	if n := f.etcdLeases(t); n != 1 || requests.Load() != 4 {
		t.Errorf("%d etcd leases after %d requests, want 1 after 4", n, requests.Load())
	}
	if left := time.Until(l.Expires); left < 23*time.Hour || left > 24*time.Hour {
		t.Errorf("the lease lives for %v, want a day", left)
	}
}

// TestEtcdLeaseOfAnotherTTLIsReplaced expects that a start replaces an etcd lease whose TTL is not
// the configured one.
func TestEtcdLeaseOfAnotherTTLIsReplaced(t *testing.T) {
	s := newServer(t)
	for name, had := range map[string]time.Duration{"shorter": time.Minute, "longer": 48 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", configV4)
			before := f.etcdLeases(t)
			f.put(t, "subnets/10.5.9.0-24", leaseValue("192.0.2.1"), f.grant(t, int64(had.Seconds())))
			l := acquire(t, f.manager(t), claim("192.0.2.1"))
			if left := time.Until(l.Expires); l.Key != "10.5.9.0-24" || left < 23*time.Hour || left > 24*time.Hour {
				t.Errorf("got %+v, want the key for a day", l)
			}
			if after := f.etcdLeases(t); after != before+1 {
				t.Errorf("%d etcd leases, want 1", after-before)
			}
		})
	}
}

// TestLeastTTLOfTheStore acquires a lease twice from a store that grants a longer TTL than
// requested. The manager must keep its etcd lease, although the TTL is not the configured one.
func TestLeastTTLOfTheStore(t *testing.T) {
	f := newFixture(t, newServer(t, func(s *server) { s.election = 2000 }))
	f.put(t, "config", configV4)
	m := f.manager(t, func(c *Config) { c.TTL = time.Second })
	l := acquire(t, m, claim("192.0.2.1"))
	_, had, _ := f.get(t, "subnets/"+l.Key)
	l = acquire(t, m, claim("192.0.2.1"))
	if _, now, _ := f.get(t, "subnets/"+l.Key); now != had {
		t.Errorf("the etcd lease went from %x to %x", had, now)
	}
}

func TestConfigurationChanges(t *testing.T) {
	f := newFixture(t, newServer(t))
	before := f.etcdLeases(t)
	f.put(t, "config", configV4)
	first := acquire(t, f.manager(t), claim("192.0.2.1"))

	f.put(t, "config", configDual)
	dual := acquire(t, f.manager(t), claim("192.0.2.1", "2001:db8::1"))
	if len(dual.Endpoints) != 2 || dual.Endpoints[0].Subnet != first.Endpoints[0].Subnet {
		t.Errorf("with IPv6 added got %+v, want %s kept", dual.Endpoints, first.Endpoints[0].Subnet)
	}
	f.put(t, "config", `{"Network":"10.6.0.0/16"}`)
	moved := acquire(t, f.manager(t), claim("192.0.2.1"))
	if !netip.MustParsePrefix("10.6.0.0/16").Contains(moved.Endpoints[0].Subnet.Addr()) {
		t.Errorf("with another network got %+v", moved.Endpoints)
	}
	resp, err := f.kv.Get(t.Context(), f.prefix+"/subnets/", withPrefix())
	if err != nil || len(resp.Kvs) != 1 || !strings.HasSuffix(string(resp.Kvs[0].Key), moved.Key) {
		t.Errorf("left in the store: %v, %v", resp.Kvs, err)
	}
	if after := f.etcdLeases(t); after != before+1 {
		t.Errorf("%d etcd leases, want 1", after-before)
	}
}

// TestConfigurationChangesUnderAReservation expects that a reservation stays one while IPv6 is
// enabled and disabled, and that it becomes a lease when its subnet is not in the network any more.
// The log must have a line for each reservation that was deleted.
func TestConfigurationChangesUnderAReservation(t *testing.T) {
	f := newFixture(t, newServer(t))
	before := f.etcdLeases(t)
	f.put(t, "subnets/10.5.77.0-24", leaseValue("192.0.2.1"))
	ctx, book := withLog(t.Context())
	for i, tc := range []struct {
		config, key string
		reserved    bool
	}{
		{configV4, "10.5.77.0-24", true},
		{configDual, "10.5.77.0-24&fd00:10:5:", true},
		{configV4, "10.5.77.0-24", true},
		{`{"Network":"10.6.0.0/16"}`, "10.6.", false},
	} {
		f.put(t, "config", tc.config)
		l, err := subnettest.Acquire(ctx, f.manager(t), claim("192.0.2.1", "2001:db8::1"))
		if err != nil {
			t.Fatal(err)
		}
		if _, lease, _ := f.get(t, "subnets/"+l.Key); !strings.HasPrefix(l.Key, tc.key) || l.Permanent != tc.reserved || (lease == 0) != tc.reserved {
			t.Errorf("configuration %d: got %+v on etcd lease %x, want %s…, reserved %v", i, l, lease, tc.key, tc.reserved)
		}
	}
	if n := f.etcdLeases(t) - before; n != 1 {
		t.Errorf("%d etcd leases, want 1", n)
	}
	lines := book.lines()
	if len(lines) != 3 || !strings.Contains(lines[2], `"reservation"="10.5.77.0-24" "taken"="10.6.`) {
		t.Errorf("deleted reservations that were logged: %q, want 3", lines)
	}
}

func TestAddressChangesWhileRunning(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	m := f.manager(t)
	first := acquire(t, m, claim("192.0.2.1"))
	keep := startKeep(t, m, first)
	second := acquire(t, m, claim("192.0.2.2"))
	if second.Key != first.Key || second.Order != first.Order {
		t.Errorf("got %+v, want the same key as before: %+v", second, first)
	}
	third := acquire(t, m, claim("192.0.2.3"))
	waittest.Until(t, patience, "the new address", func() bool {
		v, _, _ := f.get(t, "subnets/"+third.Key)
		return third.Key == first.Key && v == leaseValue("192.0.2.3")
	})
	keep.stillRuns(t)
}

// TestAnswerLost loses the answer to a write that the store has executed. When the manager can
// reach the store again, it must recognize the lease in the store as its own.
func TestAnswerLost(t *testing.T) {
	const before, lost, after = "192.0.2.1", "192.0.2.22", "192.0.2.3"
	s := newServer(t)
	for name, tc := range map[string]struct {
		reserved, gone bool
		next           string // address that the manager publishes in the end
	}{
		"of a lease, tried again":              {next: lost},
		"of a lease, with another address":     {next: after},
		"of a lease, with the one before":      {next: before},
		"of one that had run out":              {next: after, gone: true},
		"of a reservation, tried again":        {next: lost, reserved: true},
		"of a reservation, with another again": {next: after, reserved: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", configV4)
			leases := f.etcdLeases(t)
			if tc.reserved {
				f.put(t, "subnets/10.5.9.0-24", leaseValue(before))
			}
			p := newProxy(t, f.server)
			var reported atomic.Value
			m := f.manager(t, throughProxy(p), func(c *Config) {
				c.OnLease = func(l subnet.Lease) { reported.Store(l.Endpoints[0].PublicIP.String()) }
			})
			l := acquire(t, m, claim(before))
			if tc.gone {
				_, lease, _ := f.get(t, "subnets/"+l.Key)
				if _, err := f.kv.Revoke(t.Context(), clientv3.LeaseID(lease)); err != nil {
					t.Fatal(err)
				}
			}
			loseAnswer(t, f, p, m, l.Key, claim(lost))
			k := startKeep(t, m, l)
			p.cut()
			p.open(t)
			waittest.Until(t, patience, "what stands there to be known", func() bool {
				k.stillRuns(t)
				return reported.Load() == lost
			})
			if now := acquire(t, m, claim(tc.next)); now.Key != l.Key || now.Permanent != tc.reserved {
				t.Errorf("got %+v, want %s", now, l.Key)
			}
			if v, _, _ := f.get(t, "subnets/"+l.Key); v != leaseValue(tc.next) {
				t.Errorf("the key has %s", v)
			}
			k.stillRuns(t)
			want := 1
			if tc.reserved {
				want = 0
			}
			waittest.Until(t, patience, "no etcd lease left", func() bool { return f.etcdLeases(t)-leases == want })
		})
	}
}

// TestAnswerLostAndTakenOver expects that a manager does not take a lease of another node for its
// own, even if the lease has the value of a write without an answer.
func TestAnswerLostAndTakenOver(t *testing.T) {
	for _, by := range []string{"192.0.2.9", "192.0.2.22"} {
		t.Run(by, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.put(t, "config", configV4)
			p := newProxy(t, f.server)
			m := f.manager(t, throughProxy(p))
			l := acquire(t, m, claim("192.0.2.1"))
			loseAnswer(t, f, p, m, l.Key, claim("192.0.2.22"))
			p.cut()
			f.put(t, "subnets/"+l.Key, leaseValue(by), f.grant(t, 60))
			p.open(t)
			if err := startKeep(t, m, l).waitUntilLost(t); !strings.HasSuffix(err.Error(), "now belongs to "+by) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

// loseAnswer makes m write c to key, and cancels the call after the write and before the answer
// arrives. The proxy p, between m and the etcd of f, is stalled afterwards.
func loseAnswer(t *testing.T, f *fixture, p *proxy, m *Manager, key string, c subnet.Claim) {
	t.Helper()
	ctx, cancel := contextWithCancel(t)
	given := make(chan error, 1)
	subnets, err := codec.ParseKey(key)
	if err != nil {
		t.Fatal(err)
	}
	c.Endpoints[0].Subnet = subnets[0]
	written := leaseValue(c.Endpoints[0].PublicIP.String())
	p.stallAfterText(written)
	go func() {
		_, err := subnettest.Acquire(ctx, m, c)
		given <- err
	}()
	waittest.Until(t, patience, "it to be written", func() bool {
		v, _, _ := f.get(t, "subnets/"+key)
		return v == written
	})
	cancel()
	if err := waittest.Receive(t, patience, "the end of Acquire", given); !errors.Is(err, context.Canceled) {
		t.Fatalf("it was answered: %v", err)
	}
}

func TestClaimLacksFamily(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configDual)
	_, err := subnettest.Acquire(t.Context(), f.manager(t), claim("192.0.2.1"))
	if want := "acquire lease: IPv6 is enabled but this node has no public IPv6 address"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
}

// keeper is a Keep that was started. done gets its error when it ends.
type keeper struct{ done chan error }

// startKeep starts Keep, which runs until the test ends.
func startKeep(tb testing.TB, m *Manager, l subnet.Lease) keeper {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	k := keeper{make(chan error, 1)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.done <- m.Keep(ctx, l)
	}()
	tb.Cleanup(func() {
		cancel()
		waittest.Receive(tb, patience, "the end of Keep", ended)
	})
	return k
}

func (k keeper) stillRuns(tb testing.TB) {
	tb.Helper()
	select {
	case err := <-k.done:
		tb.Fatalf("Keep ended with %v", err)
	default:
	}
}

func (k keeper) waitUntilLost(tb testing.TB) error {
	tb.Helper()
	select {
	case err := <-k.done:
		if !errors.Is(err, subnet.ErrLeaseLost) {
			tb.Errorf("Keep ended with %v, want ErrLeaseLost", err)
		}
		return err
	case <-time.After(patience):
		tb.Fatal("Keep goes on")
	}
	return nil
}

// TestResumed starts a node that knows its lease and has another address than before. The node must
// continue with that lease, unless the lease has changed or is another one.
func TestResumed(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	before := acquire(t, f.manager(t), claim("192.0.2.1"))

	m := f.manager(t)
	m.Resumed(before)
	if c, err := m.Recall(t.Context(), claim("192.0.2.2")); err != nil || len(c.Endpoints) != 1 || c.Endpoints[0].Subnet != before.Endpoints[0].Subnet {
		t.Errorf("recalled %v, %v, want what %v says", c, err, before)
	}
	now := acquire(t, m, claim("192.0.2.2"))
	if now.Key != before.Key || now.Endpoints[0].PublicIP != claim("192.0.2.2").Endpoints[0].PublicIP {
		t.Errorf("acquired %+v, want %s with the new address", now, before.Key)
	}

	// Another node, which has got the former address of this one, has taken the lease since then.
	f.put(t, "subnets/"+before.Key, leaseValue("192.0.2.1"), f.grant(t, 60))
	away := f.manager(t)
	away.Resumed(before)
	if l := acquire(t, away, claim("192.0.2.5")); l.Key == before.Key {
		t.Errorf("%s was taken from the node that has the former address", l.Key)
	}

	// Another node has taken the lease since then.
	f.put(t, "subnets/"+before.Key, leaseValue("192.0.2.2"), f.grant(t, 60))
	late := f.manager(t)
	late.Resumed(before)
	if l := acquire(t, late, claim("192.0.2.3")); l.Key == before.Key {
		t.Errorf("%s was taken from another node", l.Key)
	}
	// Another node has created a lease with the same key and address. It is not the same lease,
	// because it was created later.
	f.delete(t, "subnets/"+before.Key)
	f.put(t, "subnets/"+before.Key, leaseValue("192.0.2.1"))
	again := f.manager(t)
	again.Resumed(before)
	if l := acquire(t, again, claim("192.0.2.4")); l.Key == before.Key {
		t.Errorf("%s was taken from the node that has created it again", l.Key)
	}
}

// TestLeaseWithDataOfAnotherHost starts a host whose public address is in a lease that another host has
// written, or may have written. The host must not take the subnet and the data of another host, and must
// take its own, even if it was installed again.
func TestLeaseWithDataOfAnotherHost(t *testing.T) {
	const (
		addr, macA, macB = "192.0.2.1", "02:00:00:00:00:0a", "02:00:00:00:00:0b"
		key              = "10.5.207.0-24"
	)
	value := func(ip, mac string) string {
		v, err := codec.Encode(withIdentity(ip, mac))
		if err != nil {
			t.Fatal(err)
		}
		return string(v)
	}
	bare := fmt.Sprintf(`{"PublicIP":%q}`, addr)
	former := &subnet.Lease{Key: "10.5.208.0-24", Order: 1, Endpoints: withIdentity(addr, macB).Endpoints}
	former.Endpoints[0].Subnet = netip.MustParsePrefix("10.5.208.0/24")
	s := newServer(t)
	for _, tc := range []struct {
		name      string
		values    []string // of the key, in this order
		reserved  bool     // the key has no etcd lease
		compacted bool
		resumed   *subnet.Lease // of the last known state; nil: none
		previous  string        // subnet that the host had; empty: unknown
		mac       string        // of the host, if it does not recall one
		another   bool          // the host must take another subnet
	}{
		{name: "the other names a host that has not joined yet", values: []string{value("192.0.2.2", macA), value(addr, macA)}, another: true},
		{name: "the operator names it", values: []string{value("192.0.2.2", macA), bare}, reserved: true},
		{name: "this host, installed again", values: []string{value(addr, macA)}},
		{name: "this host, installed again after it had changed its data", values: []string{value(addr, macA), value(addr, macB)}},
		{name: "the history is not known", values: []string{value("192.0.2.2", macA), value(addr, macA)}, compacted: true},
		{name: "this host has moved, and subnet.env is left", values: []string{value("192.0.2.2", macB), value(addr, macB)}, previous: "10.5.207.0/24"},
		{name: "this host has moved, and its key is left", values: []string{value("192.0.2.2", macB), value(addr, macB)}, mac: macB},
		{name: "a reservation with other data than the last known state", values: []string{value(addr, macA)}, reserved: true, resumed: former, another: true},
		{name: "a reservation with the same data", values: []string{value(addr, macB)}, reserved: true, resumed: former},
		{name: "a reservation without data", values: []string{bare}, reserved: true, resumed: former},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t, s)
			f.put(t, "config", `{"Network":"10.5.0.0/16"}`)
			var lease []clientv3.OpOption
			if !tc.reserved {
				lease = append(lease, f.grant(t, 60))
			}
			for _, v := range tc.values {
				f.put(t, "subnets/"+key, v, lease...)
			}
			_, _, revision := f.get(t, "subnets/"+key)
			if tc.compacted {
				if _, err := f.kv.Compact(t.Context(), revision); err != nil {
					t.Fatal(err)
				}
			}
			m := f.manager(t)
			if tc.previous != "" {
				m = f.manager(t, withPrevious(tc.previous))
			}
			if tc.resumed != nil {
				m.Resumed(*tc.resumed)
			}

			recalled, err := m.Recall(t.Context(), claim(addr))
			if err != nil {
				t.Fatal(err)
			}
			c := withIdentity(addr, cmp.Or(tc.mac, "02:00:00:00:00:0c"))
			if len(recalled.Endpoints) > 0 {
				if tc.another {
					t.Errorf("recalled %v, the data of another host", recalled)
				}
				c.Endpoints[0].Data = recalled.Endpoints[0].Data
			}
			own := acquire(t, m, c)
			if (own.Key != key) != tc.another {
				t.Errorf("took %s, want another one than %s: %v", own.Key, key, tc.another)
			}
			if _, _, now := f.get(t, "subnets/"+key); tc.another && now != revision {
				t.Errorf("the lease of the other host was written")
			}
		})
	}
}

// TestLeaseOfTheHostThatHadThisAddress gives a host the address of another host, which is down. The lease of that host
// must stay as it is, although this host has started again, or needs another subnet.
func TestLeaseOfTheHostThatHadThisAddress(t *testing.T) {
	const later = `{"Network":"10.5.0.0/16","SubnetMin":"10.5.50.0"}`
	for _, tc := range []struct {
		name            string
		with            func(ip, mac string) subnet.Claim
		restarts, moves bool
	}{
		{name: "start with host-gw", with: func(ip, _ string) subnet.Claim { return claim(ip) }, restarts: true},
		{name: "start with host-gw and another range", with: func(ip, _ string) subnet.Claim { return claim(ip) }, restarts: true, moves: true},
		{name: "another range with host-gw", with: func(ip, _ string) subnet.Claim { return claim(ip) }, moves: true},
		{name: "another range with vxlan", with: withIdentity, moves: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t, sharedServer(t))
			f.put(t, "config", configV4)
			other := acquire(t, f.manager(t, withPrevious("10.5.77.0/24")), tc.with("192.0.2.1", "02:00:00:00:00:0a"))
			_, _, revision := f.get(t, "subnets/"+other.Key)
			m := f.manager(t, withPrevious("10.5.7.0/24"))
			before := acquire(t, m, tc.with("192.0.2.2", "02:00:00:00:00:0b"))
			if tc.restarts {
				m = f.manager(t)
				m.Resumed(before)
			}
			config := configV4
			if tc.moves {
				config = later
			}
			f.put(t, "config", config)
			cfg, err := subnet.ParseConfig([]byte(config))
			if err != nil {
				t.Fatal(err)
			}

			c := tc.with("192.0.2.1", "02:00:00:00:00:0b")
			c.Endpoints[0].Subnet = before.Endpoints[0].Subnet
			now, err := m.Acquire(t.Context(), cfg, c)
			if err != nil {
				t.Fatal(err)
			}
			if now.Key == other.Key || (now.Key == before.Key) == tc.moves {
				t.Errorf("took %s, had %s, and the other host has %s", now.Key, before.Key, other.Key)
			}
			if _, _, is := f.get(t, "subnets/"+other.Key); is != revision {
				t.Errorf("the lease of the other host is at revision %d, want %d", is, revision)
			}
		})
	}
}

// TestLeasesWithThisAddressAreReadWithinBounds starts a host whose public address is in 50 leases that
// were created for other addresses. The host must read the first value of a few, and take none of them.
func TestLeasesWithThisAddressAreReadWithinBounds(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", configV4)
	var last int64
	for i := range 50 {
		key := fmt.Sprintf("subnets/10.5.%d.0-24", i+1)
		lease := f.grant(t, 60)
		f.put(t, key, leaseValue(fmt.Sprintf("198.51.100.%d", i+1)), lease)
		last = f.put(t, key, leaseValue("192.0.2.1"), lease)
	}

	m := f.manager(t)
	var reads atomic.Int32
	m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if r, ok := req.(*pb.RangeRequest); ok && r.Revision != 0 && len(r.RangeEnd) == 0 {
				reads.Add(1)
			}
			return invoke(ctx, method, req, reply, cc, opts...)
		}))
	own := acquire(t, m, claim("192.0.2.1"))
	if int64(own.Order) <= last {
		t.Errorf("took %s, a lease of another host", own.Key)
	}
	if n := reads.Load(); n < 1 || n > 2*mostFirstValues { // Recall and Acquire
		t.Errorf("%d first values were read, want at least one and at most %d", n, 2*mostFirstValues)
	}
}
