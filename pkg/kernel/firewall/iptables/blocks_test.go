// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// TestBlocked checks which rule of iptables-save drops a packet of the tunnel, or one between pods.
func TestBlocked(t *testing.T) {
	tunnel := firewall.Packet{In: "eth0", Src: netip.MustParseAddr("192.0.2.2"), Dst: netip.MustParseAddr("192.0.2.1"), Protocol: firewall.UDP, Port: 8472}
	pods := firewall.Packet{In: "flannel.1", Out: "cni0", Src: netip.MustParseAddr("10.5.7.2"), Dst: netip.MustParseAddr("10.5.49.2"), Protocol: firewall.TCP, Port: 1}
	sent := tunnel
	sent.In, sent.Out = tunnel.Out, tunnel.In
	const ours = "-A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n-A FLANNEL-FWD -s 10.5.0.0/16 -j ACCEPT\n"
	for name, tt := range map[string]struct {
		policy   string // of INPUT and FORWARD; empty for ACCEPT
		rules    string
		packet   firewall.Packet
		want     string // the rule; empty if the packet passes
		doubtful bool
	}{
		"nothing":                        {packet: tunnel},
		"drop of the port":               {packet: tunnel, rules: "-A INPUT -p udp -m udp --dport 8472 -j DROP\n", want: "-p udp -m udp --dport 8472 -j DROP"},
		"drop of a range of ports":       {packet: tunnel, rules: "-A INPUT -p udp -m udp --dport 8000:9000 -j DROP\n", want: "-p udp -m udp --dport 8000:9000 -j DROP"},
		"drop of sent packets":           {packet: sent, rules: "-A OUTPUT -o eth0 -p udp -m udp --dport 8472 -j DROP\n", want: "-o eth0 -p udp -m udp --dport 8472 -j DROP"},
		"drop of received packets":       {packet: sent, rules: "-A INPUT -j DROP\n"},
		"drop of another port":           {packet: tunnel, rules: "-A INPUT -p udp -m udp --dport 53 -j DROP\n"},
		"drop of another interface":      {packet: tunnel, rules: "-A INPUT -i wlan+ -j DROP\n"},
		"drop of interfaces":             {packet: tunnel, rules: "-A INPUT -i eth+ -j DROP\n", want: "-i eth+ -j DROP"},
		"policy":                         {packet: tunnel, policy: "DROP", want: "policy DROP"},
		"policy, port accepted":          {packet: tunnel, policy: "DROP", rules: "-A INPUT -p udp -m multiport --dports 53,8472 -j ACCEPT\n"},
		"policy, set accepted":           {packet: tunnel, policy: "DROP", rules: "-A INPUT -m set --match-set peers src -j ACCEPT\n", want: "policy DROP", doubtful: true},
		"limited drop":                   {packet: tunnel, rules: "-A INPUT -m limit --limit 5/min -j DROP\n"},
		"RHEL":                           {packet: tunnel, rules: "-A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT\n-A INPUT -p icmp -j ACCEPT\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\n", want: "-j REJECT --reject-with icmp-host-prohibited"},
		"drop of marked packets":         {packet: pods, rules: "-A FORWARD -m mark --mark 0x8000/0x8000 -j DROP\n"},
		"drop of packets without a mark": {packet: pods, rules: "-A FORWARD -m mark ! --mark 0x10000/0x10000 -j DROP\n"},
		"invalid packets":                {packet: pods, rules: "-A FORWARD -m conntrack --ctstate INVALID -j DROP\n"},
		"forward drop before ours":       {packet: pods, rules: "-A FORWARD -d 10.0.0.0/8 -j DROP\n" + ours, want: "-d 10.0.0.0/8 -j DROP"},
		"forward drop after ours":        {packet: pods, rules: ours + "-A FORWARD -j DROP\n"},
		"forward policy and ours":        {packet: pods, policy: "DROP", rules: ours},
		"forward policy":                 {packet: pods, policy: "DROP", want: "policy DROP"},
		"drop in a chain":                {packet: pods, rules: "-A FORWARD -j USER\n-A USER -i flannel.1 -j DROP\n", want: "-i flannel.1 -j DROP"},
		"a match that is not understood": {packet: pods, rules: "-A FORWARD -m iprange --src-range 10.5.0.0-10.5.255.255 -j DROP\n", want: "-m iprange --src-range 10.5.0.0-10.5.255.255 -j DROP", doubtful: true},
		"a jump that is not understood":  {packet: pods, rules: "-A FORWARD -m length --length 1000:1500 -j USER\n-A USER -j DROP\n", want: "-j DROP", doubtful: true},
		"certain after doubtful":         {packet: pods, rules: "-A FORWARD -m length --length 1000:1500 -j DROP\n-A FORWARD -j REJECT\n", want: "-j REJECT"},
		"not understood, after ours":     {packet: pods, rules: ours + "-A FORWARD -m length --length 1000:1500 -j DROP\n"},
		"flags of TCP":                   {packet: pods, rules: "-A FORWARD -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -m conntrack --ctstate NEW -j DROP\n-A FORWARD -p tcp -m tcp --tcp-flags FIN,SYN,RST,PSH,ACK,URG NONE -j DROP\n"},
		"first packets of TCP":           {packet: pods, rules: "-A FORWARD -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j DROP\n", want: "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j DROP"},
		"rules of healthy hosts": {packet: pods, rules: "-A FORWARD -m rt --rt-type 0 -j DROP\n-A FORWARD -m rpfilter --validmark --invert -j DROP\n-A FORWARD -m set --match-set blocked src -j DROP\n" +
			"-A FORWARD -p sctp -j DROP\n-A FORWARD -f -j DROP\n-A FORWARD -m pkttype --pkt-type multicast -j DROP\n-A FORWARD -p tcp -m multiport --dports 25,6000:6063 -j DROP\n" +
			"-A FORWARD -m recent --update --seconds 30 --hitcount 6 --name DEFAULT --mask 255.255.255.255 --rsource -j DROP\n-A FORWARD -m mark --mark 0x0/0x10000 -j USER\n-A USER -j DROP\n"},
		"Docker, which has a function": {packet: pods, rules: "-A FORWARD -j DOCKER\n-A DOCKER -j DROP\n"},
	} {
		policy := tt.policy
		if policy == "" {
			policy = "ACCEPT"
		}
		text := "*filter\n:INPUT " + policy + " [0:0]\n:FORWARD " + policy + " [0:0]\n:FLANNEL-FWD - [0:0]\n:USER - [0:0]\n:DOCKER - [0:0]\n" + tt.rules + "COMMIT\n"
		b, ok := blocked(text, tt.packet)
		if ok != (tt.want != "") || b.Rule != tt.want || b.Doubtful != tt.doubtful {
			t.Errorf("%s: %+v, %v, want %q, doubtful %v", name, b, ok, tt.want, tt.doubtful)
		}
	}
}

// TestBlockedOnTheWayOut checks that a rule of the last chain drops packets that leave this host, and no others.
func TestBlockedOnTheWayOut(t *testing.T) {
	const text = "*mangle\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -j DROP\nCOMMIT\n"
	own, other := netip.MustParseAddr("10.5.49.2"), netip.MustParseAddr("10.5.7.2")
	for _, p := range []firewall.Packet{{In: "cni0", Out: "flannel.1", Src: own, Dst: other}, {Out: "eth0", Src: own, Dst: other}, {In: "eth0", Src: other, Dst: own}} {
		b, ok := blocked(text, p)
		if want := p.Out != ""; ok != want || ok && (b.Table != "mangle" || b.Chain != "POSTROUTING") {
			t.Errorf("%+v: %+v, %v, want %v", p, b, ok, want)
		}
	}
}

// TestRewritten checks which rule gives packets between pods another source.
func TestRewritten(t *testing.T) {
	own, other := netip.MustParseAddr("10.5.49.2"), netip.MustParseAddr("10.5.7.2")
	out := firewall.Packet{In: "cni0", Out: "flannel.1", Src: own, Dst: other, Protocol: firewall.TCP, Port: 1}
	back := firewall.Packet{In: "flannel.1", Out: "cni0", Src: other, Dst: own, Protocol: firewall.TCP, Port: 1}
	// The rules of flanneld, kube-proxy and portmap.
	const usual = `-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.5.49.0/24 -d 10.5.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.5.0.0/16 -d 10.5.49.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
`
	for name, tt := range map[string]struct {
		rules  string
		packet firewall.Packet
		want   string
	}{
		"usual rules":            {packet: out},
		"usual rules, received":  {packet: back},
		"another address":        {rules: "-A POSTROUTING -o flannel.1 -j SNAT --to-source 192.0.2.9\n", packet: out, want: "-o flannel.1 -j SNAT --to-source 192.0.2.9"},
		"another device":         {rules: "-A POSTROUTING -o eth0 -j MASQUERADE\n", packet: out},
		"Docker with the subnet": {rules: "-A POSTROUTING -s 10.5.49.0/24 ! -o docker0 -j MASQUERADE\n", packet: out, want: "-s 10.5.49.0/24 ! -o docker0 -j MASQUERADE"},
		"Docker, received":       {rules: "-A POSTROUTING -s 10.5.49.0/24 ! -o docker0 -j MASQUERADE\n", packet: back},
		"Docker, sent by a host": {rules: "-A POSTROUTING -s 10.5.49.0/24 ! -o docker0 -j MASQUERADE\n", packet: firewall.Packet{Out: "eth0", Src: own, Dst: other}},
		"accepted before Docker": {rules: "-A POSTROUTING -d 10.5.0.0/16 -j ACCEPT\n-A POSTROUTING -s 10.5.49.0/24 -j MASQUERADE\n", packet: out},
	} {
		for _, rules := range []string{tt.rules + usual, usual + tt.rules} {
			b, ok := blocked("*nat\n:POSTROUTING ACCEPT [0:0]\n:FLANNEL-POSTRTG - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:CNI-HOSTPORT-MASQ - [0:0]\n"+rules+"COMMIT\n", tt.packet)
			if ok != (tt.want != "") || b.Rule != tt.want || b.Rewrites != ok || b.Redirects {
				t.Errorf("%s: %+v, %v, want %q", name, b, ok, tt.want)
			}
		}
	}
}

// redirections contains rules of kube-proxy for a Service with a port of the Node, and of portmap and Docker for ports of the host.
const redirections = `-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SERVICES -d 192.0.2.77/32 -p udp -m physdev ! --physdev-is-in -m udp --dport 53 -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SVC-TCOU7JCQXEZGVUNU ! -s 10.5.0.0/16 -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-MARK-MASQ
-A KUBE-SVC-TCOU7JCQXEZGVUNU -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-TCOU7JCQXEZGVUNU -j KUBE-SEP-A
-A KUBE-SEP-A -p udp -m udp -j DNAT --to-destination 10.5.7.2:53
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j CNI-DN-A
-A CNI-DN-A -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.5.49.2:80
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8081 -j DNAT --to-destination 172.17.0.2:80
`

// TestRedirected checks which rule of iptables-save gives a packet another destination, and that those for services and for
// ports of the host do not.
func TestRedirected(t *testing.T) {
	out := firewall.Packet{In: "cni0", Out: "flannel.1", Src: netip.MustParseAddr("10.5.49.2"), Dst: netip.MustParseAddr("10.5.7.2"), Protocol: firewall.UDP, Port: 1}
	back := firewall.Packet{In: "flannel.1", Out: "cni0", Src: out.Dst, Dst: out.Src, Protocol: firewall.TCP, Port: 1}
	sent := firewall.Packet{Out: "eth0", Src: netip.MustParseAddr("192.0.2.1"), Dst: netip.MustParseAddr("192.0.2.2"), Protocol: firewall.UDP, Port: 8472}
	for name, tt := range map[string]struct {
		rules  string
		packet firewall.Packet
		want   string // the rule; empty if the packet keeps its destination
	}{
		"services, from a pod":     {packet: out},
		"services, to a pod":       {packet: back},
		"services, from the host":  {packet: sent},
		"all packets of pods":      {packet: out, rules: "-A PREROUTING -i cni0 -j DNAT --to-destination 192.0.2.9\n", want: "-i cni0 -j DNAT --to-destination 192.0.2.9"},
		"all packets to pods":      {packet: back, rules: "-A PREROUTING -d 10.5.0.0/16 -j DNAT --to-destination 192.0.2.9\n", want: "-d 10.5.0.0/16 -j DNAT --to-destination 192.0.2.9"},
		"to this host":             {packet: back, rules: "-A PREROUTING -p tcp -j REDIRECT --to-ports 3128\n", want: "-p tcp -j REDIRECT --to-ports 3128"},
		"packets of this host":     {packet: sent, rules: "-A OUTPUT -p udp -m udp --dport 8472 -j DNAT --to-destination 192.0.2.9\n", want: "-p udp -m udp --dport 8472 -j DNAT --to-destination 192.0.2.9"},
		"packets of other devices": {packet: out, rules: "-A PREROUTING -i docker0 -j DNAT --to-destination 192.0.2.9\n"},
		"accepted before":          {packet: out, rules: "-A PREROUTING -d 10.5.0.0/16 -j ACCEPT\n-A PREROUTING -i cni0 -j DNAT --to-destination 192.0.2.9\n"},
	} {
		text := "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n" +
			":KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-SVC-TCOU7JCQXEZGVUNU - [0:0]\n:KUBE-SEP-A - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n" +
			":CNI-HOSTPORT-DNAT - [0:0]\n:CNI-DN-A - [0:0]\n:DOCKER - [0:0]\n" + redirections + tt.rules + "COMMIT\n"
		b, ok := blocked(text, tt.packet)
		if ok != (tt.want != "") || b.Rule != tt.want || b.Redirects != ok || b.Doubtful {
			t.Errorf("%s: %+v, %v, want %q", name, b, ok, tt.want)
		}
	}
}

// TestRedirectedPorts checks which ports are looked at because a rule redirects packets to them.
func TestRedirectedPorts(t *testing.T) {
	text := "*nat\n:PREROUTING ACCEPT [0:0]\n" + redirections +
		"-A PREROUTING -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.5.1.5:8080\n-A PREROUTING -p udp -m udp --dport 53:54 -j REDIRECT\nCOMMIT\n"
	want := []firewall.Payload{{Protocol: firewall.TCP, Port: 8080}, {Protocol: firewall.TCP, Port: 8081}, {Protocol: firewall.TCP, Port: 80}, {Protocol: firewall.UDP, Port: 53}}
	if got := parseSave(text)["nat"].redirected(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestKernelBlocks checks that both variants are read, and what they drop before the table filter.
func TestKernelBlocks(t *testing.T) {
	firewalltest.Enter(t)
	p := firewall.Packet{In: "eth0", Src: netip.MustParseAddr("192.0.2.2"), Dst: netip.MustParseAddr("192.0.2.1"), Protocol: firewall.UDP, Port: 8472}
	for _, v := range []Variant{Legacy, NFT} {
		program := v.Program(prefix.IPv4)
		firewalltest.Shell(t, program+" -t raw -A PREROUTING -p udp --dport 8472 -j DROP")
		blocks, err := Blocks(t.Context(), []firewall.Packet{p})
		if err != nil || len(blocks) != 1 || blocks[0].Program != program || !strings.Contains(blocks[0].Rule, "8472") || blocks[0].Table != "raw" {
			t.Errorf("%s: %+v, %v, want one rule of the table raw", v, blocks, err)
		}
		firewalltest.Shell(t, program+" -t raw -F PREROUTING")

		// A rule that is about a port need not be about other packets.
		firewalltest.Shell(t, program+" -t nat -A PREROUTING -p tcp --dport 80 -j DNAT --to-destination 10.5.1.5:8080")
		pods := firewall.Packet{In: "cni0", Out: "flannel.1", Src: netip.MustParseAddr("10.5.49.2"), Dst: netip.MustParseAddr("10.5.7.2"), Protocol: firewall.TCP, Port: 1}
		blocks, err = Blocks(t.Context(), []firewall.Packet{pods})
		if err != nil || len(blocks) != 1 || blocks[0].Port != 80 || !blocks[0].Redirects {
			t.Errorf("%s: %+v, %v, want the rule that redirects port 80", v, blocks, err)
		}
		firewalltest.Shell(t, program+" -t nat -F PREROUTING")
	}
}

// TestKernelQueues checks which rules drop packets because no program reads their queue.
func TestKernelQueues(t *testing.T) {
	firewalltest.Enter(t)
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const (
		config, bind = unix.NFNL_SUBSYS_QUEUE<<8 | 2, 1 // NFQNL_MSG_CONFIG, NFQNL_CFG_CMD_BIND
		queue        = 7
	)
	command, _ := netlink.MarshalAttributes([]netlink.Attribute{{Type: 1, Data: []byte{bind, 0, 0, unix.AF_INET}}}) // NFQA_CFG_CMD
	read := netlink.Message{Header: netlink.Header{Type: config, Flags: netlink.Request | netlink.Acknowledge}, Data: append([]byte{unix.AF_UNSPEC, 0, 0, queue}, command...)}
	if _, err := c.Execute(read); err != nil {
		t.Fatal(err)
	}

	pods := firewall.Packet{In: "cni0", Out: "flannel.1", Src: netip.MustParseAddr("10.5.49.2"), Dst: netip.MustParseAddr("10.5.7.2"), Protocol: firewall.TCP, Port: 1}
	for _, v := range []Variant{Legacy, NFT} {
		for options, want := range map[string]string{
			"--queue-num 7":                      "",
			"--queue-num 8":                      "-j NFQUEUE --queue-num 8 (no program reads queue 8)",
			"--queue-num 8 --queue-bypass":       "",
			"--queue-balance 7:9":                "-j NFQUEUE --queue-balance 7:9 (no program reads queue 8)",
			"--queue-balance 6:7 --queue-bypass": "",
		} {
			// Packets that a program reads do not reach the second rule.
			firewalltest.Shell(t, v.Program(prefix.IPv4)+" -A FORWARD -j NFQUEUE "+options+"; "+v.Program(prefix.IPv4)+" -A FORWARD -j DROP")
			blocks, err := Blocks(t.Context(), []firewall.Packet{pods})
			if err != nil || len(blocks) != min(len(want), 1) || want != "" && blocks[0].Rule != want {
				t.Errorf("%s %s: %+v, %v, want %q", v, options, blocks, err, want)
			}
			firewalltest.Shell(t, v.Program(prefix.IPv4)+" -F FORWARD")
		}
	}
}
