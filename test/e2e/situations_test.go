// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// situation is something that happens to the external interface of a host, live or while its daemon is stopped.
type situation struct {
	name string
	// do makes the situation, and undo ends it: a script that runs once, and behind "each:" one for each
	// family. See uplinkHost.script.
	do, undo string
	// args are the flags of a daemon that starts in the situation. Without them, the situation also occurs live.
	args []string
	// stopped says that the situation makes no sense live.
	stopped bool
	losses  losses
	// moves is the variable of the address that the host publishes in the situation, and after that of the one after
	// it; empty for its own.
	moves, after string
	// restore is the script that undoes after.
	restore string
}

// losses says which packets may be lost in a situation.
type losses int

const (
	kept losses = iota // none, except by backends that carry packets themselves while they are away
	gap                // for three seconds
	away               // until the uplink is back, and for three seconds; with another address, until the store has answered
)

const (
	restored = "{ip} addr replace {own}/{bits} dev eth0{nodad}; {ip} route replace default via {router} dev eth0 metric 100"
	moved    = "each: {ip} addr del {own}/{bits} dev eth0; {ip} addr add {new}/{bits} dev eth0{nodad}; {ip} route replace default via {router} dev eth0 metric 100"
	back     = "each: {ip} addr del {new}/{bits} dev eth0; " + restored
	reboot   = "rm -r /run/flannel; for d in flannel.1 flannel-v6.1 flannel0 flannel-wg flannel-wg-v6; do ip link del $d 2>/dev/null || true; done; "
)

var situations = []situation{
	{name: "default route through the bridge of pods", do: "each: {ip} route add default dev cni0 metric 50", undo: "each: {ip} route del default dev cni0"},
	{
		name: "default route through the own device", do: "each: {ip} route add default dev {dev} metric 50 || ! ip link show {dev}",
		undo: "each: {ip} route del default dev {dev} metric 50 || true", // some backends remove their device when they stop
	},
	{name: "default route of a VPN", do: "each: {ip} route add default dev tun0 metric 50", undo: "each: {ip} route del default dev tun0"},
	{name: "default route without a carrier", do: "each: {ip} route add default dev dead0 metric 50", undo: "each: {ip} route del default dev dead0"},
	{
		name: "default route only through the bridge of pods", do: "each: {ip} route del default; {ip} route add default dev cni0 metric 50",
		undo: "each: {ip} route del default dev cni0; {ip} route add default via {router} dev eth0 metric 100",
	},
	{name: "no default route", do: "each: {ip} route del default", undo: "each: {ip} route add default via {router} dev eth0 metric 100"},
	{
		name: "host route of a VPN to a peer", do: "each: {ip} route add {peer} dev tun0 table 52; {ip} rule add pref 5270 lookup 52",
		undo: "each: {ip} rule del pref 5270; {ip} route flush table 52",
	},
	{name: "prefix renumbered", losses: gap, moves: "{nextaddr}", do: `each: {ip} addr add {next} dev eth0{nodad} valid_lft 3600 preferred_lft 3600
			{ip} addr change {own}/{bits} dev eth0 valid_lft 7200 preferred_lft 0`,
		undo: "each: {ip} addr change {own}/{bits} dev eth0 valid_lft forever preferred_lft forever; {ip} addr del {next} dev eth0"},
	{name: "address changed", losses: gap, moves: "{new}", do: moved, undo: back},
	{name: "address changed by a reboot", stopped: true, losses: gap, moves: "{new}", do: reboot + moved, undo: back},
	{name: "network card replaced", losses: gap, do: "ip link del eth0; {recreate}; each: " + restored},
	{
		name: "image swap with a single address and an alias", stopped: true, losses: gap,
		do: `rm -r /var/lib/flannel; each: {ip} addr flush dev eth0 scope global; {ip} addr add {alias} dev eth0{nodad}; {ip} addr add {own}/{one} dev eth0{nodad}
			{ip} route replace {net} dev eth0 src {own}; {ip} route replace default via {router} dev eth0 src {own} metric 100`,
		undo: "each: {ip} addr flush dev eth0 scope global; " + restored,
	},
	{name: "new devices without IPv6", stopped: true, losses: gap, do: reboot + "sysctl -w net.ipv6.conf.default.disable_ipv6=1 each:", undo: "sysctl -w net.ipv6.conf.default.disable_ipv6=0 each:"},
	{name: "no address", losses: away, do: "each: {ip} addr flush dev eth0 scope global", undo: "each: " + restored},
	{
		name: "no address, and another one later", stopped: true, losses: away, after: "{new}", restore: back,
		do: reboot + "each: {ip} addr flush dev eth0 scope global", undo: "each: " + strings.ReplaceAll(restored, "{own}", "{new}"),
	},
	{name: "interface down", losses: away, do: "ip link set eth0 down", undo: "ip link set eth0 up; each: " + restored},
	{name: "no interface", losses: away, do: "ip link del eth0", undo: "{recreate}; each: " + restored},
	{name: "flags that name the address of one family", args: []string{"--iface-regex={first}", ""}},
	{name: "flags that name all addresses", args: []string{"--iface={all}"}},
	{
		name: "address on lo", args: []string{"--iface={loopback}"}, losses: gap, moves: "{lo}",
		do: "each: {ip} addr add {lo}/{one} dev lo", undo: "each: {ip} addr del {lo}/{one} dev lo",
	},
}

// TestSituations plays the first situations of the external interface with real daemons, each live and over a
// restart. The host must keep its lease, and its address as long as it has one that leads to peers. flannelctl must
// name the interface.
func TestSituations(t *testing.T) { testSituations(t, "vxlan", dual, situations[:4]) }

// TestSituationsOfAllBackends plays all situations with all backends and families. With -short it plays each one
// once with each backend, and at least once with each set of families.
//
//stages:rest it takes minutes
func TestSituationsOfAllBackends(t *testing.T) {
	sets := [][]prefix.Family{v4, v6, dual}
	for b, backend := range []string{"vxlan", "vxlan, DirectRouting", "host-gw", "udp", userspace} {
		for f, families := range sets {
			played := situations
			if testing.Short() {
				played = nil
				for i := (b + f) % len(sets); i < len(situations); i += len(sets) {
					played = append(played, situations[i])
				}
			}
			t.Run(backend+", "+familiesName(families), func(t *testing.T) { testSituations(t, backend, families, played) })
		}
	}
}

// TestVMSituations plays the first situations with the WireGuard of the kernel.
//
//stages:long TestSituationsOfAllBackends has WireGuard in user space
func TestVMSituations(t *testing.T) { testSituations(t, "wireguard", dual, situations[:4]) }

// uplinkHost is the host to which situations occur.
type uplinkHost struct {
	*damagedHost
	peer *lab.Host
	had  []lease
	file string // the subnet file
}

func testSituations(t *testing.T, backend string, families []prefix.Family, all []situation) {
	t.Parallel()
	config := backendConfig(backend)
	if direct, ok := strings.CutSuffix(backend, ", DirectRouting"); ok {
		backend, config = direct, fmt.Sprintf(`{"Type":%q,"DirectRouting":true}`, direct)
	}
	l := newLab(t, lab.Config{Hosts: 2, Families: families}, config)
	p := &uplinkHost{damagedHost: &damagedHost{lab: l, backend: backend, host: l.Host(1)}, peer: l.Host(2)}
	p.mac = macOf(t, p.host, "eth0")

	// The VPN drops packets to pods. On the peer, the next prefix is on the same link.
	vpn := shell(t, p.peer.Namespace, `ip link add tun0 type veth peer name tun0 netns `+p.host.NetNS()+`; ip link set tun0 up
		iptables -t raw -A PREROUTING -i tun0 -d 10.5.0.0/16 -j DROP; ip6tables -t raw -A PREROUTING -i tun0 -d fd00:5::/48 -j DROP
		ip -br link show tun0 | { read -r _ _ mac _; echo $mac; }`)
	p.script(t, `ip link set tun0 up; ip link add dead0 type veth peer name far0; ip link set dead0 up
		sysctl -w net.ipv4.conf.dead0.ignore_routes_with_linkdown=1 net.ipv6.conf.dead0.ignore_routes_with_linkdown=1
		each: {ip} addr add {vpn} dev tun0{nodad}; {ip} neigh add {peer} lladdr `+strings.TrimSpace(vpn)+` dev tun0
		{ip} addr add {dead} dev dead0{nodad}; {ip} route del default; {ip} route add default via {router} dev eth0 metric 100`)
	for _, f := range families {
		shell(t, p.peer.Namespace, p.expand("{ip} addr add {vpnpeer} dev tun0{nodad}; {ip} route add {nextnet} dev eth0; {ip} route add {lo} via {own} dev eth0", f))
		shell(t, l.Underlay(), p.expand("{ip} route add {nextnet} dev l2-1", f))
	}
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	p.had, p.file = leases(t, l), p.host.Path(lab.SubnetFile)

	for _, s := range all {
		live := s.stopped || s.args != nil || t.Run(s.name+", live", func(t *testing.T) { p.play(t, s, false) })
		if !live || !t.Run(s.name+", restart", func(t *testing.T) { p.play(t, s, true) }) {
			return // the host may be in an unknown state
		}
	}
}

// play makes the situation, checks what the host does, and ends it. restart means that the daemon is stopped
// while the situation begins.
func (p *uplinkHost) play(t *testing.T, s situation, restart bool) {
	refused := p.backend == "host-gw" && s.name == "address on lo" // there is no gateway on lo
	before, err := os.ReadFile(p.file)
	if err != nil {
		t.Fatal(err)
	}
	flows := startFlows(t, p.lab, 100)
	var args []string
	for _, a := range s.args {
		args = append(args, p.expandArg(a))
	}

	begin := time.Now().Add(-300 * time.Millisecond) // packets of this time may be on their way, on a busy machine
	if restart {
		expectStop(t, p.host.Daemon())
	}
	if restart && s.losses == away {
		if err := os.Remove(p.file); err != nil {
			t.Fatal(err)
		}
	}
	p.script(t, s.do)
	switch {
	case restart && s.losses == away:
		start(t, p.host, lab.FlanneldOptions{Args: args})
	case restart:
		p.expectChoice(t, s, append([]string{"--no-daemon", "--"}, args...)...)
		startOne(t, p.host, lab.FlanneldOptions{Args: args})
	}
	end := time.Now()
	pause(t, time.Second) // twice as long as a change of the choice takes

	eventually(t, "the subnet file", func() error {
		now, err := os.ReadFile(p.file)
		if err == nil && string(now) != string(before) {
			err = fmt.Errorf("it is %s, want %s", now, before)
		}
		return err
	})
	eventually(t, "the lease", func() error { return p.published(t, s.moves) })
	if s.losses != away {
		p.expectChoice(t, s)
	}
	switch {
	case refused:
		expectLog(t, p.host.Daemon(), "is not on a network of lo")
	case s.moves != "":
		expectMatrix(t, p.lab)
	}

	if s.args != nil { // flags stay until the next restart
		expectStop(t, p.host.Daemon())
		startOne(t, p.host, lab.FlanneldOptions{})
		end = time.Now()
	}
	p.script(t, s.undo)
	undone := time.Now()
	expectReady(t, p.host.Daemon())
	eventually(t, "the lease after the situation", func() error { return p.published(t, s.after) })
	if s.losses != kept && !refused {
		expectConverged(t, p.lab)
	}
	lost := stopFlows(flows)
	if s.restore != "" {
		p.script(t, s.restore)
		eventually(t, "the lease at the end", func() error { return p.published(t, "") })
	}
	for i, f := range lost {
		ok := f.Sent > 0
		switch {
		case len(f.Lost) == 0 || refused:
		case s.losses == gap:
			ok = ok && f.Gap < 3*time.Second+end.Sub(begin)
		case s.losses == away:
			limit := 3 * time.Second
			if p.backend == userspace {
				limit += 5333 * time.Millisecond // WireGuard's Rekey-Timeout with jitter: a handshake was lost meanwhile
			}
			ok = ok && (s.after != "" || f.End.Before(undone.Add(limit)))
		case restart && (p.backend == "udp" || p.backend == userspace):
			ok = ok && f.Begin.After(begin) && f.End.Before(end.Add(time.Second))
		default:
			ok = false
		}
		report := t.Logf
		if !ok {
			report = t.Errorf
		}
		if !ok || len(f.Lost) > 0 {
			report("%s: %d of %d lost, longest gap %v, from %v to %v, the daemon was there at %v, the situation was over at %v",
				flows[i].name, len(f.Lost), f.Sent, f.Gap, f.Begin.Sub(begin), f.End.Sub(begin), end.Sub(begin), undone.Sub(begin))
		}
	}
}

// published returns an error unless the leases have the same keys as at the start, and all addresses of the host
// are those of the variable addr; empty means its own.
func (p *uplinkHost) published(t *testing.T, addr string) error {
	now := leases(t, p.lab)
	ok := slices.EqualFunc(now, p.had, func(a, b lease) bool { return a.Key == b.Key })
	for _, f := range p.lab.Families() {
		ok = ok && slices.ContainsFunc(now, func(l lease) bool { return strings.Contains(l.Value, `"`+p.expand(cmp.Or(addr, "{own}"), f)+`"`) })
	}
	if !ok {
		return fmt.Errorf("the leases are %v, they were %v", now, p.had)
	}
	return nil
}

// expectChoice expects that flannelctl interface marks the interface in use.
func (p *uplinkHost) expectChoice(t *testing.T, s situation, args ...string) {
	t.Helper()
	want := "*   eth0 "
	if s.name == "address on lo" {
		want = "*   lo "
	}
	eventually(t, "flannelctl interface", func() error {
		out, err := flannelctl(t, p.host, append([]string{"interface"}, args...)...)
		if err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("want %q", want)
		}
		if err != nil {
			err = fmt.Errorf("%w:\n%s", err, out)
		}
		return err
	})
}

// script runs a script of a situation.
func (p *uplinkHost) script(t *testing.T, text string) {
	t.Helper()
	once, each, _ := strings.Cut(text, "each:")
	all := once
	for _, f := range p.lab.Families() {
		all += "\n" + p.expand(each, f)
	}
	p.run(t, strings.ReplaceAll(all, "{recreate}", p.recreateScript()))
}

// expandArg replaces the variables in braces in a flag.
func (p *uplinkHost) expandArg(arg string) string {
	join := func(variable string) string {
		var texts []string
		for _, f := range p.lab.Families() {
			texts = append(texts, p.expand(variable, f))
		}
		return strings.Join(texts, ",")
	}
	first := p.expand("{own}", p.lab.Families()[0])
	return strings.NewReplacer("{first}", "^"+first+"$", "{all}", join("{own}"), "{loopback}", join("{lo}")).Replace(arg)
}

// expand replaces the variables in braces by the values of one family.
func (p *uplinkHost) expand(text string, f prefix.Family) string {
	values := map[string]string{
		"{ip}": "ip -4", "{bits}": "24", "{one}": "32", "{nodad}": "", "{net}": "192.168.77.0/24", "{new}": "192.168.77.101",
		"{nextnet}": "192.168.78.0/24", "{nextaddr}": "192.168.78.1", "{next}": "192.168.78.1/24", "{alias}": "192.168.7.1/24", "{lo}": "192.168.255.1",
		"{vpn}": "10.8.0.6/24", "{vpnpeer}": "10.8.0.7/24", "{dead}": "10.9.0.6/24",
	}
	if f == prefix.IPv6 {
		values = map[string]string{
			"{ip}": "ip -6", "{bits}": "64", "{one}": "128", "{nodad}": " nodad", "{net}": "fd00:77::/64", "{new}": "fd00:77::101",
			"{nextnet}": "fd00:78::/64", "{nextaddr}": "fd00:78::1", "{next}": "fd00:78::1/64", "{alias}": "fd00:7::1/64", "{lo}": "fd00:255::1",
			"{vpn}": "fd00:8::6/64", "{vpnpeer}": "fd00:8::7/64", "{dead}": "fd00:9::6/64",
		}
	}
	values["{router}"], values["{own}"], values["{peer}"] = routerOf(f), p.host.Addr(f).String(), p.peer.Addr(f).String()
	values["{dev}"] = "cni0"
	if p.backend == "udp" {
		values["{dev}"] = "flannel0"
	} else if dev, ok := devices[p.backend][f]; ok {
		values["{dev}"] = dev
	}
	for variable, value := range values {
		text = strings.ReplaceAll(text, variable, value)
	}
	return text
}
