// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// The tests in this file check that faults of etcd lose no packets of the backends ipip,
// wireguard and extension. For vxlan each of these faults has a test of its own.

// TestVMIPIPFaults checks faults of etcd with ipip.
//
//stages:long tests of vxlan have these faults, and TestVMIPIPRestartsUnderTraffic restarts with ipip
func TestVMIPIPFaults(t *testing.T) { testFaults(t, backendConfig("ipip"), true) }

// TestVMWireGuardFaults checks faults of etcd with the kernel's WireGuard.
//
//stages:long TestUserspaceWireGuardFaults has these faults
func TestVMWireGuardFaults(t *testing.T) { testFaults(t, backendConfig("wireguard"), true) }

// TestUserspaceWireGuardFaults checks faults of etcd with WireGuard in the daemon. The daemon
// carries the packets, so the test counts none while the daemon is down.
func TestUserspaceWireGuardFaults(t *testing.T) { testFaults(t, backendConfig(userspace), false) }

// TestExtensionFaults checks faults of etcd with routes that are written by commands.
//
//stages:rest TestExtension has the commands, and TestExtensionFailsToStart a command that fails
func TestExtensionFaults(t *testing.T) {
	testFaults(t, extensionConfig(t, map[string]any{
		"SubnetAddCommand":    `ip route add "$SUBNET" via "$PUBLIC_IP" && ip -6 route add "$IPV6SUBNET" via "$PUBLIC_IPV6"`,
		"SubnetRemoveCommand": `ip route del "$SUBNET"; ip -6 route del "$IPV6SUBNET"`,
	}), true)
}

// testFaults checks that two hosts lose no packets through invalid leases of others, the loss of
// all data of etcd, and an outage of etcd during which a daemon is killed. Before the flows
// start, testFaults deletes the lease of one host, which must take this lease again. survives is
// true if packets pass while the daemon is down. If it is false, testFaults counts packets only
// until the outage.
func testFaults(t *testing.T, backend string, survives bool) {
	t.Parallel()
	network, err := lab.NetworkConfig(dual, json.RawMessage(backend))
	if err != nil {
		t.Fatal(err)
	}
	network = reserveSubnetsFrom200(t, network)
	l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: network}, "")
	startAll(t, l, lab.FlanneldOptions{})
	before, c, one := keys(t, l), etcdClient(t, l), l.Host(1)
	own := subnets + leaseOf(t, l, one).Key
	removeKey(t, c, own)
	expectLog(t, one.Daemon(), "this host's lease was gone, taken again")
	// Host 2 may remove its routes to host 1 for a moment, because the lease was deleted. Wait
	// until this is over before packets are counted: hosts handle leases in order, so it is over
	// when host 2 has refused a later lease.
	const later = "10.5.204.0-24"
	putKey(t, c, subnets+later, `{"PublicIP":"192.168.77.204","BackendType":"pigeon"}`)
	expectLog(t, l.Host(2).Daemon(), fmt.Sprintf(`"lease refused" lease=%q`, later))
	removeKey(t, c, subnets+later)
	flows := startFlows(t, l, 100)

	kind := leaseType(t, backend)
	hostile := map[string]string{
		"10.5.200.0-24": fmt.Sprintf(`{"PublicIP":%q,"BackendType":%q}`, one.Addr(prefix.IPv4), kind),
		"10.99.1.0-24":  fmt.Sprintf(`{"PublicIP":"192.168.77.201","BackendType":%q}`, kind),
		"10.5.202.0-24": `{"PublicIP":"192.168.77.202","BackendType":"pigeon"}`,
	}
	for key, value := range hostile {
		putKey(t, c, subnets+key, value)
		expectLog(t, one.Daemon(), fmt.Sprintf(`"lease refused" lease=%q`, key))
	}
	putKey(t, c, subnets+"10.5.203.0-24", `{"PublicIP":`)
	for key := range hostile {
		removeKey(t, c, subnets+key)
	}
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" has only the other host as peer", func() error {
			if n := len(statusOf(t, h).Peers); n != 1 {
				return fmt.Errorf("%d peers, want 1", n)
			}
			return nil
		})
	}

	if err := l.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), "etcd is not the store it was")
	}
	if err := l.PutNetwork(testContext(t), network); err != nil {
		t.Fatal(err)
	}
	expectLeases(t, l, before)

	if !survives {
		expectNothingLost(t, flows)
	}
	expectSaved(t, one)
	l.Etcd().Kill()
	one.Daemon().Kill()
	expectLog(t, start(t, one, lab.FlanneldOptions{}), "going on from the last known state")
	expectConverged(t, l)
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectReady(t, one.Daemon())
	expectConverged(t, l)
	if survives {
		expectNothingLost(t, flows)
	}
	expectMatrix(t, l)
}

// leaseType returns the backend type in the leases of this backend.
func leaseType(t *testing.T, backend string) string {
	t.Helper()
	var b struct{ Type string }
	if err := json.NewDecoder(strings.NewReader(backend)).Decode(&b); err != nil {
		t.Fatal(err)
	}
	return b.Type
}
