// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Target is the effect of a rule on packets. Name is the chain that gets them, or a target
// of iptables, such as DROP. Name is empty if the rule has neither. Always is set if the
// rule has no condition. Hidden is set if the rule has a condition that iptables may not
// print.
type Target struct {
	Name           string
	Always, Hidden bool
}

// Targets returns one Target for each rule of a chain, in their order. It includes rules of
// other programs, and rules that iptables hides or prints without their conditions. exists
// is false if there is no such chain.
func Targets(f prefix.Family, table, chain string) (targets []Target, exists bool, err error) {
	c, err := dial(f)
	if err != nil {
		return nil, false, err
	}
	defer c.close()

	for range attempts {
		if targets, exists, err = c.targets(table, chain); !errors.Is(err, errRaced) {
			break
		}
	}
	return targets, exists, err
}

func (c *conn) targets(table, chain string) (targets []Target, exists bool, err error) {
	attrs := attributes(func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, table)
		ae.String(unix.NFTA_CHAIN_NAME, chain)
	})

	err = c.get(unix.NFT_MSG_GETCHAIN, 0, attrs, func(*netlink.AttributeDecoder) error {
		exists = true
		return nil
	})
	if err != nil || !exists {
		return nil, false, err
	}
	err = c.eachRule(table, chain, func(r ruleState) { targets = append(targets, targetOf(c.family, r.raw)) })
	return targets, true, err
}

// targetOf takes an unknown expression as a condition.
func targetOf(f prefix.Family, raw []byte) Target {
	l := Target{Always: true}
	err := eachExpression(raw, func(name string, data []byte) bool {
		switch name {
		case "counter", "log":
		case "match": // a match of iptables
			l.Always = l.Always && text(attribute(data, unix.NFTA_MATCH_NAME)) == "comment"
		case "target":
			l.Name = text(attribute(data, unix.NFTA_TARGET_NAME))
		case "reject":
			l.Name = "REJECT"
		case "immediate":
			target, ok := verdictTarget(data)
			l.Name = target
			l.Always = l.Always && ok
		default:
			l.Always = false
			l.Hidden = l.Hidden || !printed(f, name, data)
		}
		return true
	})
	l.Always = l.Always && err == nil
	return l
}

// printed reports whether every version of iptables prints the expression. Versions up to
// 1.8.7 silently leave out expressions that they have no option for.
func printed(f prefix.Family, name string, data []byte) bool {
	switch name {
	case "cmp", "bitwise", "masq":
		return true // these work on a value that another expression has loaded, or are a target
	case "meta":
		var e expr.Meta
		return expr.Unmarshal(protocol(f), data, &e) == nil && slices.Contains([]expr.MetaKey{
			expr.MetaKeyIIF, expr.MetaKeyOIF, expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.MetaKeyL4PROTO, expr.MetaKeyMARK,
		}, e.Key)
	case "payload":
		var e expr.Payload
		h := headerOf(f)
		return expr.Unmarshal(protocol(f), data, &e) == nil && e.Base == expr.PayloadBaseNetworkHeader &&
			slices.Contains([]uint32{h.src, h.dst, h.protocol}, e.Offset)
	}
	return false
}

// verdictTarget parses the data of an immediate expression: a jump, a goto, or another verdict.
func verdictTarget(data []byte) (target string, ok bool) {
	v := attribute(attribute(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
	code := attribute(v, unix.NFTA_VERDICT_CODE)
	if len(code) != 4 {
		return "", false // the expression loads a register
	}

	switch int32(binary.BigEndian.Uint32(code)) {
	case nfDrop:
		return "DROP", true
	case nfAccept:
		return "ACCEPT", true
	case unix.NFT_RETURN:
		return "RETURN", true
	case unix.NFT_JUMP, unix.NFT_GOTO:
		return text(attribute(v, unix.NFTA_VERDICT_CHAIN)), true
	}
	return "", false
}

func text(b []byte) string { return strings.TrimRight(string(b), "\x00") }
