// Package dataplanetest holds an in-memory kernel with the kernel's own
// rules, and the tests that it and the real kernel must both pass.
package dataplanetest

import (
	"context"
	"slices"
	"sync"

	"flanneld/pkg/dataplane"
)

// World is a kernel together with what other programs can do to it. A new
// World has the device eth0, up, with the addresses 192.168.77.1/24 and
// fd00:77::1/64.
type World interface {
	dataplane.Kernel
	// Append makes objects as another program would, beside what is there: a
	// route becomes a duplicate or an ECMP sibling of its like. Links may be
	// of type vxlan, bridge or veth; one of type veth is called eth and a digit.
	// A route with Multipath set gets next hops .8 and .9 of eth0's networks; one
	// with a NexthopID goes through a nexthop object, which is made.
	Append(objects ...dataplane.Object) error
	// Remove removes objects as another program would.
	Remove(objects ...dataplane.Object) error
	// SetUp sets a device up or down.
	SetUp(dev string, up bool) error
	// SetCarrier gives a device of type veth that is up its carrier or takes it
	// away, and returns when the kernel has acted on that.
	SetCarrier(dev string, on bool) error
	// SetARP says whether a device resolves addresses to neighbours.
	SetARP(dev string, on bool) error
	// RemoveNexthop deletes the nexthop object with that id, of another program,
	// and with it the routes that use it. It is no error if there is none.
	RemoveNexthop(id uint32) error
	// Learn makes a neighbour entry that is not permanent.
	Learn(n dataplane.Neigh) error
	// AcceptRA returns the sysctl of that name of a device.
	AcceptRA(dev string) (string, error)
}

// Mischief is what else may happen to who listens to a World, if the World can
// do it.
type Mischief interface {
	// Overflow has all listeners lose announcements.
	Overflow() error
	// DeleteNexthop deletes the n-th nexthop object of ours, modulo their
	// number, and with it the routes that use it.
	DeleteNexthop(n int) error
	// ReplaceNexthop has it lead elsewhere instead.
	ReplaceNexthop(n int) error
}

// Traffic is a World with a host behind its tunnels.
type Traffic interface {
	// Remote returns what reaches that host: as for a peer that nobody else is.
	Remote() []dataplane.Object
	// Exchange sends packets there and waits for their return, by devices as
	// they are in state.
	Exchange(ctx context.Context, state dataplane.State) error
}

// Spy stands in front of a kernel, notes what it is told to do, and can fail.
// It is safe for concurrent use as far as its kernel is.
type Spy struct {
	dataplane.Kernel
	// Fail returns the error with which an operation fails before it reaches
	// the kernel. It may be nil.
	Fail func(dataplane.Op) error
	// ReadError returns the error with which a read fails. It may be nil.
	ReadError func() error
	// Lose says whether what was announced is dropped now, and the listener
	// told that something was lost. It may be nil.
	Lose func() bool

	mu    sync.Mutex
	ops   []dataplane.Op
	reads int // of all there is
	brief int // of all but the routes of others
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
	case len(scope.Networks) == 0: // links alone
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
		return s.Kernel.Apply(ctx, ops) // which completes them
	}
	return append(failed, s.Kernel.Apply(ctx, rest)...)
}

// Monitor implements dataplane.Kernel.
func (s *Spy) Monitor(scope dataplane.Scope) (dataplane.Monitor, error) {
	m, err := s.Kernel.Monitor(scope)
	return forgetful{m, s}, err
}

// forgetful is a monitor that at times says it has lost something.
type forgetful struct {
	dataplane.Monitor
	spy *Spy
}

// Drain implements dataplane.Monitor.
func (f forgetful) Drain() ([]dataplane.Event, bool, bool) {
	events, rerouted, lost := f.Monitor.Drain()
	if f.spy.Lose != nil && f.spy.Lose() {
		return nil, true, true
	}
	return events, rerouted, lost
}

// Take returns the operations since the last call, in order.
func (s *Spy) Take() []dataplane.Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	ops := slices.Clone(s.ops)
	s.ops = nil
	return ops
}
