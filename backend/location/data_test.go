// SPDX-License-Identifier: Apache-2.0

package location

import (
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// TestDataStaysBeside checks that addTo leaves the other keys of the backend data as they are, because
// flannel reads them.
func TestDataStaysBeside(t *testing.T) {
	d := data{Name: "east", Type: "vxlan", Config: "01234567", Address: netip.MustParseAddr("10.0.0.1"), Data: json.RawMessage(`{"VNI":1}`)}
	raw, err := d.addTo(json.RawMessage(`{"PublicKey":"k","Port":51820}`))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"Location":{"Name":"east","Type":"vxlan","Config":"01234567","Address":"10.0.0.1","Data":{"VNI":1}},"Port":51820,"PublicKey":"k"}`
	if string(raw) != want {
		t.Errorf("%s, want %s", raw, want)
	}
	if got, ok := decode(raw); !ok || !reflect.DeepEqual(got, d) {
		t.Errorf("decode(%s) = %+v, %v", raw, got, ok)
	}
	if _, err := d.addTo(json.RawMessage(`"text"`)); err == nil {
		t.Error("data is added to a text")
	}
}

func TestDecode(t *testing.T) {
	subnettest.CheckLeaseData(t, "location", struct{ Location data }{}, func(raw json.RawMessage) error {
		if _, ok := decode(raw); !ok {
			return errors.New("no location")
		}
		return nil
	})
}

// TestDigest checks that different configurations have different digests.
func TestDigest(t *testing.T) {
	seen := map[string]string{}
	for _, raw := range []string{`"vxlan"`, `"host-gw"`, `{"Type":"vxlan","VNI":7}`, `{"Type":"vxlan","Port":7}`} {
		var s backend.Inner
		if err := json.Unmarshal([]byte(raw), &s); err != nil {
			t.Fatal(err)
		}
		d := digest(s)
		if other, ok := seen[d]; ok || len(d) != 8 {
			t.Errorf("%s and %s have the digest %q", raw, other, d)
		}
		seen[d] = raw
	}
}

// TestDigestOfOneMeaning checks that configurations that mean the same have the same digest.
func TestDigestOfOneMeaning(t *testing.T) {
	for _, same := range [][]string{
		{`"vxlan"`, `"VXLAN"`, `{"Type":"vxlan"}`, ` { "type" : "VxLan", "VNI": null } `},
		{`{"Type":"vxlan","VNI":7,"Port":4789}`, "{\n\t\"Port\": 4789,\n\t\"VNI\": 7,\n\t\"Type\": \"vxlan\"\n}", `{"TYPE":"vxlan","vni":7,"port":4789}`},
		{`{"Type":"vxlan","VNI":7,"vni":8}`, `{"vni":8,"VNI":7,"Type":"vxlan"}`},
	} {
		digests := map[string]bool{}
		for range 10 { // the order of keys in a map differs
			for _, raw := range same {
				var s backend.Inner
				if err := json.Unmarshal([]byte(raw), &s); err != nil {
					t.Fatal(err)
				}
				digests[digest(s)] = true
			}
		}
		if len(digests) != 1 {
			t.Errorf("%q have %d digests, want one", same, len(digests))
		}
	}
}

// FuzzDecode decodes data that a hostile host publishes. A peer may be served inside of the
// location only if it says that it is there, with an address that another host can have.
func FuzzDecode(f *testing.F) {
	b := newBed(f, "east").backend()
	good := string(lease(f, b, 2, "east", nil).Endpoints[0].Data)
	for _, raw := range []string{good, strings.ToLower(good), `{"Location":{"Name":"east"}}`, `{"Location":null}`, `{"Location":{"Name":"east","Address":"10.5.0.1"}}`, `{"Location`} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		l := &subnet.Lease{Key: "host2", Endpoints: []subnet.Endpoint{{Subnet: subnetOf(2), PublicIP: netip.MustParseAddr("192.0.2.2"), Data: raw}}}
		inside, why := b.asInside(l)
		if strings.ContainsAny(why, "\n\r") {
			t.Errorf("the reason %q has several lines", why)
		}
		if inside == nil {
			return
		}
		d, ok := decode(raw)
		to := inside.Endpoints[0].PublicIP
		if !ok || d.Name != "east" || why != "" || !to.Is4() || !b.env.Reachable(to) {
			t.Errorf("%q is sent to at %s", raw, to)
		}
	})
}
