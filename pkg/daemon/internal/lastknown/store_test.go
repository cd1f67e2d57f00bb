// SPDX-License-Identifier: Apache-2.0

package lastknown

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

// TestSavePause checks the pauses after consecutive writes of different duration.
func TestSavePause(t *testing.T) {
	r := NewStore(nil)
	for i, tc := range []struct{ took, want time.Duration }{
		{40 * time.Millisecond, firstPause},
		{40 * time.Millisecond, 20 * time.Second},
		{100 * time.Microsecond, savePause},
		{40 * time.Millisecond, 20 * time.Second},
		{10 * time.Second, savePauseMax}, // the disk did not respond
	} {
		if got := r.pause(tc.took); got != tc.want {
			t.Errorf("write %d took %s: pause of %s, want %s", i+1, tc.took, got, tc.want)
		}
	}
}

// TestOpenWaits checks that Open waits for a process that uses the state file and ends soon, and returns
// ErrInUse if the process does not end.
func TestOpenWaits(t *testing.T) {
	o := options.Options{StateDir: t.TempDir()}
	lock, err := statefile.Lock(o.StateDir, o.StateName())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(t.Context(), o); !errors.Is(err, statefile.ErrInUse) {
		t.Errorf("error %v, want ErrInUse", err)
	}
	time.AfterFunc(100*time.Millisecond, func() { _ = lock.Close() })
	s, _, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// TestStateStoreWithoutFile checks that without a file the state is kept in memory.
func TestStateStoreWithoutFile(t *testing.T) {
	r := NewStore(nil)
	defer r.Close()
	renew := func(end time.Time) { r.Update(func(now *State) { now.Own.Expires = end }) }
	start := time.Now()
	renew(start)
	if now, ok := r.Get(); ok {
		t.Errorf("state before Set: %v, want none", now)
	}
	r.Change(func(*State) {})
	r.Check()
	renew(start.Add(time.Hour))
	if now, ok := r.Get(); !ok || !now.Own.Expires.Equal(start.Add(time.Hour)) {
		t.Errorf("the lease ends at %s, want the new end %s", now.Own.Expires, start.Add(time.Hour))
	}
	if !r.Written() {
		t.Error("Written returns false without a file")
	}
}

// TestClockThatIsWrong expects that Usable returns an error for a clock that is much earlier than
// the time at which the state was written, except for a lease that never ends.
func TestClockThatIsWrong(t *testing.T) {
	saved := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	last := State{Saved: saved, Own: subnet.Lease{Expires: saved.Add(23 * time.Hour)}}
	permanent := State{Saved: saved, Own: subnet.Lease{Permanent: true}}
	old := State{Own: last.Own}
	for _, tc := range []struct {
		name string
		last State
		now  time.Time
		want string
	}{
		{"shortly after the write", last, saved.Add(time.Second), ""},
		{"a clock that was set back by a little", last, saved.Add(-30 * time.Second), ""},
		{"a clock without a battery", last, time.Unix(0, 0), "the clock is wrong: it is at 1970-01-01T00:00:00Z, and the state was written at 2026-07-01T12:00:00Z"},
		{"the end of the lease", last, saved.Add(23*time.Hour + 1), ErrExpired.Error()},
		{"a lease that never ends", permanent, time.Unix(0, 0), ""},
		{"a file without the time of its write", old, time.Unix(0, 0), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := ""
			if err := tc.last.Usable(tc.now); err != nil {
				got = err.Error()
			}
			if got != tc.want {
				t.Errorf("Usable returns %q, want %q", got, tc.want)
			}
		})
	}
}

// TestStateIsSavedWithTheTime expects that the file has the time of its write.
func TestStateIsSavedWithTheTime(t *testing.T) {
	file, err := statefile.Open[State](t.TempDir(), "node")
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	r := NewStore(file)
	defer r.Close()
	r.Change(func(*State) {})
	last, ok, err := file.Load()
	if err != nil || !ok || last.Saved.Before(before.Round(0)) || last.Saved.After(time.Now()) {
		t.Errorf("saved at %s, %v, %v, want between %s and now", last.Saved, ok, err, before)
	}
}

// TestRenewalOfAnAddressThatIsGone expects that a renewal of this host's lease as the store has it
// does not bring back public addresses that the host has lost since.
func TestRenewalOfAnAddressThatIsGone(t *testing.T) {
	lease := func(public string, end time.Time) subnet.Lease {
		return subnet.Lease{Key: "10.5.1.0-24", Expires: end, Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr(public),
		}}}
	}
	start := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	had, has := lease("192.0.2.1", start), lease("192.0.2.2", start)
	now := State{Own: has, Stored: &had}
	end := start.Add(time.Hour)
	now.Renewed(lease("192.0.2.1", end))
	if got, want := now.Own.Endpoints[0].PublicIP, has.Endpoints[0].PublicIP; got != want || !now.Own.Expires.Equal(end) {
		t.Errorf("own lease has %s and ends at %s, want %s and %s", got, now.Own.Expires, want, end)
	}
	if got := now.Stored; got.Endpoints[0].PublicIP != had.Endpoints[0].PublicIP || !got.Expires.Equal(end) {
		t.Errorf("the store's lease is kept as %+v", got)
	}
	now = State{Own: has}
	now.Renewed(lease("192.0.2.3", end))
	if got := now.Own.Endpoints[0].PublicIP.String(); got != "192.0.2.3" || now.Stored != nil {
		t.Errorf("own lease has %s, want what the store has", got)
	}
}

// TestRenewalOfAnotherLease expects that a lease that the host has taken for another configuration does
// not change the state of the former configuration.
func TestRenewalOfAnotherLease(t *testing.T) {
	now := State{Own: subnet.Lease{Key: "10.5.1.0-24"}}
	now.Renewed(subnet.Lease{Key: "10.6.1.0-24"})
	if now.Own.Key != "10.5.1.0-24" || now.Stored != nil {
		t.Errorf("the state is %+v", now)
	}
}

// TestTake expects that the state has the subnets that the host has left, the last one first, and each
// once, but not those that it has.
func TestTake(t *testing.T) {
	lease := func(subnets ...string) subnet.Lease {
		var l subnet.Lease
		for _, s := range subnets {
			l.Endpoints = append(l.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix(s)})
		}
		return l
	}
	var now State
	for _, step := range []struct {
		take subnet.Lease
		want []netip.Prefix
	}{
		{lease("10.5.1.0/24"), nil},
		{lease("10.5.1.0/24"), nil},
		{lease("10.6.1.0/24", "fd00::/64"), lease("10.5.1.0/24").Subnets()},
		{lease("10.7.1.0/24"), lease("10.6.1.0/24", "fd00::/64", "10.5.1.0/24").Subnets()},
		{lease("10.5.1.0/24"), lease("10.7.1.0/24", "10.6.1.0/24", "fd00::/64").Subnets()},
	} {
		now.Take(step.take)
		if !slices.Equal(now.Subnets, step.want) {
			t.Errorf("with %v the host has left %v, want %v", now.Own.Subnets(), now.Subnets, step.want)
		}
	}
}

// interfaceWith returns an external interface with the given address.
func interfaceWith(addr string) underlay.Interface {
	a := netip.MustParseAddr(addr)
	return underlay.Interface{Name: "eth0", Index: 2, Addrs: []underlay.Address{{Local: a, Public: a}}}
}

// TestOtherHost checks that a host with an additional family, or without the address of
// one, is still the same host.
func TestOtherHost(t *testing.T) {
	four, six := interfaceWith("192.0.2.1"), interfaceWith("2001:db8::1")
	dual := four
	dual.Addrs = slices.Concat(four.Addrs, six.Addrs)
	moved := interfaceWith("192.0.2.2")
	behind := interfaceWith("192.0.2.1")
	behind.Addrs[0].Public = netip.MustParseAddr("203.0.113.7")
	for name, tc := range map[string]struct {
		a, b underlay.Interface
		want bool
	}{
		"same":                   {four, four, false},
		"another family as well": {four, dual, false},
		"one family less":        {dual, six, false},
		"another address":        {four, moved, true},
		"another public address": {four, behind, true},
		"not known":              {underlay.Interface{}, four, true},
	} {
		if got := OtherHost(tc.a, tc.b); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestFormerNetworks(t *testing.T) {
	p := netip.MustParsePrefix
	config := func(prefixes ...string) (c subnet.Config) {
		for _, s := range prefixes {
			c.Networks = append(c.Networks, subnet.Network{Prefix: p(s)})
		}
		return c
	}
	last := State{
		Config: config("10.5.0.0/16", "fd00:5::/48"), Rules: []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16")},
		Former: []Former{{Config: config("10.4.0.0/16", "10.6.0.0/16")}},
	}
	got := last.FormerNetworks(config("10.6.0.0/16"))
	want := []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16"), p("fd00:5::/48"), p("10.4.0.0/16")}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := (&State{}).FormerNetworks(config("10.6.0.0/16")); got != nil {
		t.Errorf("a first start: %v", got)
	}
}
