// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// header contains the offsets of the addresses and of the protocol in a family's packet
// header, and the length of an address, in bytes.
type header struct{ src, dst, protocol, length uint32 }

func headerOf(f prefix.Family) header {
	if f == prefix.IPv4 {
		return header{src: 12, dst: 16, protocol: 9, length: 4}
	}
	return header{src: 8, dst: 24, protocol: 6, length: 16}
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

	h := headerOf(f)
	exprs = append(exprs, match(h.src, h.length, r.Src)...)
	exprs = append(exprs, match(h.dst, h.length, r.Dst)...)
	exprs = append(exprs, carries(r.Payload)...)
	switch r.Action {
	case firewall.Return:
		exprs = append(exprs, &expr.Verdict{Kind: expr.VerdictReturn})
	case firewall.Accept:
		exprs = append(exprs, &expr.Verdict{Kind: expr.VerdictAccept})
	case firewall.Drop:
		exprs = append(exprs, &expr.Verdict{Kind: expr.VerdictDrop})
	case firewall.Masquerade, firewall.MasqueradeRandom:
		exprs = append(exprs, &expr.Masq{FullyRandom: r.Action == firewall.MasqueradeRandom})
	}

	var list []netlink.Attribute
	for _, e := range exprs {
		b, err := expr.Marshal(protocol(f), e)
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
			Mask: mask(m.Prefix.Bits(), int(length)), Xor: make([]byte, length),
		})
	}

	op := expr.CmpOpEq
	if m.Not {
		op = expr.CmpOpNeq
	}
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

// mask returns a netmask of length bytes.
func mask(ones, length int) []byte {
	m := make([]byte, length)
	for i := range m {
		m[i] = byte(^(0xff >> min(max(ones-8*i, 0), 8)))
	}
	return m
}

// decode reports whether flannel creates such a rule, in any of the forms in which nft writes it.
func decode(f prefix.Family, raw []byte) (r firewall.Rule, ok bool) {
	d := decoding{family: f}
	fits := true
	err := eachExpression(raw, func(name string, data []byte) bool {
		fits = d.take(name, data)
		return fits
	})
	return d.rule, err == nil && fits && d.rule.Action != 0 && d.idle()
}

// eachExpression calls take with each expression of a rule, until take returns false.
func eachExpression(raw []byte, take func(name string, data []byte) bool) error {
	ad, err := decoder(raw)
	if err != nil {
		return err
	}

	for ad.Next() {
		var name string
		var data []byte
		ad.Nested(func(e *netlink.AttributeDecoder) error {
			for e.Next() {
				switch e.Type() {
				case unix.NFTA_EXPR_NAME:
					name = e.String()
				case unix.NFTA_EXPR_DATA:
					data = e.Bytes()
				}
			}
			return nil
		})
		if !take(name, data) {
			return nil
		}
	}
	return ad.Err()
}

// decoding contains the rule that the expressions parsed so far describe, and what they have
// loaded into the register.
type decoding struct {
	family   prefix.Family
	rule     firewall.Rule
	payload  *expr.Payload // loaded into the register
	mark     bool          // loaded into the register
	protocol bool          // loaded into the register
	mask     []byte        // netmask applied to the register; nil if none
}

// idle reports whether the register is free. A rule must compare a value before it can load another
// one or end.
func (d *decoding) idle() bool { return d.payload == nil && !d.mark && !d.protocol }

// take returns false if flannel creates no rule with this expression in this place.
func (d *decoding) take(name string, data []byte) bool {
	if d.rule.Action != 0 {
		return false // the rule has ended already
	}

	read := func(e expr.Any) bool { return expr.Unmarshal(protocol(d.family), data, e) == nil }
	idle := d.idle()
	switch name {
	case "meta":
		var e expr.Meta
		if !idle || !read(&e) || e.SourceRegister {
			return false
		}
		d.mark = e.Key == expr.MetaKeyMARK
		d.protocol = e.Key == expr.MetaKeyL4PROTO
		return d.mark || d.protocol

	case "payload":
		var e expr.Payload
		d.payload = &e
		return idle && read(&e) && (e.Base == expr.PayloadBaseNetworkHeader || d.readsPort(e))

	case "bitwise":
		var e expr.Bitwise
		if idle || d.mask != nil || !read(&e) || bytes.ContainsFunc(e.Xor, func(b rune) bool { return b != 0 }) {
			return false
		}
		d.mask = e.Mask
		return true

	case "cmp":
		var e expr.Cmp
		return !idle && read(&e) && d.compare(e)
	case "immediate":
		d.rule.Action = verdict(data)
		return idle && d.rule.Action != 0

	case "masq":
		var e expr.Masq
		if !idle || !read(&e) || e.Random || e.Persistent || e.ToPorts {
			return false
		}
		d.rule.Action = firewall.Masquerade
		if e.FullyRandom {
			d.rule.Action = firewall.MasqueradeRandom
		}
		return true
	case "counter":
		return true // a counter has no effect on packets
	}
	return false
}

// compare adds the comparison of the register with a value to d.rule, if flannel makes such a one.
func (d *decoding) compare(e expr.Cmp) bool {
	if d.mark {
		mark := binary.NativeEndian.AppendUint32(nil, firewall.Mark)
		d.rule.Marked = e.Op == expr.CmpOpEq && bytes.Equal(e.Data, mark) && bytes.Equal(d.mask, mark)
		d.mark = false
		d.mask = nil
		return d.rule.Marked
	}

	equal := e.Op == expr.CmpOpEq && d.mask == nil
	if d.protocol {
		ok := equal && len(e.Data) == 1 && d.rule.Payload == firewall.Payload{}
		if ok {
			d.rule.Payload.Protocol = e.Data[0]
			d.protocol = false
		}
		return ok
	}
	if d.readsPort(*d.payload) {
		ok := equal && len(e.Data) == portLength && d.rule.Payload.Port == 0
		if ok {
			d.rule.Payload.Port = binary.BigEndian.Uint16(e.Data)
			d.payload = nil
		}
		return ok
	}

	h := headerOf(d.family)
	address := make([]byte, h.length)
	ones := 8 * int(d.payload.Len)
	if d.payload.Len > h.length || len(e.Data) != int(d.payload.Len) {
		return false
	}

	copy(address, e.Data)
	if d.mask != nil {
		ones = 0
		for _, b := range d.mask {
			ones += bits.OnesCount8(b)
		}
		if !bytes.Equal(d.mask, mask(ones, int(d.payload.Len))) {
			return false
		}
	}

	a, _ := netip.AddrFromSlice(address)
	m := firewall.Match{Prefix: netip.PrefixFrom(a, ones).Masked(), Not: e.Op == expr.CmpOpNeq}
	to := &d.rule.Src
	if d.payload.Offset == h.dst {
		to = &d.rule.Dst
	}

	ok := (e.Op == expr.CmpOpEq || m.Not) && (d.payload.Offset == h.src || d.payload.Offset == h.dst) && !to.Prefix.IsValid()
	*to = m
	d.payload = nil
	d.mask = nil
	return ok
}

// readsPort reports whether e loads the destination port of UDP, after a comparison of the protocol.
func (d *decoding) readsPort(e expr.Payload) bool {
	return e.Base == expr.PayloadBaseTransportHeader && e.Offset == portOffset && e.Len == portLength && d.rule.Payload.Protocol == firewall.UDP
}

// verdict parses the data of an immediate expression. Not all verdicts have an Action.
func verdict(data []byte) (a firewall.Action) {
	for _, nested := range []uint16{unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CODE} {
		data = attribute(data, nested)
	}
	if len(data) != 4 {
		return 0
	}

	switch int32(binary.BigEndian.Uint32(data)) {
	case unix.NFT_RETURN:
		return firewall.Return
	case nfAccept:
		return firewall.Accept
	case nfDrop:
		return firewall.Drop
	}
	return 0
}

// The verdicts of linux/netfilter.h.
const (
	nfDrop   = 0
	nfAccept = 1
)

func attribute(b []byte, typ uint16) []byte {
	ad, err := decoder(b)
	if err != nil {
		return nil
	}
	for ad.Next() {
		if ad.Type() == typ {
			return ad.Bytes()
		}
	}
	return nil
}
