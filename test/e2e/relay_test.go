// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// relayed is a pair of hosts that do not reach each other directly, and the relays of their lab.
type relayed struct {
	pair   [2]*lab.Host
	relays []*lab.Host
	keys   map[*lab.Host]string // the key of the lease of each host
}

// startRelayed starts a daemon and a pod on the pair and on the relays. The relays get the flag --relay.
func startRelayed(t *testing.T, pair [2]*lab.Host, relays ...*lab.Host) relayed {
	t.Helper()
	r := relayed{pair, relays, map[*lab.Host]string{}}
	start := func(hosts []*lab.Host, args ...string) {
		for _, h := range hosts {
			startOne(t, h, lab.FlanneldOptions{Args: args})
			if _, err := h.AddPod(testContext(t), ""); err != nil {
				t.Fatal(err)
			}
			r.keys[h] = statusOf(t, h).Lease.Key
		}
	}
	start(relays, "--relay")
	start(pair[:])
	for _, h := range relays {
		expectLog(t, h.Daemon(), "this host is a relay: it carries the packets of hosts that do not reach each other, and sees their plaintext")
	}
	return r
}

// by returns the relay that carries the packets from pair[from] to the other host of the pair, or nil if there is
// none. It returns an error if pair[from] does not give its status.
func (r relayed) by(t *testing.T, from int) (relay *lab.Host, err error) {
	t.Helper()
	report, err := askReport(t, r.pair[from])
	if err != nil {
		return nil, err
	}
	for _, p := range report.Peers {
		if p.Key != r.keys[r.pair[1-from]] || p.Relay == "" {
			continue
		}
		for _, h := range r.relays {
			if r.keys[h] == p.Relay {
				return h, nil
			}
		}
		t.Fatalf("%s sends to %s by %s, which is no relay", r.pair[from].Name(), p.Key, p.Relay)
	}
	return relay, nil
}

// expectBy waits until the two hosts of the pair reach each other by the same relay, which it returns. Each of them
// must also publish at least the given number of relays that it reaches.
func (r relayed) expectBy(t *testing.T, l *lab.Lab, relays int) (relay *lab.Host) {
	t.Helper()
	within(t, time.Minute, "both hosts reach each other by a relay", func() (err error) {
		for i := range r.pair {
			if got := r.published(t, l, i); len(got) < relays {
				return fmt.Errorf("%s publishes the relays %q, want at least %d", r.pair[i].Name(), got, relays)
			}
		}
		if relay, err = r.by(t, 0); err != nil {
			return err
		}
		if relay == nil {
			return fmt.Errorf("%s uses no relay", r.pair[0].Name())
		}
		if err := r.use(t, relay); err != nil {
			return err
		}
		for i := range r.pair {
			if err := reaches(t, r.pair[i], r.pair[1-i]); err != nil {
				return err
			}
		}
		return r.use(t, relay) // the hosts may have changed the relay meanwhile
	})
	return relay
}

// use returns an error unless both hosts of the pair send to each other by the given relay, or directly if relay is
// nil.
func (r relayed) use(t *testing.T, relay *lab.Host) error {
	t.Helper()
	for i, h := range r.pair {
		by, err := r.by(t, i)
		if err != nil {
			return err
		}
		if by != relay {
			return fmt.Errorf("%s uses %s, want %s", h.Name(), nameOf(by), nameOf(relay))
		}
	}
	return nil
}

func nameOf(relay *lab.Host) string {
	if relay == nil {
		return "no relay"
	}
	return "the relay " + relay.Name()
}

// published returns the relays that pair[host] names in its lease: those that it reaches. It returns nil if there is
// no such lease.
func (r relayed) published(t *testing.T, l *lab.Lab, host int) []string {
	t.Helper()
	for _, one := range leases(t, l) {
		var value struct{ BackendData struct{ Relays []string } }
		if one.Key == r.keys[r.pair[host]] && json.Unmarshal([]byte(one.Value), &value) == nil {
			return value.BackendData.Relays
		}
	}
	return nil
}

// expectReported checks that the log, flannelctl status and the metrics of both hosts of the pair report
// the relay.
func (r relayed) expectReported(t *testing.T, relay *lab.Host) {
	t.Helper()
	for i, h := range r.pair {
		expectLog(t, h.Daemon(), fmt.Sprintf(`"packets to a peer go by a relay, which sees the plaintext of the packets" device="flannel-wg" peer=%q relay=%q`, r.keys[r.pair[1-i]], r.keys[relay]))
		expectFlannelctl(t, h, []string{"status"}, "relayed", "by relay "+r.keys[relay]+", which sees the plaintext of the packets")
		if n := metric(t, h, "flannel_relayed_peers"); n != 1 {
			t.Errorf("flannel_relayed_peers of %s is %v, want 1", h.Name(), n)
		}
	}
}

// TestUserspaceWireGuardRelay checks that two hosts behind symmetric NATs reach each other by a relay, and
// by another relay when the first one dies.
//
// With the WireGuard of the kernel the test would take minutes: the device of the killed daemon goes on sending
// keepalives. So the relay would count as up until the WireGuard sessions with it end.
//
//stages:rest it waits for handshakes that fail; TestUserspaceWireGuardBetweenNATs has hosts that reach each other
func TestUserspaceWireGuardRelay(t *testing.T) {
	t.Parallel()
	l := newNATLab(t, userspace, [2]natKind{symmetric, symmetric})
	r := startRelayed(t, l.hidden, l.open, l.Host(6))
	first := r.expectBy(t, l.Lab, 2)
	r.expectReported(t, first)
	for _, h := range l.hidden {
		eventually(t, h.Name()+" reaches the open host", func() error { return reaches(t, h, l.open) })
	}

	second := r.relays[0]
	if second == first {
		second = r.relays[1]
	}
	first.Daemon().Kill()
	nft(t, first.Namespace, "table ip dead { chain in { type filter hook input priority filter; udp dport 51820 drop; }; }")
	begin := time.Now()
	within(t, 2*time.Minute, "the hidden hosts use the other relay", func() error {
		_ = reaches(t, l.hidden[0], l.hidden[1]) // only unanswered packets show a host that the relay is dead
		return r.use(t, second)
	})
	t.Logf("the hidden hosts use the other relay after %v", time.Since(begin))
	// The lease of a hidden host must name at least one relay, the second one. It may still name the dead one: a
	// host that sends no data to a relay keeps it in its lease until shortly after the WireGuard session ends.
	if by := r.expectBy(t, l.Lab, 1); by != second {
		t.Errorf("they reach each other by %s, want %s", by.Name(), second.Name())
	}
}

// TestUserspaceWireGuardRelayIsLeft checks that two hosts use a relay while a firewall lies between them. When the
// firewall lets their packets through, they must leave the relay, with only a short pause.
//
//stages:rest it waits for handshakes that fail; TestUserspaceWireGuardBetweenNATs has hosts that reach each other
func TestUserspaceWireGuardRelayIsLeft(t *testing.T) { testRelayIsLeft(t, userspace, 3*time.Second) }

// TestVMWireGuardRelayIsLeft is TestUserspaceWireGuardRelayIsLeft with the WireGuard of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardRelayIsLeft(t *testing.T) { testRelayIsLeft(t, "wireguard", 10*time.Second) }

// testRelayIsLeft checks that two hosts leave a relay when they reach each other directly. gap is the longest
// allowed pause between two packets that arrive during the change.
func testRelayIsLeft(t *testing.T, backend string, gap time.Duration) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, relayConfig(backend))
	relay, pair := l.Host(1), [2]*lab.Host{l.Host(2), l.Host(3)}
	wall(t, pair, 51820)
	r := startRelayed(t, pair, relay)
	r.expectReported(t, r.expectBy(t, l, 1))
	var flows []*lab.Flow
	for _, f := range l.Families() {
		flow, err := pair[0].Pods()[0].StartFlow(testContext(t), pair[1].Pods()[0], f, 100)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { flow.Stop() })
		flows = append(flows, flow)
	}

	nft(t, pair[0].Namespace, "delete table inet wall")
	within(t, time.Minute, "the hosts leave the relay", func() error { return r.use(t, nil) })
	nft(t, relay.Namespace, "table inet wall { chain forward { type filter hook forward priority filter; iifname flannel-wg oifname flannel-wg drop; }; }")
	for i, h := range pair {
		eventually(t, h.Name()+" reaches the other host", func() error { return reaches(t, h, pair[1-i]) })
		expectLog(t, h.Daemon(), "packets to a peer go without a relay again")
		if n := metric(t, h, "flannel_relayed_peers"); n != 0 {
			t.Errorf("flannel_relayed_peers of %s is %v, want 0", h.Name(), n)
		}
	}
	for i, f := range l.Families() {
		s := flows[i].Stop()
		if t.Logf("%s: a gap of %v between the two ways", f, s.Gap); s.Gap > gap {
			t.Errorf("%s: a gap of %v between the two ways, want at most %v", f, s.Gap, gap)
		}
	}
	eventually(t, "no lease has lists about relays", func() error {
		for _, one := range leases(t, l) {
			if strings.Contains(one.Value, "Unreachable") || strings.Contains(one.Value, "Relays") {
				return fmt.Errorf("lease %s is %s", one.Key, one.Value)
			}
		}
		return nil
	})
}

// relayConfig returns backendConfig(backend) with short intervals, so that hosts use a relay within seconds.
func relayConfig(backend string) string {
	return strings.TrimSuffix(backendConfig(backend), "}") + `,"PersistentKeepaliveInterval":1,"EndpointSharingInterval":1}`
}

// wall makes a firewall drop the packets of tunnels with these UDP ports between the two hosts of pair. It replaces
// an earlier wall.
func wall(t *testing.T, pair [2]*lab.Host, ports ...int) {
	t.Helper()
	var in, out []string
	for _, port := range ports {
		for family, f := range map[string]prefix.Family{"ip": prefix.IPv4, "ip6": prefix.IPv6} {
			in = append(in, fmt.Sprintf("%s saddr %s udp dport %d drop;", family, pair[1].Addr(f), port))
			out = append(out, fmt.Sprintf("%s daddr %s udp dport %d drop;", family, pair[1].Addr(f), port))
		}
	}
	nft(t, pair[0].Namespace, fmt.Sprintf("table inet wall; delete table inet wall; table inet wall { chain in { type filter hook input priority filter; %s }; chain out { type filter hook output priority filter; %s }; }",
		strings.Join(in, " "), strings.Join(out, " ")))
}

// TestRelayThroughBackendMigration migrates a network from wireguard to vxlan. Two hosts reach each other only by a
// relay, because a firewall drops their packets of both backends. Until the firewall lets vxlan through, the two
// must continue by wireguard and the relay, and report the reason. No packet may be lost.
//
//stages:rest other tests have relays and migrations alone
func TestRelayThroughBackendMigration(t *testing.T) {
	t.Parallel()
	config := relayConfig(userspace)
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, config)
	relay, pair := l.Host(1), [2]*lab.Host{l.Host(2), l.Host(3)}
	wall(t, pair, 51820, 8472)
	r := startRelayed(t, pair, relay)
	r.expectBy(t, l, 1)
	tr := startTraffic(t, l, 100)
	migrate(t, l, config, "vxlan")
	eventuallyCarriedBy(t, relay, "vxlan", pair[:]...)
	for _, h := range pair {
		eventuallyCarriedBy(t, h, "vxlan", relay)
	}
	pause(t, 3*time.Second) // in this time the two must not leave the relay or wireguard
	if err := r.use(t, relay); err != nil {
		t.Error(err)
	}
	for i, h := range pair {
		eventuallyCarriedBy(t, h, "wireguard", pair[1-i])
		for _, p := range statusOf(t, h).Peers {
			if want := map[bool]string{true: "no probe by vxlan has come back"}[p.Key == r.keys[pair[1-i]]]; p.Waiting != want {
				t.Errorf("%s says about %s: %q, want %q", h.Name(), p.Key, p.Waiting, want)
			}
		}
	}
	wall(t, pair, 51820)
	eventuallyMigrated(t, l, "vxlan")

	putConfig(t, l, backendConfig("vxlan"))
	expectLog(t, relay.Daemon(), "--relay cannot be used: the backend vxlan has no relays: expected wireguard as Backend.Type")
	expectStop(t, relay.Daemon())
	startOne(t, relay, lab.FlanneldOptions{})
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" removes the device of wireguard", func() error {
			if out, err := h.Exec(testContext(t), "ip", "link", "show", "flannel-wg"); err == nil {
				return fmt.Errorf("it has %s", out)
			}
			return nil
		})
	}
	tr.expectNoLoss(t)
}

// TestRelayInNextBackend migrates a network from vxlan to wireguard. By wireguard two of the three hosts reach
// each other only by a relay. They must continue by vxlan until the third host becomes a relay, and then use
// the relay. From then on no packet may be lost.
//
//stages:rest other tests have relays and migrations alone
func TestRelayInNextBackend(t *testing.T) {
	t.Parallel()
	config := relayConfig(userspace)
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, backendConfig("vxlan"))
	relay, pair := l.Host(1), [2]*lab.Host{l.Host(2), l.Host(3)}
	wall(t, pair, 51820)
	startAll(t, l, lab.FlanneldOptions{})
	migrate(t, l, "vxlan", config)
	for i, h := range pair {
		eventuallyCarriedBy(t, h, "wireguard", relay)
		eventuallyCarriedBy(t, h, "vxlan", pair[1-i])
	}
	expectStop(t, relay.Daemon())
	startOne(t, relay, lab.FlanneldOptions{Args: []string{"--relay"}})
	eventuallyCarriedBy(t, relay, "wireguard", pair[:]...)
	tr := startTraffic(t, l, 100)
	eventuallyMigrated(t, l, "wireguard")
	putConfig(t, l, config)
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" removes the device of vxlan", func() error {
			if out, err := h.Exec(testContext(t), "ip", "link", "show", "flannel.1"); err == nil {
				return fmt.Errorf("it has %s", out)
			}
			return nil
		})
	}
	tr.expectNoLoss(t)
}

// TestRelayNeedsWireGuard checks that a daemon with --relay ends with the reason if the backend is not wireguard or
// sends no keepalives.
func TestRelayNeedsWireGuard(t *testing.T) {
	t.Parallel()
	for backend, why := range map[string]string{
		`{"Type":"vxlan"}`:       "--relay cannot be used: the backend vxlan has no relays: expected wireguard as Backend.Type",
		backendConfig(userspace): "--relay cannot be used: Backend.PersistentKeepaliveInterval is 0, so hosts do not know whom they reach: expected 1 or more, such as 25",
	} {
		l := newLab(t, lab.Config{Hosts: 1}, backend)
		expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--relay"}}), why)
	}
}
