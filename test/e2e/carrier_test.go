package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"flanneld/pkg/lab"
)

// TestCarrierFlaps takes the carrier of a host that reaches 300 peers directly, as a switch or
// the move of a virtual machine does. The kernel then deletes the routes through nexthop
// objects, and does not say so. The daemon must notice each time, say what is there, and not
// try in vain what the kernel refuses without a carrier.
func TestCarrierFlaps(t *testing.T) {
	t.Parallel()
	const peers = 300
	l := newLab(t, lab.Config{Hosts: 1, Network: json.RawMessage(
		`{"Network":"10.4.0.0/14","SubnetMin":"10.4.0.0","SubnetMax":"10.4.255.0","Backend":{"Type":"host-gw"}}`)}, "")
	p := &patient{lab: l, host: l.Host(1)}
	p.run(t, "ip addr add 172.20.0.1/16 dev eth0")
	startOne(t, p.host, lab.FlanneldOptions{})
	c := store(t, l)
	for i := range peers {
		put(t, c, fmt.Sprintf("%s10.%d.%d.0-24", subnets, 5+i>>8, i&255),
			fmt.Sprintf(`{"PublicIP":"172.20.%d.%d","BackendType":"host-gw"}`, 1+i>>8, i&255))
	}
	inPlace := func(when string) {
		t.Helper()
		start := time.Now()
		soon(t, when, func() error {
			if there := strings.Count(p.run(t, "ip route show proto 98"), " via 172.20."); there != peers {
				return fmt.Errorf("%d routes are there, want %d", there, peers)
			}
			return nil
		})
		t.Logf("%s: all routes are there after %v", when, time.Since(start).Round(time.Millisecond))
		if got := metric(t, p.host, `flannel_kernel_objects{kind="route"}`); got != peers {
			t.Errorf("%s: the metrics say that %v routes are there, want %d", when, got, peers)
		}
	}
	inPlace("start")
	carrier := func(on bool) {
		t.Helper()
		state := map[bool]string{true: "up", false: "down"}[on]
		if out, err := l.Underlay().Exec(background(t), "ip", "link", "set", p.host.Name(), state); err != nil {
			t.Fatalf("set the port %s: %v: %s", state, err, out)
		}
	}
	for flap := range 3 {
		// What was made without a carrier does not go through nexthop objects.
		p.run(t, "ip route show proto 98 | sed 's/ .*//; s/^/route del /' | ip -batch -")
		inPlace(fmt.Sprintf("flap %d, before it", flap+1))
		if through := strings.Count(p.run(t, "ip route show proto 98"), " nhid "); through < peers/2 {
			t.Fatalf("flap %d: %d routes go through nexthop objects", flap+1, through)
		}
		carrier(false)
		soon(t, "no carrier", func() error {
			if link := p.run(t, "ip link show eth0"); !strings.Contains(link, "NO-CARRIER") {
				return fmt.Errorf("eth0 is %s", link)
			}
			return nil
		})
		inPlace(fmt.Sprintf("flap %d, without a carrier", flap+1))
		passes, failures := metric(t, p.host, "flannel_sync_duration_seconds_count"), metric(t, p.host, "flannel_sync_failures_total")
		pause(t, 2*time.Second)
		if now := metric(t, p.host, "flannel_sync_duration_seconds_count"); now-passes > 5 {
			t.Errorf("flap %d: %v passes over the kernel in two seconds without a carrier, want a few", flap+1, now-passes)
		}
		carrier(true)
		inPlace(fmt.Sprintf("flap %d, after it", flap+1))
		if now := metric(t, p.host, "flannel_sync_failures_total"); now != failures {
			t.Errorf("flap %d: %v passes over the kernel have failed, want none", flap+1, now-failures)
		}
	}
}
