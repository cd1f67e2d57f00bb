// SPDX-License-Identifier: Apache-2.0

// Package subnetfile reads and writes the environment file that tells the CNI plugin,
// container engines and systemd units the subnet of this host.
package subnetfile

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Modes of the directory and the file that Write creates. An existing file keeps its mode.
const (
	dirMode  = 0o755
	fileMode = 0o644
)

// Entry is the network and this host's subnet in one address family.
type Entry struct {
	Network netip.Prefix
	Subnet  netip.Prefix
}

// File is the content of a subnet file.
type File struct {
	Entries []Entry // one for each enabled family, IPv4 first
	MTU     int     // bytes, the same for every path
	IPMasq  bool    // whether flanneld masquerades
}

// The two variables of the file that do not belong to an address family.
const (
	keyMTU    = "FLANNEL_MTU"
	keyIPMasq = "FLANNEL_IPMASQ"
)

// keys contains the names of the two variables of an address family.
type keys struct{ network, subnet string }

var keysOf = map[prefix.Family]keys{
	prefix.IPv4: {"FLANNEL_NETWORK", "FLANNEL_SUBNET"}, prefix.IPv6: {"FLANNEL_IPV6_NETWORK", "FLANNEL_IPV6_SUBNET"},
}

// Marshal returns the content of the file. It writes a subnet with its first address
// instead of its base, because consumers give that address to their bridge.
func (f File) Marshal() []byte {
	var b bytes.Buffer
	for _, e := range f.Entries {
		k := keysOf[prefix.FamilyOf(e.Subnet.Addr())]
		fmt.Fprintf(&b, "%s=%s\n", k.network, e.Network.Masked())
		fmt.Fprintf(&b, "%s=%s\n", k.subnet, netip.PrefixFrom(prefix.First(e.Subnet), e.Subnet.Bits()))
	}
	fmt.Fprintf(&b, "%s=%d\n", keyMTU, f.MTU)
	fmt.Fprintf(&b, "%s=%t\n", keyIPMasq, f.IPMasq)
	return b.Bytes()
}

// Write replaces the file at path atomically: a reader sees the old content or the new.
// It creates the directory if it does not exist.
func Write(path string, f File) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("create directory of subnet file: %w", err)
	}
	// The temporary file is in the directory of the target: a rename from elsewhere could
	// cross file systems, and another directory may not be writable.
	err := renameio.WriteFile(path, f.Marshal(), fileMode,
		renameio.WithTempDir(dir), renameio.IgnoreUmask(), renameio.WithExistingPermissions())
	if err != nil {
		return fmt.Errorf("write subnet file %s: %w", path, err)
	}
	return nil
}
