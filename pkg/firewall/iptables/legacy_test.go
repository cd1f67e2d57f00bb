// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/firewalltest"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// countRuns puts wrappers of the programs of Legacy into PATH. runs returns the names of
// the programs that were run since the call of countRuns, in order.
func countRuns(t *testing.T) (runs func() []string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	for _, f := range families() {
		for _, suffix := range []string{"", "-save", "-restore"} {
			name := Legacy.Program(f) + suffix
			path := strings.TrimSpace(firewalltest.Shell(t, "command -v "+name))
			script := "#!/bin/sh\necho " + name + " >>" + log + "\nexec " + path + " \"$@\"\n"
			if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() []string {
		text, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return strings.Fields(string(text))
	}
}

// TestKernelLegacyAtRest checks that no program is run while rules stay as they are, even
// if counters change. Apply must notice a replaced rule of the same size, a changed policy
// of a chain, and a new subnet.
func TestKernelLegacyAtRest(t *testing.T) {
	firewalltest.Enter(t)
	policy := firewalltest.Guarded()
	if _, err := New(Legacy).Apply(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	runs := countRuns(t)
	a := New(Legacy)
	apply := func(p firewall.Policy) bool {
		t.Helper()
		changed, err := a.Apply(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return changed
	}
	apply(policy)
	known := len(runs())
	firewalltest.Shell(t, "ip link set lo up; ping -c1 -W1 127.0.0.1; ping -c1 -W1 ::1") // changes counters in all tables
	if apply(policy) {
		t.Error("rules were written although they are right")
	}
	if got := runs()[known:]; len(got) > 0 {
		t.Errorf("programs were run although no rule has changed: %v", got)
	}

	for _, f := range families() {
		program := Legacy.Program(f)
		// The replacement has the size of the rule, so that the number of bytes stays.
		firewalltest.Shell(t, program+` -t mangle -R FLANNEL-GUARD-IN 1 -p udp -m udp --dport 53 -m comment --comment "flanneld guard" -j DROP`)
		if !apply(policy) {
			t.Errorf("%s: a replaced rule was not noticed", f)
		}
		// A changed policy of a parent chain needs no repair, but must make Apply read the rules.
		apply(policy)
		before := len(runs())
		firewalltest.Shell(t, program+` -P FORWARD DROP`)
		apply(policy)
		if len(runs()) == before {
			t.Errorf("%s: a changed policy of a chain was not noticed", f)
		}
	}

	policy.Networks[0].Subnet = netip.MustParsePrefix("10.5.65.0/24")
	if !apply(policy) {
		t.Error("a new subnet was not noticed")
	}
}

// TestKernelLegacyLarge checks that, if there are thousands of rules, Apply notices a
// replaced rule of the same size after at most rests+1 calls, and a change of a size at once.
func TestKernelLegacyLarge(t *testing.T) {
	firewalltest.Enter(t)
	var rules strings.Builder
	rules.WriteString("*nat\n:OTHER - [0:0]\n")
	for port := range 4000 {
		fmt.Fprintf(&rules, "-A OTHER -p tcp --dport %d -m comment --comment \"of another program\" -j RETURN\n", port)
	}
	rules.WriteString("COMMIT\n")
	file := filepath.Join(t.TempDir(), "rules")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, f := range families() {
		firewalltest.Shell(t, Legacy.Program(f)+"-restore --noflush "+file)
	}
	a := New(Legacy)
	applies := func() (changed bool) {
		t.Helper()
		for range rests + 1 {
			wrote, err := a.Apply(t.Context(), firewalltest.Policy())
			if err != nil {
				t.Fatal(err)
			}
			changed = changed || wrote
		}
		return changed
	}
	applies()
	firewalltest.Shell(t, `iptables-legacy -R FLANNEL-FWD 1 -s 10.9.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT`)
	if !applies() {
		t.Error("a replaced rule was not noticed")
	}
	if applies() {
		t.Error("rules were written although they are right")
	}
	firewalltest.Shell(t, `ip6tables-legacy -F FLANNEL-FWD`)
	if wrote, err := a.Apply(t.Context(), firewalltest.Policy()); err != nil || !wrote {
		t.Errorf("deleted rules were not noticed at once: %v", err)
	}
}

func TestDigest(t *testing.T) {
	rule := func(size int, change func([]byte)) []byte {
		b := make([]byte, size)
		binary.NativeEndian.PutUint16(b[90:], uint16(size))
		if change != nil {
			change(b)
		}
		return b
	}
	l := layoutOf(prefix.IPv4)
	seed := maphash.MakeSeed()
	sum := func(entries []byte) (uint64, error) {
		var h maphash.Hash
		h.SetSeed(seed)
		err := l.hash(&h, entries)
		return h.Sum64(), err
	}
	plain, err := sum(rule(152, nil))
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := sum(rule(152, func(b []byte) { b[96], b[110], b[92] = 1, 1, 1 })); got != plain {
		t.Error("counters change the digest")
	}
	for _, at := range []int{0, 83, 87, 88, 112, 151} {
		if got, _ := sum(rule(152, func(b []byte) { b[at] = 1 })); got == plain {
			t.Errorf("byte %d does not change the digest", at)
		}
	}
	for name, entries := range map[string][]byte{
		"no length":   make([]byte, 152),
		"too short":   rule(152, func(b []byte) { binary.NativeEndian.PutUint16(b[90:], 111) }),
		"too long":    rule(152, func(b []byte) { binary.NativeEndian.PutUint16(b[90:], 153) }),
		"short end":   append(rule(152, nil), 1, 2, 3),
		"only header": rule(111, nil),
	} {
		if _, err := sum(entries); err == nil {
			t.Errorf("%s: want an error", name)
		}
	}
}
