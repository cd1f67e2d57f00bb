// SPDX-License-Identifier: Apache-2.0

package subnetfile

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

func TestParse(t *testing.T) {
	v4 := entry("10.5.0.0/16", "10.5.4.0/24")
	v6 := entry("fd00:10:5::/48", "fd00:10:5:47::/64")
	tests := map[string]struct {
		in   string
		want Previous
	}{
		"empty": {"", Previous{}},
		"dual stack": {
			"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\nFLANNEL_IPV6_NETWORK=fd00:10:5::/48\n" +
				"FLANNEL_IPV6_SUBNET=fd00:10:5:47::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
			Previous{Entries: []Entry{v4, v6}},
		},
		"IPv6 only, no final newline": {
			"FLANNEL_IPV6_NETWORK=fd00:10:5::/48\nFLANNEL_IPV6_SUBNET=fd00:10:5:47::1/64",
			Previous{Entries: []Entry{v6}},
		},
		"host bits are masked": {
			"FLANNEL_NETWORK=10.5.7.8/16\nFLANNEL_SUBNET=10.5.4.77/24\n",
			Previous{Entries: []Entry{v4}},
		},
		"quotes, comments, export, blanks, CRLF": {
			"# made by hand\r\n\r\nexport FLANNEL_NETWORK=\"10.5.0.0/16\" # note\r\n\texport\tFLANNEL_SUBNET = '10.5.4.1/24'\r\n",
			Previous{Entries: []Entry{v4}},
		},
		"comment behind a bare value": {
			"FLANNEL_NETWORK=10.5.0.0/16 # note\nFLANNEL_SUBNET=10.5.4.1/24\n",
			Previous{Entries: []Entry{v4}},
		},
		"a key that begins with export": {
			"exportFLANNEL_NETWORK=x\nexport=y\nFLANNEL_SUBNET=10.5.4.1/24\n",
			Previous{Entries: []Entry{entry("", "10.5.4.0/24")}},
		},
		"the last value counts": {
			"FLANNEL_SUBNET=10.5.9.1/24\nFLANNEL_SUBNET=10.5.4.1/24\n",
			Previous{Entries: []Entry{entry("", "10.5.4.0/24")}},
		},
		"list with one valid element": {
			"FLANNEL_NETWORK=nonsense, 10.5.0.0/16\n",
			Previous{
				Entries:  []Entry{entry("10.5.0.0/16", "")},
				Warnings: []string{`FLANNEL_NETWORK: "nonsense" is skipped: expected an IPv4 prefix`},
			},
		},
		"list with two valid elements": {
			"FLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\n",
			Previous{
				Entries:  []Entry{entry("", "10.5.4.0/24")},
				Warnings: []string{"FLANNEL_NETWORK is ignored: it has 2 prefixes, expected one"},
			},
		},
		"wrong family": {
			"FLANNEL_SUBNET=fd00::1/64\nFLANNEL_IPV6_SUBNET=10.5.4.1/24\nFLANNEL_IPV6_NETWORK=::ffff:10.0.0.0/104\n",
			Previous{Warnings: []string{
				`FLANNEL_SUBNET: "fd00::1/64" is skipped: expected an IPv4 prefix`,
				`FLANNEL_IPV6_NETWORK: "::ffff:10.0.0.0/104" is skipped: expected an IPv6 prefix`,
				`FLANNEL_IPV6_SUBNET: "10.5.4.1/24" is skipped: expected an IPv6 prefix`,
			}},
		},
		"damaged": {
			"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUB\n\x00\x00=\nFLANNEL_SUBNET=\"10.5.4.1/24\n",
			Previous{
				Entries: []Entry{entry("10.5.0.0/16", "")},
				Warnings: []string{
					`line 2 is skipped: expected KEY=VALUE, got "FLANNEL_SUB"`,
					`line 3 is skipped: expected KEY=VALUE, got "\x00\x00="`,
					`line 4 is skipped: expected KEY=VALUE, got "FLANNEL_SUBNET=\"10.5.4.1/24"`,
				},
			},
		},
		"truncated value": {
			"FLANNEL_SUBNET=10.5.4.1/\n",
			Previous{Warnings: []string{`FLANNEL_SUBNET: "10.5.4.1/" is skipped: expected an IPv4 prefix`}},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, parse([]byte(tt.in)), comparePrefixes); diff != "" {
				t.Errorf("parse (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWarningsAreBounded(t *testing.T) {
	p := parse([]byte(strings.Repeat(strings.Repeat("x", 1000)+"\n", 60)))
	if len(p.Warnings) != maxWarnings+1 {
		t.Errorf("%d warnings, want %d", len(p.Warnings), maxWarnings+1)
	}
	for _, w := range p.Warnings {
		if len(w) > 2*maxQuoted {
			t.Errorf("warning of %d bytes: %s", len(w), w)
		}
	}
}

func TestReadFiles(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, maxSize+1), 0o600); err != nil {
		t.Fatal(err)
	}
	full := filepath.Join(dir, "full")
	content := "FLANNEL_SUBNET=10.5.4.1/24\n#"
	if err := os.WriteFile(full, []byte(content+strings.Repeat(".", maxSize-len(content))), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		path    string
		want    Previous
		wantErr string
	}{
		"absent":           {path: filepath.Join(dir, "absent")},
		"absent directory": {path: filepath.Join(dir, "absent", "subnet.env")},
		"largest allowed":  {path: full, want: Previous{Entries: []Entry{entry("", "10.5.4.0/24")}}},
		"too large":        {path: large, wantErr: fmt.Sprintf("read subnet file %s: larger than 64 KiB", large)},
		"directory":        {path: dir, wantErr: fmt.Sprintf("read subnet file %s: not a regular file", dir)},
		"FIFO":             {path: fifo, wantErr: fmt.Sprintf("read subnet file %s: not a regular file", fifo)},
		"below a file":     {path: full + "/x", wantErr: fmt.Sprintf("read subnet file %s/x: not a directory", full)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Read(tt.path)
			var text string
			if err != nil {
				text = err.Error()
			}
			if text != tt.wantErr {
				t.Errorf("Read error %q, want %q", text, tt.wantErr)
			}
			if diff := cmp.Diff(tt.want, got, comparePrefixes); diff != "" {
				t.Errorf("Read (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzRead checks that parse accepts any content, that the prefixes it returns are valid,
// and that writing and reading them again gives the same prefixes.
func FuzzRead(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		p := parse(data)
		if len(p.Warnings) > maxWarnings+1 {
			t.Fatalf("%d warnings", len(p.Warnings))
		}
		for _, w := range p.Warnings {
			if strings.ContainsAny(w, "\n\r\x00") {
				t.Fatalf("warning is not one clean line: %q", w)
			}
		}
		for _, e := range p.Entries {
			for _, n := range []netip.Prefix{e.Network, e.Subnet} {
				if n.IsValid() && n != n.Masked() {
					t.Fatalf("%s is not masked", n)
				}
			}
			if !e.Network.IsValid() || !e.Subnet.IsValid() {
				continue
			}
			if prefix.FamilyOf(e.Network.Addr()) != prefix.FamilyOf(e.Subnet.Addr()) {
				t.Fatalf("families of %v differ", e)
			}
			again := parse(File{Entries: []Entry{e}}.Marshal())
			if len(again.Entries) != 1 || again.Entries[0] != e {
				t.Fatalf("%v becomes %v when rewritten", e, again)
			}
		}
	})
}
