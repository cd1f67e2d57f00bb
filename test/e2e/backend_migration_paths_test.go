// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// vni7Port is the configuration of a vxlan backend whose packets can be told from those of the usual one.
const vni7Port = `{"Type":"vxlan","VNI":7,"Port":8477}`

// cut makes a host drop the UDP packets that other hosts send to a port. Packets of its own go out.
func cut(t *testing.T, h *lab.Host, port int, from ...*lab.Host) {
	t.Helper()
	var addrs []string
	for _, one := range from {
		addrs = append(addrs, one.Addr(v4[0]).String())
	}
	nft(t, h.Namespace, fmt.Sprintf("table ip cut { chain input { type filter hook input priority -300 ; ip saddr { %s } udp dport %d drop ; } ; }",
		strings.Join(addrs, ", "), port))
}

func heal(t *testing.T, h *lab.Host) {
	t.Helper()
	nft(t, h.Namespace, "delete table ip cut")
}

// eventuallyWaiting waits until a host sends to another one by the present backend for a reason that contains why.
func eventuallyWaiting(t *testing.T, h, to *lab.Host, why string) {
	t.Helper()
	key := statusOf(t, to).Lease.Key
	eventually(t, fmt.Sprintf("%s sends to %s by the present backend", h.Name(), to.Name()), func() error {
		for _, p := range statusOf(t, h).Peers {
			if p.Key == key && strings.Contains(p.Waiting, why) && p.Waiting != "" {
				return nil
			}
			if p.Key == key {
				return fmt.Errorf("it waits because %q", p.Waiting)
			}
		}
		return fmt.Errorf("it does not know %s", key)
	})
}

// TestBackendMigrationEdited changes NextBackend after all hosts have changed their routes to it. One host reads
// that 8 seconds later than the others: its daemon is frozen, or does not reach the store. It goes on sending by
// the former next backend, so the others must keep the device of that backend meanwhile. Then all
// must change to the new one. No packet may be lost.
//
//stages:rest it waits until a changed next backend may start
func TestBackendMigrationEdited(t *testing.T) {
	t.Parallel()
	const wg = `{"Type":"wireguard","Implementation":"userspace"`
	for _, tt := range []struct {
		name, kind, next, edited string
		frozen                   bool // otherwise the daemon must run, because it carries the packets
		removed                  bool // for a moment there is no next backend
	}{
		{"port of vxlan", "vxlan", vni7, vni7Port, true, false},
		{"removed and back with another port", "vxlan", vni7, vni7Port, true, true},
		{"VNI of vxlan", "vxlan", vni7, `{"Type":"vxlan","VNI":8}`, false, false},
		{"port of udp", "udp", `{"Type":"udp","Mode":"userspace"}`, `{"Type":"udp","Mode":"userspace","Port":8299}`, false, false},
		{"key of wireguard", "wireguard", wg + `}`, wg + `,"PSK":"AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA="}`, false, false},
		{"another type", "host-gw", vni7, `{"Type":"host-gw"}`, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			families := dual
			if tt.frozen { // with IPv6 some packets are lost when the host reads changed leases before the configuration
				families = v4
			}
			l := newLab(t, lab.Config{Hosts: 3, Families: families}, backendConfig("vxlan"))
			startAll(t, l, lab.FlanneldOptions{})
			migrate(t, l, "vxlan", tt.next)
			for _, h := range l.Hosts() {
				eventually(t, h.Name()+" has changed its routes", func() error { return waitsForNoPeer(t, h) })
			}
			if mode := statusOf(t, l.Host(2)).Network.NextMode; strings.HasPrefix(tt.next, wg) && mode != "userspace" {
				t.Errorf("the mode of wireguard is %q", mode)
			}
			tr := startTraffic(t, l, 100)
			late := l.Host(2)
			signal := func(s syscall.Signal) {
				t.Helper()
				if err := late.Daemon().Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			if tt.frozen {
				signal(syscall.SIGSTOP)
			} else {
				nft(t, late.Namespace, "table inet outage { chain output { type filter hook output priority filter ; tcp dport 2379 drop ; } ; }")
			}
			if tt.removed {
				migrate(t, l, "vxlan", "")
				for _, h := range []*lab.Host{l.Host(1), l.Host(3)} {
					eventually(t, h.Name()+" has no next backend", func() error { return withoutNext(t, h) })
				}
			}
			migrate(t, l, "vxlan", tt.edited)
			pause(t, 8*time.Second)
			if tt.frozen {
				signal(syscall.SIGCONT)
			} else {
				nft(t, late.Namespace, "delete table inet outage")
			}
			for _, h := range l.Hosts() {
				expectLog(t, h.Daemon(), "the network configuration has changed")
			}
			eventually(t, "the changed next backend has its device everywhere", func() error {
				for _, h := range l.Hosts() {
					n := statusOf(t, h).Network
					if want := portOf(tt.edited); want > 0 && !slices.Contains(n.Ports, want) {
						return fmt.Errorf("%s has the ports %v, want %d", h.Name(), n.Ports, want)
					}
				}
				return nil
			})
			eventuallyPublished(t, l, len(l.Hosts()), "vxlan", tt.kind)
			eventuallyMigrated(t, l, tt.kind)
			tr.expectNoLoss(t)
			expectMatrix(t, l)
		})
	}
}

// withoutNext returns an error if a host has a next backend.
func withoutNext(t *testing.T, h *lab.Host) error {
	t.Helper()
	if kind := statusOf(t, h).Network.NextBackendType; kind != "" {
		return fmt.Errorf("it has the next backend %s", kind)
	}
	return nil
}

// portOf returns the Port of a backend, and 0 if it has none.
func portOf(backend string) int {
	var b struct{ Port int }
	_ = json.Unmarshal([]byte(backend), &b)
	return b.Port
}

// waitsForNoPeer returns an error unless a host sends to all others by the next backend.
func waitsForNoPeer(t *testing.T, h *lab.Host) error {
	t.Helper()
	r := statusOf(t, h)
	if r.Network.NextBackendType == "" || len(r.Peers) == 0 {
		return errors.New("it does not migrate yet")
	}
	for _, p := range r.Peers {
		if p.Waiting != "" || p.State != status.InPlace {
			return fmt.Errorf("%s is %s %s, and waits because %q", p.Key, p.State, p.Error, p.Waiting)
		}
	}
	return nil
}

// TestBackendMigrationFinishedWithoutPath finishes a migration although two hosts do not reach each other by the next
// backend. They must keep the former one for each other, even if a daemon is killed and starts again, and all hosts
// must keep it for them. When the path works, all must leave the former backend. No packet may be lost.
//
//stages:rest it waits until the former devices may go
func TestBackendMigrationFinishedWithoutPath(t *testing.T) {
	t.Parallel()
	for _, both := range []bool{true, false} {
		t.Run(fmt.Sprintf("both directions %v", both), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 4}, backendConfig("vxlan"))
			a, b, late := l.Host(1), l.Host(2), l.Host(4)
			for _, h := range l.Hosts()[:3] {
				startWithPod(t, h, lab.FlanneldOptions{})
			}
			cut(t, a, 8477, b)
			if both {
				cut(t, b, 8477, a)
			}
			migrate(t, l, "vxlan", vni7Port)
			eventuallyWaiting(t, b, a, "no probe by vxlan has come back")
			for _, pair := range [][2]*lab.Host{{l.Host(3), a}, {l.Host(3), b}, {a, l.Host(3)}, {b, l.Host(3)}} {
				eventuallyByNext(t, pair[0], pair[1])
			}
			tr := startTraffic(t, l, 100)
			migrate(t, l, vni7Port, "")
			expectLog(t, b.Daemon(), "the migration is finished: this host keeps the former backend")
			expectLog(t, l.Host(3).Daemon(), "keeps the former one until all hosts do")
			pause(t, time.Second)
			b.Daemon().Kill()
			startOne(t, b, lab.FlanneldOptions{})
			startWithPod(t, late, lab.FlanneldOptions{})
			l.Host(3).Daemon().Kill()
			startOne(t, l.Host(3), lab.FlanneldOptions{})
			pause(t, 12*time.Second) // longer than retirement.lingering
			if n := statusOf(t, b).Network; n.BackendType != "vxlan" || n.NextBackendType != "vxlan" || n.Phase != "serving" {
				t.Errorf("%s has the backend %q and the next one %q, phase %q", b.Name(), n.BackendType, n.NextBackendType, n.Phase)
			}
			eventuallyWaiting(t, b, a, "no probe by vxlan has come back")
			heal(t, a)
			if both {
				heal(t, b)
			}
			eventuallyFinished(t, l, "vxlan")
			eventuallyWithout(t, l, "flannel.1:")
			tr.expectNoLoss(t)
			expectMatrix(t, l)
		})
	}
}

// eventuallyByNext waits until a host sends to another one by the next backend.
func eventuallyByNext(t *testing.T, h, to *lab.Host) {
	t.Helper()
	key := statusOf(t, to).Lease.Key
	eventually(t, fmt.Sprintf("%s sends to %s by the next backend", h.Name(), to.Name()), func() error {
		for _, p := range statusOf(t, h).Peers {
			if p.Key == key && p.Waiting == "" && p.Backend != "" {
				return nil
			}
		}
		return fmt.Errorf("it does not")
	})
}

// TestAloneBackendMigrationWithFamily aborts a migration and disables IPv6 in one edit, and takes that back a moment later,
// again and again. Each host gets a lease with another key then, three times in the shortest pause. IPv4 must not lose a
// packet, although hosts read these leases late and the tunnel of the aborted migration still answers. A host must not
// read them later than a second, so the test needs the whole machine. With -short it makes four of ten rounds.
//
//stages:rest it makes many changes, one after the other
func TestAloneBackendMigrationWithFamily(t *testing.T) {
	dualMigrating := netConf{v4: "10.5.0.0/16", v6: "fd00:5::/48", backend: `{"Type":"vxlan"}`, next: `{"Type":"wireguard","Implementation":"userspace"}`}
	v4Alone := netConf{v4: dualMigrating.v4, backend: dualMigrating.backend}
	l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: json.RawMessage(dualMigrating.String())}, "")
	startAll(t, l, lab.FlanneldOptions{})
	n := &walkedNetwork{walk: &walk{t: t, lab: l}, flows: map[prefix.Family][]flow{}}
	n.nets = append(n.nets, n)
	put := func(c netConf) {
		n.now = c
		if err := l.PutNetwork(testContext(t), json.RawMessage(c.String())); err != nil {
			t.Fatal(err)
		}
	}
	settle := func() {
		n.now = dualMigrating
		n.settle()
		eventuallyCarriedBy(t, l.Host(1), "wireguard", l.Host(2))
		eventuallyCarriedBy(t, l.Host(2), "wireguard", l.Host(1))
	}

	settle()
	n.startFlowsOf(prefix.IPv4)
	step := 1
	if testing.Short() {
		step = 3
	}
	for i := 0; i < 10; i += step {
		put(v4Alone)
		pause(t, milliseconds(30+45*i))
		put(dualMigrating)
		settle()
	}
	n.stopFlows(prefix.IPv4)
}
