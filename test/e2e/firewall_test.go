// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestMasquerade checks which source address the far end of a connection sees: the host's for
// packets of pods to the outside, and an address of the pods' network for packets of a host to
// pods of another host. All other packets must keep their source address.
func TestMasquerade(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: masqueradeConfig(nil)}, "")
			startAll(t, l, lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{newPrograms(t, f).env}})
			expectConverged(t, l) // before addOutsideAddresses, after which the router also has routes to the pods
			addOutsideAddresses(t, l)
			host, pod, far := l.Host(1), l.Host(1).Pods()[0], l.Host(2).Pods()[0]
			nft(t, host.Namespace, `table inet marker {
				chain before {
					type filter hook prerouting priority mangle
					ip daddr 198.51.100.201 meta mark set 0xc001
					ip6 daddr 2001:db8:88::2 meta mark set 0xc001
				}
			}`)
			for _, family := range dual {
				out := outsideOf(family)
				for _, tt := range []struct {
					what  string
					from  *lab.Namespace
					local netip.Addr
					at    *lab.Namespace
					to    netip.Addr
					want  netip.Addr
				}{
					{"pod to outside", pod.Namespace, netip.Addr{}, l.Underlay(), out.any, host.Addr(family)},
					{"pod to an exempt destination", pod.Namespace, netip.Addr{}, l.Underlay(), out.exempt, pod.Addr(family)},
					{"marked for kube-proxy", pod.Namespace, netip.Addr{}, l.Underlay(), out.marked, pod.Addr(family)},
					{"pod to remote pod", pod.Namespace, netip.Addr{}, far.Namespace, far.Addr(family), pod.Addr(family)},
					{"host to own pod", host.Namespace, host.Addr(family), pod.Namespace, pod.Addr(family), host.Addr(family)},
				} {
					if seen := connect(t, tt.from, tt.local, tt.at, tt.to).sourceAddr(); seen != tt.want {
						t.Errorf("%s by %s: the far end sees %s, want %s", tt.what, family, seen, tt.want)
					}
				}
				seen := connect(t, host.Namespace, host.Addr(family), far.Namespace, far.Addr(family)).sourceAddr()
				if seen == host.Addr(family) || !lab.PodNetwork(family).Contains(seen) && !strings.HasPrefix(seen.String(), "fd00:5:") {
					t.Errorf("host to remote pod by %s: the far end sees %s, want an address of the pods' network\n%s", family, seen,
						shell(t, host.Namespace, fmt.Sprintf("ip route get %s; ip addr; %s", far.Addr(family), f.list)))
				}
				expectMulticast(t, l, family)
			}
		})
	}
}

// expectMulticast checks that multicast packets from an address of the pods' network are not
// masqueraded.
func expectMulticast(t *testing.T, l *lab.Lab, f prefix.Family) {
	t.Helper()
	ctx, host := testContext(t), l.Host(1)
	group, network, dev := "224.0.0.99", "udp4", "flannel.1"
	if f == prefix.IPv6 {
		group, network, dev = "ff02::99", "udp6", "flannel-v6.1"
	}
	var conn *net.UDPConn
	err := l.Underlay().Do(ctx, func() (err error) {
		ifi, err := net.InterfaceByName("l2-1")
		if err != nil {
			return err
		}
		conn, err = net.ListenMulticastUDP(network, ifi, &net.UDPAddr{IP: net.ParseIP(group), Port: 9999})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	source := strings.Fields(shell(t, host.Namespace, fmt.Sprintf("ip -o addr show dev %s scope global", dev)))[3]
	from := netip.MustParsePrefix(source).Addr()
	err = host.Do(ctx, func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		domain, to := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: 9999, Addr: [4]byte{224, 0, 0, 99}})
		var bind unix.Sockaddr
		if f == prefix.IPv6 {
			a := netip.MustParseAddr(group).As16()
			domain, to = unix.AF_INET6, &unix.SockaddrInet6{Port: 9999, Addr: a, ZoneId: uint32(ifi.Index)}
			bind = &unix.SockaddrInet6{Addr: from.As16()}
		} else {
			bind = &unix.SockaddrInet4{Addr: from.As4()}
		}
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if f == prefix.IPv4 {
			err = unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(ifi.Index)})
		} else {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, ifi.Index)
		}
		if err != nil {
			return err
		}
		if err := unix.Bind(fd, bind); err != nil {
			return err
		}
		return unix.Sendto(fd, []byte("hello"), 0, to)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_, seen, err := conn.ReadFromUDPAddrPort(make([]byte, 16))
	if err != nil || seen.Addr().Unmap().WithZone("") != from {
		t.Errorf("multicast by %s: the far end sees %s (%v), want %s", f, seen, err, from)
	}
}

// TestFirewallRepair checks that the daemon restores its rules after another program has deleted
// or changed rules, or has inserted a rule before them.
func TestFirewallRepair(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
			h := l.Host(1)
			startOne(t, h, lab.FlanneldOptions{Args: append(f.args, "--ip-masq", "--iptables-resync=1"), Env: []string{newPrograms(t, f).env}})
			if got := statusOf(t, h).Firewall; !strings.HasPrefix(f.name, got.Kind) || got.Kind == "" || got.Error != "" {
				t.Errorf("the status contains %+v, want %s without an error", got, f.name)
			}
			want := sortLines(shell(t, h.Namespace, f.list))
			damage := []string{"nft flush chain ip flannel-ipv4 postrtg", "nft delete table ip6 flannel-ipv6", "nft flush ruleset",
				"nft insert rule ip flannel-ipv4 forward tcp dport 22 drop"}
			if f.name != "nftables" {
				v := f.name
				six := strings.Replace(v, "ip", "ip6", 1)
				damage = []string{v + " -t nat -F FLANNEL-POSTRTG", six + " -t nat -D FLANNEL-POSTRTG 3", v + " -D FORWARD 1",
					six + " -t nat -F && " + six + " -t nat -X", v + " -I FLANNEL-FWD -s 10.5.7.7 -j DROP", six + " -A FORWARD -j FLANNEL-FWD"}
			}
			for _, script := range damage {
				shell(t, h.Namespace, script)
				start := time.Now()
				eventually(t, script, func() error {
					if now := sortLines(shell(t, h.Namespace, f.list)); now != want {
						return fmt.Errorf("the rules are\n%s\nwant\n%s", now, want)
					}
					return nil
				})
				t.Logf("%s: repaired after %v", script, time.Since(start).Round(time.Millisecond))
			}
			expectLog(t, h.Daemon(), "repaired traffic rules that another program had changed")
			eventually(t, "flannel_firewall_repairs_total", func() error {
				if n := metric(t, h, "flannel_firewall_repairs_total"); n < float64(len(damage)) {
					return fmt.Errorf("%g, want at least %d", n, len(damage))
				}
				return nil
			})
		})
	}
}

// TestTablesWithRulesOfNFT checks tables that contain our rules of iptables-nft and rules that
// another program has written with nft. iptables-save cannot print such tables. Each jump to our
// chains must exist exactly once. If the daemon cannot find out by other means what the rules of
// a table are, it must report this, and must not change the table.
//
//stages:rest it waits for time in which nothing must happen
func TestTablesWithRulesOfNFT(t *testing.T) {
	t.Parallel()
	f := flavours()[1]
	l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false, "Backend": map[string]any{"Type": "host-gw"}})}, "")
	h, programs := l.Host(1), newPrograms(t, f)
	list := func() string {
		return shell(t, h.Namespace, "nft --stateless list table ip filter; nft --stateless list table ip nat")
	}
	expectOnceEach := func(what string) {
		t.Helper()
		for _, chain := range []string{"FLANNEL-FWD", "FLANNEL-POSTRTG"} {
			if n := strings.Count(list(), "jump "+chain); n != 1 {
				t.Errorf("%s: %d jumps to %s, want 1:\n%s", what, n, chain, list())
			}
		}
	}
	expectNoWrites := func() {
		t.Helper()
		ran := func() int { return strings.Count(strings.Join(programs.run(t), "\n"), "-restore") }
		pause(t, time.Second) // until the reaction to the last change is over
		before := ran()
		if before == 0 {
			t.Error("no run of iptables-restore is recorded, want those of the start")
		}
		pause(t, 3*time.Second)
		if n := ran() - before; n > 0 {
			t.Errorf("iptables-restore ran %d times within three seconds, want none", n)
		}
	}
	shell(t, h.Namespace, `iptables-nft -A FORWARD -p tcp --dport 25 -j DROP
		iptables-nft -t nat -A POSTROUTING -p tcp --dport 25 -j ACCEPT
		nft 'insert rule ip filter FORWARD ct state { new, established } accept'
		nft 'insert rule ip nat POSTROUTING ct state { established, related } accept'`)
	o := lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{programs.env}}
	d := startOne(t, h, o)
	expectNoWrites()
	expectOnceEach("at the start")
	shell(t, h.Namespace, "iptables-nft -F FLANNEL-FWD; iptables-nft -t nat -F POSTROUTING")
	eventually(t, "deleted rules are restored", func() error {
		if now := list(); !strings.Contains(now, "saddr 10.5.0.0/16") || !strings.Contains(now, "jump FLANNEL-POSTRTG") {
			return fmt.Errorf("the tables are\n%s", now)
		}
		return nil
	})
	expectNoWrites()
	expectOnceEach("after the repair")

	shell(t, h.Namespace, `nft 'insert rule ip filter FORWARD fib saddr type local accept'
		iptables-nft -A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD`)
	eventually(t, "/readyz reports the table", func() error {
		if _, body, err := d.Get(testContext(t), "/readyz"); err == nil || !strings.Contains(body, "cannot read table filter") {
			return fmt.Errorf("it answers %q, %w", body, err)
		}
		return nil
	})
	expectLog(t, d, "cannot read table filter")
	before := list()
	pause(t, 3*time.Second)
	if after := list(); after != before {
		t.Errorf("the daemon changed tables that it cannot read from\n%s\nto\n%s", before, after)
	}
	expectStop(t, d)
	expectFlannelctlFails(t, h, []string{"cleanup", "--yes"}, "cannot read table filter", "EnableNFTables")

	shell(t, h.Namespace, "nft flush chain ip filter FORWARD; nft 'add rule ip filter FORWARD ct state { new, established } accept'")
	startOne(t, h, o)
	expectOnceEach("without the rule that iptables-save cannot print")
	expectStop(t, h.Daemon())
	expectFlannelctl(t, h, []string{"cleanup", "--yes"})
	if left := list(); strings.Contains(left, "FLANNEL") || strings.Count(left, "ct state") != 1 {
		t.Errorf("cleanup left\n%s\nwant only the rule of the other program", left)
	}
}

// sortLines returns the lines of text in alphabetical order. nft prints chains in the order of
// their creation, so a repair changes the order.
func sortLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestFirewallRestarts checks that masqueraded connections survive 20 restarts of the daemon,
// and that no restart writes rules.
//
//stages:rest TestRestartsWriteNothing restarts too, and counts what is written
func TestFirewallRestarts(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
			o := lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{newPrograms(t, f).env}}
			startAll(t, l, o)
			addOutsideAddresses(t, l)
			h := l.Host(1)
			var ways []connection
			for _, family := range dual {
				c := connect(t, h.Pods()[0].Namespace, netip.Addr{}, l.Underlay(), outsideOf(family).any)
				if c.sourceAddr() != h.Addr(family) {
					t.Fatalf("the far end sees %s, want %s", c.sourceAddr(), h.Addr(family))
				}
				ways = append(ways, c, connection{c.far, c.near})
			}
			for i := range 20 {
				if i%2 == 0 {
					h.Daemon().Kill()
				} else {
					expectStop(t, h.Daemon())
				}
				startOne(t, h, o)
				expectLog(t, h.Daemon(), "traffic rules are in place")
				if lines := linesWith(h.Daemon(), "written=true"); len(lines) > 0 {
					t.Fatalf("restart %d wrote rules, want none: %q", i+1, lines)
				}
				for _, way := range ways {
					if err := way.far.SetReadDeadline(time.Now().Add(patience)); err != nil {
						t.Fatal(err)
					}
					if _, err := way.near.Write([]byte{1}); err != nil {
						t.Fatal(err)
					}
					if _, err := way.far.Read(make([]byte, 1)); err != nil {
						t.Fatalf("after %d restarts: %v", i+1, err)
					}
				}
			}
		})
	}
}

// flannelRules returns all lines of the host's rules that contain a name or a network of
// flannel's, in both variants of iptables and in nftables. It returns an empty string if there
// are no such lines.
func flannelRules(t *testing.T, h *lab.Host) string {
	t.Helper()
	return shell(t, h.Namespace, `for v in nft legacy; do for f in ip ip6; do ${f}tables-$v-save; done; done 2>/dev/null | grep -iE 'flannel|10\.[56]\.|fd00:[56]:' || true
		nft list ruleset 2>/dev/null | grep -E 'flannel-ipv' || true`)
}

// TestFirewallSwitch checks that a daemon that starts with another firewall, network or option
// leaves no rules of the former one, even if its state directory was lost.
//
//stages:rest it waits for several resyncs; TestFirewallSwitchIsLogged and TestFirewallRepair have one flavour each
func TestFirewallSwitch(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
	h, all := l.Host(1), flavours()
	another := map[string]any{"Network": "10.6.0.0/16", "IPv6Network": "fd00:6::/48"}
	foreign := `iptables-legacy -A INPUT -s 192.0.2.1 -j DROP; ip6tables-nft -A INPUT -s 2001:db8::1 -j DROP; nft add table ip6 foreign`
	shell(t, h.Namespace, foreign)
	for i, step := range []struct {
		flavour flavour
		args    []string
		keys    map[string]any
		forget  bool // whether the state directory is deleted before the start
		want    string
		not     string
	}{
		{flavour: all[2], want: "10.5.", not: "10.6."},
		{flavour: all[1], want: "10.5.", not: "10.6."},
		{flavour: all[0], want: "10.5.", not: "FLANNEL"},
		{flavour: all[1], want: "10.5.", not: "flannel-ipv"},
		{flavour: all[1], keys: another, want: "10.6.", not: "10.5."},
		{flavour: all[0], want: "10.5.", not: "FLANNEL"},
		{flavour: all[0], keys: another, want: "10.6.", not: "10.5."},
		{flavour: all[2], keys: another, forget: true, want: "10.6.", not: "flannel-ipv"},
		{flavour: all[2], forget: true, want: "10.5.", not: "10.6."},
		{flavour: all[2], args: []string{"--ip-masq=false"}, want: "FLANNEL-FWD", not: "POSTRTG"},
		{flavour: all[2], args: []string{"--ip-masq=false", "--iptables-forward-rules=false"}, not: "FLANNEL"},
		{flavour: all[0], args: []string{"--iptables-forward-rules=false"}, want: "flannel-ipv4"},
		{flavour: all[0], args: []string{"--ip-masq=false", "--iptables-forward-rules=false"}, not: "flannel"},
		{flavour: all[1], want: "fd00:5:"},
		{flavour: all[1], keys: map[string]any{"EnableIPv6": false}, want: "10.5.", not: "fd00:5:"},
	} {
		if d := h.Daemon(); d != nil {
			expectStop(t, d)
		}
		if step.forget {
			if err := os.RemoveAll(h.Path("/var/lib/flannel")); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.PutNetwork(testContext(t), masqueradeConfig(step.keys)); err != nil {
			t.Fatal(err)
		}
		startOne(t, h, lab.FlanneldOptions{
			Args: slices.Concat(step.flavour.args, []string{"--ip-masq"}, step.args), Env: []string{newPrograms(t, step.flavour).env},
		})
		eventually(t, fmt.Sprintf("step %d", i+1), func() error {
			now := flannelRules(t, h) + shell(t, h.Namespace, step.flavour.list)
			if !strings.Contains(now, step.want) || step.not != "" && strings.Contains(now, step.not) {
				return fmt.Errorf("want %q and not %q in:\n%s", step.want, step.not, now)
			}
			others := slices.DeleteFunc(flavours(), func(f flavour) bool { return f.name == step.flavour.name })
			for _, f := range others {
				if left := shell(t, h.Namespace, f.list); left != "" {
					return fmt.Errorf("%s still contains:\n%s", f.name, left)
				}
			}
			return nil
		})
	}
	if out := shell(t, h.Namespace, `iptables-legacy-save; ip6tables-nft-save; nft list tables`); strings.Count(out, "-j DROP") != 2 || !strings.Contains(out, "foreign") {
		t.Errorf("rules of other programs are missing:\n%s", out)
	}
}

// TestFirewallSwitchIsLogged changes the firewall in the configuration while the daemon is down.
// Until etcd answers, the daemon must use the firewall of the last known state. It must log this
// choice, and then the change.
func TestFirewallSwitchIsLogged(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false})}, "")
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	expectOnce(t, l.Host(1).Daemon(), `"firewall chosen" firewall="iptables" because="EnableNFTables is false"`)
	expectStop(t, l.Host(1).Daemon())
	if err := l.PutNetwork(testContext(t), masqueradeConfig(map[string]any{"EnableIPv6": false, "EnableNFTables": true})); err != nil {
		t.Fatal(err)
	}
	d := startOne(t, l.Host(1), lab.FlanneldOptions{})
	expectOnce(t, d, `"firewall chosen" firewall="iptables" because="EnableNFTables is false in the last known configuration"`)
	expectOnce(t, d, `"firewall chosen" firewall="nftables" because="EnableNFTables is true"`)
	expectStop(t, d)
	d = startOne(t, l.Host(1), lab.FlanneldOptions{})
	expectOnce(t, d, `"firewall chosen" firewall="nftables" because="EnableNFTables is true in the last known configuration"`)
}

// TestTwoDaemonsMasquerade checks that two daemons on one host, for two networks, do not change
// each other's rules. The second daemon is killed and starts again without masquerading, is
// killed again, and starts with masquerading.
//
//stages:rest TestMasquerade has one daemon, and TestTwoNetworksOnOneHost two
func TestTwoDaemonsMasquerade(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false})}, "")
			putKey(t, etcdClient(t, l), "/second/network/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`)
			h, env := l.Host(1), []string{newPrograms(t, f).env}
			args := slices.Concat(f.args, []string{"--ip-masq", "--iptables-resync=1"})
			startOne(t, h, lab.FlanneldOptions{Args: args, Env: env})
			first := h.Daemon()
			twin := lab.FlanneldOptions{Args: slices.Concat(args, second), Env: env}
			other := start(t, h, twin)
			expectLog(t, other, "traffic rules are in place")
			pause(t, 2*time.Second)
			rules := func() string { return shell(t, h.Namespace, f.list) }
			both := rules()
			for _, network := range []string{"10.5.0.0/16", "10.6.0.0/16"} {
				if n := strings.Count(both, network); n < 8 {
					t.Errorf("the rules contain %s %d times, want at least 8:\n%s", network, n, both)
				}
			}
			other.Kill()
			off := start(t, h, lab.FlanneldOptions{Args: append(slices.Clone(twin.Args), "--ip-masq=false"), Env: env})
			expectLog(t, off, "traffic rules are in place")
			pause(t, 2*time.Second)
			// Two rules accept forwarded packets of the network, and three are those of
			// --guard-tunnel.
			if less := rules(); strings.Count(less, "10.6.0.0/16") != 2+3 || strings.Count(less, "10.5.0.0/16") != strings.Count(both, "10.5.0.0/16") {
				t.Errorf("with masquerading off for 10.6.0.0/16 the rules contain it %d times, want 5, and 10.5.0.0/16 as before:\n%s", strings.Count(less, "10.6.0.0/16"), less)
			}
			off.Kill()
			expectLog(t, start(t, h, twin), "traffic rules are in place")
			pause(t, 2*time.Second)
			if again := rules(); sortLines(again) != sortLines(both) {
				t.Errorf("with masquerading on again the rules are\n%s\nwant\n%s", again, both)
			}
			if lines := linesWith(first, "repaired traffic rules"); len(lines) > 0 {
				t.Errorf("the first daemon repaired rules, so the second changed them: %q", lines)
			}
		})
	}
}

// TestXtablesLockTaken checks a daemon while another program has the lock of iptables for 30 s.
// The daemon must report failures, run at most one program at a time, and at most 20 in total.
// When the other program releases the lock, the daemon must become ready.
//
//stages:rest it waits until a lock is free; TestStopWhileTheLockIsTaken takes the same one
func TestXtablesLockTaken(t *testing.T) {
	t.Parallel()
	const taken = 30 * time.Second
	f := flavours()[2]
	l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false})}, "")
	h, programs := l.Host(1), newPrograms(t, f)
	lock := takeXtablesLock(t, h)
	d := start(t, h, lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{programs.env}})
	expectLog(t, d, "flanneld starts")
	most, end := 0, time.Now().Add(taken)
	for time.Now().Before(end) {
		pause(t, 100*time.Millisecond)
		most = max(most, len(strings.Fields(shell(t, h.Namespace, fmt.Sprintf("cat /proc/%d/task/*/children", d.PID())))))
	}
	if most > 1 {
		t.Errorf("the daemon ran %d programs at the same time, want at most one", most)
	}
	if _, body, err := d.Get(testContext(t), "/readyz"); err == nil || !strings.Contains(body, "traffic rules") {
		t.Errorf("/readyz answers %q, %v; want a failure of traffic rules", body, err)
	}
	if _, body, err := d.Get(testContext(t), "/metrics"); err != nil || strings.Contains(body, "flannel_firewall_failures_total 0\n") {
		t.Errorf("flannel_firewall_failures_total is 0, want more (%v):\n%s", err, body)
	}
	if got := statusOf(t, h).Firewall; got.Kind != "iptables" || got.Error == "" {
		t.Errorf("the status contains %+v, want iptables with an error", got)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	expectReady(t, d)
	t.Logf("%d programs ran, at most %d at the same time; ready %v after the lock was released", len(programs.run(t)), most, time.Since(end).Round(time.Millisecond))
	if n := len(programs.run(t)); n == 0 || n > 20 {
		t.Errorf("%d programs ran, want 1 to 20", n)
	}
}

// takeXtablesLock takes the lock of iptables on a host. To release it, close the file.
func takeXtablesLock(t *testing.T, h *lab.Host) *os.File {
	t.Helper()
	lock, err := os.Create(h.Path("/run/xtables.lock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return lock
}

// TestStopWhileTheLockIsTaken checks that the daemon stops without waiting for the lock of
// iptables, and stops its program that waits for the lock.
func TestStopWhileTheLockIsTaken(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false})}, "")
	h, f := l.Host(1), flavours()[2]
	takeXtablesLock(t, h)
	d := start(t, h, lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{newPrograms(t, f).env}})
	child := ""
	eventually(t, "iptables-restore waits for the lock", func() error {
		child = strings.TrimSpace(shell(t, h.Namespace, fmt.Sprintf("for c in $(cat /proc/%d/task/*/children); do grep -l restore /proc/$c/cmdline || true; done", d.PID())))
		if child == "" {
			return errors.New("no such child process")
		}
		return nil
	})
	expectStop(t, d)
	if _, err := os.Stat(child); err == nil {
		t.Errorf("the process of %s still runs", child)
	}
}

// TestFirewallAtRest checks that a daemon runs no program of iptables while nothing changes.
// iptables-legacy is an exception: the daemon must poll its rules. With nftables the daemon runs
// no program of iptables even at its start.
//
//stages:rest it watches daemons for 20 seconds in which nothing must happen
func TestFirewallAtRest(t *testing.T) {
	t.Parallel()
	const watched = 20 * time.Second
	for _, f := range flavours() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
			p := newPrograms(t, f)
			startOne(t, l.Host(1), lab.FlanneldOptions{Args: append(f.args, "--ip-masq"), Env: []string{p.env}})
			if f.name == "nftables" {
				if ran := p.run(t); len(ran) != 0 {
					t.Errorf("with nftables the start ran programs of iptables: %q", ran)
				}
			}
			pause(t, 2*time.Second)
			before := len(p.run(t))
			if before == 0 && f.name != "nftables" {
				t.Error("no program is recorded, want those of the start")
			}
			pause(t, watched)
			most := 0
			if f.legacy() {
				most = 2 * int(watched/(5*time.Second))
			}
			if ran := p.run(t)[before:]; len(ran) > most {
				t.Errorf("%d programs ran in %v, want at most %d: %q", len(ran), watched, most, ran)
			}
		})
	}
}

// TestNoPrograms checks which firewall a daemon chooses on a host without the programs of
// iptables, and what it reports if the flags require iptables. With the programs, it checks the
// choice with and without kube-proxy in nftables mode.
func TestNoPrograms(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Network: masqueradeConfig(map[string]any{"EnableIPv6": false, "EnableNFTables": true})}, "")
	h, env := l.Host(1), []string{"PATH=/nowhere"}
	startOne(t, h, lab.FlanneldOptions{Args: []string{"--ip-masq"}, Env: env})
	expectOnce(t, h.Daemon(), `"firewall chosen" firewall="nftables" because="EnableNFTables is true"`)
	expectStop(t, h.Daemon())
	startOne(t, h, lab.FlanneldOptions{Args: []string{"--ip-masq", "--firewall=auto"}, Env: env})
	expectOnce(t, h.Daemon(), `"firewall chosen" firewall="nftables" because="no iptables program is installed"`)
	expectStop(t, h.Daemon())
	d := start(t, h, lab.FlanneldOptions{Args: []string{"--ip-masq", "--firewall=iptables"}, Env: env})
	eventually(t, "/readyz reports the missing program", func() error {
		if _, body, err := d.Get(testContext(t), "/readyz"); err == nil || !strings.Contains(body, "iptables: program is not installed") {
			return fmt.Errorf("it answers %q, %w", body, err)
		}
		return nil
	})
	expectStop(t, d)
	startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=iptables", "--iptables-forward-rules=false"}, Env: env})
	expectStop(t, h.Daemon())
	nft(t, h.Namespace, "table ip kube-proxy { }")
	startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=auto"}})
	expectOnce(t, h.Daemon(), `because="kube-proxy runs in nftables mode"`)
	expectStop(t, h.Daemon())
	nft(t, h.Namespace, "delete table ip kube-proxy")
	startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=auto"}})
	expectOnce(t, h.Daemon(), `"firewall chosen" firewall="iptables"`)
}

// TestIptablesVariants checks hosts on which the programs iptables and ip6tables are of the same
// variant or of different ones, and fail at first. The daemon must never mistake its own rules
// for those of a former firewall and remove them, also not after a restart.
func TestIptablesVariants(t *testing.T) {
	t.Parallel()
	all := flavours()
	for _, tt := range []struct{ four, six string }{{"nft", "nft"}, {"nft", "legacy"}, {"legacy", "nft"}, {"legacy", "legacy"}} {
		t.Run(tt.four+" and "+tt.six, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
			h, p := l.Host(1), newPrograms(t, all[1])
			for family, variant := range map[string]string{"iptables": tt.four, "ip6tables": tt.six} {
				for _, suffix := range []string{"-save", "-restore"} {
					p.write(t, family+suffix, fmt.Sprintf("exec /usr/sbin/%s-%s%s \"$@\"", family, variant, suffix))
				}
				// The program fails twice: when the daemon asks the program for its variant, and
				// when the daemon writes the first rules.
				p.write(t, family, fmt.Sprintf("mkdir %[1]s/%[2]s.asked 2>/dev/null && exit 1\nmkdir %[1]s/%[2]s.again 2>/dev/null && exit 1\nexec /usr/sbin/%[2]s-%[3]s \"$@\"", p.dir, family, variant))
			}
			o := lab.FlanneldOptions{Args: []string{"--firewall=iptables", "--ip-masq"}, Env: []string{p.env}}
			startOne(t, h, o)
			expectLog(t, h.Daemon(), "traffic rules are not in place, trying again")
			for range 2 {
				for family, variant := range map[string]string{"iptables": tt.four, "ip6tables": tt.six} {
					for v, want := range map[string]int{"nft": 0, "legacy": 0, variant: 1} {
						rules := shell(t, h.Namespace, fmt.Sprintf("%s-%s-save -t nat 2>/dev/null || true", family, v))
						if n := strings.Count(rules, "-j FLANNEL-POSTRTG"); n != want {
							t.Errorf("%s-%s has %d jumps, want %d:\n%s", family, v, n, want, rules)
						}
					}
				}
				expectStop(t, h.Daemon())
				startOne(t, h, o)
				if lines := linesWith(h.Daemon(), "written=true"); len(lines) > 0 {
					t.Errorf("a restart wrote rules, want none: %q", lines)
				}
			}
			for _, d := range h.Daemons() {
				if lines := linesWith(d, "removed traffic rules"); len(lines) > 0 {
					t.Errorf("the daemon removed rules in use: %q", lines)
				}
			}
		})
	}
}

// TestVariantOfKubernetes checks that the daemon uses the variant of iptables that contains the
// rules of kube-proxy or kubelet when the daemon starts. Without such rules it uses the variant
// of the program iptables.
//
//stages:rest TestIptablesVariants chooses among the same programs
func TestVariantOfKubernetes(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
	h, nft, legacy := l.Host(1), flavours()[1], flavours()[2]
	in := func(f flavour, script string) string { // runs the script for both families
		script = strings.ReplaceAll(script, "PROGRAM", f.name) + "\n"
		return script + strings.ReplaceAll(script, "iptables", "ip6tables")
	}
	const (
		kubeProxy = `PROGRAM -t nat -N KUBE-SERVICES; PROGRAM -t nat -A PREROUTING -j KUBE-SERVICES; PROGRAM -t nat -A OUTPUT -j KUBE-SERVICES`
		noProxy   = `PROGRAM -t nat -D PREROUTING -j KUBE-SERVICES; PROGRAM -t nat -D OUTPUT -j KUBE-SERVICES; PROGRAM -t nat -X KUBE-SERVICES`
		kubelet   = `PROGRAM -t mangle -N KUBE-IPTABLES-HINT`
		noKubelet = `PROGRAM -t mangle -X KUBE-IPTABLES-HINT`
	)
	expectIn := func(what string, want flavour) {
		t.Helper()
		eventually(t, what, func() error {
			for f, jumps := range map[string]int{nft.name: 0, legacy.name: 0, want.name: 2} {
				rules := shell(t, h.Namespace, in(flavour{name: f}, "PROGRAM-save -t nat 2>/dev/null || true"))
				if n := strings.Count(rules, "-j FLANNEL-POSTRTG"); n != jumps {
					return fmt.Errorf("%s has %d jumps, want %d:\n%s", f, n, jumps, rules)
				}
			}
			return nil
		})
	}
	for _, tt := range []struct {
		what, script string
		standard     flavour // the variant of the program iptables
		want         flavour
		log          string
	}{
		{"no rules", "", legacy, legacy, `program="iptables" because="rules of others: 0 in each"`},
		{"only rules of an earlier run", "", nft, nft, `program="iptables" because="rules of others: 0 in each"`},
		{"kube-proxy in legacy", in(legacy, kubeProxy), nft, legacy, `program="iptables-legacy" because="rules of others: 4 there, 0 in nft"`},
		{"kubelet in nft", in(nft, kubelet), legacy, nft, `program="iptables-nft" because="it has the chain KUBE-IPTABLES-HINT"`},
		{"the same again", "", legacy, nft, `program="iptables-nft" because="it has the chain KUBE-IPTABLES-HINT"`},
		{"kubelet in legacy", in(nft, noKubelet) + in(legacy, kubelet), nft, legacy, `program="iptables-legacy" because="it has the chain KUBE-IPTABLES-HINT"`},
		{
			"kube-proxy in nft", in(legacy, noKubelet+";"+noProxy) + in(nft, kubeProxy), legacy, nft,
			`program="iptables-nft" because="rules of others: 4 there, 0 in legacy"`,
		},
	} {
		shell(t, h.Namespace, tt.script)
		d := startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=iptables", "--ip-masq", "--iptables-resync=1"}, Env: []string{newPrograms(t, tt.standard).env}})
		expectIn(tt.what, tt.want)
		expectOnce(t, d, `"variant of iptables chosen" `+tt.log)
		if again := tt.what == "the same again"; again != (len(linesWith(d, "written=true")) == 0) {
			t.Errorf("%s: rules were written: %v, want %v: %q", tt.what, again, !again, linesWith(d, "traffic rules are in place"))
		}
		expectStop(t, d)
	}

	// A running daemon keeps its variant, even if rules of other programs appear in another.
	d := startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=iptables", "--ip-masq", "--iptables-resync=1"}, Env: []string{newPrograms(t, legacy).env}})
	shell(t, h.Namespace, in(legacy, kubelet))
	pause(t, 3*time.Second)
	expectIn("kubelet in legacy after the start", nft)
	if lines := linesWith(d, "repaired"); len(lines) > 0 {
		t.Errorf("the daemon repaired rules, want none: %q", lines)
	}
	if out := shell(t, h.Namespace, in(nft, "PROGRAM-save -t nat")); strings.Count(out, "-j KUBE-SERVICES") != 4 {
		t.Errorf("rules of kube-proxy are missing:\n%s", out)
	}
}

// TestWithoutBridgeNetfilter checks that the daemon logs one warning for each family, and
// starts, on a host without br_netfilter. This includes a start from the last known state.
//
//stages:rest TestServicesOnABridge has bridges whose packets do not pass netfilter
func TestWithoutBridgeNetfilter(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: masqueradeConfig(nil)}, "")
	h := l.Host(1)
	shell(t, h.Namespace, "mount -t tmpfs none /proc/sys/net")
	for _, flavour := range []string{"iptables", "nftables", "nftables"} {
		startOne(t, h, lab.FlanneldOptions{Args: []string{"--firewall=" + flavour, "--ip-masq"}})
		for _, missing := range []string{"net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"} {
			expectOnce(t, h.Daemon(), fmt.Sprintf(`br_netfilter is not loaded: a pod that talks to a service which is served by a pod of the same host may get no answer; load the module br_netfilter and set this to 1" sysctl=%q`, missing))
		}
		expectStop(t, h.Daemon())
	}
}

// TestServicesOnABridge shows why flanneld warns if br_netfilter is missing. With a rule like
// kube-proxy's, in both of its modes, a pod reaches a service that another pod on the same bridge
// serves only if bridged packets pass netfilter.
func TestServicesOnABridge(t *testing.T) {
	t.Parallel()
	const service = "10.96.0.10"
	for name, rule := range map[string]string{
		"iptables": "iptables -t nat -A PREROUTING -d " + service + " -j DNAT --to-destination ",
		"nftables": "nft add table ip kube-proxy && nft add chain ip kube-proxy nat '{ type nat hook prerouting priority dstnat; }' && nft add rule ip kube-proxy nat ip daddr " + service + " dnat to ",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{Args: []string{"--firewall=" + name}})
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			h, client, server := l.Host(1), l.Pods()[0], l.Pods()[1]
			shell(t, h.Namespace, rule+server.Addr(prefix.IPv4).String())
			listener, err := server.Listen(testContext(t), "tcp", netip.AddrPortFrom(server.Addr(prefix.IPv4), 80).String())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = listener.Close() }()
			for _, filtered := range []bool{true, false} {
				shell(t, h.Namespace, fmt.Sprintf("echo %d >/proc/sys/net/bridge/bridge-nf-call-iptables", map[bool]int{true: 1}[filtered]))
				ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second)
				conn, err := client.Dial(ctx, "tcp", service+":80")
				cancel()
				if err == nil {
					_ = conn.Close()
				}
				if (err == nil) != filtered {
					t.Errorf("bridged packets pass netfilter: %v; dialling the service: %v", filtered, err)
				}
			}
		})
	}
}

// TestHostFirewall checks that pods reach each other if the host's firewall rejects forwarded
// packets, and that flanneld's rule comes after that of kube-proxy and before the one that
// rejects packets.
func TestHostFirewall(t *testing.T) {
	t.Parallel()
	for _, f := range flavours()[1:] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: masqueradeConfig(nil)}, "")
			for _, h := range l.Hosts() {
				for _, program := range []string{f.name, strings.Replace(f.name, "ip", "ip6", 1)} {
					shell(t, h.Namespace, fmt.Sprintf("%[1]s -N KUBE-FORWARD; %[1]s -A FORWARD -j KUBE-FORWARD; %[1]s -A FORWARD -j REJECT", program))
				}
			}
			startAll(t, l, lab.FlanneldOptions{Args: f.args, Env: []string{newPrograms(t, f).env}})
			expectMatrix(t, l)
			out := shell(t, l.Host(1).Namespace, f.name+" -S FORWARD")
			kube, own, reject := strings.Index(out, "KUBE-FORWARD"), strings.Index(out, "FLANNEL-FWD"), strings.Index(out, "REJECT")
			if kube > own || own > reject {
				t.Errorf("the order is not KUBE-FORWARD, FLANNEL-FWD, REJECT:\n%s", out)
			}
		})
	}
}

// TestBlackhole checks the unreachable routes: the daemon must add them and restore them, and pods must
// stay reachable. With a tunnel there is one for each network. With another backend there is one for each
// subnet of the host with --ip-blackhole-route. A start without the option must remove it.
func TestBlackhole(t *testing.T) {
	t.Parallel()
	for backend, without := range map[string]int{"vxlan": 2, "udp": 2, userspace: 2, "host-gw": 0, "alloc": 0, "extension": 0} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual}, backendConfig(backend))
			h, o := l.Host(1), lab.FlanneldOptions{Args: []string{"--ip-blackhole-route"}}
			startOne(t, h, o)
			count := func(want int) func() error {
				return func() error {
					out := shell(t, h.Namespace, "ip route; ip -6 route")
					if n := strings.Count(out, "metric 1073741824"); n != want || strings.Count(out, "unreachable") != want {
						return fmt.Errorf("%d unreachable routes, want %d:\n%s", n, want, out)
					}
					return nil
				}
			}
			eventually(t, "after the start", count(2))
			shell(t, h.Namespace, "ip route flush type unreachable; ip -6 route flush type unreachable")
			eventually(t, "after the routes were deleted", count(2))
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			pod := h.Pods()[0]
			for _, a := range pod.Addrs() {
				connect(t, h.Namespace, netip.Addr{}, pod.Namespace, a)
			}
			expectStop(t, h.Daemon())
			startOne(t, h, o)
			eventually(t, "after a restart", count(2))
			expectStop(t, h.Daemon())
			startOne(t, h, lab.FlanneldOptions{})
			eventually(t, "without the option", count(without))
		})
	}
}

// TestLockOfIptables starts a daemon on a host on which every user can read, and so hold, the lock of iptables.
func TestLockOfIptables(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig("vxlan"))
	h := l.Host(1)
	if out, err := h.Exec(testContext(t), "sh", "-c", "touch /run/xtables.lock && chmod 644 /run/xtables.lock"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	startAll(t, l, lab.FlanneldOptions{})
	info, err := os.Stat(h.Path("/run/xtables.lock"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: want the mode 0600", info, err)
	}
}
