// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// TestStatusFirewall checks the firewall in the status of a network from its start until the
// rules are applied and then fail.
func TestStatusFirewall(t *testing.T) {
	n := &Network{
		opts: options.Options{IPTablesForwardRules: true}, ready: newReadiness(options.Options{}, nil),
		rules: keeper.NewHost().Keeper(keeper.Config{Report: func(context.Context, bool, error) {}}),
	}
	expect := func(want status.Firewall) {
		t.Helper()
		if got := n.firewall(); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	expect(status.Firewall{Error: "not up yet"})
	n.serving.Store(&session{})
	ended, end := context.WithCancel(t.Context())
	end()
	n.rules.Keep(ended, keeper.Choice{Flavour: keeper.NFTables}, firewall.Policy{}, func() {})
	expect(status.Firewall{Kind: options.FirewallNFTables, Error: "not up yet"})
	n.ready.health.Set(partRules, nil)
	expect(status.Firewall{Kind: options.FirewallNFTables})
	n.ready.health.Set(partRules, errors.New("first\nsecond"))
	expect(status.Firewall{Kind: options.FirewallNFTables, Error: "first; second"})
	n.opts = options.Options{IPMasq: true}
	expect(status.Firewall{Kind: options.FirewallNFTables, Error: "first; second"})
	n.opts = options.Options{}
	expect(status.Firewall{})
}

// TestStatusWithoutAnything checks that empty lists in the status are [] from the start of a
// daemon on, because jq does not accept null.
func TestStatusWithoutAnything(t *testing.T) {
	n := &Network{
		host: &Host{Journal: status.NewJournal(1)}, ready: newReadiness(options.Options{}, nil),
		config: &configWatch{}, progress: &Progress{entered: drawn(t, "")}, state: lastknown.NewStore(nil),
	}
	r, err := n.Report(t.Context(), status.Query{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil || strings.Contains(string(text), "null") || !strings.Contains(string(text), `"peers":[]`) {
		t.Errorf("%v: %s", err, text)
	}
}

// TestReportOfANamedNetwork expects the error from which the page /statusz makes a 404.
func TestReportOfANamedNetwork(t *testing.T) {
	if _, err := (&Network{}).Report(t.Context(), status.Query{Network: "blue"}); !errors.Is(err, status.ErrNoNetwork) {
		t.Errorf("got %v, want %v", err, status.ErrNoNetwork)
	}
}

// TestReasonsAreDocumented checks that the operations page contains all components of
// /readyz.
func TestReasonsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../../Documentation/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{partDatapath, partDatastore, partSubnet, partSubnetFile, partRules, partInterface} {
		if !strings.Contains(string(page), "\n| `"+part+":` | ") {
			t.Errorf("the page lacks %q", part)
		}
	}
}

// TestPoolUse checks that this host's lease counts as a used subnet, and that the lease of a held peer
// does not, because the store does not have that lease any more. poolUse must return the numbers of
// the family with the fewest free subnets.
func TestPoolUse(t *testing.T) {
	const four, six = `"Network":"10.5.0.0/16","SubnetLen":24`, `"EnableIPv6":true,"IPv6Network":"fd00:5::/60","IPv6SubnetLen":64`
	lease := func(n int, permanent bool) subnet.Lease {
		return subnet.Lease{Permanent: permanent, Endpoints: []subnet.Endpoint{
			{Subnet: netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", n))},
			{Subnet: netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%x::/64", n))},
		}}
	}
	in := backend.Inspection{Peers: []backend.PeerReport{{Lease: lease(2, false)}, {Lease: lease(3, true)}, {Lease: lease(4, false), Held: true}}}
	total := func(u *subnet.Usage) uint64 { return u.Free + u.Leased + u.Reserved }
	for name, tc := range map[string]struct {
		config string
		most   uint64 // number of subnets: minimum and maximum
		least  uint64
	}{
		"IPv4":               {`{` + four + `}`, 256, 200},
		"dual, IPv6 is less": {`{` + four + `,` + six + `}`, 16, 10},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := subnet.ParseConfig([]byte(tc.config))
			if err != nil {
				t.Fatal(err)
			}
			use := (&Network{}).poolUse(lastknown.State{Config: cfg, Own: lease(1, false)}, in)
			if use == nil || use.Leased != 2 || use.Reserved != 1 || total(use) > tc.most || total(use) < tc.least {
				t.Errorf("%+v, want 2 leased, 1 reserved, of %d to %d", use, tc.least, tc.most)
			}
		})
	}
}

// TestReservation checks that a reservation is no refused peer.
func TestReservation(t *testing.T) {
	if got := statusPeer(backend.PeerReport{Reserved: true}); got.State != status.Reserved || got.State.Served() {
		t.Errorf("the state of a reservation is %q", got.State)
	}
}

// TestStoreGrace makes the store unavailable. The host must become unready after the grace
// period or half of the remaining lease time, whichever is shorter.
func TestStoreGrace(t *testing.T) {
	const grace = 5 * time.Minute
	for name, tc := range map[string]struct{ left, want time.Duration }{
		"a lease for a day":    {24 * time.Hour, grace},
		"a lease for a minute": {time.Minute, 30 * time.Second},
		"a permanent lease":    {0, grace},
		"an expired lease":     {-time.Minute, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := options.Options{ReadyzDatastoreGrace: grace, Resync: time.Minute}
				end := time.Time{}
				r := newReadiness(o, func() time.Time { return end })
				for _, part := range []string{partDatapath, partSubnetFile, partRules} {
					r.health.Set(part, nil)
				}
				r.reportStore(nil)
				if tc.left != 0 {
					end = time.Now().Add(tc.left)
				}
				for range 2 { // two goroutines report the same failure: the second report must not change the grace period
					r.reportStore(errors.New("away"))
					time.Sleep(tc.want / 4)
				}
				time.Sleep(tc.want/2 - 1)
				if ready, why := r.health.Ready(); !ready && tc.want > 0 {
					t.Errorf("not ready too soon: %q", why)
				}
				time.Sleep(time.Nanosecond)
				if ready, _ := r.health.Ready(); ready {
					t.Errorf("ready after %v", tc.want)
				}
			})
		})
	}
}

// TestConnectedAndUsed checks what Env tells a backend about the store and about the backends that the host
// has used.
func TestConnectedAndUsed(t *testing.T) {
	p := &Network{ready: newReadiness(options.Options{}, func() time.Time { return time.Time{} })}
	if at := p.connected(); !at.IsZero() {
		t.Errorf("connected since %v before the first answer", at)
	}
	p.ready.reportStore(nil)
	if p.connected().IsZero() {
		t.Error("not connected after an answer")
	}
	p.ready.reportStore(errors.New("away"))
	if at := p.connected(); !at.IsZero() {
		t.Errorf("connected since %v although the store is away", at)
	}
	last := lastknown.State{Config: subnet.Config{BackendType: "vxlan"}, Own: subnet.Lease{NextType: "aws-vpc"}}
	if got := used(last); !slices.Equal(got, []string{"vxlan", "aws-vpc"}) || len(used(lastknown.State{})) > 0 {
		t.Errorf("used %q, and %q of an unknown past", got, used(lastknown.State{}))
	}
}
