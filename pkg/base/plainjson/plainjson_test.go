// SPDX-License-Identifier: Apache-2.0

package plainjson_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/base/plainjson"
)

// fields returns the fields that Object finds in raw, or nil if Object refuses it.
func fields(raw string) map[string]string {
	got := map[string]string{}
	ok := plainjson.Object([]byte(raw), func(key, value []byte) bool {
		got[string(key)] = string(value)
		return true
	})
	if !ok {
		return nil
	}
	return got
}

func TestObject(t *testing.T) {
	for raw, want := range map[string]map[string]string{
		`{}`:             {},
		`{"a":"b"}`:      {"a": `"b"`},
		`{"":""}`:        {"": `""`},
		`{"a":null}`:     {"a": "null"},
		`{"a":0,"b":10}`: {"a": "0", "b": "10"},
		`{"PublicIP":"192.0.2.1","Data":{"VNI":1,"x":{}},"z":7}`: {"PublicIP": `"192.0.2.1"`, "Data": `{"VNI":1,"x":{}}`, "z": "7"},
		`{"a":{"a":{"a":{}}}}`: {"a": `{"a":{"a":{}}}`},

		`{"a":{"a":{"a":{"a":{}}}}}`: nil,
		`{"a":1234567890}`:           nil,
		`{"a":01}`:                   nil,
		`{"a":-1}`:                   nil,
		`{"a":1.5}`:                  nil,
		`{"a":1e5}`:                  nil,
		`{"a":true}`:                 nil,
		`{"a":[]}`:                   nil,
		`{"a":nul}`:                  nil,
		`{"a":}`:                     nil,
		`{"a"}`:                      nil,
		`{"a":1,}`:                   nil,
		`{,}`:                        nil,
		`{"a":1`:                     nil,
		`{"a`:                        nil,
		`{`:                          nil,
		``:                           nil,
		`null`:                       nil,
		`[]`:                         nil,
		`{} `:                        nil,
		` {}`:                        nil,
		`{"a": 1}`:                   nil,
		`{"a":"\n"}`:                 nil,
		`{"a":"\u0041"}`:             nil,
		"{\"a\":\"\n\"}":             nil,
		`{"ä":1}`:                    nil,
		`{"a":"ä"}`:                  nil,
	} {
		if diff := cmp.Diff(want, fields(raw)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", raw, diff)
		}
	}
	if plainjson.Object([]byte(`{"a":1,"b":2}`), func(key, _ []byte) bool { return string(key) != "b" }) {
		t.Error("Object returned true although field returned false")
	}
}

func TestValues(t *testing.T) {
	for _, v := range []string{`"a"`, `""`} {
		if text, ok := plainjson.Text([]byte(v)); !ok || string(text) != v[1:len(v)-1] {
			t.Errorf("Text(%s) = %q, %v", v, text, ok)
		}
	}
	for _, v := range []string{``, `"`, `a`, `"a`, `"a"b`, `"\""`, `null`} {
		if text, ok := plainjson.Text([]byte(v)); ok {
			t.Errorf("Text(%s) = %q", v, text)
		}
	}
	for v, want := range map[string]bool{"0": true, "7": true, "123456789": true, "": false, "1234567890": false, "01": false, "x": false, "1x": false} {
		if got := plainjson.IsNumber([]byte(v)); got != want {
			t.Errorf("IsNumber(%q) = %v, want %v", v, got, want)
		}
	}
}

// FuzzObject checks that encoding/json accepts every object that Object accepts, and
// reads the same values.
func FuzzObject(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":"b","c":null,"d":{"e":12}}`, `{"a":1,"a":2}`, `{"a":01}`, `{"a":"\n"}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		got := fields(raw)
		if got == nil {
			return
		}
		var want map[string]json.RawMessage
		if err := json.Unmarshal([]byte(raw), &want); err != nil {
			t.Fatalf("Object accepts %q, encoding/json does not: %v", raw, err)
		}
		if len(got) != len(want) {
			t.Errorf("%q: got %v, want %v", raw, got, want)
		}
		for key, value := range want {
			if got[key] != string(value) {
				t.Errorf("%q: %q is %s, want %s", raw, key, got[key], value)
			}
			var text string
			if have, ok := plainjson.Text([]byte(got[key])); ok && (json.Unmarshal(value, &text) != nil || text != string(have)) {
				t.Errorf("%q: %q is %q, want %q", raw, key, have, text)
			}
			var number int
			if plainjson.IsNumber([]byte(got[key])) && json.Unmarshal(value, &number) != nil {
				t.Errorf("%q: %q is not a number: %s", raw, key, value)
			}
		}
	})
}
