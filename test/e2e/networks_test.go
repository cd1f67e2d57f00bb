// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// networksRoot is the prefix of the keys of all networks in the store.
const networksRoot = "/coreos.com/network/"

// overviewOf waits until the daemon of h gives its status, and returns the networks in it, by name.
func overviewOf(t *testing.T, h *lab.Host) map[string]status.NetworkSummary {
	t.Helper()
	var r status.Report
	eventually(t, "the status of "+h.Name(), func() error { // the daemon may still be starting
		_, body, err := h.Daemon().Get(testContext(t), "/statusz.json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(body), &r)
	})
	all := map[string]status.NetworkSummary{}
	for _, n := range r.Networks {
		all[n.Name] = n
	}
	return all
}

// expectPhase waits until a network is in a phase on all hosts. In the phase serving it must also be ready.
func expectPhase(t *testing.T, l *lab.Lab, network, phase string) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventually(t, network+" on "+h.Name(), func() error {
			if n := overviewOf(t, h)[network]; n.Phase != phase || phase == "serving" && !n.Ready {
				return fmt.Errorf("%+v, want phase %q", n, phase)
			}
			return nil
		})
	}
}

// expectForgotten waits until no host lists a network that was deleted.
func expectForgotten(t *testing.T, l *lab.Lab, network string) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventually(t, network+" on "+h.Name(), func() error {
			if n, listed := overviewOf(t, h)[network]; listed {
				return fmt.Errorf("%+v, want it to be gone", n)
			}
			return nil
		})
	}
}

// addNetworkPods adds a pod of the network on every host, and returns the pods in the order of the hosts.
func addNetworkPods(t *testing.T, l *lab.Lab, network string) []*lab.Pod {
	t.Helper()
	var pods []*lab.Pod
	for _, h := range l.Hosts() {
		p, err := h.AddNetworkPod(testContext(t), network)
		if err != nil {
			t.Fatal(err)
		}
		pods = append(pods, p)
	}
	return pods
}

// expectAnswers waits until every one of the pods gets an answer from every other.
func expectAnswers(t *testing.T, pods []*lab.Pod) {
	t.Helper()
	eventually(t, "pods of one network reach each other", func() error {
		for _, from := range pods {
			for _, to := range pods {
				for _, a := range to.Addrs() {
					if _, err := from.Ping(testContext(t), a, lab.Echo{}); from != to && err != nil {
						return fmt.Errorf("%s to %s: %w", from.Name(), to.Name(), err)
					}
				}
			}
		}
		return nil
	})
}

// TestNetworks checks several networks with different backends, which one daemon on each host serves. While
// packets flow in the network red, others are changed, broken, deleted and added. No packet of red may be
// lost. On host 1 the device of red and the addresses, routes and neighbours in its range must not change.
func TestNetworks(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	putKey(t, s, networksRoot+"blue/config", `{"Network":"10.7.0.0/16","Backend":{"Type":"udp"}}`)
	startNetworks(t, l, "--watch-networks", "--ip-masq")
	for _, name := range []string{"red", "green", "blue"} {
		expectPhase(t, l, name, "serving")
		expectAnswers(t, addNetworkPods(t, l, name))
	}
	red := l.Host(1).Pods()[0]
	flow, err := red.StartFlow(testContext(t), l.Host(2).Pods()[0], prefix.IPv4, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Stop()

	var device *net.Interface
	if err := l.Host(1).Do(testContext(t), func() (err error) { device, err = net.InterfaceByName("flannel.1"); return err }); err != nil {
		t.Fatal(err)
	}
	monitor := newKernelMonitor(t, l.Host(1))

	// The network pink clashes with red until it gets a VNI of its own.
	putKey(t, s, networksRoot+"pink/config", `{"Network":"10.8.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectPhase(t, l, "pink", "refused")
	if why := overviewOf(t, l.Host(1))["pink"].Reasons; len(why) != 1 || !strings.Contains(why[0], "network red, which was there first: both have the device flannel.1") {
		t.Errorf("pink was refused because of %q", why)
	}
	putKey(t, s, networksRoot+"pink/config", `{"Network":"10.8.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`)
	expectPhase(t, l, "pink", "serving")
	expectAnswers(t, addNetworkPods(t, l, "pink"))

	// The configuration of green becomes invalid. The hosts must go on with the former one.
	putKey(t, s, networksRoot+"green/config", `{`)
	eventually(t, "the broken configuration is named", func() error {
		if n := overviewOf(t, l.Host(1))["green"]; n.Phase != "serving" || len(n.Reasons) != 1 {
			return fmt.Errorf("%+v", n)
		}
		return nil
	})
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":6}}`)
	expectPhase(t, l, "green", "serving")
	expectAnswers(t, podsIn(l, "10.6."))

	// The network green is deleted and must leave nothing. Then grey, which has clashed with green, must
	// start.
	putKey(t, s, networksRoot+"grey/config", `{"Network":"10.9.0.0/16","Backend":{"Type":"vxlan","VNI":6}}`)
	expectPhase(t, l, "grey", "refused")
	removeKey(t, s, networksRoot+"green/config")
	expectForgotten(t, l, "green")
	for _, h := range l.Hosts() {
		eventually(t, "nothing of green is left on "+h.Name(), func() error {
			if _, err := os.Stat(h.Path(lab.NetworkFile("green"))); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the subnet file: %w", err)
			}
			routes, err := h.Routes(testContext(t))
			if err != nil {
				return err
			}
			for _, r := range routes {
				if strings.HasPrefix(r.Dst.String(), "10.6.") && r.Dev != "br-green" {
					return fmt.Errorf("route %v", r)
				}
			}
			rules, err := h.Exec(testContext(t), "iptables-save")
			if err != nil || strings.Contains(string(rules), "10.6.") {
				return fmt.Errorf("rules: %w\n%s", err, rules)
			}
			return nil
		})
	}
	resp, err := s.Get(testContext(t), networksRoot+"green/subnets/", clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) > 0 {
		t.Errorf("%v, %v: want no lease of green", resp, err)
	}
	expectPhase(t, l, "grey", "serving")
	expectAnswers(t, addNetworkPods(t, l, "grey"))
	for _, change := range monitor.notifications(t) {
		if strings.Contains(change, " 10.5.") || strings.HasPrefix(change, "link") && strings.HasSuffix(change, fmt.Sprintf(" %d", device.Index)) {
			t.Errorf("red, which did not change, had a change in the kernel: %s", change)
		}
	}
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets of red were lost", len(st.Lost), st.Sent)
	}
}

// TestNetworkTakesOverADevice changes the device of the network red by a migration, and gives the former
// device to the network green at once. green must wait until red has removed the device.
//
//stages:rest TestNetworks changes and deletes networks, each with a device of its own
func TestNetworkTakesOverADevice(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	s, h := etcdClient(t, l), l.Host(1)
	red := func(backends string) {
		putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16",`+backends+`}`)
	}
	red(`"Backend":{"Type":"vxlan"}`)
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "red", "serving")
	red(`"Backend":{"Type":"vxlan"},"NextBackend":{"Type":"vxlan","VNI":2}`)
	eventually(t, "the device of the next backend", func() error {
		_, err := h.Exec(testContext(t), "ip", "link", "show", "flannel.2")
		return err
	})
	red(`"Backend":{"Type":"vxlan","VNI":2}`)
	expectPhase(t, l, "red", "serving, and removing what a former configuration left")
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectPhase(t, l, "green", "refused")
	const want = "it waits until network red has removed what a former configuration left: both have the device flannel.1"
	if why := overviewOf(t, h)["green"].Reasons; len(why) != 1 || why[0] != want {
		t.Errorf("green was refused because of %q, want %q", why, want)
	}
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
	}
	out, err := h.Exec(testContext(t), "ip", "-d", "-4", "addr", "show", "flannel.1")
	if err != nil || !strings.Contains(string(out), " 10.6.") {
		t.Errorf("%v: the device of green is\n%s", err, out)
	}
	if log := h.Daemon().Log(); strings.Contains(log, "network failed") {
		t.Errorf("a network has failed:\n%s", log)
	}
}

// TestRefusedNetworkIsServedAgain gives the subnet of a host to another one while the present configuration
// of the network is refused. The host must take another subnet of the former configuration. When the
// configuration changes to one that is admitted, all hosts must follow it.
//
//stages:rest TestConfigurationRejected refuses changes of a network
func TestRefusedNetworkIsServedAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s, h := etcdClient(t, l), l.Host(1)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	startNetworks(t, l, "--watch-networks")
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
	}
	expectRefused := func() {
		t.Helper()
		for _, h := range l.Hosts() {
			eventually(t, h.Name()+" refuses the configuration of red", func() error {
				n := overviewOf(t, h)["red"]
				if n.Phase != "serving" || !n.Ready || len(n.Subnets) != 1 || !strings.HasPrefix(n.Subnets[0].String(), "10.5.") || !strings.Contains(fmt.Sprint(n.Reasons), "it clashes with network green") {
					return fmt.Errorf("%+v", n)
				}
				return nil
			})
		}
	}
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectRefused()
	had := overviewOf(t, h)["red"].Subnets[0]
	putKey(t, s, networksRoot+"red/subnets/"+strings.Replace(had.String(), "/", "-", 1), vxlanLease("192.168.77.99", "02:00:00:00:00:99"))
	expectLog(t, h.Daemon(), "network failed, trying again")
	expectRefused()
	if has := overviewOf(t, h)["red"].Subnets[0]; has == had {
		t.Errorf("the host still has %s, which belongs to another one", has)
	}
	expectAnswers(t, addNetworkPods(t, l, "red"))
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}`)
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" has the device of the next configuration", func() error {
			_, err := h.Exec(testContext(t), "ip", "link", "show", "flannel.7")
			return err
		})
	}
	expectPhase(t, l, "red", "serving")
	expectAnswers(t, podsIn(l, "10.5."))
}

// TestNetworksSwap lets three networks exchange their VNIs in a circle, and two of them their ranges, while they are
// served and while the daemons are down. All must be served with the new configuration in the end. With another VNI a host
// keeps its subnets. A host that has never served the networks must get the same result.
func TestNetworksSwap(t *testing.T) {
	t.Parallel()
	for _, live := range []bool{true, false} {
		t.Run(fmt.Sprintf("live %v", live), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3}, "")
			s := etcdClient(t, l)
			names := []string{"blue", "green", "red"}
			put := func(ranges, vnis [3]int) {
				for i, name := range names {
					putKey(t, s, networksRoot+name+"/config", fmt.Sprintf(`{"Network":"10.%d.0.0/16","Backend":{"Type":"vxlan","VNI":%d}}`, ranges[i], vnis[i]))
				}
			}
			hosts := l.Hosts()[:2]
			restart := func(change func()) {
				if live {
					change()
					return
				}
				for _, h := range hosts {
					expectStop(t, h.Daemon())
				}
				change()
				for _, h := range hosts {
					start(t, h, lab.FlanneldOptions{Args: []string{"--watch-networks"}})
				}
			}
			expect := func(ranges, vnis [3]int) (subnets []string) {
				t.Helper()
				for _, h := range hosts {
					for i, name := range names {
						eventually(t, name+" on "+h.Name(), func() error {
							n := overviewOf(t, h)[name]
							if n.Phase != "serving" || !n.Ready || len(n.Reasons) > 0 || len(n.Subnets) != 1 || !strings.HasPrefix(n.Subnets[0].String(), fmt.Sprintf("10.%d.", ranges[i])) {
								return fmt.Errorf("%+v", n)
							}
							return nil
						})
						expectInOutput(t, h, fmt.Sprintf("ip route show root 10.%d.0.0/16", ranges[i]), fmt.Sprintf("flannel.%d", vnis[i]))
						subnets = append(subnets, overviewOf(t, h)[name].Subnets[0].String())
					}
				}
				return subnets
			}

			before := [3]int{1, 2, 3}
			ranges := [3]int{5, 6, 7}
			put(ranges, before)
			for _, h := range hosts {
				start(t, h, lab.FlanneldOptions{Args: []string{"--watch-networks"}})
			}
			had := expect(ranges, before)

			circle := [3]int{2, 3, 1}
			restart(func() { put(ranges, circle) })
			if has := expect(ranges, circle); !slices.Equal(has, had) {
				t.Errorf("after the VNIs have changed the hosts have the subnets %v, want %v", has, had)
			}

			swapped := [3]int{6, 5, 7}
			restart(func() { put(swapped, circle) })
			expect(swapped, circle)
			start(t, l.Host(3), lab.FlanneldOptions{Args: []string{"--watch-networks"}})
			hosts = l.Hosts()
			expect(swapped, circle)
			for _, name := range names {
				expectAnswers(t, addNetworkPods(t, l, name))
			}
		})
	}
}

// podsIn returns the pods whose first address begins with the text.
func podsIn(l *lab.Lab, begin string) []*lab.Pod {
	return slices.DeleteFunc(l.Pods(), func(p *lab.Pod) bool { return !strings.HasPrefix(p.Addrs()[0].String(), begin) })
}

// TestNetworksWithoutTheStore restarts a daemon with several networks while etcd does not answer. The daemon
// must serve all of them from the last known state, and no packet may be lost.
func TestNetworksWithoutTheStore(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	const args = "--networks=green,red"
	startNetworks(t, l, args)
	var flows []*lab.Flow
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
		pods := addNetworkPods(t, l, name)
		expectAnswers(t, pods)
		f, err := pods[0].StartFlow(testContext(t), pods[1], prefix.IPv4, 1000)
		if err != nil {
			t.Fatal(err)
		}
		flows = append(flows, f)
	}
	if err := l.Etcd().Stop(); err != nil {
		t.Fatal(err)
	}
	expectStop(t, l.Host(1).Daemon())
	start(t, l.Host(1), lab.FlanneldOptions{Args: []string{args}})
	for _, name := range []string{"red", "green"} {
		eventually(t, name+" is served without the store", func() error {
			if n := overviewOf(t, l.Host(1))[name]; n.Phase != "serving from the last known state" {
				return fmt.Errorf("%+v", n)
			}
			return nil
		})
	}
	if err := l.Etcd().Cont(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
	}
	for _, f := range flows {
		if st := f.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
			t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
		}
	}
}

// startNetworks starts a daemon on every host and does not wait until it is ready. args are its flags.
func startNetworks(t *testing.T, l *lab.Lab, args ...string) {
	t.Helper()
	for _, h := range l.Hosts() {
		start(t, h, lab.FlanneldOptions{Args: args})
	}
}

// TestOneNetworkOrSeveral restarts daemons with one network as daemons with several ones, and back. The new networks
// have the devices of the former ones. The hosts must be like new ones each time, and the former leases must be gone.
//
//stages:rest three starts of three daemons, and three new ones after each change
func TestOneNetworkOrSeveral(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("vxlan"))
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.7.0.0/16","Backend":{"Type":"udp"}}`)
	several := lab.FlanneldOptions{Args: []string{"--watch-networks", "--ip-masq"}}
	for _, change := range []struct {
		from, to lab.FlanneldOptions
		gone     []string // prefixes of keys
	}{
		{lab.FlanneldOptions{}, several, []string{networksRoot + "subnets/"}},
		{several, lab.FlanneldOptions{}, []string{networksRoot + "red/subnets/", networksRoot + "green/subnets/"}},
	} {
		for _, h := range l.Hosts() {
			start(t, h, change.from)
		}
		for _, h := range l.Hosts() {
			expectReady(t, h.Daemon())
			expectStop(t, h.Daemon())
		}
		for _, h := range l.Hosts() {
			expectReady(t, start(t, h, change.to))
		}
		for _, prefix := range change.gone {
			resp, err := s.Get(testContext(t), prefix, clientv3.WithPrefix())
			if err != nil || len(resp.Kvs) > 0 {
				t.Errorf("%v, %v: want no lease of the former networks", resp, err)
			}
		}
		expectLikeFresh(t, l, func(*lab.Host) lab.FlanneldOptions { return change.to })
	}
}

// TestNetworksOfFlannel07 starts a daemon on keys as flannel 0.7 writes them: the reservation of a host, the
// lease of a peer whose backend data has no VNI, keys of a single network, and a lease of a network without a
// configuration. The daemon must serve the network red and no other.
func TestNetworksOfFlannel07(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	s, h := etcdClient(t, l), l.Host(1)
	for key, value := range map[string]string{
		"red/config":                 `{"Network":"10.5.0.0/16","SubnetLen":24,"Backend":{"Type":"vxlan","VNI":7}}`,
		"red/subnets/10.5.34.0-24":   fmt.Sprintf(`{"PublicIP":%q}`, h.Addr(prefix.IPv4)),
		"red/subnets/10.5.35.0-24":   `{"PublicIP":"192.168.77.200","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:aa"}}`,
		"config":                     `{"Network":"10.9.0.0/16"}`,
		"subnets/10.9.34.0-24":       `{"PublicIP":"192.168.77.201"}`,
		"green/subnets/10.6.34.0-24": `{"PublicIP":"192.168.77.202"}`, // its configuration was deleted
	} {
		putKey(t, s, networksRoot+key, value)
	}
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "red", "serving")
	all := overviewOf(t, h)
	if own := fmt.Sprint(all["red"].Subnets); len(all) != 1 || own != "[10.5.34.0/24]" {
		t.Errorf("networks %v, want only red with the reserved subnet", all)
	}
	eventually(t, "the peer has a route", func() error {
		out, err := h.Exec(testContext(t), "ip", "route", "show", "10.5.35.0/24")
		if err != nil || !strings.Contains(string(out), "dev flannel.7") {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// TestNetworkMasquerade checks packets from a pod of one network to a pod of another. They must be
// masqueraded if and only if --masquerade-between-networks is true.
func TestNetworkMasquerade(t *testing.T) {
	t.Parallel()
	for _, between := range []bool{false, true} {
		t.Run(fmt.Sprintf("masquerade-between-networks=%v", between), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, "")
			s := etcdClient(t, l)
			putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
			startNetworks(t, l, "--watch-networks", "--ip-masq", fmt.Sprintf("--masquerade-between-networks=%v", between))
			expectPhase(t, l, "red", "serving")
			// The second network is added later. Then the rules of the first one must change.
			putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
			expectPhase(t, l, "green", "serving")
			red, green := addNetworkPods(t, l, "red"), addNetworkPods(t, l, "green")
			expectAnswers(t, red)
			expectAnswers(t, green)
			for _, pair := range [][2]*lab.Pod{{red[0], green[0]}, {red[0], green[1]}, {green[0], red[0]}, {green[0], red[1]}} {
				from, to := pair[0], pair[1]
				eventually(t, "the source of packets from "+from.Name()+" to "+to.Name(), func() error {
					seen := connect(t, from.Namespace, netip.Addr{}, to.Namespace, to.Addr(prefix.IPv4)).sourceAddr()
					if masqueraded := seen != from.Addr(prefix.IPv4); masqueraded != between {
						return fmt.Errorf("%s, the pod has %s", seen, from.Addr(prefix.IPv4))
					}
					return nil
				})
			}
		})
	}
}

// TestNetworksReady starts a daemon with four networks: red works. green cannot start, because another host
// has its only subnet. pink is refused, and grey has no configuration. READY=1 must wait for green, but not
// for pink and grey.
func TestNetworksReady(t *testing.T) {
	t.Parallel()
	const taken = networksRoot + "green/subnets/10.6.1.0-24"
	l := newLab(t, lab.Config{Hosts: 1}, "")
	store, h := etcdClient(t, l), l.Host(1)
	putKey(t, store, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, store, networksRoot+"green/config", `{"Network":"10.6.0.0/16","SubnetMin":"10.6.1.0","SubnetMax":"10.6.1.0","Backend":{"Type":"host-gw"}}`)
	putKey(t, store, taken, `{"PublicIP":"192.0.2.9","BackendType":"host-gw"}`)
	putKey(t, store, networksRoot+"pink/config", `{`)
	s := newSupervisor(t, h, "notify")
	d := start(t, h, lab.FlanneldOptions{Env: s.env(), Args: []string{"--networks=red,green,pink,grey"}})
	expectPhase(t, l, "red", "serving")
	expectPhase(t, l, "pink", "refused")
	if got := s.next(t, time.Second); got != "" {
		t.Errorf("notification %q while green is not ready, want none", got)
	}
	code, reasons, _ := d.Get(testContext(t), "/readyz")
	if code != http.StatusServiceUnavailable || !strings.Contains(reasons, "network green: ") || strings.Contains(reasons, "network red") {
		t.Errorf("/readyz answers %d %q, want 503 and only network green", code, reasons)
	}
	removeKey(t, store, taken)
	s.expect(t, "READY=1")
	expectPhase(t, l, "green", "serving")
	if code, reasons, err := d.Get(testContext(t), "/readyz"); err != nil {
		t.Errorf("/readyz answers %d %q, %v, want 200", code, reasons, err)
	}
	expectStop(t, d)
	s.expect(t, "STOPPING=1")
}

// TestNetworkDeletedBeforeItHasASubnet deletes a network that waits for a subnet. The daemon must remove the
// network at once, and must not log that the network failed.
func TestNetworkDeletedBeforeItHasASubnet(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","SubnetMin":"10.6.1.0","SubnetMax":"10.6.1.0","Backend":{"Type":"host-gw"}}`)
	putKey(t, s, networksRoot+"green/subnets/10.6.1.0-24", `{"PublicIP":"192.0.2.9","BackendType":"host-gw"}`)
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "green", "waiting for a subnet")
	removeKey(t, s, networksRoot+"green/config")
	d := l.Host(1).Daemon()
	expectLog(t, d, "network was deleted: its lease, devices, routes, rules and files are gone")
	expectForgotten(t, l, "green")
	if log := d.Log(); strings.Contains(log, "network failed") {
		t.Errorf("the daemon took the deletion for a failure:\n%s", log)
	}
}

// TestNetworkDeletedMeanwhile deletes a network while the daemon is down, and removes another one from the
// daemon's flags. etcd compacts its history, so the daemon cannot read of the deletion. After the start, no
// device and no lease of the two networks may be left.
//
//stages:rest TestNetworks deletes a network while the daemon runs
func TestNetworkDeletedMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	s, h := etcdClient(t, l), l.Host(1)
	for i, name := range []string{"blue", "green", "red"} {
		putKey(t, s, networksRoot+name+"/config", fmt.Sprintf(`{"Network":"10.%d.0.0/16","Backend":{"Type":"vxlan","VNI":%d}}`, 5+i, 5+i))
	}
	startNetworks(t, l, "--networks=blue,green,red")
	for _, name := range []string{"blue", "green", "red"} {
		expectPhase(t, l, name, "serving")
	}
	expectStop(t, h.Daemon())
	removeKey(t, s, networksRoot+"green/config")
	if r, err := s.Put(testContext(t), "/other", ""); err != nil {
		t.Fatal(err)
	} else if _, err := s.Compact(testContext(t), r.Header.Revision); err != nil {
		t.Fatal(err)
	}
	startNetworks(t, l, "--networks=green,red")
	eventually(t, "only red is left", func() error {
		out, err := h.Exec(testContext(t), "ip", "-br", "link", "show", "type", "vxlan")
		if err != nil || strings.Count(string(out), "flannel.") != 1 || !strings.Contains(string(out), "flannel.7") {
			return fmt.Errorf("%w: %s", err, out)
		}
		for _, name := range []string{"blue", "green"} {
			resp, err := s.Get(testContext(t), networksRoot+name+"/subnets/", clientv3.WithPrefix())
			if err != nil || len(resp.Kvs) > 0 {
				return fmt.Errorf("%s has leases: %v, %w", name, resp.Kvs, err)
			}
		}
		return nil
	})
	expectPhase(t, l, "red", "serving")
}

// TestNetworksRestart restarts a daemon with ten dual-stack networks, half of them with vxlan and half with
// host-gw. Nothing may change in the kernel, and no packet may be lost.
//
//stages:rest TestNetworksWithoutTheStore restarts a daemon with two networks
func TestNetworksRestart(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, "")
	s := etcdClient(t, l)
	var names []string
	for i := range 10 {
		name := fmt.Sprintf("n%d", i)
		names = append(names, name)
		backend := fmt.Sprintf(`{"Type":"vxlan","VNI":%d}`, 10+i)
		if i%2 == 1 {
			backend = `{"Type":"host-gw"}`
		}
		putKey(t, s, networksRoot+name+"/config", fmt.Sprintf(
			`{"Network":"10.%[1]d.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:%[1]d::/48","Backend":%[2]s}`, 50+i, backend))
	}
	startNetworks(t, l, "--watch-networks")
	var flows []*lab.Flow
	for _, name := range names {
		expectPhase(t, l, name, "serving")
		pods := addNetworkPods(t, l, name)
		expectAnswers(t, pods)
		for _, f := range dual {
			flow, err := pods[0].StartFlow(testContext(t), pods[1], f, 100)
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, flow)
		}
	}
	h := l.Host(1)
	monitor := newKernelMonitor(t, h)
	for i := range 4 {
		if i%2 == 0 {
			expectStop(t, h.Daemon())
		} else {
			h.Daemon().Kill()
		}
		start(t, h, lab.FlanneldOptions{Args: []string{"--watch-networks"}})
		for _, name := range names {
			expectPhase(t, l, name, "serving")
		}
		// Meanwhile the kernel may give link-local addresses to the bridge ports of new pods.
		changes := slices.DeleteFunc(monitor.notifications(t), func(s string) bool { return strings.Contains(s, " fe80::") })
		if len(changes) > 0 {
			t.Errorf("restart %d changed the kernel: %q", i, changes)
		}
	}
	for _, f := range flows {
		if st := f.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
			t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
		}
	}
}

// TestNetworksOfOneBackend checks that one daemon serves two networks with udp and two with wireguard, each
// with its own ports and both families.
//
//stages:rest TestNetworks has several networks with vxlan
func TestNetworksOfOneBackend(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, "")
	s := etcdClient(t, l)
	all := map[string]string{
		"u1": `{"Network":"10.50.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:50::/48","Backend":{"Type":"udp"}}`,
		"u2": `{"Network":"10.51.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:51::/48","Backend":{"Type":"udp","Port":8286}}`,
		"w1": `{"Network":"10.52.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:52::/48","Backend":{"Type":"wireguard"}}`,
		"w2": `{"Network":"10.53.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:53::/48","Backend":{"Type":"wireguard","ListenPort":51830,"ListenPortV6":51831}}`,
	}
	for name, config := range all {
		putKey(t, s, networksRoot+name+"/config", config)
	}
	startNetworks(t, l, "--watch-networks")
	for name := range all {
		expectPhase(t, l, name, "serving")
		expectAnswers(t, addNetworkPods(t, l, name))
	}
}

// TestNetworksOfCommands checks two networks with extension, one with alloc and one with vxlan in one daemon.
// The test itself adds the routes for alloc. When a network with extension is deleted, ShutdownCommand must
// run, and the routes of the network must be removed. When it is added again, PreStartupCommand must run.
// When the daemon stops, each of the two networks must run ShutdownCommand.
//
//stages:rest TestNetworks has networks of other backends
func TestNetworksOfCommands(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	commands := func(name string) string {
		return extensionConfig(t, map[string]any{
			"PreStartupCommand":   "echo pre " + name + " >> " + calls,
			"SubnetAddCommand":    "ip route add $SUBNET via $PUBLIC_IP",
			"SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP",
			"ShutdownCommand":     "echo shutdown " + name + " >> " + calls,
		})
	}
	names := []string{"v", "x1", "x2", "a"}
	for i, backend := range []string{`{"Type":"vxlan"}`, commands("x1"), commands("x2"), `{"Type":"alloc"}`} {
		putKey(t, s, networksRoot+names[i]+"/config", fmt.Sprintf(`{"Network":"10.%d.0.0/16","Backend":%s}`, 50+i, backend))
	}
	startNetworks(t, l, "--watch-networks")
	for _, name := range names {
		expectPhase(t, l, name, "serving")
		addNetworkPods(t, l, name)
	}
	for i, h := range l.Hosts() {
		other := l.Hosts()[1-i]
		subnet := overviewOf(t, other)["a"].Subnets[0].String()
		if out, err := h.Exec(testContext(t), "ip", "route", "add", subnet, "via", other.Addr(prefix.IPv4).String()); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		clearCalls(t, h)
	}
	for _, begin := range []string{"10.50.", "10.51.", "10.52.", "10.53."} {
		expectAnswers(t, podsIn(l, begin))
	}

	removeKey(t, s, networksRoot+"x1/config")
	for _, h := range l.Hosts() {
		expectCalls(t, h, "shutdown x1")
		eventually(t, "the routes of x1 on "+h.Name()+" are gone", func() error {
			out, err := h.Exec(testContext(t), "ip", "route", "show", "root", "10.51.0.0/16")
			if err != nil || strings.Contains(string(out), "via") {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	for _, begin := range []string{"10.50.", "10.52.", "10.53."} {
		expectAnswers(t, podsIn(l, begin))
	}
	putKey(t, s, networksRoot+"x1/config", fmt.Sprintf(`{"Network":"10.51.0.0/16","Backend":%s}`, commands("x1")))
	expectPhase(t, l, "x1", "serving")
	for _, h := range l.Hosts() {
		expectCalls(t, h, "pre x1")
	}

	h := l.Host(1)
	expectStop(t, h.Daemon())
	text, err := os.ReadFile(h.Path(calls))
	got := strings.Split(strings.TrimSpace(string(text)), "\n")
	slices.Sort(got)
	if want := []string{"shutdown x1", "shutdown x2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("the commands %q ran when the daemon stopped, %v, want %q", got, err, want)
	}
}

// TestVMNetworksIPIP checks a network with ipip beside one with vxlan. A second network with ipip must be
// refused until the first one is deleted.
//
//stages:rest the kernel of the guest is emulated
func TestVMNetworksIPIP(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"i1/config", `{"Network":"10.50.0.0/16","Backend":{"Type":"ipip"}}`)
	putKey(t, s, networksRoot+"i2/config", `{"Network":"10.51.0.0/16","Backend":{"Type":"ipip"}}`)
	putKey(t, s, networksRoot+"v/config", `{"Network":"10.52.0.0/16","Backend":{"Type":"vxlan"}}`)
	startNetworks(t, l, "--watch-networks", "--ip-masq")
	for _, name := range []string{"i1", "v"} {
		expectPhase(t, l, name, "serving")
		expectAnswers(t, addNetworkPods(t, l, name))
	}
	expectPhase(t, l, "i2", "refused")
	if why := overviewOf(t, l.Host(1))["i2"].Reasons; len(why) != 1 || !strings.Contains(why[0], "network i1, which was there first: both have the device flannel.ipip") {
		t.Errorf("i2 was refused because of %q", why)
	}
	removeKey(t, s, networksRoot+"i1/config")
	expectPhase(t, l, "i2", "serving")
	expectAnswers(t, addNetworkPods(t, l, "i2"))
	expectAnswers(t, podsIn(l, "10.52."))
}

// TestNetworksFlannelctl checks the commands of flannelctl for one of two networks. cleanup must remove
// everything that the daemon has left of both.
//
//stages:rest TestFlannelctlOnLeases has the commands for one network
func TestNetworksFlannelctl(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s, h := etcdClient(t, l), l.Host(1)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":6}}`)
	args := strings.Fields
	expectFlannelctl(t, h, args("config get --network green"), "10.6.0.0/16")
	expectFlannelctl(t, h, args("reserve --network green 10.6.7.0/24 "+h.Addr(prefix.IPv4).String()), "10.6.7.0-24 is reserved")
	expectFlannelctlFails(t, h, args("reserve --network red 10.6.7.0/24,10.6.8.0/24 192.0.2.1"))
	expectFlannelctlFails(t, h, args("leases --network config"), "config")
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`)
	startNetworks(t, l, "--watch-networks", "--ip-masq")
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
	}
	expectFlannelctl(t, h, args("networks -o name"), "green\nred\n")
	expectFlannelctl(t, h, args("networks"), "green     serving   vxlan     10.6.0.0/16   10.6.7.0/24", "red       serving   host-gw")
	expectFlannelctl(t, h, args("leases --network green"), "10.6.7.0/24", h.Addr(prefix.IPv4).String())
	expectFlannelctl(t, h, args("status --network green"), "10.6.7.0/24", "vxlan, network 10.6.0.0/16")
	shell(t, h.Namespace, "ip link add br-red type bridge; ip addr add 10.5.0.1/24 dev br-red") // no host gets the first subnet
	expectFlannelctl(t, h, args("status"), "problem: br-red has the address 10.5.0.1/24")
	shell(t, h.Namespace, "ip link del br-red")
	expectFlannelctlExits(t, h, 2, args("status --network blue"), "blue")
	expectFlannelctlExits(t, h, 2, args("check"), "choose one of green, red with --network")
	expectFlannelctl(t, h, args("check --network red"))
	file := filepath.Join(t.TempDir(), "host.tar.gz")
	expectFlannelctl(t, h, args("sysdump --file "+file), file)
	for name, want := range map[string]string{
		"flannelctl/networks.txt": "10.6.7.0/24", "flannelctl/status-green.txt": "vxlan, network 10.6.0.0/16", "flannelctl/status-red.txt": "host-gw, network 10.5.0.0/16",
		"flannelctl/check-red.txt": "SUBNET ", "flannelctl/config-green.txt": `"VNI":6`, "flannelctl/config-red.txt": "10.5.0.0/16", "flannelctl/leases-green.txt": "10.6.7.0/24",
		"daemon/statusz-green.json": "10.6.7.0/24", "daemon/statusz-red.json": `"host-gw"`,
	} {
		text, err := h.Exec(testContext(t), "tar", "-xzOf", file, "--wildcards", "*/"+name)
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, no %q in\n%s", name, err, want, text)
		}
	}
	expectFlannelctl(t, h, args("unreserve --network green 10.6.7.0/24"))

	expectStop(t, h.Daemon())
	expectFlannelctl(t, h, args("cleanup --yes"), "flannel.6", "10.5.0.0/16", "10.6.0.0/16", "/run/flannel/networks/green.env", "/run/flannel/networks/red.env")
	out, err := h.Exec(testContext(t), "sh", "-c", "ip link; ip route; iptables-save; ls /run/flannel/networks /var/lib/flannel")
	if left := string(out); strings.Contains(left, "flannel.6") || strings.Contains(left, "10.5.") || strings.Contains(left, "10.6.") || strings.Contains(left, ".env") {
		t.Errorf("%v, cleanup has left something:\n%s", err, left)
	}
}

// TestNetworksOfAnEmptiedStore checks that a network loses no packet if etcd loses all data. Hosts must
// publish their leases again, and serve the network when its configuration is back.
func TestNetworksOfAnEmptiedStore(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	const config = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`
	putKey(t, etcdClient(t, l), networksRoot+"red/config", config)
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "red", "serving")
	pods := addNetworkPods(t, l, "red")
	expectAnswers(t, pods)
	flow, err := pods[0].StartFlow(testContext(t), pods[1], prefix.IPv4, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	s := etcdClient(t, l)
	eventually(t, "hosts put their leases into the new store", func() error {
		resp, err := s.Get(testContext(t), networksRoot+"red/subnets/", clientv3.WithPrefix())
		if err != nil || len(resp.Kvs) != 2 {
			return fmt.Errorf("%d leases, %w", len(resp.Kvs), err)
		}
		return nil
	})
	putKey(t, s, networksRoot+"red/config", config)
	expectPhase(t, l, "red", "serving")
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
	}
}

// TestNetworksOfACompactedStore starts daemons after etcd has lost all data while they were down. The new
// etcd has a higher revision than the daemons have seen and a compacted history, so they cannot know whether
// the network was deleted. They must serve the network until the test deletes it by the commands that the
// status gives.
//
//stages:rest TestNetworksOfAnEmptiedStore has a store that has lost its networks
func TestNetworksOfACompactedStore(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	const config = networksRoot + "red/config"
	putKey(t, etcdClient(t, l), config, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "red", "serving")
	pods := addNetworkPods(t, l, "red")
	expectAnswers(t, pods)
	flow, err := pods[0].StartFlow(testContext(t), pods[1], prefix.IPv4, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
	}
	if err := l.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	s := etcdClient(t, l)
	for range 100 { // so that the revision becomes higher than the one that the daemons have seen
		putKey(t, s, "/other", "")
	}
	last, err := s.Get(testContext(t), "/other")
	if err == nil {
		_, err = s.Compact(testContext(t), last.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	startNetworks(t, l, "--watch-networks")
	expectPhase(t, l, "red", "serving")
	for _, h := range l.Hosts() {
		if code, reasons, err := h.Daemon().Get(testContext(t), "/readyz"); err != nil {
			t.Errorf("/readyz answers %d %q, %v, want 200", code, reasons, err)
		}
		expectLog(t, h.Daemon(), "going on with the last network configuration")
		const remedy = "delete the network by etcdctl put " + config + " '{}' and etcdctl del " + config
		if why := overviewOf(t, h)["red"].Reasons; len(why) != 1 || !strings.Contains(why[0], remedy) {
			t.Errorf("reasons %q, want one with the remedy %q", why, remedy)
		}
	}
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
	}
	putKey(t, s, config, "{}")
	removeKey(t, s, config)
	expectForgotten(t, l, "red")
	for _, h := range l.Hosts() {
		eventually(t, "the device of the deleted network is gone", func() error {
			out, err := h.Exec(testContext(t), "ip", "-br", "link", "show", "type", "vxlan")
			if err != nil || len(out) > 0 {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
}

// TestPageNetworks runs the commands of networks.md on a host, in their order. It starts the daemon where the
// page does.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPageNetworks(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	m := newMachine(t, l.Host(1))
	for _, e := range pageExamples(t, "networks.md") {
		args := strings.Fields(e.command)
		switch program := args[0]; {
		case program == "flanneld" && args[1] == "--watch-networks": // on the page, an alternative to the command before
		case program == "flanneld":
			startNetworks(t, l, args[1:]...)
			expectPhase(t, l, "red", "serving")
			expectPhase(t, l, "green", "serving")
		case program == "etcdctl", program == "flannelctl":
			e.expect(t, m.run(e.command))
		}
	}
	expectLog(t, l.Host(1).Daemon(), `"network was deleted: its lease, devices, routes, rules and files are gone" network="green"`)
	expectPhase(t, l, "red", "serving")
}

// TestNetworksCNI gives a pod on each of two hosts an interface in each of two networks, by two CNI
// configurations. The pods must reach each other in both networks.
//
//stages:rest it needs the CNI plugins of a component
func TestNetworksCNI(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	startNetworks(t, l, "--networks=red,green", "--ip-masq")
	var pods []*lab.Pod
	addrs := map[string][]netip.Addr{}
	for _, h := range l.Hosts() {
		p, err := h.AddEmptyPod(testContext(t), "pod")
		if err != nil {
			t.Fatal(err)
		}
		for i, network := range []string{"red", "green"} {
			expectPhase(t, l, network, "serving")
			runtime := newCNI(t, h, "1.0.0", fmt.Sprintf(`"subnetFile":%q,"dataDir":"/var/lib/cni/flannel-%s","delegate":{"bridge":"br-%s","isDefaultGateway":%v,"ipMasq":false}`,
				lab.NetworkFile(network), network, network, i == 0))
			runtime.list.Name = network
			rt := conf(p)
			rt.IfName = fmt.Sprintf("eth%d", i)
			result, err := runtime.tryAdd(rt)
			if err != nil {
				t.Fatalf("ADD %s to %s: %v", p.Name(), network, err)
			}
			for _, ip := range result.IPs {
				addrs[network] = append(addrs[network], netip.MustParsePrefix(ip.Address.String()).Addr())
			}
		}
		pods = append(pods, p)
	}
	for network, at := range addrs {
		if len(at) != 2 {
			t.Fatalf("the pods have the addresses %v in network %s, want two", at, network)
		}
		eventually(t, "the pods reach each other in network "+network, func() error {
			_, err := pods[0].Ping(testContext(t), at[1], lab.Echo{})
			return err
		})
	}
}
