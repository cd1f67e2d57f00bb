// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

func (f *fixture) admin(tb testing.TB) *Admin {
	tb.Helper()
	return &Admin{f.manager(tb)}
}

func reserve(ip string, subnets ...string) subnet.Claim {
	c := subnet.Claim{}
	for _, s := range subnets {
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix(s), PublicIP: netip.MustParseAddr(ip)})
	}
	return c
}

func TestAdminConfig(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	a := f.admin(t)
	text, revision, err := a.Config(t.Context())
	if err != nil || text != nil || revision != 0 {
		t.Fatalf("without a configuration: %q, %d, %v", text, revision, err)
	}
	if err := a.SetConfig(t.Context(), []byte(configV4), 0); err != nil {
		t.Fatal(err)
	}
	text, revision, err = a.Config(t.Context())
	if err != nil || string(text) != configV4 || revision == 0 {
		t.Fatalf("%q, %d, %v", text, revision, err)
	}
	for _, stale := range []int64{0, revision - 1} {
		if err := a.SetConfig(t.Context(), []byte("{}"), stale); !errors.Is(err, ErrChanged) {
			t.Errorf("write over revision %d with %d: %v, want ErrChanged", revision, stale, err)
		}
	}
}

func TestAdminEntries(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 600))
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"))
	f.put(t, "subnets/10.5.3.0-24", "rubbish")
	entries, err := f.admin(t).Entries(t.Context(), true)
	if err != nil || len(entries) != 3 {
		t.Fatalf("%+v, %v", entries, err)
	}
	broken, leased, reserved := entries[0], entries[1], entries[2]
	if leased.Lease.Permanent || leased.TTL < time.Minute || leased.TTL > 10*time.Minute || leased.Lease.BackendType != "host-gw" {
		t.Errorf("lease: %+v", leased)
	}
	if !reserved.Lease.Permanent || reserved.TTL != 0 || reserved.Err != nil {
		t.Errorf("reservation: %+v", reserved)
	}
	if broken.Err == nil || broken.Lease.Key != "10.5.3.0-24" {
		t.Errorf("one that cannot be read: %+v", broken)
	}
}

func TestAdminReserve(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 600))
	f.put(t, "subnets/10.5.3.0-24", "rubbish", f.grant(t, 600))
	a := f.admin(t)
	for _, tc := range []struct {
		name  string
		claim subnet.Claim
		want  string // part of the error; empty: no error
	}{
		{"free", reserve("192.0.2.9", "10.5.9.0/24"), ""},
		{"again", reserve("192.0.2.9", "10.5.9.0/24"), ""},
		{"another's reservation", reserve("192.0.2.8", "10.5.9.0/24"), "belongs to 192.0.2.9"},
		{"another's lease", reserve("192.0.2.8", "10.5.1.0/24"), "belongs to 192.0.2.1"},
		{"part of another's", reserve("192.0.2.8", "10.5.1.128/25"), "overlaps 10.5.1.0-24 of 192.0.2.1"},
		{"part of one that cannot be read", reserve("192.0.2.8", "10.5.3.128/25"), "overlaps 10.5.3.0-24 of an owner that cannot be read"},
		{"the owner's lease", reserve("192.0.2.1", "10.5.1.0/24"), ""},
		{"a second one", reserve("192.0.2.9", "10.5.8.0/24"), "10.5.8.0-24: 192.0.2.9 has the reservation 10.5.9.0-24, which has to end first"},
		{"beside what the owner's lease became", reserve("192.0.2.1", "10.5.8.0/24"), "has the reservation 10.5.1.0-24"},
		{"an address with a zone", reserve("fe80::1%eth0", "fd00:5:0:7::/64"), `PublicIPv6 "fe80::1%eth0" is not an IPv6 address`},
		{"IPv4 in IPv6", reserve("::ffff:192.0.2.3", "fd00:5:0:7::/64"), `PublicIPv6 "::ffff:192.0.2.3" is not an IPv6 address`},
		{"a subnet of IPv4 in IPv6", reserve("2001:db8::3", "::ffff:10.5.7.0/120"), `"::ffff:10.5.7.0-120" is not a subnet key`},
		{"a single address", reserve("192.0.2.3", "10.5.7.1/32"), `"10.5.7.1-32" is not a subnet key`},
		{"IPv6", reserve("2001:db8::3", "fd00:5:0:7::/64"), ""},
	} {
		_, err := a.Reserve(t.Context(), tc.claim)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	if v, lease, _ := f.get(t, "subnets/10.5.1.0-24"); v != leaseValue("192.0.2.1") || lease != 0 {
		t.Errorf("the owner's lease became %q on lease %d, want the same value without end", v, lease)
	}
	key, err := a.Reserve(t.Context(), reserve("192.0.2.7", "10.5.7.0/24"))
	if err != nil {
		t.Fatal(err)
	}
	// The node gets the subnet that is reserved for it.
	if own := acquire(t, f.manager(t), claim("192.0.2.7")); own.Key != key || !own.Permanent {
		t.Errorf("the node got %+v, want the reservation %s", own, key)
	}
}

func TestAdminRevoke(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "subnets/10.5.1.0-24", leaseValue("192.0.2.1"), f.grant(t, 600))
	f.put(t, "subnets/10.5.2.0-24", leaseValue("192.0.2.2"))
	a := f.admin(t)
	if err := a.Revoke(t.Context(), "10.5.3.0-24", false); !errors.Is(err, ErrNotFound) {
		t.Errorf("what is not there: %v", err)
	}
	if err := a.Revoke(t.Context(), "10.5.2.0-24", false); err == nil || !strings.Contains(err.Error(), "is a reservation") {
		t.Errorf("a reservation as a lease: %v", err)
	}
	if err := a.Revoke(t.Context(), "10.5.1.0-24", true); err == nil || !strings.Contains(err.Error(), "is a lease") {
		t.Errorf("a lease as a reservation: %v", err)
	}
	for key, reservation := range map[string]bool{"10.5.1.0-24": false, "10.5.2.0-24": true} {
		if err := a.Revoke(t.Context(), key, reservation); err != nil {
			t.Error(err)
		}
	}
	if entries, err := a.Entries(t.Context(), false); err != nil || len(entries) != 0 {
		t.Errorf("left over: %+v, %v", entries, err)
	}
}

// TestAdminDoesNotWait expects that an Admin returns an error if the store refuses connections, and
// does not try again. The error is for operators: it has the endpoint, and no words of gRPC.
func TestAdminDoesNotWait(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	a := &Admin{f.manager(t, func(c *Config) { c.Endpoints = []string{"http://" + freeAddr(t)} })}
	_, _, read := a.Config(t.Context())
	_, list := a.Entries(t.Context(), true)
	for name, err := range map[string]error{
		"Config": read, "Entries": list,
		"SetConfig": a.SetConfig(t.Context(), []byte("{}"), 0),
		"Revoke":    a.Revoke(t.Context(), "10.5.1.0-24", false),
	} {
		if text := fmt.Sprint(err); !strings.Contains(text, "refused") || strings.Contains(text, "rpc") || !strings.Contains(text, a.m.cfg.Endpoints[0]) {
			t.Errorf("%s without a store: %s", name, text)
		}
	}
}
