// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

func TestLeasesAreSortedAsNumbers(t *testing.T) {
	of := func(key string, subnets ...string) Lease {
		l := Lease{Key: key}
		for _, s := range subnets {
			l.Endpoints = append(l.Endpoints, Endpoint{Subnet: netip.MustParsePrefix(s)})
		}
		return l
	}
	want := []Lease{
		of("broken"), of("b", "10.5.12.0/24"), of("a", "10.5.52.0/24", "fd00:5:0:52::/64"), of("c", "10.5.52.0/24", "fd00:5:0:152::/64"),
		of("d", "10.5.152.0/24"), of("e", "10.5.152.0/24"), of("f", "fd00:5:0:9::/64"),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, Lease.Compare)
	for i, l := range got {
		if l.Key != want[i].Key {
			t.Errorf("lease %d is %s %v, want %s", i, l.Key, l.Subnets(), want[i].Key)
		}
	}
}

// TestLeaseForOneBackend makes a lease and its claim with the data of the next backend alone.
func TestLeaseForOneBackend(t *testing.T) {
	e := func(subnet, data, next string) Endpoint {
		p := netip.MustParsePrefix(subnet)
		return Endpoint{Subnet: p, PublicIP: p.Addr(), Data: json.RawMessage(data), NextData: json.RawMessage(next)}
	}
	before := []Endpoint{e("10.5.1.0/24", "1", "2"), e("fd00:5::/64", "3", "4")}
	l := Lease{Key: "a", Order: 7, BackendType: "udp", NextType: "vxlan", Endpoints: slices.Clone(before)}

	claim := Claim{BackendType: "udp", NextType: "vxlan", Endpoints: before}
	if diff := cmp.Diff(claim, l.Claim(), netips); diff != "" {
		t.Errorf("claim (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(claim, claim.Lease().Claim(), netips); diff != "" {
		t.Errorf("claim of its lease (-want +got):\n%s", diff)
	}
	after := []Endpoint{before[0], before[1]}
	for i := range after {
		after[i].Data = before[i].NextData
		after[i].NextData = nil
	}
	got := l.For("vxlan", func(e Endpoint) json.RawMessage { return e.NextData })
	if diff := cmp.Diff(Lease{Key: "a", Order: 7, BackendType: "vxlan", Endpoints: after}, got, netips); diff != "" {
		t.Errorf("lease for the next backend (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, l.Endpoints, netips); diff != "" {
		t.Errorf("the lease itself has changed (-want +got):\n%s", diff)
	}

	for i, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if got, ok := claim.Endpoint(f); !ok || got.PublicIP != before[i].PublicIP {
			t.Errorf("the endpoint of %s is %v, %v, want %v", f, got, ok, before[i])
		}
		other := Claim{Endpoints: before[1-i : 2-i]}
		if got, ok := other.Endpoint(f); ok {
			t.Errorf("the endpoint of the missing family %s is %v", f, got)
		}
	}
}

var netips = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

// TestSame compares a lease with those that differ from it in one thing.
func TestSame(t *testing.T) {
	lease := func(change func(l *Lease, e *Endpoint)) Lease {
		l := Lease{Key: "n1", Order: 1, BackendType: "vxlan", NextType: "wireguard", Endpoints: []Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"), Data: []byte(`{"VNI":1,"VtepMAC":"x"}`), NextData: []byte(`"key"`),
		}}}
		change(&l, &l.Endpoints[0])
		return l
	}
	for name, tt := range map[string]struct {
		change func(l *Lease, e *Endpoint)
		want   bool
	}{
		"nothing":           {func(*Lease, *Endpoint) {}, true},
		"other spaces":      {func(_ *Lease, e *Endpoint) { e.Data = []byte(`{ "VtepMAC": "x", "VNI": 1 }`) }, true},
		"revision":          {func(l *Lease, _ *Endpoint) { l.Claimed = 7 }, true},
		"key":               {func(l *Lease, _ *Endpoint) { l.Key = "n2" }, false},
		"age":               {func(l *Lease, _ *Endpoint) { l.Order = 2 }, false},
		"backend":           {func(l *Lease, _ *Endpoint) { l.BackendType = "udp" }, false},
		"next backend":      {func(l *Lease, _ *Endpoint) { l.NextType = "" }, false},
		"subnet":            {func(_ *Lease, e *Endpoint) { e.Subnet = netip.MustParsePrefix("10.5.2.0/24") }, false},
		"public address":    {func(_ *Lease, e *Endpoint) { e.PublicIP = e.PublicIP.Next() }, false},
		"data":              {func(_ *Lease, e *Endpoint) { e.Data = []byte(`{"VNI":2,"VtepMAC":"x"}`) }, false},
		"no data":           {func(_ *Lease, e *Endpoint) { e.Data = nil }, false},
		"data without JSON": {func(_ *Lease, e *Endpoint) { e.Data = []byte("{") }, false},
		"next data":         {func(_ *Lease, e *Endpoint) { e.NextData = []byte(`"other"`) }, false},
		"one more family":   {func(l *Lease, e *Endpoint) { l.Endpoints = append(l.Endpoints, *e) }, false},
	} {
		a, b := lease(func(*Lease, *Endpoint) {}), lease(tt.change)
		if a.Same(&b) != tt.want || b.Same(&a) != tt.want {
			t.Errorf("%s differs: the leases are the same: %v and %v, want %v", name, a.Same(&b), b.Same(&a), tt.want)
		}
	}
	if sameJSON([]byte("{"), []byte("[")) || sameJSON(nil, []byte("null")) {
		t.Error("text that is not JSON is the same as other text")
	}
}
