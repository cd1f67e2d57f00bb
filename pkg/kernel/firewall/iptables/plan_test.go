// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// TestJump checks that the jump moves from a wrong position in the parent chain to the right
// one, and that a jump in a right position stays.
func TestJump(t *testing.T) {
	const jump = `-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD`
	const chain = `:FLANNEL-FWD - [0:0]
-A FLANNEL-FWD -s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
`
	p := firewalltest.Policy()
	p.Masquerade = false
	for name, tt := range map[string]struct{ forward, want string }{
		"empty":               {"", "-A FORWARD"},
		"alone":               {jump, ""},
		"at the end":          {"-A FORWARD -j KUBE-FORWARD\n-A FORWARD -p tcp -j ACCEPT", "-A FORWARD"},
		"REJECT":              {"-A FORWARD -j KUBE-FORWARD\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited", "-I FORWARD 2"},
		"DROP with a comment": {`-A FORWARD -i eth0 -j DROP` + "\n" + `-A FORWARD -m comment --comment "the rest" -j DROP`, "-I FORWARD 2"},
		"REJECT in a chain":   {"-A FORWARD -j ufw-forward\n-A FORWARD -j ufw-reject\n-A ufw-reject -p udp -j RETURN\n-A ufw-reject -j REJECT", "-I FORWARD 2"},
		"returns before":      {"-A FORWARD -j ufw-reject\n-A ufw-reject -j RETURN\n-A ufw-reject -j REJECT", "-A FORWARD"},
		"chains in a circle":  {"-A FORWARD -j A\n-A A -j B\n-A B -j A", "-A FORWARD"},
		"in place":            {"-A FORWARD -j KUBE-FORWARD\n" + jump + "\n-A FORWARD -j REJECT", ""},
		"others between":      {"-A FORWARD -j KUBE-FORWARD\n" + jump + "\n-A FORWARD -p tcp -j X\n-A FORWARD -j REJECT", ""},
		"behind REJECT":       {"-A FORWARD -j REJECT\n" + jump, "-I FORWARD 1"},
		"before kube-proxy":   {jump + "\n-A FORWARD -j KUBE-FORWARD", "-A FORWARD"},
		"kube-proxy too late": {jump + "\n-A FORWARD -j REJECT\n-A FORWARD -j KUBE-FORWARD", ""},
		"twice":               {jump + "\n" + jump, "-A FORWARD"},
		"with a condition":    {"-A FORWARD -i eth0 -j FLANNEL-FWD", "-A FORWARD"},
	} {
		script := plan(parseSave("*filter\n"+chain+tt.forward+"\nCOMMIT\n"), firewall.TableOf(prefix.IPv4, p))
		want := ""
		if tt.want != "" {
			want = tt.want + strings.TrimPrefix(jump, "-A FORWARD") + "\nCOMMIT\n"
		}
		if !strings.HasSuffix(script, want) || want == "" && script != "" {
			t.Errorf("%s: the script is\n%s\nwant it to end with\n%s", name, script, want)
		}
	}
}

// TestLegacyRules checks that rules of flannel before v0.20 are removed, and that rules that
// an operator may have written stay.
func TestLegacyRules(t *testing.T) {
	off, on := firewalltest.Policy(), firewalltest.Policy()
	off.Forward, off.Masquerade = false, false
	for spec, removed := range map[string][2]bool{ // whether it is removed if everything is disabled, and if everything is enabled
		"-A FORWARD -s 10.5.0.0/16 -j ACCEPT":                                            {false, true},
		`-A FORWARD -s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT`:    {true, true},
		"-A FORWARD -s 10.5.0.0/16 -j DROP":                                              {false, false},
		"-A FORWARD -s 10.5.1.0/24 -j ACCEPT":                                            {false, false},
		"-A FORWARD -s 10.5.0.0/16 -i eth0 -j ACCEPT":                                    {false, false},
		"-A POSTROUTING -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE":                   {true, true},
		"-A POSTROUTING ! -s 10.5.0.0/16 -d 10.5.9.0/24 -j RETURN":                       {true, true},
		"-A POSTROUTING -s 10.6.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE":                   {false, false},
		"-A POSTROUTING -s 10.5.0.0/16 -o eth0 -j MASQUERADE":                            {false, false},
		"-A POSTROUTING -s 10.5.0.0/16 -j MASQUERADE":                                    {false, false},
		`-A POSTROUTING -s 10.5.0.0/16 -d 192.0.2.0/24 -m comment --comment x -j RETURN`: {false, false},
	} {
		table := "*filter\n"
		if strings.Contains(spec, "POSTROUTING") {
			table = "*nat\n"
		}
		for i, p := range []firewall.Policy{off, on} {
			script := plan(parseSave(table+spec+"\nCOMMIT\n"), firewall.TableOf(prefix.IPv4, p))
			if got := strings.Contains(script, "-D"+strings.TrimPrefix(spec, "-A")); got != removed[i] {
				t.Errorf("%s with everything %s: removed %v, want %v", spec, []string{"off", "on"}[i], got, removed[i])
			}
		}
	}
}

// TestProbe checks what probe returns for programs that print versions of iptables, or
// another text.
func TestProbe(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	const program = Variant("-of-a-test")
	for text, want := range map[string]kind{
		"iptables v1.8.9 (nf_tables)": {nft: true, recent: true},
		"ip6tables v1.8.9 (legacy)":   {recent: true},
		"iptables v1.6.2":             {recent: true},
		"iptables v1.6.1":             {},
		"iptables v1.4.21":            {},
		"iptables v2.0.0 (nf_tables)": {nft: true, recent: true},
		"busybox":                     {},
	} {
		script := "#!/bin/sh\necho '" + text + "'\n"
		path := filepath.Join(os.Getenv("PATH"), program.Program(prefix.IPv6))
		if err := os.WriteFile(path, []byte(script), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		got, err := program.probe(t.Context(), prefix.IPv6)
		if understood := text != "busybox"; got != want || (err == nil) != understood {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), "busybox") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := program.probe(t.Context(), prefix.IPv4); !errors.Is(err, ErrMissing) {
		t.Errorf("missing program: %v, want ErrMissing", err)
	}
}

// TestParseRule checks what is a condition of a rule.
func TestParseRule(t *testing.T) {
	for spec, want := range map[string]rule{
		`-m comment --comment "-x y" -j DROP`: {target: "DROP", always: true},
		"-m socket -j DROP":                   {target: "DROP", conditions: []condition{{module: "socket"}}},
		"-p tcp -m tcp -g user":               {target: "user", conditions: []condition{{option: "-p", value: "tcp"}}},
		"-m conntrack ! --ctstate NEW":        {conditions: []condition{{not: true, module: "conntrack", option: "--ctstate", value: "NEW"}}},
		"-s 10.0.0.0/8 odd -j ACCEPT":         {target: "ACCEPT", conditions: []condition{{option: "-s", value: "10.0.0.0/8"}, {}}},
	} {
		got := parseRule(spec)
		got.conditions = slices.DeleteFunc(got.conditions, func(c condition) bool { return c.option == "--comment" })
		if got.target != want.target || got.always != want.always || !slices.Equal(got.conditions, want.conditions) {
			t.Errorf("%s: %+v, want %+v", spec, got, want)
		}
	}
}

// FuzzParse checks that a rule with flanneld's comment that parse understands is the same
// after render and another parse. It also checks that plan returns a complete script if the
// chains contain any rule.
func FuzzParse(f *testing.F) {
	for _, c := range firewall.Chains() {
		for _, r := range firewalltest.Rules(firewall.TableOf(prefix.IPv6, firewalltest.Guarded()), c) {
			f.Add(places[c].render(r))
		}
	}
	f.Add(`! -s 10.5.0.0/16 -m comment --comment "say \"no\"" -j RETURN`)
	f.Fuzz(func(t *testing.T, spec string) {
		p := places[firewall.Postrouting]
		if r, comment, ok := parse(parseRule(spec)); ok && comment == p.comment {
			again, _, ok := parse(parseRule(p.render(r)))
			if !ok || again != r {
				t.Errorf("%q is parsed as %+v, which is rendered as %q", spec, r, p.render(r))
			}
		}
		script := plan(parseSave("*nat\n-A POSTROUTING "+spec+"\n-A FLANNEL-POSTRTG "+spec+"\nCOMMIT\n"),
			firewall.TableOf(prefix.IPv4, firewall.Policy{Former: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}))
		if strings.Count(script, "COMMIT\n") < strings.Count(script, "*nat\n") {
			t.Errorf("%q results in an incomplete script %q", spec, script)
		}
	})
}

// TestMissing checks that the error of Apply names the missing programs of both families in
// one line.
func TestMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := New(Default).Apply(t.Context(), firewalltest.Policy())
	if !errors.Is(err, ErrMissing) || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %q, want a line with %q", err, ErrMissing)
	}
	for _, f := range families() {
		if program := Default.Program(f); !strings.Contains(err.Error(), program+":") {
			t.Errorf("error %q, want one that names %s", err, program)
		}
	}
}

// TestMissingWhereNothingIsWanted checks that Apply succeeds if the programs of a family are
// missing and there are only rules of that family to remove: programs that are missing cannot
// have created rules.
func TestMissingWhereNothingIsWanted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for name, script := range map[string]string{
		"iptables": "echo 'iptables v1.8.9 (nf_tables)'", "iptables-save": ":", "iptables-restore": "while read -r _; do :; done",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	p := firewalltest.Policy()
	p.Networks, p.Former = p.Networks[:1], []netip.Prefix{p.Networks[1].Network}
	a := New(Default)
	a.targets = noChains
	if changed, err := a.Apply(t.Context(), p); err != nil || !changed {
		t.Errorf("changed %v, %v", changed, err)
	}
}

// TestInterrupted checks that Apply reports a change if ctx ends while iptables-restore runs,
// because the program may have written the rules. If ctx ends before, Apply must not report a
// change.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	const variant = Variant("-of-a-test")
	for name, script := range map[string]string{
		"": "echo iptables v1.8.9 '(nf_tables)'", "-save": "true", "-restore": "touch " + dir + "/written; exec sleep 60",
	} {
		path := filepath.Join(dir, variant.Program(prefix.IPv4)+name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for {
			if _, err := os.Stat(dir + "/written"); err == nil || t.Context().Err() != nil {
				cancel()
				return
			}
			runtime.Gosched()
		}
	}()
	p := firewalltest.Policy()
	p.Networks = p.Networks[:1]
	a := New(variant)
	a.targets = noChains
	changed, err := a.Apply(ctx, p)
	if !changed || !errors.Is(err, context.Canceled) {
		t.Errorf("changed %v, %v", changed, err)
	}
	if changed, err := New(variant).Apply(ctx, p); changed || err == nil {
		t.Errorf("before any write: changed %v, %v", changed, err)
	}
}
