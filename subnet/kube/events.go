// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"strings"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// eventSender creates Events about this host's Node, for operators. It drops an Event that cannot be
// created because the role does not permit it or the server is unavailable.
type eventSender struct {
	*Manager
	queue chan event
	limit *rate.Limiter
	sent  map[event]time.Time // when each Event was created last; only the goroutine of run uses it
}

type event struct{ reason, message string }

const (
	eventNamespace = "default" // where Events about Nodes are
	eventBurst     = 10
	eventEvery     = time.Minute
	eventRepeat    = 2 * time.Hour // the time until the same Event may be created again: the server keeps an Event for an hour
	maxEventName   = 236           // bytes of the name before the hash: the API accepts 253 in all
	maxEvent       = 1000          // bytes of a message: the API accepts 1024
)

func newEventSender(m *Manager) *eventSender {
	return &eventSender{m, make(chan event, eventBurst), rate.NewLimiter(rate.Every(eventEvery), eventBurst), map[event]time.Time{}}
}

// Warn implements subnet.Manager: it queues an Event about this host's Node. The sender runs during
// Keep. It drops the Event if the same one was created within eventRepeat, if there are many
// others, or if there is no own Node.
func (m *Manager) Warn(reason, message string) {
	select {
	case m.events.queue <- event{reason, message}:
	default: // too many wait already
	}
}

// run creates the Events in the queue until ctx ends.
func (r *eventSender) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.queue:
			if r.pause(ctx) != nil {
				return
			}
			r.createOnce(ctx, e)
			for range len(r.queue) {
				r.createOnce(ctx, <-r.queue)
			}
		}
	}
}

// pause waits for a random time before Events are created. All nodes refuse a bad peer at the same
// moment, and their Events should reach the API server one after the other.
func (r *eventSender) pause(ctx context.Context) error {
	return wait.For(ctx, rand.N(time.Duration(r.nodes.Load())*r.timing.event+1))
}

// createOnce creates an Event unless it has created the same one within eventRepeat, or too many
// others, or there is no own Node.
func (r *eventSender) createOnce(ctx context.Context, e event) {
	maps.DeleteFunc(r.sent, func(_ event, at time.Time) bool { return time.Since(at) >= eventRepeat })
	if _, sent := r.sent[e]; sent || !r.limit.Allow() {
		return
	}
	if s := r.seen.Load(); s != nil && s.exists {
		r.sent[e] = time.Now()
		r.sendNow(ctx, s.uid, e.reason, e.message)
	}
}

// sendNow creates an Event at once. If an earlier run has created the same one, it has the same name,
// and the server refuses the second one.
func (r *eventSender) sendNow(ctx context.Context, uid, reason, message string) {
	name := *r.name.Load()
	sum := sha256.Sum256([]byte(strings.Join([]string{uid, reason, message}, "\x00")))
	event := strings.TrimRight(name[:min(len(name), maxEventName)], ".-") + "." + hex.EncodeToString(sum[:8])
	now := time.Now().UTC().Truncate(time.Second)
	to := request{path: "namespaces/" + eventNamespace + "/events"}
	err := r.client.create(ctx, r.timing.request, to, map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"name": event, "namespace": eventNamespace},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid},
		"type":           "Warning", "reason": reason, "message": message[:min(len(message), maxEvent)],
		"source":         map[string]any{"component": "flanneld", "host": name},
		"firstTimestamp": now, "lastTimestamp": now, "count": 1,
	}, &struct{}{})
	if err != nil {
		klog.FromContext(ctx).V(2).Info("no Event was made", "reason", reason, "cause", err.Error())
	}
}
