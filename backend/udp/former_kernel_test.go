// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"testing"

	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestKernelFormerTable checks that the table of an earlier version is found and removed, and not
// that of another program. TestVMUDPFormerKernelPath has the other objects.
func TestKernelFormerTable(t *testing.T) {
	ctx, l := oneHost(t)
	h := l.Host(1)
	b := &Backend{env: backendtest.Env(1500, prefix.IPv4), config: defaults()}
	former := b.leftovers()[0]
	tables := func() string {
		out, err := h.Exec(ctx, "nft", "list", "tables")
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if out, err := h.Exec(ctx, "sh", "-ec", "nft add table ip other; nft add table ip6 flannel-udp"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := tables()
	if out, err := h.Exec(ctx, "nft", "add table ip flannel-udp; add chain ip flannel-udp input { type filter hook input priority 0; }; add rule ip flannel-udp input udp dport 8285 drop"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	for _, want := range []bool{true, false} {
		err := h.Do(ctx, func() error {
			present, err := former.Present()
			if present != want {
				t.Errorf("%s is present: %v, want %v", former, present, want)
			}
			if err != nil {
				return err
			}
			return former.Remove(ctx)
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	if left := tables(); left != before {
		t.Errorf("tables %q are left, want %q", left, before)
	}
	b.env.Network = "blue"
	if all := b.leftovers(); len(all) > 0 {
		t.Errorf("with several networks: %v, want none, because another daemon may use them", all)
	}
}
