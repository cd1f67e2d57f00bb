// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/oneline"
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

func newOwnNode(n *wire.Node) *ownNode {
	s := &ownNode{
		exists: true, uid: string(n.UID), created: n.Created, network: string(n.Network),
		version: n.Revision, revision: n.Revision, read: time.Now(), location: string(n.Label),
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

// given returns the address that an administrator gives this host's Node s in an annotation, and the zero
// address if there is none. It refuses addresses that peers refuse: an address that no host can have, and an
// address in the subnet of the Node.
func (m *Manager) given(s *ownNode, f prefix.Family, in annotation.ID) (netip.Addr, error) {
	text := s.notes[in].Text
	if text == "" {
		return netip.Addr{}, nil
	}

	own, _ := prefix.OfFamily(s.cidrs, f)
	a, err := subnet.ParseAddr(f, text)
	switch {
	case err != nil:
	case !subnet.IsHost(a):
		err = fmt.Errorf("%q is not an %s address that peers can reach", text, f)
	case own.Contains(a):
		err = fmt.Errorf("%q lies in the node's own subnet %s", text, own)
	default:
		return a, nil
	}
	return netip.Addr{}, fmt.Errorf("annotation %s: %w", m.keys[in], err)
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

// readNode requests one Node in its present state. If the Node does not exist, the field exists of the result is
// false. readNode sends a list request, because early roles of flannel do not permit get. The server needs no more
// time for that than for a get request.
func (m *Manager) readNode(ctx context.Context, name string) (*ownNode, error) {
	s := &ownNode{}
	l, err := m.readNodes(ctx, query{name: name}, func(_ string, got *ownNode) { s = got })
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", name, err)
	}
	s.revision, s.read, s.ready = l.Revision, time.Now(), m.ready()
	return s, nil
}

// readNodes requests the few Nodes that q selects, with the usual deadline, and calls on for each
// of them.
func (m *Manager) readNodes(ctx context.Context, q query, on func(name string, s *ownNode)) (l listing, err error) {
	err = m.client.patiently(ctx, m.timing.request, func(ctx context.Context) (err error) {
		l, err = m.client.list(ctx, m.decoder, q, func(n *wire.Node) { on(string(n.Name), newOwnNode(n)) })
		return err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = m.client.explain(err)
	}
	return l, err
}

// readOwn reads this host's Node, and the revision of the store, in one small request: the server reads
// only this key from its store.
func (m *Manager) readOwn(ctx context.Context) (*ownNode, error) {
	name, err := m.nodeName(ctx)
	if err != nil {
		return nil, err
	}
	s, err := m.readNode(ctx, name)
	if err == nil {
		m.seen.Store(s)
	}
	return s, err
}

// recent returns this host's Node. If another method has read the Node less than timing.fresh ago, or its
// watch has brought it, recent returns that, unless the network has become ready since: await would end at once.
// Otherwise it reads the Node.
func (m *Manager) recent(ctx context.Context) (*ownNode, error) {
	if s := m.seen.Load(); s != nil && time.Since(s.read) < m.timing.fresh && s.ready == m.ready() {
		return s, nil
	}
	return m.readOwn(ctx)
}

// nodeName returns the name of this host's Node. If Config does not contain it, nodeName reads it from
// this pod.
func (m *Manager) nodeName(ctx context.Context) (string, error) {
	if name := m.name.Load(); name != nil {
		return *name, nil
	}

	var pod struct{ Spec struct{ NodeName string } }
	r := request{path: "namespaces/" + url.PathEscape(m.cfg.PodNamespace) + "/pods/" + url.PathEscape(m.cfg.PodName)}
	err := m.client.callJSON(ctx, m.timing.request, r, &pod)
	if loglimit.Passes(err) || err != nil && ctx.Err() != nil {
		return "", fmt.Errorf("ask pod %s/%s for its node: %w", m.cfg.PodNamespace, m.cfg.PodName, err)
	}
	if err != nil || pod.Spec.NodeName == "" {
		return "", m.client.explain(fmt.Errorf("%w: pod %s/%s names no node", wire.ErrMalformed, m.cfg.PodNamespace, m.cfg.PodName))
	}
	m.name.Store(&pod.Spec.NodeName)
	return pod.Spec.NodeName, nil
}

// wanted returns the annotations with which the Node s publishes c. Addresses in the annotations
// public-ip-overwrite and public-ipv6-overwrite replace those of c. If such an annotation cannot be
// used, wrong says why, and n has the address of c.
func (m *Manager) wanted(s *ownNode, c subnet.Claim) (n annotation.Notes, wrong error) {
	n = annotation.Encode(c)
	for _, f := range families {
		public := annotation.PublicIP.In(f)
		if !n[public].Present {
			continue
		}
		a, err := m.given(s, f, annotation.PublicIPOverwrite.In(f))
		wrong = oneline.Join(wrong, err)
		if a.IsValid() {
			n[public].Text = a.String()
		}
	}
	return n, wrong
}

// warnIgnored logs an error in the annotations of an administrator and creates an Event, unless the
// error is the same as in the last call.
func (m *Manager) warnIgnored(ctx context.Context, wrong error) {
	text := textOf(wrong)
	if before := m.ignores.Swap(&text); *before != text && wrong != nil {
		m.reportIgnored(ctx, wrong)
	}
}

// reportIgnored logs that an annotation is ignored, and creates an Event, so that an administrator
// checks the annotation.
func (m *Manager) reportIgnored(ctx context.Context, wrong error) {
	klog.FromContext(ctx).Error(wrong, "an annotation of this node is ignored", "node", *m.name.Load())
	m.Warn("FlannelAnnotationIgnored", wrong.Error())
}

// patch sends a patch of this host's Node's status, which may also change annotations. flannel's role
// permits only that.
func (m *Manager) patch(ctx context.Context, name string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	_, err = m.client.call(ctx, m.timing.request, request{
		method: "PATCH", path: "nodes/" + url.PathEscape(name) + "/status",
		accept: acceptMetadata, content: sendPatch, body: text,
	})
	return err
}

// annotate writes annotations of this host's Node.
func (m *Manager) annotate(ctx context.Context, name string, changes map[string]*string) error {
	if err := m.patch(ctx, name, map[string]any{"metadata": map[string]any{"annotations": changes}}); err != nil {
		return fmt.Errorf("annotate node %s: %w", name, err)
	}
	return nil
}

// announce sets the condition NetworkUnavailable of this host's Node to False.
func (m *Manager) announce(ctx context.Context, name string) error {
	now := time.Now().UTC().Truncate(time.Second)
	condition := map[string]any{
		"type": wire.NetworkUnavailable, "status": "False", "lastHeartbeatTime": now, "lastTransitionTime": now,
		"reason": "FlannelIsUp", "message": "Flannel is running on this node",
	}
	if err := m.patch(ctx, name, map[string]any{"status": map[string]any{"conditions": []any{condition}}}); err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", wire.NetworkUnavailable, name, err)
	}
	return nil
}
