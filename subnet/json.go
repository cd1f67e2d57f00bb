// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/spell"
)

// DecodeBackend decodes a backend's part of the configuration into the struct
// that into points to. Keys are matched without regard to case, as everywhere
// in the configuration. warnings has one line for each key that is neither a
// field of the struct nor "Type" nor one of the names in also, and for each key
// that is given more than once. If raw is nil or null, the struct keeps its values.
func DecodeBackend(raw json.RawMessage, into any, also ...string) (warnings []string, err error) {
	if len(raw) == 0 || isNull(raw) {
		return nil, nil
	}
	if err := decodeObject(raw, into); err != nil {
		return nil, fmt.Errorf("Backend: %w", err)
	}
	known := slices.Concat(fieldNames(into), []string{"Type"}, also)
	return keyWarnings(raw, known...), nil
}

// mostWarnings is the largest number of warnings about the keys of one object.
const mostWarnings = 8

// keyWarnings returns one warning for each key of the JSON object raw that is not in known, and for each
// that was given before, in the order of the keys. Beyond mostWarnings it returns only their number. It
// returns nil if raw is no object.
func keyWarnings(raw json.RawMessage, known ...string) []string {
	var warnings []string
	more := 0
	given := map[string]string{} // by key in lower case, because keys are compared without regard to case
	for _, m := range members(raw) {
		key := m.key
		folded := strings.ToLower(key)
		before, repeated := given[folded]
		given[folded] = key
		unknown := !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, key) })
		switch {
		case !unknown && !repeated:
		case len(warnings) == mostWarnings:
			more++
		case unknown:
			nearest, _ := spell.Nearest(Shorten(key), known)
			warnings = append(warnings, fmt.Sprintf("unknown key %q is ignored, the nearest known key is %q", Shorten(key), nearest))
		case key == before:
			warnings = append(warnings, fmt.Sprintf("key %q is given more than once: the last one counts", key))
		default:
			warnings = append(warnings, fmt.Sprintf("keys %q and %q are the same: the last one, %q, counts", before, key, key))
		}
	}
	if more > 0 {
		warnings = append(warnings, fmt.Sprintf("%d more keys are ignored or given more than once", more))
	}
	return warnings
}

// WithoutKey returns the JSON object raw without the key name, which is not case-sensitive. It keeps the
// order, and repeated keys. If raw is no object, the result is an empty one.
func WithoutKey(raw json.RawMessage, name string) json.RawMessage {
	var rest [][]byte
	for _, m := range members(raw) {
		if !strings.EqualFold(m.key, name) {
			key, _ := json.Marshal(m.key) // cannot fail for a string
			rest = append(rest, slices.Concat(key, []byte{':'}, m.value))
		}
	}
	return slices.Concat([]byte{'{'}, bytes.Join(rest, []byte{','}), []byte{'}'})
}

// Keys returns the keys of the JSON object raw with their values. Of keys that differ only in case it
// returns the last one, which is the one that counts.
func Keys(raw json.RawMessage) (map[string]json.RawMessage, error) {
	keys := map[string]json.RawMessage{}
	if err := decodeObject(raw, &keys); err != nil {
		return nil, err
	}
	clear(keys)
	for _, m := range lastMembers(raw) {
		keys[m.key] = m.value
	}
	return keys, nil
}

// lastMembers returns the members of the JSON object raw that count, by key in lower case. It returns none
// if raw is no object.
func lastMembers(raw json.RawMessage) map[string]member {
	last := map[string]member{}
	for _, m := range members(raw) {
		last[strings.ToLower(m.key)] = m
	}
	return last
}

type member struct {
	key   string
	value json.RawMessage
}

// members returns the members of the JSON object raw in their order, with each repeated key. It returns nil
// if raw is no object.
func members(raw json.RawMessage) (all []member) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil
	}

	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil
		}
		var m member
		m.key, _ = key.(string) // the decoder accepts nothing else as a key
		if d.Decode(&m.value) != nil {
			return nil
		}
		all = append(all, m)
	}
	if _, err := d.Token(); err != nil { // the object is cut off
		return nil
	}
	return all
}

// fieldNames returns the keys of the struct that v points to.
func fieldNames(v any) []string {
	var names []string
	for f := range reflect.TypeOf(v).Elem().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			name = f.Name
		}
		if f.IsExported() && name != "-" {
			names = append(names, name)
		}
	}
	return names
}

// decodeObject is json.Unmarshal for input that must be one JSON object.
func decodeObject(raw []byte, into any) error {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		return errors.New("want a JSON object, have nothing")
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return explain(err)
	}
	if raw[0] != '{' {
		return fmt.Errorf("want a JSON object, have %s", Shorten(string(raw)))
	}
	return nil
}

// explain describes an error of encoding/json in terms of the configuration.
func explain(err error) error {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("byte %d: %w", syntax.Offset, err)
	case errors.As(err, &kind) && kind.Field == "":
		return fmt.Errorf("want a JSON object, have a JSON %s", kind.Value)
	case errors.As(err, &kind):
		return fmt.Errorf("%s: want %s, have %s", kind.Field, kindName(kind.Type), Shorten(kind.Value))
	}
	return err
}

func kindName(t reflect.Type) string {
	switch t.Kind() { //nolint:exhaustive // String describes the other kinds well enough
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return "a whole number"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<t.Bits()-1)
	case reflect.String:
		return "a string"
	case reflect.Slice:
		return "a list of strings"
	}
	return t.String()
}

func decodeString(key string, raw json.RawMessage) (s string, err error) {
	if raw[0] != '"' {
		return "", fmt.Errorf("%s: want a string, have %s", key, Shorten(string(raw)))
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", fmt.Errorf("%s: %w", key, explain(err))
	}
	return s, nil
}

// Shorten cuts off the part of s behind the first 64 bytes and puts "…" in its place, so that a
// message with text from an outside source stays short. It does not remove line breaks.
func Shorten(s string) string { return oneline.Shorten(s, 64) }

func isNull(raw json.RawMessage) bool { return string(bytes.TrimSpace(raw)) == "null" }
