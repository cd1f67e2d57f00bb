// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/prefix"
)

var (
	four = []prefix.Family{prefix.IPv4}
	both = []prefix.Family{prefix.IPv4, prefix.IPv6}
)

// sharing returns shared endpoints. An entry such as "2 203.0.113.2:1" contains the number of
// the peer's key, as for key, and the endpoint.
func sharing(t *testing.T, entries ...string) sharedEndpoints {
	t.Helper()
	s := sharedEndpoints{}
	for _, e := range entries {
		var n byte
		number, endpoint, _ := strings.Cut(e, " ")
		if _, err := fmt.Sscan(number, &n); err != nil {
			t.Fatal(err)
		}
		s.add(key(n), netip.MustParseAddrPort(endpoint))
	}
	return s
}

// dataWith returns backend data with any JSON value as PeerEndpoints.
func dataWith(peers string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"PublicKey":%q,"Port":51820,"PeerEndpoints":%s}`, text(key(9)), peers))
}

// backendFor returns the backend that the Backend object raw describes, on a host with both
// families.
func backendFor(t *testing.T, raw string) *Backend {
	t.Helper()
	b, _, err := NewHost().New(json.RawMessage(raw), backendtest.Env(1500, both...))
	if err != nil {
		t.Fatal(err)
	}
	return b.(*Backend)
}

// TestSharedEndpointsInALease checks the encoded form of shared endpoints, and that
// decodeShared returns the same endpoints.
func TestSharedEndpointsInALease(t *testing.T) {
	b := backendFor(t, `{}`)
	shared := sharing(t, "2 203.0.113.2:40002", "3 203.0.113.3:1", "2 [2001:db8::2]:65535")
	for f, want := range map[prefix.Family]string{
		prefix.IPv4: fmt.Sprintf(`{%q:"203.0.113.2:40002",%q:"203.0.113.3:1"}`, text(key(2)), text(key(3))),
		prefix.IPv6: fmt.Sprintf(`{%q:"[2001:db8::2]:65535"}`, text(key(2))),
	} {
		raw, err := shared.encode(f)
		if err != nil || string(raw) != want {
			t.Errorf("%s: %s, %v, want %s", f, raw, err, want)
		}
		got := sharedEndpoints{}
		decodeShared(dataWith(string(raw)), f, b.env.Reachable, got)
		for of, endpoint := range shared {
			if (got[of] == endpoint) != (of.family == f) {
				t.Errorf("%s: read %v, want the endpoints of this family in %v", f, got, shared)
			}
		}
	}
	if raw, err := (sharedEndpoints{}).encode(prefix.IPv4); raw != nil || err != nil {
		t.Errorf("no endpoints are encoded as %s, %v, want nothing", raw, err)
	}
}

// TestHostileSharedEndpoints checks endpoints that flanneld never writes. None of them may be
// used, and the rest of the data must remain usable.
func TestHostileSharedEndpoints(t *testing.T) {
	b := backendFor(t, `{}`)
	entry := func(endpoint string) string { return fmt.Sprintf(`{%q:%q}`, text(key(2)), endpoint) }
	many := map[string]string{}
	for i := range maxShared + 1 {
		many[text(key(byte(i+1)))] = "203.0.113.2:40002"
	}
	tooMany, err := json.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	for name, peers := range map[string]string{
		"another type":              `7`,
		"null":                      `null`,
		"a list":                    `["203.0.113.2:40002"]`,
		"values of another type":    fmt.Sprintf(`{%q:7}`, text(key(2))),
		"too many":                  string(tooMany),
		"too long":                  fmt.Sprintf(`{%q:"203.0.113.2:40002"%s}`, text(key(2)), strings.Repeat(" ", maxSharedSize)),
		"no key":                    `{"AQ==":"203.0.113.2:40002"}`,
		"a key in another form":     fmt.Sprintf(`{%q:"203.0.113.2:40002"}`, strings.Replace(text(key(2)), "A=", "B=", 1)),
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
		"the address of this host":  entry(b.env.Locals()[0].String() + ":40002"),
		"a long text":               entry(strings.Repeat("2", 3000)),
		"an object in the endpoint": fmt.Sprintf(`{%q:{"203.0.113.2:40002":1}}`, text(key(2))),
	} {
		data, got := dataWith(peers), sharedEndpoints{}
		if decodeShared(data, prefix.IPv4, b.env.Reachable, got); len(got) > 0 {
			t.Errorf("%s: read %v, want nothing", name, got)
		}
		if k, port, err := decodeData(data); err != nil || k != key(9) || port != 51820 {
			t.Errorf("%s: the lease has key %s and port %d, %v, want those that it contains", name, k, port, err)
		}
	}
	valid := sharedEndpoints{}
	decodeShared(dataWith(fmt.Sprintf(`{%q:"127.0.0.1:1",%q:"203.0.113.3:40003"}`, text(key(2)), text(key(3)))), prefix.IPv4, b.env.Reachable, valid)
	if !maps.Equal(valid, sharing(t, "3 203.0.113.3:40003")) {
		t.Errorf("read %v, want the valid entry beside an invalid one", valid)
	}
}

// TestSharedIndex checks that endpoints that more hosts share come first, and that set and
// retain report exactly the changes.
func TestSharedIndex(t *testing.T) {
	var x sharedIndex
	expect := func(want ...string) {
		t.Helper()
		var got []string
		for _, e := range x.candidates(key(2), both) {
			got = append(got, e.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("candidates %v, want %v", got, want)
		}
	}
	set := func(changed bool, lease string, entries ...string) {
		t.Helper()
		if got := x.set(lease, sharing(t, entries...)); got != changed {
			t.Errorf("set of %s to %v reports a change: %v, want %v", lease, entries, got, changed)
		}
	}
	set(false, "a")
	expect()
	set(true, "a", "2 203.0.113.9:9", "3 203.0.113.3:3")
	set(false, "a", "2 203.0.113.9:9", "3 203.0.113.3:3")
	set(true, "b", "2 203.0.113.1:1", "2 [2001:db8::2]:2")
	expect("203.0.113.1:1", "203.0.113.9:9", "[2001:db8::2]:2")
	set(true, "c", "2 203.0.113.9:9")
	expect("203.0.113.9:9", "203.0.113.1:1", "[2001:db8::2]:2")
	set(true, "d", "2 203.0.113.0:1")
	expect("203.0.113.9:9", "203.0.113.0:1", "203.0.113.1:1") // at most maxCandidates
	if got := x.candidates(key(2), four); len(got) != 3 {
		t.Errorf("IPv4 candidates %v, want 3", got)
	}
	if !x.retain(func(lease string) bool { return lease == "a" }) || x.retain(func(lease string) bool { return lease == "a" }) {
		t.Error("retain must report a change once")
	}
	expect("203.0.113.9:9")
	set(true, "a")
	if expect(); !x.empty() || len(x.byPeer) > 0 {
		t.Errorf("index %+v, want an empty one", x)
	}
}

func FuzzSharedEndpoints(f *testing.F) {
	f.Add([]byte(`{"PeerEndpoints":{"AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=":"203.0.113.2:40002"}}`))
	b := &Backend{env: backendtest.Env(1500, both...)}
	f.Fuzz(func(t *testing.T, raw []byte) {
		got := sharedEndpoints{}
		decodeShared(raw, prefix.IPv4, b.env.Reachable, got)
		if len(got) > maxShared {
			t.Errorf("%q gives %d endpoints, want at most %d", raw, len(got), maxShared)
		}
		for of, endpoint := range got {
			if of.family != prefix.IPv4 || !endpoint.Addr().Is4() || endpoint.Port() == 0 || !b.env.Reachable(endpoint.Addr()) {
				t.Errorf("%q gives endpoint %s", raw, endpoint)
			}
		}
	})
}
