// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
)

// PublicIPs implements subnet.Manager: it returns the addresses in the annotations
// node-public-ip and node-public-ipv6 of this host's Node, which replace the values of the flags. It
// omits and reports an address that cannot be used.
func (m *Manager) PublicIPs(ctx context.Context) ([]netip.Addr, error) {
	s, err := m.ownAtStart(ctx, m.readOwn)
	if err != nil {
		return nil, err
	}

	var addrs []netip.Addr
	for _, f := range families {
		a, err := m.given(s, f, annotation.NodePublicIP.In(f))
		if err != nil {
			m.reportIgnored(ctx, err)
		}
		if a.IsValid() {
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

// ownAtStart returns this host's Node as read returns it. It repeats read while that may help.
func (m *Manager) ownAtStart(ctx context.Context, read func(context.Context) (*ownNode, error)) (s *ownNode, err error) {
	err = m.retry(ctx, starting, func() (err error) {
		s, err = read(ctx)
		return err
	})
	return s, err
}

// NodeIPs implements subnet.Manager.
func (m *Manager) NodeIPs() []netip.Addr {
	if s := m.seen.Load(); s != nil {
		return s.internal
	}
	return nil
}

// Location implements subnet.Manager: it returns the value of the label Config.LocationLabel
// of this host's Node. If the value is not the name of a location, Location logs it and returns "".
func (m *Manager) Location(ctx context.Context) (string, error) {
	s, err := m.ownAtStart(ctx, m.recent)
	if err != nil {
		return "", err
	}
	m.location.Store(&s.location)
	if subnet.CheckLocation(s.location) == nil {
		return s.location, nil
	}
	klog.FromContext(ctx).Error(nil, "this node has no location, because its label does not contain the name of one", "node", *m.name.Load(), "label", m.cfg.LocationLabel, "value", subnet.Shorten(s.location))
	return "", nil
}

// Recall returns the readable part of the claim that this host's Node publishes. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, _ subnet.Claim) (subnet.Claim, error) {
	s, err := m.ownAtStart(ctx, m.recent)
	if err != nil {
		return subnet.Claim{}, err
	}
	c, _ := m.keys.Decode(s.published(), s.cidrs, nil) // values that cannot be read are published again
	return c, nil
}
