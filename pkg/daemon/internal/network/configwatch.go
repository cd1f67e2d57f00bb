// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

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
	warn     func(reason, message string)             // tells operators of a refused configuration; nil until the store is open

	mu      sync.Mutex
	used    *subnet.Config // nil before the first one
	stored  reading
	failed  failure        // of the last valid configuration in the store
	warned  []string       // the warnings that were logged last
	changed wait.Broadcast // sent when the result of next may change
}

// reading is what the store has: a configuration, or why it has none that a network could use. It is zero before the
// first one.
type reading struct {
	config *subnet.Config
	unfit  string // "" if config is set
}

// gone is the reading of a store that has no configuration.
const gone = "there is no configuration any more"

// failure is why the network cannot change to a valid configuration. It is zero if that was not tried.
type failure struct {
	why   string        // "" again when the network uses the configuration
	pause time.Duration // after the last attempt that did not start; 0 if there was none
	until time.Time     // the end of pause
}

// leastPause and mostPause limit the time until a configuration that did not start is tried again. The pause
// doubles. The obstacle may go, such as another program's device. But an attempt can lose packets: if the host needs
// another subnet, peers learn of it before the backend starts.
const (
	leastPause = time.Minute
	mostPause  = time.Hour
)

// set changes used or stored, and wakes those who wait for next. If the network then uses what the store has,
// there is no reason why it cannot. The caller holds w.mu.
func (w *configWatch) set(change func()) {
	before := w.differs()
	change()
	now := w.differs()
	if w.stored.config != nil && len(now) == 0 {
		w.failed.why = ""
	}
	if !slices.Equal(before, now) {
		w.changed.Send()
	}
}

// use records the configuration that the network uses from now on.
func (w *configWatch) use(cfg subnet.Config) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.set(func() { w.used = &cfg })
	w.failed.pause = 0
}

// next returns the configuration that the network should use instead of the present one, and a channel
// that is closed when the result may have changed. cfg is nil if there is no such configuration.
func (w *configWatch) next() (cfg *subnet.Config, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rests() <= 0 && len(w.differs()) > 0 {
		cfg = new(w.used.Toward(*w.stored.config))
	}
	return cfg, w.changed.Changed()
}

// differs returns the changes from the configuration in use to the one in the store. The caller holds w.mu.
func (w *configWatch) differs() []string {
	if w.used == nil || w.stored.config == nil {
		return nil
	}
	return subnet.Changes(w.used.Goal(), *w.stored.config)
}

// restartNeeded returns how the configuration in the store differs from the one in use, or why it cannot
// be used. It returns "" if the two are the same, or if the network follows changes without a restart. If
// the store has no configuration any more, restartNeeded returns that, even if the network follows changes.
func (w *configWatch) restartNeeded() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.stored.unfit == gone:
		return gone
	case w.follow:
		return ""
	}
	return cmp.Or(w.unusable(), oneline.List(w.differs(), ", "))
}

// refusal returns why the configuration in the store cannot be used, or "" if it can.
func (w *configWatch) refusal() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unusable()
}

// unusable is refusal for a caller that holds w.mu.
func (w *configWatch) unusable() string {
	if w.stored.unfit == gone {
		return ""
	}
	return cmp.Or(w.stored.unfit, w.failed.why)
}

// apply records and logs a change of the configuration in the store. text is nil if there is none. Only
// one goroutine at a time may call apply.
func (w *configWatch) apply(ctx context.Context, text []byte) {
	now := reading{unfit: gone}
	if text != nil {
		now = w.read(ctx, text)
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	log := klog.FromContext(ctx)
	was := w.stored
	refused := w.unusable()
	differed := refused != "" || len(w.differs()) > 0
	news := now.config != nil && !w.stores(*now.config)

	w.set(func() { w.stored = now })
	if news {
		w.failed = failure{}
		w.changed.Send() // set does not if differs returns the same text as before: the text hides some values
	}

	differs := w.differs()
	switch {
	case now.unfit == gone && was.unfit != gone:
		log.Error(nil, "the network configuration cannot be used any more: "+
			"flanneld goes on with the one that it has, but could not start again", "reason", gone)
	case now.unfit != "":
		w.logRefusal(ctx, refused)
	case len(differs) == 0:
		if was.unfit == gone || differed {
			log.Info("the network configuration is again the one in use")
		}
	case !news:
	case w.follow:
		log.Info("the network configuration has changed", "changes", oneline.List(differs, ", "))
	default:
		log.Info("the network configuration has changed: restart needed", "changes", oneline.List(differs, ", "))
	}
}

// read returns the reading of a text, and logs its warnings.
func (w *configWatch) read(ctx context.Context, text []byte) reading {
	cfg, err := w.validate(text)
	if err != nil {
		return reading{unfit: oneline.Text(err)}
	}
	w.logWarnings(ctx, cfg.Warnings)
	return reading{config: &cfg}
}

// refuse records why the network cannot use cfg, or not all of it: the store has it, or had it at the start. It has no
// effect if the store has another configuration by now. It logs only the first reason for cfg, because the text of a
// reason may contain addresses that change all the time.
func (w *configWatch) refuse(ctx context.Context, cfg subnet.Config, why error) {
	w.fail(ctx, cfg, oneline.Text(why), false)
}

// giveUp is refuse for a configuration whose backend has not started. Until the end of a pause next does not return it.
func (w *configWatch) giveUp(ctx context.Context, cfg subnet.Config, why error) {
	w.fail(ctx, cfg, oneline.Text(why), true)
}

// fail records and logs why the network cannot use cfg, unless the store has another configuration by now. rests is set
// if cfg must not be tried at once.
func (w *configWatch) fail(ctx context.Context, cfg subnet.Config, why string, rests bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stored == (reading{}) { // cfg was read at the start, and no watch has reported yet
		w.set(func() { w.stored.config = &cfg })
	}
	if !w.stores(cfg) {
		return
	}

	refused := w.unusable()
	switch {
	case !w.follow && len(w.differs()) > 0: // only a step gets another attempt, and this is no reason to exit either
		w.failed.until = time.Now().Add(math.MaxInt64)
	case rests:
		w.failed.pause = min(max(2*w.failed.pause, leastPause), mostPause)
		w.failed.until = time.Now().Add(w.failed.pause)
		why += fmt.Sprintf(" (tried again after %s)", w.failed.pause)
	}
	w.failed.why = why
	if refused == "" || w.rests() > 0 {
		w.logRefusal(ctx, refused)
	}
}

// stores reports whether the store has cfg, or cfg is a step toward what it has. The caller holds w.mu.
func (w *configWatch) stores(cfg subnet.Config) bool {
	stored := w.stored.config
	return stored != nil && (len(subnet.Changes(*stored, cfg.Goal())) == 0 ||
		w.used != nil && len(subnet.Changes(w.used.Toward(*stored), cfg)) == 0)
}

// rest returns the time for which the network does not try what it has given up: the last valid configuration in the
// store, or a step toward it. Otherwise the result is not positive.
func (w *configWatch) rest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rests()
}

// rests is rest for a caller that holds w.mu.
func (w *configWatch) rests() time.Duration { return time.Until(w.failed.until) }

// recordRefusal records why the configuration in the store cannot be used. The caller has logged it.
func (w *configWatch) recordRefusal(why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.set(func() { w.stored = reading{unfit: oneline.Text(why)} })
}

// logRefusal logs why the configuration in the store cannot be used, and warns operators of it, unless the
// reason is the one before. The caller holds w.mu.
func (w *configWatch) logRefusal(ctx context.Context, before string) {
	now := w.unusable()
	if now == before {
		return
	}
	klog.FromContext(ctx).Error(nil, "the network configuration cannot be used: "+
		"flanneld goes on with the one that it has", "reason", now)
	if w.warn != nil {
		w.warn("FlannelConfigRejected", now)
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
