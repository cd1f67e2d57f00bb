// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

func TestLocks(t *testing.T) {
	dir := t.TempDir()
	one, two := NewLocks(dir), NewLocks(dir)
	scope := dataplane.Scope{Devices: []string{"flannel.1", "flannel-v6.1"}}
	for range 2 {
		if err := one.TakeAll(scope); err != nil {
			t.Fatal(err)
		}
	}
	if err := two.TakeAll(scope); !errors.Is(err, ErrInUse) {
		t.Errorf("the second daemon gets %v, want ErrInUse", err)
	}
	one.Release("flannel-v6.1")
	if err := two.Take("flannel-v6.1"); err != nil {
		t.Error(err)
	}
	one.ReleaseAll()
	if err := two.TakeAll(scope); err != nil {
		t.Error(err)
	}
	two.ReleaseAll()
	none := NewLocks("/dev/null/nowhere")
	if err := none.TakeAll(scope); err != nil {
		t.Errorf("without a state directory: %v", err)
	}
}
