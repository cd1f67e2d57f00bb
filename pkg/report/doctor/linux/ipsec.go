// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// policies returns the IPsec policies about packets without a mark, in the order in which the kernel looks them up.
func policies() ([]doctor.Policy, error) {
	var all []netlink.XfrmPolicy
	var states []netlink.XfrmState
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := dump(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(family) })
		if errors.Is(err, unix.EPROTONOSUPPORT) { // the kernel has no IPsec
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
		if len(list) == 0 {
			continue
		}
		of, err := dump(func() ([]netlink.XfrmState, error) { return netlink.XfrmStateList(family) })
		if err != nil {
			return nil, err
		}
		states = append(states, of...)
	}

	slices.SortStableFunc(all, func(a, b netlink.XfrmPolicy) int { return a.Priority - b.Priority })
	var found []doctor.Policy
	for _, p := range all {
		direction := map[netlink.Dir]string{netlink.XFRM_DIR_OUT: "out", netlink.XFRM_DIR_IN: "in", netlink.XFRM_DIR_FWD: "fwd"}[p.Dir]
		if direction == "" || p.Mark != nil || p.Ifid != 0 || p.Ifindex != 0 || p.SrcPort != 0 {
			continue
		}

		missing := func(t netlink.XfrmPolicyTmpl) bool {
			return t.Optional == 0 && !slices.ContainsFunc(states, func(s netlink.XfrmState) bool { return serves(s, t) })
		}
		found = append(found, doctor.Policy{
			Direction: direction, Src: selector(p.Src), Dst: selector(p.Dst), Protocol: int(p.Proto), Port: p.DstPort,
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

func selector(n *net.IPNet) netip.Prefix {
	p, _ := toPrefix(n)
	return p
}
