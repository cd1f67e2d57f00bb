// SPDX-License-Identifier: Apache-2.0

// Package dataplanetest contains an in-memory kernel that follows the rules of the real
// one, and the tests that both must pass. It also contains a Spy on a kernel, and states
// such as Base and Peers for other tests.
package dataplanetest

import (
	"context"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// World is a kernel, together with the changes that other programs can make to it. A new
// World has the device eth0, which is up and has the addresses 192.168.77.1/24 and
// fd00:77::1/64.
type World interface {
	dataplane.Kernel
	// Append creates objects as another program, beside existing ones: a route becomes a
	// duplicate or another next hop of a route with the same key. Links may be of type
	// vxlan, bridge or veth. The name of a veth link must be eth and a digit, such as eth1.
	// A route with Multipath set gets the next hops .8 and .9 of eth0's networks. A route
	// with a NexthopID uses a nexthop object, which Append creates.
	Append(objects ...dataplane.Object) error
	// Change gives the route with r's key the other attributes of r, as `ip route change` does. The
	// kernel announces only the result.
	Change(r dataplane.Route) error
	// Remove deletes objects as another program.
	Remove(objects ...dataplane.Object) error
	// SetUp sets a device up or down.
	SetUp(dev string, up bool) error
	// SetCarrier gives a carrier to a device of type veth that is up, or takes it away.
	// It returns when the kernel has handled that.
	SetCarrier(dev string, on bool) error
	// SetARP sets whether a device resolves addresses to neighbours.
	SetARP(dev string, on bool) error
	// RemoveNexthop deletes the nexthop object of another program with that id, together
	// with the routes that use it. It returns nil if there is none.
	RemoveNexthop(id uint32) error
	// Learn creates a neighbour entry that is not permanent.
	Learn(n dataplane.Neigh) error
	// AcceptRA returns the sysctl accept_ra of a device.
	AcceptRA(dev string) (string, error)
}

// Disturber contains further disturbances that a World may implement.
type Disturber interface {
	// Overflow makes all monitors lose announcements.
	Overflow() error
	// DeleteNexthop deletes the n-th nexthop object of flanneld, from 0 and modulo their
	// number, together with the routes that use it. It does nothing if there is none.
	DeleteNexthop(n int) error
	// ReplaceNexthop chooses an object like DeleteNexthop, and gives it another gateway.
	ReplaceNexthop(n int) error
}

// Traffic is implemented by a World that has a host behind its tunnels.
type Traffic interface {
	// Remote returns the objects that are needed to reach that host. Peer(i, variant)
	// returns none of them for the hosts of a walk.
	Remote() []dataplane.Object
	// Exchange sends packets to the host through each tunnel and waits for their return. It
	// returns an error if no packet comes back through one of the tunnels. The host sends
	// its packets to the MACs of the devices in state.
	Exchange(ctx context.Context, state dataplane.State) error
}

// Spy wraps a Kernel. It records the operations, counts the reads, can make operations and
// reads fail, and can make monitors lose announcements. It is as safe for concurrent use as
// its Kernel.
type Spy struct {
	dataplane.Kernel
	// Fail returns the error with which an operation must fail before it reaches the
	// kernel, or nil. Fail itself may be nil.
	Fail func(dataplane.Op) error
	// ReadError is called before each read. It returns the error with which the read must
	// fail, or nil. ReadError itself may be nil.
	ReadError func() error
	// Lose reports whether to drop the announcements of a Drain and to tell the Reconciler
	// that some were lost. Lose itself may be nil.
	Lose func() bool

	mu    sync.Mutex
	ops   []dataplane.Op
	reads int // full reads
	brief int // reads without the routing table
}

// Read implements dataplane.Kernel.
func (s *Spy) Read(ctx context.Context, scope dataplane.Scope) (dataplane.State, error) {
	if s.ReadError != nil {
		if err := s.ReadError(); err != nil {
			return dataplane.State{}, err
		}
	}

	s.mu.Lock()
	switch {
	case len(scope.Networks) == 0: // only links
	case scope.Connected:
		s.brief++
	default:
		s.reads++
	}
	s.mu.Unlock()
	return s.Kernel.Read(ctx, scope)
}

// Apply implements dataplane.Kernel.
func (s *Spy) Apply(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	s.mu.Lock()
	s.ops = append(s.ops, ops...)
	s.mu.Unlock()
	if s.Fail == nil {
		return s.Kernel.Apply(ctx, ops)
	}

	var failed []dataplane.OpError
	var rest []dataplane.Op
	for _, op := range ops {
		if err := s.Fail(op); err != nil {
			failed = append(failed, dataplane.OpError{Op: op, Err: err})
		} else {
			rest = append(rest, op)
		}
	}
	if len(failed) == 0 {
		return s.Kernel.Apply(ctx, ops) // ops and not a copy of it, because Apply completes the objects in it
	}
	return append(failed, s.Kernel.Apply(ctx, rest)...)
}

// Monitor implements dataplane.Kernel.
func (s *Spy) Monitor(scope dataplane.Scope) (dataplane.Monitor, error) {
	m, err := s.Kernel.Monitor(scope)
	return lossyMonitor{m, s}, err
}

// lossyMonitor is a monitor that reports lost announcements when Spy.Lose says so.
type lossyMonitor struct {
	dataplane.Monitor
	spy *Spy
}

// Drain implements dataplane.Monitor.
func (f lossyMonitor) Drain() ([]dataplane.Event, bool, bool) {
	events, rerouted, lost := f.Monitor.Drain()
	if f.spy.Lose != nil && f.spy.Lose() {
		return nil, true, true
	}
	return events, rerouted, lost
}

// Take returns the operations since the last call of Take, in order, including those that
// failed.
func (s *Spy) Take() []dataplane.Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	ops := slices.Clone(s.ops)
	s.ops = nil
	return ops
}
