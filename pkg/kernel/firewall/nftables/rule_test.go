// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"testing"

	"github.com/google/nftables/expr"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

func TestEncodeAndDecode(t *testing.T) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, c := range firewall.Chains() {
			for _, r := range firewalltest.Rules(firewall.TableOf(f, firewalltest.Guarded()), c) {
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

// TestDecodeRefuses checks that rules with more or other expressions than those of flannel are not taken for its own.
func TestDecodeRefuses(t *testing.T) {
	raw := func(all ...expr.Any) []byte {
		t.Helper()
		b, err := marshal(prefix.IPv4, all)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	source := &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
	masked := func(mask ...byte) *expr.Bitwise {
		return &expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 4, Mask: mask, Xor: make([]byte, 4)}
	}
	address := func(op expr.CmpOp) *expr.Cmp { return &expr.Cmp{Op: op, Register: register, Data: []byte{10, 0, 0, 0}} }
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	for name, tt := range map[string]struct {
		raw []byte
		ok  bool
	}{
		"rule of flannel":        {raw(source, masked(255, 0, 0, 0), address(expr.CmpOpEq), &expr.Counter{}, accept), true},
		"mask with a hole":       {raw(source, masked(255, 0, 255, 0), address(expr.CmpOpEq), accept), false},
		"expression after":       {raw(source, address(expr.CmpOpEq), accept, &expr.Counter{}), false},
		"no verdict":             {raw(source, address(expr.CmpOpEq)), false},
		"less than":              {raw(source, address(expr.CmpOpLt), accept), false},
		"two sources":            {raw(source, address(expr.CmpOpEq), source, address(expr.CmpOpEq), accept), false},
		"nothing compared":       {raw(source, accept), false},
		"port without protocol":  {raw(&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: []byte{1, 2}}, accept), false},
		"jump":                   {raw(source, address(expr.CmpOpEq), &expr.Verdict{Kind: expr.VerdictJump, Chain: "x"}), false},
		"value in the register":  {raw(source, address(expr.CmpOpEq), &expr.Immediate{Register: register, Data: []byte{1, 0, 0, 0}}), false},
		"other offset":           {raw(&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 8, Len: 4}, address(expr.CmpOpEq), accept), false},
		"masquerade with a port": {raw(source, address(expr.CmpOpEq), &expr.Masq{ToPorts: true, RegProtoMin: register}), false},
	} {
		if r, ok := decode(prefix.IPv4, tt.raw); ok != tt.ok {
			t.Errorf("%s: %+v, %v, want %v", name, r, ok, tt.ok)
		}
	}
}

// FuzzDecode checks that a rule that decode understands is the same after encode and
// another decode.
func FuzzDecode(f *testing.F) {
	for _, c := range firewall.Chains() {
		for _, r := range firewalltest.Rules(firewall.TableOf(prefix.IPv4, firewalltest.Guarded()), c) {
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
