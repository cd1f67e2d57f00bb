// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http"
	"net/url"

	"k8s.io/klog/v2"
)

// warnPolicies logs once, if there are NetworkPolicies, that flanneld does not enforce them.
// Without this message an operator who relies on them would not notice that flanneld ignores them.
// flanneld cannot see whether another program enforces them. warnPolicies logs nothing if the role
// of flanneld does not permit the request. It returns when it has an answer or ctx ends.
func (m *Manager) warnPolicies(ctx context.Context) {
	if m.policiesSeen.Load() {
		return
	}

	b := m.backoff()
	for {
		name, err := m.somePolicy(ctx)
		switch {
		case err == nil, hasCode(err, http.StatusForbidden, http.StatusNotFound):
			m.policiesSeen.Store(true)
			if name != "" {
				klog.FromContext(ctx).Error(nil, "there are NetworkPolicies, and flanneld does not enforce them: "+
					"without another program that does they have no effect", "example", name)
			}
			return
		case b.Wait(ctx, apiErrorOf(err).retryAfter) != nil:
			return
		}
	}
}

// somePolicy returns one NetworkPolicy in the form NAMESPACE/NAME. It returns "" if there is none, or
// if the answer cannot be decoded.
func (m *Manager) somePolicy(ctx context.Context) (string, error) {
	var list struct {
		Items []struct {
			Metadata struct{ Namespace, Name string }
		}
	}
	err := m.client.callJSON(ctx, m.timing.request, request{
		group: "networking.k8s.io", path: "networkpolicies", query: url.Values{"limit": {"1"}},
		accept: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
	}, &list)
	switch {
	case passes(err), err != nil && ctx.Err() != nil:
		return "", err
	case err != nil || len(list.Items) == 0: // an answer that cannot be decoded is not worth another try
		return "", nil //nolint:nilerr // see above
	}
	return list.Items[0].Metadata.Namespace + "/" + list.Items[0].Metadata.Name, nil
}
