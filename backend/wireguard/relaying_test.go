// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// relayedHost is the network of host 1 with keepalives, so that it can use relays. Some of the
// other hosts answer its handshakes.
type relayedHost struct {
	*natHost
	sessions []byte // numbers of the hosts that answer its handshakes
}

func newRelayedHost(t *testing.T, own *subnet.Lease) *relayedHost {
	t.Helper()
	h := newNATHost(t, own)
	h.config.PersistentKeepaliveInterval = 25
	restart(h.network, own) // with keepalives, it takes over the lists of its lease
	return &relayedHost{natHost: h}
}

// run lets the time d pass on the clock of the test. About every 5 s, host 1 gets a new session
// with each host in sessions, and makes passes. leases are those of the other hosts.
func (h *relayedHost) run(t *testing.T, d time.Duration, leases ...*subnet.Lease) {
	t.Helper()
	for end := h.clock.steady + d; h.clock.steady < end; {
		for _, i := range h.sessions {
			h.session(i, host(t, i, int(i)).Endpoints[0].PublicIP.String()+":51820")
		}
		h.sync(t, min(5*time.Second, end-h.clock.steady), leases...)
	}
}

// misses returns the lease of host i, which publishes that it does not reach host 1, and that
// it reaches these relays.
func (h *relayedHost) misses(t *testing.T, i byte, relays ...byte) *subnet.Lease {
	t.Helper()
	own, err := encodeKeys([]wgtypes.Key{h.key.PublicKey()})
	if err != nil {
		t.Fatal(err)
	}
	return withRelays(t, i, leaseData{Unreachable: own, Relays: array(t, relays...)})
}

// publishedRelays returns the lists about relays in the lease that the host would publish now.
func (h *relayedHost) publishedRelays(t *testing.T) relayLists {
	t.Helper()
	claim, err := h.Claim(t.Context(), host(t, 1, 1).Claim())
	if err != nil {
		t.Fatal(err)
	}
	_, _, lists := relaysIn(h.devices[0].tunnel, subnet.Lease{Endpoints: claim.Endpoints})
	return lists
}

// networks returns the allowed IPs of host i on the IPv4 device.
func (h *relayedHost) networks(i byte) (all []string) {
	for _, n := range h.device.peers["flannel-wg"][key(i)].AllowedIPs {
		all = append(all, n.String())
	}
	return all
}

// expectBy fails the test unless the packets of host 1 to host 2 over IPv4 go by the relay with the
// number by. If by is 2, they must go to host 2 directly.
func (h *relayedHost) expectBy(t *testing.T, when string, by byte) {
	t.Helper()
	want, relay := map[byte][]string{2: nil, 5: {"10.5.5.0/24"}, 6: {"10.5.6.0/24"}}, ""
	want[by] = append(want[by], "10.5.2.0/24")
	if by != 2 {
		relay = host(t, by, int(by)).Key
	}
	for i, networks := range want {
		if diff := cmp.Diff(networks, h.networks(i)); diff != "" {
			t.Errorf("%s: allowed IPs of host %d (-want +got):\n%s", when, i, diff)
		}
	}
	if got := h.Relay("host2"); got != relay {
		t.Errorf("%s: the relay is %q, want %q", when, got, relay)
	}
	if got := h.device.peers["flannel-wg-v6"][key(2)].AllowedIPs; len(got) != 1 {
		t.Errorf("%s: on the device for IPv6, host 2 has the allowed IPs %v, want its own", when, got)
	}
}

// relayOf returns the numbers of the relays 5 and 6: first the one that host 1 and host 2
// prefer, and then the other one.
func (h *relayedHost) relayOf() (first, second byte) {
	note := relayNote{peer: key(2), misses: true, relays: keys(5, 6)}
	relay, _ := agreedRelay(h.key.PublicKey(), relayLists{keys(2), keys(5, 6)}, note, func(wgtypes.Key) bool { return true })
	if relay == key(5) {
		return 5, 6
	}
	return 6, 5
}

// TestReachAPeerByARelay checks what host 1 publishes, and which relay carries its packets to
// host 2. It has sessions with two relays, and at first none with host 2.
func TestReachAPeerByARelay(t *testing.T) {
	h := newRelayedHost(t, host(t, 1, 1))
	first, second := h.relayOf()
	two, five, six := host(t, 2, 2), withRelays(t, 5, leaseData{Relay: true}), withRelays(t, 6, leaseData{Relay: true})
	h.sessions = []byte{5, 6}
	h.run(t, time.Minute, two, five, six)
	if lists := h.publishedRelays(t); h.asked() || !lists.empty() {
		t.Errorf("after a minute without a session it publishes %v, want nothing", lists)
	}
	h.run(t, 4*time.Minute, two, five, six)
	if lists := h.publishedRelays(t); !h.asked() || !lists.equal(relayLists{keys(2), keys(5, 6)}) {
		t.Errorf("it publishes %v, want that it does not reach host 2, and both relays", lists)
	}
	h.expectBy(t, "host 2 has not agreed", 2)

	two = h.misses(t, 2, 5, 6)
	h.run(t, time.Second, two, five, six)
	h.expectBy(t, "host 2 has agreed", first)
	h.run(t, time.Hour, two, five, six)
	h.expectBy(t, "an hour later", first)
	if h.asked() {
		t.Error("it publishes its lease again, although nothing has changed")
	}

	// The relay stays if the lease of the peer or of the relay is written again without a change about relays.
	s := set([]string{"host2", host(t, first, 1).Key}, two, five, six)
	if _, err := h.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.expectBy(t, "the leases were written again", first)

	two = h.misses(t, 2, second)
	h.run(t, time.Second, two, five, six)
	h.expectBy(t, "host 2 does not reach the first relay any more", second)
	two = h.misses(t, 2, first, second)
	h.run(t, time.Second, two, five, six)
	h.expectBy(t, "host 2 reaches it again", first)

	// The first relay dies. The session with it ends three minutes later.
	h.sessions = []byte{second}
	h.run(t, sessionLife+relayGrace+30*time.Second, two, five, six)
	h.expectBy(t, "the first relay is dead", second)
	if lists := h.publishedRelays(t); !h.asked() || !lists.equal(relayLists{keys(2), keys(second)}) {
		t.Errorf("it publishes %v, want only the second relay", lists)
	}
	h.sessions = []byte{5, 6}
	h.run(t, 10*time.Minute, two, five, six)
	h.expectBy(t, "the first relay is back", first)
	h.asked()

	// A session with the peer begins. Both hosts leave the relay after the same time.
	h.sessions = []byte{2, 5, 6}
	h.run(t, 15*time.Second, two, five, six)
	h.expectBy(t, "a session has begun", first)
	h.run(t, 10*time.Second, two, five, six)
	h.expectBy(t, "the session is established", 2)
	h.run(t, time.Minute, two, five, six)
	if lists := h.publishedRelays(t); !h.asked() || !lists.empty() {
		t.Errorf("with a session it publishes %v, want nothing", lists)
	}
	h.expectBy(t, "host 2 has not withdrawn yet", 2)
}

// TestAPeerLeavesTheRelay checks that a host stops using a relay at once if the lease of the peer
// or of the relay does not allow it any more, or if the relay has no lease any more.
func TestAPeerLeavesTheRelay(t *testing.T) {
	h := newRelayedHost(t, host(t, 1, 1))
	five := withRelays(t, 5, leaseData{Relay: true})
	six := host(t, 6, 6)
	h.sessions = []byte{5}
	h.run(t, 5*time.Minute, h.misses(t, 2, 5), five, six)
	h.expectBy(t, "both have agreed", 5)
	for when, now := range map[string]func() (two, relay *subnet.Lease){
		"the peer withdraws":     func() (_, _ *subnet.Lease) { return host(t, 2, 2), five },
		"the relay is none more": func() (_, _ *subnet.Lease) { return h.misses(t, 2, 5), host(t, 5, 5) },
		"the peer changes its key": func() (_, _ *subnet.Lease) {
			two := h.misses(t, 2, 5)
			two.Endpoints[0].Data = json.RawMessage(`{"PublicKey":"` + text(key(7)) + `"}`)
			return two, five
		},
	} {
		two, relay := now()
		if _, err := h.Sync(t.Context(), set([]string{"host2", "host5"}, two, relay, six)); err != nil {
			t.Fatal(err)
		}
		if got := h.networks(5); !slices.Equal(got, []string{"10.5.5.0/24"}) || h.Relay("host2") != "" {
			t.Errorf("%s: the relay has the networks %v, want its own", when, got)
		}
		if _, err := h.Sync(t.Context(), set([]string{"host2", "host5"}, h.misses(t, 2, 5), five, six)); err != nil {
			t.Fatal(err)
		}
		h.expectBy(t, "back after: "+when, 5)
	}
	// The lease of the relay is removed.
	if _, err := h.Sync(t.Context(), set([]string{"host5"}, h.misses(t, 2, 5), six)); err != nil {
		t.Fatal(err)
	}
	if got := h.networks(2); !slices.Equal(got, []string{"10.5.2.0/24"}) {
		t.Errorf("without the lease of the relay the peer has the networks %v, want its own", got)
	}
}

// TestARestartKeepsTheRelay checks that a host whose own lease has lists uses the relay from
// its first pass, even while its sessions begin anew.
func TestARestartKeepsTheRelay(t *testing.T) {
	five, six := withRelays(t, 5, leaseData{Relay: true}), host(t, 6, 6)
	h := newRelayedHost(t, withRelays(t, 1, leaseData{Unreachable: array(t, 2), Relays: array(t, 5)}))
	h.run(t, time.Second, h.misses(t, 2, 5), five, six)
	h.expectBy(t, "the first pass", 5)
	h.sessions = []byte{5, 6}
	h.run(t, 10*time.Minute, h.misses(t, 2, 5), five, six)
	h.expectBy(t, "10 minutes later", 5)
	if lists := h.publishedRelays(t); h.asked() || !lists.equal(relayLists{keys(2), keys(5)}) {
		t.Errorf("after a restart it publishes %v, want the same as before", lists)
	}
}

// TestTheEndOfAMigrationKeepsTheRelay checks that the claim of a host keeps the lists that it
// has published for wireguard, also if wireguard was the next backend of a migration. Data of
// the other backend is ignored.
func TestTheEndOfAMigrationKeepsTheRelay(t *testing.T) {
	h := newRelayedHost(t, host(t, 1, 1))
	h.Backend.published.Store(nil) // the claim precedes the network
	prev := withRelays(t, 1, leaseData{Unreachable: array(t, 2), Relays: array(t, 5)}).Claim()
	other := withRelays(t, 1, leaseData{Unreachable: array(t, 3), Relays: array(t, 6)}).Claim()
	for i := range prev.Endpoints {
		prev.Endpoints[i].NextData, prev.Endpoints[i].Data = prev.Endpoints[i].Data, other.Endpoints[i].Data
	}
	for _, tc := range []struct {
		present, next string
		want          relayLists
	}{
		{"vxlan", Type, relayLists{keys(2), keys(5)}},
		{Type, "vxlan", relayLists{keys(3), keys(6)}},
		{Type, "", relayLists{keys(3), keys(6)}},
	} {
		prev.BackendType, prev.NextType = tc.present, tc.next
		claim, err := h.Claim(t.Context(), prev)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, lists := relaysIn(h.devices[0].tunnel, subnet.Lease{Endpoints: claim.Endpoints}); !lists.equal(tc.want) {
			t.Errorf("from %q and %q to wireguard: it publishes %v, want %v", tc.present, tc.next, lists, tc.want)
		}
	}
}

// TestNoNetworkIsEverWithoutAPeer checks that one write moves a subnet from the peer to the relay,
// and that one write moves it back. Neither write may remove a subnet, because the device would drop
// packets to that subnet until the next write.
func TestNoNetworkIsEverWithoutAPeer(t *testing.T) {
	h := newRelayedHost(t, host(t, 1, 1))
	five, six := withRelays(t, 5, leaseData{Relay: true}), host(t, 6, 6)
	h.sessions = []byte{5}
	h.run(t, 5*time.Minute, host(t, 2, 2), five, six)
	for _, two := range []*subnet.Lease{h.misses(t, 2, 5), host(t, 2, 2)} {
		h.device.writes = nil
		h.run(t, time.Second, two, five, six)
		var moved int
		for _, w := range h.device.writes {
			if len(w.AllowedIPs) == 1 && w.AllowedIPs[0].String() == "10.5.2.0/24" && !w.ReplaceAllowedIPs {
				moved++
			} else if w.Remove || w.ReplaceAllowedIPs {
				t.Errorf("the write %+v removes networks", w)
			}
		}
		if moved != 1 {
			t.Errorf("%d writes move the network, want 1", moved)
		}
	}
}

// TestARelayThatDoesNotAnswer checks that a relay counts as dead after data without an answer, that
// it counts as alive in all other cases, and that one received byte makes it alive again.
func TestARelayThatDoesNotAnswer(t *testing.T) {
	const step = 10 * time.Second
	for name, tt := range map[string]struct {
		sent, received int64 // bytes in each step
		answers        bool
	}{
		"data in both directions":        {1000, 1000, true},
		"nothing":                        {0, 0, true},
		"keepalives":                     {keepaliveSize, 0, true},
		"data without an answer":         {1000, 0, false},
		"data, answered with keepalives": {1000, keepaliveSize, true},
	} {
		h := wgtypes.Peer{}
		c := contact{}.next(time.Hour, h, 0, 25*time.Second)
		now := time.Hour
		for range 5 {
			now += step
			h.TransmitBytes, h.ReceiveBytes = h.TransmitBytes+tt.sent, h.ReceiveBytes+tt.received
			c = c.next(now, h, now-time.Hour, 25*time.Second)
		}
		if got := c.answers(now); got != tt.answers {
			t.Errorf("%s: the relay answers: %v, want %v", name, got, tt.answers)
		}
		h.ReceiveBytes++
		if c = c.next(now+step, h, 0, 25*time.Second); !c.answers(now + step) {
			t.Errorf("%s: after an answer the relay still counts as dead", name)
		}
	}
}

// TestMostUnreachablePeers checks which peers a host publishes as unreachable if there are too
// many: first the peers that also publish that they do not reach this host, then the peers that the
// host publishes already.
func TestMostUnreachablePeers(t *testing.T) {
	r := newRelaying()
	r.notes["relay"] = relayNote{peer: key(200), relay: true}
	r.notes["agrees"] = relayNote{peer: key(100), misses: true}
	r.contacts[key(200)] = contact{session: true, read: 1}
	for i := range byte(100) {
		r.contacts[key(i+1)] = contact{read: 1}
	}
	r.published = relayLists{keys(90), keys(200)}
	got := r.wanted(time.Hour, time.Minute)
	if len(got.unreachable) != maxRelayKeys || !slices.IsSortedFunc(got.unreachable, compareKeys) || !slices.Equal(got.relays, keys(200)) {
		t.Errorf("%d unreachable peers %v, and relays %v, want %d in their order, and the relay", len(got.unreachable), got.unreachable, got.relays, maxRelayKeys)
	}
	for _, k := range keys(1, 90, 100) {
		if !slices.Contains(got.unreachable, k) {
			t.Errorf("the unreachable peers are %v, want %s among them", got.unreachable, k)
		}
	}
	delete(r.contacts, key(200))
	if got := r.wanted(time.Hour, time.Minute); !got.empty() || len(got.relays) > 0 {
		t.Errorf("without a relay it publishes %v, want nothing", got)
	}
}

// TestRelaysAreWrittenSoon checks that a host plans a write of lists about relays earlier than a
// write of endpoints, and that the minimum time between two writes is the same for both.
func TestRelaysAreWrittenSoon(t *testing.T) {
	s := sharer{interval: 2 * time.Minute}
	want := published{relays: map[prefix.Family]relayLists{prefix.IPv4: {keys(2), keys(5)}}}
	if again, most := s.offer(time.Hour, 3, want), max(3*shareTurn, leastReadPause); again > most {
		t.Errorf("the first write is due after %s, want at most %s", again, most)
	}
	s.offer(time.Hour+time.Second, 3, want)
	if !s.due(time.Hour+2*time.Second, 3, &sharedIndex{}) {
		t.Error("the first write is not due after a second")
	}
	if again := s.offer(time.Hour+3*time.Second, 3, published{}); again < s.interval-3*time.Second || again > s.interval+3*shareTurn {
		t.Errorf("the second write is due after %s, want about %s", again, s.interval)
	}
}

// TestRelaysOfBothFamilies expects the relays of all devices in the report, each of them once.
func TestRelaysOfBothFamilies(t *testing.T) {
	for _, tt := range []struct{ four, six, want string }{
		{"", "", ""},
		{"host5", "", "host5"},
		{"", "host6", "host6"},
		{"host5", "host5", "host5"},
		{"host5", "host6", "host5, host6"},
	} {
		n := &network{devices: []*device{newDevice(tunnel{}), newDevice(tunnel{})}}
		n.devices[0].relaying.by, n.devices[1].relaying.by = map[string]string{"host2": tt.four}, map[string]string{"host2": tt.six}
		if got := n.Relay("host2"); got != tt.want {
			t.Errorf("with the relays %q and %q it reports %q, want %q", tt.four, tt.six, got, tt.want)
		}
	}
}

// TestRelaysPostponeNoWrite checks that lists about relays do not postpone a write that is
// planned because of endpoints. The network is large, and the lists come just before the write,
// which must contain them.
func TestRelaysPostponeNoWrite(t *testing.T) {
	const hosts = 5000
	s := sharer{interval: 2 * time.Minute}
	want := published{shared: sharing(t, "2 203.0.113.2:1")}
	s.offer(time.Hour, hosts, want)
	planned := s.planned
	want.relays = map[prefix.Family]relayLists{prefix.IPv4: {keys(2), keys(5)}}
	if s.offer(planned-1, hosts, want); s.planned > planned {
		t.Errorf("lists about relays postpone a write by %s", s.planned-planned)
	}
	s.offer(planned, hosts, want)
	if !s.due(planned, hosts, &sharedIndex{}) || len(s.shared) != 1 || len(s.relays) != 1 {
		t.Errorf("%+v is written, want the endpoint and the lists", s.published)
	}
}

// TestNotesAboutRelaysAreReadInTime checks that a host reads its devices at once if a changed
// lease may change its choice of relays, and soon if the lease only says something about
// relays.
func TestNotesAboutRelaysAreReadInTime(t *testing.T) {
	five, seven := withRelays(t, 5, leaseData{Relay: true}), withRelays(t, 7, leaseData{Relay: true})
	for name, tt := range map[string]struct {
		run   time.Duration // after 5 minutes this host publishes host 2 and relay 5
		lease *subnet.Lease
		again time.Duration // 0 if the devices are read at once
	}{
		"a published peer agrees":            {run: 5 * time.Minute},
		"a published relay is none more":     {run: 5 * time.Minute, lease: host(t, 5, 5)},
		"a published peer says nothing":      {run: 5 * time.Minute, lease: host(t, 2, 2), again: mostReadPause},
		"another peer does not reach it":     {run: time.Minute, again: newsPause},
		"another host is a relay":            {run: time.Minute, lease: seven, again: newsPause},
		"another host, while it has a relay": {run: 5 * time.Minute, lease: seven, again: newsPause},
	} {
		t.Run(name, func(t *testing.T) {
			h := newRelayedHost(t, host(t, 1, 1))
			h.sessions = []byte{3, 5, 7}
			leases := map[string]*subnet.Lease{"host2": host(t, 2, 2), "host3": host(t, 3, 3), "host5": five, "host7": host(t, 7, 7)}
			h.run(t, tt.run, slices.Collect(maps.Values(leases))...)
			now := tt.lease
			if now == nil {
				now = h.misses(t, 2, 5)
			}
			leases[now.Key] = now
			reads := h.device.reads
			o, err := h.Sync(t.Context(), set([]string{now.Key}, slices.Collect(maps.Values(leases))...))
			if err != nil {
				t.Fatal(err)
			}
			if read := h.device.reads > reads; read != (tt.again == 0) || !read && (o.Again == 0 || o.Again > tt.again) {
				t.Errorf("the devices are read: %v, and another pass is after %s, want a reading at once: %v, or after %s", read, o.Again, tt.again == 0, tt.again)
			}
		})
	}
}

// TestAHostThatIsDownCostsLittle checks that a host reads its devices often only while a peer
// also publishes that the two do not reach each other.
func TestAHostThatIsDownCostsLittle(t *testing.T) {
	five := withRelays(t, 5, leaseData{Relay: true})
	for _, agrees := range []bool{false, true} {
		h := newRelayedHost(t, host(t, 1, 1))
		h.sessions = []byte{5}
		two := host(t, 2, 2)
		h.run(t, 5*time.Minute, two, five)
		if lists := h.publishedRelays(t); !lists.equal(relayLists{keys(2), keys(5)}) {
			t.Fatalf("it publishes %v, want that it does not reach host 2, and the relay", lists)
		}
		if agrees {
			two = h.misses(t, 2, 5)
		}
		passes := h.sync(t, 2*time.Minute, two, five)
		if often := passes >= 10; often != agrees {
			t.Errorf("the peer agrees: %v; %d passes in 2 minutes, want 10 or more only if it does", agrees, passes)
		}
	}
}

// TestNetworksWithoutRelaysCostNothing expects that relays do not matter to hosts that cannot use them, and
// that a relay alone causes no write.
func TestNetworksWithoutRelaysCostNothing(t *testing.T) {
	five := withRelays(t, 5, leaseData{Relay: true})
	h := newRelayedHost(t, host(t, 1, 1))
	if passes := h.sync(t, time.Hour, host(t, 2, 2), host(t, 3, 3)); passes != 2 {
		t.Errorf("without relays %d passes in an hour, want 2", passes)
	}
	h.sessions = []byte{2, 5}
	h.run(t, time.Hour, host(t, 2, 2), five)
	if lists := h.publishedRelays(t); h.asked() || !lists.empty() {
		t.Errorf("a host that reaches all publishes %v, want nothing", lists)
	}
	h = newRelayedHost(t, host(t, 1, 1))
	h.config.PersistentKeepaliveInterval = 0
	h.sync(t, time.Hour, h.misses(t, 2, 5), five)
	if r := h.devices[0].relaying; h.asked() || r.active() {
		t.Errorf("without keepalives the host uses relays: %+v", r)
	}
}

// TestCheckRelay checks that CheckRelay returns an error for a relay if the configuration does not
// let hosts use relays.
func TestCheckRelay(t *testing.T) {
	for raw, want := range map[string]string{
		`{"PersistentKeepaliveInterval":25}`: "",
		`{}`:                                 "Backend.PersistentKeepaliveInterval is 0, so hosts do not know whom they reach: expected 1 or more, such as 25",
		`{"PersistentKeepaliveInterval":25,"EndpointSharingInterval":0}`: "Backend.EndpointSharingInterval is 0, so hosts do not publish whom they reach: expected 1 or more, such as 120",
	} {
		b, _, err := NewHost().New(json.RawMessage(raw), backendtest.Env(1500, prefix.IPv4))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := backend.CheckRelay(b, Type, true); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: error %q, want %q", raw, got, want)
		}
		if err := backend.CheckRelay(b, Type, false); err != nil {
			t.Errorf("%s: error %v for a host that is no relay", raw, err)
		}
	}
}

var (
	_ backend.Relayer   = (*Backend)(nil)
	_ backend.RelayUser = (*network)(nil)
)
