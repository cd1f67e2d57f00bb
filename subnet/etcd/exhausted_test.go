// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestExhaustedPoolIsReadOnce makes a host wait for a subnet while another host writes its lease
// again and again. The host must not read all leases again before a change that concerns it, and must
// notice each of these.
func TestExhaustedPoolIsReadOnce(t *testing.T) {
	const subnets = 255
	key := func(i int) string { return fmt.Sprintf("10.5.%d.%d-28", i/16, i%16*16) }
	config := `{"Network":"10.5.0.0/20","SubnetLen":28}`
	for _, tc := range []struct {
		name string
		free func(*fixture, testing.TB) // makes a subnet free for 192.0.2.1, or changes the configuration
		want string                     // key of the lease; empty: the attempt fails again
	}{
		{"a lease goes", func(f *fixture, tb testing.TB) { f.delete(tb, "subnets/"+key(7)) }, key(7)},
		{"a subnet is reserved for it", func(f *fixture, tb testing.TB) { f.put(tb, "subnets/"+key(9), leaseValue("192.0.2.1")) }, key(9)},
		{"the configuration changes", func(f *fixture, tb testing.TB) { f.put(tb, "config", config+" ") }, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t, newServer(t))
			f.put(t, "config", config)
			for i := 1; i <= subnets; i++ {
				f.put(t, "subnets/"+key(i), leaseValue(fmt.Sprintf("198.51.100.%d", i)), f.grant(t, 3600))
			}
			p := newProxy(t, f.server)
			m := f.manager(t, throughProxy(p))
			if _, err := subnettest.Acquire(t.Context(), m, claim("192.0.2.1")); !errors.Is(err, subnet.ErrNoSubnets) {
				t.Fatalf("error is %v, want that no subnet is free", err)
			}
			list := p.sent.Load()
			type result struct {
				subnet.Lease
				error
			}
			done := make(chan result, 1)
			go func() {
				l, err := subnettest.Acquire(t.Context(), m, claim("192.0.2.1"))
				done <- result{l, err}
			}()
			for i := range 20 {
				f.put(t, "subnets/"+key(100), leaseValue(fmt.Sprintf("198.51.101.%d", i)), f.grant(t, 3600))
			}
			select {
			case r := <-done:
				t.Fatalf("it did not wait: %v, %v", r.Lease, r.error)
			case <-time.After(300 * time.Millisecond):
			}
			if more := p.sent.Load() - list; more > list/2 {
				t.Errorf("the store sent %d bytes for the list and %d during the wait, want less than half", list, more)
			}
			tc.free(f, t)
			select {
			case r := <-done:
				if r.Lease.Key != tc.want || (tc.want == "") != errors.Is(r.error, subnet.ErrNoSubnets) {
					t.Errorf("got %q, %v, want %q", r.Lease.Key, r.error, tc.want)
				}
			case <-time.After(patience):
				t.Fatal("it waits on")
			}
		})
	}
}

// TestExhaustedPoolOfAnotherConfiguration lets an attempt to acquire a lease fail, because no
// subnet is free. The next attempt must not wait for a change if it is for another address or
// another configuration.
func TestExhaustedPoolOfAnotherConfiguration(t *testing.T) {
	f := newFixture(t, newServer(t))
	f.put(t, "config", `{"Network":"10.5.0.0/28"}`)
	for i := range 3 {
		f.put(t, fmt.Sprintf("subnets/10.5.0.%d-30", 4*(i+1)), leaseValue(fmt.Sprintf("192.0.2.%d", i+7)), f.grant(t, 3600))
	}
	m := f.manager(t)
	full := func(ip string) {
		t.Helper()
		if _, err := subnettest.Acquire(t.Context(), m, claim(ip)); !errors.Is(err, subnet.ErrNoSubnets) {
			t.Fatalf("error is %v, want that no subnet is free", err)
		}
	}
	full("192.0.2.1")
	full("192.0.2.2")
	if l := acquire(t, m, claim("192.0.2.9")); l.Key != "10.5.0.12-30" {
		t.Errorf("got %s, want this host's lease", l.Key)
	}
	m = f.manager(t)
	full("192.0.2.1")
	f.put(t, "config", configV4)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := subnettest.Acquire(ctx, m, claim("192.0.2.1")); err != nil {
		t.Errorf("with a larger network: %v", err)
	}
}

// TestExhaustedPoolWhoseConfigurationHasChanged lets an attempt fail, and then changes the
// configuration and after that a lease. The next attempt must not wait for another change. etcd may
// send the later change first, so the test repeats this several times.
func TestExhaustedPoolWhoseConfigurationHasChanged(t *testing.T) {
	f := newFixture(t, newServer(t))
	config := `{"Network":"10.5.0.0/28"}`
	f.put(t, "config", config)
	for i := range 3 {
		f.put(t, fmt.Sprintf("subnets/10.5.0.%d-30", 4*(i+1)), leaseValue(fmt.Sprintf("192.0.2.%d", i+7)), f.grant(t, 3600))
	}
	for i := range 10 {
		m := f.manager(t)
		acquire := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := subnettest.Acquire(ctx, m, claim("192.0.2.1"))
			return err
		}
		if err := acquire(); !errors.Is(err, subnet.ErrNoSubnets) {
			t.Fatalf("error is %v, want that no subnet is free", err)
		}
		config += " "
		f.put(t, "config", config)
		f.put(t, "subnets/10.5.0.4-30", leaseValue(fmt.Sprintf("198.51.100.%d", i+1)), f.grant(t, 3600))
		if err := acquire(); !errors.Is(err, subnet.ErrNoSubnets) {
			t.Fatalf("attempt %d: error is %v, want another attempt, which finds no subnet", i, err)
		}
	}
}
