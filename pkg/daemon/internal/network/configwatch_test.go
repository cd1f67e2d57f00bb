// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

func TestConfigWatch(t *testing.T) {
	const used = `{"Network":"10.5.0.0/16"}`
	all, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	k := &configWatch{validate: func(text []byte) (subnet.Config, error) {
		cfg, _, _, err := Validate("", text, true, all.Registry)
		return cfg, err
	}}
	cfg, err := subnet.ParseConfig([]byte(used))
	if err != nil {
		t.Fatal(err)
	}
	k.use(cfg)
	for _, step := range []struct{ text, want string }{
		{used, ""},
		{"", "there is no configuration any more"},
		{"{", "invalid"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":99999}}`, "Backend.Port is 99999"},
		{`{"Network":"10.5.0.0/29"}`, "too small"},
		{used, ""},
	} {
		var text []byte
		if step.text != "" {
			text = []byte(step.text)
		}
		k.apply(t.Context(), text)
		if got := k.restartNeeded(); !strings.Contains(got, step.want) || (step.want == "") != (got == "") {
			t.Errorf("after %q: %q, want %q", step.text, got, step.want)
		}
		if next, _ := k.next(); next != nil {
			t.Fatalf("after %q the daemon would end", step.text)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.exit(ended); err != nil {
		t.Errorf("exit without a change: %v", err)
	}
	k.apply(t.Context(), []byte(`{"Network":"10.6.0.0/16"}`))
	if err := k.exit(t.Context()); !errors.Is(err, ErrConfigChanged) || !strings.Contains(err.Error(), "10.6.0.0/16") {
		t.Errorf("exit: %v", err)
	}
}

// TestConfigWatchHiddenValue corrects a secret value in a configuration that did not start. The text of
// the changes hides such values, so it stays the same. next must return the configuration again.
func TestConfigWatchHiddenValue(t *testing.T) {
	w := &configWatch{follow: true, validate: subnet.ParseConfig}
	used, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`))
	if err != nil {
		t.Fatal(err)
	}
	w.use(used)
	w.apply(t.Context(), []byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","PSK":"first"}}`))
	first, changed := w.next()
	w.giveUp(t.Context(), *first, errors.New("does not start"))
	w.apply(t.Context(), []byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","PSK":"second"}}`))
	select {
	case <-changed:
	default:
		t.Error("the corrected configuration has woken nothing")
	}
	if next, _ := w.next(); next == nil || w.refusal() != "" {
		t.Errorf("next %v, refusal %q, want the corrected configuration", next, w.refusal())
	}
}

// TestConfigWatchForgetsRefusals expects a refusal to concern only the configuration that the store has.
func TestConfigWatchForgetsRefusals(t *testing.T) {
	w := &configWatch{follow: true, validate: subnet.ParseConfig}
	used, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	w.use(used)
	w.apply(t.Context(), []byte(`{"Network":"10.6.0.0/16"}`))
	first, _ := w.next()
	w.apply(t.Context(), []byte(`{"Network":"10.7.0.0/16"}`))
	w.refuse(t.Context(), *first, subnet.ErrNoSubnets)
	if got := w.refusal(); got != "" {
		t.Errorf("a refusal that comes late: %q", got)
	}

	second, _ := w.next()
	w.refuse(t.Context(), *second, subnet.ErrNoSubnets)
	if w.refusal() == "" {
		t.Error("no refusal")
	}
	w.apply(t.Context(), nil)
	if got := w.refusal(); got != "" {
		t.Errorf("a refusal of a configuration that is deleted: %q", got)
	}
}

// TestConfigWatchHasGivenUp replaces a configuration that did not start by texts that no network can use. The
// steps toward it must not be tried again, because each attempt disturbs the traffic.
func TestConfigWatchHasGivenUp(t *testing.T) {
	for name, unusable := range map[string]func(w *configWatch){
		"it is deleted":     func(w *configWatch) { w.apply(t.Context(), nil) },
		"it is damaged":     func(w *configWatch) { w.apply(t.Context(), []byte("{")) },
		"it is refused":     func(w *configWatch) { w.recordRefusal(errors.New("another network has it")) },
		"one after another": func(w *configWatch) { w.apply(t.Context(), []byte("{")); w.apply(t.Context(), nil) },
	} {
		t.Run(name, func(t *testing.T) {
			w := &configWatch{follow: true, validate: subnet.ParseConfig}
			w.use(parseConfig(t, `{"Network":"10.5.0.0/16"}`))
			unusable(w)
			if w.rest() > 0 {
				t.Error("no configuration has failed to start, and one counts as that")
			}
			w.apply(t.Context(), []byte(`{"Network":"10.6.0.0/16"}`))
			next, _ := w.next()
			w.giveUp(t.Context(), *next, errors.New("does not start"))
			if again, _ := w.next(); again != nil {
				t.Errorf("next %v, although it did not start", again)
			}

			unusable(w)
			if again, _ := w.next(); again != nil || w.rest() <= 0 {
				t.Errorf("next %v, want that the configuration that did not start is remembered", again)
			}
			w.apply(t.Context(), []byte(`{"Network":"10.7.0.0/16"}`))
			if w.rest() > 0 {
				t.Error("another configuration counts as one that did not start")
			}
		})
	}
}

// TestConfigWatchRefusesTheFirst lets a start refuse the configuration that the store had. next must return
// that configuration, because a later attempt may succeed. If the watch has reported a newer configuration
// by then, next must return the newer one, and there must be no refusal.
func TestConfigWatchRefusesTheFirst(t *testing.T) {
	parse := func(text string) subnet.Config {
		cfg, err := subnet.ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	const used, first, newer = `{"Network":"10.5.0.0/16"}`, `{"Network":"10.6.0.0/16"}`, `{"Network":"10.7.0.0/16"}`
	for name, tt := range map[string]struct{ text, next, refusal string }{
		"the watch has not read it yet": {"", "10.6.0.0/16", "does not start"},
		"the watch has read it":         {first, "10.6.0.0/16", "does not start"},
		"a newer one":                   {newer, "10.7.0.0/16", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := &configWatch{follow: true, validate: func(text []byte) (subnet.Config, error) { return parse(string(text)), nil }}
			if tt.text != "" {
				w.apply(t.Context(), []byte(tt.text))
			}
			w.use(parse(used))
			w.refuse(t.Context(), parse(first), errors.New("does not start"))
			next, _ := w.next()
			if next == nil || next.Networks[0].Prefix.String() != tt.next || w.refusal() != tt.refusal {
				t.Errorf("next %v, refusal %q, want %s, %q", next, w.refusal(), tt.next, tt.refusal)
			}
		})
	}
}

// TestConfigWatchWarns checks that warnings about a configuration are logged in one line, even if nothing
// else has changed, and not again until they differ.
func TestConfigWatchWarns(t *testing.T) {
	all, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{}))
	w := &configWatch{follow: true, validate: (&Network{catalog: all}).validate}
	used, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`))
	if err != nil {
		t.Fatal(err)
	}
	w.use(used)
	for _, step := range []struct {
		text string
		want []string // parts of the line; nil if there is none
	}{
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`, nil},
		{`{"Network":"10.5.0.0/16","SubnetLength":26,"Backend":{"Type":"vxlan"}}`, []string{"SubnetLength", "SubnetLen"}},
		{`{"SubnetLength":25,"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`, nil},
		{`{"Network":"10.5.0.0/16","EnableNFtable":true,"Backend":{"Type":"vxlan","Prot":1}}`, []string{"EnableNFTables", "Prot", "Port"}},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"udp"},"backend":{"Type":"vxlan"}}`, []string{"Backend", "backend", "counts"}},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7,"VNI":1}}`, []string{"VNI", "more than once", "the network configuration has changed"}},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":1}}`, nil},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7,"VNI":1}}`, []string{"more than once"}},
		{`{`, nil},
		{``, nil},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7,"VNI":1}}`, nil},
	} {
		lines = nil
		var stored []byte
		if step.text != "" {
			stored = []byte(step.text)
		}
		w.apply(ctx, stored)
		text := strings.Join(lines, "\n")
		for _, want := range step.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q in the log:\n%s", step.text, want, text)
			}
		}
		if got := strings.Count(text, `"warning"=`); got != min(len(step.want), 1) {
			t.Errorf("%s: %d lines with warnings:\n%s", step.text, got, text)
		}
	}
}

// TestConfigWatchOfLongTexts checks that a configuration with long texts and thousands of keys gives few
// short log lines, and a short reason.
func TestConfigWatchOfLongTexts(t *testing.T) {
	all, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 300_000)
	var many strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&many, `"unknown%d":%d,`, i, i)
	}
	for name, config := range map[string]string{
		"type":      `{"Network":"10.5.0.0/16","Backend":{"Type":"` + long + `"}}`,
		"next type": `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":{"Type":"` + long + `"}}`,
		"mode":      `{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Mode":"` + long + `"}}`,
		"keys":      `{"Network":"10.5.0.0/16","Backend":{` + many.String() + `"Type":"vxlan"}}`,
	} {
		var lines []string
		logger := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
		ctx := klog.NewContext(t.Context(), status.NewJournal(1).Logger(logger))
		w := &configWatch{follow: true, validate: (&Network{catalog: all}).validate}
		used, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`))
		if err != nil {
			t.Fatal(err)
		}
		w.use(used)
		w.apply(ctx, []byte(config))
		if len(lines) == 0 || len(lines) > 2 {
			t.Errorf("%s: %d lines", name, len(lines))
		}
		for _, text := range append(lines, w.refusal(), w.restartNeeded()) {
			if len(text) > 1200 {
				t.Errorf("%s: a text of %d bytes: %.100s", name, len(text), text)
			}
		}
	}
}

// TestConfigWatchEndOfMigration checks what the network should use after the end of a migration. A daemon that
// ends at a changed configuration must do so once, and not again at each start until it has left the former
// backend.
func TestConfigWatchEndOfMigration(t *testing.T) {
	const during, after = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":{"Type":"host-gw"}}`, `{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`
	w := &configWatch{follow: true, validate: subnet.ParseConfig}
	used := parseConfig(t, during)
	w.use(used)
	w.apply(t.Context(), []byte(after))
	next, _ := w.next()
	if next == nil || next.Stage != subnet.Finished {
		t.Fatalf("after the end the network should use %+v, want both backends", next)
	}
	for _, cfg := range []subnet.Config{*next, next.Step(), next.Goal()} {
		w.use(cfg)
		if next, _ := w.next(); next != nil || w.restartNeeded() != "" || w.refusal() != "" {
			t.Errorf("in stage %q the network should use %+v, %q", cfg.Stage, next, w.restartNeeded())
		}
	}
	w.use(*next)
	w.apply(t.Context(), []byte(during))
	if next, _ = w.next(); next == nil || next.Stage != "" || !next.Migrates() {
		t.Errorf("when the end is taken back, the network should use %+v", next)
	}
}

// TestConfigWatchRefusesAStep refuses a step toward the configuration in the store, which does not differ from the last
// one of the steps. The reason must be known until the network uses the step. The network must try it again, also if it
// does not follow changes.
func TestConfigWatchRefusesAStep(t *testing.T) {
	for _, tt := range []struct {
		name   string
		follow bool
		refuse func(*configWatch, context.Context, subnet.Config, error)
		rest   time.Duration
	}{
		{"for now", true, (*configWatch).refuse, 0},
		{"until the end of a pause", true, (*configWatch).giveUp, leastPause},
		{"for now, not followed", false, (*configWatch).refuse, 0},
		{"until the end of a pause, not followed", false, (*configWatch).giveUp, leastPause},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &configWatch{follow: tt.follow, validate: subnet.ParseConfig}
			w.use(parseConfig(t, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":{"Type":"host-gw"}}`))
			w.apply(t.Context(), []byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`))
			next, _ := w.next()
			w.use(*next)
			tt.refuse(w, t.Context(), next.Step(), errors.New("busy"))
			if got := w.refusal(); !strings.HasPrefix(got, "busy") {
				t.Errorf("the refusal is %q, want the reason", got)
			}
			if got := w.rest(); got > tt.rest {
				t.Errorf("the step is tried again after %s, want %s", got, tt.rest)
			}
			w.use(next.Step())
			if got := w.refusal(); got != "" {
				t.Errorf("the refusal is %q after the step", got)
			}
		})
	}
}

// TestConfigWatchStates goes ways through the states of the configuration in the store. Each step has what the
// watch says after it, beginning with the line that it logs: the configuration that the network should use next
// (here 6 is 10.6.0.0/16), why a restart is needed, why the configuration is refused, whether it failed, and
// whether those who wait for next were woken.
func TestConfigWatchStates(t *testing.T) {
	type step struct{ do, want string }
	short := strings.NewReplacer(" (tried again after 1m0s)", "", "the network configuration ", "it ", ": flanneld goes on with the one that it has", "",
		"invalid network configuration: byte 1: unexpected end of JSON input", "not JSON", "there is no configuration any more", "none")
	for name, tt := range map[string]struct {
		follow bool
		steps  []step
	}{
		"followed": {true, []step{
			{"apply 6", "woken"},
			{"use 5", "next 6; woken"},
			{"refuse 7 late", "next 6"},
			{"refuse 6 busy", "it cannot be used; warned: busy; next 6; refused: busy"},
			{"refuse 6 still busy", "next 6; refused: still busy"},
			{"apply 6", "next 6; refused: still busy"},
			{"use 6", "woken"},
			{"apply 5", "it has changed; next 5; woken"},
			{"apply 6", "it is again the one in use; woken"},
			{"apply", "it cannot be used any more, but could not start again; restart: none"},
			{"apply", "restart: none"},
			{"apply {", "it cannot be used; warned: not JSON; refused: not JSON"},
			{"apply {", "refused: not JSON"},
			{"apply 6", "it is again the one in use; woken"},
			{"apply", "it cannot be used any more, but could not start again; restart: none"},
			{"apply 6", "it is again the one in use; woken"},
		}},
		"not followed": {false, []step{
			{"use 5", ""},
			{"apply 6", "it has changed: restart needed; next 6; restart: IPv4 network 10.5.0.0/16 -> 10.6.0.0/16; woken"},
			{"refuse 6 busy", "it cannot be used; warned: busy; restart: busy; refused: busy; failed"},
			{"apply 5", "it is again the one in use; woken"},
			{"apply {", "it cannot be used; warned: not JSON; restart: not JSON; refused: not JSON"},
			{"apply 7", "it has changed: restart needed; next 7; restart: IPv4 network 10.5.0.0/16 -> 10.7.0.0/16; woken"},
			{"apply", "it cannot be used any more, but could not start again; restart: none; woken"},
			{"apply 7", "it has changed: restart needed; next 7; restart: IPv4 network 10.5.0.0/16 -> 10.7.0.0/16; woken"},
			{"apply 5", "it is again the one in use; woken"},
		}},
		"failed": {true, []step{
			{"use 5", ""},
			{"apply 6", "it has changed; next 6; woken"},
			{"fail 7 broken", "next 6"},
			{"fail 6 broken", "it cannot be used; warned: broken; refused: broken; failed"},
			{"apply 6", "refused: broken; failed"},
			{"apply 5", "it is again the one in use; woken"},
			{"apply 6", "it has changed; next 6; woken"},
			{"fail 6 broken", "it cannot be used; warned: broken; refused: broken; failed"},
			{"apply", "it cannot be used any more, but could not start again; restart: none; failed; woken"},
			{"apply 6", "it has changed; next 6; woken"},
			{"fail 6 broken", "it cannot be used; warned: broken; refused: broken; failed"},
			{"record taken", "refused: taken; failed; woken"},
			{"apply 7", "it has changed; next 7; woken"},
		}},
		"refused at first": {true, []step{
			{"refuse 6 busy", "it cannot be used; warned: busy; refused: busy"},
			{"use 5", "next 6; refused: busy; woken"},
			{"apply 6", "next 6; refused: busy"},
			{"apply 5", "it is again the one in use; woken"},
			{"refuse 6 late", ""},
		}},
		"refused at first, and not followed": {false, []step{
			{"use 5", ""},
			{"refuse 6 busy", "it cannot be used; warned: busy; restart: busy; refused: busy; failed; woken"},
			{"apply 6", "restart: busy; refused: busy; failed"},
			{"apply 7", "it has changed: restart needed; next 7; restart: IPv4 network 10.5.0.0/16 -> 10.7.0.0/16; woken"},
			{"refuse 6 late", "next 7; restart: IPv4 network 10.5.0.0/16 -> 10.7.0.0/16"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var says []string
			ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) {
				message, _, _ := strings.Cut(line[strings.Index(line, `"msg"="`)+len(`"msg"="`):], `"`)
				says = append(says, message)
			}, funcr.Options{}))
			w := &configWatch{follow: tt.follow, validate: subnet.ParseConfig, warn: func(_, message string) { says = append(says, "warned: "+message) }}
			text := func(n string) string {
				if len(n) == 1 && n != "{" {
					return `{"Network":"10.` + n + `.0.0/16"}`
				}
				return n
			}
			for _, s := range tt.steps {
				says = nil
				_, changed := w.next()
				do, rest, _ := strings.Cut(s.do, " ")
				n, reason, _ := strings.Cut(rest, " ")
				switch do {
				case "apply":
					var stored []byte
					if n != "" {
						stored = []byte(text(n))
					}
					w.apply(ctx, stored)
				case "use":
					w.use(parseConfig(t, text(n)))
				case "refuse":
					w.refuse(ctx, parseConfig(t, text(n)), errors.New(reason))
				case "fail":
					w.giveUp(ctx, parseConfig(t, text(n)), errors.New(reason))
				case "record":
					w.recordRefusal(errors.New(rest))
				}

				if next, _ := w.next(); next != nil {
					says = append(says, "next "+strings.Split(next.Networks[0].Prefix.String(), ".")[1])
				}
				if why := w.restartNeeded(); why != "" {
					says = append(says, "restart: "+why)
				}
				if why := w.refusal(); why != "" {
					says = append(says, "refused: "+why)
				}
				if w.rest() > 0 {
					says = append(says, "failed")
				}
				select {
				case <-changed:
					says = append(says, "woken")
				default:
				}
				if got := short.Replace(strings.Join(says, "; ")); got != s.want {
					t.Errorf("%s: %q\nwant %q", s.do, got, s.want)
				}
			}
		})
	}
}
