// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// followed is the message that a daemon logs when it has changed to another configuration.
const followed = "the network uses the changed configuration"

// edits writes changed network configurations and waits until all daemons use them. done contains for
// each daemon how often it must have changed to another configuration since its start.
type edits struct {
	t    *testing.T
	lab  *lab.Lab
	done map[*lab.Daemon]int
}

func newEdits(t *testing.T, l *lab.Lab) *edits {
	return &edits{t: t, lab: l, done: map[*lab.Daemon]int{}}
}

// put writes a configuration that all daemons must follow, and waits until they have.
func (e *edits) put(config string) {
	e.t.Helper()
	if err := e.lab.PutNetwork(testContext(e.t), json.RawMessage(config)); err != nil {
		e.t.Fatal(err)
	}
	e.expectFollowed()
}

// expectFollowed waits until all daemons have followed exactly one more change than before and are
// ready, with routes to all peers.
func (e *edits) expectFollowed() {
	e.t.Helper()
	for _, h := range e.lab.Hosts() {
		d := h.Daemon()
		e.done[d]++
		eventually(e.t, h.Name()+" follows the configuration", func() error {
			if n := len(linesWith(d, followed)); n != e.done[d] {
				return fmt.Errorf("it has followed %d changes, want %d", n, e.done[d])
			}
			if r := statusOf(e.t, h); !r.Ready || r.Network.Phase != "serving" || r.ConfigRejected != "" || r.RestartNeeded != "" {
				return fmt.Errorf("ready %v %v, phase %q, rejected %q, restart needed %q", r.Ready, r.Reasons, r.Network.Phase, r.ConfigRejected, r.RestartNeeded)
			}
			return nil
		})
	}
	expectPeersProgrammed(e.t, e.lab)
}

// dualConfig returns a dual-stack network configuration. more contains further keys, each after a
// comma. backend is a JSON object.
func dualConfig(more, backend string) string {
	return fmt.Sprintf(`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48"%s,"Backend":%s}`, more, backend)
}

// expectInOutput waits until the output of a command on the host contains all of want.
func expectInOutput(t *testing.T, h *lab.Host, command string, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s: %q", command, want), func() error {
		out, err := h.Exec(testContext(t), "sh", "-c", command)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		for _, text := range want {
			if !strings.Contains(string(out), text) {
				return fmt.Errorf("%q is not in:\n%s", text, out)
			}
		}
		return nil
	})
}

// TestConfigurationFollowedInPlace makes changes that a running network can follow without a loss, while
// packets flow between all pods. No packet may be lost. The device, the process and the leases must stay
// the same.
func TestConfigurationFollowedInPlace(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: json.RawMessage(dualConfig("", `{"Type":"vxlan"}`))}, "")
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--ip-masq"}})
	flows := startFlows(t, l, fast)
	h := l.Host(1)
	index := func() (n int) {
		t.Helper()
		err := h.Do(testContext(t), func() error {
			device, err := net.InterfaceByName("flannel.1")
			if err == nil {
				n = device.Index
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before, pid := index(), statusOf(t, h).PID
	var keys []string
	for _, one := range leases(t, l) {
		keys = append(keys, one.Key)
	}
	e := newEdits(t, l)
	for _, step := range []struct {
		more, backend, command string
		want                   []string
	}{
		{`,"NonMasqueradeCIDRs":["192.0.2.0/24"]`, `{"Type":"vxlan"}`, "iptables-save", []string{"192.0.2.0/24"}},
		{`,"EnableNFTables":true`, `{"Type":"vxlan"}`, "nft list ruleset", []string{"10.5.0.0/16"}},
		{`,"SubnetMin":"10.5.0.0"`, `{"Type":"vxlan"}`, "iptables-save", []string{"10.5.0.0/16"}},
		{"", `{"Type":"vxlan","MTU":1400}`, "ip link show flannel.1; cat /run/flannel/subnet.env", []string{"mtu 1350", "FLANNEL_MTU=1330"}},
		{"", `{"Type":"vxlan","MTU":"probe"}`, "ip link show flannel.1; cat /run/flannel/subnet.env", []string{"mtu 1450", "FLANNEL_MTU=1430"}},
		{"", `{"Type":"vxlan","MTU":1400}`, "ip link show flannel.1; cat /run/flannel/subnet.env", []string{"mtu 1350", "FLANNEL_MTU=1330"}},
		{"", `{"Type":"vxlan","DirectRouting":true}`, "ip route", []string{"dev eth0 proto 98"}},
		{"", `{"Type":"vxlan","ChecksumOffload":"off"}`, "ip route", []string{"dev flannel.1 proto 98"}},
		{"", `{"Type":"vxlan","GBP":false,"Learning":true}`, "ip -d link show flannel.1 | grep -c nolearning || true", []string{"0"}},
	} {
		e.put(dualConfig(step.more, step.backend))
		expectInOutput(t, h, strings.ReplaceAll(step.command, "/run", h.Path("/run")), step.want...)
	}
	expectNothingLost(t, flows)
	if after := index(); after != before || statusOf(t, h).PID != pid {
		t.Errorf("the device has number %d and had %d: want the same device, and the same process", after, before)
	}
	var now []string
	for _, one := range leases(t, l) {
		now = append(now, one.Key)
	}
	if !slices.Equal(keys, now) {
		t.Errorf("the leases are %v, want %v as before", now, keys)
	}
	for _, h := range l.Hosts() {
		expectNoFormer(t, h)
	}
}

// TestConfigurationFollowedInUserspace makes such changes as TestConfigurationFollowedInPlace with
// backends whose packets the daemon carries. No packet may be lost.
//
//stages:rest TestConfigurationFollowedInPlace has the same changes in the kernel
func TestConfigurationFollowedInUserspace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		steps []string // configurations of the backend, the first one at the start
	}{
		{"wireguard", []string{
			backendConfig(userspace),
			`{"Type":"wireguard","Implementation":"userspace","PersistentKeepaliveInterval":7}`,
			`{"Type":"wireguard","Implementation":"userspace","MTU":1400}`,
			`{"Type":"wireguard","Implementation":"userspace","MTU":"probe"}`,
		}},
		{"udp", []string{backendConfig("udp"), `{"Type":"udp","Mode":"auto"}`, `{"Type":"udp","MTU":"probe"}`, backendConfig("udp")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: json.RawMessage(dualConfig("", tt.steps[0]))}, "")
			startAll(t, l, lab.FlanneldOptions{})
			flows := startFlows(t, l, 300)
			e := newEdits(t, l)
			for _, backend := range tt.steps[1:] {
				e.put(dualConfig("", backend))
			}
			expectNothingLost(t, flows)
			expectMatrix(t, l)
		})
	}
}

// TestConfigurationFollowedAfterAMove changes the configuration twice, each time after the external
// interface of a host has changed and the host has begun another session. The first change affects only
// traffic rules, and the second one the backend. Between the changes a peer joins, which the host must
// serve. The host's former sessions must not undo changes.
func TestConfigurationFollowedAfterAMove(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	for _, n := range []int{1, 2} {
		startOne(t, l.Host(n), lab.FlanneldOptions{Args: []string{"--ip-masq"}})
	}
	h := l.Host(1)
	move := func(mtu int) {
		t.Helper()
		if out, err := h.Exec(testContext(t), "ip", "link", "set", "eth0", "mtu", fmt.Sprint(mtu)); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		eventually(t, "the session on the changed interface", func() error {
			if r := statusOf(t, h); r.Network.MTU != mtu-50 || !r.Ready {
				return fmt.Errorf("MTU %d, ready %v", r.Network.MTU, r.Ready)
			}
			return nil
		})
	}
	put := func(keys, backend string) {
		t.Helper()
		network := fmt.Sprintf(`{"Network":"10.5.0.0/16"%s,"Backend":%s}`, keys, backend)
		before := len(linesWith(h.Daemon(), followed))
		if err := l.PutNetwork(testContext(t), json.RawMessage(network)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the change is followed", func() error {
			if len(linesWith(h.Daemon(), followed)) == before {
				return errors.New("it is not")
			}
			return nil
		})
	}
	move(1400)
	put(`,"NonMasqueradeCIDRs":["192.0.2.0/24"]`, `{"Type":"vxlan"}`)
	expectInOutput(t, h, "iptables-save", "192.0.2.0/24")
	startOne(t, l.Host(3), lab.FlanneldOptions{Args: []string{"--ip-masq"}})
	expectPeersProgrammed(t, l)
	move(1380)
	put("", `{"Type":"vxlan","VNI":7}`)
	expectPeersProgrammed(t, l)
	expectInOutput(t, h, "ip link", "flannel.7")
	pause(t, 2*time.Second) // if a former session still ran, it would restore its objects in this time
	if state := kernelObjects(t, h); strings.Contains(state, "flannel.1:") {
		t.Errorf("the former device is back:\n%s", state)
	}
	if drift := metric(t, h, "flannel_drift_repaired_total"); drift != 0 {
		t.Errorf("%v repairs, want none: two sessions undo each other's changes", drift)
	}
}

// TestConfigurationFollowed makes changes that need other kernel objects or another lease. After each
// change all pods must reach each other, and nothing of the former configuration may be left.
//
//stages:rest it makes many changes, one after the other
func TestConfigurationFollowed(t *testing.T) {
	t.Parallel()
	const old, other = "10.5.0.0/16", "10.6.0.0/16"
	const old6, other6 = "fd00:5::/48", "fd00:6::/48"
	commands := extensionConfig(t, map[string]any{
		"SubnetAddCommand":    "ip route add $SUBNET via $PUBLIC_IP && ip -6 route add $IPV6SUBNET via $PUBLIC_IPV6",
		"SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP; ip -6 route del $IPV6SUBNET via $PUBLIC_IPV6",
	})
	l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: network(old, old6, `{"Type":"vxlan"}`)}, "")
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--ip-masq"}})
	expectConverged(t, l)
	e := newEdits(t, l)
	for _, step := range []struct {
		name   string
		config json.RawMessage
		left   []string // texts that no kernel may show after the step
	}{
		{"VNI", network(old, old6, `{"Type":"vxlan","VNI":7}`), []string{"flannel.1:", "flannel-v6.1:"}},
		{"port", network(old, old6, `{"Type":"vxlan","VNI":7,"Port":8473}`), []string{"dstport 8472"}},
		{"backend type", network(old, old6, `{"Type":"host-gw"}`), []string{"flannel"}},
		{"wireguard in user space", network(old, old6, backendConfig(userspace)), []string{".0/24 via 192.168.77", "::/64 via fd00:77"}},
		{"udp in user space, on the port of wireguard", network(old, old6, `{"Type":"udp","Port":51820}`), []string{"flannel-wg"}},
		{"commands", network(old, old6, commands), []string{"flannel0", "proto 98"}},
		{"and back", network(old, old6, `{"Type":"vxlan"}`), []string{".0/24 via 192.168.77", "::/64 via fd00:77"}},
	} {
		e.put(string(step.config))
		expectMatrix(t, l)
		for _, h := range l.Hosts() {
			expectNothingOf(t, h, step.left...)
		}
	}
	// The pods of the former Network keep their addresses, and only reach pods on the same host.
	e.put(string(network(other, other6, `{"Type":"vxlan"}`)))
	for _, h := range l.Hosts() {
		expectInOutput(t, h, "cat "+h.Path(lab.SubnetFile), "FLANNEL_NETWORK=10.6.0.0/16", "FLANNEL_SUBNET=10.6.")
		eventually(t, "no route to the former network", func() error {
			routes, err := h.Routes(testContext(t))
			for _, r := range routes {
				if strings.HasPrefix(r.Dst.String(), "10.5.") && r.Dev != lab.PodBridge {
					return fmt.Errorf("route %v, %w", r, err)
				}
			}
			return err
		})
	}
	for _, one := range leases(t, l) {
		if !strings.HasPrefix(one.Key, "10.6.") {
			t.Errorf("lease %s, want leases of 10.6.0.0/16 only", one.Key)
		}
	}
}

// TestConfigurationEnablesIPv6 adds IPv6 to an IPv4 network, and removes it again. No IPv4 packet may be
// lost, and each host must keep its IPv4 subnet.
func TestConfigurationEnablesIPv6(t *testing.T) {
	t.Parallel()
	const one = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`
	l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: json.RawMessage(one)}, "")
	startAll(t, l, lab.FlanneldOptions{})
	had := map[*lab.Host]string{}
	for _, h := range l.Hosts() {
		had[h] = statusOf(t, h).Lease.Subnets[0].String()
	}
	var flows []flow
	expectConverged(t, l)
	for _, to := range l.Pods()[1:] {
		f, err := l.Pods()[0].StartFlow(testContext(t), to, prefix.IPv4, fast)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Stop() })
		flows = append(flows, flow{f, to.Name()})
	}
	e := newEdits(t, l)
	for _, families := range []int{2, 1} {
		config := one
		if families == 2 {
			config = dualConfig("", `{"Type":"vxlan"}`)
		}
		e.put(config)
		for _, h := range l.Hosts() {
			if own := statusOf(t, h).Lease.Subnets; len(own) != families || own[0].String() != had[h] {
				t.Errorf("%s has %v, want %s and %d subnets", h.Name(), own, had[h], families)
			}
			out, err := os.ReadFile(h.Path(lab.SubnetFile))
			if err != nil || strings.Contains(string(out), "FLANNEL_IPV6_SUBNET") != (families == 2) {
				t.Errorf("%s has %v:\n%s", h.Name(), err, out)
			}
			expectNoFormer(t, h)
		}
	}
	expectNothingLost(t, flows)
}

// expectNothingOf waits until the host's kernel shows none of the texts, and its state file lists no
// objects to remove.
func expectNothingOf(t *testing.T, h *lab.Host, texts ...string) {
	t.Helper()
	eventually(t, h.Name()+" has no objects of the former configuration", func() error {
		all := kernelObjects(t, h)
		for _, text := range texts {
			if strings.Contains(all, text) {
				return fmt.Errorf("%q is still there:\n%s", text, all)
			}
		}
		return nil
	})
	expectNoFormer(t, h)
}

// TestConfigurationRejected writes configurations that cannot be used. No packet may be lost. The daemons must stay
// ready, give the reason, and follow the next usable configuration.
func TestConfigurationRejected(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	flows := startFlows(t, l, fast)
	h := l.Host(1)
	for _, h := range l.Hosts() { // prevents the backend ipip from starting
		if out, err := h.Exec(testContext(t), "ip", "link", "add", "flannel.ipip", "type", "bridge"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	had := leases(t, l)
	e := newEdits(t, l)
	for i, step := range []struct{ config, want string }{
		{`{"Network":"169.254.0.0/16","Backend":{"Type":"vxlan"}}`, "link-local"},
		{`{"Network":"192.168.0.0/16","Backend":{"Type":"vxlan"}}`, "an address of this host"},
		{`{"Network":"192.168.0.0/16","SubnetLen":25,"SubnetMin":"192.168.77.128","Backend":{"Type":"vxlan"}}`, "an address of etcd"},
		{`{"Network":`, "invalid network configuration"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlam"}}`, "unknown backend type"},
		{`{"Network":"10.5.0.0/29","Backend":{"Type":"vxlan"}}`, "network is too small"},
		{`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"vxlan"}}`, "IPv6"},
		{`{"Network":"10.6.0.0/16","SubnetMin":"10.6.1.0","SubnetMax":"10.6.1.0","Backend":{"Type":"vxlan"}}`, "out of subnets"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"}}`, "flannel.ipip is of type bridge"},
		{`{"Network":"10.6.0.0/16","Backend":{"Type":"ipip"}}`, "flannel.ipip is of type bridge"},
	} {
		if i == 7 { // the only subnet belongs to another host
			putKey(t, etcdClient(t, l), subnets+"10.6.1.0-24", `{"PublicIP":"192.0.2.9","BackendType":"vxlan"}`)
		}
		if err := l.PutNetwork(testContext(t), json.RawMessage(step.config)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the configuration is rejected: "+step.want, func() error {
			// The status may still show the rejection of the step before, for the same reason. So count
			// the lines, too.
			if n := len(linesWith(h.Daemon(), "the network configuration cannot be used")); n <= i {
				return fmt.Errorf("%d lines about configurations that cannot be used, want %d", n, i+1)
			}
			r := statusOf(t, h)
			if !strings.Contains(r.ConfigRejected, step.want) || !r.Ready || r.Network.Phase != "serving" {
				return fmt.Errorf("rejected %q, ready %v %v, phase %q", r.ConfigRejected, r.Ready, r.Reasons, r.Network.Phase)
			}
			return nil
		})
		if got := metric(t, h, "flannel_config_rejected"); got != 1 {
			t.Errorf("flannel_config_rejected is %v, want 1", got)
		}
		expectFlannelctl(t, h, []string{"status"}, "configuration rejected", step.want)
		lines := linesWith(h.Daemon(), "the network configuration cannot be used")
		if len(lines) != i+1 || !strings.Contains(lines[i], step.want) {
			t.Errorf("%d lines about configurations that cannot be used, want %d, the last with %q: %q", len(lines), i+1, step.want, lines)
		}
	}
	if _, page := getStatus(t, h, "/statusz", "text/html"); !strings.Contains(page, "configuration rejected: ") {
		t.Errorf("the page does not report the rejected configuration:\n%s", page)
	}
	removeKey(t, etcdClient(t, l), subnets+"10.6.1.0-24")
	pause(t, time.Second) // late effects of these configurations would lose packets in this time
	expectNothingLost(t, flows)
	eventually(t, "the hosts have the subnets that they had", func() error {
		if now := leases(t, l); len(now) != 2 || now[0].Key != had[0].Key || now[1].Key != had[1].Key {
			return fmt.Errorf("leases %v, want %v", now, had)
		}
		return nil
	})
	expectMatrix(t, l)
	e.put(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`)
	expectMatrix(t, l)
	if got := metric(t, h, "flannel_config_rejected"); got != 0 {
		t.Errorf("flannel_config_rejected is %v, want 0", got)
	}

	e.put(`{"Network":"192.168.0.0/16","SubnetMin":"192.168.128.0","Backend":{"Type":"vxlan","VNI":8}}`)
	e.put(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`)

	// A misspelt key changes nothing. It is reported once, and once more after a restart.
	const misspelt = `warning="unknown key \"SubnetLength\" is ignored, the nearest known key is \"SubnetLen\"; unknown key \"Prot\"`
	if err := l.PutNetwork(testContext(t), json.RawMessage(`{"Network":"10.5.0.0/16","SubnetLength":26,"Backend":{"Type":"vxlan","VNI":8,"Prot":1}}`)); err != nil {
		t.Fatal(err)
	}
	expectOnce(t, h.Daemon(), misspelt)
	expectStop(t, h.Daemon())
	start(t, h, lab.FlanneldOptions{})
	expectReady(t, h.Daemon())
	expectOnce(t, h.Daemon(), misspelt)
}

// TestConfigurationIsTriedAgain writes a configuration whose backend does not start on one host, because another program
// has a device with that VNI. When that is gone, the host must follow the configuration without a restart.
//
//stages:rest TestConfigurationRejected refuses configurations, and the pause is a minute
func TestConfigurationIsTriedAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	h := l.Host(1)
	link := func(args ...string) {
		if out, err := h.Exec(testContext(t), "ip", append([]string{"link"}, args...)...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	link("add", "other", "type", "vxlan", "id", "9", "dstport", "8472", "dev", "eth0")
	if err := l.PutNetwork(testContext(t), json.RawMessage(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":9}}`)); err != nil {
		t.Fatal(err)
	}
	expectLog(t, h.Daemon(), "(tried again after 1m0s)")
	expectFlannelctl(t, h, []string{"status"}, "configuration rejected", "flannel.9", "(tried again after 1m0s)")
	link("delete", "other")
	within(t, 2*time.Minute, "the host uses the configuration", func() error {
		if r := statusOf(t, h); r.ConfigRejected != "" || r.Network.Phase != "serving" {
			return fmt.Errorf("rejected %q, phase %q", r.ConfigRejected, r.Network.Phase)
		}
		return nil
	})
	expectMatrix(t, l)
}

// hideTUN makes processes of the host unable to create TUN devices.
func hideTUN(t *testing.T, h *lab.Host) {
	t.Helper()
	if out, err := h.Exec(testContext(t), "mount", "-t", "tmpfs", "empty", "/dev/net"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestConfigurationFollowedWithoutTUN changes the configuration of hosts that could not create their device any more.
// They must follow it with the device that they have, and migrate to another backend.
func TestConfigurationFollowedWithoutTUN(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{userspace, "udp"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(backend))
			startAll(t, l, lab.FlanneldOptions{})
			for _, h := range l.Hosts() {
				hideTUN(t, h)
			}
			e := newEdits(t, l)
			e.put(fmt.Sprintf(`{"Network":"10.4.0.0/15","Backend":%s}`, backendConfig(backend)))
			expectMatrix(t, l)
			e.put(fmt.Sprintf(`{"Network":"10.4.0.0/15","Backend":%s,"NextBackend":{"Type":"vxlan"}}`, backendConfig(backend)))
			eventuallyMigrated(t, l, "vxlan")
			expectMatrix(t, l)
		})
	}
}

// TestConfigurationRejectedAtAStart restarts a daemon while the store has a configuration that cannot be
// used. The host must go on with the former configuration as if it had not been restarted: it keeps its
// lease, gives the reason, and follows the next usable configuration. Then it must reach a host that has
// joined. No packet may be lost.
//
//stages:rest TestConfigurationRejected refuses configurations while the daemon runs
func TestConfigurationRejectedAtAStart(t *testing.T) {
	t.Parallel()
	const ttl = 15 * time.Second
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	o := lab.FlanneldOptions{Args: []string{"--subnet-lease-ttl=" + ttl.String()}}
	h, late := l.Host(1), l.Host(3)
	for n := 1; n <= 2; n++ {
		start(t, l.Host(n), o)
		expectReady(t, l.Host(n).Daemon())
		if _, err := l.Host(n).AddPod(testContext(t), "pod"); err != nil {
			t.Fatal(err)
		}
	}
	had := leases(t, l)
	for _, h := range l.Hosts() { // prevents the backend ipip from starting
		if out, err := h.Exec(testContext(t), "ip", "link", "add", "flannel.ipip", "type", "bridge"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	eventually(t, "a packet between pods", func() error {
		_, err := l.Pods()[0].Ping(testContext(t), l.Pods()[1].Addr(prefix.IPv4), lab.Echo{})
		return err
	})
	flow, err := l.Pods()[0].StartFlow(testContext(t), l.Pods()[1], prefix.IPv4, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Stop()
	for _, step := range []struct{ config, want string }{
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"}}`, "flannel.ipip is of type bridge"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"aws-vpc"}}`, "metadata"},
		{`{"Network":`, "invalid network configuration"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlam"}}`, "unknown backend type"},
		{`{"Network":"192.168.0.0/16","Backend":{"Type":"vxlan"}}`, "an address of this host"},
	} {
		expectStop(t, h.Daemon())
		if err := l.PutNetwork(testContext(t), json.RawMessage(step.config)); err != nil {
			t.Fatal(err)
		}
		start(t, h, o)
		expectReady(t, h.Daemon())
		eventually(t, "the configuration is rejected: "+step.want, func() error {
			r := statusOf(t, h)
			if !strings.Contains(r.ConfigRejected, step.want) || !r.Ready || r.Network.Phase != "serving" {
				return fmt.Errorf("rejected %q, ready %v %v, phase %q", r.ConfigRejected, r.Ready, r.Reasons, r.Network.Phase)
			}
			return nil
		})
	}
	pause(t, 2*ttl) // the lease ends if it is not renewed
	if now := leases(t, l); len(now) != 2 || now[0].Key != had[0].Key || now[1].Key != had[1].Key {
		t.Errorf("leases %v, want %v", now, had)
	}
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
	}
	start(t, late, o)
	expectFailure(t, late.Daemon(), "an address of this host")
	if err := l.PutNetwork(testContext(t), json.RawMessage(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`)); err != nil {
		t.Fatal(err)
	}
	start(t, late, o)
	expectReady(t, late.Daemon())
	if _, err := late.AddPod(testContext(t), "pod"); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
}

// TestConfigurationFollowedAfterACrash kills a daemon at various moments of a change. The next daemon
// must use the new configuration, and remove all objects of the former one: the devices of both families,
// and after a change of the Network the rules.
//
//stages:rest TestConfigurationFollowedInPlace follows the same keys without a crash
func TestConfigurationFollowedAfterACrash(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan"}`)}, "")
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	h := l.Host(1)
	for i, ms := range []int{2, 8, 20, 50} {
		// The third change replaces the Network, too. The others change only the VNI.
		n := 5 + i/2
		config := network(fmt.Sprintf("10.%d.0.0/16", n), fmt.Sprintf("fd00:%d::/48", n), fmt.Sprintf(`{"Type":"vxlan","VNI":%d}`, i+2))
		if err := l.PutNetwork(testContext(t), config); err != nil {
			t.Fatal(err)
		}
		pause(t, milliseconds(ms))
		h.Daemon().Kill()
		startOne(t, h, lab.FlanneldOptions{})
		for _, h := range l.Hosts() {
			eventually(t, h.Name()+" uses the last configuration", func() error {
				r := statusOf(t, h)
				if !r.Ready || r.Network.Phase != "serving" || !strings.Contains(fmt.Sprint(r.Network.Devices), fmt.Sprintf("flannel.%d ", i+2)) {
					return fmt.Errorf("ready %v, phase %q, devices %v", r.Ready, r.Network.Phase, r.Network.Devices)
				}
				return nil
			})
		}
		expectPeersProgrammed(t, l)
		for _, h := range l.Hosts() {
			expectNothingOf(t, h, fmt.Sprintf("flannel.%d:", i+1), fmt.Sprintf("flannel-v6.%d:", i+1))
			eventually(t, h.Name()+" has no rules of the former Network", func() error {
				rules, err := h.Exec(testContext(t), "sh", "-c", "iptables-save; ip6tables-save")
				for _, former := range []string{fmt.Sprintf("10.%d.0.0/16", n-1), fmt.Sprintf("fd00:%d::/48", n-1)} {
					if err == nil && strings.Contains(string(rules), former) {
						err = fmt.Errorf("a rule has %s:\n%s", former, rules)
					}
				}
				return err
			})
			own := statusOf(t, h).Lease.Subnets
			expectInOutput(t, h, "cat "+h.Path(lab.SubnetFile), fmt.Sprintf("FLANNEL_NETWORK=10.%d.0.0/16", n), strings.TrimSuffix(own[0].Addr().String(), "0"))
		}
		if have := leases(t, l); len(have) != 2 {
			t.Errorf("leases %v, want one of each host", have)
		}
	}
}

// TestConfigurationFollowedInKubernetes checks that daemons follow changes of the mounted ConfigMap
// without a lost packet, and reject an unusable one. The rejection must be an Event of the Node.
//
//stages:rest it waits for the daemons, which read the file every ten seconds
func TestConfigurationFollowedInKubernetes(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	c.startDaemons()
	flows := startFlows(t, c.Lab, fast)
	file := filepath.Join(c.dir, "net-conf.json")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	e := newEdits(t, c.Lab)
	backend := func(keys string) []byte { return []byte(strings.Replace(string(text), `"vxlan"`, keys, 1)) }
	c.write("net-conf.json", backend(`"vxlan","MTU":1400`))
	e.expectFollowed()
	for _, h := range c.Hosts() {
		expectInOutput(t, h, "ip link show flannel.1", "mtu 1350")
	}
	c.write("net-conf.json", backend(`"vxlam"`))
	for n, h := range c.Hosts() {
		eventually(t, "the configuration is rejected", func() error {
			if r := statusOf(t, h); !r.Ready || !strings.Contains(r.ConfigRejected, "vxlam") {
				return fmt.Errorf("ready %v, rejected %q", r.Ready, r.ConfigRejected)
			}
			return nil
		})
		eventually(t, "an Event", func() error {
			if got := fmt.Sprint(c.events(n + 1)); !strings.Contains(got, "vxlam") {
				return fmt.Errorf("the Events are %s", got)
			}
			return nil
		})
	}
	c.write("net-conf.json", []byte(strings.Replace(string(text), "10.5.0.0/16", "10.99.0.0/16", 1)))
	for _, h := range c.Hosts() {
		eventually(t, "a network without the podCIDRs is rejected", func() error {
			if r := statusOf(t, h); !r.Ready || !strings.Contains(r.ConfigRejected, "10.99.0.0/16") {
				return fmt.Errorf("ready %v, rejected %q", r.Ready, r.ConfigRejected)
			}
			return nil
		})
	}
	expectNothingLost(t, flows)
	c.write("net-conf.json", backend(`"host-gw"`))
	e.expectFollowed()
	expectMatrix(t, c.Lab)
	for _, h := range c.Hosts() {
		expectNothingOf(t, h, "flannel")
	}
}

// TestConfigurationFollowedByNetworks changes the configuration of one of two networks. No packet of the
// other network may be lost, and nothing of it may change in the kernel. While the first change is
// followed, no packet of the changed network may be lost either.
//
//stages:rest TestConfigurationFollowedInPlace has one network
func TestConfigurationFollowedByNetworks(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	s := etcdClient(t, l)
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":6}}`)
	startNetworks(t, l, "--networks=red,green", "--ip-masq")
	var flows []flow
	for _, name := range []string{"red", "green"} {
		expectPhase(t, l, name, "serving")
		pods := addNetworkPods(t, l, name)
		expectAnswers(t, pods)
		one, err := pods[0].StartFlow(testContext(t), pods[1], prefix.IPv4, fast)
		if err != nil {
			t.Fatal(err)
		}
		defer one.Stop()
		flows = append(flows, flow{one, name})
	}
	h := l.Host(1)
	var red *net.Interface
	if err := h.Do(testContext(t), func() (err error) { red, err = net.InterfaceByName("flannel.1"); return err }); err != nil {
		t.Fatal(err)
	}
	monitor := newKernelMonitor(t, h)
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":6,"MTU":1400}}`)
	for _, h := range l.Hosts() {
		expectOnce(t, h.Daemon(), followed)
		expectInOutput(t, h, "ip link show flannel.6", "mtu 1350")
	}
	expectPhase(t, l, "green", "serving")
	expectNothingLost(t, flows[1:])
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.6.0.0/16","SubnetMin":"10.6.1.0","Backend":{"Type":"vxlan","VNI":1}}`)
	eventually(t, "a clash is rejected", func() error {
		if n := overviewOf(t, h)["green"]; n.Phase != "serving" || !strings.Contains(fmt.Sprint(n.Reasons), "clashes with network red") {
			return fmt.Errorf("%+v", n)
		}
		if got := metric(t, h, `flannel_config_rejected{network="green"}`); got != 1 {
			return fmt.Errorf("flannel_config_rejected is %v, want 1", got)
		}
		return nil
	})
	putKey(t, s, networksRoot+"green/config", `{"Network":"10.7.0.0/16","Backend":{"Type":"host-gw"}}`)
	for _, h := range l.Hosts() {
		eventually(t, "green uses the last configuration", func() error {
			n := overviewOf(t, h)["green"]
			if n.Phase != "serving" || !n.Ready || n.BackendType != "host-gw" || len(n.Reasons) > 0 {
				return fmt.Errorf("%+v", n)
			}
			return nil
		})
	}
	for _, change := range monitor.notifications(t) {
		if strings.Contains(change, " 10.5.") || strings.HasPrefix(change, "link") && strings.HasSuffix(change, fmt.Sprintf(" %d", red.Index)) {
			t.Errorf("red, which did not change, had a change in the kernel: %s", change)
		}
	}
	expectNothingLost(t, flows[:1])

	// The configuration of red changes while one daemon is stopped.
	expectStop(t, h.Daemon())
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":1300}}`)
	start(t, h, lab.FlanneldOptions{Args: []string{"--networks=red,green", "--ip-masq"}})
	expectPhase(t, l, "red", "serving")
	for _, h := range l.Hosts() {
		expectInOutput(t, h, "ip link show flannel.1", "mtu 1250")
	}

	const repeated = `keys \"Backend\" and \"backend\" are the same: the last one, \"backend\", counts`
	putKey(t, s, networksRoot+"red/config", `{"Network":"10.5.0.0/16","Backend":{"Type":"udp"},"backend":{"Type":"vxlan","MTU":1300}}`)
	expectOnce(t, h.Daemon(), repeated)
	expectStop(t, h.Daemon())
	start(t, h, lab.FlanneldOptions{Args: []string{"--networks=red,green", "--ip-masq"}})
	expectPhase(t, l, "red", "serving")
	expectOnce(t, h.Daemon(), repeated)
}
