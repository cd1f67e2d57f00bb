// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

func TestEncodeAndDecode(t *testing.T) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, c := range firewall.Chains() {
			for _, r := range firewalltest.Guarded().Table(f).Rules(c) {
				raw, err := encode(f, r)
				if err != nil {
					t.Fatal(err)
				}
				if got, ok := decode(f, raw); !ok || got != r {
					t.Errorf("%+v is decoded as %+v, %v", r, got, ok)
				}
			}
		}
	}
}

// FuzzDecode checks that a rule that decode understands is the same after encode and
// another decode.
func FuzzDecode(f *testing.F) {
	for _, c := range firewall.Chains() {
		for _, r := range firewalltest.Guarded().Table(prefix.IPv4).Rules(c) {
			raw, err := encode(prefix.IPv4, r)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(raw)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, ok := decode(prefix.IPv4, raw)
		if !ok {
			return
		}
		again, err := encode(prefix.IPv4, r)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := decode(prefix.IPv4, again); !ok || got != r {
			t.Errorf("%+v is decoded as %+v, %v", r, got, ok)
		}
	})
}
