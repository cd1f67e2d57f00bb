// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// problem says what is wrong with the routes of the cloud to this host, and what carries its packets
// now. It returns "" if nothing is wrong.
func problem(own map[prefix.Family]data, failed error, tunnel string) string {
	reason := oneline.Text(failed)
	for _, d := range own {
		if failed == nil && d.Table == "" {
			reason = "they follow none of the chosen route tables"
		}
	}

	if reason == "" { // nothing is wrong if a route was just put: the next comparison sees it
		return ""
	}
	if allRouted(own) {
		return "the routers of the cloud go on to carry the packets of this host: " + reason
	}
	return tunnel + " carries the packets of this host: " + reason
}

func allRouted(own map[prefix.Family]data) bool {
	for _, d := range own {
		if !d.routed() {
			return false
		}
	}
	return true
}

// logProblem logs and warns when the kind of the problem changes. The text may differ each time.
func (n *network) logProblem(ctx context.Context) {
	text := problem(n.data, n.failed, n.side.Type)
	kind := ""
	if text != "" {
		kind = fmt.Sprint(cloud.Kind(n.failed), allRouted(n.data))
	}
	if kind == n.logged {
		return
	}

	n.logged = kind
	log := klog.FromContext(ctx)
	if text == "" {
		log.Info("the routes of the cloud to this host are in order")
		return
	}

	log.Error(nil, "the routes of the cloud to this host are not in order", "reason", text)
	if n.cloud.Env.Warn != nil {
		n.cloud.Env.Warn("FlannelOverflow", text)
	}
}
