// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
)

// PublicIPs implements subnet.AddressSource: it returns the addresses in the annotations
// node-public-ip and node-public-ipv6 of this host's Node, which replace the values of the flags. It
// omits and reports an address that cannot be used.
func (m *Manager) PublicIPs(ctx context.Context) ([]netip.Addr, error) {
	s, err := m.ownAtStart(ctx, m.readOwn)
	if err != nil {
		return nil, err
	}

	var addrs []netip.Addr
	for _, f := range families {
		n := annotation.Of(f).Node
		if s.notes[n].Text == "" {
			continue
		}
		own, _ := prefix.OfFamily(s.cidrs, f)
		a, err := parsePublic(f, own, s.notes[n].Text)
		if err != nil {
			m.reportIgnored(ctx, fmt.Errorf("annotation %s: %w", m.keys[n], err))
			continue
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

// ownAtStart returns this host's Node as read returns it. It repeats read while that may help.
func (m *Manager) ownAtStart(ctx context.Context, read func(context.Context) (*ownNode, error)) (s *ownNode, err error) {
	defer m.outage.Forget(starting)
	err = m.retry(ctx, func() (err error) {
		s, err = read(ctx)
		return err
	})
	return s, err
}

// NodeIPs implements subnet.AddressSource.
func (m *Manager) NodeIPs() []netip.Addr {
	if s := m.seen.Load(); s != nil {
		return s.internal
	}
	return nil
}

// Location implements subnet.LocationSource: it returns the value of the label Config.LocationLabel
// of this host's Node. If the value is not the name of a location, Location logs it and returns "".
func (m *Manager) Location(ctx context.Context) (string, error) {
	s, err := m.ownAtStart(ctx, m.recent)
	if err != nil {
		return "", err
	}
	m.justRead.Store(s) // for Recall
	m.location.Store(&s.location)
	if subnet.CheckLocation(s.location) == nil {
		return s.location, nil
	}
	klog.FromContext(ctx).Error(nil, "this node has no location, because its label does not contain the name of one", "node", *m.name.Load(), "label", m.cfg.LocationLabel, "value", subnet.Shorten(s.location))
	return "", nil
}

// Recall returns the claim that this host's Node publishes. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, _ subnet.Claim) (subnet.Claim, error) {
	s, err := m.ownAtStart(ctx, m.recent)
	if err != nil {
		return subnet.Claim{}, err
	}
	m.justRead.Store(s) // for Acquire
	return m.recalled(s), nil
}

// recalled returns the readable part of the claim that the Node s publishes. The claim is empty if
// flannel does not manage the Node, or if no family has both a podCIDR and a readable public
// address.
func (m *Manager) recalled(s *ownNode) subnet.Claim {
	n := s.published()
	if n[annotation.Managed].Text != "true" {
		return subnet.Claim{}
	}

	c := subnet.Claim{BackendType: n[annotation.BackendType].Text, NextType: n[annotation.NextBackendType].Text}
	for _, f := range families {
		cidr, ok := prefix.OfFamily(s.cidrs, f)
		of := annotation.Of(f)
		public, err := subnet.ParseAddr(f, n[of.Public].Text)
		if !ok || err != nil {
			continue
		}
		e := subnet.Endpoint{Subnet: cidr, PublicIP: public}
		e.Data, _ = annotation.ParseData(n[of.Data].Text) // nil if it cannot be read
		e.NextData, _ = annotation.ParseData(n[of.NextData].Text)
		c.Endpoints = append(c.Endpoints, e)
	}
	if len(c.Endpoints) == 0 {
		return subnet.Claim{}
	}
	return c
}
