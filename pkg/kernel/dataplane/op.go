// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// Op is one change of the kernel.
type Op struct {
	Delete bool // if false, the object is created or replaces the one with its key
	// Exclusive makes the creation of a route fail with EEXIST if there is a route with
	// its destination, metric and TOS.
	Exclusive bool
	Object    Object
}

// String describes the change.
func (o Op) String() string {
	switch {
	case o.Delete:
		return "delete " + o.Object.String()
	case o.Exclusive:
		return "add " + o.Object.String()
	}
	return "put " + o.Object.String()
}

// Refusal is a wanted route that the Reconciler does not create.
type Refusal struct {
	Route  Route
	Reason string
	Dev    string // the device to which the destination is directly connected, if that is the reason; otherwise ""
}

// OpError is an operation that failed, and the cause.
type OpError struct {
	Op  Op
	Err error
}

// Error names the change and the cause.
func (e OpError) Error() string { return e.Op.String() + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e OpError) Unwrap() error { return e.Err }

// refusal returns a Refusal and true if the kernel has refused to put a route because of its gateway.
func (e OpError) refusal() (f Refusal, ok bool) {
	route, _ := e.Op.Object.(Route)                                      // any other object leaves the zero Route, which has no gateway
	if e.Op.Delete || !route.Gateway.IsValid() || route.NexthopID != 0 { // a nexthop object may be the cause
		return Refusal{}, false
	}
	if errors.Is(e.Err, syscall.ENETUNREACH) || errors.Is(e.Err, syscall.EHOSTUNREACH) {
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s is not on a network of %s", route.Gateway, route.Dev)}, true
	}
	if errors.Is(e.Err, syscall.EINVAL) { // an address of this host, or the broadcast address of a network
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s on %s: %v", route.Gateway, route.Dev, e.Err)}, true
	}
	return Refusal{}, false
}

// opErrors joins errs. Thousands of changes may fail for the same reason, so it shows only a few.
func opErrors(errs []error) error {
	const shown = 3
	if len(errs) <= shown {
		return oneline.Join(errs...)
	}
	return fmt.Errorf("%w; and %d more", oneline.Join(errs[:shown]...), len(errs)-shown)
}
