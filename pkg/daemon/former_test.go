// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

func TestLeftBehind(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := &network{host: &host{}, catalog: catalog}
	own := netip.MustParseAddr("192.168.77.1")
	eth0 := underlay.Interface{Name: "eth0", Index: 2, MTU: 1500, Addrs: []underlay.Address{{Local: own, Public: own}}}
	config := func(raw string) former {
		c, _, err := subnet.ParseConfig([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return former{c, eth0}
	}
	vxlan1, vxlan2 := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`)
	hostgw, alloc := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}`)
	narrow, other := config(`{"Network":"10.5.0.0/20","Backend":{"Type":"vxlan"}}`), config(`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	port := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":8473}}`)
	fou, moved := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":9285}}`)
	process := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Mode":"userspace"}}`)
	unknown := vxlan1
	unknown.Config.BackendType = "carrier-pigeon"
	for name, tc := range map[string]struct {
		before        []former
		last, present former
		want          []former
	}{
		"the first start":              {present: vxlan1},
		"no change":                    {last: vxlan1, present: vxlan1},
		"no other objects":             {last: port, present: vxlan1},
		"a VNI":                        {last: vxlan1, present: vxlan2, want: []former{vxlan1}},
		"there and back":               {before: []former{vxlan1}, last: vxlan2, present: vxlan1, want: []former{vxlan2}},
		"twice":                        {before: []former{vxlan1}, last: vxlan2, present: hostgw, want: []former{vxlan1, vxlan2}},
		"devices now":                  {last: hostgw, present: vxlan1},
		"no routes now":                {last: hostgw, present: alloc},
		"nothing before":               {last: alloc, present: hostgw},
		"a wider network":              {last: narrow, present: vxlan1},
		"a narrower one":               {last: vxlan1, present: narrow, want: []former{vxlan1}},
		"another one":                  {last: vxlan1, present: other, want: []former{vxlan1}},
		"a FOU port":                   {last: fou, present: vxlan1, want: []former{fou}},
		"another FOU port":             {last: fou, present: moved, want: []former{fou}},
		"no FOU port now":              {last: fou, present: process, want: []former{fou}},
		"never a FOU port":             {last: process, present: moved},
		"a backend of a newer version": {last: unknown, present: vxlan1},
	} {
		t.Run(name, func(t *testing.T) {
			be, _, err := catalog.New(envOf(tc.present))
			if err != nil {
				t.Fatal(err)
			}
			got := n.leftBehind(lastKnown{Config: tc.last.Config, Interface: tc.last.Interface, Former: tc.before}, be)
			describe := func(fs []former) (text []string) {
				for _, f := range fs {
					text = append(text, f.Config.BackendType+" "+string(f.Config.Backend)+" "+f.Config.Networks[0].Prefix.String())
				}
				return text
			}
			if diff := cmp.Diff(describe(tc.want), describe(got)); diff != "" {
				t.Errorf("leftBehind (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDeviceLocks(t *testing.T) {
	one := deviceLocks{dir: t.TempDir()}
	two := deviceLocks{dir: one.dir}
	scope := dataplane.Scope{Devices: []string{"flannel.1", "flannel-v6.1"}}
	for range 2 {
		if err := one.takeAll(scope); err != nil {
			t.Fatal(err)
		}
	}
	if err := two.takeAll(scope); !errors.Is(err, state.ErrInUse) {
		t.Errorf("the second daemon gets %v, want ErrInUse", err)
	}
	one.release("flannel-v6.1")
	if err := two.take("flannel-v6.1"); err != nil {
		t.Error(err)
	}
	one.releaseAll()
	if err := two.takeAll(scope); err != nil {
		t.Error(err)
	}
	two.releaseAll()
	none := deviceLocks{dir: "/dev/null/nowhere"}
	if err := none.takeAll(scope); err != nil {
		t.Errorf("without a state directory: %v", err)
	}
}

// leftover exists until it is removed.
type leftover struct{ removed bool }

func (*leftover) String() string           { return "a leftover" }
func (r *leftover) Present() (bool, error) { return !r.removed, nil }
func (r *leftover) Remove() error          { r.removed = true; return nil }

// TestRetireLeavesOthersDevices checks that a device of the former configuration stays
// while another daemon uses it, together with its objects.
func TestRetireLeavesOthersDevices(t *testing.T) {
	const dev = "flannel.7"
	kernel, left := dataplanetest.New(), &leftover{}
	scope := dataplane.Scope{Devices: []string{dev}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}
	link := dataplane.Link{Name: dev, Kind: "vxlan", MTU: 1450, Up: true, MAC: dataplane.MAC{2, 1},
		VXLAN: dataplane.VXLAN{VNI: 7, Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"}}
	if failed := kernel.Apply(t.Context(), []dataplane.Op{{Object: link}}); len(failed) > 0 {
		t.Fatal(failed)
	}
	n := &network{devices: &deviceLocks{dir: t.TempDir()}}
	other := deviceLocks{dir: n.devices.dir}
	r := n.newRetirement(nil, &vxlan.Backend{})
	retire := func() (there bool) {
		t.Helper()
		if err := r.retire(t.Context(), kernel, ownership{scope, []backend.Leftover{left}}); err != nil {
			t.Fatal(err)
		}
		have, err := kernel.Read(t.Context(), scope)
		if err != nil {
			t.Fatal(err)
		}
		_, there = have.Links[dev]
		return there
	}
	if err := other.takeAll(scope); err != nil {
		t.Fatal(err)
	}
	if !retire() || left.removed {
		t.Errorf("another daemon's device or its objects were removed (%v)", left.removed)
	}
	other.releaseAll()
	if retire() || !left.removed {
		t.Error("an unused device or its objects were not removed")
	}
	if err := other.takeAll(scope); err != nil {
		t.Errorf("a deleted device: %v", err)
	}
	other.releaseAll()
}

func envOf(f former) backend.Env { return backend.Env{Underlay: f.Interface, Config: f.Config} }
