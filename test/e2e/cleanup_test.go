// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestCleanup checks that flannelctl cleanup removes everything that stopped daemons have
// left, and nothing that belongs to other programs.
func TestCleanup(t *testing.T) {
	t.Parallel()
	for _, tc := range []cleanupCase{
		{name: "vxlan", backend: "vxlan", firewall: "iptables"}, {name: "vxlan with nftables", backend: "vxlan", firewall: "nftables"},
		{name: "host-gw", backend: "host-gw", firewall: "iptables"}, {name: "udp", backend: "udp", firewall: "nftables"},
		{name: "wireguard", backend: userspace, firewall: "iptables", prints: "file /var/lib/flannel/wgkey\n"},
		{name: "wireguard with another key file", backend: userspace, firewall: "iptables", env: "WIREGUARD_KEY_FILE=/run/flannel/keys/own", prints: "file /run/flannel/keys/own\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			testCleanup(t, dual, tc)
		})
	}
}

// TestCleanupNexthopObjects checks that cleanup removes the nexthop objects of a daemon with
// many peers, and leaves the nexthop object of another program.
//
//stages:rest TestCleanup removes the objects of a daemon with few peers
func TestCleanupNexthopObjects(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Network: json.RawMessage(`{"Network":"10.0.0.0/8","SubnetLen":24,"SubnetMax":"10.1.0.0","Backend":{"Type":"host-gw"}}`)}, "")
	h, c := l.Host(1), etcdClient(t, l)
	sh := func(script string) string {
		t.Helper()
		out, err := h.Exec(testContext(t), "sh", "-ec", script)
		if err != nil {
			t.Fatal(err, string(out))
		}
		return string(out)
	}
	sh("ip route add 172.20.0.0/16 dev eth0; ip nexthop add id 7 dev eth0 proto static")
	for n := range 300 {
		high, low := n/200, n%200+1
		putKey(t, c, fmt.Sprintf("%s10.%d.%d.0-24", subnets, 9+high, low), fmt.Sprintf(`{"PublicIP":"172.20.%d.%d","BackendType":"host-gw"}`, high, low))
	}
	startOne(t, h, lab.FlanneldOptions{})
	if objects := strings.Count(sh("ip nexthop"), "proto 98"); objects == 0 {
		t.Fatal("there are no nexthop objects to remove")
	}
	expectStop(t, h.Daemon())
	expectFlannelctl(t, h, []string{"cleanup", "--yes"}, "remove route 10.10.100.0/24 via 172.20.1.100 dev eth0")
	left := sh("ip route; ip nexthop")
	if n := strings.Count(left, "proto 98"); n > 0 {
		t.Errorf("%d routes and nexthop objects are left", n)
	}
	if !strings.Contains(left, "id 7 dev eth0") {
		t.Errorf("cleanup removed the nexthop object of another program:\n%s", left)
	}
}

// cleanupCase describes the daemons whose objects cleanup must remove.
type cleanupCase struct {
	name, backend, firewall string
	args                    []string
	env                     string
	prints                  string // the end of one line that cleanup must print; empty if there is no such line
}

// testCleanup runs daemons on two hosts, the first of which also has objects of other
// programs. It stops the first daemon and cleans up its host. cleanup must remove only objects
// of flanneld. It must refuse to run while the daemon runs, change nothing in a dry run, fail
// with a state directory that does not exist, and find nothing when it runs again. Afterwards
// the daemon must work when it starts again.
func testCleanup(t *testing.T, families []prefix.Family, tc cleanupCase) {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 2, Families: families}, backendConfig(tc.backend))
	h := l.Host(1)
	sh := func(script string) string {
		t.Helper()
		out, err := h.Exec(testContext(t), "sh", "-c", script)
		if err != nil {
			t.Fatal(err, string(out))
		}
		return string(out)
	}
	sh(`set -e
		ip link add foreign type veth peer name foreign1
		ip link set foreign up
		ip link set foreign1 up
		ip route add 10.9.0.0/24 dev foreign
		ip route add 10.5.250.0/24 dev foreign proto static
		iptables -A FORWARD -s 10.9.0.0/24 -j ACCEPT
		nft add table ip foreign`)
	for i := range l.Hosts() {
		startOne(t, l.Host(i+1), lab.FlanneldOptions{
			Args: append([]string{"--ip-masq", "--firewall=" + tc.firewall}, tc.args...), Env: []string{tc.env},
		})
	}
	expectPeersProgrammed(t, l)
	foreign := h.Path("/var/lib/flannel/foreign")
	if err := os.WriteFile(foreign, []byte("not ours"), 0o600); err != nil {
		t.Fatal(err)
	}
	expectFlannelctlFails(t, h, []string{"cleanup", "--yes"}, "flanneld runs: stop it first")
	expectFlannelctlFails(t, h, []string{"cleanup", "--yes", "--socket=/nowhere"}, "flanneld runs: stop it first", "in use")
	expectStop(t, h.Daemon())

	rules := func() string { return sh("nft --stateless list ruleset") }
	if !strings.Contains(rules(), "10.5.0.0/16") {
		t.Fatalf("there are no rules to remove:\n%s", rules())
	}
	before := rules()
	listed := strings.Split(expectFlannelctl(t, h, []string{"cleanup"}, "would remove traffic rules of 10.5.0.0/16", "would remove file /run/flannel/subnet.env", "would remove "+tc.prints), "\n")
	if slices.Sort(listed); len(slices.Compact(slices.Clone(listed))) != len(listed) {
		t.Errorf("a dry run names an object more than once: %q", listed)
	}
	if after := rules(); after != before {
		t.Errorf("a dry run changed the rules from\n%s\nto\n%s", before, after)
	}
	if _, err := os.Stat(h.Path("/run/flannel/subnet.env")); err != nil {
		t.Error("a dry run removed the subnet file:", err)
	}
	const unknown = "there are no state files in %s: devices and routes that flanneld has left are not known, and stay"
	expectFlannelctlFails(t, h, []string{"cleanup", "--state-dir=/var/lib/flanel"}, "would remove file /run/flannel/subnet.env", "flannelctl: "+fmt.Sprintf(unknown, "/var/lib/flanel"))
	expectFlannelctl(t, h, []string{"cleanup", "--yes"}, "remove file /run/flannel/subnet.env", "remove "+tc.prints)
	all := sh("ip -o link; ip addr; ip route show table main; ip -6 route show table main; ip neigh show nud permanent; ip nexthop; ip fou show 2>/dev/null || true")
	left := all + rules()
	for _, text := range []string{"flannel", "proto 98", ".5.0.0/16", "fd00:5:", "ipproto 4"} {
		if strings.Contains(strings.ToLower(left), text) {
			t.Errorf("%q is left:\n%s", text, left)
		}
	}
	for _, text := range []string{"10.9.0.0/24 dev foreign", "10.5.250.0/24 dev foreign", "ip saddr 10.9.0.0/24", "table ip foreign"} {
		if !strings.Contains(left, text) {
			t.Errorf("cleanup removed %q, which belongs to another program:\n%s", text, left)
		}
	}
	inRun, err := os.ReadDir(h.Path("/run/flannel"))
	inRun = slices.DeleteFunc(inRun, os.DirEntry.IsDir) // the folder of a key file is the user's
	if err != nil || len(inRun) > 0 {
		t.Errorf("/run/flannel contains %v (%v)", inRun, err)
	}
	files, err := os.ReadDir(h.Path("/var/lib/flannel"))
	if err != nil || len(files) != 1 || files[0].Name() != "foreign" {
		t.Errorf("the state directory contains %v (%v), want only the file of another program", files, err)
	}
	if again := expectFlannelctl(t, h, []string{"cleanup", "--yes"}); again != "there are no state files in /var/lib/flannel and no subnet file: nothing of flanneld is known to be left\n" {
		t.Errorf("the second cleanup prints\n%s\nwant only that nothing is known to be left", again)
	}
	startOne(t, h, lab.FlanneldOptions{})
	expectPeersProgrammed(t, l)
}
