// SPDX-License-Identifier: Apache-2.0

package cloudtest_test

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

func TestMemory(t *testing.T) {
	cloudtest.Run(t, func(*testing.T) cloudtest.Fixture {
		peer := netip.MustParseAddr("192.168.77.2")
		m := &cloudtest.Memory{
			Self: "host-1", Tabs: []cloud.Table{{ID: "table-1", Own: true}},
			Hosts: map[string][]netip.Addr{"host-1": {netip.MustParseAddr("192.168.77.1")}, "host-2": {peer}},
		}
		return cloudtest.Fixture{
			SelfAddress: netip.MustParseAddr("192.168.77.1"),
			Cloud:       m, Table: "table-1", Peer: "host-2", PeerAddress: peer,
			DeleteByHand: func(dst netip.Prefix) { m.Do(func() { m.DeleteByHand("table-1", dst) }) },
			EndPeer:      func() { delete(m.Hosts, "host-2") },
			StopPeer:     func() { m.Stopped = map[string]bool{"host-2": true} },
			AddGateway: func(dst netip.Prefix) {
				m.Tabs[0].Routes = append(m.Tabs[0].Routes, cloud.Route{Table: "table-1", Dst: dst, Target: "gateway-1", ByCall: true, Foreign: "which leads to no host"})
			},
			SetQuota:   func(n int) { m.Quota = n },
			Deny:       func() { m.Denied = map[string]bool{"put": true} },
			LoseAnswer: func() { m.Lost = 1 },
			Throttle:   func(n int) { m.Throttled = n },
			SetAway: func(away bool) {
				if m.Fails = nil; away {
					m.Fails = cloud.ErrUnavailable
				}
			},
			Gaps: func() int { return 0 }, // a call of Put is one step, so there is no gap
		}
	})
}
