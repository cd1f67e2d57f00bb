// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/status"
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
	expectPaths := func(when string, ok, broken int) status.Paths {
		t.Helper()
		var p status.Paths
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
