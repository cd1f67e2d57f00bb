// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
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

// Locate creates the backend of a network with locations. between(env) creates the backend for
// packets between locations, and inside(env) the one for packets inside of a location. same is the
// configuration of the latter.
type Locate func(env Env, same SameLocation, between, inside Create) (Backend, []string, error)
