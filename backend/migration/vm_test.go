// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/subnet"
)

// TestVMUsable checks, on a kernel with all modules, that each next backend that needs a module
// is usable and has a claim, and that no device is left.
func TestVMUsable(t *testing.T) {
	k, err := linux.Open(linux.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	for _, to := range []string{`{"Type":"ipip"}`, `{"Type":"wireguard","Implementation":"kernel"}`} {
		env := newEnv(nil, hostGW, to)
		env.Kernel, env.StateDir = k, t.TempDir()
		env.Config.Networks = append(env.Config.Networks, subnet.Network{Prefix: netip.MustParsePrefix("fd00:5::/48")})
		env.Underlay.Addrs = append(env.Underlay.Addrs, env.Underlay.Addrs[0])
		env.Underlay.Addrs[1].Local, env.Underlay.Addrs[1].Public = netip.MustParseAddr("fd00:77::1"), netip.MustParseAddr("fd00:77::1")
		b, err := newBackend(t, env)
		if err != nil {
			t.Fatal(err)
		}
		before := deviceNames(t)
		if err := backend.Usable(t.Context(), b.(*Backend).parts[next].be); err != nil {
			t.Errorf("%s: %v", to, err)
		}
		claim, err := b.Claim(t.Context(), subnet.Claim{})
		if err != nil || claim.NextType == "" {
			t.Errorf("%s: %+v, %v, want data for it", to, claim, err)
		}
		left := slices.DeleteFunc(deviceNames(t), func(name string) bool {
			// The modules themselves create these two.
			return slices.Contains([]string{"tunl0", "ip6tnl0"}, name) || slices.Contains(before, name)
		})
		if len(left) > 0 {
			t.Errorf("%s: devices %q are left", to, left)
		}
	}
}

func deviceNames(t *testing.T) (names []string) {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names
}
