// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// TestKernelLegacyRests checks that Apply leaves right rules alone for a time that depends on the CPU
// time of reading them. After that it must repair them. It must write other policies at once, and read
// rules at once that it has just written.
func TestKernelLegacyRests(t *testing.T) {
	firewalltest.Enter(t)
	policy, a := firewalltest.Guarded(), New(Legacy)
	expect := func(p firewall.Policy, want bool) {
		t.Helper()
		if changed, err := a.Apply(t.Context(), p); err != nil || changed != want {
			t.Errorf("changed %v, %v; want %v", changed, err, want)
		}
	}
	rest := func(f prefix.Family) time.Duration { return time.Until(a.trusted[f].until) }
	expect(policy, true)
	firewalltest.Shell(t, "iptables-legacy -F FLANNEL-FWD")
	expect(policy, true)
	expect(policy, false)
	few := rest(prefix.IPv4)

	firewalltest.Shell(t, `{ echo '*nat'; echo ':OTHER - [0:0]'; seq 20000 | sed 's/.*/-A OTHER -p tcp --dport & -j RETURN/'; echo COMMIT; } | iptables-legacy-restore --noflush
		ip6tables-legacy -F FLANNEL-FWD`)
	for _, f := range families() {
		a.trusted[f] = trusted{a.trusted[f].wanted, time.Now().Add(time.Hour)}
	}
	expect(policy, false)
	for _, f := range families() {
		a.trusted[f] = trusted{a.trusted[f].wanted, time.Now()}
	}
	expect(policy, true)
	expect(policy, false)
	if many := rest(prefix.IPv4); few <= 0 || many < 2*few {
		t.Errorf("the rules are left alone for %s, and beside 20,000 rules for %s; want much longer", few, many)
	}

	policy.Networks[0].Subnet = netip.MustParsePrefix("10.5.65.0/24")
	expect(policy, true)
	if text := firewalltest.Shell(t, "ip6tables-legacy-save"); !strings.Contains(text, "-A FLANNEL-FWD") {
		t.Errorf("the flushed rules are not there:\n%s", text)
	}
}
