// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/subnet"
)

// TestSavePause tests the pauses after consecutive writes of a large state.
func TestSavePause(t *testing.T) {
	r := newStateStore(nil)
	for i, tc := range []struct{ took, want time.Duration }{
		{40 * time.Millisecond, savePause}, // the start
		{40 * time.Millisecond, 20 * time.Second},
		{time.Millisecond, savePause},
		{40 * time.Millisecond, 20 * time.Second},
		{10 * time.Second, savePauseMax}, // the disk did not respond
	} {
		if got := r.pause(tc.took); got != tc.want {
			t.Errorf("write %d took %s: pause of %s, want %s", i+1, tc.took, got, tc.want)
		}
	}
}

// TestStateStoreWithoutFile checks that without a file the state is kept in memory.
func TestStateStoreWithoutFile(t *testing.T) {
	r := newStateStore(nil)
	defer r.close()
	renew := func(end time.Time) { r.update(func(now *lastKnown) { now.Own.Expires = end }) }
	start := time.Now()
	renew(start)
	if now, ok := r.get(); ok {
		t.Errorf("state before set: %v, want none", now)
	}
	r.set(lastKnown{})
	r.check()
	renew(start.Add(time.Hour))
	if now, ok := r.get(); !ok || !now.Own.Expires.Equal(start.Add(time.Hour)) {
		t.Errorf("the lease ends at %s, want the new end %s", now.Own.Expires, start.Add(time.Hour))
	}
	if !r.written() {
		t.Error("written returns false without a file")
	}
}

// TestClockThatIsWrong expects that the last known state is not used while the clock is
// earlier than the time at which the state was written.
func TestClockThatIsWrong(t *testing.T) {
	saved := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	last := lastKnown{Saved: saved, Own: subnet.Lease{Expires: saved.Add(23 * time.Hour)}}
	permanent := lastKnown{Saved: saved, Own: subnet.Lease{Permanent: true}}
	old := lastKnown{Own: last.Own}
	for _, tc := range []struct {
		name string
		last lastKnown
		now  time.Time
		want string
	}{
		{"shortly after the write", last, saved.Add(time.Second), ""},
		{"a clock that was set back by a little", last, saved.Add(-30 * time.Second), ""},
		{"a clock without a battery", last, time.Unix(0, 0), "the clock is wrong: it is at 1970-01-01T00:00:00Z, and the state was written at 2026-07-01T12:00:00Z"},
		{"the end of the lease", last, saved.Add(23*time.Hour + 1), errExpired.Error()},
		{"a lease that never ends", permanent, time.Unix(0, 0), ""},
		{"a file without the time of its write", old, time.Unix(0, 0), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := ""
			if err := tc.last.usable(tc.now); err != nil {
				got = err.Error()
			}
			if got != tc.want {
				t.Errorf("usable returns %q, want %q", got, tc.want)
			}
		})
	}
}

// TestStateIsSavedWithTheTime expects that the file has the time of its write.
func TestStateIsSavedWithTheTime(t *testing.T) {
	file, err := state.Open[lastKnown](t.TempDir(), "node")
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	r := newStateStore(file)
	defer r.close()
	r.set(lastKnown{})
	last, ok, err := file.Load()
	if err != nil || !ok || last.Saved.Before(before.Round(0)) || last.Saved.After(time.Now()) {
		t.Errorf("saved at %s, %v, %v, want between %s and now", last.Saved, ok, err, before)
	}
}

// TestRenewalOfAnAddressThatIsGone expects that a renewal of the own lease as the store has it
// does not bring back public addresses that the host has lost since.
func TestRenewalOfAnAddressThatIsGone(t *testing.T) {
	lease := func(public string, end time.Time) subnet.Lease {
		return subnet.Lease{Key: "10.5.1.0-24", Expires: end, Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr(public),
		}}}
	}
	start := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	had, has := lease("192.0.2.1", start), lease("192.0.2.2", start)
	now := lastKnown{Own: has, Stored: &had}
	end := start.Add(time.Hour)
	now.renewed(lease("192.0.2.1", end))
	if got, want := now.Own.Endpoints[0].PublicIP, has.Endpoints[0].PublicIP; got != want || !now.Own.Expires.Equal(end) {
		t.Errorf("own lease has %s and ends at %s, want %s and %s", got, now.Own.Expires, want, end)
	}
	if got := now.Stored; got.Endpoints[0].PublicIP != had.Endpoints[0].PublicIP || !got.Expires.Equal(end) {
		t.Errorf("the store's lease is kept as %+v", got)
	}
	now = lastKnown{Own: has}
	now.renewed(lease("192.0.2.3", end))
	if got := now.Own.Endpoints[0].PublicIP.String(); got != "192.0.2.3" || now.Stored != nil {
		t.Errorf("own lease has %s, want what the store has", got)
	}
}
