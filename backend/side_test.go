// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// TestSide checks which data of leases a backend uses: hosts read a changed configuration at
// different moments, so that leases of all phases are in the store at the same time.
func TestSide(t *testing.T) {
	is := func(text string) func(subnet.Lease) bool {
		return func(l subnet.Lease) bool { return strings.Contains(string(l.Endpoints[0].Data), text) }
	}
	vxlan := backend.Side{Type: "vxlan", LeaseType: "vxlan"}
	udp := backend.Side{Type: "udp"}
	vni1 := backend.Side{Type: "vxlan", LeaseType: "vxlan", Matches: is("one")}
	vni7 := backend.Side{Type: "vxlan", LeaseType: "vxlan", Matches: is("seven")}
	strict := func(s backend.Side) backend.Side {
		s.Strict = true
		return s
	}
	for _, tt := range []struct {
		name       string
		side       backend.Side
		kind, data string
		nextKind   string
		nextData   string
		want       string // data that is used; empty if there is none
	}{
		{"no migration", vxlan, "vxlan", "a", "", "", "a"},
		{"another type", vxlan, "host-gw", "a", "", "", ""},
		{"from this backend", vxlan, "vxlan", "a", "wireguard", "b", "a"},
		{"to this backend", vxlan, "wireguard", "a", "vxlan", "b", "b"},
		{"between others", vxlan, "wireguard", "a", "host-gw", "b", ""},
		{"udp stores no type", udp, "", "a", "", "", "a"},
		{"to udp", udp, "vxlan", "a", "udp", "b", "b"},
		{"from udp", vxlan, "", "a", "vxlan", "b", "b"},
		{"another VNI without a migration is used as ever", vni1, "vxlan", "seven", "", "", "seven"},
		{"the first of two VNIs", vni1, "vxlan", "one", "vxlan", "seven", "one"},
		{"the second of two VNIs", vni7, "vxlan", "one", "vxlan", "seven", "seven"},
		{"a VNI that is neither", vni1, "vxlan", "six", "vxlan", "seven", ""},
		{"a host in a migration, and one that has finished", strict(vni1), "vxlan", "seven", "", "", ""},
		{"the same host for the next backend", strict(vni7), "vxlan", "seven", "", "", "seven"},
	} {
		e := subnet.Endpoint{Subnet: netip.MustParsePrefix("10.5.1.0/24"), Data: json.RawMessage(tt.data)}
		if tt.nextKind != "" {
			e.NextData = json.RawMessage(tt.nextData)
		}
		l := &subnet.Lease{BackendType: tt.kind, NextType: tt.nextKind, Endpoints: []subnet.Endpoint{e}}
		got, ok := tt.side.Of(l)
		switch {
		case ok != (tt.want != ""):
			t.Errorf("%s: used %v, want %v", tt.name, ok, tt.want != "")
		case ok && (string(got.Endpoints[0].Data) != tt.want || got.BackendType != tt.side.LeaseType):
			t.Errorf("%s: data %s of type %q is used, want %s of %q", tt.name, got.Endpoints[0].Data, got.BackendType, tt.want, tt.side.LeaseType)
		}
	}
}

// TestLeasesOfAMigration checks a host with the new backend while its peers finish the migration
// one after the other. The host must use their data for the new backend even before they have
// finished. It must not report that all have left the former backend before that is true.
func TestLeasesOfAMigration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var oneBackend []bool
		n := &network{}
		s, log := runOnSync(t, n, func(p backend.Pass) { oneBackend = append(oneBackend, p.OneBackend) })
		both := func(host int, id string) subnet.Lease {
			l := lease(host, "")
			l.BackendType, l.NextType = "former", "test"
			l.Endpoints[0].Data, l.Endpoints[0].NextData = json.RawMessage(`{}`), lease(host, id).Endpoints[0].Data
			return l
		}
		former, reserved := lease(4, "four"), lease(5, "")
		former.BackendType = "former"
		reserved.BackendType, reserved.Endpoints[0].Data, reserved.Endpoints[0].PublicIP = "", nil, netip.IPv4Unspecified()
		s.Publish(fullUpdate(snapshot(2, both(2, "two"), both(3, "three"), former, reserved)))
		expectSyncs(t, n, "", "*host2 host3")
		for key, want := range map[string]string{"host2": `"two"`, "host3": `"three"`} {
			if l := n.last.Leases[key]; string(l.Endpoints[0].Data) != want || l.BackendType != "test" || l.NextType != "" {
				t.Errorf("%s is used as %+v, want its data %s", key, l, want)
			}
		}
		if !strings.Contains(log(), `lease refused" lease="host4"`) && !strings.Contains(log(), `lease refused lease="host4"`) {
			t.Errorf("host4, which has the former backend alone, is not refused:\n%s", log())
		}
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(2, "two")}))
		s.Publish(deltaUpdate(4, nil, "host4"))
		synctest.Wait()
		s.Publish(deltaUpdate(5, []subnet.Lease{lease(3, "three")}))
		synctest.Wait()
		if i := slices.Index(oneBackend, true); i != len(oneBackend)-1 {
			t.Errorf("OneBackend after the passes: %v, want the last one alone", oneBackend)
		}

		starts, late := lease(6, "six"), lease(7, "seven")
		starts.NextType = "other"
		late.BackendType = "former"
		for _, step := range []struct {
			name string
			u    subnet.Update
			want bool
		}{
			{"a host starts a migration", deltaUpdate(6, []subnet.Lease{starts}), false},
			{"it is gone", deltaUpdate(7, nil, "host6"), true},
			{"a host comes with the former backend", deltaUpdate(8, []subnet.Lease{late}), false},
			{"it is not in a snapshot", fullUpdate(snapshot(9, lease(2, "two"), lease(3, "three"))), true},
		} {
			s.Publish(step.u)
			synctest.Wait()
			if got := oneBackend[len(oneBackend)-1]; got != step.want {
				t.Errorf("%s: OneBackend is %v, want %v", step.name, got, step.want)
			}
		}
	})
}

// TestLeasesWithoutAMigration checks that the Syncer calls Matches for Pass.OneBackend only if
// Migrated is set, because Matches decodes the data of a lease.
func TestLeasesWithoutAMigration(t *testing.T) {
	for _, migrated := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			side := testSides[0]
			side.Matches = func(subnet.Lease) bool { calls++; return true }
			s := backend.NewSyncer(backend.SyncerConfig{
				Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}, BackendType: "test"},
				Own:    lease(1, "one"), Network: &network{}, Sides: []backend.Side{side}, Ledger: &subnet.Ledger{}, Resync: time.Hour, Migrated: migrated,
			})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				_ = s.Run(ctx)
			}()
			s.Publish(fullUpdate(snapshot(2, lease(2, "two"))))
			synctest.Wait()
			s.Publish(deltaUpdate(3, []subnet.Lease{lease(3, "three")}))
			synctest.Wait()
			cancel()
			<-done
			if got := calls > 0; got != migrated {
				t.Errorf("migrated %v: %d calls of Matches", migrated, calls)
			}
		})
	}
}
