// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"testing"
)

func TestLocks(t *testing.T) {
	dir := t.TempDir()
	one, two := NewLocks(dir), NewLocks(dir)
	devices := []string{"flannel.1", "flannel-v6.1"}
	for range 2 {
		if err := one.Take(devices...); err != nil {
			t.Fatal(err)
		}
	}
	if err := two.Take(devices...); !errors.Is(err, ErrInUse) {
		t.Errorf("the second daemon gets %v, want ErrInUse", err)
	}
	one.Keep("flannel.1")
	if err := two.Take("flannel-v6.1"); err != nil {
		t.Error(err)
	}
	one.Keep()
	if err := two.Take(devices...); err != nil {
		t.Error(err)
	}
	two.Keep()
	none := NewLocks("/dev/null/nowhere")
	if err := none.Take(devices...); err != nil {
		t.Errorf("without a state directory: %v", err)
	}
}
