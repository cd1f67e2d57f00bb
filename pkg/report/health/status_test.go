// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func checkReady(t *testing.T, s *Status, want ...string) {
	t.Helper()
	ready, reasons := s.Ready()
	if ready != (len(want) == 0) {
		t.Errorf("ready = %v with reasons %q", ready, reasons)
	}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
}

func TestReady(t *testing.T) {
	s := New(0, "network", "subnet file")
	checkReady(t, s, "network: not up yet", "subnet file: not up yet")
	s.Set("subnet file", errors.New("disk full"))
	checkReady(t, s, "network: not up yet", "subnet file: disk full")
	s.Set("network", nil)
	s.Set("subnet file", nil)
	checkReady(t, s)

	s.Set("firewall", errors.Join(errors.New("one"), errors.New("two")))
	s.Set("network", errors.New("device lost"))
	checkReady(t, s, "network: device lost", "firewall: one; two")
	s.Set("network", nil)
	s.Set("firewall", nil)
	checkReady(t, s)
}

func TestNothingRequiredIsReady(t *testing.T) { checkReady(t, New(0)) }

func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = 5 * time.Minute
		gone := errors.New("unreachable")
		s := New(0)
		s.SetGrace("datastore", grace)

		s.Set("datastore", gone)
		checkReady(t, s)
		time.Sleep(grace - 1)
		s.Set("datastore", gone) // a repeated report does not restart the grace period
		checkReady(t, s)
		time.Sleep(time.Nanosecond)
		checkReady(t, s, "datastore: unreachable")

		s.Set("datastore", nil)
		checkReady(t, s)
		s.Set("datastore", gone)
		checkReady(t, s)
		time.Sleep(time.Minute)
		s.SetGrace("datastore", time.Minute)
		checkReady(t, s, "datastore: unreachable")
	})
}

func TestGraceOfRequiredComponent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(0, "datastore")
		s.SetGrace("datastore", time.Minute)
		checkReady(t, s, "datastore: not up yet")
		time.Sleep(time.Hour)
		s.Set("datastore", errors.New("unreachable"))
		checkReady(t, s)
		time.Sleep(time.Minute)
		checkReady(t, s, "datastore: unreachable")
	})
}

func TestAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(time.Minute)
		time.Sleep(time.Hour)
		if err := s.Alive(); err != nil {
			t.Errorf("before the first beat: %v", err)
		}
		s.Beat()
		time.Sleep(time.Minute)
		if err := s.Alive(); err != nil {
			t.Errorf("at the bound: %v", err)
		}
		time.Sleep(2 * time.Second)
		const want = "main loop stands still for 1m2s, expected a round every 1m0s"
		if err := s.Alive(); err == nil || err.Error() != want {
			t.Errorf("past the bound: %v, want %q", err, want)
		}
		s.Beat()
		if err := s.Alive(); err != nil {
			t.Errorf("after another beat: %v", err)
		}
		s.Pause()
		time.Sleep(time.Hour)
		if err := s.Alive(); err != nil {
			t.Errorf("during a pause: %v", err)
		}
		s.Beat()
		time.Sleep(2 * time.Minute)
		if err := s.Alive(); err == nil {
			t.Error("a beat does not end a pause")
		}
	})
}

func TestAliveWithoutBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(0)
		s.Beat()
		time.Sleep(1000 * time.Hour)
		if err := s.Alive(); err != nil {
			t.Error(err)
		}
	})
}

func TestStatusIsSafeForConcurrentUse(t *testing.T) {
	s := New(time.Hour, "network")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				s.Set("network", nil)
				s.SetGrace("datastore", time.Minute)
				s.Beat()
				s.Ready()
				if err := s.Alive(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	checkReady(t, s)
}
