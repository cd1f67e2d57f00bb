// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// single is a daemon with one network, which has no name.
type single struct{ *network.Network }

func openSingle(ctx context.Context, h *network.Host, cfg Config) (served, error) {
	n, err := network.Open(ctx, network.Config{
		Host: h, Options: cfg.Options, Backends: cfg.Backends,
		Progress: network.NewProgress(network.LogPhases(klog.FromContext(ctx))),
	})
	if err != nil {
		return nil, err
	}
	return single{n}, nil
}

func (s single) all() []metrics.Source { return []metrics.Source{s.Metrics()} }

func (s single) status(ctx context.Context, q status.Query) (status.Report, error) {
	if q.Network != "" {
		return status.Report{}, fmt.Errorf("%w: %s: this daemon has one network without a name", status.ErrNoNetwork, q.Network)
	}
	return s.Report(ctx, q)
}
