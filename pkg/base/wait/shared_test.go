// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"errors"
	"testing"
)

// TestShared expects one subscription for two listeners, and another one after both have left.
func TestShared(t *testing.T) {
	var s Shared
	var wake func()
	begun, ended := 0, 0
	start := func(w func()) (func(), error) {
		begun, wake = begun+1, w
		return func() { ended++ }, nil
	}
	join := func(wantFirst bool) Signal {
		t.Helper()
		changed, first, err := s.Join(start)
		if err != nil || first != wantFirst {
			t.Fatalf("first is %v, error %v, want %v", first, err, wantFirst)
		}
		return changed
	}
	changedOf := func(changed Signal) bool {
		select {
		case <-changed:
			return true
		default:
			return false
		}
	}
	failed := errors.New("no socket")
	if _, _, err := s.Join(func(func()) (func(), error) { return nil, failed }); !errors.Is(err, failed) {
		t.Errorf("error is %v, want that of the subscription", err)
	}
	one, two := join(true), join(false)
	wake()
	if !changedOf(one) || !changedOf(two) {
		t.Error("a listener was not told of a change")
	}
	s.Leave(one)
	wake()
	if changedOf(one) || !changedOf(two) || ended != 0 {
		t.Errorf("after one has left: the subscription has ended %d times, or a change was not told to the other", ended)
	}
	s.Leave(two)
	if ended != 1 {
		t.Errorf("the subscription has ended %d times, want once", ended)
	}
	s.Leave(join(true))
	if begun != 2 || ended != 2 {
		t.Errorf("the subscription has begun %d times and ended %d times, want 2 and 2", begun, ended)
	}
}
