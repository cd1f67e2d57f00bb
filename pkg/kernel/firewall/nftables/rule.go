// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"encoding/binary"
	"math"
	"net"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// header contains the offsets of the addresses and of the protocol in a family's packet
// header, and the length of an address, in bytes.
type header struct{ src, dst, protocol, length uint32 }

var headers = map[prefix.Family]header{
	prefix.IPv4: {src: 12, dst: 16, protocol: 9, length: 4}, prefix.IPv6: {src: 8, dst: 24, protocol: 6, length: 16},
}

const register = unix.NFT_REG_1

// encode returns the attribute NFTA_RULE_EXPRESSIONS.
func encode(f prefix.Family, r firewall.Rule) ([]byte, error) {
	var exprs []expr.Any
	if r.Marked {
		mark := binary.NativeEndian.AppendUint32(nil, firewall.Mark)
		exprs = append(exprs,
			&expr.Meta{Key: expr.MetaKeyMARK, Register: register},
			&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 4, Mask: mark, Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: mark},
		)
	}

	h := headers[f]
	exprs = append(exprs, match(h.src, h.length, r.Src)...)
	exprs = append(exprs, match(h.dst, h.length, r.Dst)...)
	exprs = append(exprs, carries(r.Payload)...)
	kinds := map[firewall.Action]expr.VerdictKind{firewall.Return: expr.VerdictReturn, firewall.Accept: expr.VerdictAccept, firewall.Drop: expr.VerdictDrop}
	if kind, ok := kinds[r.Action]; ok {
		exprs = append(exprs, &expr.Verdict{Kind: kind})
	} else {
		exprs = append(exprs, &expr.Masq{FullyRandom: r.Action == firewall.MasqueradeRandom})
	}
	return marshal(f, exprs)
}

func marshal(f prefix.Family, exprs []expr.Any) ([]byte, error) {
	var list []netlink.Attribute
	for _, e := range exprs {
		b, err := expr.Marshal(protocols[f], e)
		if err != nil {
			return nil, err
		}
		list = append(list, netlink.Attribute{Type: unix.NLA_F_NESTED | unix.NFTA_LIST_ELEM, Data: b})
	}
	return netlink.MarshalAttributes(list)
}

func match(offset, length uint32, m firewall.Match) []expr.Any {
	if !m.Prefix.IsValid() {
		return nil
	}

	exprs := []expr.Any{&expr.Payload{
		DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length,
	}}
	if !m.Prefix.IsSingleIP() {
		exprs = append(exprs, &expr.Bitwise{
			SourceRegister: register, DestRegister: register, Len: length,
			Mask: net.CIDRMask(m.Prefix.Bits(), m.Prefix.Addr().BitLen()), Xor: make([]byte, length),
		})
	}

	op := map[bool]expr.CmpOp{false: expr.CmpOpEq, true: expr.CmpOpNeq}[m.Not]
	return append(exprs, &expr.Cmp{Op: op, Register: register, Data: m.Prefix.Addr().AsSlice()})
}

// Offset and length in bytes of the destination port in a UDP header.
const portOffset, portLength = 2, 2

func carries(p firewall.Payload) []expr.Any {
	var exprs []expr.Any
	if p.Protocol != 0 {
		exprs = append(exprs, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register},
			&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: []byte{p.Protocol}})
	}
	if p.Port != 0 {
		exprs = append(exprs, &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: portOffset, Len: portLength},
			&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: binary.BigEndian.AppendUint16(nil, p.Port)})
	}
	return exprs
}

// decode reports whether flannel creates such a rule, in any of the forms in which nft writes it.
func decode(f prefix.Family, raw []byte) (r firewall.Rule, ok bool) {
	all, err := expressions(raw)
	if err != nil {
		return r, false
	}

	var loads *expression // whose value the next comparison is about
	var mask []byte       // of the value; nil for all of it
	for i, e := range all {
		fits := false
		switch e.name {
		case "counter": // it has no effect on packets
			fits = true
		case "immediate", "masq":
			r.Action = e.action(f)
			return r, r.Action != 0 && loads == nil && i == len(all)-1
		case "meta", "payload":
			fits = loads == nil
			loads = &all[i]
		case "bitwise":
			var b expr.Bitwise
			fits = loads != nil && mask == nil && e.read(f, &b) && !bytes.ContainsFunc(b.Xor, func(b rune) bool { return b != 0 })
			mask = b.Mask
		case "cmp":
			var c expr.Cmp
			fits = loads != nil && e.read(f, &c) && (c.Op == expr.CmpOpEq || c.Op == expr.CmpOpNeq) && loads.addTo(&r, f, c, mask)
			loads = nil
			mask = nil
		}
		if !fits {
			return r, false
		}
	}
	return r, false
}

// expression is one of the expressions of a rule, with its attributes.
type expression struct {
	name string
	data []byte
}

func expressions(raw []byte) (all []expression, err error) {
	list, err := netlink.UnmarshalAttributes(raw)
	for _, one := range list {
		a, failed := parse(one.Data)
		all = append(all, expression{a.text(unix.NFTA_EXPR_NAME), a[unix.NFTA_EXPR_DATA]})
		err = oneline.Join(err, failed)
	}
	return all, err
}

func (e expression) attrs() attrs {
	a, _ := parse(e.data)
	return a
}

func (e expression) read(f prefix.Family, into expr.Any) bool {
	return expr.Unmarshal(protocols[f], e.data, into) == nil
}

// addTo adds to r the comparison of what e loads, or of the part of it in mask. It returns false if flannel makes no such one.
func (e expression) addTo(r *firewall.Rule, f prefix.Family, c expr.Cmp, mask []byte) bool {
	equal := c.Op == expr.CmpOpEq
	if e.name == "meta" {
		var m expr.Meta
		switch {
		case !e.read(f, &m) || m.SourceRegister || !equal:
			return false
		case m.Key == expr.MetaKeyMARK:
			mark := binary.NativeEndian.AppendUint32(nil, firewall.Mark)
			r.Marked = true
			return bytes.Equal(c.Data, mark) && bytes.Equal(mask, mark)
		case m.Key != expr.MetaKeyL4PROTO || mask != nil || len(c.Data) != 1 || r.Payload != firewall.Payload{}:
			return false
		}
		r.Payload.Protocol = c.Data[0]
		return true
	}

	var p expr.Payload
	if !e.read(f, &p) || len(c.Data) != int(p.Len) {
		return false
	}
	if p.Base == expr.PayloadBaseTransportHeader { // the destination port of UDP, after a comparison of the protocol
		port := p.Offset == portOffset && p.Len == portLength && r.Payload == firewall.Payload{Protocol: firewall.UDP}
		if !port || !equal || mask != nil {
			return false
		}
		r.Payload.Port = binary.BigEndian.Uint16(c.Data)
		return true
	}

	h := headers[f]
	if p.Base != expr.PayloadBaseNetworkHeader || p.Len > h.length {
		return false
	}
	ones := 8 * int(p.Len)
	if mask != nil {
		var bits int                                                    // 0 if zeros have ones after them
		if ones, bits = net.IPMask(mask).Size(); bits != 8*int(p.Len) { //nolint:forbidigo // net/netip has no masks
			return false
		}
	}

	to := map[uint32]*firewall.Match{h.src: &r.Src, h.dst: &r.Dst}[p.Offset]
	if to == nil || to.Prefix.IsValid() {
		return false
	}
	address := make([]byte, h.length)
	copy(address, c.Data)
	a, _ := netip.AddrFromSlice(address)
	*to = firewall.Match{Prefix: netip.PrefixFrom(a, ones).Masked(), Not: !equal}
	return true
}

// action returns 0 if flannel creates no rule that ends like this.
func (e expression) action(f prefix.Family) firewall.Action {
	if e.name == "immediate" {
		code, _ := e.verdict()
		return verdicts[code].action
	}
	var m expr.Masq
	switch {
	case !e.read(f, &m) || m.Random || m.Persistent || m.ToPorts:
		return 0
	case m.FullyRandom:
		return firewall.MasqueradeRandom
	}
	return firewall.Masquerade
}

// The verdicts of linux/netfilter.h, and none.
const (
	nfDrop   = 0
	nfAccept = 1
	noCode   = math.MaxInt32
)

// verdicts contains the verdicts that do not name a chain, with their names in iptables.
var verdicts = map[int32]struct {
	action firewall.Action
	target string
}{
	unix.NFT_RETURN: {firewall.Return, "RETURN"}, nfAccept: {firewall.Accept, "ACCEPT"}, nfDrop: {firewall.Drop, "DROP"},
}

// verdict returns the verdict of an immediate expression, and the chain of a jump or goto. The code is noCode if
// the expression loads a register.
func (e expression) verdict() (code int32, chain string) {
	v := e.attrs().in(unix.NFTA_IMMEDIATE_DATA).in(unix.NFTA_DATA_VERDICT)
	if v[unix.NFTA_VERDICT_CODE] == nil {
		return noCode, ""
	}
	return int32(uint32(v.number(unix.NFTA_VERDICT_CODE))), v.text(unix.NFTA_VERDICT_CHAIN)
}
