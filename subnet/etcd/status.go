package etcd

import (
	"context"
	"errors"
	"slices"
	"sync"

	"k8s.io/klog/v2"
)

// source is one of the activities that talk to the store.
type source string

const (
	sourceConfig source = "config"
	sourceLease  source = "lease"
	sourceWatch  source = "watch"
)

// health tells a store that is away from one that is there: there means that
// no activity fails. It logs and reports changes only.
type health struct {
	onStatus func(error)

	mu      sync.Mutex
	failing map[source]bool
	known   bool     // onStatus was called
	kinds   []string // of the errors logged since the store was usable last
}

func newHealth(onStatus func(error)) *health {
	return &health{onStatus: onStatus, failing: map[source]bool{}}
}

// report takes the outcome of an activity in. An error that is no storeError
// comes from a store that answers.
func (h *health) report(ctx context.Context, s source, err error) {
	if ctx.Err() != nil || errors.Is(err, errClosed) || errors.Is(err, errRenewed) {
		return
	}
	var failure *storeError
	if !errors.As(err, &failure) {
		err = nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	logger := klog.FromContext(ctx)
	if err != nil {
		h.failing[s] = true
		if !slices.Contains(h.kinds, failure.kind) { // they may alternate
			h.kinds = append(h.kinds, failure.kind)
			logger.Error(err, "etcd is not usable, retrying")
			h.tell(err)
		}
		return
	}
	delete(h.failing, s)
	if len(h.failing) > 0 {
		return
	}
	if h.kinds != nil {
		h.kinds = nil
		logger.Info("etcd is usable again")
		h.tell(nil)
	} else if !h.known {
		h.tell(nil)
	}
}

// forget drops an activity that has ended.
func (h *health) forget(s source) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.failing, s)
}

func (h *health) tell(err error) {
	h.known = true
	if h.onStatus != nil {
		h.onStatus(err)
	}
}
