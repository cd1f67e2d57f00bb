// SPDX-License-Identifier: Apache-2.0

package subnettest

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// leaseData contains examples of what other hosts may write as the data of each kind: a backend, a part
// of the data that several backends have, or the whole value of a lease in etcd. The value is a part of
// the error that the example causes, or empty if it causes none.
func leaseData() map[string]map[string]string {
	const (
		mac = `"72:8d:4e:56:a5:33"`
		key = `"AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`
	)
	return map[string]map[string]string{
		"vxlan": {
			`{"VNI":1,"VtepMAC":` + mac + `}`:             "",
			`{"VtepMAC":"72:8D:4E:56:A5:33"}`:             "",
			`{ "vtepmac": ` + mac + `, "New": [1, 2] }`:   "",
			`{"VtepMAC":"02:00:00:00:00:01","VtepMAC":7}`: "backend data",
			`null`:                                  "without a VtepMAC",
			`{"VNI":1}`:                             "without a VtepMAC",
			`{"VtepMAC":null}`:                      "without a VtepMAC",
			`{"VtepMAC":"00:00:00:00:00:00"}`:       "not a unicast address",
			`{"VtepMAC":"01:00:5e:00:00:01"}`:       "not a unicast address",
			`{"VtepMAC":"ff:ff:ff:ff:ff:ff"}`:       "not a unicast address",
			`{"VtepMAC":"72:8d:4e:56:a5"}`:          "not an Ethernet address",
			`{"VtepMAC":"00:00:5e:ff:fe:00:53:01"}`: "not an Ethernet address",
			`{"VtepMAC":7}`:                         "backend data",
			`"text"`:                                "backend data",
			`{"VNI":99999999999999999999,"VtepMAC":` + mac + `}`: "backend data",
		},
		"wireguard": {
			`{"PublicKey":` + key + `}`:          "",
			`{"publickey":` + key + `,"port":1}`: "",
			`{"PublicKey":` + key + `,"Port":51820,"PublicEndpoint":"host.example:7",` +
				`"PeerEndpoints":{` + key + `:"192.168.77.255:51820"}}`: "",
			`{"PublicKey":` + key + `,"PublicEndpoint":"127.0.0.1:22","PeerEndpoints":7}`: "",
			`null`:                 "without a PublicKey",
			`{}`:                   "without a PublicKey",
			`{"PublicKey":"AQ=="}`: "is no key",
			`{"PublicKey":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}`: "is no key",
			`{"PublicKey":` + key + `,"Port":65536}`:                       "port 65536",
			`{"PublicKey":7}`:                                              "backend data",
		},
		"extension": {
			`"text"`: "", `"$(reboot)"`: "", `"a\nb\u0000"`: "", `null`: "want a JSON string",
			`{}`: "want a JSON string", `["a"]`: "want a JSON string", `1`: "want a JSON string",
		},
		"overflow": {
			`{"Table":"rtb-main","Routed":["rtb-main"],"Why":"quota","Overflow":{"VNI":1,"VtepMAC":` + mac + `}}`: "",
			`{"Table":"\u001b","Routed":["",""],"Why":"moon","Overflow":7}`:                                       "",
			`{"Routed":7}`: "backend data", `[]`: "backend data",
		},
		"location": {
			`{"Location":{"Name":"here","Type":"vxlan","Config":"01234567","Address":"192.168.77.1","Data":{"VtepMAC":` + mac + `}}}`: "",
			`{"Location":{"Name":"` + strings.Repeat("a", 64) + `"}}`:                                                                 "no location",
			`{}`: "no location", `null`: "no location", `{"PublicKey":"Location"}`: "no location", `{"Location":null}`: "no location",
			`{"Location":"east"}`: "no location", `{"Location":{}}`: "no location", `{"Location":{"Name":""}}`: "no location", `{"Location":{"Name":"a b"}}`: "no location",
			`{"Location":{"Name":7}}`: "no location", `{"Location":{"Name":"east","Address":"nonsense"}}`: "no location",
			`{"Location":{"Name":"east"`: "no location", `[{"Location":{"Name":"east"}}]`: "no location",
		},
		"lease": {
			`{"PublicIP":"192.168.77.1","PublicIPv6":"fd00:77::1","BackendType":"vxlan","BackendData":{},"BackendV6Data":{},` +
				`"NextBackendType":"wireguard","NextBackendData":{},"NextBackendV6Data":{}}`: "",
			``:                                      "unexpected end",
			`null`:                                  "not a JSON object",
			`[]`:                                    "cannot unmarshal array",
			`{`:                                     "unexpected end",
			`{"PublicIP":null}`:                     "PublicIP is null, want an IPv4 address",
			`{"PublicIP":""}`:                       `PublicIP "" is not an IPv4 address`,
			`{"PublicIP":7}`:                        "PublicIP is 7",
			`{"PublicIP":"2001:db8::1"}`:            "is not an IPv4 address",
			`{"PublicIP":"192.0.2.1","PublicIP":7}`: "PublicIP is 7",
			`{"PublicIP":"192.0.2.1","PublicIPv6":"192.0.2.1"}`:           `PublicIPv6 "192.0.2.1" is not an IPv6 address`,
			`{"PublicIP":"192.0.2.1","PublicIPv6":"::ffff:192.0.2.1"}`:    "is not an IPv6 address",
			`{"PublicIP":"192.0.2.1"} x`:                                  "after top-level value",
			`{"PublicIP":"` + strings.Repeat("1", 1000) + `"}`:            "is not an IPv4 address",
			strings.Repeat("x", 1<<20):                                    "value has 1048576 bytes",
			`{"PublicIP":"192.0.2.1","BackendType":"vxlan\n10.5.9.0/24"}`: `backend type "vxlan\n10.5.9.0/24": expected a name`,
			`{"PublicIP":"192.0.2.1","NextBackendType":"\u001b[2J"}`:      `backend type "\x1b[2J": expected a name`,
			`{"PublicIP":"192.0.2.1","New":` + strings.Repeat("[", 20000): "exceeded max depth",
		},
	}
}

// LeaseKinds returns the kinds of which LeaseData has examples.
func LeaseKinds() []string { return slices.Sorted(maps.Keys(leaseData())) }

// LeaseData returns the examples of one kind.
func LeaseData(kind string) []string { return slices.Sorted(maps.Keys(leaseData()[kind])) }

// CheckLeaseData checks that decode returns the right error for all examples of a kind, and that one of
// the examples that are right has all JSON fields of v, the struct into which decode decodes. A hostile
// host in the end-to-end tests writes the examples, so a new field without one would not be attacked.
func CheckLeaseData(t *testing.T, kind string, v any, decode func(raw json.RawMessage) error) {
	t.Helper()
	missing := fieldsOf(reflect.TypeOf(v))
	for raw, want := range leaseData()[kind] {
		err := decode(json.RawMessage(raw))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%.200s: error %v, want %q", raw, err, want)
		}
		if err == nil {
			missing = slices.DeleteFunc(missing, func(name string) bool { return strings.Contains(raw, `"`+name+`":`) })
		}
	}
	if len(missing) > 0 {
		t.Errorf("no example of subnettest.LeaseData(%q) has the fields %q: add one", kind, missing)
	}
}

// fieldsOf returns the JSON names of the exported fields of a struct and of the structs in it.
func fieldsOf(s reflect.Type) (names []string) {
	if s.Kind() != reflect.Struct {
		return nil
	}

	for f := range s.Fields() {
		if !f.IsExported() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			name = f.Name
		}
		names = append(append(names, name), fieldsOf(f.Type)...)
	}
	return names
}
