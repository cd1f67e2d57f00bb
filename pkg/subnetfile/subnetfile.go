// Package subnetfile writes and reads the environment file that tells the CNI
// plugin, container engines and systemd units which subnet this host has.
package subnetfile

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"flanneld/pkg/prefix"
)

// Modes of what Write creates. An existing file keeps its own.
const (
	dirMode  = 0o755
	fileMode = 0o644
)

// Entry is the network and this host's subnet of it, in one address family.
type Entry struct {
	Network netip.Prefix
	Subnet  netip.Prefix
}

// File is the content of a subnet file.
type File struct {
	Entries []Entry // one for each enabled family, IPv4 first
	MTU     int     // bytes; what every path carries
	IPMasq  bool    // whether flanneld masquerades
}

// keys are the names of one family's two variables.
type keys struct{ network, subnet string }

func keysOf(f prefix.Family) keys {
	if f == prefix.IPv4 {
		return keys{"FLANNEL_NETWORK", "FLANNEL_SUBNET"}
	}
	return keys{"FLANNEL_IPV6_NETWORK", "FLANNEL_IPV6_SUBNET"}
}

// Marshal renders f. A subnet stands there with its first address instead of
// its base: that is the address of the bridge which consumers set up.
func (f File) Marshal() []byte {
	var b bytes.Buffer
	for _, e := range f.Entries {
		k := keysOf(prefix.FamilyOf(e.Subnet.Addr()))
		fmt.Fprintf(&b, "%s=%s\n", k.network, e.Network.Masked())
		fmt.Fprintf(&b, "%s=%s\n", k.subnet, netip.PrefixFrom(prefix.First(e.Subnet), e.Subnet.Bits()))
	}
	fmt.Fprintf(&b, "%s=%d\n", keyMTU, f.MTU)
	fmt.Fprintf(&b, "%s=%t\n", keyIPMasq, f.IPMasq)
	return b.Bytes()
}

// Write replaces the file at path by f, so that a reader sees the old content
// or the new and never a part. It creates the directory if that is missing.
func Write(path string, f File) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("create directory of subnet file: %w", err)
	}
	// The temporary file lies beside the target: elsewhere a rename may cross
	// into another file system, or meet a directory that is not writable.
	err := renameio.WriteFile(path, f.Marshal(), fileMode,
		renameio.WithTempDir(dir), renameio.IgnoreUmask(), renameio.WithExistingPermissions())
	if err != nil {
		return fmt.Errorf("write subnet file %s: %w", path, err)
	}
	return nil
}

// UpToDate reports whether the file at path says exactly what f says. A file
// that is missing or cannot be read does not.
func UpToDate(path string, f File) bool {
	have, err := readBounded(path)
	return err == nil && bytes.Equal(have, f.Marshal())
}
