package app

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
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"flanneld/pkg/firewall"
	"flanneld/pkg/firewall/firewalltest"
	"flanneld/pkg/firewall/iptables"
	"flanneld/subnet"
)

func TestFormerNetworks(t *testing.T) {
	p := netip.MustParsePrefix
	config := func(prefixes ...string) (c subnet.Config) {
		for _, s := range prefixes {
			c.Networks = append(c.Networks, subnet.Network{Prefix: p(s)})
		}
		return c
	}
	last := lastKnown{
		Config: config("10.5.0.0/16", "fd00:5::/48"), Rules: []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16")},
		Former: []former{{Config: config("10.4.0.0/16", "10.6.0.0/16")}},
	}
	got := formerNetworks(last, config("10.6.0.0/16"))
	want := []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16"), p("fd00:5::/48"), p("10.4.0.0/16")}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := formerNetworks(lastKnown{}, config("10.6.0.0/16")); got != nil {
		t.Errorf("a first start: %v", got)
	}
}

// scripted answers passes as it is told.
type scripted struct {
	answers []error
	changed bool
	seen    []firewall.Policy
}

func (s *scripted) Apply(_ context.Context, p firewall.Policy) (bool, error) {
	s.seen = append(s.seen, p)
	if len(s.answers) == 0 {
		return s.changed, nil
	}
	err := s.answers[0]
	s.answers = s.answers[1:]
	return false, err
}

// TestRuleKeeper goes through failure, success and damage.
func TestRuleKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var reports []error
		repairs, done := 0, 0
		active, old := &scripted{answers: []error{broken, broken}}, &scripted{answers: []error{broken}}
		former := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
		k := &ruleKeeper{
			choice:  &flavourChoice{},
			policy:  firewall.Policy{Former: former},
			applier: active, leftovers: []leftover{{old, firewall.Policy{Former: former}}}, limit: rate.NewLimiter(repairRate, repairBurst),
			report: func(repaired bool, err error) {
				reports = append(reports, err)
				if repaired {
					repairs++
				}
			},
			done: func() { done++ },
		}
		for i, fails := range []bool{true, true, true, false, false} { // twice itself, once the leftovers
			if err := k.step(t.Context()); (err != nil) != fails {
				t.Errorf("step %d: %v", i, err)
			}
		}
		if !slices.Equal(reports, []error{broken, broken, nil, nil, nil}) || done != 1 || !k.cleaned {
			t.Errorf("reports %v, cleaned %d times", reports, done)
		}
		for i, p := range active.seen {
			if (len(p.Former) > 0) != (i < 3) {
				t.Errorf("step %d is told of former networks %v", i, p.Former)
			}
		}
		if len(old.seen) != 2 {
			t.Errorf("leftovers are looked at %d times, want until it succeeds", len(old.seen))
		}
		active.changed = true
		const fight = 100
		start := time.Now()
		for range fight {
			_ = k.step(t.Context())
		}
		if took := time.Since(start); repairs != fight || took < (fight-repairBurst-1)*time.Second {
			t.Errorf("%d of %d repairs within %v, want them to slow down", repairs, fight, took)
		}
	})
}

// interrupted ends the session while the rules are being written.
type interrupted struct {
	end     context.CancelFunc
	changed bool
}

func (e interrupted) Apply(ctx context.Context, _ firewall.Policy) (bool, error) {
	e.end()
	return e.changed, ctx.Err()
}

// TestRulesOfAnEndedSession has a session find what the one before it wrote and could
// not tell.
func TestRulesOfAnEndedSession(t *testing.T) {
	for _, wrote := range []bool{true, false} {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		choice := &flavourChoice{}
		session := func(ctx context.Context, a firewall.Applier) {
			k := &ruleKeeper{choice: choice, applier: a, limit: rate.NewLimiter(repairRate, repairBurst), report: func(bool, error) {}, done: func() {}}
			if err := k.step(ctx); err != nil {
				t.Error(err)
			}
		}
		first, end := context.WithCancel(ctx)
		session(first, interrupted{end, wrote})
		if log.Len() > 0 {
			t.Errorf("the session that ended says %s", log.String())
		}
		for _, tells := range []bool{wrote, false} { // once
			log.Reset()
			session(ctx, &scripted{})
			if want := fmt.Sprintf("written=%v", tells); !strings.Contains(log.String(), want) {
				t.Errorf("want %s: %s", want, log.String())
			}
		}
	}
}

// TestRulesOfTheOtherFamily has no program for IPv6: the rules of IPv4 do not wait for it.
func TestRulesOfTheOtherFamily(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for name, script := range map[string]string{
		"": "echo 'iptables v1.8.9 (legacy)'", "-save": ":", "-restore": `while read -r line; do echo "$line"; done >` + dir + "/written",
	} {
		if err := os.WriteFile(filepath.Join(dir, "iptables"+name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	k := &ruleKeeper{
		choice: &flavourChoice{}, policy: firewalltest.Policy(), opts: Options{Resync: time.Minute},
		tried: make(chan struct{}), limit: rate.NewLimiter(repairRate, repairBurst),
		report: func(_ bool, err error) {
			if !errors.Is(err, iptables.ErrMissing) || !strings.Contains(err.Error(), "ip6tables") {
				t.Errorf("error %v, want one that names ip6tables", err)
			}
			cancel()
		},
	}
	k.run(ctx)
	written, err := os.ReadFile(filepath.Join(dir, "written"))
	if !strings.Contains(string(written), "-A POSTROUTING") || !strings.Contains(string(written), "-A FORWARD") {
		t.Errorf("written for IPv4: %q, %v", written, err)
	}
}
