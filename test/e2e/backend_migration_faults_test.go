// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// startWithPod starts a daemon and a pod on a host.
func startWithPod(t *testing.T, h *lab.Host, o lab.FlanneldOptions) {
	t.Helper()
	startOne(t, h, o)
	if _, err := h.AddPod(testContext(t), ""); err != nil {
		t.Fatal(err)
	}
}

// TestBackendMigrationJoin checks that hosts can join a network in the middle of a migration, and no packet
// is lost. One host joins while the others change their routes, and one while they finish.
//
//stages:rest it waits until the former devices may go
func TestBackendMigrationJoin(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 5, Families: dual}, backendConfig("vxlan"))
	for _, h := range l.Hosts()[:3] {
		startWithPod(t, h, lab.FlanneldOptions{})
	}
	tr := startTraffic(t, l, 200)
	migrate(t, l, "vxlan", "host-gw")
	startWithPod(t, l.Host(4), lab.FlanneldOptions{})
	for _, h := range l.Hosts()[:4] {
		eventuallyCarriedBy(t, h, "host-gw", except(l.Hosts()[:4], h)...)
	}
	eventuallyPublished(t, l, 4, "vxlan", "host-gw")
	migrate(t, l, "host-gw", "")
	startWithPod(t, l.Host(5), lab.FlanneldOptions{})
	eventuallyFinished(t, l, "host-gw")
	eventuallyWithout(t, l, "flannel.1:")
	tr.expectNoLoss(t)
	expectMatrix(t, l)
}

// TestBackendMigrationAbsentHost migrates a network while one of its hosts is down. The host starts again
// after the end of the migration, for which the others have kept the former backend. At first it does not reach
// the store, so it serves with the former backend of its last known state. When it has read the configuration, it must use the new backend, and all pods
// must reach each other. In the second case the host has also lost its device and /run/flannel, as after a
// reboot.
//
//stages:rest it waits until the former devices may go
func TestBackendMigrationAbsentHost(t *testing.T) {
	t.Parallel()
	for _, rebooted := range []bool{false, true} {
		t.Run(fmt.Sprintf("rebooted %v", rebooted), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 4}, backendConfig("vxlan"))
			up, h := l.Hosts()[:3], l.Host(4)
			for _, one := range up {
				startWithPod(t, one, lab.FlanneldOptions{})
			}
			startOne(t, h, lab.FlanneldOptions{})
			expectPeersProgrammed(t, l)
			key := statusOf(t, h).Lease.Key
			expectSaved(t, h)
			h.Daemon().Kill()
			if rebooted {
				if out, err := h.Exec(testContext(t), "sh", "-c", "ip link del flannel.1 && rm -r /run/flannel"); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			tr := startTraffic(t, l, 300)
			migrate(t, l, "vxlan", "host-gw")
			for _, one := range up {
				eventuallyCarriedBy(t, one, "host-gw", except(up, one)...)
				for _, p := range statusOf(t, one).Peers {
					if p.Key == key && (p.Backend != "vxlan" || p.Waiting != "it does not publish data for host-gw") {
						t.Errorf("%s sends to the absent host by %q because %q, want vxlan, because it does not publish data", one.Name(), p.Backend, p.Waiting)
					}
				}
			}
			migrate(t, l, "host-gw", "")
			for _, one := range up {
				expectLog(t, one.Daemon(), "the migration is finished: this host keeps the former backend")
			}
			nft(t, h.Namespace, "table inet outage { chain output { type filter hook output priority filter ; tcp dport 2379 drop ; } ; }")
			expectLog(t, start(t, h, lab.FlanneldOptions{}), "etcd is not usable")
			eventually(t, "the absent host serves from its last known state", func() error {
				if n := statusOf(t, h).Network; n.BackendType != "vxlan" || n.Phase != "serving from the last known state" {
					return fmt.Errorf("its backend is %q, its phase %q", n.BackendType, n.Phase)
				}
				return nil
			})
			nft(t, h.Namespace, "delete table inet outage")
			eventuallyFinished(t, l, "host-gw")
			eventuallyWithout(t, l, "flannel.1:")
			tr.expectNoLoss(t)
			if _, err := h.AddPod(testContext(t), ""); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, l)
		})
	}
}

// TestBackendMigrationStoreOutage checks that a migration is completed and loses no packet if the store
// becomes unavailable within 80 ms after the configuration is written. At that moment some hosts may have
// read the configuration and some not. There is such an outage at the start of a migration, when it is
// aborted, and at its end.
//
//stages:rest it waits until the former devices may go
func TestBackendMigrationStoreOutage(t *testing.T) {
	t.Parallel()
	for name, outage := range map[string]struct {
		begin func(*lab.Etcd) error
		end   func(*testing.T, *lab.Etcd) error
	}{
		"frozen": {(*lab.Etcd).Stop, func(_ *testing.T, e *lab.Etcd) error { return e.Cont() }},
		"dead":   {func(e *lab.Etcd) error { e.Kill(); return nil }, func(t *testing.T, e *lab.Etcd) error { return e.Start(testContext(t)) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 4}, backendConfig("vxlan"))
			startAll(t, l, lab.FlanneldOptions{})
			tr := startTraffic(t, l, 200)
			interrupt := func() {
				t.Helper()
				moment := milliseconds(rand.IntN(80))
				t.Logf("the store goes after %s", moment)
				pause(t, moment)
				if err := outage.begin(l.Etcd()); err != nil {
					t.Fatal(err)
				}
				pause(t, 4*time.Second)
				if err := outage.end(t, l.Etcd()); err != nil {
					t.Fatal(err)
				}
			}
			migrate(t, l, "vxlan", "host-gw")
			interrupt()
			eventuallyMigrated(t, l, "host-gw")
			migrate(t, l, "vxlan", "")
			interrupt()
			eventuallyFinished(t, l, "vxlan")
			migrate(t, l, "vxlan", "host-gw")
			eventuallyMigrated(t, l, "host-gw")
			eventuallyPublished(t, l, len(l.Hosts()), "vxlan", "host-gw")
			migrate(t, l, "host-gw", "")
			interrupt()
			eventuallyFinished(t, l, "host-gw")
			eventuallyWithout(t, l, "flannel.1:")
			tr.expectNoLoss(t)
			expectMatrix(t, l)
		})
	}
}

// TestBackendMigrationAborted checks that no packet is lost if migrations are aborted at different moments:
// before hosts have read the configuration with the next backend, while they publish data for the next
// backend, while they change their routes, and afterwards. One host reads the configuration only at its
// start, like a host with an older version.
//
//stages:rest it makes many migrations, one after the other
func TestBackendMigrationAborted(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ from, to, left string }{
		{"vxlan", "host-gw", ".0/24 via 192.168.77"},
		{"host-gw", "vxlan", "flannel"},
	} {
		t.Run(tt.from+" to "+tt.to, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 4}, backendConfig(tt.from))
			following, bystander := l.Hosts()[:3], l.Host(4)
			for _, h := range following {
				startWithPod(t, h, lab.FlanneldOptions{})
			}
			startWithPod(t, bystander, oneByOne())
			tr := startTraffic(t, l, 200)
			for _, ms := range []int{0, 5, 10, 20, 40, 80, 160, 320} {
				migrate(t, l, tt.from, tt.to)
				pause(t, milliseconds(ms))
				migrate(t, l, tt.from, "")
				pause(t, milliseconds(rand.IntN(200)))
			}
			for range 2 {
				migrate(t, l, tt.from, tt.to)
				for _, h := range following {
					eventuallyCarriedBy(t, h, tt.to, except(following, h)...)
					eventuallyCarriedBy(t, h, tt.from, bystander)
				}
				migrate(t, l, tt.from, "")
				eventuallyFinished(t, l, tt.from)
			}
			eventuallyWithout(t, l, tt.left)
			tr.expectNoLoss(t)
			expectMatrix(t, l)
			for _, h := range l.Hosts() {
				if n := len(h.Daemons()); n != 1 {
					t.Errorf("%s has run %d daemons, want one", h.Name(), n)
				}
			}
		})
	}
}

// TestBackendMigrationAbortedLate checks that no packet is lost if a network goes back to the former backend
// at different moments after the migration was finished. At the early moments only some hosts may have read
// the configuration that finishes it, and at the last one all have.
//
//stages:rest it makes many migrations, one after the other
func TestBackendMigrationAbortedLate(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ from, to, left string }{
		{"vxlan", "host-gw", ".0/24 via 192.168.77"},
		{"vxlan", vni7, "flannel.7:"},
	} {
		t.Run(tt.from+" to "+typeOf(tt.to), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 4}, backendConfig(tt.from))
			startAll(t, l, lab.FlanneldOptions{})
			tr := startTraffic(t, l, 200)
			for _, ms := range []int{0, 10, 30, 100, 1000} {
				migrate(t, l, tt.from, tt.to)
				eventuallyMigrated(t, l, typeOf(tt.to))
				eventuallyPublished(t, l, len(l.Hosts()), typeOf(tt.from), typeOf(tt.to))
				migrate(t, l, tt.to, "")
				pause(t, milliseconds(ms))
				migrate(t, l, tt.from, tt.to)
				pause(t, time.Second) // time in which all hosts read both configurations: the one that finishes the migration, and this one
				for _, h := range l.Hosts() {
					eventually(t, h.Name()+" has both backends again", func() error {
						if n := statusOf(t, h).Network; n.BackendType != typeOf(tt.from) || n.NextBackendType != typeOf(tt.to) {
							return fmt.Errorf("its backend is %q, the next one %q", n.BackendType, n.NextBackendType)
						}
						return nil
					})
				}
				eventuallyPublished(t, l, len(l.Hosts()), typeOf(tt.from), typeOf(tt.to))
				migrate(t, l, tt.from, "")
				eventuallyFinished(t, l, typeOf(tt.from))
			}
			eventuallyWithout(t, l, tt.left)
			tr.expectNoLoss(t)
			expectMatrix(t, l)
		})
	}
}
