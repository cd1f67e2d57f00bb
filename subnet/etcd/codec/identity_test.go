// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/subnet"
)

func TestIdentities(t *testing.T) {
	// json.Unmarshal of each level by itself would read the rest 9,000 times, which takes five seconds.
	deep := strings.Repeat(`{"a":`, 9000) + `{"VtepMAC":"02:00:00:00:00:01"}` + strings.Repeat("}", 9000)
	for data, want := range map[string][]string{
		``:                              nil,
		`null`:                          nil,
		`7`:                             nil,
		`"VtepMAC"`:                     nil,
		`{"VNI":1}`:                     nil,
		`{"VtepMAC":7,"PublicKey":""}`:  nil,
		`{"VtepMAC":{"PublicKey":"k"}}`: nil,
		`{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`:               {"02:00:00:00:00:01"},
		`{"PublicKey":"k","Peers":[{"PublicKey":"of others"}]}`: {"k"},
		`{"PublicKey":"k","Tunnel":{"VtepMAC":"m"}}`:            {"k", "m"},
		deep: {"02:00:00:00:00:01"},
	} {
		got := Identities([]subnet.Endpoint{{Data: json.RawMessage(data)}, {NextData: json.RawMessage(data)}})
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%.60s: %q, want %q", data, got, want)
		}
	}
}
