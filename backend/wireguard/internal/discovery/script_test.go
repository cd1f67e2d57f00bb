// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/scripttest"
	"github.com/flanneld/flanneld/subnet"
)

// TestScripts runs the scripts in testdata. Each is the life of one host, and prints what its Discovery
// decides, on lines that begin with four blanks below the command. testdata/README.md lists the commands.
func TestScripts(t *testing.T) {
	scripttest.Run(t, func(t *testing.T, text string) string {
		s := script{T: t, wall: time.Unix(1_000_000_000, 0), peers: map[string]*scripted{}, leases: map[string]*subnet.Lease{}, dns: map[string][]netip.Addr{}, answers: map[string][]netip.Addr{}}
		s.Play(text, s.command)
		return s.String()
	})
}

// script is a host with one device, which sends to both families, and what is around it.
type script struct {
	*testing.T
	scripttest.Transcript

	config Config
	host   *Discovery
	wall   time.Time
	steady time.Duration

	peers   map[string]*scripted
	leases  map[string]*subnet.Lease
	changed []string
	dns     map[string][]netip.Addr
	answers map[string][]netip.Addr // of lookups that have not been given to the host
	shared  Endpoints
	partial bool // some leases are unknown
	none    bool // all leases are unknown
	reads   int
	others  int           // leases of further hosts
	look    time.Duration // when the host wants its next pass
	fresh   bool          // the host has not made a pass yet
}

// scripted is a peer in the device.
type scripted struct {
	wanted  Peer
	have    wgtypes.Peer
	exists  bool           // in the device
	removed bool           // its lease is gone
	answers netip.AddrPort // at which it is reached
	alive   bool           // it has a session, which it renews
	from    netip.AddrPort // from where it does so
	idle    bool           // the host has no packets for it
	moved   bool           // its lease has another endpoint than before
}

// keyOf returns the key of the peer with that name, which is one letter.
func keyOf(name string) wgtypes.Key { return wgtypes.Key{name[0]} }

func (s *script) printf(format string, args ...any) {
	s.Did(s.steady, false, fmt.Sprintf(format, args...))
}

func (s *script) command(name string, args []string) {
	options := map[string]string{}
	for _, a := range args {
		if key, value, ok := strings.Cut(a, "="); ok {
			options[key] = value
		}
	}
	switch name {
	case "host":
		s.config = Config{
			Interval: s.duration(options["interval"]), Devices: [][]prefix.Family{{prefix.IPv4, prefix.IPv6}},
			Reachable:  func(a netip.Addr) bool { return !a.IsLoopback() && !a.IsLinkLocalUnicast() },
			Public:     func(prefix.Family) netip.Addr { return netip.MustParseAddr(options["public"]) },
			Broadcasts: func() []netip.Addr { return []netip.Addr{prefix.Last(netip.MustParsePrefix(options["local"]))} },
			Random:     func(d time.Duration) time.Duration { return d / 2 },
		}
		s.shared = Endpoints{}
		s.restart()
	case "restart":
		s.restart()
	case "reboot":
		for _, p := range s.peers {
			p.exists = false
			p.have = wgtypes.Peer{}
		}
		s.restart()
	case "peer":
		s.peer(args[0], args[1], options)
	case "remove":
		s.peers[args[0]].removed = true
		delete(s.leases, args[0])
		s.changed = append(s.changed, args[0])
	case "answers":
		s.peers[args[0]].answers = netip.MustParseAddrPort(args[1])
	case "session":
		p := s.peers[args[0]]
		p.from = netip.MustParseAddrPort(args[1])
		p.have.Endpoint = net.UDPAddrFromAddrPort(p.from)
		p.have.LastHandshakeTime = s.wall
		p.alive = true
	case "silent":
		s.peers[args[0]].alive = false
		s.peers[args[0]].answers = netip.AddrPort{}
	case "idle":
		s.peers[args[0]].idle = true
	case "busy":
		s.peers[args[0]].idle = false
	case "shares":
		s.share(args[0], args[1:])
	case "hosts":
		for s.others = 0; s.others < int(s.number(args[0])); s.others++ {
			s.leases[fmt.Sprint("other", s.others)] = &subnet.Lease{}
		}
	case "name":
		s.dns[args[0]] = nil
		for _, a := range args[1:] {
			s.dns[args[0]] = append(s.dns[args[0]], netip.MustParseAddr(a))
		}
	case "leases":
		s.partial = args[0] != "known"
		s.none = args[0] == "none"
	case "clock":
		s.wall = s.wall.Add(s.duration(args[0]))
	case "run":
		s.run(s.duration(args[0]))
	default:
		s.Fatalf("there is no command %q", name)
	}
}

func (s *script) duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		s.Fatal(err)
	}
	return d
}

func (s *script) number(text string) (n int64) {
	if _, err := fmt.Sscan(text, &n); err != nil {
		s.Fatal(err)
	}
	return n
}

func (s *script) restart() {
	s.host = New(s.config, maps.Clone(s.shared), s.steady)
	s.changed = slices.Collect(maps.Keys(s.leases))
	s.fresh = true
}

func (s *script) peer(name, at string, options map[string]string) {
	p := s.peers[name]
	if p == nil {
		p = &scripted{}
		s.peers[name] = p
	}
	moved := p.wanted.Endpoint
	p.wanted = Peer{Key: keyOf(name), Endpoint: netip.MustParseAddrPort(at)}
	p.moved = moved.IsValid() && moved != p.wanted.Endpoint
	if other := options["other"]; other != "" {
		p.wanted.Other = netip.MustParseAddrPort(other)
	}
	if named := options["name"]; named != "" {
		n, err := endpoint.Parse(named)
		if err != nil {
			s.Fatal(err)
		}
		p.wanted.Name = n
	}
	s.leases[name] = &subnet.Lease{}
	s.changed = append(s.changed, name)
}

// share makes the lease of a host share endpoints, such as b=203.0.113.2:1.
func (s *script) share(lease string, entries []string) {
	var l subnet.Lease
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		texts := map[string]string{}
		for _, e := range entries {
			peer, at, _ := strings.Cut(e, "=")
			if prefix.FamilyOf(netip.MustParseAddrPort(at).Addr()) == f {
				texts[keyOf(peer).String()] = at
			}
		}
		raw, err := json.Marshal(map[string]any{"PeerEndpoints": texts})
		if err != nil {
			s.Fatal(err)
		}
		l.Endpoints = append(l.Endpoints, subnet.Endpoint{PublicIP: map[prefix.Family]netip.Addr{prefix.IPv4: netip.IPv4Unspecified(), prefix.IPv6: netip.IPv6Unspecified()}[f], Data: raw})
	}
	s.leases[lease] = &l
	s.changed = append(s.changed, lease)
}

// run lets time pass. The host makes a pass at the start, and whenever it wants one. If leases have changed,
// the first pass reads no device.
func (s *script) run(d time.Duration) {
	const retry = 5 * time.Second // of WireGuard
	end := s.steady + d
	s.reads = 0
	for s.pass(s.fresh || len(s.changed) == 0); s.steady < end; {
		next := min(end, s.steady+retry-s.steady%retry)
		if look := s.look; look != 0 {
			next = min(next, max(look, s.steady+LeastPause))
		}
		s.wall = s.wall.Add(next - s.steady)
		s.steady = next
		if s.steady%retry == 0 {
			for _, p := range s.peers {
				p.tick(s.wall)
			}
		}
		if look := s.look; look != 0 && look <= s.steady || len(s.answers) > 0 {
			s.pass(true)
		}
	}
	again := "no other is planned"
	if look := s.look; look != 0 {
		again = fmt.Sprintf("the next in %s", look-s.steady)
	}
	s.printf("readings: %d, %s", s.reads, again)
}

// tick is what WireGuard does every 5 s: it begins a handshake if there is no session, and the peer answers
// if the endpoint is the right one.
func (p *scripted) tick(now time.Time) {
	session := now.Sub(p.have.LastHandshakeTime) < 2*time.Minute
	switch {
	case p.alive && !session:
		p.have.LastHandshakeTime = now
		p.have.Endpoint = net.UDPAddrFromAddrPort(p.from)
	case session || p.idle:
	default:
		p.have.TransmitBytes += 148
		if p.answers.IsValid() && EndpointOf(p.have) == p.answers {
			p.have.LastHandshakeTime = now
			p.from = p.answers
			p.alive = true
		}
	}
}

// pass is one pass of the network.
func (s *script) pass(read bool) {
	changed := s.changed
	s.changed = nil
	s.fresh = false
	for host, addrs := range s.answers {
		s.host.Answer(s.steady, host, Usable(addrs))
	}
	s.answers = map[string][]netip.Addr{}
	s.host.Hear(s.leases, changed, false)
	if !s.partial {
		if shared, changed := s.host.Publish(s.steady); changed {
			s.shared = shared
			s.printShared()
		}
	}

	var have []wgtypes.Peer
	want := Peers{}
	for _, p := range s.peers {
		if p.exists {
			have = append(have, p.have)
		}
		if !p.removed && !s.none {
			want[p.wanted.Key] = p.wanted
		}
	}
	var ages map[wgtypes.Key]time.Duration
	var try map[wgtypes.Key]netip.AddrPort
	if read {
		s.reads++
		ages, try = s.host.Observe(Instant{s.wall, s.steady}, 0, have, want, !s.partial)
	} else {
		s.host.Meet(s.steady, want)
	}
	wrote := false
	for _, name := range slices.Sorted(maps.Keys(s.peers)) {
		if read || slices.Contains(changed, name) {
			wrote = s.apply(name, s.peers[name], ages, try) || wrote
		}
	}
	s.look = s.host.Plan(s.steady, read, wrote, !s.partial)
	lookups := s.host.Lookups()
	for _, host := range slices.Sorted(maps.Keys(lookups)) {
		s.printf("look up %s", host)
		s.answers[host] = s.dns[host]
	}
}

// apply writes what follows for a peer, as the network does.
func (s *script) apply(name string, p *scripted, ages map[wgtypes.Key]time.Duration, try map[wgtypes.Key]netip.AddrPort) (wrote bool) {
	key := keyOf(name)
	switch at, tried := try[key]; {
	case s.none:
	case p.removed:
		p.exists = false
	case !p.exists:
		p.exists = true
		p.have.PublicKey = key
		if p.have.Endpoint == nil {
			p.have.Endpoint = net.UDPAddrFromAddrPort(p.wanted.Endpoint)
		}
		wrote = true
	case p.moved:
		p.moved = false
		s.printf("move %s to %s", name, p.wanted.Endpoint)
		p.have.Endpoint = net.UDPAddrFromAddrPort(p.wanted.Endpoint)
		wrote = true
	case ages[key] <= SessionLife:
	case !tried && EndpointOf(p.have) != p.wanted.Endpoint, tried && at != EndpointOf(p.have):
		if !tried {
			at = p.wanted.Endpoint
		}
		s.printf("try %s at %s", name, at)
		p.have.Endpoint = net.UDPAddrFromAddrPort(at)
		wrote = true
	}
	return wrote
}

func (s *script) printShared() {
	var texts []string
	for of, at := range s.shared {
		texts = append(texts, fmt.Sprintf(" %c=%s", of.Peer[0], at))
	}
	slices.Sort(texts)
	if len(texts) > 4 {
		texts = []string{fmt.Sprintf(" %d endpoints", len(texts))}
	}
	s.printf("share%s", strings.Join(append(texts, ""), ""))
}
