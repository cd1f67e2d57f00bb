// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// ownNode is a Node as it was at one moment, usually the own one.
type ownNode struct {
	exists   bool
	uid      string
	created  int64
	notes    [annotation.Count]annotation.Note
	location string // value of the label Config.LocationLabel
	cidrs    []netip.Prefix
	cidrsErr error
	internal []netip.Addr // the first InternalIP of each family
	network  string       // status of the condition wire.NetworkUnavailable, which keeps pods away from a node without a network; empty: no such condition
	version  int64        // the revision of the store at which the Node changed last
	revision int64        // the revision of the store at that moment
	read     time.Time
	ready    bool // the network was ready at that moment
}

var families = []prefix.Family{prefix.IPv4, prefix.IPv6}

func newOwnNode(n *wire.Node, revision int64) *ownNode {
	s := &ownNode{
		exists: true, uid: string(n.UID), created: n.Created, network: string(n.Network.Status),
		version: n.Revision, revision: revision, read: time.Now(), location: string(n.Label),
	}

	for i, text := range n.Annotations {
		s.notes[i] = annotation.Note{Text: string(text), Present: text != nil}
	}
	s.cidrs, s.cidrsErr = podCIDRs(n)

	for _, text := range n.InternalIPs {
		a, err := netip.ParseAddr(string(text))
		same := func(b netip.Addr) bool { return a.Is4() == b.Is4() }
		if err == nil && !slices.ContainsFunc(s.internal, same) {
			s.internal = append(s.internal, a)
		}
	}
	return s
}

// published returns the annotations of the Node, without those that only administrators write.
func (s *ownNode) published() annotation.Notes {
	return annotation.Notes(s.notes[:annotation.Published])
}

// parsePublic parses an address that an administrator gives this node. own is the subnet of this node,
// and invalid if there is none yet. parsePublic refuses addresses that peers refuse: an address that no
// host can have, and an address in own.
func parsePublic(f prefix.Family, own netip.Prefix, text string) (netip.Addr, error) {
	a, err := subnet.ParseAddr(f, text)
	switch {
	case err != nil:
		return a, err
	case !subnet.IsHost(a):
		return a, fmt.Errorf("%q is not an %s address that peers can reach", text, f)
	case own.Contains(a):
		return a, fmt.Errorf("%q lies in the node's own subnet %s", text, own)
	}
	return a, nil
}

// endpointsOn returns the endpoints of c on cidrs, the podCIDRs of this host's Node: one for each
// network of the configuration. It returns an error if a network has no podCIDR inside of it, or c
// has no public address of its family.
func endpointsOn(cfg subnet.Config, c subnet.Claim, cidrs []netip.Prefix) ([]subnet.Endpoint, error) {
	var es []subnet.Endpoint
	for _, n := range cfg.Networks {
		f := n.Family()
		cidr, ok := prefix.OfFamily(cidrs, f)
		e, public := c.Endpoint(f)
		switch {
		case !ok:
			err := fmt.Errorf("%s is enabled with Network %s, but this node has no %s podCIDR, only %v", f, n.Prefix, f, cidrs)
			return nil, &subnet.FamilyError{Family: f, Err: err}
		case !prefix.Contains(n.Prefix, cidr):
			return nil, fmt.Errorf("podCIDR %s of this node lies outside the configured Network %s", cidr, n.Prefix)
		case !public || !e.PublicIP.IsValid():
			return nil, fmt.Errorf("%s is enabled but this node has no public %s address", f, f)
		}
		e.Subnet = cidr
		es = append(es, e)
	}
	return es, nil
}
