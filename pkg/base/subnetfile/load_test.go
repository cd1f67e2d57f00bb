// SPDX-License-Identifier: Apache-2.0

package subnetfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLoadAfterWrite(t *testing.T) {
	v4, v6 := entry("10.5.0.0/16", "10.5.4.0/24"), entry("fd00:10:5::/48", "fd00:10:5:47::/64")
	for _, want := range []File{
		{Entries: []Entry{v4}, MTU: 1450},
		{Entries: []Entry{v6}, MTU: 1430, IPMasq: true},
		{Entries: []Entry{v4, v6}, MTU: 65535, IPMasq: true},
	} {
		path := filepath.Join(t.TempDir(), "subnet.env")
		if err := Write(path, want); err != nil {
			t.Fatal(err)
		}
		got, err := Load(path)
		if diff := cmp.Diff(want, got, comparePrefixes); err != nil || diff != "" {
			t.Errorf("Load: %v (-want +got):\n%s", err, diff)
		}
	}
}

func TestLoadRefusesIncompleteFile(t *testing.T) {
	const subnet = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\n"
	for in, want := range map[string]string{
		"": "no subnet in it",
		"FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n":                                                                 "no subnet in it",
		"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_MTU=1450":                                                           `want one IPv4 prefix each in FLANNEL_NETWORK and FLANNEL_SUBNET, have "10.5.0.0/16" and ""`,
		subnet + "FLANNEL_IPV6_NETWORK=x\nFLANNEL_IPV6_SUBNET=fd00::1/64":                                         `have "x" and "fd00::1/64"`,
		"FLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\nFLANNEL_MTU=1\nFLANNEL_IPMASQ=true": `have "10.5.0.0/16,10.6.0.0/16"`,
		subnet:                       `FLANNEL_MTU is "": want 1 to 65535 bytes`,
		subnet + "FLANNEL_MTU=0":     `FLANNEL_MTU is "0"`,
		subnet + "FLANNEL_MTU=65536": `FLANNEL_MTU is "65536"`,
		subnet + "FLANNEL_MTU=big":   `FLANNEL_MTU is "big"`,
		subnet + "FLANNEL_MTU=1450":  `FLANNEL_IPMASQ is "": want true or false`,
		subnet + "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=maybe\n": `FLANNEL_IPMASQ is "maybe"`,
	} {
		path := filepath.Join(t.TempDir(), "subnet.env")
		if err := os.WriteFile(path, []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("Load of %q: %v, want %q", in, err, want)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Load of a missing file: %v", err)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.4.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := load(in)
		if err != nil {
			return
		}
		again, err := load(got.Marshal())
		if diff := cmp.Diff(got, again, comparePrefixes); err != nil || diff != "" {
			t.Errorf("%q is loaded, written and loaded as another: %v\n%s", in, err, diff)
		}
	})
}
