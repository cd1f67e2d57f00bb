// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
)

// TestUnfilteredBridges checks that there is a warning for each family without a bridge filter.
// Each later Keep must not repeat the warning.
func TestUnfilteredBridges(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"both pass":     {files: map[string]string{"bridge-nf-call-iptables": "1\n", "bridge-nf-call-ip6tables": "1\n"}},
		"IPv6 does not": {files: map[string]string{"bridge-nf-call-iptables": "1\n", "bridge-nf-call-ip6tables": "0\n"}, want: []string{`switched off.*sysctl="net.bridge.bridge-nf-call-ip6tables"`}},
		"no module":     {want: []string{`not loaded.*sysctl="net.bridge.bridge-nf-call-iptables"`, `not loaded.*sysctl="net.bridge.bridge-nf-call-ip6tables"`}},
	} {
		ctx, log := logging(t)
		dir := t.TempDir()
		for file, text := range tt.files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		h := NewHost()
		for range 2 {
			h.warnBridges(ctx, dir, firewalltest.Policy())
		}
		var lines []string
		if log.Len() > 0 {
			lines = strings.Split(strings.TrimSpace(log.String()), "\n")
		}
		match := func(line, want string) bool { return regexp.MustCompile(want).MatchString(line) }
		if !slices.EqualFunc(lines, tt.want, match) {
			t.Errorf("%s: the log has %q, want %q", name, lines, tt.want)
		}
	}
}

// TestProgramsAreSearchedOnce checks that, if a Keep ends while the programs are searched,
// the next Keep uses the result of the search and does not run the programs again.
func TestProgramsAreSearchedOnce(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	program(t, dir, "iptables", fmt.Sprintf("echo x >>%[1]s/asked\nread -r go <%[1]s/fifo\necho 'iptables v1.8.9 (legacy)'", dir))
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	families := []prefix.Family{prefix.IPv4}
	h := newHost(t)
	first, end := context.WithCancel(t.Context())
	ended := make(chan *iptables.Programs)
	go func() { ended <- h.programs(first, families) }()
	running, err := os.OpenFile(fifo, os.O_WRONLY, 0) // returns when the program has opened the other end
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
	if p := <-ended; p != nil {
		t.Error("the Keep that has ended got programs, want none")
	}
	if _, err := keep.WriteString(strings.Repeat("go\n", 20)); err != nil {
		t.Fatal(err)
	}
	p := h.programs(t.Context(), families)
	asked := func() string {
		text, err := os.ReadFile(filepath.Join(dir, "asked"))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before := asked()
	if v, err := p.Variant(t.Context(), prefix.IPv4); err != nil || v != iptables.Legacy {
		t.Errorf("the programs are %q, %v, want legacy", v, err)
	}
	if h.programs(t.Context(), families) != p || asked() != before {
		t.Errorf("programs were run again: %q, then %q", before, asked())
	}
}
