// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// kubeProxy contains rules of kube-proxy in its mode nftables for a Service with a port of the Node, as far as they are
// about destinations, and rules of portmap for a port of the host.
const kubeProxy = `
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; elements = { 10.96.0.10 . udp . 53 : goto service-dns } ; }
	map service-nodeports { type inet_proto . inet_service : verdict ; elements = { tcp . 30080 : goto service-dns } ; }
	set nodeport-ips { type ipv4_addr ; elements = { 192.0.2.1 } ; }
	chain endpoint-a { udp dport 53 meta mark set 0x4000 ; meta l4proto udp dnat to 10.5.7.2:53 ; }
	chain service-dns { ip daddr 10.96.0.10 udp dport 53 ip saddr != 10.5.0.0/16 meta mark set 0x4000 ; numgen random mod 1 vmap { 0 : goto endpoint-a } ; }
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
	chain nat-prerouting { type nat hook prerouting priority dstnat ; jump services ; }
	chain hostports { tcp dport 8080 dnat to 10.5.49.2:80 ; }
	chain prerouting { type nat hook prerouting priority dstnat ; fib daddr type local jump hostports ; }`

// TestKernelBlocks checks which rules drop a packet of the tunnel, or one between pods.
func TestKernelBlocks(t *testing.T) {
	firewalltest.Enter(t)
	tunnel := firewall.Packet{In: "eth0", Src: netip.MustParseAddr("192.0.2.2"), Dst: netip.MustParseAddr("192.0.2.1"), Protocol: firewall.UDP, Port: 8472}
	tunnel6 := tunnel
	tunnel6.Src = netip.MustParseAddr("2001:db8::2")
	tunnel6.Dst = netip.MustParseAddr("2001:db8::1")
	pods := firewall.Packet{In: "flannel.1", Out: "cni0", Src: netip.MustParseAddr("10.5.7.2"), Dst: netip.MustParseAddr("10.5.49.2"), Protocol: firewall.TCP, Port: 1}
	sent := tunnel
	sent.In, sent.Out = tunnel.Out, tunnel.In
	const server = "chain in { type filter hook input priority 0 ; policy drop ; ct state vmap { established : accept, related : accept, invalid : drop } ; iifname lo accept ; tcp dport { 22, 80-90 } accept ; "
	firewalltest.Shell(t, "ip link add eth0 type veth peer name eth1")
	firewalltest.Shell(t, "ip link add cni0 type bridge")
	back := pods
	back.In, back.Out = pods.Out, pods.In
	back.Src, back.Dst = pods.Dst, pods.Src
	for name, tt := range map[string]struct {
		family   string // of the table; inet if empty
		table    string // its content
		packet   firewall.Packet
		want     string // chain and rule; empty if the packet passes
		doubtful bool
		redirect bool
		rewrite  bool
	}{
		"no rules":                            {packet: tunnel},
		"drop of the port":                    {table: "chain in { type filter hook input priority 0 ; udp dport 8472 drop ; }", packet: tunnel, want: "in the rule with handle"},
		"drop of the port by IPv6":            {table: "chain in { type filter hook input priority 0 ; udp dport 8472 reject ; }", packet: tunnel6, want: "in the rule with handle"},
		"drop of sent packets":                {table: "chain out { type filter hook output priority 0 ; oifname eth0 udp dport 8472 drop ; }", packet: sent, want: "out the rule with handle"},
		"drop after the look-up":              {table: "chain late { type filter hook postrouting priority 0 ; ip daddr 10.5.0.0/16 drop ; }", packet: pods, want: "late the rule with handle"},
		"drop of IPv4":                        {table: "chain in { type filter hook input priority 0 ; ip saddr 192.0.2.0/24 drop ; }", packet: tunnel6},
		"drop of another port":                {table: "chain in { type filter hook input priority 0 ; udp dport 53 drop ; }", packet: tunnel},
		"drop before the look-up":             {table: "chain raw { type filter hook prerouting priority raw ; iifname eth* meta l4proto udp drop ; }", packet: tunnel, want: "raw the rule with handle"},
		"drop in an interval":                 {table: "chain in { type filter hook input priority 0 ; udp dport { 100-200, 8000-9000 } drop ; }", packet: tunnel, want: "in the rule with handle"},
		"drop in the second of two":           {table: "chain in { type filter hook input priority 0 ; udp dport { 8000-8471, 8472-9000 } drop ; }", packet: tunnel, want: "in the rule with handle"},
		"policy of a server":                  {table: server + "}", packet: tunnel, want: "in policy drop"},
		"policy, loopback by index":           {table: strings.Replace(server, "iifname", "iif", 1) + "}", packet: tunnel, want: "in policy drop"},
		"policy, device by index":             {table: server + "iif { lo, eth0 } accept ; }", packet: tunnel},
		"drop of a device by index":           {table: "chain in { type filter hook input priority 0 ; iif eth0 drop ; }", packet: tunnel, want: "in the rule with handle"},
		"drop on the way by index":            {table: "chain through { type filter hook forward priority 0 ; oif cni0 drop ; }", packet: pods, want: "through the rule with handle"},
		"drop of others by index":             {table: "chain out { type filter hook output priority 0 ; oif lo drop ; iif lo drop ; }", packet: sent},
		"port of a bridge by index":           {family: "bridge", table: "chain early { type filter hook prerouting priority 0 ; policy drop ; iif eth1 accept ; }", packet: back, want: "early policy drop", doubtful: true},
		"policy of a server, accepted":        {table: server + "udp dport 8472 accept ; }", packet: tunnel},
		"policy, source in a range":           {table: server + "ip saddr 192.0.2.0-192.0.2.9 accept ; }", packet: tunnel},
		"policy, marked accepted":             {table: server + "meta mark 5 accept ; }", packet: tunnel, want: "in policy drop", doubtful: true},
		"policy for forwarded packets":        {table: server + "}", packet: pods},
		"forward policy":                      {table: "chain through { type filter hook forward priority 0 ; policy drop ; ct state established accept ; }", packet: pods, want: "through policy drop"},
		"jump":                                {table: "chain user { oifname { cni0, docker0 } reject ; } ; chain through { type filter hook forward priority 0 ; ct state new jump user ; }", packet: pods, want: "user the rule with handle"},
		"jump that returns":                   {table: "chain user { ip daddr 10.5.0.0/16 return ; drop ; } ; chain through { type filter hook forward priority 0 ; jump user ; }", packet: pods},
		"limited drop":                        {table: "chain through { type filter hook forward priority 0 ; limit rate 1/second drop ; }", packet: pods},
		"not understood":                      {table: "chain through { type filter hook forward priority 0 ; meta length 1000-1500 drop ; }", packet: pods, want: "through the rule with handle", doubtful: true},
		"rules of healthy hosts":              {table: "chain through { type filter hook forward priority 0 ; fib saddr . iif oif missing drop ; meta mark & 0x10 == 0 drop ; ct mark 5 drop ; meta pkttype multicast drop ; tcp flags & (fin|syn|rst|ack) != syn ct state new drop ; ct count over 100 drop ; }", packet: pods},
		"map of verdicts":                     {table: "chain through { type filter hook forward priority 0 ; iifname vmap { cni0 : drop } ; }", packet: back, want: "through the rule with handle"},
		"map of verdicts of others":           {table: "chain through { type filter hook forward priority 0 ; iifname vmap { docker0 : drop, flannel.1 : accept } ; drop ; }", packet: pods},
		"map of verdicts that jumps":          {table: "chain user { reject ; } ; chain through { type filter hook forward priority 0 ; iifname vmap { eth0 : drop, flannel.1 : jump user } ; }", packet: pods, want: "user the rule with handle"},
		"map of verdicts for all others":      {table: "chain through { type filter hook forward priority 0 ; iifname vmap { eth0 : accept, * : drop } ; }", packet: pods, want: "through the rule with handle"},
		"map of verdicts not for all":         {table: "chain through { type filter hook forward priority 0 ; iifname vmap { flannel.1 : continue, * : drop } ; }", packet: pods},
		"map of verdicts of intervals":        {table: "chain through { type filter hook forward priority 0 ; ip saddr vmap { 10.0.0.0-10.4.255.255 : accept, 10.5.0.0/16 : drop } ; }", packet: pods, want: "through the rule with handle"},
		"map of verdicts of marks, then drop": {table: "chain through { type filter hook forward priority 0 ; meta mark vmap { 0x1 : accept } ; drop ; }", packet: pods, want: "through the rule with handle", doubtful: true},
		"pair of intervals":                   {table: "set s { type ipv4_addr . ipv4_addr ; flags interval ; elements = { 192.0.2.1 . 10.5.49.2, 10.5.7.0/24 . 10.5.49.0-10.5.49.9 } ; } ; chain through { type filter hook forward priority 0 ; ip saddr . ip daddr @s drop ; }", packet: pods, want: "through the rule with handle"},
		"pair of other intervals":             {table: "set s { type ipv4_addr . ipv4_addr ; flags interval ; elements = { 10.5.7.0/24 . 10.5.49.3-10.5.49.9, 10.5.8.0/24 . 10.5.49.0/24 } ; } ; chain through { type filter hook forward priority 0 ; ip saddr . ip daddr @s drop ; }", packet: pods},
		"pair with IPv6":                      {table: "chain in { type filter hook input priority 0 ; ip6 saddr . udp dport { 2001:db8::1-2001:db8::3 . 8000-9000 } drop ; }", packet: tunnel6, want: "in the rule with handle"},
		"three values":                        {table: "chain in { type filter hook input priority 0 ; iifname . meta l4proto . udp dport { eth0 . udp . 53, eth0 . udp . 8472 } drop ; }", packet: tunnel, want: "in the rule with handle"},
		"pair of which one is not known":      {table: "chain in { type filter hook input priority 0 ; meta length . udp dport { 500 . 8472 } drop ; }", packet: tunnel, want: "in the rule with handle", doubtful: true},
		"drop in the device":                  {family: "netdev", table: "chain early { type filter hook ingress device eth0 priority 0 ; udp dport 8472 drop ; }", packet: tunnel, want: "early the rule with handle"},
		"drop in several devices":             {family: "netdev", table: "chain early { type filter hook ingress devices = { eth0, eth1 } priority 0 ; ip saddr 192.0.2.0/24 udp dport 8472 drop ; }", packet: tunnel, want: "early the rule with handle"},
		"drop in another device":              {family: "netdev", table: "chain early { type filter hook ingress device eth1 priority 0 ; policy drop ; }", packet: tunnel},
		"drop of sent in the device":          {family: "netdev", table: "chain late { type filter hook egress device eth0 priority 0 ; policy drop ; }", packet: sent, want: "late policy drop"},
		"drop of others in the device":        {family: "netdev", table: "chain late { type filter hook egress device eth0 priority 0 ; policy drop ; }", packet: tunnel},
		"drop in the bridge":                  {family: "bridge", table: "chain early { type filter hook prerouting priority 0 ; policy drop ; }", packet: back, want: "early policy drop"},
		"drop of sent in the bridge":          {family: "bridge", table: "chain late { type filter hook output priority 0 ; ip daddr 10.5.0.0/16 drop ; }", packet: pods, want: "late the rule with handle"},
		"drop of others in the bridge":        {family: "bridge", table: "chain early { type filter hook input priority 0 ; policy drop ; }", packet: pods},
		"drop between ports":                  {family: "bridge", table: "chain through { type filter hook forward priority 0 ; policy drop ; }", packet: back},
		"port of a bridge accepted":           {family: "bridge", table: "chain early { type filter hook prerouting priority 0 ; policy drop ; iifname veth1 accept ; }", packet: back, want: "early policy drop", doubtful: true},
		"redirection":                         {family: "ip", table: "chain pre { type nat hook prerouting priority dstnat ; iifname flannel.1 dnat to 192.0.2.9 ; }", packet: pods, want: "pre the rule with handle", redirect: true},
		"redirection to this host":            {table: "chain pre { type nat hook prerouting priority dstnat ; meta l4proto tcp redirect to :3128 ; }", packet: pods, want: "pre the rule with handle", redirect: true},
		"redirection of sent packets":         {table: "chain out { type nat hook output priority -100 ; udp dport 8472 dnat ip to 192.0.2.9 ; }", packet: sent, want: "out the rule with handle", redirect: true},
		"redirection of others":               {table: "chain pre { type nat hook prerouting priority dstnat ; ip daddr 192.0.2.1 dnat ip to 10.5.49.2 ; }", packet: pods},
		"redirection of a port":               {table: "chain pre { type nat hook prerouting priority dstnat ; udp dport 53 dnat ip to 10.5.49.2 ; }", packet: pods, want: "pre the rule with handle", redirect: true},
		"redirection of a host's port":        {table: "chain pre { type nat hook prerouting priority dstnat ; ip daddr 192.0.2.1 tcp dport 80 dnat ip to 10.5.49.2 ; }", packet: pods},
		"redirection after accept":            {table: "chain pre { type nat hook prerouting priority dstnat ; ip daddr 10.5.0.0/16 accept ; dnat ip to 192.0.2.9 ; }", packet: pods},
		"masquerading":                        {table: "chain post { type nat hook postrouting priority srcnat ; masquerade ; }", packet: pods, want: "post the rule with handle", rewrite: true},
		"another source":                      {family: "ip", table: "chain post { type nat hook postrouting priority srcnat ; oifname cni0 snat to 192.0.2.9 ; }", packet: pods, want: "post the rule with handle", rewrite: true},
		"masquerading of sent packets":        {table: "chain post { type nat hook postrouting priority srcnat ; masquerade ; }", packet: sent},
		"masquerading of others":              {family: "ip", table: "chain post { type nat hook postrouting priority srcnat ; ip saddr 10.5.0.0/16 ip daddr 10.5.0.0/16 return ; masquerade ; }", packet: pods},
		"masquerading by a mark":              {family: "ip", table: "chain post { type nat hook postrouting priority srcnat ; meta mark & 0x4000 == 0 return ; meta mark set meta mark ^ 0x4000 ; masquerade fully-random ; }", packet: pods},
		"kube-proxy and portmap":              {family: "ip", table: kubeProxy, packet: back},
		"drop at ingress of inet":             {table: "chain early { type filter hook ingress device eth0 priority 0 ; udp dport 8472 drop ; }", packet: tunnel6, want: "early the rule with handle"},
	} {
		table := cmp.Or(tt.family, "inet") + " foreign"
		firewalltest.Shell(t, "nft 'table "+table+" { "+tt.table+" ; }'")
		blocks, err := Blocks([]firewall.Packet{tt.packet})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var b firewall.Block
		if len(blocks) > 0 {
			b = blocks[0]
		}
		if len(blocks) > 1 || (len(blocks) > 0) != (tt.want != "") || !strings.HasPrefix(b.Chain+" "+b.Rule, tt.want) || b.Doubtful != tt.doubtful || b.Redirects != tt.redirect || b.Rewrites != tt.rewrite {
			t.Errorf("%s: %+v, want %q, doubtful %v, redirects %v, rewrites %v", name, blocks, tt.want, tt.doubtful, tt.redirect, tt.rewrite)
		}
		firewalltest.Shell(t, "nft 'delete table "+table+"'")
	}
}

// TestSearch looks for keys in intervals that touch, in any order of their limits.
func TestSearch(t *testing.T) {
	limit := func(key byte, end bool) nftables.SetElement {
		return nftables.SetElement{Key: []byte{key}, IntervalEnd: end}
	}
	limits := []nftables.SetElement{limit(2, false), limit(4, true), limit(4, false), limit(6, true)}
	for range 2 {
		for key, want := range []bool{false, false, true, true, true, true, false, false} {
			if found, ok := search(limits, true, [][]byte{{byte(key)}}); !ok || (found != nil) != want {
				t.Errorf("%d in %v: %v, %v, want %v", key, limits, found, ok, want)
			}
		}
		slices.Reverse(limits)
	}
}

// TestQueue checks which rules drop packets because no program reads their queue. Not every kernel has such rules.
func TestQueue(t *testing.T) {
	firewalltest.Enter(t)
	for _, tt := range []struct {
		queue expr.Queue
		want  firewall.Effect
	}{
		{expr.Queue{Num: 3, Total: 1}, firewall.Drops},
		{expr.Queue{Num: 3, Total: 4}, firewall.Drops},
		{expr.Queue{Num: 3, Total: 1, Flag: expr.QueueFlagBypass}, firewall.Accepts},
		{expr.Queue{}, firewall.Accepts}, // its number is not known
	} {
		s, err := follower{}.step(&nftables.Rule{Table: &nftables.Table{}, Handle: 5, Exprs: []expr.Any{&tt.queue, &expr.Counter{}}})
		if err != nil || s.Effect != tt.want || strings.Contains(s.Rule, "no program reads queue 3") != (tt.want == firewall.Drops) {
			t.Errorf("%+v: %+v, %v, want %v", tt.queue, s, err, tt.want)
		}
	}
}
