// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// announcedAnnotation is the key of the annotation with what a leader has announced.
const announcedAnnotation = "flanneld/announced"

// leaderLease is a Lease of the API. Its Version is empty if the API does not have the Lease.
type leaderLease struct {
	Metadata struct {
		Version     string            `json:"resourceVersion"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Holder      string `json:"holderIdentity"`
		Seconds     int    `json:"leaseDurationSeconds"`
		Transitions int    `json:"leaseTransitions"`
	} `json:"spec"`
}

func (l leaderLease) leader() subnet.Leader {
	found := subnet.Leader{Name: l.Spec.Holder}
	if text := l.Metadata.Annotations[announcedAnnotation]; found.Name != "" && text != "" {
		found.Announced = json.RawMessage(text)
	}
	return found
}

// leaseTimes records, by the name of a Lease, when this process first saw the present version of the
// Lease. The zero leaseTimes is usable.
type leaseTimes struct {
	mu   sync.Mutex
	seen map[string]seenLease
}

type seenLease struct {
	version string
	at      time.Time
}

// expired reports whether a Lease has stayed unchanged for longer than its duration, since this
// process first saw its present version. If so, its holder is gone. ttl is the duration of a Lease
// that contains none.
func (s *leaseTimes) expired(name string, l leaderLease, ttl time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.seen == nil {
		s.seen = map[string]seenLease{}
	}
	if s.seen[name].version != l.Metadata.Version {
		s.seen[name] = seenLease{l.Metadata.Version, now}
	}
	if l.Spec.Seconds > 0 {
		ttl = time.Duration(l.Spec.Seconds) * time.Second
	}
	return now.Sub(s.seen[name].at) > ttl
}
