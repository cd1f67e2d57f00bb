// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"errors"
	"slices"

	"github.com/google/nftables/expr"
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
	err = c.get(unix.NFT_MSG_GETCHAIN, 0, ofChain(table, chain), func(attrs) { exists = true })
	if err != nil || !exists {
		return nil, false, err
	}
	err = c.eachRule(table, chain, func(raw []byte) { targets = append(targets, targetOf(c.family, raw)) })
	return targets, true, err
}

// targetOf takes an unknown expression as a condition.
func targetOf(f prefix.Family, raw []byte) Target {
	all, err := expressions(raw)
	l := Target{Always: err == nil}
	for _, e := range all {
		switch e.name {
		case "counter", "log":
		case "match": // a match of iptables
			l.Always = l.Always && e.attrs().text(unix.NFTA_MATCH_NAME) == "comment"
		case "target":
			l.Name = e.attrs().text(unix.NFTA_TARGET_NAME)
		case "reject":
			l.Name = "REJECT"
		case "immediate": // a jump, a goto, or another verdict
			code, chain := e.verdict()
			l.Name = cmp.Or(chain, verdicts[code].target)
			l.Always = l.Always && l.Name != ""
		default:
			l.Always = false
			l.Hidden = l.Hidden || !e.printed(f)
		}
	}
	return l
}

// printed reports whether every version of iptables prints the expression. Versions up to
// 1.8.7 silently leave out expressions that they have no option for.
func (e expression) printed(f prefix.Family) bool {
	switch e.name {
	case "cmp", "bitwise", "masq":
		return true // these work on a value that another expression has loaded, or are a target
	case "meta":
		var m expr.Meta
		return e.read(f, &m) && slices.Contains([]expr.MetaKey{
			expr.MetaKeyIIF, expr.MetaKeyOIF, expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.MetaKeyL4PROTO, expr.MetaKeyMARK,
		}, m.Key)
	case "payload":
		var p expr.Payload
		h := headers[f]
		return e.read(f, &p) && p.Base == expr.PayloadBaseNetworkHeader && slices.Contains([]uint32{h.src, h.dst, h.protocol}, p.Offset)
	}
	return false
}
