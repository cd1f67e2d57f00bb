// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

// The Lease flanneld-<task> names the leader for a task, like the Leases of the control plane. Nodes do
// not compare the times in the Lease with their clocks. A leader is gone if its Lease has not changed
// for the duration that the Lease contains.

const (
	leaseGroup = "coordination.k8s.io"
	sendMerge  = "application/merge-patch+json"
	// defaultNamespace is the namespace of the Lease if this daemon runs outside of a pod.
	defaultNamespace  = "kube-system"
	serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
	microTime         = "2006-01-02T15:04:05.000000Z07:00"
)

// errTermOver means that this node is not the leader any more.
var errTermOver = errors.New("this node is not the leader any more")

// leaderTerm is a time in which this node is the leader for one task.
type leaderTerm struct {
	*Manager
	path, object, node string

	mu   sync.Mutex // locked during a request
	now  leaderLease
	over bool
}

// Leader implements subnet.Elector.
func (m *Manager) Leader(ctx context.Context, task string) (subnet.Leader, error) {
	l, err := m.term(task, "").read(ctx)
	return l.leader(), err
}

// Lead implements subnet.Elector. A daemon that was restarted continues as the leader.
func (m *Manager) Lead(ctx context.Context, task string, own subnet.Lease, lead func(context.Context, subnet.Announce)) error {
	t := m.term(task, own.Key)
	found, err := t.read(ctx)
	if err != nil {
		return err
	}
	if by := found.Spec.Holder; by != "" && by != own.Key {
		return fmt.Errorf("%w: %s", subnet.ErrLed, by)
	}
	began := time.Now()
	if err := t.begin(ctx, found); err != nil {
		return err
	}
	defer t.end(ctx)
	wait.Renewal{TTL: m.timing.leader, Renew: t.renewOnce, Lost: errTermOver}.Hold(ctx, began, func(ctx context.Context) { lead(ctx, t.announce) })
	return nil
}

func (m *Manager) term(task, node string) *leaderTerm {
	name := "flanneld-" + task
	return &leaderTerm{Manager: m, node: node, object: name, path: "namespaces/" + url.PathEscape(m.namespace()) + "/leases"}
}

// namespace returns the namespace of the Lease: the namespace of the pod, or kube-system if this daemon
// runs outside of a pod.
func (m *Manager) namespace() string {
	own, _ := os.ReadFile(serviceAccountDir + "/namespace") // it does not exist outside of a pod
	return cmp.Or(m.cfg.PodNamespace, strings.TrimSpace(string(own)), defaultNamespace)
}

// read reads the Lease. l has no holder if the Lease has expired, and is zero if the API does not
// have the Lease.
func (t *leaderTerm) read(ctx context.Context) (l leaderLease, err error) {
	l, err = t.send(ctx, request{path: t.path + "/" + url.PathEscape(t.object)})
	if hasCode(err, http.StatusNotFound) {
		return leaderLease{}, nil
	}
	if err != nil {
		return leaderLease{}, fmt.Errorf("read the leader from the Lease %s: %w", t.object, err)
	}
	if t.leases.expired(t.object, l, t.timing.leader) {
		l.Spec.Holder = ""
	}
	return l, nil
}

// begin creates the Lease or, if found exists, takes it. It returns subnet.ErrLed, wrapped, if
// another node has created or changed the Lease since found was read.
func (t *leaderTerm) begin(ctx context.Context, found leaderLease) (err error) {
	if found.Metadata.Version != "" {
		err = t.patch(ctx, found, "", t.spec(found.Spec.Transitions+1, true))
	} else {
		t.now, err = t.send(ctx, request{method: http.MethodPost, path: t.path, content: sendJSON}, map[string]any{
			"apiVersion": leaseGroup + "/v1", "kind": "Lease", "metadata": map[string]any{"name": t.object}, "spec": t.spec(0, true),
		})
	}
	if hasCode(err, http.StatusConflict) {
		return fmt.Errorf("%w: it was faster", subnet.ErrLed)
	}
	if err != nil {
		return fmt.Errorf("become the leader by the Lease %s: %w", t.object, err)
	}
	return nil
}

// spec returns the spec of the Lease with this node as the leader. transitions becomes its
// leaseTransitions, the number of times that the Lease was taken after its creation. taken must be
// true at the beginning of a term. Then the spec contains the present time as acquireTime.
func (t *leaderTerm) spec(transitions int, taken bool) map[string]any {
	now := time.Now().UTC().Format(microTime)
	spec := map[string]any{
		"holderIdentity": t.node, "leaseDurationSeconds": int(t.timing.leader.Seconds()), "leaseTransitions": transitions, "renewTime": now,
	}
	if taken {
		spec["acquireTime"] = now
	}
	return spec
}

// patch changes the Lease if it has not changed since found was read, and stores the result in
// t.now. If it has changed, the error has the HTTP status 409. If announced is empty, patch removes
// the annotation.
func (t *leaderTerm) patch(ctx context.Context, found leaderLease, announced string, spec map[string]any) (err error) {
	annotations := map[string]any{announcedAnnotation: announced}
	if announced == "" {
		annotations[announcedAnnotation] = nil
	}
	t.now, err = t.send(ctx, request{method: http.MethodPatch, path: t.path + "/" + url.PathEscape(t.object), content: sendMerge}, map[string]any{
		"metadata": map[string]any{"resourceVersion": found.Metadata.Version, "annotations": annotations}, "spec": spec,
	})
	return err
}

// send sends a request, and returns the Lease in the answer. object is at most one value, which
// becomes the body of the request as JSON.
func (t *leaderTerm) send(ctx context.Context, r request, object ...any) (l leaderLease, err error) {
	r.group, r.accept = leaseGroup, acceptJSON
	for _, o := range object {
		if r.body, err = json.Marshal(o); err != nil {
			return l, err
		}
	}
	body, err := t.client.call(ctx, t.timing.request, r)
	if err == nil {
		err = json.Unmarshal(body, &l)
	}
	return l, err
}

// renewOnce is the Renew of a wait.Renewal.
func (t *leaderTerm) renewOnce(ctx context.Context) error { return t.update(ctx, nil) }

// announce implements subnet.Announce.
func (t *leaderTerm) announce(ctx context.Context, text json.RawMessage) error {
	return t.update(ctx, text)
}

// update renews the Lease, and announces text unless it is nil. If another program has changed the
// Lease, for example its labels, update reads it again and tries once more. It returns errTermOver
// if this node is not the leader any more.
func (t *leaderTerm) update(ctx context.Context, text json.RawMessage) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return errTermOver
	}
	found := t.now
	for again := true; ; again = false {
		announced := found.Metadata.Annotations[announcedAnnotation]
		if text != nil {
			announced = string(text)
		}
		err := t.patch(ctx, found, announced, t.spec(found.Spec.Transitions, false))
		if err == nil {
			return nil
		}
		t.now = found
		if !hasCode(err, http.StatusConflict) && !hasCode(err, http.StatusNotFound) || !again {
			return fmt.Errorf("renew the Lease %s: %w", t.object, err)
		}
		if found, err = t.read(ctx); err != nil {
			return err
		}
		if found.Spec.Holder != t.node {
			return errTermOver
		}
	}
}

// end gives up the Lease, so that another node can lead at once, even if ctx has ended. If that
// fails, the Lease expires.
func (t *leaderTerm) end(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = t.patch(ctx, t.now, t.now.Metadata.Annotations[announcedAnnotation], map[string]any{"holderIdentity": "", "leaseDurationSeconds": 1})
}
