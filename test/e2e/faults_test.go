package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"flanneld/pkg/lab"
	"flanneld/pkg/prefix"
)

// What befalls the store is not the backends' matter, and must be no matter to what
// they carry: so here are the others than vxlan, which has tests for each of these.

//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPFaults(t *testing.T) { faults(t, backendConfig("ipip"), true) }

//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardFaults(t *testing.T) { faults(t, backendConfig("wireguard"), true) }

// TestUserspaceWireGuardFaults has no packets through a daemon that is not there.
func TestUserspaceWireGuardFaults(t *testing.T) { faults(t, backendConfig(userspace), false) }

func TestExtensionFaults(t *testing.T) {
	faults(t, extension(t, map[string]any{
		"SubnetAddCommand":    `ip route add "$SUBNET" via "$PUBLIC_IP" && ip -6 route add "$IPV6SUBNET" via "$PUBLIC_IPV6"`,
		"SubnetRemoveCommand": `ip route del "$SUBNET"; ip -6 route del "$IPV6SUBNET"`,
	}), true)
}

// faults leads two hosts through leases that cannot be, through the loss of their
// own, of all that the store has, and of the store. kept says that packets go on
// while the daemon does not run.
func faults(t *testing.T, backend string, kept bool) {
	t.Parallel()
	network, err := lab.NetworkConfig(dual, json.RawMessage(backend))
	if err != nil {
		t.Fatal(err)
	}
	network = below200(t, network)
	l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: network}, "")
	startAll(t, l, lab.FlanneldOptions{})
	before, c, one := keys(t, l), store(t, l), l.Host(1)
	own := subnets + leaseOf(t, l, one).Key
	remove(t, c, own) // to its peers it is gone for a moment
	expectLog(t, one.Daemon(), "own lease was gone, taken again")
	flows := startFlows(t, l, 100)

	kind := typeOf(t, backend)
	hostile := map[string]string{
		"10.5.200.0-24": fmt.Sprintf(`{"PublicIP":%q,"BackendType":%q}`, one.Addr(prefix.IPv4), kind),
		"10.99.1.0-24":  fmt.Sprintf(`{"PublicIP":"192.168.77.201","BackendType":%q}`, kind),
		"10.5.202.0-24": `{"PublicIP":"192.168.77.202","BackendType":"pigeon"}`,
	}
	for key, value := range hostile {
		put(t, c, subnets+key, value)
		expectLog(t, one.Daemon(), fmt.Sprintf(`"lease refused" lease=%q`, key))
	}
	put(t, c, subnets+"10.5.203.0-24", `{"PublicIP":`)
	for key := range hostile {
		remove(t, c, subnets+key)
	}
	for _, h := range l.Hosts() {
		eventually(t, "only the other host", func() error {
			if n := len(statusOf(t, h).Peers); n != 1 {
				return fmt.Errorf("%d peers, want 1", n)
			}
			return nil
		})
	}

	if err := l.Etcd().Wipe(background(t)); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), "etcd is not the store it was")
	}
	if err := l.PutNetwork(background(t), network); err != nil {
		t.Fatal(err)
	}
	expectLeases(t, l, before)

	if !kept {
		expectNothingLost(t, flows)
	}
	pause(t, 3*time.Second) // the state on disk is not older than that
	l.Etcd().Kill()
	one.Daemon().Kill()
	expectLog(t, start(t, one, lab.FlanneldOptions{}), "going on from the last known state")
	expectConverged(t, l)
	if err := l.Etcd().Start(background(t)); err != nil {
		t.Fatal(err)
	}
	expectReady(t, one.Daemon())
	expectConverged(t, l)
	if kept {
		expectNothingLost(t, flows)
	}
	expectMatrix(t, l)
}

// typeOf is the type that leases of the backend have.
func typeOf(t *testing.T, backend string) string {
	t.Helper()
	var b struct{ Type string }
	if err := json.NewDecoder(strings.NewReader(backend)).Decode(&b); err != nil {
		t.Fatal(err)
	}
	return b.Type
}
