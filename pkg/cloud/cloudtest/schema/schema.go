// SPDX-License-Identifier: Apache-2.0

// Package schema holds the calls of clouds, their answers, and the types that decode them, against the official
// descriptions of the APIs. The test servers of the clouds refuse what does not fit. testdata contains the names, types
// and values of the descriptions, cut to what is used.
package schema

import (
	"bytes"
	"embed"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

//go:embed testdata/*.json
var files embed.FS

// API is the description of an API.
type API struct {
	Calls map[string]struct{ In, Out, Query string } // names of types
	Types map[string]Type
}

// Type has members or values.
type Type struct {
	// members contains the types of the members. A ! after a name marks a member that is required. []T is a list of T.
	members map[string]string
	values  []string
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Type) UnmarshalJSON(text []byte) error {
	if bytes.HasPrefix(text, []byte("[")) {
		return json.Unmarshal(text, &t.values)
	}
	return json.Unmarshal(text, &t.members)
}

// Load returns the description of ec2, gce, ali or tencent. If testdata has none that can be read, the API has no calls,
// so Check accepts nothing.
func Load(name string) (a API) {
	text, _ := files.ReadFile("testdata/" + name + ".json")
	_ = json.Unmarshal(text, &a)
	return a
}

// Check returns an error unless request and answer fit the call with that name. Each is a tree as Form, XML or JSON
// returns it; nil is not checked.
func (a API) Check(call string, request, answer any) error {
	c, ok := a.Calls[call]
	if !ok {
		return fmt.Errorf("the description has no call %q", call)
	}
	if request != nil {
		if err := a.fits(request, c.In, call); err != nil {
			return err
		}
	}
	if answer != nil {
		return a.fits(answer, c.Out, "answer of "+call)
	}
	return nil
}

// CheckQuery returns an error unless the parameters of a URL fit the call with that name.
func (a API) CheckQuery(call string, query url.Values) error {
	return a.fits(Form(query), a.Calls[call].Query, "parameters of "+call)
}

// Values returns the values of an enumeration.
func (a API) Values(name string) []string { return a.Types[name].values }

// fits returns an error unless value fits the type. where names the value.
func (a API) fits(value any, kind, where string) error {
	if item, list := strings.CutPrefix(kind, "[]"); list {
		return a.fitsList(value, item, where)
	}
	if values := a.Values(kind); values != nil {
		if text, ok := value.(string); !ok || !slices.Contains(values, text) {
			return fmt.Errorf("%s: %v is not one of %v", where, value, values)
		}
		return nil
	}
	if members := a.Types[kind].members; members != nil {
		return a.fitsMembers(value, members, where)
	}

	ok := true
	text, isText := value.(string)
	switch kind {
	case "string":
		ok = isText
	case "boolean":
		_, ok = value.(bool)
		ok = ok || text == "true" || text == "false"
	case "number":
		_, ok = value.(float64)
		_, err := strconv.ParseFloat(text, 64)
		ok = ok || isText && err == nil
	case "object": // with any members
	default:
		return fmt.Errorf("%s: the description has no type %q", where, kind)
	}
	if !ok {
		return fmt.Errorf("%s: %v is not a %s", where, value, kind)
	}
	return nil
}

func (a API) fitsList(value any, item, where string) error {
	var all []any
	switch v := value.(type) {
	case nil:
	case []any:
		all = v
	case map[string]any: // items with numbers, as in a form, or elements of XML with the same name
		for name, one := range v {
			if more, several := one.([]any); several && name == "item" {
				all = append(all, more...)
			} else if _, err := strconv.Atoi(name); err == nil || name == "item" {
				all = append(all, one)
			} else {
				return fmt.Errorf("%s: a list has the member %q", where, name)
			}
		}

	case string:
		if strings.TrimSpace(v) != "" {
			return fmt.Errorf("%s: %q is not a list", where, v)
		}
	default:
		return fmt.Errorf("%s: %v is not a list", where, v)
	}

	for i, one := range all {
		if err := a.fits(one, item, fmt.Sprintf("%s[%d]", where, i)); err != nil {
			return err
		}
	}
	return nil
}

func (a API) fitsMembers(value any, members map[string]string, where string) error {
	if value == nil || value == "" {
		value = map[string]any{}
	}

	have, ok := value.(map[string]any)
	if !ok {
		return fmt.Errorf("%s: %v is not an object", where, value)
	}

	for name, one := range have {
		kind, known := members[name]
		if !known {
			kind, known = members[name+"!"]
		}
		if !known {
			return fmt.Errorf("%s: the description has no member %q", where, name)
		}
		if one == nil {
			continue
		}
		if err := a.fits(one, kind, where+"."+name); err != nil {
			return err
		}
	}

	for name := range members {
		if plain, required := strings.CutSuffix(name, "!"); required && have[plain] == nil {
			return fmt.Errorf("%s: the member %q is missing", where, plain)
		}
	}
	return nil
}

// CheckType returns an error unless the fields of t, which decodes a value of the type with that name, are in the
// description. It knows the tags json and xml. A field of XML may have a path of several names.
func (a API) CheckType(name string, t reflect.Type) error {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}

	name = strings.TrimPrefix(name, "[]")
	if t.Kind() != reflect.Struct {
		return nil
	}

	for field := range t.Fields() {
		tag, ok := field.Tag.Lookup("json")
		if !ok {
			tag, ok = field.Tag.Lookup("xml")
		}
		if !ok {
			tag = field.Name
		}

		tag, _, _ = strings.Cut(tag, ",")
		if tag == "" {
			tag = field.Name
		}

		kind := name
		for part := range strings.SplitSeq(tag, ">") {
			if part == "item" {
				continue
			}
			kind = strings.TrimPrefix(kind, "[]")
			known := false
			if kind, known = a.Types[kind].members[part]; !known {
				return fmt.Errorf("%s.%s: the description has no member %q", t, field.Name, part)
			}
		}
		if err := a.CheckType(kind, field.Type); err != nil {
			return err
		}
	}
	return nil
}

// JSON returns the tree of a value as JSON. A json.RawMessage is a JSON text.
func JSON(value any) (tree any) {
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	if err := json.Unmarshal(text, &tree); err != nil {
		return err.Error()
	}
	return tree
}

// Form returns the tree of parameters whose names have dots. It leaves out the parameters in without.
func Form(form url.Values, without ...string) any {
	tree := map[string]any{}
	for key := range form {
		at := tree
		parts := strings.Split(key, ".")
		if slices.Contains(without, key) {
			continue
		}

		for _, part := range parts[:len(parts)-1] {
			next, ok := at[part].(map[string]any)
			if !ok {
				next = map[string]any{}
				at[part] = next
			}
			at = next
		}
		at[parts[len(parts)-1]] = form.Get(key)
	}
	return tree
}

// XML returns the tree of the members of the outer element of an XML text; nil if the text is empty.
func XML(text []byte) any {
	d := xml.NewDecoder(bytes.NewReader(text))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err.Error()
		}
		if _, ok := token.(xml.StartElement); ok {
			return element(d)
		}
	}
}

// element returns the tree of the element that d has just entered.
func element(d *xml.Decoder) any {
	members := map[string]any{}
	var text strings.Builder
	for {
		token, err := d.Token()
		if err != nil {
			return err.Error()
		}

		switch one := token.(type) {
		case xml.CharData:
			text.Write(one)
		case xml.StartElement:
			name := one.Name.Local
			value := element(d)
			before, several := members[name]
			if !several {
				members[name] = value
				continue
			}
			all, ok := before.([]any)
			if !ok {
				all = []any{before}
			}
			members[name] = append(all, value)

		case xml.EndElement:
			if len(members) == 0 {
				return text.String()
			}
			return members
		}
	}
}
