// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"errors"
	"fmt"
	"strings"
)

// ErrExists means that a route was not put because there is another one to the same destination that the tables did
// not show. The next comparison sees it.
var ErrExists = errors.New("there is another route to the same destination")

// ErrThrottled means that the cloud refuses a call because there were too many. The call may
// be repeated after a pause.
var ErrThrottled = errors.New("the cloud refuses calls because there are too many")

// ErrUnavailable means that the cloud has not answered, or has answered that it cannot process the
// call now. The call may be repeated.
var ErrUnavailable = errors.New("the cloud does not answer")

// ErrKeys means that the cloud refuses the keys of this host for any call. In a message its text follows
// the name of the cloud.
var ErrKeys = errors.New("refuses the keys")

// DroppedError means that the cloud drops packets of pods from and to a host, even if there are routes to
// it, because the cloud lets the host send and receive only packets with the host's own addresses.
type DroppedError struct{ Err error }

// Error implements error.
func (e *DroppedError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *DroppedError) Unwrap() error { return e.Err }

// QuotaError means that a table has as many routes as the cloud allows.
type QuotaError struct {
	Table string
	Limit int    // 0 if it is not known
	Quota string // in the words of the cloud, such as ROUTES; empty if it has no name
}

// Error implements error.
func (e *QuotaError) Error() string {
	limit := "its limit of routes"
	if e.Limit > 0 {
		limit = fmt.Sprintf("its limit of %d routes", e.Limit)
	}
	if e.Quota != "" {
		limit += ", quota " + e.Quota
	}
	return fmt.Sprintf("table %s has reached %s: ask the cloud for a higher quota, or remove routes", e.Table, limit)
}

// MissingError names the rights that this host needs and does not have.
type MissingError struct {
	Permissions []string // such as ec2:CreateRoute
	Page        string   // path of the documentation page with the policy to paste
}

// Error implements error.
func (e *MissingError) Error() string {
	what := "permission " + strings.Join(e.Permissions, ", ") + " is missing"
	if len(e.Permissions) > 1 {
		what = "permissions " + strings.Join(e.Permissions, ", ") + " are missing"
	}
	return what + ": " + e.Page + " has the policy to paste"
}

// Transient reports whether err may disappear without an operator: the cloud does not answer, the cloud refuses
// calls because there are too many, there is a route that the tables did not show, or this host waits for the end of a
// change.
func Transient(err error) bool {
	return errors.Is(err, ErrThrottled) || errors.Is(err, ErrUnavailable) || errors.Is(err, ErrExists) || errors.Is(err, errChanging)
}

// Kind returns the kind of err. For the result of a call this is ok, throttled, unavailable, denied, quota
// or failed. It is waiting if this host waits for the end of a change in the cloud.
func Kind(err error) string {
	var missing *MissingError
	var quota *QuotaError
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errChanging):
		return "waiting"
	case errors.Is(err, ErrThrottled):
		return "throttled"
	case errors.Is(err, ErrUnavailable):
		return "unavailable"
	case errors.As(err, &missing):
		return "denied"
	case errors.As(err, &quota):
		return "quota"
	}
	return "failed"
}
