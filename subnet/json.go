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

	"github.com/flanneld/flanneld/pkg/spell"
)

// DecodeBackend decodes a backend's part of the configuration into the struct
// that into points to. Keys are matched without regard to case, as everywhere
// in the configuration. warnings has one line for each key that is neither a
// field of the struct nor "Type" nor one of the names in also. If raw is nil or
// null, the struct keeps its values.
func DecodeBackend(raw json.RawMessage, into any, also ...string) (warnings []string, err error) {
	if len(raw) == 0 || isNull(raw) {
		return nil, nil
	}
	if err := decodeObject(raw, into); err != nil {
		return nil, fmt.Errorf("Backend: %w", err)
	}
	known := slices.Concat(fieldNames(into), []string{"Type"}, also)
	return UnknownKeys(raw, known...), nil
}

// UnknownKeys returns one warning for each key of the JSON object raw that is
// not in known, in the order of the keys. It returns nil if raw is no object.
func UnknownKeys(raw json.RawMessage, known ...string) []string {
	var have map[string]json.RawMessage
	if json.Unmarshal(raw, &have) != nil {
		return nil
	}
	var warnings []string
	for key := range have {
		if !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, key) }) {
			warnings = append(warnings, unknownKey(key, known))
		}
	}
	slices.Sort(warnings)
	return warnings
}

func unknownKey(key string, known []string) string {
	key = Shorten(key)
	if len(known) == 0 {
		return fmt.Sprintf("unknown key %q is ignored", key)
	}
	nearest, _ := spell.Nearest(key, known)
	return fmt.Sprintf("unknown key %q is ignored; the nearest known key is %q", key, nearest)
}

// fieldNames returns the JSON keys of the struct that v points to.
func fieldNames(v any) []string {
	t := reflect.TypeOf(v).Elem()
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for f := range t.Fields() {
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

func decodeString(key string, raw json.RawMessage, into *string) error {
	if raw[0] != '"' {
		return fmt.Errorf("%s: want a string, have %s", key, Shorten(string(raw)))
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("%s: %w", key, explain(err))
	}
	return nil
}

// Shorten cuts off the part of s behind the first 64 bytes and puts "…" in its place, so that a
// message with text from an outside source stays short. It does not remove line breaks.
func Shorten(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

func isNull(raw json.RawMessage) bool { return string(bytes.TrimSpace(raw)) == "null" }
