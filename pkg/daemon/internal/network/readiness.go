// SPDX-License-Identifier: Apache-2.0

package network

import (
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/health"
)

// The components of readiness.
const (
	partDatapath   = "data path"
	partDatastore  = "datastore"
	partSubnetFile = "subnet file"
	partRules      = "traffic rules"
	partInterface  = "external interface"
	partSubnet     = "subnet"
	partPods       = doctor.Part
)

// interfaceGrace is the time without a usable external interface after which the daemon
// is not ready. A link that goes down and up, or a restarted DHCP client, removes an
// address only for a moment. The daemon switches to another interface sooner.
const interfaceGrace = 10 * time.Second

// readiness collects the states of the components.
type readiness struct {
	health   *health.Status
	grace    time.Duration    // --readyz-datastore-grace
	leaseEnd func() time.Time // of this host's lease; zero if it does not end, or there is none yet
	once     sync.Once
	up       chan struct{} // closed when all components are good for the first time
}

func newReadiness(o options.Options, leaseEnd func() time.Time) *readiness {
	// There is a pass in every resync period, with a jitter of a fifth.
	s := health.New(2*o.Resync+time.Minute, partSubnetFile, partDatapath, partRules)
	s.SetGrace(partDatastore, o.ReadyzDatastoreGrace)
	s.SetGrace(partInterface, interfaceGrace)
	return &readiness{health: s, grace: o.ReadyzDatastoreGrace, leaseEnd: leaseEnd, up: make(chan struct{})}
}

// report records the state of a component.
func (r *readiness) report(part string, err error) {
	r.health.Set(part, err)
	if ready, _ := r.health.Ready(); ready {
		r.once.Do(func() { close(r.up) })
	}
}

// reportStore records whether the store is available. The store may be unavailable for
// the grace period, capped at half of the remaining lease time, so that the host becomes
// unready before the lease expires.
func (r *readiness) reportStore(err error) {
	if _, before := r.health.Part(partDatastore); err != nil && before == nil {
		grace := r.grace
		if end := r.leaseEnd(); !end.IsZero() {
			grace = min(grace, time.Until(end)/2)
		}
		r.health.SetGrace(partDatastore, grace)
	}
	r.report(partDatastore, err)
}

// wasReady reports whether the network has been ready at some time.
func (r *readiness) wasReady() bool { return isClosed(r.up) }
