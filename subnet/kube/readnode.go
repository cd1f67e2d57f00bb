// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// readNode requests one Node in the state of revision or a later one, or of the present if it is 0.
// If the Node does not exist, the field exists of the result is false. readNode sends a list
// request, because early roles of flannel do not permit get. The server needs no more time for that
// than for a get request.
func (m *Manager) readNode(ctx context.Context, name string, revision int64) (*ownNode, error) {
	s := &ownNode{}
	l, err := m.readNodes(ctx, query{name: name, revision: revision}, func(_ string, got *ownNode) { s = got })
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
		l, err = m.client.list(ctx, m.decoder, q, func(n *wire.Node) { on(string(n.Name), newOwnNode(n, 0)) })
		return err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = m.client.explain(err)
	}
	return l, err
}

// readOwn reads this host's Node, and the revision of the store, in one small request: the server reads
// only this key from its store. It keeps the Node in m.justRead.
func (m *Manager) readOwn(ctx context.Context) (*ownNode, error) {
	name, err := m.nodeName(ctx)
	if err != nil {
		return nil, err
	}
	s, err := m.readNode(ctx, name, 0)
	if err == nil {
		m.justRead.Store(s)
		m.uid.Store(&s.uid)
		m.internal.Store(&s.internal)
	}
	return s, err
}

// recent returns this host's Node. If another method has read the Node less than timing.fresh ago, and
// no earlier call of recent has returned the result, recent returns that result. If not, it reads
// the Node.
func (m *Manager) recent(ctx context.Context) (*ownNode, error) {
	if s := m.justRead.Swap(nil); s != nil && time.Since(s.read) < m.timing.fresh {
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

	r := request{path: "namespaces/" + url.PathEscape(m.cfg.PodNamespace) + "/pods/" + url.PathEscape(m.cfg.PodName), accept: acceptJSON}
	body, err := m.client.call(ctx, m.timing.request, r)
	if err != nil {
		return "", fmt.Errorf("ask pod %s/%s for its node: %w", m.cfg.PodNamespace, m.cfg.PodName, err)
	}
	var pod struct{ Spec struct{ NodeName string } }
	if err := json.Unmarshal(body, &pod); err != nil || pod.Spec.NodeName == "" {
		return "", m.client.explain(fmt.Errorf("%w: pod %s/%s names no node", wire.ErrMalformed, m.cfg.PodNamespace, m.cfg.PodName))
	}
	m.name.Store(&pod.Spec.NodeName)
	return pod.Spec.NodeName, nil
}
