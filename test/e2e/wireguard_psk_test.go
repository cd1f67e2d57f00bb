// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// The preshared keys before and after the rotation, and the file in which hosts have them.
const (
	pskFile = "/run/psk"
	oldPSK  = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
	newPSK  = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="

	allHaveIt = "all peers have the new preshared key"
	// session limits the wait for a new WireGuard session. WireGuard replaces a session after
	// two minutes, and repeats a failed handshake every five seconds.
	session = 4 * time.Minute
)

// wgPeerValue returns the value that "wg show" prints about the only peer of a host. The parameter what is an
// argument of wg show, such as latest-handshakes.
func wgPeerValue(t *testing.T, h *lab.Host, what string) string {
	t.Helper()
	_, value, _ := strings.Cut(wg(t, h, "show", "flannel-wg", what), "\t")
	return value
}

// expectNewPSK waits until the only peer of h has the new preshared key, and the daemon logs
// that all peers have it.
func expectNewPSK(t *testing.T, h *lab.Host) {
	t.Helper()
	within(t, session, "new preshared key of "+h.Name(), func() error {
		if wgPeerValue(t, h, "preshared-keys") != newPSK {
			return fmt.Errorf("the peer has another preshared key")
		}
		return nil
	})
	expectLog(t, h.Daemon(), allHaveIt)
}

// TestUserspaceWireGuardPSKRotation checks the rotation of a preshared key in user space.
//
//stages:rest it waits for sessions to be renewed
func TestUserspaceWireGuardPSKRotation(t *testing.T) { testPSKRotation(t, "userspace") }

// TestVMWireGuardPSKRotation checks the rotation of a preshared key in the kernel.
//
//stages:long TestUserspaceWireGuardPSKRotation rotates keys, and TestVMWireGuardInlinePSK changes one in the kernel
func TestVMWireGuardPSKRotation(t *testing.T) { testPSKRotation(t, "kernel") }

// testPSKRotation gives two hosts a new preshared key. The second host gets it half a minute after the first
// one has it on its device. Until both use it in a session, no packet may be lost. The logs must not contain
// the key.
func testPSKRotation(t *testing.T, implementation string) {
	t.Helper()
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, fmt.Sprintf(`{"Type":"wireguard","Implementation":%q,"PSKFile":%q}`, implementation, pskFile))
	one, two := l.Host(1), l.Host(2)
	give := func(h *lab.Host, psk string) {
		t.Helper()
		if err := os.WriteFile(h.Path(pskFile), []byte(psk+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const apart = 30 * time.Second
	give(one, oldPSK)
	give(two, oldPSK)
	startAll(t, l, lab.FlanneldOptions{})
	flows := startFlows(t, l, 50)

	give(one, newPSK)
	expectLog(t, one.Daemon(), "the preshared key has changed")
	expectNewPSK(t, one)
	pause(t, apart)
	give(two, "c2VjcmV0") // as if the file was read while it was being written
	expectLog(t, two.Daemon(), "going on with the preshared key that was there before")
	give(two, newPSK)
	expectLog(t, two.Daemon(), "the preshared key has changed")
	before := wgPeerValue(t, two, "latest-handshakes")
	expectNewPSK(t, two)
	within(t, session, "handshake with the new preshared key", func() error {
		if wgPeerValue(t, two, "latest-handshakes") == before {
			return fmt.Errorf("the last one was at %s", before)
		}
		return nil
	})
	pause(t, time.Second)
	expectNothingLost(t, flows)
	for _, h := range l.Hosts() {
		if log := h.Daemon().Log(); strings.Contains(log, newPSK) || strings.Contains(log, "c2VjcmV0") {
			t.Errorf("the log of %s contains a preshared key", h.Name())
		}
		if strings.Contains(h.Daemon().Log(), "another program") {
			t.Errorf("%s logs its own change of the preshared key as that of another program", h.Name())
		}
	}
}

// TestVMWireGuardInlinePSK changes the preshared key in the network configuration and restarts the daemons.
// The session in the kernel outlives them, so they must set the new key only when the session is new, or has
// not been replaced in time: see takesPSK in backend/wireguard. No packet may be lost. The test makes all
// neighbours permanent, because changes of neighbours cause notifications, which would wake the daemons: only
// a timer may do that.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardInlinePSK(t *testing.T) {
	t.Parallel()
	config := func(psk string) string {
		return fmt.Sprintf(`{"Type":"wireguard","Implementation":"kernel","PSK":%q}`, psk)
	}
	l := newLab(t, lab.Config{Hosts: 2}, config(oldPSK))
	startAll(t, l, lab.FlanneldOptions{})
	flows := startFlows(t, l, 50)
	for _, h := range l.Hosts() {
		shell(t, h.Namespace, `ip neigh | sed -n 's/\(.* lladdr [^ ]*\) .*/ip neigh replace \1 nud permanent/p' | sh -e`)
	}
	pause(t, 15*time.Second) // while the session is young, the daemon would set the key at once
	putNetwork(t, l, v4, config(newPSK))
	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
		startOne(t, h, lab.FlanneldOptions{})
	}
	for _, h := range l.Hosts() {
		expectNewPSK(t, h)
	}
	expectNothingLost(t, flows)
}

// TestWireGuardRefusesToRun checks that the daemon exits with one line that names the reason
// if a key or a port is invalid. On a kernel without WireGuard it also checks the
// implementation kernel. The log must not contain secrets.
func TestWireGuardRefusesToRun(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	h := l.Host(1)
	if err := os.WriteFile(h.Path(pskFile), []byte("c2VjcmV0"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]string{
		`"PSK":"c2VjcmV0"`:            "Backend.PSK is no key: want 32 bytes in base64",
		`"PSKFile":"` + pskFile + `"`: "Backend.PSKFile " + pskFile + " holds no key",
		`"PSKFile":"/run/missing"`:    "read Backend.PSKFile: open /run/missing: no such file or directory",
		`"ListenPort":70000`:          "Backend.ListenPort is 70000: want 1 to 65535",
	}
	if _, err := h.Exec(testContext(t), "ip", "link", "add", "try", "type", "wireguard"); err != nil { // so this kernel has no WireGuard
		cases[`"Implementation":"kernel"`] = "this kernel has no wireguard"
	}
	for config, want := range cases {
		putNetwork(t, l, v4, `{"Type":"wireguard",`+config+`}`)
		d := start(t, h, lab.FlanneldOptions{})
		expectFailure(t, d, want)
		if strings.Contains(d.Log(), "c2VjcmV0") {
			t.Errorf("%s: the log contains the secret", config)
		}
	}
}
