// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// wanted returns the annotations with which the Node s publishes c. Addresses in the annotations
// public-ip-overwrite and public-ipv6-overwrite replace those of c. If such an annotation cannot be
// used, wrong says why, and n has the address of c.
func (m *Manager) wanted(s *ownNode, c subnet.Claim) (n annotation.Notes, wrong error) {
	n = annotation.Encode(c)
	for _, f := range families {
		of := annotation.Of(f)
		if text := s.notes[of.Overwrite].Text; text != "" && n[of.Public].Present {
			own, _ := prefix.OfFamily(s.cidrs, f)
			a, err := parsePublic(f, own, text)
			if err != nil {
				wrong = oneline.Join(wrong, fmt.Errorf("annotation %s: %w", m.keys[of.Overwrite], err))
				continue
			}
			n[of.Public].Text = a.String()
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

// nodeCondition is a condition in the form of the API.
type nodeCondition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	LastHeartbeatTime  time.Time `json:"lastHeartbeatTime"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
}

// announce sets the condition NetworkUnavailable of this host's Node to False.
func (m *Manager) announce(ctx context.Context, name string) error {
	now := time.Now().UTC().Truncate(time.Second)
	c := nodeCondition{
		Type: wire.NetworkUnavailable, Status: "False", LastHeartbeatTime: now, LastTransitionTime: now,
		Reason: "FlannelIsUp", Message: "Flannel is running on this node",
	}
	if err := m.patch(ctx, name, map[string]any{"status": map[string]any{"conditions": []nodeCondition{c}}}); err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", wire.NetworkUnavailable, name, err)
	}
	return nil
}
