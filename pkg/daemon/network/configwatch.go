// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// ErrConfigChanged ends the daemon with --exit-on-config-change.
var ErrConfigChanged = errors.New("the network configuration has changed")

// configWatch compares the present network configuration with the one that the daemon
// uses.
type configWatch struct {
	validate func(text []byte) (subnet.Config, error)
	used     subnet.Config
	needed   atomic.Pointer[string] // the changes; nil if there are none
	changed  chan struct{}          // closed when there is a changed configuration to restart with
}

func newConfigWatch(validate func(text []byte) (subnet.Config, error)) *configWatch {
	return &configWatch{validate: validate, changed: make(chan struct{})}
}

// difference returns a description of the changes, or "" if there are none.
func (w *configWatch) difference() string {
	if s := w.needed.Load(); s != nil {
		return *s
	}
	return ""
}

// apply handles the text of the present configuration, which is nil if there is none. Only
// one goroutine at a time may call it.
func (w *configWatch) apply(ctx context.Context, text []byte) {
	log := klog.FromContext(ctx)
	now, usable := "", false
	if text == nil {
		now = "there is no configuration any more"
	} else if cfg, err := w.validate(text); err != nil {
		now = err.Error()
	} else {
		now, usable = strings.Join(subnet.Changes(w.used, cfg), ", "), true
	}
	before := w.difference()
	if now == before {
		return
	}
	w.needed.Store(&now)
	switch {
	case now == "":
		log.Info("the network configuration is again the one in use")
	case !usable:
		log.Error(nil, "the network configuration cannot be used any more: flanneld goes on with the one that it has, but could not start again", "reason", now)
	default:
		log.Info("the network configuration has changed: restart needed", "changes", now)
		select {
		case <-w.changed:
		default:
			close(w.changed)
		}
	}
}

// exit waits for a changed configuration and returns ErrConfigChanged.
func (w *configWatch) exit(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-w.changed:
		return fmt.Errorf("%w: %s", ErrConfigChanged, w.difference())
	}
}
