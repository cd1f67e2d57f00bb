package app

import (
	"testing"
	"time"
)

// TestSavePause tests the pauses after consecutive writes of a large state.
func TestSavePause(t *testing.T) {
	r := newRecord(nil)
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

// TestRecordWithoutFile checks that without a file the state is kept in memory.
func TestRecordWithoutFile(t *testing.T) {
	r := newRecord(nil)
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
