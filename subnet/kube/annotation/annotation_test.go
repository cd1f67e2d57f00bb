// SPDX-License-Identifier: Apache-2.0

package annotation

import (
	"encoding/json"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
)

func endpoint(subnetText, public, data string) subnet.Endpoint {
	e := subnet.Endpoint{PublicIP: netip.MustParseAddr(public)}
	if subnetText != "" {
		e.Subnet = netip.MustParsePrefix(subnetText)
	}
	if data != "" {
		e.Data = json.RawMessage(data)
	}
	return e
}

// TestEncode expects the annotations of patches that were recorded from flannel, for the same
// claims.
func TestEncode(t *testing.T) {
	const (
		v4MAC = `{"VNI":1,"VtepMAC":"ea:00:85:05:68:33"}`
		v6MAC = `{"VNI":1,"VtepMAC":"7e:cc:36:ec:a5:0e"}`
	)
	v4 := endpoint("", "192.168.77.1", v4MAC)
	v6 := endpoint("", "fd00:77::1", v6MAC)
	plain4, plain6 := endpoint("", "192.168.77.3", ""), endpoint("", "fd00:77::3", "")
	tests := []struct {
		name, prefix string
		claim        subnet.Claim
		want         string
	}{
		{"vxlan", DefaultPrefix, subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{v4}},
			`{"flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"ea:00:85:05:68:33\"}","flannel.alpha.coreos.com/backend-type":"vxlan","flannel.alpha.coreos.com/kube-subnet-manager":"true","flannel.alpha.coreos.com/public-ip":"192.168.77.1"}`},
		{"vxlan dual", DefaultPrefix, subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{v4, v6}},
			`{"flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"ea:00:85:05:68:33\"}","flannel.alpha.coreos.com/backend-type":"vxlan","flannel.alpha.coreos.com/backend-v6-data":"{\"VNI\":1,\"VtepMAC\":\"7e:cc:36:ec:a5:0e\"}","flannel.alpha.coreos.com/kube-subnet-manager":"true","flannel.alpha.coreos.com/public-ip":"192.168.77.1","flannel.alpha.coreos.com/public-ipv6":"fd00:77::1"}`},
		{"vxlan IPv6", "six.io", subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{v6}},
			`{"six.io/backend-type":"vxlan","six.io/backend-v6-data":"{\"VNI\":1,\"VtepMAC\":\"7e:cc:36:ec:a5:0e\"}","six.io/kube-subnet-manager":"true","six.io/public-ipv6":"fd00:77::1"}`},
		{"host-gw dual", "p.q", subnet.Claim{BackendType: "host-gw", Endpoints: []subnet.Endpoint{plain4, plain6}},
			`{"p.q/backend-data":"null","p.q/backend-type":"host-gw","p.q/backend-v6-data":"null","p.q/kube-subnet-manager":"true","p.q/public-ip":"192.168.77.3","p.q/public-ipv6":"fd00:77::3"}`},
		{"host-gw IPv6", "p.q", subnet.Claim{BackendType: "host-gw", Endpoints: []subnet.Endpoint{plain6}},
			`{"p.q/backend-data":"null","p.q/backend-type":"host-gw","p.q/backend-v6-data":"null","p.q/kube-subnet-manager":"true","p.q/public-ip":"0.0.0.0","p.q/public-ipv6":"fd00:77::3"}`},
		{"alloc", "a.b/c", subnet.Claim{Endpoints: []subnet.Endpoint{plain4}},
			`{"a.b/c-backend-data":"null","a.b/c-backend-type":"","a.b/c-kube-subnet-manager":"true","a.b/c-public-ip":"192.168.77.3"}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := Prefix(tt.prefix)
			if err != nil {
				t.Fatal(err)
			}
			k := NewKeys(p)
			got, err := json.Marshal(k.Difference(Notes{}, Encode(tt.claim)))
			if err != nil || string(got) != tt.want {
				t.Errorf("got  %s, %v\nwant %s", got, err, tt.want)
			}
		})
	}
}

func TestDifference(t *testing.T) {
	k := NewKeys("a.b/")
	have := Encode(subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{endpoint("", "192.0.2.1", "{}"), endpoint("", "fd00::1", "{}")}})
	if d := k.Difference(have, have); len(d) != 0 {
		t.Errorf("of equal ones: %v", d)
	}
	want := Encode(subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{endpoint("", "192.0.2.2", "{}")}})
	moved := "192.0.2.2"
	if diff := cmp.Diff(map[string]*string{"a.b/public-ip": &moved, "a.b/public-ipv6": nil, "a.b/backend-v6-data": nil}, k.Difference(have, want)); diff != "" {
		t.Errorf("a changed address, and IPv6 gone (-want +got):\n%s", diff)
	}
	migrating := Encode(subnet.Claim{BackendType: "vxlan", NextType: "host-gw", Endpoints: []subnet.Endpoint{next(endpoint("", "192.0.2.2", "{}"), "{}")}})
	nextType, nextData := "host-gw", "{}"
	if diff := cmp.Diff(map[string]*string{"a.b/next-backend-type": &nextType, "a.b/next-backend-data": &nextData}, k.Difference(want, migrating)); diff != "" {
		t.Errorf("a migration begins (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]*string{"a.b/next-backend-type": nil, "a.b/next-backend-data": nil}, k.Difference(migrating, want)); diff != "" {
		t.Errorf("a migration ends (-want +got):\n%s", diff)
	}
}

func TestPrefix(t *testing.T) {
	for flag, want := range map[string]string{
		"flannel.alpha.coreos.com": "flannel.alpha.coreos.com/",
		"a.b/c":                    "a.b/c-",
		"a.b/c-":                   "a.b/c-",
		"a.b/":                     "a.b/",
		"a.b/c_d":                  "a.b/c_d-",
	} {
		if got, err := Prefix(flag); got != want || err != nil {
			t.Errorf("%q gives %q, %v, want %q", flag, got, err, want)
		}
	}
	for _, flag := range []string{"", "flannel", "flannel/x", "a.b/c/d", "/x", "a b.c", "A.B", ".", "a..b"} {
		if got, err := Prefix(flag); err == nil {
			t.Errorf("%q gives %q, want an error", flag, got)
		}
	}
}

// published returns the notes of a managed Node with these annotations.
func published(pairs map[ID]string) Notes {
	n := Notes{Managed: {"true", true}}
	for a, text := range pairs {
		n[a] = Note{text, true}
	}
	return n
}

// next returns e with data of the next backend.
func next(e subnet.Endpoint, data string) subnet.Endpoint {
	e.NextData = json.RawMessage(data)
	return e
}

func TestDecode(t *testing.T) {
	const mac = `{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`
	v4, dual := prefixtest.Parse("10.5.1.0/24"), prefixtest.Parse("10.5.1.0/24", "fd00:5::/64")
	tests := []struct {
		name  string
		notes Notes
		cidrs []netip.Prefix
		want  []subnet.Endpoint
		err   string
	}{
		{"vxlan", published(map[ID]string{BackendType: "vxlan", BackendData: mac, PublicIP: "192.0.2.1"}), v4,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", mac)}, ""},
		{"null data", published(map[ID]string{BackendData: "null", PublicIP: "192.0.2.1"}), v4,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", "")}, ""},
		{"empty data", published(map[ID]string{BackendData: "", PublicIP: "192.0.2.1"}), v4,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", "")}, ""},
		{"an extension's string", published(map[ID]string{BackendData: `"hi there"`, PublicIP: "192.0.2.1"}), v4,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", `"hi there"`)}, ""},
		{"dual", published(map[ID]string{BackendData: mac, PublicIP: "192.0.2.1", PublicIPv6: "2001:db8::1", BackendV6Data: mac}), dual,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", mac), endpoint("fd00:5::/64", "2001:db8::1", mac)}, ""},
		{"dual that publishes IPv4 only", published(map[ID]string{PublicIP: "192.0.2.1"}), dual,
			[]subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.1", "")}, ""},
		{"IPv6 with the IPv4 pair of host-gw", published(map[ID]string{BackendData: "null", PublicIP: "0.0.0.0", PublicIPv6: "2001:db8::1"}), prefixtest.Parse("fd00:5::/64"),
			[]subnet.Endpoint{endpoint("fd00:5::/64", "2001:db8::1", "")}, ""},
		{"dual in a migration", published(map[ID]string{
			BackendData: mac, PublicIP: "192.0.2.1", PublicIPv6: "2001:db8::1", NextBackendType: "wireguard", NextBackendData: `{"a":1}`, NextBackendV6Data: "{}",
		}), dual, []subnet.Endpoint{next(endpoint("10.5.1.0/24", "192.0.2.1", mac), `{"a":1}`), next(endpoint("fd00:5::/64", "2001:db8::1", ""), "{}")}, ""},
		{"mangled data of the next backend", published(map[ID]string{NextBackendData: "{", PublicIP: "192.0.2.1"}), v4, nil, `annotation a.b/next-backend-data: "{" is not JSON`},
		{"nothing at all", Notes{}, v4, nil, "no annotation kube-subnet-manager"},
		{"not true", Notes{Managed: {"false", true}, PublicIP: {"192.0.2.1", true}}, v4, nil, "no annotation kube-subnet-manager"},
		{"no address", published(nil), v4, nil, "no annotation a.b/public-ip"},
		{"mangled address", published(map[ID]string{PublicIP: "192.0.2"}), v4, nil, `annotation a.b/public-ip: "192.0.2" is not an IPv4 address`},
		{"empty address", published(map[ID]string{PublicIP: ""}), v4, nil, `annotation a.b/public-ip: "" is not an IPv4 address`},
		{"other family", published(map[ID]string{PublicIP: "::1"}), v4, nil, "not an IPv4 address"},
		{"mapped", published(map[ID]string{PublicIPv6: "::ffff:1.2.3.4"}), dual, nil, "not an IPv6 address"},
		{"zone", published(map[ID]string{PublicIPv6: "fe80::1%eth0"}), dual, nil, "not an IPv6 address"},
		{"mangled data", published(map[ID]string{BackendData: "{", PublicIP: "192.0.2.1"}), v4, nil, `annotation a.b/backend-data: "{" is not JSON`},
		{"huge", published(map[ID]string{BackendData: strings.Repeat(" ", maxAnnotation+1), PublicIP: "192.0.2.1"}), v4, nil, "at most"},
	}
	k := NewKeys("a.b/")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := k.Decode(tt.notes, tt.cidrs, nil)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v, %v, want an error with %q", got, err, tt.err)
				}
				return
			}
			if diff := cmp.Diff(tt.want, got.Endpoints, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestDecodeInPart decodes Nodes with a family that cannot be read. The other family must be used,
// and the unreadable one must keep the endpoint of the previous lease, if that has the same backend
// and subnet.
func TestDecodeInPart(t *testing.T) {
	dual := prefixtest.Parse("10.5.1.0/24", "fd00:5::/64")
	v4, v6 := endpoint("10.5.1.0/24", "192.0.2.1", ""), endpoint("fd00:5::/64", "2001:db8::1", "{}")
	good := map[ID]string{BackendType: "vxlan", PublicIP: "192.0.2.1", PublicIPv6: "2001:db8::1", BackendV6Data: "{}"}
	last := &subnet.Lease{BackendType: "vxlan", Endpoints: []subnet.Endpoint{endpoint("10.5.1.0/24", "192.0.2.9", ""), v6}}
	tests := []struct {
		name   string
		change map[ID]string
		last   *subnet.Lease
		want   []subnet.Endpoint
		err    string
	}{
		{"IPv6", map[ID]string{PublicIPv6: "nonsense"}, nil, []subnet.Endpoint{v4}, `a.b/public-ipv6: "nonsense"`},
		{"IPv6 that was good", map[ID]string{PublicIPv6: "nonsense"}, last, []subnet.Endpoint{v4, v6}, `a.b/public-ipv6: "nonsense"`},
		{"its data", map[ID]string{BackendV6Data: "{"}, last, []subnet.Endpoint{v4, v6}, `a.b/backend-v6-data: "{"`},
		{"its data is huge", map[ID]string{BackendV6Data: strings.Repeat(" ", maxAnnotation+1)}, last, []subnet.Endpoint{v4, v6}, "a.b/backend-v6-data has"},
		{"IPv4", map[ID]string{PublicIP: "nonsense"}, nil, []subnet.Endpoint{v6}, `a.b/public-ip: "nonsense"`},
		{"IPv4 that was good", map[ID]string{PublicIP: "nonsense"}, last, []subnet.Endpoint{last.Endpoints[0], v6}, `a.b/public-ip: "nonsense"`},
		{"another backend's", map[ID]string{PublicIPv6: "nonsense", BackendType: "host-gw"}, last, []subnet.Endpoint{v4}, `a.b/public-ipv6: "nonsense"`},
		{"another subnet's", map[ID]string{PublicIPv6: "nonsense"},
			&subnet.Lease{BackendType: "vxlan", Endpoints: []subnet.Endpoint{endpoint("fd00:6::/64", "2001:db8::1", "{}")}}, []subnet.Endpoint{v4}, `a.b/public-ipv6: "nonsense"`},
		{"both", map[ID]string{PublicIP: "rubbish", PublicIPv6: "nonsense"}, last, nil, `"rubbish" is not an IPv4 address; annotation a.b/public-ipv6: "nonsense"`},
		{"backend type is no name", map[ID]string{BackendType: "vxlan\x1b[2J"}, last, nil, `a.b/backend-type "vxlan\x1b[2J": expected a name`},
		{"backend type is huge", map[ID]string{BackendType: strings.Repeat(" ", maxAnnotation+1)}, last, nil, "a.b/backend-type has"},
	}
	k := NewKeys("a.b/")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pairs := maps.Clone(good)
			maps.Copy(pairs, tt.change)
			got, err := k.Decode(published(pairs), dual, tt.last)
			if diff := cmp.Diff(tt.want, got.Endpoints, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error is %v, want %q", err, tt.err)
			}
		})
	}
}

// FuzzDecode checks that arbitrary annotations give a claim, an error of one line, or both. When
// such a claim is encoded and decoded again, it must stay the same.
func FuzzDecode(f *testing.F) {
	f.Add("true", "vxlan", `{"VtepMAC":"02:00:00:00:00:01"}`, "192.0.2.1", "null", "2001:db8::1")
	f.Add("true", "", "null", "0.0.0.0", "", "")
	f.Add("", "host-gw", "{", "x", "\n", "fe80::1%\n")
	f.Add("true", "host-gw", "null", "rubbish", "", "2001:db8::1")
	k := NewKeys("a.b/")
	on := prefixtest.Parse("10.5.1.0/24", "fd00:5::/64")
	f.Fuzz(func(t *testing.T, m, kind, data, public, data6, public6 string) {
		n := Notes{
			Managed: {m, true}, BackendType: {kind, true}, BackendData: {data, true}, PublicIP: {public, true},
			BackendV6Data: {data6, data6 != ""}, PublicIPv6: {public6, public6 != ""},
		}
		c, err := k.Decode(n, on, nil)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("error is not one line: %q", err)
			}
			if len(c.Endpoints) == 0 {
				return
			}
		}
		// This Decode gets only the podCIDRs of the endpoints. Without an IPv4 endpoint, Encode publishes
		// 0.0.0.0 for most backends, and Decode would read that as an endpoint of an IPv4 podCIDR.
		var kept []netip.Prefix
		for _, e := range c.Endpoints {
			kept = append(kept, e.Subnet)
		}
		again, err := k.Decode(Encode(c), kept, nil)
		if diff := cmp.Diff(c, again, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); err != nil || diff != "" {
			t.Errorf("comes back differently, %v:\n%s", err, diff)
		}
	})
}
