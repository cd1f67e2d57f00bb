// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/blame"
	"github.com/flanneld/flanneld/test/lab"
)

// toolFault is a fault of one host, and what flannelctl must say about it.
type toolFault struct {
	name string
	// cause causes the fault and returns the function that mends it.
	cause func(f toolFaults) (cure func())
	cut   bool // pods do not reach each other
	// cutPart is set if some pods do not reach each other, and others, such as those of the lab, do.
	cutPart bool
	// The fault is only one with a tunnel, or only one of IPv4.
	tunnel, v4 bool
	// The words. If the text of a command is empty, only the exit code counts, and mesh is not asked.
	doctor, check, status, mesh string
	also                        []string
	away                        bool // the daemon cannot be asked
	noPod                       bool // check --pod is not asked: adding a pod mends the fault, or packets of pods may pass
}

func (f toolFault) words() blame.Words {
	return blame.Words{Doctor: f.doctor, Check: f.check, Status: f.status, Mesh: f.mesh, Also: f.also}
}

// toolFaults is a lab with one backend and one family. The faults are on host a, and its peer is host b.
type toolFaults struct {
	t       *testing.T
	l       *lab.Lab
	family  prefix.Family
	backend string
	a, b    *lab.Host
	// The subnets of the hosts, the device on which packets from host b to pods arrive, and the address of the store.
	ownA, ownB netip.Prefix
	dev, store string
	leaseB     string // key of the lease of host b
	mtu        int    // of the network
	// The commands that are asked: besides doctor, check and status those for which a lab is set up.
	commands []string
}

// in reports whether fault number i is tried in a lab. Each one is tried in two of the four labs, with both backends
// and both families if it can be: that costs no more time than all of them in one lab.
func (f toolFault) in(l toolFaults, i int) bool {
	switch {
	case f.tunnel || f.v4:
		return (l.backend == "vxlan" || !f.tunnel) && (l.family == prefix.IPv4 || !f.v4)
	case i%2 == 0:
		return (l.backend == "vxlan") == (l.family == prefix.IPv4)
	}
	return (l.backend == "vxlan") != (l.family == prefix.IPv4)
}

// TestToolsNameTheFault causes one fault after the other on a host, in four labs with different backends and
// families. It measures whether pods reach each other, and then asks doctor, check and status on that host, in one lab
// also check --pod, and in one mesh. If pods are cut off, the tools must fail and name the cause, and no other. Otherwise
// they must succeed. After the cure they must find nothing.
//
//stages:rest it waits seconds for the missing answers of each fault
func TestToolsNameTheFault(t *testing.T) {
	t.Parallel()
	for _, in := range []struct {
		backend string
		family  prefix.Family
		more    string
	}{{"vxlan", prefix.IPv4, ""}, {"vxlan", prefix.IPv6, "mesh"}, {"host-gw", prefix.IPv4, blame.CheckPod}, {"host-gw", prefix.IPv6, ""}} {
		t.Run(in.backend+" "+in.family.String(), func(t *testing.T) {
			t.Parallel()
			testToolsNameTheFault(t, in.backend, in.family, in.more)
		})
	}
}

func testToolsNameTheFault(t *testing.T, backend string, family prefix.Family, more string) {
	l := newLab(t, lab.Config{Hosts: 2, Families: []prefix.Family{family}}, fmt.Sprintf(`{"Type":%q}`, backend))
	var o lab.FlanneldOptions
	if more == "mesh" {
		o.Args = meshArgs
	}
	startAll(t, l, o)
	expectConverged(t, l)
	f := toolFaults{t: t, l: l, family: family, backend: backend, a: l.Host(1), b: l.Host(2), dev: "eth0", store: "192.168.77.254"}
	if family == prefix.IPv6 {
		f.store = "fd00:77::fe"
	}

	r := statusOf(t, f.a)
	f.ownA = r.Lease.Subnets[0]
	other := statusOf(t, f.b).Lease
	f.ownB = other.Subnets[0]
	f.leaseB = other.Key
	f.mtu = r.Network.MTU
	if len(r.Network.Devices) > 0 {
		f.dev = r.Network.Devices[0]
	}
	f.commands = []string{"doctor", "check", "status"}
	if more != "" {
		f.commands = append(f.commands, more)
	}
	if more == blame.CheckPod {
		f.addRuntime()
	}
	f.expectFine("before all faults", f.commands)
	for i, fault := range f.table() {
		if !fault.in(f, i) {
			continue
		}
		ok := t.Run(fault.name, func(t *testing.T) {
			f.t = t
			cure := sync.OnceFunc(fault.cause(f))
			defer cure()
			f.expectPods(fault.cut)
			f.expectTools(fault)
			if slices.Contains([]string{"rule", "forwarding", "rp_filter"}, fault.check) || fault.check == "route" && fault.cut { // the daemon sees these itself
				f.expectNotReady()
			}
			cure()
			f.expectPods(false)
			f.expectFine("after the cure", f.commandsAbout(fault))
		})
		if !ok && t.Context().Err() != nil {
			return
		}
	}
}

// table returns the faults of all labs, in the words of this one.
func (f toolFaults) table() []toolFault {
	iptables := map[prefix.Family]string{prefix.IPv4: "iptables", prefix.IPv6: "ip6tables"}[f.family]
	other := map[string]string{"vxlan": "host-gw", "host-gw": "vxlan"}[f.backend]
	former := map[prefix.Family]string{prefix.IPv4: "10.5.250.1/24", prefix.IPv6: "fd00:5:0:fffa::1/64"}[f.family]
	foreign := map[prefix.Family][3]string{ // a network, its peer in a VPN, and this host
		prefix.IPv4: {"10.9.0.0/16", "192.168.77.9", "192.168.77.1"}, prefix.IPv6: {"fd00:9::/48", "fd00:77::9", "fd00:77::1"},
	}[f.family]
	forwarding := map[prefix.Family]string{prefix.IPv4: "net/ipv4/ip_forward", prefix.IPv6: "net/ipv6/conf/all/forwarding"}[f.family]
	nftFamily := map[prefix.Family]string{prefix.IPv4: "ip", prefix.IPv6: "ip6"}[f.family]
	all := netip.PrefixFrom(f.ownA.Addr(), f.ownA.Bits()/2).Masked().String() // the network and more
	return []toolFault{
		{
			name: "peer is refused", cut: true,
			cause: func(f toolFaults) func() {
				// The peer's daemon must not write its lease again.
				f.freeze(f.b)
				f.editLease(strconv.Quote(f.backend), strconv.Quote(other))
				return func() {
					f.editLease(strconv.Quote(other), strconv.Quote(f.backend))
					f.thaw(f.b)
				}
			},
			doctor: "refuses the peer", check: "refused", status: "1 refused", also: []string{"refuses the peer"},
		},
		{
			name: "route is missing and the daemon hangs", cut: true, away: true,
			cause: func(f toolFaults) func() {
				f.freeze(f.a)
				f.ip("route", "del", f.ownB.String())
				return func() { f.thaw(f.a) }
			},
			doctor: "no flanneld answers",
		},
		{
			name: "bridge has the address of a former subnet", cut: true,
			cause: func(f toolFaults) func() {
				own := netip.PrefixFrom(f.ownA.Addr().Next(), f.ownA.Bits()).String()
				f.ip("addr", "add", former, "dev", lab.PodBridge)
				f.ip("addr", "del", own, "dev", lab.PodBridge)
				return func() {
					f.ip("addr", "add", own, "dev", lab.PodBridge)
					f.ip("addr", "del", former, "dev", lab.PodBridge)
				}
			},
			doctor: "cni0 has the address " + former, check: "bridge", status: "cni0 has the address",
		},
		{
			name: "bridge has lost its address", cut: true,
			cause: func(f toolFaults) func() {
				own := netip.PrefixFrom(f.ownA.Addr().Next(), f.ownA.Bits()).String()
				f.ip("addr", "del", own, "dev", lab.PodBridge)
				return func() { f.ip("addr", "add", own, "dev", lab.PodBridge) }
			},
			doctor: "cni0 has pods and no address", check: "bridge", status: "cni0 has pods and no address", noPod: true,
		},
		{
			name: "another bridge has the subnet of this host", cut: true, v4: true,
			cause: func(f toolFaults) func() {
				own := netip.PrefixFrom(f.ownA.Addr().Next(), f.ownA.Bits()).String()
				f.ip("link", "add", "docker0", "up", "type", "bridge")
				f.ip("addr", "del", own, "dev", lab.PodBridge)
				f.ip("addr", "add", own, "dev", "docker0")
				f.ip("addr", "add", own, "dev", lab.PodBridge)
				return func() { f.ip("link", "del", "docker0") }
			},
			doctor: "go to docker0", check: "bridge", status: "go to docker0",
		},
		{
			name: "bridge has a smaller MTU than its pods", cut: true,
			cause: func(f toolFaults) func() {
				f.ip("link", "set", lab.PodBridge, "mtu", "1280")
				return func() { f.ip("link", "set", lab.PodBridge, "mtu", strconv.Itoa(f.mtu)) }
			},
			doctor: "cni0 has MTU 1280", check: "mtu", status: "cni0 has MTU",
		},
		{
			name: "rule sends packets to another table", cut: true,
			cause: func(f toolFaults) func() {
				f.ip("link", "add", "vpn0", "type", "veth", "peer", "name", "vpn1")
				f.ip("link", "set", "vpn0", "up")
				f.ip("route", "add", "default", "dev", "vpn0", "table", "52")
				f.ip("rule", "add", "from", f.ownA.String(), "lookup", "52", "pref", "5270")
				return func() {
					f.ip("rule", "del", "pref", "5270")
					f.ip("link", "del", "vpn0")
				}
			},
			doctor: "5270", check: "rule", status: "5270", mesh: "5270",
		},
		{
			name: "rule leads to a table with the same route",
			cause: func(f toolFaults) func() {
				via := f.ownB.Addr()
				if f.backend == "host-gw" {
					via = f.b.Addr(f.family)
				}
				f.ip("route", "add", f.ownB.String(), "via", via.String(), "dev", f.dev, "onlink", "table", "77")
				f.ip("rule", "add", "to", f.ownB.String(), "lookup", "77", "pref", "5271")
				return func() {
					f.ip("rule", "del", "pref", "5271")
					f.ip("route", "flush", "table", "77")
				}
			},
		},
		{
			name: "rule drops packets", cut: true,
			cause: func(f toolFaults) func() {
				f.ip("rule", "add", "from", f.ownA.String(), "blackhole", "pref", "5272")
				return func() { f.ip("rule", "del", "pref", "5272") }
			},
			doctor: "5272", check: "rule", status: "5272",
		},
		{
			name: "longer route drops packets", cut: true,
			cause: func(f toolFaults) func() {
				half := netip.PrefixFrom(f.ownB.Addr(), f.ownB.Bits()+1).String()
				f.ip("route", "add", "blackhole", half)
				return func() { f.ip("route", "del", "blackhole", half) }
			},
			doctor: "the route of packets from pods", check: "route", status: "the route of packets from pods",
		},
		{
			name: "route takes packets as packets to this host", cut: true,
			cause: func(f toolFaults) func() {
				f.ip("route", "add", "local", f.ownB.String(), "dev", "lo")
				return func() { f.ip("route", "del", "local", f.ownB.String(), "dev", "lo") }
			},
			doctor: "the route of packets from pods leads to dev lo", check: "route", status: "the route of packets from pods leads to dev lo",
			also: []string{"the route of packets to pods drops them"}, // the kernel takes no packets with a source of its own
		},
		{
			name: "rule skips the table main", cut: true,
			cause: func(f toolFaults) func() {
				f.ip("rule", "add", "to", f.ownB.String(), "goto", "32767", "pref", "5273")
				f.ip("rule", "add", "lookup", "default", "pref", "32767")
				return func() {
					f.ip("rule", "del", "pref", "32767")
					f.ip("rule", "del", "pref", "5273")
				}
			},
			doctor: "the route of packets from pods refuses them", check: "route", status: "the route of packets from pods refuses them",
		},
		{
			name: "route to a part of the other subnet", noPod: true, // the usual pods reach each other
			cause: func(f toolFaults) func() {
				part := netip.PrefixFrom(prefix.Last(f.ownB), f.ownB.Bits()+2).Masked().String()
				f.ip("route", "add", "unreachable", part, "proto", "bird")
				return func() { f.ip("route", "del", "unreachable", part) }
			},
			cutPart: true, doctor: "the route of packets from pods to ", check: "route", status: "the route of packets from pods to ",
		},
		{
			name: "route that drops packets to some pods", noPod: true,
			cause: func(f toolFaults) func() {
				part := netip.PrefixFrom(prefix.Last(f.ownA), f.ownA.Bits()+2).Masked().String()
				f.ip("route", "add", "blackhole", part, "proto", "bird")
				return func() { f.ip("route", "del", "blackhole", part) }
			},
			cutPart: true, doctor: "the route of packets to pods in ", check: "route", status: "the route of packets to pods in ",
		},
		{
			name: "bridge is down", cut: true, noPod: true,
			cause: func(f toolFaults) func() {
				f.ip("link", "set", lab.PodBridge, "down")
				return func() {
					f.ip("link", "set", lab.PodBridge, "up")
					if f.family == prefix.IPv6 { // the kernel has removed it
						f.ip("addr", "add", netip.PrefixFrom(f.ownA.Addr().Next(), f.ownA.Bits()).String(), "dev", lab.PodBridge, "nodad")
					}
				}
			},
			doctor: "cni0 is down", check: "bridge", status: "cni0 is down",
		},
		{
			name: "strict reverse-path filter drops packets that come another way", cut: true, tunnel: true, v4: true,
			cause: func(f toolFaults) func() {
				mend := directRoute(f)
				f.run("sysctl", "-w", "net/ipv4/conf/flannel.1/rp_filter=1")
				return func() {
					f.run("sysctl", "-w", "net/ipv4/conf/flannel.1/rp_filter=0")
					mend()
				}
			},
			doctor: "rp_filter is strict", check: "rp_filter", status: "rp_filter is strict",
		},
		{name: "packets take another way that works", cause: directRoute},
		{
			name: "device of packets from other hosts does not forward", cut: true, v4: true,
			cause:  sysctlFault("net/ipv4/conf/" + f.dev + "/forwarding"),
			doctor: f.dev + " does not forward", check: "forwarding", status: f.dev + " does not forward",
		},
		{
			name: "bridge does not forward", cut: true, v4: true,
			cause:  sysctlFault("net/ipv4/conf/cni0/forwarding"),
			doctor: "cni0 does not forward", check: "forwarding", status: "cni0 does not forward",
		},
		{
			name: "IPsec blocks packets to pods", cut: true,
			cause: func(f toolFaults) func() {
				return f.policy("src", f.ownB.String(), "dst", f.ownA.String(), "dir", "fwd", "action", "block")
			},
			doctor: "blocks packets to pods", check: "ipsec", status: "blocks packets to pods",
		},
		{
			name: "IPsec without its VPN takes packets of pods", cut: true,
			cause: func(f toolFaults) func() {
				return f.policy("src", all, "dst", f.ownB.String(), "dir", "out",
					"tmpl", "src", foreign[2], "dst", foreign[1], "proto", "esp", "mode", "tunnel")
			},
			doctor: "no security association", check: "ipsec", status: "no security association",
		},
		{
			name: "IPsec drops the tunnel", cut: true, tunnel: true,
			cause: func(f toolFaults) func() {
				peer := f.b.Addr(f.family)
				return f.policy("src", prefix.Host(f.a.Addr(f.family)).String(), "dst", prefix.Host(peer).String(), "proto", "udp", "dport", "8472", "dir", "out", "action", "block")
			},
			doctor: "dir out) blocks packets from", check: "ipsec", status: "dir out) blocks packets from",
		},
		{
			name: "IPsec encrypts other networks",
			cause: func(f toolFaults) func() {
				return f.policy("src", f.ownA.String(), "dst", foreign[0], "dir", "out",
					"tmpl", "src", foreign[2], "dst", foreign[1], "proto", "esp", "mode", "tunnel")
			},
		},
		{
			name: "iptables-legacy drops the tunnel", cut: true, tunnel: true,
			cause:  iptablesFault(iptables+"-legacy", "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP"),
			doctor: iptables + "-legacy drops packets of other hosts to UDP port 8472", check: "firewall", status: iptables + "-legacy drops", mesh: "network",
		},
		{
			name: "iptables-nft rejects packets before the rules of flanneld", cut: true,
			cause:  iptablesFault(iptables+"-nft", "FORWARD", "-i", "cni0", "-j", "REJECT"),
			doctor: iptables + "-nft drops forwarded packets of pods from cni0 to " + f.dev, check: "firewall", status: iptables + "-nft drops",
		},
		{
			name: "iptables-nft gives packets to a program that does not run", cut: true,
			cause:  iptablesFault(iptables+"-nft", "FORWARD", "-i", "cni0", "-j", "NFQUEUE", "--queue-num", "5"),
			doctor: iptables + "-nft drops forwarded packets of pods from cni0 to " + f.dev + " in chain FORWARD of table filter: -i cni0 -j NFQUEUE --queue-num 5 (no program reads queue 5)",
			check:  "firewall", status: iptables + "-nft drops",
		},
		{
			name: "iptables-nft drops what the host sends through the tunnel", cut: true, tunnel: true,
			cause: func(f toolFaults) func() {
				f.run(iptables+"-nft", "-I", "OUTPUT", "-p", "udp", "--dport", "8472", "-j", "DROP")
				return func() { f.run(iptables+"-nft", "-D", "OUTPUT", "-p", "udp", "--dport", "8472", "-j", "DROP") }
			},
			doctor: "packets of this host to UDP port 8472", check: "firewall", status: iptables + "-nft drops",
		},
		{
			name: "iptables-nft drops packets after they were routed", cut: true, tunnel: true,
			cause: func(f toolFaults) func() {
				f.run(iptables+"-nft", "-t", "mangle", "-I", "POSTROUTING", "-o", f.dev, "-j", "DROP")
				return func() { f.run(iptables+"-nft", "-t", "mangle", "-D", "POSTROUTING", "-o", f.dev, "-j", "DROP") }
			},
			doctor: iptables + "-nft drops forwarded packets of pods from cni0 to " + f.dev + " in chain POSTROUTING", check: "firewall", status: iptables + "-nft drops",
		},
		{
			name: "nftables drops all but a few ports", cut: true, tunnel: true,
			cause:  nftFault("inet", "chain in { type filter hook input priority 0 ; policy drop ; ct state established,related accept ; iif lo accept ; meta l4proto { icmp, ipv6-icmp } accept ; tcp dport { 22, 443 } accept ; }"),
			doctor: "nft drops packets of other hosts to UDP port 8472 in chain in of table inet foreign: policy drop", check: "firewall", status: "nft drops",
		},
		{
			name: "nftables rejects forwarded packets", cut: true,
			cause:  nftFault("inet", "chain through { type filter hook forward priority -5 ; iifname cni0 reject ; }"),
			doctor: "nft drops forwarded packets of pods from cni0 to " + f.dev, check: "firewall", status: "nft drops",
		},
		{
			name: "nftables drops the tunnel in the device", cut: true, tunnel: true,
			cause:  nftFault("netdev", "chain early { type filter hook ingress device eth0 priority 0 ; udp dport 8472 drop ; }"),
			doctor: "nft drops packets of other hosts to UDP port 8472 in chain early of table netdev foreign", check: "firewall", status: "nft drops",
		},
		{
			name: "filter of tc drops the tunnel", cut: true, tunnel: true, cause: tcFault("8472"),
			doctor: "tc (clsact, ", check: "at eth0 may drop packets", also: []string{"network"}, mesh: "network",
		},
		{name: "filter of tc drops other packets", cause: tcFault("8473")},
		{
			name:  "nftables drops other packets",
			cause: nftFault("inet", "chain in { type filter hook input priority 0 ; policy drop ; ct state established,related accept ; iifname lo accept ; iifname { eth0, cni0, flannel.1, flannel-v6.1 } accept ; } ; chain through { type filter hook forward priority 0 ; tcp dport 25 drop ; }"),
		},
		{
			name:  "iptables drops another port",
			cause: iptablesFault(iptables+"-nft", "INPUT", "-p", "udp", "--dport", "8473", "-j", "DROP"),
		},
		{
			name: "host drops pings",
			cause: func(f toolFaults) func() {
				nft(f.t, f.b.Namespace, "table inet quiet { chain in { type filter hook input priority 0 ; icmp type echo-request drop ; icmpv6 type echo-request drop ; } ; }")
				return func() { nft(f.t, f.b.Namespace, "delete table inet quiet") }
			},
			check: "icmp filtered",
		},
		{
			name: "other host hides its own addresses",
			cause: func(f toolFaults) func() {
				nft(f.t, f.b.Namespace, "table inet quiet { chain in { type filter hook input priority 0 ; icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept ; "+nftFamily+" daddr "+f.ownB.String()+" drop ; } ; }")
				return func() { nft(f.t, f.b.Namespace, "delete table inet quiet") }
			},
			check: "its host gets packets through the network",
		},
		{
			name: "nftables drops packets of pods in the bridge", cut: true,
			cause:  nftFault("bridge", "chain early { type filter hook prerouting priority 0 ; policy drop ; }"),
			doctor: "nft drops forwarded packets of pods from cni0 to " + f.dev, check: "firewall", status: "nft drops",
		},
		{
			name: "iptables-nft redirects what pods send", cut: true,
			cause:  iptablesFault(iptables+"-nft", "PREROUTING", "-t", "nat", "-i", "cni0", "-d", all, "-j", "DNAT", "--to-destination", foreign[1]),
			doctor: iptables + "-nft redirects forwarded packets of pods from cni0 to " + f.dev, check: "firewall", status: iptables + "-nft redirects",
		},
		{
			name: "nftables redirects what pods receive", cut: true,
			cause:  nftFault("inet", "chain pre { type nat hook prerouting priority dstnat ; iifname "+f.dev+" "+nftFamily+" daddr "+f.ownA.String()+" dnat "+nftFamily+" to "+foreign[1]+" ; }"),
			doctor: "nft redirects forwarded packets of pods from " + f.dev + " to cni0", check: "firewall", status: "nft redirects",
		},
		{
			name:   "iptables-nft redirects a port", // pods reach each other at all others
			cause:  iptablesFault(iptables+"-nft", "PREROUTING", "-t", "nat", "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", foreign[1]),
			doctor: iptables + "-nft may redirect forwarded packets to port 80 of pods",
		},
		{
			name:   "iptables-nft drops packets by a match that is not understood", // pods reach each other with all others
			cause:  iptablesFault(iptables+"-nft", "FORWARD", "-m", "length", "--length", "65000:65500", "-j", "DROP"),
			doctor: iptables + "-nft may drop forwarded packets of pods from ",
		},
		{
			name:   "iptables-nft masquerades packets between pods", // they reach each other
			cause:  iptablesFault(iptables+"-nft", "POSTROUTING", "-t", "nat", "-s", f.ownA.String(), "-o", f.dev, "-j", "MASQUERADE"),
			doctor: iptables + "-nft rewrites the source of forwarded packets of pods from cni0 to " + f.dev,
		},
		{
			name: "rules for services and ports of the host redirect packets",
			cause: func(f toolFaults) func() {
				const proxy = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SVC-A - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A KUBE-SERVICES -d %[2]s -p udp -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-SVC-A
-A KUBE-SVC-A -j DNAT --to-destination %[3]s
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -j DNAT --to-destination %[3]s
COMMIT
`
				pod := f.a.Pods()[0].Addrs()[0].String()
				f.run("sh", "-ec", fmt.Sprintf("%[1]s-nft-restore --noflush <<'END'\n"+proxy+"END", iptables, foreign[1], pod))
				cure := nftFault(nftFamily, "chain pre { type nat hook prerouting priority dstnat ; "+nftFamily+" daddr "+foreign[1]+" dnat to "+pod+" ; }")(f)
				return func() {
					cure()
					f.run("sh", "-ec", fmt.Sprintf("own='KUBE-SERVICES KUBE-NODEPORTS KUBE-SVC-A CNI-HOSTPORT-DNAT'; for c in PREROUTING $own; do %[1]s-nft -t nat -F $c; done; for c in $own; do %[1]s-nft -t nat -X $c; done", iptables))
				}
			},
		},
		{
			name: "another host has the same address", cut: true, v4: true, noPod: true,
			cause: func(f toolFaults) func() {
				// A host on the segment answers for the address too, and host b has heard that last.
				const mac = "02:00:00:00:77:99"
				own := f.a.Addr(f.family).String()
				shell(f.t, f.l.Underlay(), `ip link add twin address `+mac+` type veth peer name twin0 && ip link set twin0 master l2-1 up
					ip link set twin up && ip addr add `+own+`/32 dev twin && sysctl -qw net/ipv4/conf/l2-1/arp_ignore=1`)
				shell(f.t, f.b.Namespace, "ip neigh replace "+own+" lladdr "+mac+" dev eth0 nud stale")
				return func() {
					shell(f.t, f.l.Underlay(), "ip link del twin")
					shell(f.t, f.b.Namespace, "ip neigh flush to "+own)
				}
			},
			doctor: "another host on eth0, with the MAC address", check: "duplicate", status: "another host on eth0",
		},
		{
			name: "subnet is reserved for a host that has not started", v4: true,
			cause: func(f toolFaults) func() {
				subnet := "10.5.1.0/24"
				for i := 2; subnet == f.ownA.String() || subnet == f.ownB.String(); i++ {
					subnet = fmt.Sprintf("10.5.%d.0/24", i)
				}
				expectFlannelctl(f.t, f.a, []string{"reserve", subnet, "192.168.77.210"})
				eventually(f.t, "the reservation is known", func() error {
					peers := statusOf(f.t, f.a).Peers
					if !slices.ContainsFunc(peers, func(p status.Peer) bool { return p.State == status.Reserved }) {
						return fmt.Errorf("no peer is reserved: %+v", peers)
					}
					return nil
				})
				if n := metric(f.t, f.a, `flannel_peers{state="refused"}`); n != 0 {
					f.t.Errorf("%v peers are refused", n)
				}
				return func() { expectFlannelctl(f.t, f.a, []string{"unreserve", subnet}) }
			},
			check: "reserved, and not taken yet",
		},
		{
			name: "store is unreachable",
			cause: func(f toolFaults) func() {
				f.ip("route", "add", "blackhole", f.store)
				return func() { f.ip("route", "del", "blackhole", f.store) }
			},
		},
		{
			name: "host does not forward", cut: true,
			cause:  sysctlFault(forwarding),
			doctor: f.family.String() + " is not forwarded", check: "forwarding", status: f.family.String() + " is not forwarded", noPod: true,
		},
		{
			name: "host does not forward, and would drop", cut: true,
			cause: func(f toolFaults) func() {
				forward := sysctlFault(forwarding)(f)
				accept := iptablesFault(iptables+"-nft", "FORWARD", "-i", "cni0", "-j", "DROP")(f)
				return func() {
					accept()
					forward()
				}
			},
			doctor: iptables + "-nft drops forwarded packets of pods from cni0 to " + f.dev, check: "forwarding",
			status: iptables + "-nft drops", noPod: true,
			also: []string{f.family.String() + " is not forwarded"},
		},
	}
}

// directRoute makes the host send packets to pods without the tunnel. They arrive, because hosts of one segment reach
// each other directly.
func directRoute(f toolFaults) func() {
	half := netip.PrefixFrom(f.ownB.Addr(), f.ownB.Bits()+1).String()
	f.ip("route", "add", half, "via", f.b.Addr(f.family).String(), "dev", "eth0")
	return func() { f.ip("route", "del", half) }
}

// nftFault returns a fault that adds a table with nft.
func nftFault(family, content string) func(toolFaults) func() {
	return func(f toolFaults) func() {
		nft(f.t, f.a.Namespace, "table "+family+" foreign { "+content+" ; }")
		return func() { nft(f.t, f.a.Namespace, "delete table "+family+" foreign") }
	}
}

// tcFault returns a fault that drops packets to a UDP port when they arrive on the external interface.
func tcFault(port string) func(toolFaults) func() {
	return func(f toolFaults) func() {
		// A program for BPF: 2 (drop) if the frame has this ethertype, UDP (17) and this port, and otherwise -1 (no decision).
		program := map[prefix.Family]string{
			prefix.IPv4: "8,40 0 0 12,21 0 5 2048,48 0 0 23,21 0 3 17,40 0 0 36,21 0 1 %s,6 0 0 2,6 0 0 4294967295",
			prefix.IPv6: "8,40 0 0 12,21 0 5 34525,48 0 0 20,21 0 3 17,40 0 0 56,21 0 1 %s,6 0 0 2,6 0 0 4294967295",
		}[f.family]
		f.run("tc", "qdisc", "add", "dev", "eth0", "clsact")
		f.run("tc", "filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", fmt.Sprintf(program, port))
		return func() { f.run("tc", "qdisc", "del", "dev", "eth0", "clsact") }
	}
}

// iptablesFault returns a fault that puts a rule of a variant of iptables before all others.
func iptablesFault(program, chain string, rule ...string) func(toolFaults) func() {
	return func(f toolFaults) func() {
		f.run(program, append([]string{"-I", chain}, rule...)...)
		return func() { f.run(program, append([]string{"-D", chain}, rule...)...) }
	}
}

// sysctlFault returns a fault that sets a sysctl from 1 to 0.
func sysctlFault(key string) func(toolFaults) func() {
	return func(f toolFaults) func() {
		f.run("sysctl", "-w", key+"=0")
		return func() { f.run("sysctl", "-w", key+"=1") }
	}
}

// policy adds a policy of IPsec, and returns the function that removes all.
func (f toolFaults) policy(args ...string) func() {
	f.t.Helper()
	f.ip(append([]string{"xfrm", "policy", "add"}, args...)...)
	return func() { f.ip("xfrm", "policy", "deleteall") }
}

// ip runs ip(8) for the family of the lab on the host with the fault.
func (f toolFaults) ip(args ...string) {
	f.t.Helper()
	family := map[prefix.Family]string{prefix.IPv4: "-4", prefix.IPv6: "-6"}[f.family]
	f.run("ip", append([]string{family}, args...)...)
}

// run runs a program on the host with the fault.
func (f toolFaults) run(program string, args ...string) {
	f.t.Helper()
	if out, err := f.a.Exec(testContext(f.t), program, args...); err != nil {
		f.t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

// editLease replaces a text in the lease of host b.
func (f toolFaults) editLease(from, to string) {
	f.t.Helper()
	ctx, client := testContext(f.t), etcdClient(f.t, f.l)
	key := subnets + f.leaseB
	have, err := client.Get(ctx, key)
	if err != nil || len(have.Kvs) != 1 {
		f.t.Fatalf("%s: %v, %v", key, have, err)
	}
	value := strings.ReplaceAll(string(have.Kvs[0].Value), from, to)
	if _, err := client.Put(ctx, key, value, clientv3.WithIgnoreLease()); err != nil {
		f.t.Fatal(err)
	}
}

func (f toolFaults) freeze(h *lab.Host) {
	f.t.Helper()
	if err := h.Daemon().Freeze(); err != nil {
		f.t.Fatal(err)
	}
}

func (f toolFaults) thaw(h *lab.Host) {
	f.t.Helper()
	if err := h.Daemon().Signal(unix.SIGCONT); err != nil {
		f.t.Fatal(err)
	}
}

// expectPods waits until pods reach each other with packets of the full MTU in both directions, or until they do not.
func (f toolFaults) expectPods(cut bool) {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("pods are cut off: %v", cut), func() error {
		err := errors.Join(f.ping(f.a, f.b), f.ping(f.b, f.a))
		if cut && err == nil {
			return errors.New("all pings are answered")
		}
		if cut {
			return nil
		}
		return err
	})
}

func (f toolFaults) ping(from, to *lab.Host) error {
	_, err := from.Pods()[0].Ping(testContext(f.t), to.Pods()[0].Addrs()[0], lab.Echo{Size: f.mtu, DontFragment: true, Timeout: time.Second})
	return err
}

// ask returns the exit code and the output of a command of flannelctl on the host with the fault.
func (f toolFaults) ask(command string) (code int, out string) {
	f.t.Helper()
	args := strings.Fields(command)
	if command == blame.CheckPod {
		args = append(args, "--cni-bin-dir="+ownPlugins, "--cni-conf-dir="+confDir)
	}
	out, err := flannelctl(f.t, f.a, args...)
	if failure := (*exec.ExitError)(nil); errors.As(err, &failure) {
		return failure.ExitCode(), out
	}
	if err != nil {
		f.t.Errorf("flannelctl %s: %v\n%s", command, err, out)
	}
	return 0, out
}

// addRuntime gives the host with the fault what check --pod needs. The address of its pod is taken.
func (f toolFaults) addRuntime() {
	f.t.Helper()
	runtime := newCNI(f.t, f.a, "1.1.0", manifestDelegate)
	for file, text := range map[string][]byte{
		filepath.Join(confDir, "10-flannel.conflist"):                                  runtime.list.Bytes,
		filepath.Join("/var/lib/cni/networks/cbr0", f.a.Pods()[0].Addrs()[0].String()): nil,
	} {
		path := f.a.Path(file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, text, 0o600)); err != nil {
			f.t.Fatal(err)
		}
	}
}

// commandsAbout returns the commands that are asked about a fault.
func (f toolFaults) commandsAbout(fault toolFault) []string {
	return slices.DeleteFunc(slices.Clone(f.commands), func(command string) bool {
		return command == blame.CheckPod && fault.noPod || command == "mesh" && fault.mesh == ""
	})
}

// expectTools asks all commands at once, because each one waits for answers that do not come.
func (f toolFaults) expectTools(fault toolFault) {
	f.t.Helper()
	var asked sync.WaitGroup
	for _, command := range f.commandsAbout(fault) {
		asked.Go(func() { f.expectTool(command, fault) })
	}
	asked.Wait()
}

func (f toolFaults) expectTool(command string, fault toolFault) {
	f.t.Helper()
	want := 0
	switch {
	case fault.away && command != "doctor":
		want = 2
	case (fault.cut || fault.cutPart) && command != "status":
		want = 1
	}

	code, out := f.ask(command)
	for end := time.Now().Add(patience / 2); command == "mesh" && code != want && time.Now().Before(end); {
		code, out = f.ask(command) // the probes notice later
	}
	if command == "status" && fault.cut && code == 1 && strings.Contains(out, "pods: ") {
		code = 0 // the daemon itself has seen it already
	}

	text := fault.words().Text(command)
	if code != want || !strings.Contains(out, text) {
		f.t.Errorf("flannelctl %s exits with %d, want %d and %q in\n%s", command, code, want, text, out)
	}
	all := map[string]blame.Words{}
	for _, other := range f.table() {
		all[other.name] = other.words()
	}
	for _, err := range fault.words().Wrong(command, out, all) {
		f.t.Error(err)
	}
}

// expectNotReady waits until the daemon itself says that pods are cut off.
func (f toolFaults) expectNotReady() {
	f.t.Helper()
	within(f.t, 15*time.Second, "not ready", func() error {
		code, text, _ := f.a.Daemon().Get(testContext(f.t), "/readyz")
		if code != http.StatusServiceUnavailable || !strings.Contains(text, "pods: ") {
			return fmt.Errorf("/readyz: %d %q", code, text)
		}
		return nil
	})
}

// expectFine waits until no command finds anything. A host needs a moment for that after a cure.
func (f toolFaults) expectFine(when string, commands []string) {
	f.t.Helper()
	within(f.t, 20*time.Second, when, func() error {
		for _, command := range commands {
			if code, out := f.ask(command); code != 0 || strings.Contains(out, "PROBLEM") {
				return fmt.Errorf("flannelctl %s exits with %d:\n%s", command, code, out)
			}
		}
		return nil
	})
}
