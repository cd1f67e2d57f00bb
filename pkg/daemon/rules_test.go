// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/firewalltest"
	"github.com/flanneld/flanneld/pkg/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
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

// TestFlavourIsLogged starts sessions one after the other: from the last known state, and
// with the configuration from the store.
func TestFlavourIsLogged(t *testing.T) {
	session := func(nftables, recalled bool) lastKnown {
		return lastKnown{Config: subnet.Config{NFTables: nftables}, recalled: recalled}
	}
	for name, tt := range map[string]struct {
		option   string
		sessions []lastKnown
		want     []string
	}{
		"first start": {options.FirewallConfig, []lastKnown{session(false, false)}, []string{`held by iptables" because="EnableNFTables is false"`}},
		"restart": {options.FirewallConfig, []lastKnown{session(true, true), session(true, false)}, []string{
			`held by nftables" because="EnableNFTables is true in the last known configuration"`,
		}},
		"restart after a change": {options.FirewallConfig, []lastKnown{session(false, true), session(true, false)}, []string{
			`held by iptables" because="EnableNFTables is false in the last known configuration"`,
			`held by nftables" because="EnableNFTables is true"`,
		}},
		"restart with a flag": {options.FirewallIPTables, []lastKnown{session(false, true), session(true, false)}, []string{`held by iptables" because="--firewall says so"`}},
	} {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		choice := &flavourChoice{}
		for _, now := range tt.sessions {
			choice.of(ctx, tt.option, now)
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if !slices.EqualFunc(lines, tt.want, strings.HasSuffix) {
			t.Errorf("%s: the log has %q, want %q", name, lines, tt.want)
		}
	}
}

// TestBridgesAreWarnedAbout tests families with and without a bridge filter. Sessions
// after the first one must not repeat the warning.
func TestBridgesAreWarnedAbout(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"both pass":     {files: map[string]string{"bridge-nf-call-iptables": "1\n", "bridge-nf-call-ip6tables": "1\n"}},
		"IPv6 does not": {files: map[string]string{"bridge-nf-call-iptables": "1\n", "bridge-nf-call-ip6tables": "0\n"}, want: []string{`switched off.*sysctl="net.bridge.bridge-nf-call-ip6tables"`}},
		"no module":     {want: []string{`not loaded.*sysctl="net.bridge.bridge-nf-call-iptables"`, `not loaded.*sysctl="net.bridge.bridge-nf-call-ip6tables"`}},
	} {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		dir := t.TempDir()
		for file, text := range tt.files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		choice := &flavourChoice{}
		for range 2 {
			choice.warnBridges(ctx, dir, firewalltest.Policy())
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if log.Len() == 0 {
			lines = nil
		}
		match := func(line, want string) bool { return regexp.MustCompile(want).MatchString(line) }
		if !slices.EqualFunc(lines, tt.want, match) {
			t.Errorf("%s: the log has %q, want %q", name, lines, tt.want)
		}
	}
}

// scripted is an Applier with prepared answers.
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

// TestRuleKeeper tests failure, success and damage.
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
		for i, fails := range []bool{true, true, true, false, false} { // two passes fail themselves, one fails to clean
			if err := k.step(t.Context()); (err != nil) != fails {
				t.Errorf("step %d: %v", i, err)
			}
		}
		if !slices.Equal(reports, []error{broken, broken, nil, nil, nil}) || done != 1 || !k.cleaned {
			t.Errorf("reports %v, cleaned %d times", reports, done)
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
			_ = k.step(t.Context())
		}
		if took := time.Since(start); repairs != fight || took < (fight-repairBurst-1)*time.Second {
			t.Errorf("%d of %d repairs within %v, want them to slow down", repairs, fight, took)
		}
	})
}

// interrupted ends the session while it writes the rules.
type interrupted struct {
	end     context.CancelFunc
	changed bool
}

func (e interrupted) Apply(ctx context.Context, _ firewall.Policy) (bool, error) {
	e.end()
	return e.changed, ctx.Err()
}

// TestRulesOfAnEndedSession checks that a session reports the rules that the last one
// wrote and could not report.
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
			t.Errorf("log of the ended session: %s", log.String())
		}
		for _, tells := range []bool{wrote, false} { // only once
			log.Reset()
			session(ctx, &scripted{})
			if want := fmt.Sprintf("written=%v", tells); !strings.Contains(log.String(), want) {
				t.Errorf("want %s: %s", want, log.String())
			}
		}
	}
}

// TestRulesOfTheOtherFamily checks that the rules of IPv4 are applied if there is no
// program for IPv6.
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
		choice: beside(ctx), policy: firewalltest.Policy(), opts: options.Options{Resync: time.Minute},
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

// beside returns a flavourChoice whose background work ends with ctx.
func beside(ctx context.Context) *flavourChoice {
	return &flavourChoice{background: func(f func(context.Context)) { go f(ctx) }}
}

// TestHostIsLookedAtOnce ends a session while it searches the iptables programs. The next
// session must use the result of the search and not run the programs again.
func TestHostIsLookedAtOnce(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	const script = "#!/bin/sh\necho x >>%[1]s/asked\nread -r go <%[1]s/fifo\necho 'iptables v1.8.9 (legacy)'\n"
	if err := os.WriteFile(filepath.Join(dir, "iptables"), fmt.Appendf(nil, script, dir), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	policy := firewalltest.Policy()
	policy.Networks = policy.Networks[:1]
	choice := beside(t.Context())
	first, end := context.WithCancel(t.Context())
	ended := make(chan *iptables.Applier)
	go func() { ended <- choice.programs(first, policy) }()
	running, err := os.OpenFile(fifo, os.O_WRONLY, 0) // returns when the program runs
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	keep, err := os.OpenFile(fifo, os.O_RDWR, 0) // keeps unread data in the pipe
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	end()
	if a := <-ended; a != nil {
		t.Error("the ended session has got programs")
	}
	if _, err := keep.WriteString(strings.Repeat("go\n", 20)); err != nil {
		t.Fatal(err)
	}
	a := choice.programs(t.Context(), policy)
	asked := func() string {
		text, err := os.ReadFile(filepath.Join(dir, "asked"))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before := asked()
	if v, err := a.Variant(t.Context(), prefix.IPv4); err != nil || v != iptables.Legacy {
		t.Errorf("the programs are %q, %v, want legacy", v, err)
	}
	if choice.programs(t.Context(), policy) != a || asked() != before {
		t.Errorf("programs were run again: %q, then %q", before, asked())
	}
}
