// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// view describes a peer in a device. The lease of the peer has the endpoints 192.168.77.2:51820
// and [2001:db8::2]:51820.
type view struct {
	endpoint string        // at which the device sees the peer
	age      time.Duration // of the last handshake
	gone     bool          // the peer has no lease
}

func (v view) diff(t *testing.T) diff {
	t.Helper()
	p := peer{key: key(2), endpoint: netip.MustParseAddrPort("192.168.77.2:51820"), other: netip.MustParseAddrPort("[2001:db8::2]:51820")}
	seen := p
	seen.endpoint = netip.MustParseAddrPort(v.endpoint)
	d := newDiff(settings{}, &wgtypes.Device{Peers: []wgtypes.Peer{asWritten(seen, settings{})}})
	d.ages = map[wgtypes.Key]time.Duration{p.key: v.age}
	if !v.gone {
		d.want[p.key] = p
	}
	return d
}

// TestSharer checks which endpoint of a peer a host wants to share, at each of several times.
func TestSharer(t *testing.T) {
	const interval = 2 * time.Minute
	const one, two = "203.0.113.2:1", "203.0.113.2:2"
	type step struct {
		at   time.Duration
		view view
		want string // the endpoint that should be shared after a write; "" if none
	}
	for name, steps := range map[string][]step{
		"a peer at the endpoint of its lease":       {{0, view{endpoint: "192.168.77.2:51820"}, ""}, {interval, view{endpoint: "192.168.77.2:51820"}, ""}},
		"a peer at the other endpoint of its lease": {{0, view{endpoint: "[2001:db8::2]:51820"}, ""}, {interval, view{endpoint: "[2001:db8::2]:51820"}, ""}},
		"a peer behind NAT":                         {{0, view{endpoint: one}, ""}, {interval - 1, view{endpoint: one}, ""}, {interval, view{endpoint: one}, one}},
		"a port that changes all the time":          {{0, view{endpoint: one}, ""}, {interval - 1, view{endpoint: two}, ""}, {interval, view{endpoint: one}, ""}, {2 * interval, view{endpoint: two}, ""}},
		"a changed port is replaced in one write": {
			{0, view{endpoint: one}, ""}, {interval, view{endpoint: one}, one},
			{interval + 1, view{endpoint: two}, one}, {2*interval + 1, view{endpoint: two}, two},
		},
		"a session that has ended stays for a while": {
			{0, view{endpoint: one}, ""}, {interval, view{endpoint: one}, one},
			{interval + sharedFor, view{endpoint: one, age: never}, one}, {interval + sharedFor + 1, view{endpoint: one, age: never}, ""},
		},
		"a peer without a session": {{0, view{endpoint: one, age: never}, ""}, {interval, view{endpoint: one, age: never}, ""}},
		"a peer whose lease is gone": {
			{0, view{endpoint: one}, ""}, {interval, view{endpoint: one}, one}, {interval + 1, view{endpoint: one, gone: true}, ""},
		},
		"an endpoint that others cannot use": {{0, view{endpoint: "169.254.7.7:1"}, ""}, {interval, view{endpoint: "169.254.7.7:1"}, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			seen, s := observations{}, sharer{interval: interval}
			for _, step := range steps {
				seen.note(step.at, step.view.diff(t), func(e netip.AddrPort) bool { return !e.Addr().IsLinkLocalUnicast() })
				want := sharedEndpoints{}
				if step.want != "" {
					want = sharing(t, "2 "+step.want)
				}
				if got := s.wanted(step.at, []observations{seen}, &sharedIndex{}); !maps.Equal(got, want) {
					t.Errorf("at %s it wants to share %v, want %v", step.at, got, want)
				}
				s.shared = want
			}
		})
	}
}

// TestSharersOfOnePeer checks that a host begins to share an endpoint only if fewer than
// enoughHosts other hosts share it, and does not stop because of other hosts.
func TestSharersOfOnePeer(t *testing.T) {
	seen := []observations{{key(2): {endpoint: netip.MustParseAddrPort("203.0.113.2:1"), last: time.Hour}}}
	var others sharedIndex
	s, late := sharer{interval: time.Minute}, sharer{interval: time.Minute}
	s.shared = s.wanted(time.Hour, seen, &others)
	for i, lease := range []string{"a", "b", "c"} {
		if got := late.wanted(time.Hour, seen, &others); len(got) != 1 {
			t.Errorf("with %d others the host shares %v, want one endpoint", i, got)
		}
		others.set(lease, sharing(t, "2 203.0.113.2:1"))
	}
	if got := late.wanted(time.Hour, seen, &others); len(got) != 0 {
		t.Errorf("with %d others the host shares %v, want nothing", enoughHosts, got)
	}
	if got := s.wanted(time.Hour, seen, &others); len(got) != 1 {
		t.Errorf("the host stops sharing because of others: %v", got)
	}
}

// TestSharersDecideAgain checks what a host writes that has offered two endpoints, if other hosts
// begin to share endpoints before the write. The host must leave out new endpoints that enough other
// hosts share, and write nothing if nothing new remains.
func TestSharersDecideAgain(t *testing.T) {
	both := []string{"2 203.0.113.2:2", "3 203.0.113.3:3"}
	for name, tt := range map[string]struct {
		published, others []string // others is what each of three hosts shares
		want              []string
		write             bool
	}{
		"no other host":               {nil, nil, both, true},
		"others share one of them":    {nil, both[:1], both[1:], true},
		"others share both":           {nil, both, nil, false},
		"others share another port":   {nil, []string{"2 203.0.113.2:9"}, both, true},
		"the lease has one":           {both[:1], both, both[:1], false},
		"the lease has a former port": {[]string{"2 203.0.113.2:9"}, both, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, others := sharer{interval: time.Minute, shared: sharing(t, tt.published...)}, sharedIndex{}
			offer := func(now time.Duration) (again time.Duration) {
				device := observations{}
				for i := byte(2); i <= 3; i++ {
					device[key(i)] = observation{endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, i}), uint16(i)), last: now}
				}
				return s.offer(now, 10, s.wanted(now, []observations{device}, &others))
			}
			now := time.Hour
			offer(now) // plans the write, at most half of the interval later
			now += s.interval
			if again := offer(now); again != leastReadPause {
				t.Fatalf("when it is the turn of the host, the next pass is after %s, want %s", again, leastReadPause)
			}
			for _, lease := range []string{"a", "b", "c"} {
				others.set(lease, sharing(t, tt.others...))
			}
			if write := s.due(now, 10, &others); write != tt.write || !maps.Equal(s.shared, sharing(t, tt.want...)) {
				t.Errorf("it writes: %v, with %v, want %v, with %v", write, s.shared, tt.write, tt.want)
			}
			if offer(now) != 0 || s.due(now, 10, &others) {
				t.Error("it wants to write again")
			}
		})
	}
}

// TestMostSharedEndpoints checks that a host which sees too many peers keeps the endpoints that
// it shares already.
func TestMostSharedEndpoints(t *testing.T) {
	device := observations{}
	for i := range byte(100) {
		device[key(i+1)] = observation{endpoint: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.2"), uint16(i)+1), last: time.Hour}
	}
	s := sharer{interval: time.Minute, shared: sharing(t, "90 203.0.113.2:90")}
	got := s.wanted(time.Hour, []observations{device}, &sharedIndex{})
	if len(got) != maxShared || !maps.Equal(sharing(t, "90 203.0.113.2:90"), only(got, 90)) || len(only(got, 1)) != 1 {
		t.Errorf("it shares %v, want %d endpoints with that of peer 90", got, maxShared)
	}
}

func only(s sharedEndpoints, peer byte) sharedEndpoints {
	s = maps.Clone(s)
	maps.DeleteFunc(s, func(of sharedEndpoint, _ netip.AddrPort) bool { return of.peer != key(peer) })
	return s
}

// TestWritesAreLimited checks how often a host writes its lease while the endpoint of a peer
// changes all the time, in networks of different sizes.
func TestWritesAreLimited(t *testing.T) {
	for hosts, want := range map[int]int{3: 60, 5000: 24} { // in an hour: one in 60 s, or one in hosts times 30 ms
		s, now, writes := sharer{interval: time.Minute}, time.Hour, 0
		var last time.Duration
		for now < 2*time.Hour {
			seen := []observations{{key(2): {endpoint: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.2"), uint16(now/time.Second)), last: now}}}
			s.offer(now, hosts, s.wanted(now, seen, &sharedIndex{}))
			if s.due(now, hosts, &sharedIndex{}) {
				if last != 0 && now-last < s.pause(hosts) {
					t.Errorf("two writes within %s, want at least %s between them", now-last, s.pause(hosts))
				}
				writes, last = writes+1, now
			}
			now += time.Second
		}
		if writes > want || writes < want/3 {
			t.Errorf("%d hosts: %d writes in an hour, want at most %d", hosts, writes, want)
		}
	}
}

// TestWorthSharing checks that a host which is itself behind NAT does not share global
// endpoints.
func TestWorthSharing(t *testing.T) {
	for _, tt := range []struct {
		own, endpoint string
		want          bool
	}{
		{"203.0.113.1", "198.51.100.2:1", true},
		{"203.0.113.1", "10.0.0.2:1", true},
		{"192.168.77.1", "192.168.78.2:1", true},
		{"192.168.77.1", "198.51.100.2:1", false},
		{"100.64.0.1", "198.51.100.2:1", false},
		{"fd00::1", "[2001:db8::2]:1", false},
		{"2001:db8::1", "[2001:db8::2]:1", true},
	} {
		if got := worthSharing(netip.MustParseAddr(tt.own), netip.MustParseAddrPort(tt.endpoint)); got != tt.want {
			t.Errorf("a host at %s shares %s: %v, want %v", tt.own, tt.endpoint, got, tt.want)
		}
	}
}
