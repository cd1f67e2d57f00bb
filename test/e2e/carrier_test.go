// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// TestCarrierFlaps checks that a host with 300 directly reached peers restores its routes when
// its interface loses the carrier, for example because a switch restarts or a virtual machine
// moves. The kernel then deletes the routes through nexthop objects without announcing it. The
// daemon must notice this each time and report the right number of routes. It must not retry
// writes that the kernel refuses without a carrier.
//
//stages:rest it takes half a minute; TestHealing has an underlay that goes and comes
func TestCarrierFlaps(t *testing.T) {
	t.Parallel()
	const peers = 300
	l := newLab(t, lab.Config{Hosts: 1, Network: json.RawMessage(
		`{"Network":"10.4.0.0/14","SubnetMin":"10.4.0.0","SubnetMax":"10.4.255.0","Backend":{"Type":"host-gw"}}`)}, "")
	p := &damagedHost{lab: l, host: l.Host(1)}
	p.run(t, "ip addr add 172.20.0.1/16 dev eth0")
	startOne(t, p.host, lab.FlanneldOptions{})
	c := etcdClient(t, l)
	for i := range peers {
		putKey(t, c, fmt.Sprintf("%s10.%d.%d.0-24", subnets, 5+i>>8, i&255),
			fmt.Sprintf(`{"PublicIP":"172.20.%d.%d","BackendType":"host-gw"}`, 1+i>>8, i&255))
	}
	inPlace := func(when string) {
		t.Helper()
		start := time.Now()
		eventuallyRepaired(t, when, func() error {
			if there := strings.Count(p.run(t, "ip route show proto 98"), " via 172.20."); there != peers {
				return fmt.Errorf("the kernel has %d routes, want %d", there, peers)
			}
			return nil
		})
		t.Logf("%s: all routes are in place after %v", when, time.Since(start).Round(time.Millisecond))
		if got := metric(t, p.host, `flannel_kernel_objects{kind="route"}`); got != peers {
			t.Errorf("%s: flannel_kernel_objects counts %v routes, want %d", when, got, peers)
		}
	}
	inPlace("start")
	setCarrier := func(on bool) {
		t.Helper()
		state := map[bool]string{true: "up", false: "down"}[on]
		if out, err := l.Underlay().Exec(testContext(t), "ip", "link", "set", p.host.Name(), state); err != nil {
			t.Fatalf("set the port %s: %v: %s", state, err, out)
		}
	}
	for flap := range 3 {
		// Routes that the daemon wrote without a carrier do not use nexthop objects. Delete all
		// routes, so that the daemon writes them again.
		p.run(t, "ip route show proto 98 | sed 's/ .*//; s/^/route del /' | ip -batch -")
		inPlace(fmt.Sprintf("flap %d, before the loss of the carrier", flap+1))
		if through := strings.Count(p.run(t, "ip route show proto 98"), " nhid "); through < peers/2 {
			t.Fatalf("flap %d: %d routes use nexthop objects, want at least %d", flap+1, through, peers/2)
		}
		setCarrier(false)
		eventuallyRepaired(t, "eth0 loses its carrier", func() error {
			if link := p.run(t, "ip link show eth0"); !strings.Contains(link, "NO-CARRIER") {
				return fmt.Errorf("eth0 is %s, want NO-CARRIER", link)
			}
			return nil
		})
		inPlace(fmt.Sprintf("flap %d, without a carrier", flap+1))
		passes, failures := metric(t, p.host, "flannel_sync_duration_seconds_count"), metric(t, p.host, "flannel_sync_failures_total")
		pause(t, 2*time.Second)
		if now := metric(t, p.host, "flannel_sync_duration_seconds_count"); now-passes > 5 {
			t.Errorf("flap %d: %v syncs in two seconds without a carrier, want at most 5", flap+1, now-passes)
		}
		setCarrier(true)
		inPlace(fmt.Sprintf("flap %d, with the carrier again", flap+1))
		if now := metric(t, p.host, "flannel_sync_failures_total"); now != failures {
			t.Errorf("flap %d: %v syncs failed, want none", flap+1, now-failures)
		}
	}
}
