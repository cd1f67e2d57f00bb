// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
)

// logging returns a context whose log is written to text.
func logging(t *testing.T) (ctx context.Context, text *bytes.Buffer) {
	text = &bytes.Buffer{}
	return klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(text)))), text
}

// newHost returns a Host that runs until the test ends.
func newHost(t *testing.T) *Host {
	h := NewHost()
	go func() { _ = h.Run(t.Context()) }()
	return h
}

// newKeeper returns a Keeper on h. report may be nil.
func newKeeper(h *Host, report func(repaired bool, err error)) *Keeper {
	return h.Keeper(Config{
		Resync: time.Minute, LegacyResync: time.Minute,
		Report: func(_ context.Context, repaired bool, err error) {
			if report != nil {
				report(repaired, err)
			}
		},
		Cleaned: func() {},
	})
}

// TestChoiceIsLogged checks that a run logs its firewall only if the last run had
// another flavour or reason. The first run may be that of the session on the last known state, and the next
// one on the configuration from the store.
func TestChoiceIsLogged(t *testing.T) {
	const last = " in the last known configuration"
	off, on, flag := Choice{Flavour: IPTables, Reason: "off"}, Choice{Flavour: NFTables, Reason: "on"}, Choice{Flavour: IPTables, Reason: "flag"}
	from := func(source string, c Choice) Choice { c.Source = source; return c }
	for name, tt := range map[string]struct {
		choices []Choice
		want    []string
	}{
		"first start":            {[]Choice{off}, []string{`firewall="iptables" because="off"`}},
		"restart":                {[]Choice{from(last, on), on}, []string{`firewall="nftables" because="on` + last + `"`}},
		"restart after a change": {[]Choice{from(last, off), on}, []string{`firewall="iptables" because="off` + last + `"`, `firewall="nftables" because="on"`}},
		"changed and back":       {[]Choice{on, off, on}, []string{`firewall="nftables" because="on"`, `firewall="iptables" because="off"`, `firewall="nftables" because="on"`}},
		"flag":                   {[]Choice{flag, flag}, []string{`firewall="iptables" because="flag"`}},
	} {
		ctx, log := logging(t)
		k := newKeeper(newHost(t), nil)
		if f := k.Flavour(); f != "" {
			t.Errorf("%s: flavour %q before the first Keep, want none", name, f)
		}
		for _, c := range tt.choices {
			if f := k.choose(ctx, c); f != c.Flavour || k.Flavour() != f {
				t.Errorf("%s: chosen %q, in use %q, want %q", name, f, k.Flavour(), c.Flavour)
			}
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if !slices.EqualFunc(lines, tt.want, strings.HasSuffix) {
			t.Errorf("%s: the log has %q, want %q", name, lines, tt.want)
		}
	}
}

// TestAutoChoice checks that the host is examined once for all networks, and that each
// network logs the choice.
func TestAutoChoice(t *testing.T) {
	ctx, log := logging(t)
	h := NewHost()
	examined := 0
	h.automatic = sync.OnceValues(func() (Flavour, string) { examined++; return NFTables, "reason" })
	for range 2 {
		k := newKeeper(h, nil)
		if f := k.choose(ctx, Choice{Flavour: Auto, Reason: "flag"}); f != NFTables {
			t.Errorf("chosen %q, want %q", f, NFTables)
		}
	}
	if n := strings.Count(log.String(), `firewall="nftables" because="reason"`); n != 2 || examined != 1 {
		t.Errorf("examined the host %d times, want once, and a line for each network: %s", examined, log)
	}
}

// scripted is an Applier that records the policies. Each Apply returns the next error in
// answers and no change. When no answers are left, it returns changed and no error.
type scripted struct {
	answers []error
	changed bool
	seen    []firewall.Policy
}

func (s *scripted) Apply(_ context.Context, policies ...firewall.Policy) (bool, error) {
	s.seen = append(s.seen, policies...)
	if len(s.answers) == 0 {
		return s.changed, nil
	}
	err := s.answers[0]
	s.answers = s.answers[1:]
	return false, err
}

// TestRun checks what a run reports, and when it cleans up, after failures and after success. If
// another program changes the rules before each step, the run must report each repair and slow down.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var reports []error
		repairs, cleaned := 0, 0
		active, old := &scripted{answers: []error{broken, broken}}, &scripted{answers: []error{broken}}
		former := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
		k := newKeeper(newHost(t), func(repaired bool, err error) {
			reports = append(reports, err)
			if repaired {
				repairs++
			}
		})
		k.config.Cleaned = func() { cleaned++ }
		r := newRun(k, NFTables, firewall.Policy{Former: former}, func() {})
		r.rules, r.leftovers = &writer{applier: active, turn: &k.host.writing, policies: map[any]firewall.Policy{}}, []leftover{{"old", old, firewall.Policy{Former: former}}}
		for i, fails := range []bool{true, true, true, false, false} { // two passes fail themselves, one fails to clean
			if err := r.step(t.Context()); (err != nil) != fails {
				t.Errorf("step %d: %v", i, err)
			}
		}
		if !slices.Equal(reports, []error{broken, broken, nil, nil, nil}) || cleaned != 1 {
			t.Errorf("reports %v, cleaned %d times", reports, cleaned)
		}
		for i, p := range active.seen {
			if (len(p.Former) > 0) != (i < 3) {
				t.Errorf("step %d gets the former networks %v", i, p.Former)
			}
		}
		if len(old.seen) != 2 {
			t.Errorf("%d attempts to clean, want attempts until one succeeds", len(old.seen))
		}
		active.changed = true
		const fight = 100
		start := time.Now()
		for range fight {
			_ = r.step(t.Context())
		}
		if took := time.Since(start); repairs != fight || took < (fight-repairBurst-1)*time.Second {
			t.Errorf("%d of %d repairs within %v, want them to slow down", repairs, fight, took)
		}
	})
}

// TestSharedPasses checks that a pass with the new policy of one Keeper does not count as a repair of the
// rules of another one, and that the writer orders policies by their networks.
func TestSharedPasses(t *testing.T) {
	h, active := newHost(t), &scripted{changed: true}
	w := &writer{applier: active, turn: &h.writing, policies: map[any]firewall.Policy{}}
	of := func(network string) firewall.Policy {
		return firewall.Policy{Networks: []firewall.Network{{Network: netip.MustParsePrefix(network)}}}
	}
	repairs := map[string]int{}
	join := func(network string) *run {
		k := newKeeper(h, func(repaired bool, _ error) {
			if repaired {
				repairs[network]++
			}
		})
		r := newRun(k, NFTables, of(network), func() {})
		r.rules = w
		return r
	}
	second, first := join("10.6.0.0/16"), join("10.5.0.0/16")
	for _, r := range []*run{second, first, second} {
		if err := r.step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if repairs["10.5.0.0/16"] != 0 || repairs["10.6.0.0/16"] != 1 {
		t.Errorf("repairs %v, want one of the second network, when no policy was new", repairs)
	}
	w.leave(second.keeper)
	if err := first.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	var seen []string
	for _, p := range active.seen {
		seen = append(seen, p.Networks[0].Network.String())
	}
	if want := []string{"10.6.0.0/16", "10.5.0.0/16", "10.6.0.0/16", "10.5.0.0/16", "10.6.0.0/16", "10.5.0.0/16"}; !slices.Equal(seen, want) {
		t.Errorf("applied %v, want %v", seen, want)
	}
}

// interrupted is an Applier that ends the run while it writes the rules. changed says
// whether it may have written.
type interrupted struct {
	end     context.CancelFunc
	changed bool
}

func (e interrupted) Apply(ctx context.Context, _ ...firewall.Policy) (bool, error) {
	e.end()
	<-ctx.Done()
	return e.changed, ctx.Err()
}

// TestRulesOfAnEndedRun checks that a run logs rules as written if the last run
// has written them and could not log that.
func TestRulesOfAnEndedRun(t *testing.T) {
	for _, wrote := range []bool{true, false} {
		ctx, log := logging(t)
		k := newKeeper(newHost(t), nil)
		step := func(ctx context.Context, a firewall.Applier) {
			r := newRun(k, NFTables, firewall.Policy{}, func() {})
			r.rules = &writer{applier: a, turn: &k.host.writing, policies: map[any]firewall.Policy{}}
			if err := r.step(ctx); err != nil {
				t.Error(err)
			}
		}
		first, end := context.WithCancel(ctx)
		step(first, interrupted{end, wrote})
		if log.Len() > 0 {
			t.Errorf("log of the ended run: %s, want nothing", log)
		}
		for _, reported := range []bool{wrote, false} { // only the next run logs it as written
			log.Reset()
			step(ctx, &scripted{})
			if want := fmt.Sprintf("written=%v", reported); !strings.Contains(log.String(), want) {
				t.Errorf("want %s: %s", want, log)
			}
		}
	}
}

// program writes a shell script into dir as a program with that name.
func program(t *testing.T, dir, name, script string) {
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
}

// TestRulesOfTheOtherFamily checks that the rules of IPv4 are applied if there is no
// program for IPv6, and that Keep then calls tried once.
func TestRulesOfTheOtherFamily(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	program(t, dir, "iptables", "echo 'iptables v1.8.9 (legacy)'")
	program(t, dir, "iptables-save", ":")
	program(t, dir, "iptables-restore", `while read -r line; do echo "$line"; done >`+dir+"/written")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	k := newKeeper(newHost(t), func(_ bool, err error) {
		if !errors.Is(err, iptables.ErrMissing) || !strings.Contains(err.Error(), "ip6tables") {
			t.Errorf("error %v, want one that names ip6tables", err)
		}
		cancel()
	})
	tried := 0
	k.Keep(ctx, Choice{Flavour: IPTables}, firewalltest.Policy(), func() { tried++ })
	written, err := os.ReadFile(filepath.Join(dir, "written"))
	if !strings.Contains(string(written), "-A POSTROUTING") || !strings.Contains(string(written), "-A FORWARD") {
		t.Errorf("written for IPv4: %q, %v", written, err)
	}
	if tried != 1 {
		t.Errorf("%d attempts are announced, want the first one", tried)
	}
}
