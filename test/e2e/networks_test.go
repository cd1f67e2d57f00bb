// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	clientv3 "go.etcd.io/etcd/client/v3"

	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/test/lab"
)

// networksRoot is the prefix of all networks in the store.
const networksRoot = "/coreos.com/network/"

// overviewOf returns the networks that the daemon of h lists, by name.
func overviewOf(t *testing.T, h *lab.Host) map[string]status.NetworkSummary {
	t.Helper()
	var r status.Report
	eventually(t, "the status of "+h.Name(), func() error { // the daemon may be starting
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

// expectPhase waits until the daemons of all hosts have a network in a phase.
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

// addNetworkPods adds a pod of the network on every host.
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

// expectAnswers waits until every pod reaches every other.
func expectAnswers(t *testing.T, pods []*lab.Pod) {
	t.Helper()
	eventually(t, "pods of one network reach each other", func() error {
		for _, from := range pods {
			for _, to := range pods {
				for _, a := range to.Addrs() {
					if _, err := from.Ping(testContext(t), a, ping.Options{}); from != to && err != nil {
						return fmt.Errorf("%s to %s: %w", from.Name(), to.Name(), err)
					}
				}
			}
		}
		return nil
	})
}

// TestNetworks serves networks with different backends by one daemon on each host. While packets
// flow in one of them, others are changed, broken, deleted and added.
func TestNetworks(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	putKey(t, s, networksRoot+"blue/config", `{"Network":"10.7.0.0/16","Backend":{"Type":"udp"}}`)
	for _, h := range l.Hosts() {
		if _, err := h.StartFlanneld(testContext(t), lab.FlanneldOptions{Args: []string{"--watch-networks", "--ip-masq"}}); err != nil {
			t.Fatal(err)
		}
	}
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

	// Another network clashes with red, until it gets a VNI and a range of its own.
	putKey(t, s, networksRoot+"pink/config", `{"Network":"10.8.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectPhase(t, l, "pink", "refused")
	if why := overviewOf(t, l.Host(1))["pink"].Reasons; len(why) != 1 || !strings.Contains(why[0], "network red, which was there first: both have the device flannel.1") {
		t.Errorf("pink was refused because of %q", why)
	}
	putKey(t, s, networksRoot+"pink/config", `{"Network":"10.8.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`)
	expectPhase(t, l, "pink", "serving")
	expectAnswers(t, addNetworkPods(t, l, "pink"))

	// A configuration that cannot be used leaves the network as it is.
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

	// A deleted network leaves nothing.
	removeKey(t, s, networksRoot+"green/config")
	expectPhase(t, l, "green", "waiting for the network configuration")
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
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets of red were lost", len(st.Lost), st.Sent)
	}
}

// podsIn returns the pods whose address begins with the text.
func podsIn(l *lab.Lab, begin string) []*lab.Pod {
	return slices.DeleteFunc(l.Pods(), func(p *lab.Pod) bool { return !strings.HasPrefix(p.Addrs()[0].String(), begin) })
}

// TestNetworksWithoutTheStore restarts a daemon with several networks while etcd is away.
func TestNetworksWithoutTheStore(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)
	args := lab.FlanneldOptions{Args: []string{"--networks=green,red"}}
	for _, h := range l.Hosts() {
		if _, err := h.StartFlanneld(testContext(t), args); err != nil {
			t.Fatal(err)
		}
	}
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
	if _, err := l.Host(1).StartFlanneld(testContext(t), args); err != nil {
		t.Fatal(err)
	}
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
