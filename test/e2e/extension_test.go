// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// calls is the file on a host in which commands record that they ran.
const calls = "/run/calls"

// extensionVXLANConfig returns a configuration of the backend extension like the samples that are
// published for flannel. PreStartupCommand deletes the device if it exists, and creates it. Each
// of the other commands fails if it runs twice.
func extensionVXLANConfig(t *testing.T) string {
	t.Helper()
	return extensionConfig(t, map[string]any{
		"PreStartupCommand": "echo pre >> " + calls + "; export VNI=1; export IF_NAME=flannel-vxlan; ip link del $IF_NAME 2>/dev/null; " +
			"ip link add $IF_NAME type vxlan id $VNI dstport 8472 nolearning && ip link set mtu 1450 dev $IF_NAME && ip link show $IF_NAME | awk '/ether/ { print $2 }'",
		"PostStartupCommand": "echo post >> " + calls + "; export IF_NAME=flannel-vxlan; export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; " +
			"ip addr add $SUBNET_IP/32 dev $IF_NAME && ip link set $IF_NAME up",
		"SubnetAddCommand": "echo add $SUBNET >> " + calls + "; export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; export IF_NAME=flannel-vxlan; read VTEP; " +
			"ip route add $SUBNET nexthop via $SUBNET_IP dev $IF_NAME onlink && ip neigh replace $SUBNET_IP lladdr $VTEP dev $IF_NAME && " +
			"bridge fdb add $VTEP dev $IF_NAME self dst $PUBLIC_IP",
		"SubnetRemoveCommand": "echo remove $SUBNET >> " + calls + "; export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; export IF_NAME=flannel-vxlan; read VTEP; " +
			"ip route del $SUBNET; ip neigh del $SUBNET_IP dev $IF_NAME; bridge fdb del $VTEP dev $IF_NAME self dst $PUBLIC_IP",
	})
}

// extensionConfig returns a configuration of the backend extension with the given keys.
func extensionConfig(t *testing.T, commands map[string]any) string {
	t.Helper()
	commands["Type"] = "extension"
	text, err := json.Marshal(commands)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// expectCalls waits until the record of a host contains exactly the wanted commands in this order,
// and then deletes the record. Without want the record must be empty or missing.
func expectCalls(t *testing.T, h *lab.Host, want ...string) {
	t.Helper()
	expectCallsAs(t, h, func(got []string) []string { return got }, want...)
}

// expectCallsAs is expectCalls after reduce has changed the commands that ran.
func expectCallsAs(t *testing.T, h *lab.Host, reduce func([]string) []string, want ...string) {
	t.Helper()
	eventually(t, "commands on "+h.Name(), func() error {
		text, err := os.ReadFile(h.Path(calls))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		got := strings.Split(strings.TrimSpace(string(text)), "\n")
		if strings.Join(reduce(got), "\n") != strings.Join(want, "\n") {
			return fmt.Errorf("the commands %q ran, want %q", got, want)
		}
		return nil
	})
	clearCalls(t, h)
}

// clearCalls deletes the record of commands.
func clearCalls(t *testing.T, h *lab.Host) {
	t.Helper()
	if err := os.RemoveAll(h.Path(calls)); err != nil {
		t.Fatal(err)
	}
}

// TestExtension checks the backend extension: restarts run no command and lose no packet,
// changes of a lease run the right commands, also if the daemon was down meanwhile, and the shell
// does not execute data of a hostile lease.
func TestExtension(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, extensionVXLANConfig(t))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	h := l.Host(1)
	other := netip.PrefixFrom(l.Host(2).Pods()[0].Addr(prefix.IPv4), 24).Masked()
	expectCalls(t, h, "pre", "post", "add "+other.String())

	// Restarts must lose no packets, whether the daemon is stopped or killed.
	flows := startFlows(t, l, 100)
	expectStop(t, h.Daemon())
	startOne(t, h, lab.FlanneldOptions{})
	h.Daemon().Kill()
	startOne(t, h, lab.FlanneldOptions{})
	expectNothingLost(t, flows)
	expectCalls(t, h)

	c := etcdClient(t, l)
	const made = "10.5.200.0/24"
	key := subnets + strings.ReplaceAll(made, "/", "-")
	value := func(ip, data string) string {
		return fmt.Sprintf(`{"PublicIP":%q,"BackendType":"extension","BackendData":%s}`, ip, data)
	}
	putKey(t, c, key, value("192.168.77.200", `"02:00:00:00:02:00"`))
	expectCalls(t, h, "add "+made)
	putKey(t, c, key, value("192.168.77.201", `"02:00:00:00:02:01"`))
	expectCalls(t, h, "remove "+made, "add "+made)
	expectKernelHas(t, h, "dst 192.168.77.201", "dst 192.168.77.200")

	expectStop(t, h.Daemon()) // the lease is deleted while the daemon is down
	removeKey(t, c, key)
	d := startOne(t, h, lab.FlanneldOptions{})
	expectCalls(t, h, "remove "+made)

	for i, data := range []string{`"$(touch /run/pwned)"`, "\"`touch /run/pwned`\"", `"x; touch /run/pwned"`, `"x' ; touch /run/pwned '"`} {
		hostile := fmt.Sprintf("10.5.%d.0/24", 210+i)
		putKey(t, c, subnets+strings.ReplaceAll(hostile, "/", "-"), value(fmt.Sprintf("192.168.77.%d", 210+i), data))
		expectLog(t, d, fmt.Sprintf(`"lease refused" lease="10.5.%d.0-24" reason="SubnetAddCommand: exit status`, 210+i))
		if _, err := os.Stat(h.Path("/run/pwned")); err == nil {
			t.Fatalf("the shell executed %s from a lease", data)
		}
	}
	putKey(t, c, key, value("192.168.77.200", `{"VtepMAC":"02:00:00:00:02:00"}`))
	expectLog(t, d, "want a JSON string")
	putKey(t, c, key, value("192.168.77.255", `"02:00:00:00:02:00"`))
	expectLog(t, d, "has public IP 192.168.77.255, which is a broadcast address")
	if _, _, err := d.Get(t.Context(), "/readyz"); err != nil {
		t.Errorf("an invalid lease of a peer makes the host unready: %v", err)
	}
	expectMatrix(t, l)
}

// TestExtensionLostSubnet checks a host whose subnet another host takes while the daemon is
// stopped. The device of the host still has the old address. After its start the daemon must get
// another subnet, publish the MAC of its new device, and add a route to the other host.
//
//stages:rest TestExtension and TestOwnLeaseDeleted have the parts
func TestExtensionLostSubnet(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, extensionVXLANConfig(t))
	h, c := l.Host(1), etcdClient(t, l)
	expectStop(t, startOne(t, h, lab.FlanneldOptions{}))
	expectCalls(t, h, "pre", "post")
	old, _ := publishedData(t, l, h)
	removeKey(t, c, subnets+old)
	putKey(t, c, subnets+old, `{"PublicIP":"192.168.77.200","BackendType":"extension","BackendData":"02:00:00:00:02:00"}`)
	startOne(t, h, lab.FlanneldOptions{})
	other := strings.ReplaceAll(old, "-", "/")
	expectCalls(t, h, "pre", "post", "add "+other)
	expectKernel(t, h, []string{other + " via "}, nil)
	link, err := h.Exec(testContext(t), "ip", "link", "show", "flannel-vxlan")
	if err != nil {
		t.Fatal(err)
	}
	if key, mac := publishedData(t, l, h); key == old || mac == "" || !strings.Contains(string(link), mac) {
		t.Errorf("the lease is %s with MAC %q, want another than %s with the MAC of\n%s", key, mac, old, link)
	}
}

// publishedData returns the key and BackendData of a host's lease, or fails the test if there is
// none. BackendData is the output of PreStartupCommand.
func publishedData(t *testing.T, l *lab.Lab, h *lab.Host) (key, data string) {
	t.Helper()
	all, err := l.Leases(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range all {
		var value struct{ PublicIP, BackendData string }
		if json.Unmarshal([]byte(one.Value), &value) == nil && value.PublicIP == h.Addr(4).String() {
			return one.Key, value.BackendData
		}
	}
	t.Fatalf("no lease of %s among %v", h.Name(), all)
	return "", ""
}

// expectKernelHas waits until the output of ip(8) and bridge(8) about the data path contains the
// text have, and does not contain the text lack.
func expectKernelHas(t *testing.T, h *lab.Host, have, lack string) {
	t.Helper()
	expectKernel(t, h, []string{have}, []string{lack})
}

// TestExtensionRoutes checks routes that are written by commands: commands that need no shell, for
// one family, and commands with shell syntax, for both.
func TestExtensionRoutes(t *testing.T) {
	t.Parallel()
	t.Run("without a shell", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 3}, extensionConfig(t, map[string]any{
			"SubnetAddCommand":    "ip route add $SUBNET via ${PUBLIC_IP}",
			"SubnetRemoveCommand": "ip route del $SUBNET via ${PUBLIC_IP}",
		}))
		startAll(t, l, lab.FlanneldOptions{})
		expectMatrix(t, l)
		expectMTU(t, l, 1500)
	})
	t.Run("dual stack", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 3, Families: dual}, extensionConfig(t, map[string]any{
			"SubnetAddCommand":    `ip route add "$SUBNET" via "$PUBLIC_IP" && ip -6 route add "$IPV6SUBNET" via "$PUBLIC_IPV6"`,
			"SubnetRemoveCommand": `ip route del "$SUBNET" via "$PUBLIC_IP" && ip -6 route del "$IPV6SUBNET" via "$PUBLIC_IPV6"`,
		}))
		startAll(t, l, lab.FlanneldOptions{})
		expectMatrix(t, l)
	})
	t.Run("IPv6", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 2, Families: v6}, extensionConfig(t, map[string]any{
			"SubnetAddCommand": `ip -6 route add $IPV6SUBNET via $PUBLIC_IPV6`,
		}))
		startAll(t, l, lab.FlanneldOptions{})
		expectMatrix(t, l)
	})
}

// TestExtensionCommandFailures checks that a host is ready and reaches its other peers if the
// command for one peer fails and the command for another hangs.
//
//stages:rest it waits for commands that hang; TestExtension runs commands that do not
func TestExtensionCommandFailures(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, extensionConfig(t, map[string]any{
		"SubnetAddCommand": `case $SUBNET in 10.5.200.*) echo no luck; exit 3;; 10.5.201.*) sleep 1000;; esac; ip route add $SUBNET via $PUBLIC_IP`,
		"CommandTimeout":   20,
	}))
	c := etcdClient(t, l)
	for _, n := range []string{"200", "201"} {
		putKey(t, c, subnets+"10.5."+n+".0-24", fmt.Sprintf(`{"PublicIP":"192.168.77.%s","BackendType":"extension"}`, n))
	}
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), `"SubnetAddCommand: exit status 3: no luck"`)
		expectLog(t, h.Daemon(), "longer than CommandTimeout")
		r := statusOf(t, h)
		i := slices.IndexFunc(r.Peers, func(p status.Peer) bool { return p.Key == "10.5.200.0-24" })
		if i < 0 || r.Peers[i].State != status.Refused || r.Peers[i].Error != "SubnetAddCommand: exit status 3: no luck" || !r.Ready {
			t.Errorf("status of %s is ready: %v, with peers %+v; want it ready, with 10.5.200.0-24 refused and the reason", h.Name(), r.Ready, r.Peers)
		}
		expectStop(t, h.Daemon())
	}
}

// TestExtensionShutdown checks that ShutdownCommand runs when the daemon stops, and that the
// daemon can start again afterwards.
//
//stages:rest TestExtension has the other commands
func TestExtensionShutdown(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, extensionConfig(t, map[string]any{
		"PreStartupCommand": "ip link add down-with-it type bridge",
		"ShutdownCommand":   "ip link del down-with-it",
	}))
	h := l.Host(1)
	for range 2 {
		startOne(t, h, lab.FlanneldOptions{})
		if out, err := h.Exec(testContext(t), "ip", "link", "show", "down-with-it"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		expectStop(t, h.Daemon())
		if out, err := h.Exec(testContext(t), "ip", "link", "show", "down-with-it"); err == nil {
			t.Errorf("ShutdownCommand has not deleted the device: %s", out)
		}
	}
}

// TestExtensionFailsToStart checks that the daemon ends and gives the reason if the backend is not
// allowed or PreStartupCommand fails.
func TestExtensionFailsToStart(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, extensionConfig(t, map[string]any{"PreStartupCommand": "echo no such device >&2; false"}))
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--allow-extension-backend=false"}}),
		"--allow-extension-backend", "as root")
	expectFailure(t, start(t, l.Host(2), lab.FlanneldOptions{}), "PreStartupCommand: exit status 1: no such device")
}

// TestExtensionLeft changes from extension to another backend: live, with a daemon that is killed at
// once, and while the daemon is stopped, also with a cleanup of the host. Everything that commands have done must be undone, once, and
// no command may run again, although the daemons are stopped and start again.
func TestExtensionLeft(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(t *testing.T, l *lab.Lab, put func()){
		"stopped": func(t *testing.T, l *lab.Lab, put func()) {
			expectStop(t, l.Host(1).Daemon())
			put()
			startOne(t, l.Host(1), lab.FlanneldOptions{})
		},
		"cleaned up": func(t *testing.T, l *lab.Lab, put func()) {
			expectStop(t, l.Host(1).Daemon())
			expectFlannelctl(t, l.Host(1), []string{"cleanup", "--yes"}, "remove what the commands of the backend extension have done")
			put()
			startOne(t, l.Host(1), lab.FlanneldOptions{})
		},
		"live": func(_ *testing.T, _ *lab.Lab, put func()) { put() },
		"killed": func(t *testing.T, l *lab.Lab, put func()) {
			put()
			l.Host(1).Daemon().Kill()
			startOne(t, l.Host(1), lab.FlanneldOptions{})
		},
		"killed before": func(t *testing.T, l *lab.Lab, put func()) {
			l.Host(1).Daemon().Kill()
			put()
			startOne(t, l.Host(1), lab.FlanneldOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var config map[string]any
			if err := json.Unmarshal([]byte(extensionVXLANConfig(t)), &config); err != nil {
				t.Fatal(err)
			}
			config["ShutdownCommand"] = "echo shutdown >> " + calls + "; ip link del flannel-vxlan"
			l := newLab(t, lab.Config{Hosts: 2}, extensionConfig(t, config))
			startAll(t, l, lab.FlanneldOptions{})
			expectMatrix(t, l)
			files := func(h *lab.Host) []string {
				all, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-*-commands.json"))
				if err != nil {
					t.Fatal(err)
				}
				return all
			}
			var added []string // the peer's subnet, by host
			for i, h := range l.Hosts() {
				peer := netip.PrefixFrom(l.Host(2 - i).Pods()[0].Addr(prefix.IPv4), 24).Masked()
				added = append(added, peer.String())
				expectCalls(t, h, "pre", "post", "add "+peer.String())
				if len(files(h)) != 1 {
					t.Errorf("%s has the files %v, want one", h.Name(), files(h))
				}
			}

			change(t, l, func() { putConfig(t, l, `{"Type":"host-gw"}`) })
			for i, h := range l.Hosts() {
				want := []string{"remove " + added[i], "shutdown"}
				if i == 0 && (name == "stopped" || name == "cleaned up") {
					slices.Reverse(want) // the stop has run ShutdownCommand
				}
				reduce := func(got []string) []string { return got }
				if name == "killed" {
					reduce = slices.Compact // a command runs again if the daemon is killed before it has recorded the end
				}
				expectCallsAs(t, h, reduce, want...)
				eventually(t, "the file of "+h.Name(), func() error {
					if left := files(h); len(left) > 0 {
						return fmt.Errorf("it has %v", left)
					}
					return nil
				})
				expectNothingOf(t, h, "flannel-vxlan")
			}
			expectMatrix(t, l)

			for _, h := range l.Hosts() {
				expectStop(t, h.Daemon())
				startOne(t, h, lab.FlanneldOptions{})
				expectCalls(t, h)
			}
		})
	}
}
