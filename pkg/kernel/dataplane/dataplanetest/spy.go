// SPDX-License-Identifier: Apache-2.0

// Package dataplanetest contains an in-memory kernel that behaves like the real one, as far
// as tests of other packages need that, a Spy on a kernel, and states such as Base and Peers.
package dataplanetest

import (
	"context"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Spy wraps a Kernel. It records the operations, counts the reads, and can make operations
// and reads fail. It is as safe for concurrent use as its Kernel.
type Spy struct {
	dataplane.Kernel
	// Fail returns the error with which an operation must fail before it reaches the
	// kernel, or nil. Fail itself may be nil.
	Fail func(dataplane.Op) error
	// ReadError is called before each read. It returns the error with which the read must
	// fail, or nil. ReadError itself may be nil.
	ReadError func() error
	// Reads and Brief count the full reads, and those without the routing table.
	Reads, Brief int

	mu  sync.Mutex
	ops []dataplane.Op
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
		s.Brief++
	default:
		s.Reads++
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

// Take returns the operations since the last call of Take, in order, including those that
// failed.
func (s *Spy) Take() []dataplane.Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	ops := slices.Clone(s.ops)
	s.ops = nil
	return ops
}
