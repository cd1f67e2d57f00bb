// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// expectRestartNeeded waits until the daemon on h reports that it needs a restart, for a reason that
// contains want. An empty want means that it must need none. The metric must agree.
func expectRestartNeeded(t *testing.T, h *lab.Host, want string) {
	t.Helper()
	eventually(t, "restart needed: "+want, func() error {
		if got := statusOf(t, h).RestartNeeded; !strings.Contains(got, want) || (want == "") != (got == "") {
			return fmt.Errorf("it reports %q", got)
		}
		return nil
	})
	value := 1.0
	if want == "" {
		value = 0
	}
	if got := metric(t, h, "flannel_restart_needed"); got != value {
		t.Errorf("flannel_restart_needed is %v, want %v", got, value)
	}
}

// peerLines returns the routes, neighbours and FDB entries of a host as sorted lines, because the kernel
// lists neighbours in an order that changes. It omits neighbours on eth0 that the kernel has resolved
// itself.
func peerLines(t *testing.T, h *lab.Host) string {
	t.Helper()
	text, err := vxlanKernelState(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool {
		return strings.Contains(line, "dev eth0 lladdr")
	})
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// expectExitOnChange waits until the daemon ends by itself. Its exit code must be 3, and peerLines must
// still return the text in before.
func expectExitOnChange(t *testing.T, h *lab.Host, d *lab.Daemon, before string) {
	t.Helper()
	code, err := d.Wait(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if code != 3 {
		t.Errorf("exit code %d, want 3:\n%s", code, d.Log())
	}
	if after := peerLines(t, h); after != before {
		t.Errorf("the data path was\n%s\nand is\n%s", before, after)
	}
}

// TestRestartNeeded changes the configuration of daemons that do not follow it. They must report that
// they need a restart, and why. With --exit-on-config-change a daemon must end, without a change of the
// data path. Changes without effect, such as another order of keys, must not be reported.
func TestRestartNeeded(t *testing.T) {
	t.Parallel()
	const changed = "Backend.VNI default -> 7"
	t.Run("etcd", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 2, Network: network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan"}`), Families: dual}, "")
		a, b := l.Host(1), l.Host(2)
		startOne(t, a, lab.FlanneldOptions{Args: []string{"--follow-config=false"}})
		stops := startOne(t, b, lab.FlanneldOptions{Args: []string{"--exit-on-config-change"}})
		expectPeersProgrammed(t, l)
		put := func(config string) {
			t.Helper()
			if err := l.PutNetwork(testContext(t), []byte(config)); err != nil {
				t.Fatal(err)
			}
		}
		before := peerLines(t, b)
		put(`{"IPv6Network":"fd00:5::/48","Network":"10.5.0.0/16","EnableIPv6":true,"Backend":{"Type":"vxlan"}}`)
		put(`{"EnableIPv6":`)
		expectRestartNeeded(t, a, "invalid")
		expectRestartNeeded(t, b, "invalid")
		put(string(network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan"}`)))
		expectRestartNeeded(t, a, "")
		expectRestartNeeded(t, b, "")
		put(string(network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan","VNI":7}`)))
		expectRestartNeeded(t, a, changed)
		expectExitOnChange(t, b, stops, before)
		expectFlannelctl(t, a, []string{"status"}, "restart needed", changed)
		expectOnce(t, a.Daemon(), "the network configuration has changed: restart needed")
		if _, page := getStatus(t, a, "/statusz", "text/html"); !strings.Contains(page, "restart needed: Backend.VNI") {
			t.Errorf("the page does not report the needed restart:\n%s", page)
		}
	})
	t.Run("several steps", func(t *testing.T) { // hosts that follow the configuration make two: see Config.Toward
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 1, Network: []byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"},"NextBackend":{"Type":"vxlan"}}`)}, "")
		h := l.Host(1)
		o := lab.FlanneldOptions{Args: []string{"--follow-config=false"}}
		startOne(t, h, o)
		if err := l.PutNetwork(testContext(t), []byte(`{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}`)); err != nil {
			t.Fatal(err)
		}
		expectRestartNeeded(t, h, "10.6.0.0/16")
		expectStop(t, h.Daemon())
		startOne(t, h, o)
		expectRestartNeeded(t, h, "")
	})
	t.Run("Kubernetes", func(t *testing.T) {
		t.Parallel()
		c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
		a, b := c.Host(1), c.Host(2)
		start(t, a, c.options(1, "--follow-config=false"))
		stops := start(t, b, c.options(2, "--exit-on-config-change"))
		expectReady(t, a.Daemon())
		expectReady(t, stops)
		eventually(t, "the daemons know each other", func() error {
			if n := len(statusOf(t, b).Peers); n != 1 {
				return fmt.Errorf("%d peers, want 1", n)
			}
			return nil
		})
		before := peerLines(t, b)
		file := filepath.Join(c.dir, "net-conf.json")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		c.write("net-conf.json", []byte(strings.Replace(string(text), `"vxlan"`, `"vxlan","VNI":7`, 1)))
		expectRestartNeeded(t, a, changed)
		expectExitOnChange(t, b, stops, before)
		c.write("net-conf.json", text)
		expectRestartNeeded(t, a, "")
	})
}
