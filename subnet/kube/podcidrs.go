// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// errNoPodCIDR means that the API has not given the Node its subnets yet.
var errNoPodCIDR = errors.New("no podCIDR assigned yet")

// podCIDRs returns the podCIDRs of a Node that was read in full, at most one for each family, IPv4
// first. It returns errNoPodCIDR if the Node has none yet, and another error if they cannot be
// used.
func podCIDRs(n *wire.Node) ([]netip.Prefix, error) {
	texts := n.PodCIDRs
	switch {
	case len(texts) > len(families):
		return nil, fmt.Errorf("it has %d podCIDRs, want one for each family", len(texts))
	case len(texts) == 0 && len(n.PodCIDR) == 0:
		return nil, errNoPodCIDR
	case len(texts) == 0:
		texts = [][]byte{n.PodCIDR}
	}

	var found []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(string(text))
		if err != nil || p.Addr().Is4In6() || p.Bits() == 0 {
			return nil, fmt.Errorf("podCIDR %q is not a subnet", subnet.Shorten(string(text)))
		}
		if other, ok := prefix.OfFamily(found, prefix.FamilyOf(p.Addr())); ok {
			return nil, fmt.Errorf("it has two podCIDRs of one family, %s and %s", other, p)
		}
		found = append(found, p.Masked())
	}
	slices.SortFunc(found, netip.Prefix.Compare) // IPv4 first
	return found, nil
}
