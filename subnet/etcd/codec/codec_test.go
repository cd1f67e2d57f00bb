// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestKey(t *testing.T) {
	for key, want := range map[string][]netip.Prefix{
		"10.5.52.0-24":                   prefixtest.Parse("10.5.52.0/24"),
		"10.5.1.0-24&fd00:0:0:16::-64":   prefixtest.Parse("10.5.1.0/24", "fd00:0:0:16::/64"),
		"0.0.0.0-0&fd50:0:0:16::-64":     prefixtest.Parse("fd50:0:0:16::/64"),
		"10.5.67.0-24&fd00:10:5:2a::-64": prefixtest.Parse("10.5.67.0/24", "fd00:10:5:2a::/64"),
		"0.0.0.0-1":                      prefixtest.Parse("0.0.0.0/1"),
		"10.5.1.0-31":                    prefixtest.Parse("10.5.1.0/31"),
		"0.0.0.0-0&fd00:0:0:1::-127":     prefixtest.Parse("fd00:0:0:1::/127"),
	} {
		got, err := ParseKey(key)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("ParseKey(%q) = %v, %v, want %v", key, got, err, want)
		}
		if again := FormatKey(want); again != key {
			t.Errorf("FormatKey(%v) = %q, want %q", want, again, key)
		}
	}
	if got, err := ParseKey("10.5.1.7-24"); err != nil || got[0] != netip.MustParsePrefix("10.5.1.0/24") {
		t.Errorf("host bits: got %v, %v", got, err)
	}
	for _, key := range []string{
		"", "garbage", "10.5.1.0", "10.5.1.0-", "10.5.1.0-32", "10.5.1.0-x", "10.5.1.0-+24", "10.5.1.0-24x", "x10.5.1.0-24", "10.5.1.0-24/x",
		"10.5.1-24", "10.5.1.256-24", "10.5.1.0-24&", "10.5.1.0-24&fd00::-128", "10.5.1.0-24&FD00::-64", "10.5.1.0-24&10.5.1.0-24",
		"fd00::-64", "0.0.0.0-0&", "10.5.1.0-24&fd00::-64&fd01::-64", "10.5.1.0-24&fe80::1%eth0-64", "10.5.1.0-24&::ffff:10.0.0.0-104",
		strings.Repeat("x", 1000),
	} {
		got, err := ParseKey(key)
		if err == nil {
			t.Errorf("ParseKey(%q) = %v, want an error", key, got)
		} else if strings.Contains(err.Error(), "\n") || len(err.Error()) > 250 {
			t.Errorf("ParseKey(%.20q): error is not one short line: %q", key, err)
		}
	}
}

// TestValue decodes values that flannel has written, and expects the same bytes when they are
// encoded again.
func TestValue(t *testing.T) {
	for _, tc := range []struct{ key, value string }{
		{"10.5.0.0-24", `{"PublicIP":"10.99.0.2","PublicIPv6":null,"BackendType":"host-gw"}`},
		{"10.5.0.0-24", `{"PublicIP":"1.2.3.4","PublicIPv6":null}`},
		{"10.5.0.0-24", `{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}}`},
		{"10.5.4.0-24&fd00:10:5:47::-64", `{"PublicIP":"192.168.77.1","PublicIPv6":"fd00:77::1","BackendType":"vxlan",` +
			`"BackendData":{"VNI":1,"VtepMAC":"a6:c8:ad:df:51:5f"},"BackendV6Data":{"VNI":1,"VtepMAC":"5a:ee:70:44:d2:ea"}}`},
		{"0.0.0.0-0&fd50:0:0:16::-64", `{"PublicIP":"0.0.0.0","PublicIPv6":"fd00:77::1","BackendType":"host-gw"}`},

		// In a migration, the data of the next backend comes last.
		{"10.5.0.0-24", `{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"},` +
			`"NextBackendType":"wireguard","NextBackendData":{"PublicKey":"aGVsbG8+/=="}}`},
		{"10.5.4.0-24&fd00:10:5:47::-64", `{"PublicIP":"192.168.77.1","PublicIPv6":"fd00:77::1","BackendType":"host-gw",` +
			`"NextBackendType":"vxlan","NextBackendData":{"VNI":1,"VtepMAC":"a6:c8:ad:df:51:5f"},"NextBackendV6Data":{"VNI":1,"VtepMAC":"5a:ee:70:44:d2:ea"}}`},
		{"10.5.0.0-24", `{"PublicIP":"192.168.64.3","PublicIPv6":null,"NextBackendType":"host-gw"}`},
	} {
		subnets, err := ParseKey(tc.key)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Decode(subnets, []byte(tc.value))
		if err != nil {
			t.Errorf("%s: %v", tc.value, err)
		}
		if again, err := Encode(c); err != nil || string(again) != tc.value {
			t.Errorf("got  %s, %v\nwant %s", again, err, tc.value)
		}
	}
}

// TestDecodePlain expects that decodePlain reads the values that flannel writes, with the result of
// decodeAny, and refuses values in a similar form.
func TestDecodePlain(t *testing.T) {
	for value, want := range map[string]bool{
		`{"PublicIP":"10.99.0.2","PublicIPv6":null,"BackendType":"host-gw"}`: true,
		`{"PublicIP":"192.168.77.1","PublicIPv6":"fd00:77::1","BackendType":"vxlan",` +
			`"BackendData":{"VNI":1,"VtepMAC":"a6:c8:ad:df:51:5f"},"BackendV6Data":{"VNI":1,"VtepMAC":"5a:ee:70:44:d2:ea"}}`: true,
		`{"PublicIP":"10.99.0.2","BackendType":"wireguard","BackendData":{"PublicKey":"aGVsbG8+/=="}}`:                                     true,
		`{"PublicIP":"10.99.0.2","BackendType":"vxlan","NextBackendType":"udp","NextBackendData":{"a":"b"},"NextBackendV6Data":{"a":"b"}}`: true,

		`{"PublicIP":"10.99.0.2","publicip":"10.99.0.3"}`:  false,
		`{"PublicIP":"10.99.0.2","PublicIP":"10.99.0.3"}`:  false,
		`{"BackendType":"vxlan","BackendType":"host-gw"}`:  false,
		`{"NextBackendType":"a","NextBackendType":"b"}`:    false,
		`{"PublicIP":"10.99.0.2","Other":1}`:               false,
		`{"PublicIP":"10.99.0.2","BackendType":null}`:      false,
		`{"PublicIP": "10.99.0.2"}`:                        false,
		`{"PublicIP":"10.99.0.2","BackendType":"v\u0078"}`: false,
	} {
		fast, ok := decodePlain([]byte(value))
		if ok != want {
			t.Errorf("%s: read the fast way: %v, want %v", value, ok, want)
		}
		if slow, err := decodeAny([]byte(value)); ok {
			if diff := cmp.Diff(slow, fast); err != nil || diff != "" {
				t.Errorf("%s: %v (-slow +fast):\n%s", value, err, diff)
			}
		}
	}
}

func TestDecode(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("fd00:0:0:1::/64")
	dual := []netip.Prefix{v4, v6}
	ip4, ip6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, tc := range []struct {
		name, value string
		subnets     []netip.Prefix
		want        []subnet.Endpoint
	}{
		{"keys in any case, unknown ones ignored", `{"publicip":"192.0.2.1","x":1}`, dual[:1], []subnet.Endpoint{{Subnet: v4, PublicIP: ip4}}},
		{"no address", `{}`, dual, []subnet.Endpoint{{Subnet: v4, PublicIP: netip.IPv4Unspecified()}, {Subnet: v6, PublicIP: netip.IPv6Unspecified()}}},
		{"null data is none", `{"PublicIP":"192.0.2.1","BackendData":null}`, dual[:1], []subnet.Endpoint{{Subnet: v4, PublicIP: ip4}}},
		{
			"each family has its own data", `{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8::1","BackendData":4,"BackendV6Data":6}`, dual,
			[]subnet.Endpoint{{Subnet: v4, PublicIP: ip4, Data: json.RawMessage("4")}, {Subnet: v6, PublicIP: ip6, Data: json.RawMessage("6")}},
		},
		{"the other family's address does not matter", `{"PublicIP":"","PublicIPv6":"2001:db8::1"}`, dual[1:], []subnet.Endpoint{{Subnet: v6, PublicIP: ip6}}},
	} {
		got, err := Decode(tc.subnets, []byte(tc.value))
		if diff := cmp.Diff(tc.want, got.Endpoints, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", tc.name, err, diff)
		}
	}
	subnettest.CheckLeaseData(t, "lease", wireLease{}, func(raw json.RawMessage) error {
		_, err := Decode(dual, raw)
		if err != nil && (len(err.Error()) > 250 || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%.40s: error is %v, want one short line", raw, err)
		}
		return err
	})
}

func FuzzParseKey(f *testing.F) {
	for _, s := range []string{"10.5.52.0-24", "10.5.1.0-24&fd00:0:0:16::-64", "0.0.0.0-0&fd50:0:0:16::-64", "0.0.0.1-0&0::-0", "10.5.1.7-24", "garbage", "&", "-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, key string) {
		subnets, err := ParseKey(key)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error has more than one line: %q", err)
			}
			return
		}
		if len(subnets) == 0 {
			t.Fatalf("%q has no subnet and no error", key)
		}
		if again, err := ParseKey(FormatKey(subnets)); err != nil || !slices.Equal(again, subnets) {
			t.Errorf("%q is %v, written and read again %v, %v", key, subnets, again, err)
		}
	})
}

func FuzzParseValue(f *testing.F) {
	for _, s := range []string{
		`{"PublicIP":"10.99.0.2","PublicIPv6":null,"BackendType":"host-gw"}`,
		`{"PublicIP":"192.168.77.1","PublicIPv6":"fd00:77::1","BackendType":"vxlan","BackendData":{"VNI":1},"BackendV6Data":{"VNI":1}}`,
		`{"PublicIP":null}`, `null`, `{}`, ``, `{"BackendData":null}`,
		`{"PublicIP":"192.0.2.1","NextBackendType":"vxlan","NextBackendData":{"VNI":7},"NextBackendV6Data":null}`,
	} {
		f.Add([]byte(s))
	}
	subnets := prefixtest.Parse("10.5.1.0/24", "fd00:0:0:1::/64")
	f.Fuzz(func(t *testing.T, value []byte) {
		if fast, ok := decodePlain(value); ok {
			slow, err := decodeAny(value)
			if diff := cmp.Diff(slow, fast); err != nil || diff != "" {
				t.Errorf("%q is read in two ways: %v (-slow +fast):\n%s", value, err, diff)
			}
		}
		c, err := Decode(subnets, value)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error has more than one line: %q", err)
			}
			return
		}
		Identities(c.Endpoints)
		raw, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		c, err = Decode(subnets, raw)
		again, err2 := Encode(c)
		if err != nil || err2 != nil || string(again) != string(raw) {
			t.Errorf("%s\nbecomes %s\nthen    %s, %v, %v", value, raw, again, err, err2)
		}
	})
}
