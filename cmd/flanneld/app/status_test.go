package app

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"flanneld/backend"
	"flanneld/pkg/status"
	"flanneld/subnet"
)

// TestStatusFirewall goes from the start of a daemon to rules in place, and has
// them fail.
func TestStatusFirewall(t *testing.T) {
	d := &daemon{opts: Options{IPTablesForwardRules: true}, health: newHealth(Options{})}
	expect := func(want status.Firewall) {
		t.Helper()
		if got := d.statusFirewall(); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	expect(status.Firewall{Error: "not up yet"})
	d.serving.Store(&session{rules: &ruleKeeper{flavour: firewallNFTables}})
	expect(status.Firewall{Kind: firewallNFTables, Error: "not up yet"})
	d.health.Set(partRules, nil)
	expect(status.Firewall{Kind: firewallNFTables})
	d.health.Set(partRules, errors.New("first\nsecond"))
	expect(status.Firewall{Kind: firewallNFTables, Error: "first; second"})
	d.opts = Options{IPMasq: true}
	expect(status.Firewall{Kind: firewallNFTables, Error: "first; second"})
	d.opts = Options{}
	expect(status.Firewall{})
}

// A list without anything in it is [] from the start of a daemon on: jq stumbles over null.
func TestStatusWithoutAnything(t *testing.T) {
	d := &daemon{health: newHealth(Options{}), journal: status.NewJournal(1), config: newConfigKeeper(false)}
	r, err := d.statusReport(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil || strings.Contains(string(text), "null") || !strings.Contains(string(text), `"peers":[]`) {
		t.Errorf("%v: %s", err, text)
	}
}

// TestReasonsAreDocumented has the operations page name all that /readyz names.
func TestReasonsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../Documentation/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{partDatapath, partDatastore, partSubnetFile, partRules, partInterface} {
		if !strings.Contains(string(page), "\n| `"+part+":` | ") {
			t.Errorf("the page lacks %q", part)
		}
	}
}

// TestPoolUse: the own lease takes a subnet, a peer that the store has forgotten takes
// none, and the family counts that has the least left.
func TestPoolUse(t *testing.T) {
	const four, six = `"Network":"10.5.0.0/16","SubnetLen":24`, `"EnableIPv6":true,"IPv6Network":"fd00:5::/60","IPv6SubnetLen":64`
	lease := func(n int, permanent bool) subnet.Lease {
		return subnet.Lease{Permanent: permanent, Endpoints: []subnet.Endpoint{
			{Subnet: netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", n))},
			{Subnet: netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%x::/64", n))},
		}}
	}
	in := backend.Inspection{Peers: []backend.PeerReport{{Lease: lease(2, false)}, {Lease: lease(3, true)}, {Lease: lease(4, false), Held: true}}}
	total := func(u *subnet.Use) uint64 { return u.Free + u.Leased + u.Reserved }
	for name, tc := range map[string]struct {
		config string
		most   uint64 // subnets, at least so many
		least  uint64
	}{
		"IPv4":               {`{` + four + `}`, 256, 200},
		"dual, IPv6 is less": {`{` + four + `,` + six + `}`, 16, 10},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, _, err := subnet.ParseConfig([]byte(tc.config))
			if err != nil {
				t.Fatal(err)
			}
			use := new(daemon).poolUse(lastKnown{Config: cfg, Own: lease(1, false)}, in)
			if use == nil || use.Leased != 2 || use.Reserved != 1 || total(use) > tc.most || total(use) < tc.least {
				t.Errorf("%+v, want 2 leased, 1 reserved, of %d to %d", use, tc.least, tc.most)
			}
		})
	}
}
