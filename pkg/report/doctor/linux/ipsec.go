// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// policies returns the IPsec policies about packets without a mark, in the order in which the kernel looks them up.
func policies() ([]doctor.Policy, error) {
	all, err := dump(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(netlink.FAMILY_ALL) })
	if errors.Is(err, unix.EPROTONOSUPPORT) { // the kernel has no IPsec
		err = nil
	}
	if err != nil || len(all) == 0 {
		return nil, err
	}
	states, err := dump(func() ([]netlink.XfrmState, error) { return netlink.XfrmStateList(netlink.FAMILY_ALL) })
	selectors, failed := selectors()
	if err = cmp.Or(err, failed); err != nil {
		return nil, err
	}

	slices.SortStableFunc(all, func(a, b netlink.XfrmPolicy) int { return a.Priority - b.Priority })
	var found []doctor.Policy
	for _, p := range all {
		direction := map[netlink.Dir]string{netlink.XFRM_DIR_OUT: "out", netlink.XFRM_DIR_IN: "in", netlink.XFRM_DIR_FWD: "fwd"}[p.Dir]
		between, known := selectors[p.Index]
		if !known || direction == "" || p.Mark != nil || p.Ifid != 0 || p.Ifindex != 0 || p.SrcPort != 0 {
			continue
		}

		missing := func(t netlink.XfrmPolicyTmpl) bool {
			return t.Optional == 0 && !slices.ContainsFunc(states, func(s netlink.XfrmState) bool { return serves(s, t) })
		}
		found = append(found, doctor.Policy{
			Direction: direction, Src: between.src, Dst: between.dst, Protocol: int(p.Proto), Port: p.DstPort,
			Blocks: p.Action == netlink.XFRM_POLICY_BLOCK, Lacks: slices.ContainsFunc(p.Tmpls, missing),
		})
	}
	return found, nil
}

// serves reports whether a security association is of the kind that a template of a policy asks for. In transport
// mode the template has no addresses.
func serves(s netlink.XfrmState, t netlink.XfrmPolicyTmpl) bool {
	return s.Spi != 0 && // there is none yet while it is negotiated
		s.Proto == t.Proto && s.Mode == t.Mode && (t.Reqid == 0 || s.Reqid == t.Reqid) &&
		(t.Dst == nil || t.Dst.IsUnspecified() || t.Dst.Equal(s.Dst))
}

type selector struct{ src, dst netip.Prefix }

// selectors returns the selectors of all policies by index. XfrmPolicyList takes fd00:5::/48 for 253.0.0.5/0: the
// library thinks that an address is one of IPv4 if all but its first four bytes are zero (XfrmAddress.ToIP).
func selectors() (map[int]selector, error) {
	messages, err := dump(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(nl.XFRM_MSG_GETPOLICY, unix.NLM_F_DUMP)
		return request.Execute(unix.NETLINK_XFRM, nl.XFRM_MSG_NEWPOLICY)
	})
	all := map[int]selector{}
	for _, m := range messages {
		p := nl.DeserializeXfrmUserpolicyInfo(m)
		prefix := func(a nl.XfrmAddress, bits uint8) netip.Prefix {
			if p.Sel.Family == unix.AF_INET6 {
				return netip.PrefixFrom(netip.AddrFrom16(a), int(bits))
			}
			return netip.PrefixFrom(netip.AddrFrom4([4]byte(a[:])), int(bits))
		}
		all[int(p.Index)] = selector{prefix(p.Sel.Saddr, p.Sel.PrefixlenS), prefix(p.Sel.Daddr, p.Sel.PrefixlenD)}
	}
	return all, err
}
