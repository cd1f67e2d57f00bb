// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// TestKernelRuns checks which firewall contains the rules of two networks of one host after a run
// has changed its firewall, after another program has deleted rules, and after the removal of each network.
// It also checks how often the runs report a repair and a cleanup. Only the test's thread is in the
// network namespace, so the test calls prepare and step, and not Keep.
func TestKernelRuns(t *testing.T) {
	firewalltest.Enter(t)
	h := NewHost()
	h.wanted <- families(firewalltest.Policy())
	if err := h.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := firewalltest.Policy()
	other.Networks = []firewall.Network{{Network: netip.MustParsePrefix("10.6.0.0/16"), Subnet: netip.MustParsePrefix("10.6.1.0/24")}}
	cleaned := 0
	var repairs []bool
	one, two := newKeeper(h, func(repaired bool, _ error) { repairs = append(repairs, repaired) }), newKeeper(h, nil)
	one.config.Cleaned = func() { cleaned++ }
	running := map[*Keeper]*run{}
	start := func(k *Keeper, f Flavour, p firewall.Policy) *run {
		t.Helper()
		if last := running[k]; last != nil {
			last.rules.leave(k)
		}
		r := newRun(k, f, p, func() {})
		running[k] = r
		r.prepare(t.Context())
		if err := r.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		return r
	}
	// expect checks which networks are in the rules of a firewall.
	expect := func(when, list string, first, second bool) {
		t.Helper()
		text := firewalltest.Shell(t, list)
		if has := strings.Contains(text, "10.5.0.0/16"); has != first {
			t.Errorf("%s, %q has the first network: %v, want %v:\n%s", when, list, has, first, text)
		}
		if has := strings.Contains(text, "10.6.0.0/16"); has != second {
			t.Errorf("%s, %q has the second network: %v, want %v:\n%s", when, list, has, second, text)
		}
	}
	const nft, iptables = "nft list tables | grep -q flannel-ipv4 && nft list table ip flannel-ipv4 || true", "iptables-save -t nat"
	start(two, IPTables, other)
	start(one, IPTables, firewalltest.Policy())
	expect("both use iptables", iptables, true, true)
	r := start(one, NFTables, firewalltest.Policy())
	expect("one has changed to nftables", iptables, false, true)
	expect("one has changed to nftables", nft, true, false)
	repairs = nil
	firewalltest.Shell(t, "nft flush table ip flannel-ipv4")
	for range 2 {
		if err := r.step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if len(repairs) != 2 || !repairs[0] || repairs[1] || cleaned != 2 {
		t.Errorf("repairs %v and %d cleanups, want one repair and a cleanup for each Keep", repairs, cleaned)
	}
	expect("the rules were deleted", nft, true, false)
	if err := NewHost().Remove(t.Context(), []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}); err != nil {
		t.Fatal(err)
	}
	expect("the first network is removed", nft, false, false)
	expect("the first network is removed", iptables, false, true)
	start(two, IPTables, firewall.Policy{Former: []netip.Prefix{netip.MustParsePrefix("10.6.0.0/16")}})
	expect("the second network is a former one", iptables, false, false)
}

// pausedApplier is an Applier whose pass has read the rules, and waits before it writes them.
type pausedApplier struct {
	hasRead, write chan struct{}
	written        atomic.Bool
}

func (p *pausedApplier) Apply(context.Context, ...firewall.Policy) (bool, error) {
	close(p.hasRead)
	<-p.write
	p.written.Store(true)
	return true, nil
}

// TestKernelRemoveWaitsForPass checks that the removal of a network's rules waits for a pass that has read
// the rules and has not written yet. Otherwise the pass would write the removed rules again.
func TestKernelRemoveWaitsForPass(t *testing.T) {
	firewalltest.Enter(t)
	h := NewHost()
	pass := &pausedApplier{hasRead: make(chan struct{}), write: make(chan struct{})}
	w := &writer{applier: pass, turn: &h.writing, policies: map[any]firewall.Policy{}}
	go w.pass(t.Context())
	<-pass.hasRead
	// If Remove did not wait for the pass, it would return long before this time.
	time.AfterFunc(time.Second, func() { close(pass.write) })
	if err := h.Remove(t.Context(), []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}); err != nil {
		t.Fatal(err)
	}
	if !pass.written.Load() {
		t.Error("Remove returned before the pass had written, want after that")
	}
}
