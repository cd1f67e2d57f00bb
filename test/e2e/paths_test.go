// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// TestProbes breaks the path to one of three hosts that send probes. The status must name the peer and
// the part that is broken. The metrics must count the path as broken in this part, and the log must
// report a broken path. When the path works again, the status and the log must say so.
func TestProbes(t *testing.T) {
	testProbes(t, pathFault{"vxlan", "ip saddr 192.168.77.1 udp dport 8472 drop", "network", "(vxlan: UDP 8472)"})
}

// TestProbesOfLargePackets is TestProbes with a path that carries only small packets.
//
//stages:rest it waits for probes as long as TestProbes
func TestProbesOfLargePackets(t *testing.T) {
	testProbes(t, pathFault{"host-gw", "meta length 1300-1600 drop", "mtu", "packets of up to "})
}

// pathFault is a fault of the path to host 2.
type pathFault struct {
	backend string
	rules   string // nftables rules on host 2 that cause the fault
	want    string // the expected result of the probes: the part that is broken
	hint    string // a text in the expected advice
}

func testProbes(t *testing.T, fault pathFault) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, fmt.Sprintf(`{"Type":%q}`, fault.backend))
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--probe"}})
	expectConverged(t, l)
	a, b := l.Host(1), l.Host(2)
	subnet := statusOf(t, b).Lease.Subnets[0]
	expectPaths := func(when string, ok, broken int) paths.Outcome {
		t.Helper()
		var p paths.Outcome
		eventually(t, when, func() error {
			r := statusOf(t, a)
			if r.Paths == nil {
				return fmt.Errorf("the status has no paths")
			}
			if p = *r.Paths; p.Results["ok"] != ok || p.Results[fault.want] != broken {
				return fmt.Errorf("results are %v, want %d ok, %d %s", p.Results, ok, broken, fault.want)
			}
			return nil
		})
		return p
	}
	expectPaths("all paths are checked", 2, 0)

	nft(t, b.Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; "+fault.rules+" ; } ; }")
	p := expectPaths("the broken path is found", 1, 1)
	if w := p.Worst[0]; w.Subnet != subnet || !strings.Contains(w.Advice, fault.hint) || fault.want == "mtu" && (w.Largest < 1290 || w.Largest > 1300) {
		t.Errorf("the worst path is %+v, want the one to %s with %q", w, subnet, fault.hint)
	}
	expectFlannelctl(t, a, []string{"status"}, "paths", "1 "+fault.want, subnet.String())
	for series, want := range map[string]float64{"flannel_unreachable_peers": 1, fmt.Sprintf("flannel_paths{result=%q}", fault.want): 1} {
		if got := metric(t, a, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	if metric(t, a, "flannel_path_round_trip_seconds_count") == 0 {
		t.Error("no round trip was counted")
	}
	expectLog(t, a.Daemons()[0], `"the path to a peer does not work"`)

	nft(t, b.Namespace, "delete table netdev broken")
	expectPaths("the path works again", 2, 0)
	expectLog(t, a.Daemons()[0], `"the path to a peer works again"`)
}

// TestDirectionOfLoss loses the packets of host 1 to host 2 in both families, and none of host 2 to host 1. Every
// tool on host 1 must name the direction, and flannelctl mesh for both hosts. Host 2 receives nothing, so it must
// not claim that its packets are lost.
//
//stages:rest it waits for probes as long as TestProbes
func TestDirectionOfLoss(t *testing.T) {
	for _, tt := range []struct {
		backend, broken string
		drop            string // nftables rules on host 2; %s are the addresses of host 1
	}{
		{"vxlan", "network", "ip saddr { %s } udp dport 8472 drop ; ip6 saddr { %s } udp dport 8472 drop"},
		// Without neighbor discovery nothing would pass in the other direction either.
		{"host-gw", "underlay", "ip saddr { %s } drop ; icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept ; ip6 saddr { %s } drop"},
	} {
		t.Run(tt.backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: dual}, fmt.Sprintf(`{"Type":%q}`, tt.backend))
			startAll(t, l, lab.FlanneldOptions{Args: meshArgs})
			expectConverged(t, l)
			a, b := l.Host(1), l.Host(2)
			leaseA, leaseB := statusOf(t, a).Lease, statusOf(t, b).Lease
			for _, h := range []*lab.Host{a, b} {
				eventually(t, h.Name()+" has checked all paths", func() error {
					if n := statusOf(t, h).Paths.Results["ok"]; n != 4 {
						return fmt.Errorf("%d paths work, want 4", n)
					}
					return nil
				})
			}

			of := func(i int) string { return leaseA.PublicIPs[i].String() + ", " + leaseA.Subnets[i].String() }
			nft(t, b.Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; "+fmt.Sprintf(tt.drop, of(0), of(1))+" ; } ; }")

			// oneWay returns the results of the paths from one host to the other, and whether the direction is known.
			oneWay := func(from *lab.Host, to status.Lease) (found []string) {
				for _, p := range statusOf(t, from).Paths.Worst {
					if slices.Contains(to.Subnets, p.Subnet) {
						found = append(found, fmt.Sprintf("%s %s %v", prefix.FamilyOf(p.Subnet.Addr()), p.Broken, p.OneWay))
					}
				}
				slices.Sort(found)
				return found
			}
			expect := func(from *lab.Host, to status.Lease, known bool) {
				t.Helper()
				want := []string{fmt.Sprintf("IPv4 %s %v", tt.broken, known), fmt.Sprintf("IPv6 %s %v", tt.broken, known)}
				eventually(t, from.Name()+" knows the direction", func() error {
					if got := oneWay(from, to); !slices.Equal(got, want) {
						return fmt.Errorf("paths %q, want %q", got, want)
					}
					return nil
				})
			}
			expect(a, leaseB, true)
			expect(b, leaseA, false)

			var want []string
			for _, s := range leaseB.Subnets {
				want = append(want, fmt.Sprintf("packets from this host to %s are lost, those from there arrive; ", s))
			}
			expectFlannelctl(t, a, []string{"status"}, want...)
			expectFlannelctlFails(t, a, []string{"check"}, want...)
			_, page := getStatus(t, a, "/statusz", "text/html")
			expectOutput(t, []string{"/statusz"}, page, want)
			if out, _ := flannelctl(t, b, "check"); strings.Contains(out, "packets from this host") {
				t.Errorf("host 2 claims to know the direction:\n%s", out)
			}

			nameA, nameB := leaseA.Subnets[0].String(), leaseB.Subnets[0].String()
			words := fmt.Sprintf(": %s: packets from %[2]s to %[3]s are lost, %[3]s to %[2]s arrive; ", tt.broken, nameA, nameB)
			expectFlannelctlFails(t, l.Host(3), []string{"mesh"}, nameA+" -> "+nameB+words, nameB+" -> "+nameA+words)
		})
	}
}
