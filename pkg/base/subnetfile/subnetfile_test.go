// SPDX-License-Identifier: Apache-2.0

package subnetfile

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var comparePrefixes = cmpopts.EquateComparable(netip.Prefix{})

func entry(network, subnet string) Entry {
	var e Entry
	if network != "" {
		e.Network = netip.MustParsePrefix(network)
	}
	if subnet != "" {
		e.Subnet = netip.MustParsePrefix(subnet)
	}
	return e
}

func TestMarshal(t *testing.T) {
	tests := map[string]struct {
		file File
		want string
	}{
		"IPv4": {
			File{Entries: []Entry{entry("10.50.0.0/16", "10.50.7.0/24")}, MTU: 1500, IPMasq: true},
			"FLANNEL_NETWORK=10.50.0.0/16\nFLANNEL_SUBNET=10.50.7.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=true\n",
		},
		"IPv6 only": {
			File{Entries: []Entry{entry("fd50::/48", "fd50:0:0:16::/64")}, MTU: 1430},
			"FLANNEL_IPV6_NETWORK=fd50::/48\nFLANNEL_IPV6_SUBNET=fd50:0:0:16::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n",
		},
		"dual stack": {
			File{
				Entries: []Entry{entry("10.5.0.0/16", "10.5.4.0/24"), entry("fd00:10:5::/48", "fd00:10:5:47::/64")},
				MTU:     1450, IPMasq: true,
			},
			"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\n" +
				"FLANNEL_IPV6_NETWORK=fd00:10:5::/48\nFLANNEL_IPV6_SUBNET=fd00:10:5:47::1/64\n" +
				"FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
		},
		"host bits do not matter": {
			File{Entries: []Entry{entry("10.5.0.5/16", "10.5.4.9/24")}, MTU: 1450},
			"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, string(tt.file.Marshal())); diff != "" {
				t.Errorf("Marshal (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReadAfterWrite(t *testing.T) {
	f := File{
		Entries: []Entry{entry("10.5.0.0/16", "10.5.4.0/24"), entry("fd00:10:5::/48", "fd00:10:5:47::/64")},
		MTU:     1450,
	}
	path := filepath.Join(t.TempDir(), "run", "flannel", "subnet.env")
	if err := Write(path, f); err != nil {
		t.Fatal(err)
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Previous{Entries: f.Entries}, got, comparePrefixes); diff != "" {
		t.Errorf("Read (-want +got):\n%s", diff)
	}
}

func TestWriteModes(t *testing.T) {
	// The umask belongs to the process: these cases must not run in parallel with others.
	defer syscall.Umask(syscall.Umask(0o077))
	dir := t.TempDir()
	path := filepath.Join(dir, "subnet.env")

	for _, tt := range []struct {
		name     string
		existing os.FileMode // 0: the file does not exist
		want     os.FileMode
	}{
		{"new file, with any umask", 0, 0o644},
		{"existing mode is kept", 0o600, 0o600},
		{"existing wider mode is kept", 0o664, 0o664},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.existing != 0 {
				if err := os.Chmod(path, tt.existing); err != nil {
					t.Fatal(err)
				}
			}
			if err := Write(path, File{MTU: 1500}); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode().Perm() != tt.want {
				t.Errorf("mode %v, want %v", info.Mode().Perm(), tt.want)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, ".subnet.env*")); len(left) != 0 {
				t.Errorf("temporary files left behind: %v", left)
			}
		})
	}
}

func TestWriteStaysInItsDirectory(t *testing.T) {
	// A TMPDIR that does not exist shows whether Write creates files there.
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	dir := t.TempDir()
	if err := Write(filepath.Join(dir, "subnet.env"), File{MTU: 1500}); err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	if err := Write(filepath.Join(dir, "none", "subnet.env"), File{MTU: 1500}); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(tmp)
	if err != nil {
		t.Fatal(err)
	}
	before := info.ModTime()
	if err := Write(filepath.Join(dir, "subnet.env"), File{MTU: 1400}); err != nil {
		t.Fatal(err)
	}
	if info, err = os.Stat(tmp); err != nil || !info.ModTime().Equal(before) {
		t.Errorf("TMPDIR was written to (modified %v, before %v, error %v)", info.ModTime(), before, err)
	}
}

func TestWriteErrorNamesTheFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"directory cannot be made": filepath.Join(file, "subnet.env"),
		"target is a directory":    dir,
	} {
		t.Run(name, func(t *testing.T) {
			err := Write(path, File{MTU: 1500})
			if err == nil || !strings.Contains(err.Error(), filepath.Base(dir)) {
				t.Errorf("Write(%s) = %v, want an error that names it", path, err)
			}
		})
	}
}

func TestUpToDate(t *testing.T) {
	f := File{Entries: []Entry{entry("10.5.0.0/16", "10.5.4.0/24")}, MTU: 1450}
	path := filepath.Join(t.TempDir(), "subnet.env")
	if UpToDate(path, f) {
		t.Error("a missing file counts as up to date")
	}
	if err := Write(path, f); err != nil {
		t.Fatal(err)
	}
	if !UpToDate(path, f) {
		t.Error("a file just written does not count as up to date")
	}
	if g := (File{Entries: f.Entries, MTU: 1400}); UpToDate(path, g) {
		t.Error("a file with another MTU counts as up to date")
	}
	if err := os.WriteFile(path, append(f.Marshal(), '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	if UpToDate(path, f) {
		t.Error("an altered file counts as up to date")
	}
}
