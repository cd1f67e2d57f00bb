// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// healthy returns the report of a daemon without problems.
func healthy() status.Report {
	return status.Report{
		Ready: true, Interface: status.Interface{Name: "eth0"}, Datastore: status.Datastore{Kind: "etcd", Connected: true},
		Peers: []status.Peer{{
			Lease: status.Lease{Key: "10.5.7.0-24", Subnets: []netip.Prefix{peer}}, State: status.InPlace,
			Objects: []status.Object{{Text: "route 10.5.7.0/24 via 10.5.7.0 dev flannel.1", Present: true}},
		}},
		Lease:   status.Lease{Subnets: []netip.Prefix{netip.MustParsePrefix("10.5.49.0/24"), netip.MustParsePrefix("fd00:10:5:49::/64")}},
		Network: status.Network{BackendType: "vxlan", MTU: 1450, Ports: []int{8472}, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("fd00:10:5::/48")}},
	}
}

// soundHost returns the files of a host without problems.
func soundHost() map[string]string {
	return map[string]string{
		"proc/sys/net/ipv4/ip_forward":                 "1\n",
		"proc/sys/net/ipv6/conf/all/forwarding":        "1\n",
		"proc/sys/net/bridge/bridge-nf-call-iptables":  "1\n",
		"proc/sys/net/bridge/bridge-nf-call-ip6tables": "1\n",
		"proc/sys/net/ipv4/conf/all/rp_filter":         "0\n",
		"proc/sys/net/ipv4/conf/eth0/rp_filter":        "2\n",
		"proc/net/udp":                                 "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n",
		"proc/sys/kernel/osrelease":                    "6.1\n",
		"sys/module/vxlan/version":                     "",
		"proc/sys/net/ipv4/conf/cni0/forwarding":       "1\n",
		"proc/sys/net/ipv4/conf/flannel.1/forwarding":  "1\n",
		"run/udev/control":                             "",
		"usr/lib/systemd/network/99-default.link":      "[Link]\nMACAddressPolicy=persistent\n",
		"etc/systemd/network/50-flannel.link":          "[Match]\nOriginalName=flannel*\n",
	}
}

// newHost returns a host with these files. The content "-" stands for a missing file.
func newHost(files map[string]string) Facts {
	root := fstest.MapFS{}
	for name, text := range files {
		if text != "-" {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
	}
	return Facts{
		Files: root, Report: healthy(),
		Bridges: []Bridge{{Name: "cni0", MTU: 1450, PortMTU: 1450, CNI: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.5.49.1/24"), netip.MustParsePrefix("fd00:10:5:49::1/64")}}},
		Rules:   []Rule{{Family: prefix.IPv4, Table: 255}, {Family: prefix.IPv4, Priority: 32766, Table: 254}, {Family: prefix.IPv4, Priority: 32767, Table: 253}},
		Ways: []Way{
			{Subnet: peer, In: "cni0", Bridge: "cni0", From: pod, To: remote, Route: Route{Dev: "flannel.1", Via: peer.Addr(), Table: 254}},
			{Subnet: peer, Back: true, In: "flannel.1", Bridge: "cni0", From: remote, To: pod, Route: Route{Dev: "cni0", Table: 254}},
		},
	}
}

// The public address and the subnet of a peer, and a pod on each of the two hosts.
var (
	host   = netip.MustParseAddr("192.0.2.7")
	peer   = netip.MustParsePrefix("10.5.7.0/24")
	pod    = netip.MustParseAddr("10.5.49.2")
	remote = netip.MustParseAddr("10.5.7.2")
)

// before makes it a host on which no daemon runs yet.
func before(release string, ranges ...Range) func(*Facts) {
	return func(h *Facts) {
		h.Files.(fstest.MapFS)["proc/sys/kernel/osrelease"] = &fstest.MapFile{Data: []byte(release)}
		h.Before = &Before{Ranges: ranges}
	}
}

// withPart adds the decision about a packet to an address in the destination of another route.
func withPart(to string, back bool, route Route) func(*Facts) {
	return func(h *Facts) {
		part := netip.MustParsePrefix(to)
		w := Way{Subnet: peer, Part: part, In: "cni0", From: pod, To: part.Addr().Next(), Route: route}
		if back {
			w = Way{Subnet: peer, Part: part, Back: true, In: "flannel.1", From: remote, To: part.Addr().Next(), Route: route}
		}
		w.Sent.Err = route.Err
		h.Ways = append(h.Ways, w)
	}
}

// otherBridge adds a bridge with the address of the usual one, whose ports have an MTU, or which has none if that is 0.
// Packets to pods of the usual bridge go to the one with the name taker.
func otherBridge(portMTU int, taker string) func(*Facts) {
	return func(h *Facts) {
		h.Bridges = append(h.Bridges, Bridge{Name: "docker0", MTU: 1450, PortMTU: portMTU, Addresses: h.Bridges[0].Addresses})
		h.Ways[1].Route.Dev = taker
	}
}

// ruled puts a rule before the others, and changes the way out.
func ruled(rule Rule, way Route) func(*Facts) {
	return func(h *Facts) {
		rule.Family = prefix.IPv4
		h.Rules = slices.Insert(h.Rules, 1, rule)
		h.Ways[0].Route = way
	}
}

// dropped returns a rule that drops packets of pods of these protocols.
func dropped(protocols ...uint8) (blocks []firewall.Block) {
	for _, p := range protocols {
		blocks = append(blocks, firewall.Block{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod, Protocol: p, Port: 1}, Program: "nft", Table: "inet x", Chain: "y", Rule: "drop"})
	}
	return blocks
}

// policies adds policies of IPsec, and the public addresses of this host and the peer.
func policies(p ...Policy) func(*Facts) {
	return func(h *Facts) {
		h.Policies = p
		h.Report.Interface.Addresses = []status.Address{{Local: netip.MustParseAddr("192.0.2.49")}}
		h.Report.Peers[0].PublicIPs = []netip.Addr{host}
	}
}

// tracked returns the files that say how many connections the kernel tracks, and how many it can.
func tracked(count, most string) map[string]string {
	return map[string]string{"proc/sys/net/netfilter/nf_conntrack_count": count, "proc/sys/net/netfilter/nf_conntrack_max": most}
}

// udpSocket returns a list of UDP sockets that contains one socket on a port, which is in
// hexadecimal.
func udpSocket(port, inode string) string {
	return "head\n  1: 00000000:" + port + " 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 " + inode + " 2 0 0\n"
}

func TestDoctor(t *testing.T) {
	filters := []Attached{{Dev: "eth0", What: "tc (clsact, 3 packets dropped)"}}
	on4789 := func(r *status.Report) { r.Network.Ports = []int{4789} }
	kubernetes := func(r *status.Report) { r.Datastore.Kind = "kubernetes" }
	hostGW := func(r *status.Report) { r.Network.BackendType, r.Network.Ports = "host-gw", nil }
	shared := func(n int) func(*status.Report) {
		one := status.SharedPublicIP{PublicIP: netip.MustParseAddr("192.0.2.7")}
		for i := range n {
			one.Leases = append(one.Leases, fmt.Sprintf("lease%d", i+1))
		}
		return func(r *status.Report) { r.SharedPublicIPs = []status.SharedPublicIP{one} }
	}
	wireguard := func(r *status.Report) { r.Network.BackendType, r.Network.Ports = "wireguard", []int{51820, 51821} }
	for _, tc := range []struct {
		name    string
		change  map[string]string // file: content; "-" removes it
		report  func(*status.Report)
		facts   func(*Facts)
		want    string // part of the only finding's problem; empty if nothing should be found
		fix     string
		serious bool
		word    string // pods are cut off, so the finding is serious unless note is set
		note    bool
	}{
		{name: "sound host"},
		{name: "no forwarding", change: map[string]string{"proc/sys/net/ipv4/ip_forward": "0"}, want: "IPv4 is not forwarded", fix: "sysctl -w net.ipv4.ip_forward=1", word: "forwarding"},
		{name: "no IPv6 forwarding", change: map[string]string{"proc/sys/net/ipv6/conf/all/forwarding": "0"}, want: "IPv6 is not forwarded", fix: "net.ipv6.conf.all.forwarding=1", word: "forwarding"},
		{name: "bridge filter off", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "0"}, want: "bridge-nf-call-iptables is 0", fix: "sysctl -w net.bridge"},
		{name: "bridge filter off on Kubernetes", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "0"}, report: kubernetes, want: "bridge-nf-call-iptables is 0", fix: "sysctl -w net.bridge", serious: true},
		{name: "no bridge filter on Kubernetes", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "-"}, report: kubernetes, want: "br_netfilter is not loaded", fix: "modprobe br_netfilter", serious: true},
		{name: "no bridge filter", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-ip6tables": "-"}, want: "br_netfilter is not loaded", fix: "modprobe br_netfilter"},
		{name: "no bridge filter for both", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "-", "proc/sys/net/bridge/bridge-nf-call-ip6tables": "-"}, want: "br_netfilter is not loaded"},
		{name: "strict reverse path", change: map[string]string{"proc/sys/net/ipv4/conf/eth0/rp_filter": "1"}, want: "rp_filter is strict on eth0", fix: "rp_filter=2"},
		{name: "strict reverse path on a VLAN", change: map[string]string{"proc/sys/net/ipv4/conf/eth0.100/rp_filter": "1"}, report: func(r *status.Report) { r.Interface.Name = "eth0.100" },
			want: "rp_filter is strict on eth0.100", fix: "net/ipv4/conf/eth0.100/rp_filter=2"},
		{name: "strict, but loose for all", change: map[string]string{"proc/sys/net/ipv4/conf/eth0/rp_filter": "1", "proc/sys/net/ipv4/conf/all/rp_filter": "2"}},
		{name: "firewalld", change: map[string]string{"run/firewalld.pid": "1"}, want: "firewalld runs", fix: "--add-source=fd00:10:5::/48 && firewall-cmd --permanent --add-port=8472/udp && firewall-cmd --reload"},
		{name: "firewalld with host-gw", change: map[string]string{"run/firewalld.pid": "1"}, report: hostGW, want: "firewalld runs", fix: "--add-source=10.5.0.0/16 && firewall-cmd --permanent --zone=trusted --add-source=fd00:10:5::/48 && firewall-cmd --reload"},
		{name: "ufw", change: map[string]string{"etc/ufw/ufw.conf": "# set\nENABLED=yes\n"}, want: "ufw is enabled", fix: "ufw default allow routed; ufw allow 8472/udp"},
		{name: "ufw with wireguard", change: map[string]string{"etc/ufw/ufw.conf": "ENABLED=yes\n", "sys/module/wireguard/version": ""}, report: wireguard, want: "ufw is enabled", fix: "; ufw allow 51820/udp; ufw allow 51821/udp"},
		{name: "ufw off", change: map[string]string{"etc/ufw/ufw.conf": "ENABLED=no\n"}},
		{name: "pods with a larger MTU than the network", facts: func(h *Facts) { h.Report.Network.MTU, h.Bridges[0].MTU = 1350, 1350 }, want: "pods at cni0 have MTU 1450, the network carries 1350", fix: "restart the pods", word: "mtu"},
		{name: "bridge MTU", facts: func(h *Facts) { h.Bridges[0].MTU = 1500 }, want: "cni0 has MTU 1500, the network carries 1450", fix: "ip link set cni0 mtu 1450", word: "mtu"},
		{name: "udev", change: map[string]string{"etc/systemd/network/50-flannel.link": "-"}, want: "udev may change", fix: "MACAddressPolicy=none"},
		{name: "no udev", change: map[string]string{"etc/systemd/network/50-flannel.link": "-", "run/udev/control": "-"}},
		{name: "port taken", change: map[string]string{"proc/net/udp": udpSocket("2118", "4242")}, want: "process 77 uses UDP port 8472", fix: "ss -lunp", serious: true},
		{name: "port of the kernel", change: map[string]string{"proc/net/udp": udpSocket("2118", "43")}},
		{name: "another port taken", change: map[string]string{"proc/net/udp": udpSocket("12B5", "4242")}, report: on4789, want: "process 77 uses UDP port 4789", fix: "ss -lunp 'sport = :4789'", serious: true},
		{name: "the usual port taken, and not needed", change: map[string]string{"proc/net/udp": udpSocket("2118", "4242")}, report: on4789},
		{name: "no vxlan", change: map[string]string{"sys/module/vxlan/version": "-"}, report: func(r *status.Report) { r.Ready = false }, want: "has no module vxlan", fix: "linux-modules-extra", serious: true},
		{name: "leases with one public address", report: shared(2), want: "the leases lease1, lease2 have the public address 192.0.2.7", fix: "flannelctl revoke LEASE"},
		{name: "many leases with one public address", report: shared(10), want: "lease8, and 2 more have the public address 192.0.2.7", fix: "flannelctl revoke LEASE"},
		{name: "Nodes with one public address", report: func(r *status.Report) { shared(2)(r); kubernetes(r) }, want: "lease1, lease2 have", fix: "kubectl delete node NODE"},
		{name: "another host with this address", facts: func(h *Facts) {
			h.Twins = []Twin{{Dev: "eth0", Addr: netip.MustParseAddr("192.0.2.49"), MAC: "02:00:00:00:00:99"}}
		}, want: "another host on eth0, with the MAC address 02:00:00:00:00:99, has the address 192.0.2.49 of this one", fix: "another address", word: Duplicate},
		{name: "a refused peer", report: func(r *status.Report) { r.Peers[0].State, r.Peers[0].Error = status.Refused, "another backend" }, want: "refuses the peer 10.5.7.0-24 (another backend)", fix: "flannelctl status", word: "refused"},
		{name: "a refused Node", report: func(r *status.Report) { r.Peers[0].State = status.Refused; kubernetes(r) }, want: "refuses the peer 10.5.7.0-24", fix: "kubectl delete node NODE", word: "refused"},
		{name: "a reservation", report: func(r *status.Report) { r.Peers[0].State = status.Reserved }, want: "reserved, and not taken yet, unless by a host with udp or a cloud: 10.5.7.0-24", fix: "unreserve"},
		{name: "a peer without a route", report: func(r *status.Report) { r.Peers[0].State = status.Missing }, want: "the kernel lacks objects for the peer 10.5.7.0-24", fix: "flannelctl status", word: "missing"},
		{name: "no store", report: func(r *status.Report) {
			r.Datastore = status.Datastore{Kind: "etcd", Since: time.Unix(0, 0), Error: "refused"}
		}, want: "etcd is away since 1970-01-01T00:00:00Z: refused", fix: "flannelctl status"},
		{name: "bridge of a former subnet", facts: func(h *Facts) { h.Bridges[0].Addresses[0] = netip.MustParsePrefix("10.5.9.1/24") }, want: "cni0 has the address 10.5.9.1/24, but this host's subnet is 10.5.49.0/24", fix: "ip link delete cni0", word: "bridge"},
		{name: "bridge without an address", facts: func(h *Facts) {
			h.Bridges[0].Addresses, h.Ways = nil, nil
			h.Report.Lease.Subnets = h.Report.Lease.Subnets[:1]
		}, want: "cni0 has pods and no address: pods of 10.5.49.0/24 are not reached", fix: "ip addr add 10.5.49.1/24 dev cni0", word: "bridge"},
		{name: "bridge without an IPv6 address", facts: func(h *Facts) { h.Bridges[0].Addresses = h.Bridges[0].Addresses[:1] },
			want: "cni0 has pods and no address: pods of fd00:10:5:49::/64 are not reached", fix: "ip addr add fd00:10:5:49::1/64 dev cni0", word: "bridge"},
		{name: "bridge of Docker without an IPv6 address", facts: func(h *Facts) { h.Bridges[0].CNI, h.Bridges[0].Addresses = false, h.Bridges[0].Addresses[:1] }},
		{name: "bridge that is down", facts: func(h *Facts) {
			h.Bridges[0].Down, h.Bridges[0].Addresses = true, h.Bridges[0].Addresses[:1]
			h.Ways[1].Route = Route{Err: syscall.EHOSTUNREACH}
		}, want: "cni0 is down: its pods are not reached", fix: "ip link set cni0 up", word: "bridge"},
		{name: "another bridge with the subnet takes packets to pods", facts: otherBridge(1450, "docker0"),
			want: "pods do not reach 10.5.7.0/24: packets to pods at cni0 go to docker0, which has the address 10.5.49.1/24 in the same subnet", fix: "ip addr del 10.5.49.1/24 dev docker0", word: "bridge"},
		{name: "another bridge with the subnet takes no packets", facts: otherBridge(1450, "cni0")},
		{name: "another bridge with the subnet has no pods", facts: func(h *Facts) {
			otherBridge(0, "cni0")(h)
			h.Ways = append(h.Ways, Way{Subnet: peer, Back: true, In: "flannel.1", Bridge: "docker0", From: remote, To: pod, Route: Route{Dev: "cni0", Table: 254}})
		}},
		{name: "bridge of another network without an address", facts: func(h *Facts) { h.Bridges = append(h.Bridges, Bridge{Name: "cni0", MTU: 1450, PortMTU: 1450}) }},
		{name: "bridge MTU smaller than that of pods", facts: func(h *Facts) { h.Bridges[0].MTU = 1280 }, want: "cni0 has MTU 1280, its pods have 1450", fix: "ip link set cni0 mtu 1450", word: "mtu"},
		{name: "bridge and pods with a small MTU", facts: func(h *Facts) { h.Bridges[0].MTU, h.Bridges[0].PortMTU = 1280, 1280 }},
		{name: "bridge without pods", facts: func(h *Facts) { h.Bridges[0].MTU, h.Bridges[0].PortMTU, h.Ways = 1500, 0, nil }},
		{name: "device does not forward", change: map[string]string{"proc/sys/net/ipv4/conf/flannel.1/forwarding": "0"}, facts: func(h *Facts) { h.Ways[1].Route = Route{Err: syscall.EHOSTUNREACH} }, want: "flannel.1 does not forward IPv4", fix: "net/ipv4/conf/flannel.1/forwarding=1", word: "forwarding"},
		{name: "rule for another table", facts: ruled(Rule{Priority: 5270, From: netip.PrefixFrom(pod, 24).Masked(), Table: 52}, Route{Dev: "tailscale0", Table: 52}), want: "pods do not reach 10.5.7.0/24: a rule with priority 5270 looks up packets from pods in table 52, which leads to dev tailscale0", fix: "ip rule add pref 5269 to 10.5.0.0/16 lookup main", word: "rule"},
		{name: "rule for a table with the same route", facts: ruled(Rule{Priority: 5270, Table: 52}, Route{Dev: "flannel.1", Via: peer.Addr(), Table: 52})},
		{name: "rule that drops", facts: ruled(Rule{Priority: 5270, To: peer, Refuses: true}, Route{Err: syscall.EINVAL}), want: "a rule with priority 5270 drops or refuses packets from pods", fix: "pref 5269", word: "rule"},
		{name: "rule that drops a protocol", facts: ruled(Rule{Priority: 5270, To: peer, Refuses: true, Partly: true}, Route{Dev: "flannel.1", Via: peer.Addr(), Table: 254}), want: "a rule with priority 5270 may drop packets of pods", fix: "ip rule show"},
		{name: "rule that drops a protocol to others", facts: ruled(Rule{Priority: 5270, To: netip.PrefixFrom(host, 32), Refuses: true, Partly: true}, Route{Dev: "flannel.1", Via: peer.Addr(), Table: 254})},
		{name: "rule for a table that drops", facts: func(h *Facts) {
			ruled(Rule{Priority: 5270, Table: 52}, Route{Err: syscall.EINVAL})(h)
			h.Refusals = []Refusal{{To: peer, Table: 52}}
		}, want: "looks up packets from pods in table 52, which drops them (blackhole)", fix: "pref 5269", word: "rule"},
		{name: "rule for packets of others, and a route that drops", facts: func(h *Facts) {
			ruled(Rule{Priority: 5270, In: "tun0", Table: 52}, Route{Err: syscall.EINVAL})(h)
			h.Ways[0].Sent.Err = syscall.EINVAL
			h.Refusals = []Refusal{{To: peer, Table: 52}, {To: peer, Table: 254}}
		}, want: "the route of packets from pods drops them (blackhole)", fix: "ip route get 10.5.7.2 from 10.5.49.2 iif cni0", word: "route"},
		{name: "migration to a backend with one route for all peers", report: func(r *status.Report) {
			r.Network.NextBackendType, r.Network.Devices = "wireguard", []string{"flannel.1", "flannel-wg"}
		}, facts: func(h *Facts) { h.Ways[0].Route = Route{Dev: "flannel-wg", Table: 254} }},
		{name: "next backend does not start", report: func(r *status.Report) {
			r.Network.NextBackendType, r.Network.NextError = "udp", "open /dev/net/tun: no such file or directory"
		}, want: "the next backend does not start: packets go on by the present one (udp: open /dev/net/tun: no such file or directory)", fix: "modprobe tun)", note: true},
		{name: "port of the next backend", report: func(r *status.Report) { r.Network.NextBackendType, r.Network.Ports = "wireguard", []int{8472, 4789} }, change: map[string]string{"proc/net/udp": udpSocket("12B5", "4242")}},
		{name: "missing route", facts: func(h *Facts) {
			h.Ways[0].Route = Route{Dev: "eth0", Via: netip.MustParseAddr("192.0.2.1"), Table: 254}
		}, want: "the route of packets from pods leads to 192.0.2.1 dev eth0", fix: "ip route get", word: "route"},
		{name: "route to a part of a peer's subnet", facts: withPart("10.5.7.128/25", false, Route{Dev: "eth0", Via: netip.MustParseAddr("192.0.2.1"), Table: 254}),
			want: "pods do not reach 10.5.7.0/24: the route of packets from pods to 10.5.7.128/25 leads to 192.0.2.1 dev eth0", fix: "ip route show table all root 10.5.7.128/25", word: "route"},
		{name: "right route to a part of a peer's subnet", facts: withPart("10.5.7.128/25", false, Route{Dev: "flannel.1", Via: peer.Addr(), Table: 254})},
		{name: "route that drops packets to some pods", facts: withPart("10.5.49.64/26", true, Route{Err: syscall.EINVAL}),
			want: "pods do not reach 10.5.7.0/24: the route of packets to pods in 10.5.49.64/26 drops them (blackhole)", fix: "delete it", word: "route"},
		{name: "strict filter that drops, older kernel", change: map[string]string{"proc/sys/net/ipv4/conf/flannel.1/rp_filter": "1"}, facts: func(h *Facts) { h.Ways[1].Route = Route{Err: syscall.EXDEV} }, want: "rp_filter is strict on flannel.1", fix: "net/ipv4/conf/flannel.1/rp_filter=2", word: "rp_filter"},
		{name: "strict filter that drops", change: map[string]string{"proc/sys/net/ipv4/conf/flannel.1/rp_filter": "1"}, facts: func(h *Facts) { h.Ways[1].Route = Route{Err: syscall.EINVAL} }, want: "rp_filter is strict on flannel.1", fix: "net/ipv4/conf/flannel.1/rp_filter=2", word: "rp_filter"},
		{name: "strict filter that drops nothing", change: map[string]string{"proc/sys/net/ipv4/conf/flannel.1/rp_filter": "1"}},
		{name: "IPsec blocks packets to pods", facts: policies(Policy{Direction: "fwd", Src: peer, Dst: netip.MustParsePrefix("10.5.0.0/16"), Blocks: true}), want: "pods do not reach 10.5.7.0/24: an IPsec policy (src 10.5.7.0/24 dst 10.5.0.0/16 dir fwd) blocks packets to pods", fix: "ip xfrm policy delete src 10.5.7.0/24 dst 10.5.0.0/16 dir fwd", word: "ipsec"},
		{name: "IPsec without an association", facts: policies(Policy{Direction: "out", Src: netip.MustParsePrefix("0.0.0.0/0"), Dst: peer, Lacks: true}), want: "drops packets from pods: there is no security association", fix: "start the VPN", word: "ipsec"},
		{name: "IPsec without an association yet", change: map[string]string{"proc/net/netlink": "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n0000000000000000 6   812        00000005 0        0        0     2        0        24242\n"},
			facts: policies(Policy{Direction: "out", Src: netip.MustParsePrefix("0.0.0.0/0"), Dst: peer, Lacks: true}), want: "pods may not reach 10.5.7.0/24: an IPsec policy", fix: "ip xfrm state", word: "ipsec", note: true},
		{name: "IPsec of one protocol", facts: policies(Policy{Direction: "out", Src: netip.MustParsePrefix("0.0.0.0/0"), Dst: peer, Protocol: syscall.IPPROTO_TCP, Blocks: true})},
		{name: "IPsec after an exception", facts: policies(
			Policy{Direction: "out", Src: netip.MustParsePrefix("10.5.0.0/16"), Dst: netip.MustParsePrefix("10.5.0.0/16")},
			Policy{Direction: "out", Src: netip.MustParsePrefix("10.0.0.0/8"), Dst: netip.MustParsePrefix("0.0.0.0/0"), Blocks: true})},
		{name: "IPsec blocks the tunnel", facts: policies(Policy{Direction: "in", Src: netip.PrefixFrom(host, 32), Dst: netip.MustParsePrefix("0.0.0.0/0"), Protocol: syscall.IPPROTO_UDP, Port: 8472, Blocks: true}),
			want: "blocks packets from 192.0.2.7 to UDP port 8472 of 192.0.2.49", fix: "dir in", word: "ipsec"},
		{name: "IPsec encrypts other packets", facts: policies(Policy{Direction: "out", Src: netip.MustParsePrefix("10.5.0.0/16"), Dst: netip.MustParsePrefix("10.9.0.0/16"), Lacks: true})},
		{name: "no room for connections", change: tracked("262144", "262144"), want: "262144 of 262144 connections are tracked", fix: "nf_conntrack_max=524288", word: "conntrack"},
		{name: "little room for connections", change: tracked("240000", "262144"), want: "240000 of 262144 connections are tracked", fix: "nf_conntrack_max"},
		{name: "room for connections", change: tracked("900", "262144")},
		{name: "facts missing", facts: func(h *Facts) { h.Unread = syscall.EPERM }, want: "not everything could be examined: operation not permitted", fix: "as root"},
		{name: "firewall drops the tunnel", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "eth0", Src: remote, Port: 8472}, Program: "iptables-nft", Table: "filter", Chain: "INPUT", Rule: "policy DROP"}}
		}, want: "iptables-nft drops packets of other hosts to UDP port 8472 in chain INPUT of table filter: policy DROP", fix: "iptables-nft -t filter -I INPUT -p udp --dport 8472 -j ACCEPT", word: "firewall"},
		{name: "firewall drops IP in IP", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{Src: remote, Protocol: 4}, Program: "iptables-nft", Table: "filter", Chain: "OUTPUT", Rule: "policy DROP"}}
		}, want: "iptables-nft drops packets of this host with IP protocol 4 in chain OUTPUT", fix: "iptables-nft -t filter -I OUTPUT -p 4 -j ACCEPT", word: "firewall"},
		{name: "firewall drops packets of pods", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod}, Program: "nft", Table: "inet x", Chain: "y", Rule: "policy drop"}}
		}, want: "nft drops forwarded packets of pods from cni0 to flannel.1 in chain y of table inet x", fix: "nft insert rule inet x y ip saddr 10.5.0.0/16 accept", word: "firewall"},
		{name: "firewalld drops packets of pods, seen in a pod", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod}, Program: "nft", Table: "inet firewalld", Chain: "filter_FORWARD", Rule: "the rule with handle 187"}}
		}, want: "firewalld drops forwarded packets of pods from cni0 to flannel.1 in chain filter_FORWARD of table inet firewalld: the rule with handle 187", fix: "firewall-cmd --permanent --zone=trusted --add-source=10.5.0.0/16 && ", word: "firewall"},
		{name: "firewall may drop packets of pods", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod}, Program: "nft", Table: "inet x", Chain: "y", Rule: "policy drop", Doubtful: true}}
		}, want: "nft may drop forwarded packets of pods", fix: "nft insert rule"},
		{name: "firewall drops only UDP of pods", facts: func(h *Facts) { h.Blocks = dropped(firewall.UDP) }, want: "nft may drop forwarded UDP packets of pods", fix: "nft insert rule"},
		{name: "firewall drops TCP and UDP of pods", facts: func(h *Facts) { h.Blocks = dropped(firewall.UDP, firewall.TCP) }, want: "nft drops forwarded packets of pods", fix: "nft insert rule", word: "firewall"},
		{name: "firewall redirects packets of pods", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "flannel.1", Out: "cni0", Src: remote, Dst: pod}, Program: "iptables-nft", Table: "nat", Chain: "PREROUTING", Rule: "-j DNAT", Redirects: true}}
		}, want: "iptables-nft redirects forwarded packets of pods from flannel.1 to cni0 in chain PREROUTING of table nat: -j DNAT", fix: "iptables-nft -t nat -I PREROUTING -d 10.5.0.0/16 -j ACCEPT", word: "firewall"},
		{name: "firewall rewrites the source of packets of pods", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod, Dst: remote}, Program: "iptables-nft", Table: "nat", Chain: "POSTROUTING", Rule: "-j MASQUERADE", Rewrites: true}}
		}, want: "iptables-nft rewrites the source of forwarded packets of pods from cni0 to flannel.1 in chain POSTROUTING of table nat: -j MASQUERADE: pods", fix: "iptables-nft -t nat -I POSTROUTING -s 10.5.0.0/16 -d 10.5.0.0/16 -j ACCEPT"},
		{name: "firewall may redirect packets of pods", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "cni0", Out: "flannel.1", Src: pod, Dst: remote}, Program: "nft", Table: "ip x", Chain: "y", Rule: "z", Redirects: true, Doubtful: true}}
		}, want: "nft may redirect forwarded packets of pods", fix: "nft insert rule ip x y ip daddr 10.5.0.0/16 accept"},
		{name: "firewall redirects a port of pods", facts: func(h *Facts) {
			h.Blocks = dropped(firewall.TCP)
			h.Blocks[0].Port, h.Blocks[0].Dst, h.Blocks[0].Redirects = 80, remote, true
		}, want: "nft may redirect forwarded packets to port 80 of pods from cni0 to flannel.1", fix: "nft insert rule inet x y ip daddr 10.5.0.0/16 accept"},
		{name: "firewall redirects the tunnel", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "eth0", Src: remote, Port: 8472}, Program: "nft", Table: "ip x", Chain: "y", Rule: "z", Redirects: true}}
		}, want: "nft redirects packets of other hosts to UDP port 8472", fix: "nft insert rule ip x y udp dport 8472 accept", word: "firewall"},
		{name: "firewall drops only checks of other hosts", facts: func(h *Facts) {
			h.Blocks = []firewall.Block{{Packet: firewall.Packet{In: "flannel.1", Src: peer.Addr(), Dst: netip.MustParseAddr("10.5.49.0"), Protocol: firewall.TCP, Port: 1}, Program: "nft", Table: "inet x", Chain: "y", Rule: "policy drop"}}
		}, want: "nft drops TCP packets of other hosts to 10.5.49.0 in chain y of table inet x: policy drop", fix: "nft insert rule inet x y ip daddr 10.5.49.0 accept"},
		{name: "filters, and all peers answer", facts: func(h *Facts) { h.Attached = filters }},
		{name: "filters, and a peer does not answer", facts: func(h *Facts) {
			h.Attached = filters
			h.Silent = []netip.Prefix{peer}
		}, want: "tc (clsact, 3 packets dropped) at eth0 may drop packets: no answer from 10.5.7.0/24", fix: "tc filter show dev eth0 ingress", serious: true},
		{name: "filters, and another cause", facts: func(h *Facts) {
			h.Attached = filters
			h.Silent = []netip.Prefix{peer}
			h.Policies = []Policy{{Direction: "fwd", Src: peer, Dst: netip.MustParsePrefix("10.5.0.0/16"), Blocks: true}}
		}, want: "an IPsec policy", word: "ipsec"},
		{name: "before: nothing overlaps", facts: before("4.20.0-1", Range{To: netip.MustParsePrefix("192.0.2.0/24"), Dev: "eth0"}, Range{To: peer, Dev: "flannel.1"})},
		{name: "before: old kernel", facts: before("4.19.0-27-amd64"), want: "the kernel is 4.19.0-27-amd64, and flanneld needs 4.20", fix: "update the kernel", serious: true},
		{name: "before: a route into the network", facts: before("6.1", Range{To: peer, Dev: "virbr0"}), want: "10.5.7.0/24 dev virbr0 is in the network 10.5.0.0/16", fix: "choose another Network", serious: true},
		{name: "before: a route around the network", facts: before("6.1", Range{To: netip.MustParsePrefix("10.0.0.0/8"), Dev: "tun0", Via: netip.MustParseAddr("192.0.2.9")}), want: "the network 10.5.0.0/16 is in 10.0.0.0/8 via 192.0.2.9 dev tun0", fix: "choose another Network"},
		{name: "before: limits of cgroup v2", change: map[string]string{"sys/fs/cgroup/system.slice/memory.max": "33554432\n", "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n"}, facts: before("6.1"), want: "cgroup v2 limits system.slice, in which systemd starts flanneld: memory.max 33554432", fix: "systemctl set-property system.slice"},
		{name: "before: limits of cgroup v1", change: map[string]string{"sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/cpu/system.slice/cpu.cfs_quota_us": "5000\n"}, facts: before("6.1"), want: "cgroup v1 limits system.slice, in which systemd starts flanneld: cpu.cfs_quota_us 5000", fix: "systemctl set-property system.slice"},
		{name: "before: no limits of cgroups", change: map[string]string{
			"sys/fs/cgroup/system.slice/memory.max": "max\n", "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
			"sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/cpu/system.slice/cpu.cfs_quota_us": "-1\n",
		}, facts: before("6.1")},
		{name: "before: routes of a former daemon", facts: func(h *Facts) {
			before("6.1", Range{To: peer, Dev: "eth0"})(h)
			h.Before.Former = h.Report.Network.Prefixes
		}},
		{name: "before: port taken with wireguard", change: map[string]string{"proc/net/udp": udpSocket("CA6C", "4242"), "sys/module/wireguard/version": ""}, report: wireguard, facts: before("6.1"), want: "process 77 uses UDP port 51820, which wireguard needs", fix: "ss -lunp", serious: true},
		{name: "not ready", report: func(r *status.Report) { r.Ready, r.Reasons = false, []string{"data path: no"} }, want: "not ready: data path: no", fix: "flannelctl status", serious: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files := soundHost()
			maps.Copy(files, tc.change)
			h := newHost(files)
			h.Files.(fstest.MapFS)["proc/77/fd/3"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("socket:[4242]")}
			if tc.facts != nil {
				tc.facts(&h)
			}
			if tc.report != nil {
				tc.report(&h.Report)
			}
			found := Examine(h)
			switch {
			case tc.want == "" && len(found) > 0:
				t.Errorf("found %+v, want nothing", found)
			case tc.want == "":
			case len(found) != 1:
				t.Errorf("found %+v, want one finding with %q", found, tc.want)
			case !strings.Contains(found[0].Problem, tc.want) || !strings.Contains(found[0].Fix, tc.fix) || found[0].Serious != (tc.serious || tc.word != "" && !tc.note) || found[0].Word != tc.word:
				t.Errorf("found %+v, want %q, fix %q, serious %v, word %q", found[0], tc.want, tc.fix, tc.serious, tc.word)
			}
		})
	}
}

// TestCutOff checks which wrong routes the daemon tells of: those that it does not put right itself.
func TestCutOff(t *testing.T) {
	refused, local := Route{Err: syscall.ENETUNREACH}, Route{Dev: "lo", Table: tableLocal}
	elsewhere := Route{Dev: "eth0", Via: netip.MustParseAddr("192.0.2.1"), Table: 254}
	missing := func(h *Facts) { h.Report.Peers[0].State = status.Missing }
	for name, tt := range map[string]struct {
		out, back Route // empty for the right one
		facts     func(*Facts)
		want      bool
	}{
		"right routes":                        {},
		"no table is looked up":               {out: refused, want: true},
		"flanneld's route is missing":         {out: refused, facts: missing},
		"no backend has routes":               {out: refused, facts: func(h *Facts) { h.Report.Peers[0].Objects = nil }},
		"this host takes what pods send":      {out: local, want: true},
		"this host takes what pods receive":   {back: local, want: true},
		"a bridge without pods is down":       {back: refused},
		"another route, which may lead there": {out: elsewhere},
		"a rule takes packets, without a route": {out: Route{Dev: "vpn0", Table: 52}, facts: func(h *Facts) {
			missing(h)
			h.Rules = append(h.Rules, Rule{Family: prefix.IPv4, Priority: 5, Table: 52})
		}, want: true},
	} {
		h := newHost(soundHost())
		for i, route := range []Route{tt.out, tt.back} {
			if route != (Route{}) {
				h.Ways[i].Route = route
				h.Ways[i].Sent = route
			}
		}
		if tt.facts != nil {
			tt.facts(&h)
		}
		if found := CutOff(h); len(found) > 0 != tt.want {
			t.Errorf("%s: %+v, want a finding: %v", name, found, tt.want)
		}
	}
}

// TestSharedAddressConcernsItsPeers checks that a finding about a shared address names the subnets of the leases.
func TestSharedAddressConcernsItsPeers(t *testing.T) {
	h := newHost(soundHost())
	h.Report.SharedPublicIPs = []status.SharedPublicIP{{PublicIP: host, Leases: []string{h.Report.Peers[0].Key, "10.5.8.0-24"}}}
	if found := Examine(h); len(found) != 1 || !slices.Equal(found[0].Subnets, []netip.Prefix{peer}) {
		t.Errorf("found %+v, want one about %s", found, peer)
	}
}

func TestDoctorWithoutADaemon(t *testing.T) {
	for _, tc := range []struct {
		err          error
		problem, fix string
		serious      bool
	}{
		{syscall.ENOENT, "no flanneld answers on the local socket: /x: no such file or directory", "systemctl status flanneld", true},
		{syscall.EACCES, "only root may use the local socket: /x: permission denied", "sudo flannelctl doctor", false},
	} {
		away := fmt.Errorf("/x: %w", tc.err)
		found := Examine(Facts{Files: fstest.MapFS{}, Away: away})
		if len(found) == 0 || found[0].Serious != tc.serious || found[0].Problem != tc.problem || !strings.HasPrefix(found[0].Fix, tc.fix) {
			t.Errorf("found %+v, want first %q, fix %q, serious %v", found, tc.problem, tc.fix, tc.serious)
		}
	}
}
