// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// leftover exists until it is removed.
type leftover struct{ removed bool }

func (*leftover) String() string                 { return "a leftover" }
func (r *leftover) Present() (bool, error)       { return !r.removed, nil }
func (r *leftover) Remove(context.Context) error { r.removed = true; return nil }

// TestRemoveLeavesOthersDevices checks that a device of the former configuration, and the
// leftovers, stay while another daemon uses the device, and are removed after that.
func TestRemoveLeavesOthersDevices(t *testing.T) {
	const dev = "flannel.7"
	dir, kernel, left := t.TempDir(), dataplanetest.New(), &leftover{}
	scope := dataplane.Scope{Devices: []string{dev}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}
	link := dataplane.Link{Name: dev, Kind: "vxlan", MTU: 1450, Up: true, MAC: dataplane.MAC{2, 1},
		VXLAN: dataplane.VXLAN{VNI: 7, Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"}}
	if failed := kernel.Apply(t.Context(), []dataplane.Op{{Object: link}}); len(failed) > 0 {
		t.Fatal(failed)
	}
	other := NewLocks(dir)
	devices := NewLocks(dir)
	former := backend.Description{Scope: scope, Leftovers: []backend.Leftover{left}}
	remove := func() (there bool) {
		t.Helper()
		if err := Remove(t.Context(), kernel, devices, (&vxlan.Backend{}).Describe(), former); err != nil {
			t.Fatal(err)
		}
		devices.Keep()
		have, err := kernel.Read(t.Context(), scope)
		if err != nil {
			t.Fatal(err)
		}
		_, there = have.Links[dev]
		return there
	}
	if err := other.Take(dev); err != nil {
		t.Fatal(err)
	}
	if !remove() || left.removed {
		t.Errorf("another daemon's device or its objects were removed (%v)", left.removed)
	}
	other.Keep()
	if remove() || !left.removed {
		t.Error("an unused device or its objects were not removed")
	}
	if err := other.Take(dev); err != nil {
		t.Errorf("a deleted device: %v", err)
	}
	other.Keep()
}
