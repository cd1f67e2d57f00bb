// SPDX-License-Identifier: Apache-2.0

package builtin

import (
	"runtime"
	"testing"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

// TestOneThread checks that a network whose packets the kernel or a cloud carries needs one thread only,
// and that it needs more if another backend takes part in a migration.
func TestOneThread(t *testing.T) {
	catalog, err := New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer catalog.Close()
	few := runtime.NumCPU() <= 2
	one := map[string]bool{
		"ali-vpc": true, "alloc": true, "aws-vpc": true, "extension": false, "gce": true, "host-gw": true, "ipip": true,
		"tencent-vpc": true, "udp": few, "vxlan": true, "wireguard": false,
	}
	for _, present := range catalog.Types() {
		if got := catalog.OneThread(subnet.Config{BackendType: present}); got != one[present] {
			t.Errorf("%s: one thread is sufficient: %v, want %v", present, got, one[present])
		}
		for _, next := range catalog.Types() {
			if got, want := catalog.OneThread(subnet.Config{BackendType: present, NextType: next}), one[present] && one[next]; got != want {
				t.Errorf("from %s to %s: one thread is sufficient: %v, want %v", present, next, got, want)
			}
		}
	}
}
