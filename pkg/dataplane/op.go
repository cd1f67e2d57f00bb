// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/flanneld/flanneld/pkg/oneline"
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

// refusal returns a Refusal and true if the kernel has refused to put a route because of
// its gateway: the gateway is unreachable, or it is not another host but an address of this
// host or the broadcast address of a network. It returns false for any other failure, and
// for a route through a nexthop object, because that object may be the cause.
func (e OpError) refusal() (f Refusal, ok bool) {
	route, _ := e.Op.Object.(Route) // any other object leaves the zero Route, which has no gateway
	switch {
	case e.Op.Delete, !route.Gateway.IsValid(), route.NexthopID != 0:
	case errors.Is(e.Err, syscall.ENETUNREACH), errors.Is(e.Err, syscall.EHOSTUNREACH):
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s is not on a network of %s", route.Gateway, route.Dev)}, true
	case errors.Is(e.Err, syscall.EINVAL):
		return Refusal{Route: route, Reason: fmt.Sprintf("gateway %s on %s: %v", route.Gateway, route.Dev, e.Err)}, true
	}
	return Refusal{}, false
}

// opErrors joins errs, and returns nil if there are none. It shows and wraps only the first
// three, so that the message stays short if thousands of changes fail for the same reason.
func opErrors(errs []error) error {
	const shown = 3
	if len(errs) <= shown {
		return oneline.Join(errs...)
	}
	return fmt.Errorf("%w; and %d more", oneline.Join(errs[:shown]...), len(errs)-shown)
}
