// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

var (
	both = []prefix.Family{prefix.IPv4, prefix.IPv6}
	env  = backendtest.Env(1500, both...)
)

// sharing returns shared endpoints. An entry such as "2 203.0.113.2:1" contains the number of
// the peer's key, as for key, and the endpoint.
func sharing(t *testing.T, entries ...string) Endpoints {
	t.Helper()
	s := Endpoints{}
	for _, e := range entries {
		var n byte
		number, endpoint, _ := strings.Cut(e, " ")
		if _, err := fmt.Sscan(number, &n); err != nil {
			t.Fatal(err)
		}
		at := netip.MustParseAddrPort(endpoint)
		s[Of{key(n), prefix.FamilyOf(at.Addr())}] = at
	}
	return s
}

// dataWith returns backend data with any JSON value as PeerEndpoints.
func dataWith(peers string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"PublicKey":%q,"Port":51820,"PeerEndpoints":%s}`, key(9).String(), peers))
}

// key returns the key whose first byte is i.
func key(i byte) wgtypes.Key { return wgtypes.Key{i} }

// read returns what a lease with this data for family f shares.
func read(raw json.RawMessage, f prefix.Family) Endpoints {
	ip := netip.MustParseAddr("192.0.2.1")
	if f == prefix.IPv6 {
		ip = netip.MustParseAddr("2001:db8::1")
	}
	return SharedIn(subnet.Lease{Endpoints: []subnet.Endpoint{{PublicIP: ip, Data: raw}}}, env.Reachable)
}

// TestSharedEndpointsInALease checks the encoded form of shared endpoints, and that
// SharedIn returns the same endpoints.
func TestSharedEndpointsInALease(t *testing.T) {
	shared := sharing(t, "2 203.0.113.2:40002", "3 203.0.113.3:1", "2 [2001:db8::2]:65535")
	for f, want := range map[prefix.Family]string{
		prefix.IPv4: fmt.Sprintf(`{%q:"203.0.113.2:40002",%q:"203.0.113.3:1"}`, key(2).String(), key(3).String()),
		prefix.IPv6: fmt.Sprintf(`{%q:"[2001:db8::2]:65535"}`, key(2).String()),
	} {
		raw := shared.Encode(f)
		if string(raw) != want {
			t.Errorf("%s: %s, want %s", f, raw, want)
		}
		got := read(dataWith(string(raw)), f)
		for of, endpoint := range shared {
			if (got[of] == endpoint) != (of.Family == f) {
				t.Errorf("%s: read %v, want the endpoints of this family in %v", f, got, shared)
			}
		}
	}
	if raw := (Endpoints{}).Encode(prefix.IPv4); raw != nil {
		t.Errorf("no endpoints are encoded as %s, want nothing", raw)
	}
}

// TestHostileSharedEndpoints checks endpoints that flanneld never writes. None of them may be
// used.
func TestHostileSharedEndpoints(t *testing.T) {
	entry := func(endpoint string) string { return fmt.Sprintf(`{%q:%q}`, key(2).String(), endpoint) }
	many := map[string]string{}
	for i := range maxShared + 1 {
		many[key(byte(i+1)).String()] = "203.0.113.2:40002"
	}
	tooMany, err := json.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	for name, peers := range map[string]string{
		"another type":              `7`,
		"null":                      `null`,
		"a list":                    `["203.0.113.2:40002"]`,
		"values of another type":    fmt.Sprintf(`{%q:7}`, key(2).String()),
		"too many":                  string(tooMany),
		"too long":                  fmt.Sprintf(`{%q:"203.0.113.2:40002"%s}`, key(2).String(), strings.Repeat(" ", maxSharedSize)),
		"no key":                    `{"AQ==":"203.0.113.2:40002"}`,
		"a key in another form":     fmt.Sprintf(`{%q:"203.0.113.2:40002"}`, strings.Replace(key(2).String(), "A=", "B=", 1)),
		"no endpoint":               entry(""),
		"a name":                    entry("example.org:40002"),
		"no port":                   entry("203.0.113.2"),
		"port 0":                    entry("203.0.113.2:0"),
		"a port in another form":    entry("203.0.113.2:040002"),
		"another family":            entry("[2001:db8::2]:40002"),
		"IPv4 in IPv6":              entry("[::ffff:203.0.113.2]:40002"),
		"loopback":                  entry("127.0.0.1:40002"),
		"multicast":                 entry("224.0.0.1:40002"),
		"broadcast":                 entry("255.255.255.255:40002"),
		"unspecified":               entry("0.0.0.0:40002"),
		"link-local":                entry("169.254.169.254:80"),
		"a pod":                     entry("10.5.2.2:40002"),
		"the address of this host":  entry(env.Locals()[0].String() + ":40002"),
		"a long text":               entry(strings.Repeat("2", 3000)),
		"an object in the endpoint": fmt.Sprintf(`{%q:{"203.0.113.2:40002":1}}`, key(2).String()),
	} {
		if got := read(dataWith(peers), prefix.IPv4); len(got) > 0 {
			t.Errorf("%s: read %v, want nothing", name, got)
		}
	}
	valid := read(dataWith(fmt.Sprintf(`{%q:"127.0.0.1:1",%q:"203.0.113.3:40003"}`, key(2).String(), key(3).String())), prefix.IPv4)
	if !maps.Equal(valid, sharing(t, "3 203.0.113.3:40003")) {
		t.Errorf("read %v, want the valid entry beside an invalid one", valid)
	}
}

func FuzzSharedEndpoints(f *testing.F) {
	f.Add([]byte(`{"PeerEndpoints":{"AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=":"203.0.113.2:40002"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		got := read(raw, prefix.IPv4)
		if len(got) > maxShared {
			t.Errorf("%q gives %d endpoints, want at most %d", raw, len(got), maxShared)
		}
		for of, endpoint := range got {
			if of.Family != prefix.IPv4 || !endpoint.Addr().Is4() || endpoint.Port() == 0 || !env.Reachable(endpoint.Addr()) {
				t.Errorf("%q gives endpoint %s", raw, endpoint)
			}
		}
	})
}
