// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestInspect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		s, _ := run(t, &network{})
		advance(time.Minute)
		alien := lease(4, "four")
		alien.BackendType = "other"
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three"), alien)))
		advance(time.Minute)
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(3, "drei")}, "host4"))
		advance(time.Minute)
		s.Publish(fullUpdate(subnet.Snapshot{Leases: subnettest.Pointers(lease(3, "drei")), Store: subnet.StoreID{ID: "another", Revision: 1}}))
		synctest.Wait()

		in, err := s.Inspect(t.Context(), true)
		want := backend.Inspection{
			LastSync: start.Add(3 * time.Minute),
			Peers: []backend.PeerReport{
				{Lease: lease(2, "two"), Held: true, Changed: start.Add(time.Minute)},
				{Lease: lease(3, "drei"), Changed: start.Add(2 * time.Minute)},
			},
		}
		if diff := cmp.Diff(want, in, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
		s.Publish(fullUpdate(subnet.Snapshot{Leases: subnettest.Pointers(alien), Store: subnet.StoreID{ID: "another", Revision: 2}}))
		synctest.Wait()
		in, _ = s.Inspect(t.Context(), true)
		if n := len(in.Peers); n != 2 || in.Peers[1].Refused != `its backend type is "other", ours "test"` {
			t.Errorf("peers are %+v, want the held one and the refused one of another type", in.Peers)
		}
	})
}

// TestReservation checks that a reservation is neither served nor refused, and that the lease of the host that takes it is
// judged as any other.
func TestReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		reserved := lease(4, "")
		reserved.BackendType = ""
		reserved.Permanent = true
		reserved.Endpoints[0].Data = nil
		withData := lease(5, "five")
		withData.BackendType = ""
		withData.Permanent = true
		untyped := lease(6, "")
		untyped.BackendType = ""
		untyped.Endpoints[0].Data = nil
		s.Publish(fullUpdate(snapshot(2, reserved, withData, untyped)))
		synctest.Wait()

		expect := func(what string, reserved bool, refused ...string) {
			t.Helper()
			in, err := s.Inspect(t.Context(), false)
			if err != nil || in.Peers[0].Reserved != reserved {
				t.Errorf("%s: %+v, %v", what, in.Peers, err)
			}
			var got []string
			for _, p := range in.Peers {
				if p.Refused != "" {
					got = append(got, p.Lease.Key)
				}
			}
			if diff := cmp.Diff(refused, got); diff != "" {
				t.Errorf("%s: refused (-want +got):\n%s", what, diff)
			}
		}
		expect("a reservation", true, "host5", "host6")
		if strings.Contains(log(), "host4") {
			t.Errorf("the log names the reservation:\n%s", log())
		}
		if !slices.Contains(n.refused, "host4") { // a cloud keeps its routes
			t.Errorf("Set.Refused has %v, want host4 too", n.refused)
		}

		taken := lease(4, "four")
		taken.Permanent = true
		s.Publish(deltaUpdate(3, []subnet.Lease{taken}))
		synctest.Wait()
		expect("a reservation that its host has taken", false, "host5", "host6")
		taken.BackendType = "other"
		s.Publish(deltaUpdate(4, []subnet.Lease{taken}))
		synctest.Wait()
		expect("another backend", false, "host4", "host5", "host6")
	})
}

func TestInspectReportsTheError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := run(t, &network{fail: 1})
		in, err := s.Inspect(t.Context(), true)
		if err != nil || in.Err == nil || !in.LastSync.IsZero() {
			t.Errorf("after a failure: %+v, %v", in, err)
		}
		advance(time.Second)
		if in, err = s.Inspect(t.Context(), true); err != nil || in.Err != nil || in.LastSync.IsZero() {
			t.Errorf("after it was tried again: %+v, %v", in, err)
		}
	})
}

func TestProgrammerReportsObjects(t *testing.T) {
	kernel := dataplanetest.New()
	scope := dataplane.Scope{Devices: []string{"flannel.1"}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}
	p := newProgrammer(t, kernel, scope, time.Hour)
	base := dataplane.NewState()
	base.Add(dataplane.Link{Name: "flannel.1", Kind: "vxlan", MTU: 1450, Up: true, MAC: dataplane.MAC{2, 1},
		VXLAN: dataplane.VXLAN{VNI: 1, Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"}})
	neigh := func(l subnet.Lease) dataplane.Neigh {
		return dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: "flannel.1", IP: l.Endpoints[0].Subnet.Addr()}, MAC: dataplane.MAC{2, 9}}
	}
	p.Base = base
	p.Desired = func(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
		if l.Key == "host9" {
			return nil, errors.New("no")
		}
		return []dataplane.Object{neigh(l)}, nil
	}
	peer := lease(2, "two")
	if _, err := p.Sync(t.Context(), backend.Set{Leases: map[string]*subnet.Lease{"host2": &peer}, All: true, Complete: true}); err != nil {
		t.Fatal(err)
	}
	want := []status.Object{{Text: "neighbour 10.5.2.0 lladdr 02:09:00:00:00:00 dev flannel.1", Present: true}}
	if diff := cmp.Diff(want, p.Objects("host2")); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]dataplane.Count{"link": {Wanted: 1, Present: 1}, "neighbour": {Wanted: 1, Present: 1}}, p.Counts()); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if p.Objects("host3") != nil {
		t.Error("a missing peer has objects")
	}

	// The peer is removed and added again, each time only as a change.
	for _, leases := range []map[string]*subnet.Lease{{}, {"host2": &peer}} {
		if _, err := p.Sync(t.Context(), backend.Set{Leases: leases, Changed: []string{"host2"}, Complete: true}); err != nil {
			t.Fatal(err)
		}
		if got := p.Counts()["neighbour"]; got.Present != len(leases) || len(p.Objects("host2")) != len(leases) {
			t.Errorf("%+v and %v, want the objects of %d peers", got, p.Objects("host2"), len(leases))
		}
	}
}
