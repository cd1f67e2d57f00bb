// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// ErrConfigChanged means that the configuration in the store has changed. It ends the daemon with
// --exit-on-config-change. Otherwise it ends only an attempt to start the network.
var ErrConfigChanged = errors.New("the network configuration has changed")

// configWatch compares the network configuration in the store with the one that the network uses.
// It knows which configuration the network should change to, and why it cannot.
type configWatch struct {
	follow   bool                                     // the network changes to a valid configuration while it runs
	validate func(text []byte) (subnet.Config, error) // the result has all warnings, including those of the backend
	warn     func(reason, message string)             // tells operators of a refused configuration; nil if the store cannot

	mu      sync.Mutex
	used    *subnet.Config // nil before the first one
	state   storedState
	stored  subnet.Config  // while state is valid
	gaveUp  bool           // the last valid configuration was tried and did not start: another attempt would disturb the traffic again
	refused string         // why the configuration in the store cannot be used; "" if it can
	warned  []string       // the warnings that were logged last
	changed wait.Broadcast // sent when the result of next may change
}

// storedState is the state of the configuration in the store.
//
// Each text in the store leads to missing, invalid or valid. A valid configuration may be in use, or wanted, or refused
// for now, or given up: see configWatch.
type storedState int

const (
	unknown storedState = iota
	missing             // the store has none
	invalid             // it cannot be read, or no network could use it
	valid
)

func newConfigWatch(follow bool, validate func(text []byte) (subnet.Config, error), warn func(reason, message string)) *configWatch {
	return &configWatch{follow: follow, validate: validate, warn: warn}
}

// use records the configuration that the network uses from now on.
func (w *configWatch) use(cfg subnet.Config) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.settle(w.differs())
	w.used = &cfg
}

// next returns the configuration that the network should use instead of the present one, and a channel
// that is closed when the result may have changed. cfg is nil if there is no such configuration.
func (w *configWatch) next() (cfg *subnet.Config, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.gaveUp && len(w.differs()) > 0 {
		cfg = new(w.used.Toward(w.stored))
	}
	return cfg, w.changed.Changed()
}

// differs returns the changes from the configuration in use to the one in the store. The caller holds w.mu.
func (w *configWatch) differs() []string {
	if w.used == nil || w.state != valid {
		return nil
	}
	return subnet.Changes(w.used.Goal(), w.stored)
}

// settle must follow every change of used, state or stored. before is the result of differs before that change. The
// caller holds w.mu.
func (w *configWatch) settle(before []string) {
	now := w.differs()
	if w.state == valid && len(now) == 0 {
		w.refused = ""
	}
	if !slices.Equal(before, now) {
		w.changed.Send()
	}
}

// restartNeeded returns how the configuration in the store differs from the one in use, or why it cannot
// be used. It returns "" if the two are the same, or if the network follows changes without a restart. If
// the store has no configuration any more, restartNeeded returns that, even if the network follows changes.
func (w *configWatch) restartNeeded() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.state == missing:
		return "there is no configuration any more"
	case w.follow:
		return ""
	case w.refused != "":
		return w.refused
	}
	return oneline.List(w.differs(), ", ")
}

// refusal returns why the configuration in the store cannot be used, or "" if it can.
func (w *configWatch) refusal() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refused
}

// apply records and logs a change of the configuration in the store. text is nil if there is none. Only
// one goroutine at a time may call apply.
func (w *configWatch) apply(ctx context.Context, text []byte) {
	var cfg subnet.Config
	var err error
	if text != nil {
		cfg, err = w.validate(text)
	}
	if err == nil && text != nil {
		w.logWarnings(ctx, cfg.Warnings)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	log := klog.FromContext(ctx)
	was := w.state
	before := w.differs()
	differed := w.refused != "" || len(before) > 0
	news := text != nil && err == nil && !w.stores(cfg)

	switch {
	case text == nil:
		w.state = missing
		w.refused = ""
	case err != nil:
		w.state = invalid
	case news:
		w.state = valid
		w.gaveUp = false
		w.refused = ""
		w.stored = cfg
		w.changed.Send() // settle may not, because the result of differs hides values
	default:
		w.stored = cfg
	}
	w.settle(before)

	differs := w.differs()
	switch {
	case w.state == missing && was != missing:
		log.Error(nil, "the network configuration cannot be used any more: flanneld goes on with the one that it has, but could not start again", "reason", "there is no configuration any more")
	case w.state == missing:
	case err != nil:
		w.logRefusal(ctx, err)
	case len(differs) == 0:
		if was == missing || differed {
			log.Info("the network configuration is again the one in use")
		}

	case !news:
	case w.follow:
		log.Info("the network configuration has changed", "changes", oneline.List(differs, ", "))
	default:
		log.Info("the network configuration has changed: restart needed", "changes", oneline.List(differs, ", "))
	}
}

// refuse records why the network cannot change to cfg. It has no effect if the store has another
// configuration by now. It logs only the first reason for cfg, because the text of a reason may
// contain addresses that change all the time.
func (w *configWatch) refuse(ctx context.Context, cfg subnet.Config, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !w.stores(cfg):
	case w.refused != "":
		w.refused = oneline.Text(why)
	default:
		w.logRefusal(ctx, why)
	}
}

// refuseFirst records that the network starts with a former configuration, or with a part of cfg, because it cannot use cfg,
// which the store had at the start. It has no effect if the store has another configuration by now.
func (w *configWatch) refuseFirst(ctx context.Context, cfg subnet.Config, why error) {
	w.mu.Lock()
	if before := w.differs(); w.state == unknown {
		w.state = valid
		w.stored = cfg
		w.settle(before)
	}
	w.mu.Unlock()

	if w.follow {
		w.refuse(ctx, cfg, why)
	} else {
		w.giveUp(ctx, cfg, why) // there is no other attempt, and no reason to exit either
	}
}

// giveUp records and logs why the network cannot use cfg, whose backend has not started. After that next
// does not return cfg, because another attempt would disturb the traffic again. giveUp has no effect if
// the store has another configuration by now.
func (w *configWatch) giveUp(ctx context.Context, cfg subnet.Config, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stores(cfg) {
		w.gaveUp = true
		w.logRefusal(ctx, why)
	}
}

// stores reports whether the store has cfg, or cfg is a step toward what it has. The caller holds w.mu.
func (w *configWatch) stores(cfg subnet.Config) bool {
	return w.state == valid && (len(subnet.Changes(w.stored, cfg.Goal())) == 0 ||
		w.used != nil && len(subnet.Changes(w.used.Toward(w.stored), cfg)) == 0)
}

// hasGivenUp reports whether the configuration in the store, or a step toward it, was tried and did not start.
func (w *configWatch) hasGivenUp() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gaveUp
}

// recordRefusal records why the configuration in the store cannot be used. The caller has logged it.
func (w *configWatch) recordRefusal(why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.settle(w.differs())
	w.state = invalid
	w.refused = oneline.Text(why)
}

// logRefusal records and logs a reason, and warns operators of it, unless the reason is the present one.
// The caller holds w.mu.
func (w *configWatch) logRefusal(ctx context.Context, why error) {
	if w.refused == oneline.Text(why) {
		return
	}
	w.refused = oneline.Text(why)
	klog.FromContext(ctx).Error(nil, "the network configuration cannot be used: flanneld goes on with the one that it has", "reason", w.refused)
	if w.warn != nil {
		w.warn("FlannelConfigRejected", w.refused)
	}
}

// logWarnings logs the warnings about a configuration in one line, unless they are those that were logged
// last.
func (w *configWatch) logWarnings(ctx context.Context, warnings []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(warnings) > 0 && !slices.Equal(warnings, w.warned) {
		klog.FromContext(ctx).Error(nil, "warning about the network configuration", "warning", oneline.List(warnings, "; "))
	}
	w.warned = warnings
}

// exit waits for a changed configuration that is valid, and returns ErrConfigChanged, wrapped. It
// returns nil if ctx ends first.
func (w *configWatch) exit(ctx context.Context) error {
	for {
		cfg, changed := w.next()
		if cfg != nil {
			w.mu.Lock()
			defer w.mu.Unlock()
			return fmt.Errorf("%w: %s", ErrConfigChanged, oneline.List(w.differs(), ", "))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}
