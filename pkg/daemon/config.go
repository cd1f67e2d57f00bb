// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/health"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// Config is what Run needs.
type Config struct {
	Options options.Options
	// Backends returns the backends that a network may use. builtin.New returns all.
	Backends BackendsFunc
	// Tuner adapts the Go runtime. If it is nil, the runtime stays as it is.
	Tuner *tune.Tuner
}

// ErrConfigChanged is the error with which --exit-on-config-change ends the daemon.
var ErrConfigChanged = network.ErrConfigChanged

// BackendsFunc returns the backends for one network. The options are those of this network.
type BackendsFunc func(options.Options) (backend.Catalog, error)

// served is what a daemon serves: one network, or several.
type served interface {
	health.Source
	// Run serves until ctx ends, and then returns nil. It returns an error earlier if it cannot go on.
	Run(ctx context.Context) error
	// Close releases what was opened before Run. The kernel stays unchanged.
	Close()
	// Shutdown lets the backends do what they must do on the host when the daemon stops.
	Shutdown(ctx context.Context)
	// Up returns a channel that is closed when the start is over. From then on StateIsWritten reports whether the
	// state files are up to date.
	Up() <-chan struct{}
	StateIsWritten() bool
	// Metrics returns the metrics of all networks that are served.
	Metrics() []*metrics.Metrics
	// Report is a status.Source.
	Report(ctx context.Context, q status.Query) (status.Report, error)
}
