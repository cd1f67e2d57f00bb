// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestDefaultRoutesOfOthers adds default routes with a better metric than that of the external interface,
// as DHCP clients and VPNs do: through the bridge of the pods, through flanneld's own device, through a VPN, and
// through an interface without a carrier. Each time the host must keep its lease and its address, also over a
// restart, and no packet may be lost.
func TestDefaultRoutesOfOthers(t *testing.T) { testDefaultRoutesOfOthers(t, dual) }

// TestDefaultRoutesOfOthersInOneFamily does the same with one family.
//
//stages:rest TestDefaultRoutesOfOthers has both families
func TestDefaultRoutesOfOthersInOneFamily(t *testing.T) { testDefaultRoutesOfOthers(t, v4, v6) }

func testDefaultRoutesOfOthers(t *testing.T, labs ...[]prefix.Family) {
	t.Parallel()
	for backend, own := range map[string][2]string{
		"vxlan": {"flannel.1", "flannel-v6.1"}, "host-gw": {}, "udp": {"flannel0", "flannel0"}, userspace: {"flannel-wg", "flannel-wg-v6"},
	} {
		for _, families := range labs {
			t.Run(backend+", "+familiesName(families), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, lab.Config{Hosts: 2, Families: families}, backendConfig(backend))
				p := &damagedHost{lab: l, backend: backend, host: l.Host(1)}
				var had []lease
				kept := func(when string) {
					t.Helper()
					if now := leases(t, l); !slices.Equal(now, had) {
						t.Errorf("%s: the leases are %v, want %v", when, now, had)
					}
				}
				route := func(format string, args ...any) {
					t.Helper()
					for _, f := range families {
						command := "ip " + strings.ReplaceAll(fmt.Sprintf(format, args...), "ROUTER", routerOf(f))
						if f == prefix.IPv6 {
							command = strings.Replace(command, "ip ", "ip -6 ", 1)
							command = strings.Replace(command, "dev "+own[0]+" ", "dev "+own[1]+" ", 1)
						}
						p.run(t, command)
					}
				}
				p.run(t, `for d in tun0 dead0; do ip link add $d type veth peer name far-$d; ip link set $d up; done
					ip link set far-tun0 up; ip addr add 10.8.0.6/24 dev tun0; ip addr add fd00:8::6/64 dev tun0 nodad
					ip addr add 10.9.0.6/24 dev dead0; ip addr add fd00:9::6/64 dev dead0 nodad
					sysctl -w net.ipv4.conf.dead0.ignore_routes_with_linkdown=1 net.ipv6.conf.dead0.ignore_routes_with_linkdown=1`)
				route("route del default")
				route("route add default via ROUTER dev eth0 metric 100")
				startAll(t, l, lab.FlanneldOptions{})
				had = leases(t, l)
				flows := startFlows(t, l, 100)

				devices := []string{"cni0", "tun0", "dead0"}
				if own[0] != "" {
					devices = append(devices, own[0])
				}
				for _, device := range devices {
					route("route add default dev %s metric 50", device)
					pause(t, 1500*time.Millisecond) // three times as long as a change of the choice takes
					kept(device)
					route("route del default dev %s metric 50", device)
				}
				route("route del default metric 100")
				route("route add default dev cni0 metric 50")
				pause(t, 1500*time.Millisecond)
				kept("only the bridge of the pods")
				expectNothingLost(t, flows)

				for _, device := range []string{"cni0", "tun0", "dead0"} { // some backends remove their own when they stop
					flows := startFlows(t, l, 100)
					stopped := time.Now()
					expectStop(t, p.host.Daemon())
					route("route replace default dev %s metric 50", device)
					startOne(t, p.host, lab.FlanneldOptions{})
					ready := time.Now()
					kept("restart with " + device)
					expectMatrix(t, l)
					pause(t, 500*time.Millisecond)
					if backend == "vxlan" || backend == "host-gw" {
						expectNothingLost(t, flows)
						continue
					}

					// The daemon itself carries the packets, so those on the way and those of the time without it
					// are lost.
					stopped = stopped.Add(-100 * time.Millisecond)
					for i, s := range stopFlows(flows) {
						t.Logf("restart with %s: %s: %d of %d lost, longest gap %v, away for %v", device, flows[i].name, len(s.Lost), s.Sent, s.Gap, ready.Sub(stopped))
						if s.Sent == 0 || len(s.Lost) > 0 && (s.Begin.Before(stopped) || s.End.After(ready.Add(time.Second))) {
							t.Errorf("restart with %s: %s lost %d of %d packets from %v to %v, the daemon was away from %v to %v", device, flows[i].name, len(s.Lost), s.Sent, s.Begin, s.End, stopped, ready)
						}
					}
				}
			})
		}
	}
}

// TestAloneUnderlayIsFollowed changes the address, the prefix and the network card of a host. No flow may have a
// gap of more than three seconds. The test needs the whole machine, because it measures times.
//
//stages:rest TestHealing has the same changes without a limit of the time
func TestAloneUnderlayIsFollowed(t *testing.T) {
	const router = "ip -6 route add fd00:78::/64 dev "
	for name, script := range map[string]string{
		"address gone": `ip addr del 192.168.77.1/24 dev eth0; ip addr del fd00:77::1/64 dev eth0
			ip addr add 192.168.77.101/24 dev eth0; ip addr add fd00:77::101/64 dev eth0 nodad
			ip route add default via 192.168.77.254; ip -6 route replace default via fd00:77::fe dev eth0`,
		"prefix renumbered by router advertisements": `ip addr add fd00:78::1/64 dev eth0 nodad valid_lft 3600 preferred_lft 3600
			ip addr change fd00:77::1/64 dev eth0 valid_lft 7200 preferred_lft 0`,
		"network card replaced": "",
	} {
		t.Run(name, func(t *testing.T) {
			p := newDamagedHost(t, "vxlan", dual)
			own := leaseOf(t, p.lab, p.host)
			if script == "" {
				script = "ip link del eth0; " + p.recreateScript() + "; " + strings.Replace(p.restoreScript(func(f prefix.Family) netip.Addr { return p.host.Addr(f) }), "sleep 2; ", "", 1)
			}
			for _, h := range p.lab.Hosts()[1:] {
				shell(t, h.Namespace, router+"eth0")
			}
			shell(t, p.lab.Underlay(), router+"l2-1")
			flows := startFlows(t, p.lab, 100)
			p.run(t, script)
			pause(t, 5*time.Second)
			for i, s := range stopFlows(flows) {
				t.Logf("%s: %d of %d lost, longest gap %v", flows[i].name, len(s.Lost), s.Sent, s.Gap)
				if s.Sent == 0 || s.Gap > 3*time.Second {
					t.Errorf("%s: a gap of %v in %d packets, want at most 3s", flows[i].name, s.Gap, s.Sent)
				}
			}
			expectMatrix(t, p.lab)
			if same := slices.Contains(leases(t, p.lab), own); same != strings.Contains(name, "card") {
				t.Errorf("the leases are %v, that of the host was %v", leases(t, p.lab), own)
			}
		})
	}
}

// TestPodsWithoutUplink starts a daemon on a host whose external interface is not usable, as at a boot
// without a link. The subnet file must be written from the last known state. When the interface is back, the
// hosts must have the same leases, even if the interface has another address then, and all pods must reach
// each other.
func TestPodsWithoutUplink(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ backend, away, back string }{
		"without address":       {"vxlan", "ip addr flush dev eth0", "ip addr add %[1]s/24 dev eth0; ip route add default via %[2]s"},
		"down":                  {"host-gw", "ip link set eth0 down", "ip link set eth0 up; ip route add default via %[2]s"},
		"without default route": {"vxlan", "ip route del default", "ip route add default via %[2]s"},
		"another address later": {"vxlan", "ip addr flush dev eth0; ip link del flannel.1", "ip addr add 192.168.77.101/24 dev eth0; ip route add default via %[2]s"},
		"without anything":      {"udp", "ip link set eth0 name away; ip addr flush dev away; ip link set away down", "ip link set away name eth0; ip addr add %[1]s/24 dev eth0; ip link set eth0 up; ip route add default via %[2]s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(tc.backend))
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			p := &damagedHost{lab: l, host: l.Host(1)}
			keys := func() (all []string) {
				for _, one := range leases(t, l) {
					all = append(all, one.Key)
				}
				return all
			}
			had := keys()
			expectStop(t, p.host.Daemon())
			file := p.host.Path(lab.SubnetFile)
			before, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			p.run(t, tc.away)
			d := start(t, p.host, lab.FlanneldOptions{})
			eventually(t, "the subnet file is there", func() error {
				now, err := os.ReadFile(file)
				if err == nil && string(now) != string(before) {
					err = fmt.Errorf("it is %s, want %s", now, before)
				}
				return err
			})
			p.run(t, fmt.Sprintf(tc.back, p.host.Addr(prefix.IPv4), routerOf(prefix.IPv4)))
			expectReady(t, d)
			if now := keys(); !slices.Equal(now, had) {
				t.Errorf("the leases are %q, want %q", now, had)
			}
			expectMatrix(t, l)
		})
	}
}

// TestImageSwapKeepsThePublishedAddress starts a daemon without a state on a host that has published a
// /32, as flannel does, and that has a private alias on the same interface. The lease must stay.
func TestImageSwapKeepsThePublishedAddress(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("vxlan"))
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	p := &damagedHost{lab: l, host: l.Host(1)}
	had := leaseOf(t, l, p.host)
	expectStop(t, p.host.Daemon())
	if out, err := flannelctl(t, p.host, "interface", "--no-daemon"); err != nil || !strings.Contains(out, "its address is in use") {
		t.Errorf("after a stop flannelctl does not name the address in use: %v\n%s", err, out)
	}
	state := p.host.Path("/var/lib/flannel")
	if _, err := os.Stat(state); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	p.run(t, fmt.Sprintf(`ip addr flush dev eth0; ip addr add 192.168.7.1/24 dev eth0; ip addr add %[1]s/32 dev eth0
		ip route add %[2]s dev eth0 src %[1]s; ip route add default via %[2]s src %[1]s`, p.host.Addr(prefix.IPv4), routerOf(prefix.IPv4)))
	startOne(t, p.host, lab.FlanneldOptions{})
	if all := leases(t, l); len(all) != 2 || leaseOf(t, l, p.host).Key != had.Key {
		t.Errorf("the leases are %v, want two, and %s of this host", all, had.Key)
	}
	expectMatrix(t, l)
}

// TestAddressOnLoopback uses addresses that the hosts have on lo, as with BGP to the host. Packets of full size
// must reach the pods, so the MTU must be that of the interface which carries them. host-gw must give pods that
// MTU too, and refuse the peers.
func TestAddressOnLoopback(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		backend  string
		families []prefix.Family
		mtu      int
	}{
		{"vxlan", dual, 1430}, {"host-gw", v4, 1500}, {"udp", v4, 1472}, {userspace, dual, 1420},
	} {
		t.Run(tc.backend+", "+familiesName(tc.families), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: tc.families}, backendConfig(tc.backend))
			for i, h := range l.Hosts() {
				own, peer := i+1, 2-i
				shell(t, h.Namespace, fmt.Sprintf("ip addr add 192.168.77.10%[1]d/32 dev lo; ip addr add fd00:255::%[1]d/128 dev lo nodad", own))
				iface := fmt.Sprintf("--iface=192.168.77.10%d", own)
				if len(tc.families) > 1 {
					shell(t, h.Namespace, fmt.Sprintf("ip -6 route add fd00:255::%d via %s dev eth0 src fd00:255::%d", peer, l.Host(peer).Addr(prefix.IPv6), own))
					iface += fmt.Sprintf(",fd00:255::%d", own)
				}
				startOne(t, h, lab.FlanneldOptions{Args: []string{iface}})
				expectOnce(t, h.Daemon(), `"using interface" name="lo"`)
			}
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			if tc.backend == "host-gw" { // there is no gateway on lo
				for _, h := range l.Hosts() {
					expectLog(t, h.Daemon(), "is not on a network of lo")
					if mtu := h.Pods()[0].MTU(); mtu != tc.mtu {
						t.Errorf("the MTU of a pod of %s is %d, want %d", h.Name(), mtu, tc.mtu)
					}
				}
				return
			}
			expectMatrix(t, l)
			expectMTU(t, l, tc.mtu)
		})
	}
}

// TestHostRouteOfVPN adds routes to a peer through a VPN in another table, as Tailscale does. The VPN drops packets
// from pods. With DirectRouting none may be lost, also over a restart: a host route does not prove that the peer is
// in a network of this host, so VXLAN must carry them.
func TestHostRouteOfVPN(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan","DirectRouting":true}`)
	startAll(t, l, lab.FlanneldOptions{})
	flows := startFlows(t, l, 100)

	one, two := l.Host(1), l.Host(2)
	shell(t, one.Namespace, "ip link add vpn0 type veth peer name vpn0 netns "+two.NetNS())
	mac := shell(t, two.Namespace, `ip link set vpn0 up; ip -br link show vpn0 | tr -s " " | cut -d" " -f3
		for p in iptables ip6tables; do $p -t raw -A PREROUTING -i vpn0 ! -p udp -j DROP; done`)
	shell(t, one.Namespace, fmt.Sprintf(`ip link set vpn0 up; ip addr add 100.64.0.1/32 dev vpn0; ip addr add fd00:64::1/128 dev vpn0 nodad
		for peer in %s %s; do
			ip neigh add $peer lladdr %s dev vpn0
			ip route add $peer dev vpn0 table 52
		done
		ip rule add pref 5270 lookup 52; ip -6 rule add pref 5270 lookup 52`, two.Addr(prefix.IPv4), two.Addr(prefix.IPv6), strings.TrimSpace(mac)))
	pause(t, 1500*time.Millisecond) // three times as long as a change of the routes takes
	expectStop(t, one.Daemon())
	startOne(t, one, lab.FlanneldOptions{})
	pause(t, 500*time.Millisecond)
	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestIPv6OffByDefault starts daemons on hosts where new devices get no IPv6, which many guides on
// hardening recommend. In dual stack both families must work all the same.
func TestIPv6OffByDefault(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "udp", userspace} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(backend))
			byDefault := func(value string) {
				for _, h := range l.Hosts() {
					if out, err := h.Exec(testContext(t), "sysctl", "-w", "net.ipv6.conf.default.disable_ipv6="+value); err != nil {
						t.Fatalf("%v\n%s", err, out)
					}
				}
			}
			byDefault("1")
			for _, h := range l.Hosts() {
				startOne(t, h, lab.FlanneldOptions{})
			}
			byDefault("0") // for the pods, whose devices other programs create
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, l)
		})
	}
}

// TestIPv6OffByDefaultAndReadOnly starts a daemon that may not change a sysctl, as in a container without
// privileges. The host must serve IPv4 and name the sysctl, and follow when an operator changes it.
//
//stages:rest flanneld tries again after half a minute
func TestIPv6OffByDefaultAndReadOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("vxlan"))
	p := &damagedHost{lab: l, host: l.Host(1)}
	const off = "net.ipv6.conf.default.disable_ipv6"
	p.run(t, "sysctl -w "+off+"=1; mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys")
	for _, h := range l.Hosts() {
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectOnce(t, p.host.Daemon(), off+" is 1")

	p.run(t, "umount /proc/sys; sysctl -w "+off+"=0")
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrixOf(t, l, prefix.IPv4)
	within(t, time.Minute, "IPv6 is served", func() error {
		if now := leaseOf(t, l, p.host); !strings.Contains(now.Key, "fd00") {
			return fmt.Errorf("the lease is %s", now.Key)
		}
		return nil
	})
}

// TestVMUplinks uses a bond, a VLAN, and a VLAN in a VRF as the external interface of all hosts. The kernel of
// this machine may lack them.
//
//stages:rest the kernel of the guest is emulated
func TestVMUplinks(t *testing.T) {
	const vlan = "ip link add link eth0 name up0 type vlan id 5; ip link set up0 up; ip addr add 10.50.0.%[1]d/24 dev up0"
	const bond = `ip link add up0 type bond mode active-backup miimon 100; ip addr flush dev eth0; ip link set eth0 down
		ip link set eth0 master up0; ip link set up0 up; ip addr add 192.168.77.%[1]d/24 dev up0; ip route add default via %[2]s`
	const vrf = "ip link add vrf0 type vrf table 10; ip link set vrf0 up; " + vlan + "; ip link set up0 master vrf0"
	for name, tc := range map[string]struct {
		backend, script string
		args            []string
		refused         string
	}{
		"vxlan, bond":   {backend: "vxlan", script: bond},
		"host-gw, VLAN": {backend: "host-gw", script: vlan, args: []string{"--iface=up0"}},
		"vxlan, VRF":    {backend: "vxlan", script: vrf, args: []string{"--iface=up0"}},
		"host-gw, VRF":  {backend: "host-gw", script: vrf, args: []string{"--iface=up0"}, refused: "vrf0"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(tc.backend))
			for i, h := range l.Hosts() {
				p := &damagedHost{lab: l, host: h}
				p.run(t, fmt.Sprintf(tc.script+"; true %[1]d %[2]s", i+1, routerOf(prefix.IPv4)))
			}
			if tc.refused != "" {
				expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: tc.args}), tc.refused)
				return
			}
			startAll(t, l, lab.FlanneldOptions{Args: tc.args})
			for _, h := range l.Hosts() {
				expectOnce(t, h.Daemon(), `"using interface" name="up0"`)
			}
			expectMatrix(t, l)
		})
	}
}
