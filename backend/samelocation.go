// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// SameLocation is the key SameLocation of a Backend object: the backend between hosts of one location.
// Its value is the type of that backend, or an object like Backend.
type SameLocation struct {
	Type string          // in lower case; empty if there is none
	Raw  json.RawMessage // the object; nil if there is only the type
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *SameLocation) UnmarshalJSON(raw []byte) (err error) {
	s.Type, s.Raw, err = decodeInner(raw, errSameLocation)
	return err
}

var errSameLocation = errors.New(`SameLocation: want "vxlan" or "host-gw", or an object with this Type and its keys`)

// decodeInner decodes a value that names another backend: its type, as text, or an object with the
// type and its keys. It returns wrong if there is no type in it.
func decodeInner(raw []byte, wrong error) (kind string, object json.RawMessage, err error) {
	if string(raw) == "null" {
		return "", nil, nil
	}
	if json.Unmarshal(raw, &kind) != nil {
		var typed struct{ Type string }
		if json.Unmarshal(raw, &typed) != nil {
			return "", nil, wrong
		}
		kind = typed.Type
		object = slices.Clone(raw)
	}
	if kind == "" {
		return "", nil, wrong
	}
	return strings.ToLower(kind), object, nil
}

// Surrounding is a Backend that may leave the packets between hosts of one location to another backend.
type Surrounding interface {
	// SameLocation returns the key SameLocation of the configuration. Its Type is empty if the key
	// is missing. It is pure.
	SameLocation() SameLocation
}

// Locate creates the backend of a network with locations. between(env) creates the backend for
// packets between locations, and inside(env) the one for packets inside of a location. same is the
// configuration of the latter.
type Locate func(env Env, same SameLocation, between, inside func(Env) (Backend, []string, error)) (Backend, []string, error)

// Placer is a Backend whose hosts may have locations.
type Placer interface {
	// Inside returns the types of the backends between hosts of one location. The result is empty if
	// the configuration has no locations. Inside is pure.
	Inside() []string
}

// Inside returns the types of the backends that b has between hosts of one location. It returns nil
// if b is not a Placer.
func Inside(b Backend) []string {
	if p, ok := b.(Placer); ok {
		return p.Inside()
	}
	return nil
}

// CheckLocations returns an error if hosts with backend b cannot have locations. configured is the
// type of b in the configuration.
func CheckLocations(b Backend, configured string) error {
	if len(Inside(b)) > 0 {
		return nil
	}
	return fmt.Errorf("the backend %s has no locations: expected wireguard with SameLocation as Backend", configured)
}

// Locator is a Network that uses another backend for peers at the location of this host. Its method is
// called from the goroutine that calls Sync.
type Locator interface {
	// Location returns how many peers are served by which backend. It returns nil if the network has no
	// locations.
	Location() *status.Location
}
