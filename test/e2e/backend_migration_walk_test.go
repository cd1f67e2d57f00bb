// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// allPairs returns a list of backends, which begins and ends with the first of them. Each ordered pair of backends
// is in it exactly once as neighbours.
func allPairs(backends ...string) []string {
	var walk []string
	for i, from := range backends {
		for _, to := range backends[i+1:] {
			walk = append(walk, from, to)
		}
	}
	return append(walk, backends[0])
}

// TestAloneBackendMigrationWalk migrates running networks from each backend to each other one, without a restart of
// a daemon. No packet may be lost, and no TCP stream interrupted. Most migrations begin while the devices of
// earlier ones are still there. Each flow sends 1,000 packets per second, or fewer if the machine is too slow. Two
// CPUs carry about 11,000 packets per second and their answers. That is about 550 for each of the 20 flows between
// five hosts. So the test needs the whole machine. With -short, five hosts go to each backend once.
//
//stages:rest it makes many migrations, one after the other
func TestAloneBackendMigrationWalk(t *testing.T) {
	const rate = 1000
	walk := allPairs("vxlan", "host-gw", "udp", userspace, vni7)
	t.Run("five hosts", func(t *testing.T) {
		walk := walk
		if testing.Short() {
			walk = []string{"vxlan", "host-gw", "udp", userspace, vni7, "vxlan"}
		}
		migrationWalk{hosts: 5, families: v4, rate: rate, walk: walk}.test(t)
	})
	t.Run("two hosts", func(t *testing.T) {
		migrationWalk{hosts: 2, families: v4, rate: rate, walk: walk}.test(t)
	})
}

// TestBackendMigrationWalkDualStack migrates dual-stack networks away from host-gw and back, without a restart of a
// daemon. No packet may be lost. On the way back the bridge of the pods is older than the device of the other
// backend. In this order the kernel treats the base address of the IPv6 subnet as an anycast address.
//
//stages:rest it makes several migrations, one after the other
func TestBackendMigrationWalkDualStack(t *testing.T) {
	t.Parallel()
	const rate = 200
	for _, other := range []string{"udp", "vxlan"} {
		t.Run(other, func(t *testing.T) {
			t.Parallel()
			migrationWalk{hosts: 3, families: dual, rate: rate, walk: allPairs("host-gw", other)}.test(t)
		})
	}
}

// TestBackendMigrationPortOfFormerTunnel migrates from udp to vxlan, and at once to wireguard in user space on the
// ports that udp had. At this time the daemons still run the tunnel of udp. They must close it, so that the ports
// are free.
//
//stages:rest TestBackendMigrationInUserspace changes between tunnels with different ports
func TestBackendMigrationPortOfFormerTunnel(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, backendConfig("udp"))
	lengthenQueues(t, l)
	startAll(t, l, lab.FlanneldOptions{})
	tr := startTraffic(t, l, 200)
	migrate(t, l, "udp", "vxlan")
	eventuallyMigrated(t, l, "vxlan")
	migrate(t, l, "vxlan", "")
	eventuallyFinished(t, l, "vxlan")
	migrate(t, l, "vxlan", `{"Type":"wireguard","Implementation":"userspace","ListenPort":8285,"ListenPortV6":8286}`)
	eventuallyMigrated(t, l, "wireguard")
	for _, h := range l.Hosts() {
		if lines := linesWith(h.Daemon(), "the next backend does not start"); len(lines) > 0 {
			t.Errorf("the log of %s contains %q", h.Name(), lines)
		}
	}
	tr.expectNoLoss(t)
	expectMatrix(t, l)
}

// TestVMBackendMigrationWalk is TestAloneBackendMigrationWalk with backends that need modules of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMBackendMigrationWalk(t *testing.T) {
	const rate = 20 // the CPU is emulated
	for name, walk := range map[string]migrationWalk{
		"tunnels of the kernel": {families: v4, walk: allPairs("vxlan", "ipip", "wireguard")},
		"host-gw":               {families: dual, walk: []string{"host-gw", "ipip", "host-gw", "wireguard", "host-gw"}},
		"udp":                   {families: v4, walk: []string{"udp", "wireguard", "udp", "ipip", "udp"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // each test waits for a minute until hosts may remove the last devices
			walk.hosts, walk.rate = 2, rate
			walk.test(t)
		})
	}
}

// migrationWalk describes a test that migrates a network again and again, each time to the next backend of a list.
type migrationWalk struct {
	hosts    int
	families []prefix.Family
	rate     int      // packets per second of each flow
	walk     []string // the backends, which begin and end with the same one
}

// lengthenQueues gives the TUN devices of the hosts queues of 8,192 packets, also those that daemons create later.
// A daemon may have to wait for a CPU, because the daemons of all hosts share the CPUs of one machine with other
// tests. Linux's default queue of 500 packets is full after 60 ms if five hosts send 1,000 packets per second to each other. Linux
// drops packets that find the queue full.
func lengthenQueues(t *testing.T, l *lab.Lab) {
	t.Helper()
	const packets = 8192
	done := make(chan struct{})
	var watching sync.WaitGroup
	t.Cleanup(func() { close(done); watching.Wait() })
	for _, h := range l.Hosts() {
		watching.Go(func() {
			err := h.Netlink(t.Context(), func(nl *netlink.Handle) error {
				changes := make(chan netlink.LinkUpdate)
				if err := netlink.LinkSubscribeWithOptions(changes, done, netlink.LinkSubscribeOptions{ListExisting: true}); err != nil {
					return err
				}
				var failed error
				for change := range changes {
					device, ok := change.Link.(*netlink.Tuntap)
					if !ok || device.TxQLen == packets {
						continue
					}
					if err := nl.LinkSetTxQLen(device, packets); err != nil && !errors.Is(err, unix.ENODEV) {
						failed = err
					}
				}
				return failed
			})
			if err != nil {
				t.Errorf("lengthen the queues of %s: %v", h.Name(), err)
			}
		})
	}
}

func (w migrationWalk) test(t *testing.T) {
	last := w.walk[0]
	l := newLab(t, lab.Config{Hosts: w.hosts, Families: w.families}, backendConfig(last))
	startAll(t, l, lab.FlanneldOptions{})
	lengthenQueues(t, l)
	tr := &traffic{flows: startFlowsAt(t, l, w.rate), streams: startStreams(t, l)}
	start := time.Now()
	for i, to := range w.walk[1:] {
		began := time.Now()
		from := w.walk[i]
		migrate(t, l, from, to)
		eventuallyMigrated(t, l, typeOf(to))
		migrate(t, l, to, "")
		eventuallyFinished(t, l, typeOf(to))
		if t.Failed() {
			t.Fatalf("after the migration from %s to %s, number %d", from, to, i+1)
		}
		t.Logf("%s to %s took %s", from, to, time.Since(began).Round(time.Millisecond))
	}
	for _, h := range l.Hosts() {
		expectNothingOf(t, h, leftBy(w.walk, last)...)
		if n := len(h.Daemons()); n != 1 {
			t.Errorf("%s has run %d daemons, want one", h.Name(), n)
		}
	}
	pause(t, time.Second) // time in which a packet that still needs a removed device would be lost
	sent, took := 0, time.Since(start)
	for _, f := range tr.flows {
		sent += f.Stats().Sent
	}
	t.Logf("%d flows have sent %d packets in %s, %.0f per second", len(tr.flows), sent, took.Round(time.Second), float64(sent)/took.Seconds())
	tr.expectNoLoss(t)
	expectMatrix(t, l)
}

// eventuallyFinished waits until all hosts serve with the backend of the given type alone, their leases have data
// of this backend only, and all peers are in place on all hosts.
func eventuallyFinished(t *testing.T, l *lab.Lab, backend string) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventually(t, fmt.Sprintf("%s serves with %s alone", h.Name(), backend), func() error {
			n := statusOf(t, h).Network
			if n.BackendType != backend || n.NextBackendType != "" || !strings.HasPrefix(n.Phase, "serving") {
				return fmt.Errorf("its backend is %q, the next one %q, its phase %q", n.BackendType, n.NextBackendType, n.Phase)
			}
			return nil
		})
	}
	eventuallyPublished(t, l, len(l.Hosts()), backend, "")
	expectPeersProgrammed(t, l)
}

// leftBy returns texts that the kernel must not show if only the backend last is in use: one for each backend whose
// objects differ from those of last. The kernel shows a text as long as it has objects of that backend.
func leftBy(backends []string, last string) []string {
	texts := map[string]string{
		"vxlan": "flannel.1:", vni7: "flannel.7:", "host-gw": ".0/24 via 192.168.77", "udp": "flannel0",
		userspace: "flannel-wg", "wireguard": "flannel-wg", "ipip": "flannel.ipip",
	}
	var all []string
	for _, b := range backends {
		if texts[b] != texts[last] {
			all = append(all, texts[b])
		}
	}
	return all
}
