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

func TestHasIdentity(t *testing.T) {
	const mac = "02:00:00:00:00:01"
	for data, want := range map[string]bool{
		``: false,
		`{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}`: false,
		`{"VNI":1,"VtepMAC":"` + mac + `"}`:       true,
		`{"VtepMAC":"\u00302:00:00:00:00:01"}`:    true,
		`{"PublicEndpoint":"` + mac + `"}`:        false,
	} {
		for _, e := range []subnet.Endpoint{{Data: json.RawMessage(data)}, {NextData: json.RawMessage(data)}} {
			if got := HasIdentity([]subnet.Endpoint{{}, e}, []string{"k", mac}); got != want {
				t.Errorf("HasIdentity(%s) = %v, want %v", data, got, want)
			}
		}
	}

	if HasIdentity([]subnet.Endpoint{{Data: json.RawMessage(`{"VtepMAC":"` + mac + `"}`)}}, nil) {
		t.Error("HasIdentity is true without identities")
	}
	others := []subnet.Endpoint{{Data: json.RawMessage(`{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}`)}}
	if n := testing.AllocsPerRun(100, func() { HasIdentity(others, []string{mac}) }); n > 0 {
		t.Errorf("data of another host costs %v allocations, want none because it need not be decoded", n)
	}
}
