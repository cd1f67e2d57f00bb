// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"net/url"
	"strings"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/wait"
)

// recorder makes Events about the own Node. They are for people to look at: one
// that cannot be made, because the role does not allow it or the server is
// away, is dropped.
type recorder struct {
	m     *Manager
	queue chan event
	limit *rate.Limiter
	said  map[event]time.Time // of the goroutine that sends
}

type event struct{ reason, message string }

const (
	eventNamespace = "default" // where Events about Nodes are
	eventBurst     = 10
	eventEvery     = time.Minute
	eventRepeat    = 2 * time.Hour // the same one again: the server keeps it for an hour
	maxEventName   = 236           // bytes in front of the digest: the API takes 253
	maxEvent       = 1000          // bytes of a message: the API takes 1024
)

func newRecorder(m *Manager) *recorder {
	return &recorder{m: m, queue: make(chan event, eventBurst), limit: rate.NewLimiter(rate.Every(eventEvery), eventBurst), said: map[event]time.Time{}}
}

// Warn implements subnet.Warner: it creates an Event about the own Node, unless it has created
// the same one within eventRepeat, or many others.
func (m *Manager) Warn(reason, message string) { m.events.send(reason, message) }

func (r *recorder) send(reason, message string) {
	select {
	case r.queue <- event{reason, message}:
	default: // too many already
	}
}

// run makes Events until ctx ends.
func (r *recorder) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.queue:
			if r.pause(ctx) != nil {
				return
			}
			r.make(ctx, e)
			for range len(r.queue) {
				r.make(ctx, <-r.queue)
			}
		}
	}
}

// pause waits before Events are made. One bad peer makes all nodes refuse it at the
// same moment: their Events reach the API server one after the other.
func (r *recorder) pause(ctx context.Context) error {
	return wait.For(ctx, rand.N(time.Duration(r.m.nodes.Load())*r.m.timing.event+1))
}

// make makes an Event unless the same one was made lately, or there are too many.
func (r *recorder) make(ctx context.Context, e event) {
	if at, ok := r.said[e]; ok && time.Since(at) < eventRepeat || !r.limit.Allow() {
		return
	}
	for old, at := range r.said {
		if time.Since(at) >= eventRepeat {
			delete(r.said, old)
		}
	}
	if uid := *r.m.uid.Load(); uid != "" {
		r.said[e] = time.Now()
		r.sendNow(ctx, uid, e.reason, e.message)
	}
}

// sendNow makes an Event at once. One that a former run made has the same name, and
// is enough for as long as the server keeps it.
func (r *recorder) sendNow(ctx context.Context, uid, reason, message string) {
	name := *r.m.name.Load()
	event := strings.TrimRight(name[:min(len(name), maxEventName)], ".-") + "." + digest(uid, reason, message)
	now := time.Now().UTC().Truncate(time.Second)
	body, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"name": event, "namespace": eventNamespace},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid},
		"type":           "Warning", "reason": reason, "message": message[:min(len(message), maxEvent)],
		"source":         map[string]any{"component": "flanneld", "host": name},
		"firstTimestamp": now, "lastTimestamp": now, "count": 1,
	})
	if err == nil {
		_, err = r.m.client.call(ctx, r.m.timing.request, request{
			method: "POST", path: "namespaces/" + url.PathEscape(eventNamespace) + "/events",
			accept: acceptMetadata, content: sendJSON, body: body,
		})
	}
	if err != nil {
		klog.FromContext(ctx).V(2).Info("no Event was made", "reason", reason, "cause", err.Error())
	}
}

// digest tells texts apart.
func digest(texts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(texts, "\x00")))
	return hex.EncodeToString(sum[:8])
}
