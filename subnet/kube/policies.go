// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http"
	"net/url"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
)

// warnPolicies logs once, if there are NetworkPolicies, that flanneld does not enforce them.
// Without this message an operator who relies on them would not notice that flanneld ignores them.
// flanneld cannot see whether another program enforces them. warnPolicies logs nothing if the role
// of flanneld does not permit the request. It returns when it has an answer or ctx ends.
func (m *Manager) warnPolicies(ctx context.Context) {
	r := request{
		group: "networking.k8s.io", path: "networkpolicies", query: url.Values{"limit": {"1"}},
		accept: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
	}
	for b := m.backoff(); !m.policiesSeen.Load(); {
		var list struct {
			Items []struct {
				Metadata struct{ Namespace, Name string }
			}
		}
		err := m.client.callJSON(ctx, m.timing.request, r, &list)
		if loglimit.Passes(err) && !hasCode(err, http.StatusForbidden, http.StatusNotFound) || ctx.Err() != nil {
			if b.Wait(ctx, apiErrorOf(err).retryAfter) != nil {
				return
			}
			continue
		}

		m.policiesSeen.Store(true) // even if the answer cannot be decoded, which another try would not change
		if len(list.Items) > 0 {
			example := list.Items[0].Metadata.Namespace + "/" + list.Items[0].Metadata.Name
			klog.FromContext(ctx).Error(nil, "there are NetworkPolicies, and flanneld does not enforce them: "+
				"without another program that does they have no effect", "example", example)
		}
	}
}
