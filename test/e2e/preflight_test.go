// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestPreflight checks that flannelctl doctor --preflight finds no problem on a host on which a daemon then becomes
// ready, and names what is in its way.
func TestPreflight(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := l.Host(1)
	preflight := []string{"doctor", "--preflight"}
	out := expectFlannelctl(t, h, preflight, "eth0 ("+h.Addr(4).String()+") would be the external interface: ")
	if strings.Contains(out, "PROBLEM") {
		t.Errorf("a sound host has\n%s", out)
	}

	must := func(program string, args ...string) {
		t.Helper()
		if out, err := h.Exec(testContext(t), program, args...); err != nil {
			t.Fatalf("%s %s: %v: %s", program, args, err, out)
		}
	}
	must("ip", "link", "add", "virbr0", "type", "bridge")
	must("ip", "link", "set", "virbr0", "up")
	must("ip", "route", "add", "10.5.7.0/24", "dev", "virbr0", "table", "52")
	must("iptables", "-I", "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP")
	expectFlannelctlFails(t, h, preflight, "10.5.7.0/24 dev virbr0 is in the network 10.5.0.0/16", "drops packets of other hosts to UDP port 8472")
	must("ip", "link", "delete", "virbr0")
	must("iptables", "-F", "INPUT")

	startOne(t, h, lab.FlanneldOptions{})
	expectFlannelctlFails(t, h, preflight, "a flanneld runs on this host")

	// Without root it is not known whether there are problems.
	must("chmod", "700", "/run/flannel")
	must("cp", built("flannelctl"), "/run/flannelctl") // all users may read it there
	for _, args := range [][]string{{"doctor"}, preflight} {
		out, err := h.Exec(testContext(t), "setpriv", append([]string{"--reuid=65534", "--regid=65534", "--clear-groups", "/run/flannelctl"}, args...)...)
		if failure := (*exec.ExitError)(nil); !errors.As(err, &failure) || failure.ExitCode() != 2 || strings.Contains(string(out), "PROBLEM") {
			t.Errorf("flannelctl %s without root: %v, want exit code 2 and no problem:\n%s", args, err, out)
		}
		expectOutput(t, args, string(out), []string{"is not known: run flannelctl doctor as root"})
	}
}
