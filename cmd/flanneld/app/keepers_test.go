package app

import (
	"testing"
	"time"
)

// TestSavePause has writes of a large state follow each other.
func TestSavePause(t *testing.T) {
	r := newRecord(nil)
	for i, tc := range []struct{ took, want time.Duration }{
		{40 * time.Millisecond, savePause}, // the start
		{40 * time.Millisecond, 20 * time.Second},
		{time.Millisecond, savePause},
		{40 * time.Millisecond, 20 * time.Second},
	} {
		if got := r.pause(tc.took); got != tc.want {
			t.Errorf("write %d took %s: pause of %s, want %s", i+1, tc.took, got, tc.want)
		}
	}
}
