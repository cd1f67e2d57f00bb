package app

import (
	"errors"
	"os"
	"strings"
	"testing"

	"flanneld/pkg/status"
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

// TestReasonsAreDocumented has the operations page name all that /readyz names.
func TestReasonsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../Documentation/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{partDatapath, partDatastore, partSubnetFile, partRules} {
		if !strings.Contains(string(page), "\n| `"+part+":` | ") {
			t.Errorf("the page lacks %q", part)
		}
	}
}
