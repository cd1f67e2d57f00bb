// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWithGateways(t *testing.T) {
	for in, want := range map[string]string{
		`{"ips":[{"address":"10.5.7.2/24","gateway":"10.5.7.1"},{"address":"fd00::2/64","gateway":"fd00::1"}],
		  "routes":[{"dst":"10.5.0.0/16"},{"dst":"fd00::/48"},{"dst":"192.0.2.0/24","gw":"10.5.7.9"},{"dst":"0.0.0.0/0"}],"dns":{"domain":"x"}}`: `{"ips":[{"address":"10.5.7.2/24","gateway":"10.5.7.1"},{"address":"fd00::2/64","gateway":"fd00::1"}],
		  "routes":[{"dst":"10.5.0.0/16","gw":"10.5.7.1"},{"dst":"fd00::/48","gw":"fd00::1"},{"dst":"192.0.2.0/24","gw":"10.5.7.9"},{"dst":"0.0.0.0/0","gw":"10.5.7.1"}],"dns":{"domain":"x"}}`,
		`{"ips":[{"address":"10.5.7.2/24"}],"routes":[{"dst":"10.5.0.0/16"}]}`: `{"ips":[{"address":"10.5.7.2/24"}],"routes":[{"dst":"10.5.0.0/16"}]}`,
		`{"ips":[],"routes":[{"dst":"nonsense"},{}]}`:                          `{"ips":[],"routes":[{"dst":"nonsense"},{}]}`,
		`{"routes":1}`: `{"routes":1}`,
		`{}`:           `{}`,
		`null`:         `null`,
		`[1]`:          `[1]`,
	} {
		var have, expect any
		if err := json.Unmarshal(withGateways([]byte(in)), &have); err != nil {
			t.Error(err)
		}
		if err := json.Unmarshal([]byte(want), &expect); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(expect, have); diff != "" {
			t.Errorf("%s (-want +got):\n%s", in, diff)
		}
	}
}

func FuzzWithGateways(f *testing.F) {
	f.Add([]byte(`{"ips":[{"gateway":"10.5.7.1"}],"routes":[{"dst":"10.5.0.0/16"},null]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if out := withGateways(text); json.Valid(text) && !json.Valid(out) {
			t.Errorf("%s becomes %s", text, out)
		}
	})
}
