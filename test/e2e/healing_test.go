// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// repairTimeout is the time within which the daemon must repair any damage. On an idle machine a repair
// takes less than a second. On a busy or emulated one it takes several times as long. The daemon must not
// wait for its next resync, which is minutes away. Tests log the real times.
const repairTimeout = 20 * time.Second

// emulated reports whether the test runs in the guest of test/vm, whose machine is emulated. Everything
// takes several times as long there.
func emulated() bool { return os.Getenv("EMULATED") != "" }

// pollInterval returns the interval at which tests poll the kernel. On an emulated machine
// polling costs more than the repair.
func pollInterval() time.Duration {
	if emulated() {
		return 300 * time.Millisecond
	}
	return 20 * time.Millisecond
}

// damage is a change of the kernel's objects on the first host of a lab, which the daemon must undo.
type damage struct {
	name string
	do   string // a shell script; damagedHost.expandScript replaces its variables in braces
	// restores is set if the end of the script restores something that the daemon needs for the repair.
	// The time of the repair then counts from the end of the script, and otherwise from its start.
	restores bool
	// moves is set if the daemon must move to another external interface. The kernel's state may be right
	// even before that. The test waits until the daemon has moved, because WireGuard in user space loses
	// packets during the move.
	moves bool
}

// underlayDamages are damages of the underlay. Tests use them with every backend.
var underlayDamages = []damage{
	{name: "underlay down and up", do: "ip link set eth0 down; sleep 0.2; ip link set eth0 up; {restore}", restores: true},
	{name: "underlay deleted and created again", do: "ip link del eth0; sleep 0.2; {recreate}; {restore}", restores: true, moves: true},
}

// deleteAllRoutes deletes each route of the backend once. "ip route flush" repeats until no route is
// left, while flanneld restores routes. In rare cases it then fails with "No such process".
const deleteAllRoutes = `{ip} route show proto 98 | sed -E 's/^((unreachable )?[^ ]+).*/route del \1/' | {ip} -batch -`

// damages contains the damages of the kernel's objects of each backend.
var damages = map[string][]damage{
	"vxlan": {
		{name: "route deleted", do: "{ip} route del {subnet}"},
		{name: "all routes deleted", do: deleteAllRoutes},
		{name: "neighbour deleted", do: "{ip} neigh del {vtep} dev {dev}"},
		{name: "all neighbours deleted", do: "{ip} neigh flush nud permanent dev {dev}"},
		{name: "FDB entry deleted", do: "bridge fdb del {mac} dev {dev} dst {peer} self"},
		{name: "all FDB entries deleted", do: "bridge fdb show dev {dev} | grep 'dst {net}' | while read mac dst ip x; do bridge fdb del $mac dev {dev} dst $ip self; done"},
		{name: "wrong MAC", do: "{ip} neigh replace {vtep} lladdr 02:de:ad:00:00:01 dev {dev} nud permanent"},
		{name: "wrong VTEP", do: "bridge fdb replace {mac} dev {dev} dst {wrong} self permanent"},
		{name: "wrong gateway", do: "{ip} route replace {subnet} via {vtep2} dev {dev} onlink"},
		{name: "wrong device", do: "{ip} route replace {subnet} via {router} dev eth0"},
		{name: "device deleted", do: "ip link del {dev}"},
		{name: "device down", do: "ip link set {dev} down"},
		{name: "MAC changed", do: "ip link set {dev} address 02:de:ad:00:00:02"},
		{name: "MTU changed", do: "ip link set {dev} mtu 1300"},
		{name: "address deleted", do: "{ip} addr del {own} dev {dev}"},
		{name: "address changed", do: "{ip} addr del {own} dev {dev}; {ip} addr add {vtep} dev {dev}"},
		{name: "local address changed", do: "ip link set {dev} type vxlan id 1 local {wrong}"},
	},
	"udp": {
		{name: "route deleted", do: deleteAllRoutes},
		{name: "wrong device", do: "{ip} route replace $({ip} route show proto 98 | sed '/^unreachable/d; s/ .*//') via {router} dev eth0"},
		{name: "device deleted", do: "ip link del flannel0"},
		{name: "device down", do: "ip link set flannel0 down"},
		{name: "MTU changed", do: "ip link set flannel0 mtu 1300"},
		{name: "address deleted", do: "{ip} addr del {own} dev flannel0"},
	},
	"host-gw": {
		{name: "route deleted", do: "{ip} route del {subnet}"},
		{name: "all routes deleted", do: deleteAllRoutes},
		{name: "wrong gateway", do: "{ip} route replace {subnet} via {router} dev eth0"},
		{name: "wrong device", do: "{ip} route replace {subnet} dev cni0"},
	},
	"ipip": {
		{name: "route deleted", do: "{ip} route del {subnet}"},
		{name: "all routes deleted", do: deleteAllRoutes},
		{name: "no gateway", do: "{ip} route replace {subnet} dev {dev}"},
		{name: "wrong device", do: "{ip} route replace {subnet} via {router} dev eth0"},
		{name: "device deleted", do: "ip link del {dev}"},
		{name: "device down", do: "ip link set {dev} down"},
		{name: "MTU changed", do: "ip link set {dev} mtu 1300"},
		{name: "address deleted", do: "{ip} addr del {own} dev {dev}"},
	},
	"wireguard": wireguardDamages,
	userspace:   wireguardDamages,
}

var wireguardDamages = []damage{
	{name: "route deleted", do: deleteAllRoutes},
	{name: "device deleted", do: "ip link del {dev}"},
	{name: "device down", do: "ip link set {dev} down"},
	{name: "MTU changed", do: "ip link set {dev} mtu 1300"},
	{name: "address deleted", do: "{ip} addr del {own} dev {dev}"},
}

// devices contains the names of the devices that each backend creates, by address family. The backends
// host-gw and udp have no entry: their damages use no {dev}.
var devices = map[string]map[prefix.Family]string{
	"vxlan": {prefix.IPv4: "flannel.1", prefix.IPv6: "flannel-v6.1"},
	"ipip":  {prefix.IPv4: "flannel.ipip", prefix.IPv6: "flannel-v6.ipip"},

	"wireguard": {prefix.IPv4: "flannel-wg", prefix.IPv6: "flannel-wg-v6"},
	userspace:   {prefix.IPv4: "flannel-wg", prefix.IPv6: "flannel-wg-v6"},
}

// TestHealing checks that the daemon repairs all damages with vxlan and host-gw on dual-stack hosts.
func TestHealing(t *testing.T) {
	t.Parallel()
	testHealing(t, dual)
}

// TestHealingOfOneFamily is TestHealing on hosts with a single address family.
//
//stages:long TestHealing does the same with both families
func TestHealingOfOneFamily(t *testing.T) {
	t.Parallel()
	testHealing(t, v4, v6)
}

// testHealing applies the damages with vxlan and host-gw, in a lab for each set of families.
func testHealing(t *testing.T, hosts ...[]prefix.Family) {
	t.Helper()
	for _, backend := range []string{"vxlan", "host-gw"} {
		for _, families := range hosts {
			t.Run(backend+"/"+familiesName(families), func(t *testing.T) {
				t.Parallel()
				newDamagedHost(t, backend, families).testAllRepairs(t)
			})
		}
	}
}

// testAllRepairs applies all damages of the backend and of the underlay, one after the other, and checks
// the repairs. Then it changes the MTU and the addresses of the underlay. On an emulated machine it
// applies each damage of the backend to one family only.
func (p *damagedHost) testAllRepairs(t *testing.T) {
	families := p.lab.Families()
	for i, one := range damages[p.backend] {
		for j, f := range families {
			if emulated() && i%len(families) != j {
				continue // apply each damage to one family only, to save time
			}
			t.Run(one.name+" "+f.String(), func(t *testing.T) { p.testRepair(t, one, f) })
		}
	}
	for _, one := range underlayDamages {
		t.Run(one.name, func(t *testing.T) { p.testRepair(t, one, families[0]) })
	}
	t.Run("underlay MTU changed", p.testMTUChange)
	t.Run("underlay address changed", p.testAddressChange)
	expectMatrix(t, p.lab)
}

// damagedHost is the host whose kernel objects a test damages: the first one of its lab.
type damagedHost struct {
	lab     *lab.Lab
	backend string
	host    *lab.Host
	mac     string // of eth0
}

// newDamagedHost starts a lab of three hosts with pods, and waits until these reach each other. args are
// flags of the daemons.
func newDamagedHost(t *testing.T, backend string, families []prefix.Family, args ...string) *damagedHost {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 3, Families: families}, backendConfig(backend))
	startAll(t, l, lab.FlanneldOptions{Args: args})
	expectConverged(t, l)
	p := &damagedHost{lab: l, backend: backend, host: l.Host(1)}
	p.mac = macOf(t, p.host, "eth0")
	return p
}

// macOf returns the MAC of a device, or an empty string if it is no Ethernet device.
func macOf(t *testing.T, h *lab.Host, dev string) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "ip", "-o", "link", "show", dev)
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(out), "link/ether ")
	mac, _, _ := strings.Cut(after, " ")
	return mac
}

// run runs a shell script on the host and returns its output. The test fails if a command of the script
// fails.
func (p *damagedHost) run(t *testing.T, script string) string {
	t.Helper()
	out, err := p.host.Exec(testContext(t), "sh", "-ec", script)
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// stateCommands contains the commands that print flannel's objects, and all routes, in a host's kernel.
var stateCommands = []struct {
	command string
	not     string         // ignore lines that begin with this
	has     *regexp.Regexp // ignore lines that do not match this
	// ignored matches the parts of a line that tests ignore: the numbers of devices, the protocol
	// and the onlink flag of a route, and values that change by themselves.
	ignored *regexp.Regexp
}{
	{"ip -o -d link", "", regexp.MustCompile(`^\d+: flannel`), regexp.MustCompile(`^\d+: | promiscuity.*maxmtu \d+| addrgenmode.*| state [A-Z]+| permaddr \S+|qlen \d+`)},
	{"ip -o addr show scope global", "", regexp.MustCompile(`flannel`), regexp.MustCompile(`^\d+: `)},
	{"ip route show; ip -6 route show", "fe80", everyLine, regexp.MustCompile(` proto .*| metric 1024 pref medium$`)},
	{"ip neigh show nud permanent", "", regexp.MustCompile(` dev flannel`), nothing},
	// Lines of peers have nine columns. Traffic changes the last four, and the port of a peer
	// behind NAT.
	{"wg show all dump 2>/dev/null", "", regexp.MustCompile(`^(?:\S+\t){8}`), regexp.MustCompile(`:\d+\t|(?:\t\S+){4}$`)},
	{"bridge fdb show", "00:00", regexp.MustCompile(` dev flannel.* permanent`), nothing},
}

var everyLine, nothing = regexp.MustCompile(`.`), regexp.MustCompile(`^$`)

// kernelState returns flannel's objects and all routes in the host's kernel as sorted lines, without the
// parts that tests ignore. It runs all commands in one shell, because starting a program is slow on an
// emulated machine.
func kernelState(t *testing.T, h *lab.Host) []string {
	t.Helper()
	const next = "--"
	var script strings.Builder
	for _, c := range stateCommands {
		fmt.Fprintf(&script, "%s\necho %s\n", c.command, next)
	}
	out, err := h.Exec(testContext(t), "sh", "-c", script.String())
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var lines []string
	at := 0
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		c := stateCommands[at]
		switch {
		case line == next:
			at++
		case c.has.MatchString(line) && (c.not == "" || !strings.HasPrefix(line, c.not)):
			lines = append(lines, strings.Join(strings.Fields(c.ignored.ReplaceAllString(line, " ")), " "))
		}
	}
	slices.Sort(lines)
	return lines
}

// expectKernelState waits until kernelState returns want. It returns the time at which it began to read
// that state. The test fails after repairTimeout.
func expectKernelState(t *testing.T, h *lab.Host, want []string) time.Time {
	t.Helper()
	deadline := time.Now().Add(repairTimeout)
	for {
		began := time.Now()
		have := kernelState(t, h)
		if slices.Equal(have, want) {
			return began
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is not repaired after %s; missing:\n  %s\nsurplus:\n  %s", h.Name(), repairTimeout,
				strings.Join(linesMissing(want, have), "\n  "), strings.Join(linesMissing(have, want), "\n  "))
		}
		<-time.After(pollInterval())
	}
}

// linesMissing returns the lines of a that are not in b.
func linesMissing(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(line string) bool { return slices.Contains(b, line) })
}

// testRepair applies a damage for one family. It waits until the kernel's state is the same as before,
// and checks that pods reach each other.
func (p *damagedHost) testRepair(t *testing.T, d damage, f prefix.Family) {
	const moved = `"this host's lease is up to date"`
	before, moves := kernelState(t, p.host), len(linesWith(p.host.Daemon(), moved))
	script := p.expandScript(t, d.do, f)
	start := time.Now()
	p.run(t, script)
	if d.restores {
		start = time.Now()
	}
	if d.moves {
		eventuallyRepaired(t, "the other external interface", func() error {
			if len(linesWith(p.host.Daemon(), moved)) == moves {
				return errors.New("the daemon does not use it")
			}
			return nil
		})
	}
	repaired := expectKernelState(t, p.host, before)
	t.Logf("repaired after %v", repaired.Sub(start).Round(time.Millisecond))
	p.expectPings(t)
}

// expectPings checks that the first pod of the host and all other pods reach each other. No request may
// be lost, but on a busy machine the answer may take long.
func (p *damagedHost) expectPings(t *testing.T) {
	t.Helper()
	options := lab.Echo{Timeout: repairTimeout}
	own := p.host.Pods()[0]
	for _, pod := range p.lab.Pods() {
		if pod == own {
			continue
		}
		for i, a := range pod.Addrs() {
			if _, err := own.Ping(testContext(t), a, options); err != nil {
				t.Errorf("%s to %s: %v", own.Name(), a, err)
			}
			if _, err := pod.Ping(testContext(t), own.Addrs()[i], options); err != nil {
				t.Errorf("%s to %s: %v", pod.Name(), own.Addrs()[i], err)
			}
		}
	}
}

// expandScript replaces the variables in braces by the values of the host and its peers for one family.
func (p *damagedHost) expandScript(t *testing.T, text string, f prefix.Family) string {
	t.Helper()
	ip, own, wrong, network := "ip -4", "/32", "192.168.77.77", "192.168.77."
	if f == prefix.IPv6 {
		ip, own, wrong, network = "ip -6", "/128", "fd00:77::77", "fd00:77:"
	}
	dev := devices[p.backend][f]
	subnets := make([]netip.Prefix, 4)
	for i, h := range p.lab.Hosts() {
		subnets[i+1] = podSubnet(t, h, f)
	}
	mac := ""
	if strings.Contains(text, "{mac}") {
		mac = macOf(t, p.lab.Host(2), dev)
	}
	return strings.NewReplacer(
		"{ip}", ip, "{dev}", dev, "{router}", routerOf(f), "{wrong}", wrong, "{net}", network, "{mac}", mac,
		"{own}", subnets[1].Addr().String()+own,
		"{subnet}", subnets[2].String(), "{vtep}", subnets[2].Addr().String(), "{vtep2}", subnets[3].Addr().String(),
		"{peer}", p.lab.Host(2).Addr(f).String(),
		"{restore}", p.restoreScript(func(f prefix.Family) netip.Addr { return p.host.Addr(f) }), "{recreate}", p.recreateScript(),
	).Replace(text)
}

// podSubnet returns the subnet of the host's first pod, which is that of its lease.
func podSubnet(t *testing.T, h *lab.Host, f prefix.Family) netip.Prefix {
	t.Helper()
	bits := 24
	if f == prefix.IPv6 {
		bits = 64
	}
	p, err := h.Pods()[0].Addr(f).Prefix(bits)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// routerOf returns the address of the underlay's router in the segment of the hosts.
func routerOf(f prefix.Family) string {
	if f == prefix.IPv6 {
		return "fd00:77::fe"
	}
	return "192.168.77.254"
}

// restoreScript returns a script that gives eth0 addresses and default routes again, as a network manager
// does when a link comes back: for IPv4 at once, and for IPv6 two seconds later. addr returns the address
// of a family.
func (p *damagedHost) restoreScript(addr func(prefix.Family) netip.Addr) string {
	var script []string
	for _, f := range p.lab.Families() {
		ip, bits := "ip -4", 24
		if f == prefix.IPv6 {
			ip, bits = "ip -6", 64
			script = append(script, "sleep 2")
		}
		nodad := ""
		if f == prefix.IPv6 {
			nodad = " nodad"
		}
		script = append(script,
			fmt.Sprintf("%s addr replace %s/%d dev eth0%s", ip, addr(f), bits, nodad),
			fmt.Sprintf("%s route replace default via %s dev eth0", ip, routerOf(f)))
	}
	return strings.Join(script, "; ")
}

// recreateScript returns a script that creates eth0 and its port at the router, as the lab did.
func (p *damagedHost) recreateScript() string {
	router, _, _ := strings.Cut(strings.TrimPrefix(p.lab.Underlay().Nsenter(), "nsenter -t "), " ")
	return fmt.Sprintf("ip link add eth0 address %s type veth peer name %s; ip link set %s netns %s; "+
		"nsenter -t %s -n ip link set %s master l2-1 up; echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad; ip link set eth0 up",
		p.mac, p.host.Name(), p.host.Name(), router, router, p.host.Name())
}

// testMTUChange lowers the MTU of the underlay and raises it again. The MTUs of flannel's devices and the
// MTU in subnet.env must follow.
func (p *damagedHost) testMTUChange(t *testing.T) {
	before, env := kernelState(t, p.host), readSubnetFile(t, p.host)
	var mtu int
	_, after, _ := strings.Cut(env, "FLANNEL_MTU=")
	if _, err := fmt.Sscan(after, &mtu); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, line := range before {
		if head, tail, ok := strings.Cut(line, " mtu "); ok {
			had, rest, _ := strings.Cut(tail, " ")
			n, err := strconv.Atoi(had)
			if err != nil {
				t.Fatal(err)
			}
			line = fmt.Sprintf("%s mtu %d %s", head, n-100, rest)
		}
		want = append(want, line)
	}
	for _, step := range []struct {
		mtu  int
		want []string
	}{{1400, want}, {1500, before}} {
		start := time.Now()
		p.run(t, fmt.Sprintf("ip link set eth0 mtu %d", step.mtu))
		repaired := expectKernelState(t, p.host, step.want)
		t.Logf("the MTU %d is applied after %v", step.mtu, repaired.Sub(start).Round(time.Millisecond))
		line := fmt.Sprintf("FLANNEL_MTU=%d\n", mtu+step.mtu-1500)
		eventuallyRepaired(t, "subnet.env", func() error {
			if text := readSubnetFile(t, p.host); !strings.Contains(text, line) {
				return fmt.Errorf("it does not contain %q: %q", line, text)
			}
			return nil
		})
	}
	p.expectPings(t)
}

// eventuallyRepaired is eventually with repairTimeout as the limit.
func eventuallyRepaired(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(repairTimeout)
	for err := check(); err != nil; err = check() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// testAddressChange changes the addresses of the host, as DHCP may do, and then changes them back. The
// host must keep its subnet, its MAC and its process, and its peers must send to the new addresses.
func (p *damagedHost) testAddressChange(t *testing.T) {
	l, d := p.lab, p.host.Daemon()
	had := leases(t, l)
	before := map[*lab.Host][]string{}
	for _, h := range l.Hosts() {
		before[h] = kernelState(t, h)
	}
	other := func(f prefix.Family) netip.Addr {
		if f == prefix.IPv6 {
			return netip.MustParseAddr("fd00:77::101")
		}
		return netip.MustParseAddr("192.168.77.101")
	}
	own := func(f prefix.Family) netip.Addr { return p.host.Addr(f) }
	for _, step := range []struct {
		from, to func(prefix.Family) netip.Addr
	}{{own, other}, {other, own}} {
		moved := func(text string) string {
			for _, f := range l.Families() {
				text = replaceWord(text, p.host.Addr(f).String(), step.to(f).String())
			}
			return text
		}
		var script []string
		for _, f := range l.Families() {
			script = append(script, fmt.Sprintf("ip addr del %s/%d dev eth0", step.from(f), map[prefix.Family]int{prefix.IPv4: 24, prefix.IPv6: 64}[f]))
		}
		start := time.Now()
		p.run(t, strings.Join(script, "; ")+"; "+strings.Replace(p.restoreScript(step.to), "sleep 2; ", "", 1))
		for _, h := range l.Hosts() {
			var want []string
			for _, line := range before[h] {
				want = append(want, moved(line))
			}
			slices.Sort(want)
			t.Logf("%s has applied the addresses after %v", h.Name(), expectKernelState(t, h, want).Sub(start).Round(time.Millisecond))
		}
		eventuallyRepaired(t, "leases", func() error {
			now := leases(t, l)
			for i := range had {
				if i >= len(now) || moved(had[i].Value) != now[i].Value || had[i].Key != now[i].Key {
					return fmt.Errorf("they are\n%v, want\n%v with the new addresses", now, had)
				}
			}
			return nil
		})
		if tunIndex(t, p.host) != 0 { // daemons carry the packets, and the kernel does not show to which addresses they send
			expectConverged(t, l)
		}
		p.expectPings(t)
	}
	if err := d.Ended(); err != nil || d != p.host.Daemon() {
		t.Errorf("the daemon ended or was replaced: %v", err)
	}
}

// replaceWord returns text with all occurrences of a whole word, such as an address, replaced.
func replaceWord(text, word, by string) string {
	return regexp.MustCompile(`(^|[^\w.:])`+regexp.QuoteMeta(word)+`($|[^\w.:])`).ReplaceAllString(text, "${1}"+by+"${2}")
}

// TestDirectRouteFollowsTheUnderlay checks the route to a peer that moves behind the router and back. The
// daemon must send by VXLAN while the peer is behind the router, and by a plain route afterwards.
func TestDirectRouteFollowsTheUnderlay(t *testing.T) {
	t.Parallel()
	for _, families := range [][]prefix.Family{v4, v6, dual} {
		t.Run(familiesName(families), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: families}, `{"Type":"vxlan","DirectRouting":true}`)
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			p := &damagedHost{lab: l, host: l.Host(1)}
			direct := kernelState(t, p.host)
			for _, f := range families {
				peer := prefix.Host(l.Host(2).Addr(f))
				pods := podSubnet(t, l.Host(2), f)
				p.run(t, "sysctl -q -w net.ipv4.conf.all.accept_redirects=0 net.ipv4.conf.eth0.accept_redirects=0 net.ipv6.conf.all.accept_redirects=0 net.ipv6.conf.eth0.accept_redirects=0")
				start := time.Now()
				p.run(t, fmt.Sprintf("ip route add %s via %s dev eth0", peer, routerOf(f)))
				eventuallyRepaired(t, "the route to the peer uses VXLAN", func() error {
					now := strings.Join(kernelState(t, p.host), "\n")
					for _, want := range []string{fmt.Sprintf("%s via %s dev flannel", pods, pods.Addr()), "dst " + peer.Addr().String() + " "} {
						if !strings.Contains(now, want) {
							return fmt.Errorf("no %q in\n%s", want, now)
						}
					}
					return nil
				})
				t.Logf("%s: encapsulated after %v", f, time.Since(start).Round(time.Millisecond))
				p.expectPings(t)
				start = time.Now()
				p.run(t, fmt.Sprintf("ip route del %s via %s dev eth0", peer, routerOf(f)))
				t.Logf("%s: direct after %v", f, expectKernelState(t, p.host, direct).Sub(start).Round(time.Millisecond))
				p.expectPings(t)
			}
		})
	}
}

// TestDirectRouteByAnotherInterface checks that direct routes are restored after the link of a second
// interface went down and up. It also checks that a refused peer gets its route when the bridge that has
// its subnet is deleted. In both cases the kernel deletes routes without announcing it.
//
//stages:rest TestDirectRouteFollowsTheUnderlay changes the underlay too
func TestDirectRouteByAnotherInterface(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan","DirectRouting":true}`)
	p := &damagedHost{lab: l, host: l.Host(1)}
	p.run(t, `ip link add eth1 type veth peer name far; ip link set far up; ip link set eth1 up; ip addr add 192.0.2.1/24 dev eth1
		ip link add old type bridge; ip link set old up; ip addr add 10.5.211.1/24 dev old`)
	for n, at := range []string{"192.0.2.9", routerOf(prefix.IPv4)} {
		newNode(t, v4, "vxlan", 210+n, func(prefix.Family) netip.Addr { return netip.MustParseAddr(at) }).publish(t, etcdClient(t, l))
	}
	startOne(t, p.host, lab.FlanneldOptions{})
	expect := func(route string) {
		t.Helper()
		eventuallyRepaired(t, route, func() error {
			if routes := p.run(t, "ip route"); !strings.Contains(routes, route) {
				return errors.New("it is missing in\n" + routes)
			}
			return nil
		})
	}
	for range 3 {
		expect("10.5.210.0/24 via 192.0.2.9 dev eth1")
		p.run(t, `printf 'link set eth1 down\nlink set eth1 up\n' | ip -batch -`)
	}
	expect("10.5.210.0/24 via 192.0.2.9 dev eth1")
	p.run(t, "ip link del old")
	expect("10.5.211.0/24 via " + routerOf(prefix.IPv4) + " dev eth0")
}

// TestHealingTouchesNothingElse checks that a repair writes only the damaged entry. For this it reads the
// kernel's announcements about flannel's devices.
//
//stages:rest it takes half a minute; TestHealing repairs the same damages
func TestHealingTouchesNothingElse(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, "vxlan", dual)
	for _, f := range dual {
		for _, d := range []struct {
			damage
			touched string
		}{
			{damage{name: "route", do: "{ip} route del {subnet}"}, "{subnet} "},
			{damage{name: "neighbour", do: "{ip} neigh del {vtep} dev {dev}"}, "{vtep} "},
			{damage{name: "FDB entry", do: "bridge fdb del {mac} dev {dev} dst {peer} self"}, "{mac} "},
		} {
			t.Run(d.name+" "+f.String(), func(t *testing.T) {
				ctx, cancel := context.WithCancel(testContext(t))
				defer cancel()
				events := make(chan string, 1)
				go func() {
					out, _ := p.host.Exec(ctx, "sh", "-c", "ip -o monitor link address route neigh nexthop & exec bridge monitor fdb")
					events <- string(out)
				}()
				pause(t, 300*time.Millisecond)
				p.testRepair(t, d.damage, f)
				pause(t, 300*time.Millisecond)
				cancel()
				var lines []string
				for line := range strings.Lines(<-events) {
					if strings.Contains(line, "flannel") && !strings.Contains(line, "fe80:") {
						lines = append(lines, strings.TrimSpace(line))
					}
				}
				touched := p.expandScript(t, d.touched, f)
				for _, line := range lines {
					if !strings.Contains(line, touched) {
						t.Errorf("the kernel announced %q, want only changes of %q", line, touched)
					}
				}
				if n := len(lines); n == 0 || strings.HasPrefix(lines[n-1], "Deleted") {
					t.Errorf("the kernel announced %q, want an addition of %q at the end", lines, touched)
				}
			})
		}
	}
}

// TestConstantInterference lets another program delete a route up to a hundred times a second. During
// this time the daemon must use at most 2 % of a CPU and log at most three lines. Afterwards it must
// restore the route.
func TestConstantInterference(t *testing.T) {
	p := newDamagedHost(t, "vxlan", v4)
	d, before := p.host.Daemon(), kernelState(t, p.host)
	used, start := readUsage(t, d), time.Now()
	p.run(t, p.expandScript(t, "for i in $(seq 500); do {ip} route del {subnet} 2>/dev/null || true; sleep 0.01; done", prefix.IPv4))
	fought := time.Since(start)
	now := readUsage(t, d)
	t.Logf("%v of CPU time and %d lines of log within %v", now.cpu-used.cpu, now.lines-used.lines, fought.Round(time.Millisecond))
	t.Logf("repaired after %v", expectKernelState(t, p.host, before).Sub(start.Add(fought)).Round(time.Millisecond))
	if cpu := now.cpu - used.cpu; cpu > fought/50 {
		t.Errorf("the daemon used %v of CPU time within %v, want at most %v", cpu, fought, fought/50)
	}
	if lines := now.lines - used.lines; lines > 3 {
		t.Errorf("the daemon logged %d lines, want at most 3", lines)
	}
	expectOnce(t, d, "repaired what another program had changed")
	p.expectPings(t)
}

// TestChecksumOffload checks that the daemon sets the configured ChecksumOffload and keeps it, even if
// another program changes it or deletes the device. With auto the kernel's default must stay.
func TestChecksumOffload(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ option, want, other string }{{"off", "off", "on"}, {"on", "on", "off"}, {"auto", "on", ""}} {
		t.Run(tt.option, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual}, fmt.Sprintf(`{"Type":"vxlan","ChecksumOffload":%q}`, tt.option))
			startAll(t, l, lab.FlanneldOptions{})
			h := l.Host(1)
			expect := func(want string) {
				t.Helper()
				for _, dev := range []string{"flannel.1", "flannel-v6.1"} {
					eventuallyRepaired(t, dev, func() error {
						out, err := h.Exec(testContext(t), "ethtool", "-k", dev)
						if line := "tx-checksumming: " + want; err == nil && !strings.Contains(string(out), line) {
							err = fmt.Errorf("ethtool -k does not print %q:\n%s", line, out)
						}
						return err
					})
				}
			}
			expect(tt.want)
			for _, dev := range []string{"flannel.1", "flannel-v6.1"} {
				if out, err := h.Exec(testContext(t), "ip", "link", "del", dev); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			expect(tt.want)
			if tt.other != "" {
				for _, dev := range []string{"flannel.1", "flannel-v6.1"} {
					if out, err := h.Exec(testContext(t), "ethtool", "-K", dev, "tx", tt.other); err != nil {
						t.Fatalf("%v: %s", err, out)
					}
				}
				expect(tt.want)
			}
			expectMatrix(t, l)
		})
	}
}

// TestTwoHostsWithOnePublicAddress starts host 2 with the public address of host 1. Host 2 knows its own VTEP MAC, so it
// must not take the lease of host 1 for an old one of its own, as from a restored backup. Each host must refuse the lease
// of the other and log the conflict.
//
//stages:rest TestLeasesWithOnePublicAddress has the peers of such hosts
func TestTwoHostsWithOnePublicAddress(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	first := startOne(t, l.Host(1), lab.FlanneldOptions{})
	startOne(t, l.Host(2), lab.FlanneldOptions{})
	one, two := leaseOf(t, l, l.Host(1)), leaseOf(t, l, l.Host(2))
	expectStop(t, l.Host(2).Daemon())
	removeKey(t, etcdClient(t, l), subnets+two.Key)
	second := startOne(t, l.Host(2), lab.FlanneldOptions{Args: []string{"--public-ip=" + l.Host(1).Addr(prefix.IPv4).String()}})
	refused := func(key string) string {
		return fmt.Sprintf(`"lease refused" lease=%q reason="%s has public IP 192.168.77.1, which is our own"`, key, strings.Replace(key, "-", "/", 1))
	}
	expectLog(t, second, fmt.Sprintf(`"another lease carries the public address of this node" key=%q`, one.Key))
	expectLog(t, first, refused(two.Key))
	expectLog(t, second, refused(one.Key))
	if strings.Contains(first.Log(), "was gone, taken again") {
		t.Error("host 2 has deleted the lease of host 1")
	}
}

// TestAddressChangesDuringStoreOutage changes the host's address while etcd is down. The objects in the
// kernel of the host must get the new address before etcd is back. When etcd is back, the lease must have
// the new address, and all pods must reach each other.
//
//stages:rest TestAddressChangesAfterTheConfiguration and TestStoreOutages have the parts
func TestAddressChangesDuringStoreOutage(t *testing.T) {
	t.Parallel()
	for name, restarts := range map[string]struct{ before, after bool }{
		"running": {}, "restarted before the change": {before: true}, "restarted after the change": {after: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testAddressChangeDuringOutage(t, restarts.before, restarts.after)
		})
	}
}

// testAddressChangeDuringOutage changes the address of a host during an outage. If the parameter before
// is true, the daemon restarts before the change. If the parameter after is true, it restarts after the
// change. Both restarts happen during the outage.
func testAddressChangeDuringOutage(t *testing.T, before, after bool) {
	p := newDamagedHost(t, "vxlan", v4)
	had := leaseOf(t, p.lab, p.host)
	was := kernelState(t, p.host)
	restart := func() {
		expectStop(t, p.host.Daemon())
		expectLog(t, start(t, p.host, lab.FlanneldOptions{}), "going on from the last known state")
	}
	p.lab.Etcd().Kill()
	if before {
		restart()
	}
	p.changeAddress(t)
	var want []string
	for _, line := range was {
		want = append(want, replaceWord(line, "192.168.77.1", "192.168.77.101"))
	}
	slices.Sort(want)
	expectKernelState(t, p.host, want)
	if after {
		restart()
	}
	if err := p.lab.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	p.expectMoved(t, had)
}

// TestReadyAgainDuringStoreOutage changes the host's address while etcd is down and a device of another
// program has the VNI of flannel.1. The daemon must not be ready, because it cannot create its device.
// When the other device is deleted, the daemon must become ready again, although etcd is still down.
func TestReadyAgainDuringStoreOutage(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, "vxlan", v4)
	d := p.host.Daemon()
	p.lab.Etcd().Kill()
	occupyVNI(t, p.host)
	p.changeAddress(t)
	expectLog(t, d, "the changed external interface cannot be used yet")
	if status, body, _ := d.Get(testContext(t), "/readyz"); status != 503 || !strings.Contains(body, "data path:") {
		t.Errorf("/readyz answers %d %q, want 503 for the data path", status, body)
	}
	p.run(t, "ip link del other")
	expectReady(t, d)
	if !strings.Contains(kernelObjects(t, p.host), "local 192.168.77.101") {
		t.Errorf("the daemon is ready without a device with the new address:\n%s", kernelObjects(t, p.host))
	}
}

// TestConfigurationOutOfAConflict moves a host while a device of another program has the VNI of flannel.1, so that no
// session starts. The host must follow a configuration with another VNI.
func TestConfigurationOutOfAConflict(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, "vxlan", v4)
	occupyVNI(t, p.host)
	p.changeAddress(t)
	expectLog(t, p.host.Daemon(), "the changed external interface cannot be used yet")
	putConfig(t, p.lab, `{"Type":"vxlan","VNI":7}`)
	expectReady(t, p.host.Daemon())
	expectMatrix(t, p.lab)
}

// occupyVNI renames the host's vxlan device, so that it counts as a device of another program.
// Before Linux 6.2 only a device that is down can be renamed, and the daemon sets it up again,
// so the script repeats both commands.
func occupyVNI(t *testing.T, h *lab.Host) {
	t.Helper()
	if out, err := h.Exec(testContext(t), "sh", "-c", "until ip link set flannel.1 down && ip link set flannel.1 name other; do :; done"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestUnfitInterface lowers the MTU of the external interface below what vxlan needs for IPv6. The host must not be
// ready, but its session continues: it must serve a peer that comes later, repair its device, and follow a
// configuration that works on the interface.
func TestUnfitInterface(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan"}`)
	p := &damagedHost{lab: l, backend: "vxlan", host: l.Host(1)}
	d := startOne(t, p.host, lab.FlanneldOptions{})
	p.run(t, "ip link set eth0 mtu 1300")
	expectLog(t, d, "the changed external interface cannot be used yet")
	eventually(t, "the host is not ready", func() error {
		status, body, _ := d.Get(testContext(t), "/readyz")
		if status != 503 || !strings.Contains(body, "external interface: the underlay MTU 1300") {
			return fmt.Errorf("/readyz answers %d %q", status, body)
		}
		return nil
	})

	startOne(t, l.Host(2), lab.FlanneldOptions{})
	p.run(t, "ip link delete flannel.1")
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrixOf(t, l, v4...)
	putNetwork(t, l, v4, `{"Type":"vxlan"}`)
	expectReady(t, d)
	if r := statusOf(t, p.host); r.Network.MTU != 1250 {
		t.Errorf("the network has MTU %d, want 1250", r.Network.MTU)
	}
}

// TestInterfaceWithoutAddress checks that the host is not ready while the external interface has no
// address, because it cannot send packets then. When the address is back, the host must be ready again.
func TestInterfaceWithoutAddress(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, "host-gw", v4)
	d := p.host.Daemon()
	p.run(t, "ip addr flush dev eth0")
	eventually(t, "the host is not ready", func() error {
		if status, body, _ := d.Get(testContext(t), "/readyz"); status != 503 || body != "flanneld is not ready yet\nexternal interface: eth0 cannot send from its address 192.168.77.1" {
			return fmt.Errorf("/readyz answers %d %q", status, body)
		}
		return nil
	})
	p.run(t, p.restoreScript(func(f prefix.Family) netip.Addr { return p.host.Addr(f) }))
	expectReady(t, d)
	expectMatrix(t, p.lab)
}

// TestOtherAddressesAreAdded checks that the host keeps its public address when its interface gets
// further addresses, although a daemon that starts for the first time would prefer those.
//
//stages:rest TestInterfaceWithoutAddress has an interface whose addresses change
func TestOtherAddressesAreAdded(t *testing.T) {
	t.Parallel()
	others := func(t *testing.T, p *damagedHost) {
		t.Helper()
		p.run(t, `ip addr change 192.168.77.1/24 dev eth0 valid_lft 3600 preferred_lft 3600
			ip addr add 10.9.0.1/24 dev eth0; ip addr add fd00:77::201/64 dev eth0 nodad`)
	}
	expectSame := func(t *testing.T, p *damagedHost, had []lease) {
		t.Helper()
		expectMatrix(t, p.lab)
		if now := leases(t, p.lab); !slices.Equal(now, had) {
			t.Errorf("leases are\n%v, want them unchanged:\n%v", now, had)
		}
	}
	t.Run("running", func(t *testing.T) {
		p := newDamagedHost(t, "vxlan", dual)
		had := leases(t, p.lab)
		others(t, p)
		p.testMTUChange(t) // the MTU changes after the addresses, so the daemon has seen these, too
		expectSame(t, p, had)
	})
	t.Run("restarted", func(t *testing.T) {
		p := newDamagedHost(t, "vxlan", dual)
		had := leases(t, p.lab)
		others(t, p)
		expectStop(t, p.host.Daemon())
		startOne(t, p.host, lab.FlanneldOptions{})
		expectSame(t, p, had)
	})
	t.Run("started without the store", func(t *testing.T) {
		p := newDamagedHost(t, "vxlan", dual)
		had := leases(t, p.lab)
		p.lab.Etcd().Kill()
		expectStop(t, p.host.Daemon())
		d := start(t, p.host, lab.FlanneldOptions{})
		expectLog(t, d, "going on from the last known state")
		others(t, p)
		if err := p.lab.Etcd().Start(testContext(t)); err != nil {
			t.Fatal(err)
		}
		expectLog(t, d, "subnet lease acquired")
		expectSame(t, p, had)
	})
}

// changeAddress gives the host the IPv4 address 192.168.77.101 instead of its own.
func (p *damagedHost) changeAddress(t *testing.T) {
	t.Helper()
	p.run(t, "ip addr del 192.168.77.1/24 dev eth0; "+p.restoreScript(func(prefix.Family) netip.Addr { return netip.MustParseAddr("192.168.77.101") }))
}

// expectMoved checks that all pods reach each other, and that the store has three leases. had is the
// host's lease before changeAddress: one lease must have the same key and MAC, and the new address.
func (p *damagedHost) expectMoved(t *testing.T, had lease) {
	t.Helper()
	expectMatrix(t, p.lab)
	all := leases(t, p.lab)
	moved := func(l lease) bool {
		return l.Key == had.Key && l.PublicIP == "192.168.77.101" && l.BackendData == had.BackendData
	}
	if len(all) != 3 || !slices.ContainsFunc(all, moved) {
		t.Errorf("the leases are %v, want three, and %v with the new address", all, had)
	}
}

// TestAddressChangesAfterTheConfiguration checks that a daemon with --follow-config=false keeps the
// configuration of its start. The configuration changes or is deleted, and then the daemon has to publish
// a new address.
func TestAddressChangesAfterTheConfiguration(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ config, log string }{
		"another network": {`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`, "restart needed"},
		"another family":  {`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"vxlan"}}`, "restart needed"},
		"none":            {"", "there is no configuration any more"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newDamagedHost(t, "vxlan", v4, "--follow-config=false")
			had := leaseOf(t, p.lab, p.host)
			if tc.config == "" {
				removeKey(t, etcdClient(t, p.lab), "/coreos.com/network/config")
			} else if err := p.lab.PutNetwork(testContext(t), json.RawMessage(tc.config)); err != nil {
				t.Fatal(err)
			}
			expectLog(t, p.host.Daemon(), tc.log)
			p.changeAddress(t)
			p.expectMoved(t, had)
		})
	}
}
