// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"
	"slices"
	"strings"
)

// Inner is a second backend, which a key of a Backend object names. The value of the key is the type of that backend, or
// an object like Backend. An Inner without a type whose Raw is set comes from another value, which is wrong.
type Inner struct {
	Type string          // in lower case
	Raw  json.RawMessage // the object; nil if there is only the type
}

// UnmarshalJSON implements json.Unmarshaler. It never fails, because it does not know the key: the Registry does.
func (i *Inner) UnmarshalJSON(raw []byte) error {
	*i = Inner{Raw: slices.Clone(raw)}
	var object struct{ Type string }
	switch {
	case string(raw) == "null":
		i.Raw = nil
	case json.Unmarshal(raw, &object) == nil:
		i.Type = object.Type
	case json.Unmarshal(raw, &i.Type) == nil && i.Type != "":
		i.Raw = nil
	}
	i.Type = strings.ToLower(i.Type)
	return nil
}

// given reports whether the Backend object has the key.
func (i Inner) given() bool { return i.Type != "" || i.Raw != nil }
