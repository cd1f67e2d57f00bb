package backend_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/pkg/dataplane/dataplanetest"
)

// TestRouteOfAllPeersIsInTheWay has the network of all peers directly connected to a
// device: of another program it takes the packets, and that is an error; our own
// carries them.
func TestRouteOfAllPeersIsInTheWay(t *testing.T) {
	network := netip.MustParsePrefix("10.5.0.0/16")
	ours := dataplane.Link{Name: "flannel-wg", Kind: dataplane.KindWireGuard, MTU: 1440, Up: true}
	bridge := dataplane.Link{Name: "br0", Kind: "bridge", Up: true}
	for _, tt := range []struct {
		dev  string
		want string // the error; empty for none
	}{
		{bridge.Name, "put route 10.5.0.0/16 dev flannel-wg: 10.5.0.0/16 is directly connected to br0"},
		{ours.Name, ""},
	} {
		t.Run(tt.dev, func(t *testing.T) {
			kernel := dataplanetest.New()
			if err := kernel.Append(ours, bridge); err != nil {
				t.Fatal(err)
			}
			scope := dataplane.Scope{Devices: []string{ours.Name}, Networks: []netip.Prefix{network}}
			rec, err := dataplane.NewReconciler(dataplane.Config{Kernel: kernel, Scope: scope, Resync: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			defer rec.Close()
			p := &backend.Programmer{Base: dataplane.NewState(), Reconciler: rec}
			p.Base.Add(ours, dataplane.NewRoute(network, netip.Addr{}, ours.Name, false))
			expect := func(what, want string, o backend.Outcome, err error) {
				t.Helper()
				if len(o.Refused) > 0 {
					t.Errorf("%s: refused %v, but it is no peer's route", what, o.Refused)
				}
				if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%s: error %v, want %q", what, err, want)
				}
			}
			sync := func(what, want string, all bool) {
				t.Helper()
				o, err := p.Sync(t.Context(), backend.Set{All: all, Complete: true})
				expect(what, want, o, err)
			}

			sync("nothing is in the way", "", true)
			at := dataplane.Addr{Dev: tt.dev, Prefix: netip.MustParsePrefix("10.5.255.254/16")}
			if err := kernel.Append(at); err != nil {
				t.Fatal(err)
			}
			expect("at the start", tt.want, backend.Outcome{}, p.SetUp(t.Context()))
			sync("a pass over all", tt.want, true)
			sync("a pass over what has changed", tt.want, false)
			if err := kernel.Remove(at); err != nil {
				t.Fatal(err)
			}
			sync("it is gone", "", false)
			if !p.Holds(dataplane.NewRoute(network, netip.Addr{}, ours.Name, false)) {
				t.Error("the route is not there")
			}
		})
	}
}
