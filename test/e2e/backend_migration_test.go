// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// oneByOne returns options of daemons that read the configuration only when they start, so that
// hosts read it one after the other.
func oneByOne() lab.FlanneldOptions {
	return lab.FlanneldOptions{Args: []string{"--follow-config=false"}}
}

// follow restarts the daemon of a host with the options of oneByOne, so that it uses the configuration in
// the store.
func follow(t *testing.T, h *lab.Host) {
	t.Helper()
	expectStop(t, h.Daemon())
	startOne(t, h, oneByOne())
}

// migrate writes a configuration with the given backends. Then it calls follow for hosts, one after the
// other. Without hosts it restarts no daemon. present and next are JSON objects or arguments of
// backendConfig. If next is empty, the configuration has no NextBackend.
func migrate(t *testing.T, l *lab.Lab, present, next string, hosts ...*lab.Host) {
	t.Helper()
	config := backendConfig(present)
	if strings.HasPrefix(present, "{") {
		config = present
	}
	if next != "" {
		if !strings.HasPrefix(next, "{") {
			next = backendConfig(next)
		}
		config += `,"NextBackend":` + next
	}
	putConfig(t, l, config)
	for _, h := range hosts {
		follow(t, h)
	}
}

// putConfig writes the network configuration of the lab with another backend. backend is the JSON value
// of the key Backend. Further keys may follow it, such as ,"NextBackend":{"Type":"udp"}.
func putConfig(t *testing.T, l *lab.Lab, backend string) {
	t.Helper()
	if err := l.PutNetwork(testContext(t), configWith(t, l, backend)); err != nil {
		t.Fatal(err)
	}
}

// configWith returns the network configuration that putConfig writes.
func configWith(t *testing.T, l *lab.Lab, backend string) []byte {
	t.Helper()
	const placeholder = `"BACKEND"`
	network, err := lab.NetworkConfig(l.Families(), []byte(placeholder))
	if err != nil {
		t.Fatal(err)
	}
	network = reserveSubnetsFrom200(t, network)
	return []byte(strings.Replace(string(network), placeholder, backend, 1))
}

// eventuallyCarriedBy waits until a host sends to each of the others by the backend of the given
// type.
func eventuallyCarriedBy(t *testing.T, h *lab.Host, backend string, others ...*lab.Host) {
	t.Helper()
	names := map[string]string{} // names of the other hosts, by the keys of their leases
	for _, other := range others {
		names[statusOf(t, other).Lease.Key] = other.Name()
	}
	eventually(t, fmt.Sprintf("%s sends by %s", h.Name(), backend), func() error {
		found := 0
		for _, p := range statusOf(t, h).Peers {
			name, wanted := names[p.Key]
			if wanted && (p.Backend != backend || p.State != status.InPlace) {
				return fmt.Errorf("it sends to %s by %q (%s %s), because %s", name, p.Backend, p.State, p.Error, p.Waiting)
			}
			if wanted {
				found++
			}
		}
		if found < len(names) {
			return fmt.Errorf("it knows %d of %v", found, names)
		}
		return nil
	})
}

// traffic is UDP flows and TCP streams between pods.
type traffic struct {
	flows   []flow
	streams []*stream
}

// startTraffic starts flows as startFlows does, with at most rate packets per second each, and TCP
// streams as startStreams does.
func startTraffic(t *testing.T, l *lab.Lab, rate int) *traffic {
	t.Helper()
	return &traffic{flows: startFlows(t, l, rate), streams: startStreams(t, l)}
}

// startStreams starts one TCP stream between every two pods in every family. Each stream carries packets
// in both directions.
func startStreams(t *testing.T, l *lab.Lab) (all []*stream) {
	t.Helper()
	pods := l.Pods()
	for i, from := range pods {
		for _, to := range pods[i+1:] {
			for _, f := range l.Families() {
				all = append(all, startStream(t, from, to, f))
			}
		}
	}
	return all
}

// expectNoLoss stops the traffic. It fails the test if a packet was lost, or if a stream was interrupted
// or has carried nothing.
func (tr *traffic) expectNoLoss(t *testing.T) {
	t.Helper()
	expectNothingLost(t, tr.flows)
	for i, s := range tr.streams {
		if n, err := s.stop(); err != nil || n == 0 {
			t.Errorf("stream %d: %d messages have come back, then %v", i, n, err)
		}
	}
}

// stream is a TCP connection whose far end sends each message back.
type stream struct {
	near    net.Conn
	members sync.WaitGroup
	stopped chan struct{} // closed by stop
	ended   chan struct{} // closed when run has ended

	back int // number of messages that have come back
	err  error
}

func startStream(t *testing.T, from, to *lab.Pod, f prefix.Family) *stream {
	t.Helper()
	ctx := testContext(t)
	listener, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(to.Addr(f), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{stopped: make(chan struct{}), ended: make(chan struct{})}
	s.members.Go(func() {
		far, err := listener.Accept()
		listener.Close()
		if err != nil {
			return
		}
		defer far.Close()
		_, _ = io.Copy(far, far)
	})
	if s.near, err = from.Dial(ctx, "tcp", listener.Addr().String()); err != nil {
		listener.Close()
		t.Fatal(err)
	}
	s.members.Go(s.run)
	return s
}

// run sends one message after the other and waits for each to come back. It returns when stop is called,
// or after an error, which it stores in s.err.
func (s *stream) run() {
	defer close(s.ended)
	buf := make([]byte, 8)
	for n := uint64(1); ; n++ {
		select {
		case <-s.stopped:
			return
		case <-time.After(5 * time.Millisecond):
		}
		message := binary.BigEndian.AppendUint64(nil, n)
		_ = s.near.SetDeadline(time.Now().Add(patience))
		if _, s.err = s.near.Write(message); s.err != nil {
			return
		}
		if _, s.err = io.ReadFull(s.near, buf); s.err != nil {
			return
		}
		if !slices.Equal(buf, message) {
			s.err = errors.New("another message has come back")
			return
		}
		s.back++
	}
}

// stop ends the stream. It returns the number of messages that have come back, and the error that had
// interrupted the stream before, or nil.
func (s *stream) stop() (int, error) {
	close(s.stopped)
	<-s.ended
	s.near.Close()
	s.members.Wait()
	return s.back, s.err
}

// vni7 is the configuration of a vxlan backend with a VNI that is not the default.
const vni7 = `{"Type":"vxlan","VNI":7}`

// typeOf returns the type of a backend. The argument is as for migrate; if it is a JSON object, its
// type must be vxlan.
func typeOf(backend string) string {
	switch {
	case strings.HasPrefix(backend, "{"):
		return "vxlan"
	case backend == userspace:
		return "wireguard"
	}
	return backend
}

// except returns hosts without h.
func except(hosts []*lab.Host, h *lab.Host) []*lab.Host {
	return slices.DeleteFunc(slices.Clone(hosts), func(o *lab.Host) bool { return o == h })
}

// eventuallyMigrated waits until all hosts send to each other by the next backend, and their metrics
// count no peer with the present one. backend is the type of the next backend.
func eventuallyMigrated(t *testing.T, l *lab.Lab, backend string) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventuallyCarriedBy(t, h, backend, except(l.Hosts(), h)...)
		eventually(t, h.Name()+" waits for no peer", func() error {
			if n := metric(t, h, `flannel_migration_peers{backend="present"}`); n > 0 {
				return fmt.Errorf("%v peers are with the present backend", n)
			}
			return nil
		})
	}
}

// eventuallyPublished waits until the store has the leases of the given number of hosts, all of them
// with data of exactly these types of backends. next is empty unless the network migrates.
func eventuallyPublished(t *testing.T, l *lab.Lab, hosts int, present, next string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the leases have data of %q and %q", present, next), func() error {
		all := leases(t, l)
		if len(all) != hosts {
			return fmt.Errorf("%d leases, want %d", len(all), hosts)
		}
		for _, one := range all {
			var types struct{ BackendType, NextBackendType string }
			if err := json.Unmarshal([]byte(one.Value), &types); err != nil {
				return err
			}
			if types.BackendType == "" { // leases of udp may have no BackendType, like those of flannel
				types.BackendType = "udp"
			}
			if types.BackendType != present || types.NextBackendType != next {
				return fmt.Errorf("lease %s has data of %q and %q", one.Key, types.BackendType, types.NextBackendType)
			}
		}
		return nil
	})
}

// eventuallyPublishedBy waits until the leases of hosts have data of exactly these types of backends.
func eventuallyPublishedBy(t *testing.T, l *lab.Lab, present, next string, hosts ...*lab.Host) {
	t.Helper()
	for _, h := range hosts {
		key := statusOf(t, h).Lease.Key
		eventually(t, fmt.Sprintf("the lease of %s has data of %q and %q", h.Name(), present, next), func() error {
			for _, one := range leases(t, l) {
				if one.Key == key && strings.Contains(one.Value, fmt.Sprintf(`"BackendType":%q`, present)) && one.NextBackendType == next {
					return nil
				}
			}
			return errors.New("it has not")
		})
	}
}

// eventuallyWithout waits until kernelObjects of no host contains text, and no state file lists objects
// to remove. text is a part of an object of a former backend.
func eventuallyWithout(t *testing.T, l *lab.Lab, text string) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" has left the former backend", func() error {
			if state := kernelObjects(t, h); strings.Contains(state, text) {
				return fmt.Errorf("%q is still there:\n%s", text, state)
			}
			return nil
		})
		expectNoFormer(t, h)
	}
}

// TestBackendMigration checks that a migration loses no packet: neither while the hosts get the
// next backend one after the other, nor while they change their routes, nor while they remove the
// former backend. TestAloneBackendMigrationWalk has the other pairs of backends.
//
//stages:rest it waits until the former devices may go
func TestBackendMigration(t *testing.T) {
	t.Parallel()
	for _, tt := range []backendMigration{
		{from: "vxlan", to: "host-gw", families: dual, left: "flannel.1:"},
		{from: "vxlan", to: vni7, families: dual, left: "flannel.1:", strict: true},
	} {
		tt.rate = fast
		t.Run(tt.name(), func(t *testing.T) {
			t.Parallel()
			tt.test(t)
		})
	}
}

// TestBackendMigrationFollowed checks that a migration loses no packet if all hosts follow the
// configuration at the same moment, without a restart. The first migration is aborted, the second one is
// finished. TestAloneBackendMigrationWalk has the other pairs of backends.
//
//stages:rest it waits until the former devices may go
func TestBackendMigrationFollowed(t *testing.T) {
	t.Parallel()
	for _, tt := range []backendMigration{
		{from: "vxlan", to: "host-gw", families: dual, left: "flannel.1:"},
		{from: "vxlan", to: userspace, families: dual, left: "flannel.1:", rate: 300},
		{from: userspace, to: "vxlan", families: dual, left: "flannel-wg", rate: 300},
		{from: "udp", to: userspace, families: dual, left: "flannel0", rate: 300},
	} {
		t.Run(tt.name(), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: tt.families}, backendConfig(tt.from))
			startAll(t, l, lab.FlanneldOptions{})
			tr := startTraffic(t, l, cmp.Or(tt.rate, fast))
			migrate(t, l, tt.from, tt.to)
			eventuallyMigrated(t, l, typeOf(tt.to))
			migrate(t, l, tt.from, "")
			for _, h := range l.Hosts() {
				eventually(t, h.Name()+" has gone back", func() error {
					if r := statusOf(t, h); r.Network.NextBackendType != "" || r.Network.Phase != "serving" {
						return fmt.Errorf("its next backend is %q, its phase %q", r.Network.NextBackendType, r.Network.Phase)
					}
					return nil
				})
			}
			migrate(t, l, tt.from, tt.to)
			eventuallyMigrated(t, l, typeOf(tt.to))
			expectNobodyBlamed(t, l.Host(1))
			migrate(t, l, tt.to, "")
			eventuallyWithout(t, l, tt.left)
			pause(t, time.Second) // time in which a packet that still needs a removed device would be lost
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

// expectNobodyBlamed checks that flannelctl doctor blames neither a route nor a port while two backends serve the network.
func expectNobodyBlamed(t *testing.T, h *lab.Host) {
	t.Helper()
	out, _ := flannelctl(t, h, "doctor") // it may fail: the MTU of pods may be too large for the next backend
	for _, text := range []string{"the route of", "uses UDP port"} {
		if strings.Contains(out, text) {
			t.Errorf("flannelctl doctor on %s:\n%s", h.Name(), out)
		}
	}
}

// TestVMBackendMigration is TestBackendMigration with backends that need modules of the kernel.
// TestVMBackendMigrationWalk has the opposite directions.
//
//stages:long TestVMBackendMigrationWalk makes these migrations without a restart, and TestBackendMigration host by host
func TestVMBackendMigration(t *testing.T) {
	for _, tt := range []backendMigration{
		{from: "vxlan", to: "wireguard", families: v4, left: "flannel.1:"},
		{from: "vxlan", to: "ipip", families: v4, left: "flannel.1:"},
	} {
		tt.rate = 20 // the CPU is emulated
		t.Run(tt.name(), func(t *testing.T) {
			t.Parallel() // each test waits for a minute until hosts may remove the former device
			tt.test(t)
		})
	}
}

// backendMigration describes a test of one migration.
type backendMigration struct {
	from, to string
	families []prefix.Family
	left     string // text that kernelObjects contains while objects of the former backend exist
	rate     int    // packets per second of each flow
	strict   bool   // whether hosts use the strict reverse path filter
}

func (m backendMigration) name() string {
	return m.from + " to " + m.to + " " + familiesName(m.families)
}

// test migrates a lab of three hosts and finishes the migration. No packet may be lost. While one host
// has not finished, all hosts must keep the former device.
func (m backendMigration) test(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 3, Families: m.families}, backendConfig(m.from))
	for _, h := range l.Hosts() {
		if !m.strict {
			break
		}
		if out, err := h.Exec(testContext(t), "sysctl", "-w", "net.ipv4.conf.all.rp_filter=1"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	startAll(t, l, oneByOne())
	tr := startTraffic(t, l, m.rate)
	migrate(t, l, m.from, m.to, l.Hosts()...)
	eventuallyMigrated(t, l, typeOf(m.to))
	migrate(t, l, m.to, "", l.Hosts()[:2]...)
	for _, h := range l.Hosts() { // a former host-gw has no device to keep, and its routes may go early, because hosts need them only to send
		if state := kernelObjects(t, h); strings.HasPrefix(m.left, "flannel") && !strings.Contains(state, m.left) {
			t.Errorf("%s has removed the former device although one host has not finished: no %q in\n%s", h.Name(), m.left, state)
		}
	}
	follow(t, l.Host(3))
	eventuallyWithout(t, l, m.left)
	pause(t, time.Second) // time in which a packet that still needs a removed device would be lost
	tr.expectNoLoss(t)
}

// TestBackendMigrationBack checks that no packet is lost if the former configuration is put back after
// all hosts have changed their routes. In the second case the daemon of host 2 is killed and started
// again after each step.
//
//stages:rest it waits until the devices may go
func TestBackendMigrationBack(t *testing.T) {
	t.Parallel()
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed %v", kill), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: dual}, backendConfig("host-gw"))
			startAll(t, l, oneByOne())
			tr := startTraffic(t, l, fast)
			crash := func() {
				if h := l.Host(2); kill {
					h.Daemon().Kill()
					pause(t, milliseconds(300))
					startOne(t, h, oneByOne())
				}
			}
			migrate(t, l, "host-gw", "vxlan", l.Host(1), l.Host(2))
			crash()
			follow(t, l.Host(3))
			eventuallyMigrated(t, l, "vxlan")
			crash()
			eventuallyMigrated(t, l, "vxlan")
			migrate(t, l, "host-gw", "", l.Host(1), l.Host(2))
			crash()
			follow(t, l.Host(3))
			eventuallyWithout(t, l, "flannel")
			tr.expectNoLoss(t)
			expectMatrix(t, l)
		})
	}
}

// TestBackendMigrationReturn finishes a migration on two of three hosts. Then it writes the configuration
// with both backends again, and after that the one with only the former backend. No packet may be lost.
//
//stages:rest it waits until the devices may go
func TestBackendMigrationReturn(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, backendConfig("vxlan"))
	startAll(t, l, oneByOne())
	tr := startTraffic(t, l, fast)
	migrate(t, l, "vxlan", "host-gw", l.Hosts()...)
	eventuallyMigrated(t, l, "host-gw")
	migrate(t, l, "host-gw", "", l.Host(1), l.Host(2))
	migrate(t, l, "vxlan", "host-gw", l.Hosts()...)
	eventuallyMigrated(t, l, "host-gw")
	migrate(t, l, "vxlan", "", l.Hosts()...)
	eventuallyWithout(t, l, ".0/24 via 192.168.77")
	tr.expectNoLoss(t)
	expectMatrix(t, l)
}

// TestBackendMigrationInUserspace checks that a migration to a backend in user space loses no packet
// until all hosts have changed their routes. The test does not count later packets, because the daemon
// carries them, and some are lost when it restarts.
func TestBackendMigrationInUserspace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		to       string
		families []prefix.Family
	}{{userspace, dual}, {"udp", dual}} {
		t.Run(tt.to, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: tt.families}, backendConfig("vxlan"))
			startAll(t, l, oneByOne())
			tr := startTraffic(t, l, 300)
			migrate(t, l, "vxlan", tt.to, l.Host(1), l.Host(2))
			eventuallyCarriedBy(t, l.Host(1), typeOf(tt.to), l.Host(2))
			eventuallyCarriedBy(t, l.Host(2), typeOf(tt.to), l.Host(1))
			follow(t, l.Host(3))
			eventuallyMigrated(t, l, typeOf(tt.to))
			tr.expectNoLoss(t)
			migrate(t, l, tt.to, "", l.Hosts()...)
			expectMatrix(t, l)
		})
	}
}

// TestBackendMigrationBystander checks a migration with one host that keeps the former configuration, and
// another one on which the next backend cannot start. The other hosts must continue to send to both by
// the present backend, and give the reason.
//
//stages:rest TestFlannelctlMigrate has a host that does not follow
func TestBackendMigrationBystander(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 4}, backendConfig("vxlan"))
	startAll(t, l, oneByOne())
	blocked, bystander := l.Host(3), l.Host(4)
	tr := startTraffic(t, l, 300)
	// Because of this bridge, WireGuard in user space cannot create its device.
	if out, err := blocked.Exec(testContext(t), "ip", "link", "add", "flannel-wg", "type", "bridge"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	migrate(t, l, "vxlan", userspace, l.Host(1), l.Host(2), blocked)
	eventuallyCarriedBy(t, l.Host(1), "wireguard", l.Host(2))
	eventuallyCarriedBy(t, l.Host(2), "wireguard", l.Host(1))
	const reason = "the next backend does not start: packets go on by the present one"
	expectLog(t, blocked.Daemon(), reason)
	expectFlannelctlFails(t, blocked, []string{"doctor"}, reason+" (wireguard: ", "cni0 has MTU 1450, the network carries 1440")
	pause(t, 3*time.Second) // time in which hosts could wrongly change more routes
	for _, h := range []*lab.Host{l.Host(1), l.Host(2)} {
		eventuallyCarriedBy(t, h, "vxlan", blocked, bystander)
		for _, p := range statusOf(t, h).Peers {
			want := map[string]string{
				statusOf(t, blocked).Lease.Key:   "no probe by wireguard has come back",
				statusOf(t, bystander).Lease.Key: "it does not publish data for wireguard",
			}[p.Key]
			if p.Waiting != want {
				t.Errorf("%s says about %s: %q, want %q", h.Name(), p.Key, p.Waiting, want)
			}
		}
	}
	if out, err := blocked.Exec(testContext(t), "ip", "link", "del", "flannel-wg"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventuallyCarriedBy(t, l.Host(1), "wireguard", blocked)
	follow(t, bystander)
	eventuallyMigrated(t, l, "wireguard")
	tr.expectNoLoss(t)
}

// TestBackendMigrationDataLater migrates while a host lacks what the next backend needs, and so must not publish
// data for it. When the cause is gone, the host must publish the data without a restart. No packet may be lost.
//
//stages:rest TestFlannelctlMigrate migrates hosts that have published their data
func TestBackendMigrationDataLater(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ to, block, mend string }{
		// A folder with the name of the file prevents writing the private key.
		"the key cannot be written":        {userspace, "mkdir -p /var/lib/flannel/wgkey", "rmdir /var/lib/flannel/wgkey"},
		"there are no TUN devices":         {userspace, "mount -t tmpfs none /dev/net", "umount /dev/net"},
		"there are no TUN devices, as udp": {"udp", "mount -t tmpfs none /dev/net", "umount /dev/net"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testDataLater(t, tt.to, tt.block, tt.mend)
		})
	}
}

// testDataLater migrates to a backend after host 2 has run the command block, and runs mend when the hosts wait for it.
func testDataLater(t *testing.T, to, block, mend string) {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("vxlan"))
	startAll(t, l, lab.FlanneldOptions{})
	blocked := l.Host(2)
	tr := startTraffic(t, l, 300)
	run := func(command string) {
		if out, err := blocked.Exec(testContext(t), "sh", "-c", command); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	run(block)
	migrate(t, l, "vxlan", to)
	expectLog(t, blocked.Daemon(), "cannot publish data of the next backend")
	nextTypes := func() (types []string) {
		for _, one := range leases(t, l) {
			types = append(types, one.NextBackendType)
		}
		slices.Sort(types)
		return types
	}
	eventually(t, "one host publishes data for the next backend", func() error {
		if got := nextTypes(); !slices.Equal(got, []string{"", typeOf(to)}) {
			return fmt.Errorf("the next types of the leases are %q", got)
		}
		return nil
	})
	run(mend)
	eventuallyMigrated(t, l, typeOf(to))
	if got := nextTypes(); !slices.Equal(got, []string{typeOf(to), typeOf(to)}) {
		t.Errorf("the next types of the leases are %q, want %s for both", got, to)
	}
	tr.expectNoLoss(t)
	if n := len(blocked.Daemons()); n != 1 {
		t.Errorf("%s has run %d daemons, want one", blocked.Name(), n)
	}
}

// TestKubeBackendMigration migrates a cluster whose leases are annotations of Nodes. The annotations
// of the present backend must not change during the migration, because flannel reads them. After the
// end of the migration the annotation for the next backend must be gone.
//
//stages:rest it starts an API server
func TestKubeBackendMigration(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	c.startDaemons()
	tr := startTraffic(t, c.Lab, fast)
	before := c.node(1).Metadata.Annotations
	configure := func(backend string) {
		t.Helper()
		c.write("net-conf.json", configWith(t, c.Lab, backend))
	}
	configure(`{"Type":"vxlan"},"NextBackend":{"Type":"host-gw"}`)
	eventuallyMigrated(t, c.Lab, "host-gw")
	during := c.node(1)
	for key, value := range before {
		if during.Metadata.Annotations[key] != value {
			t.Errorf("annotation %s is %q in the migration, was %q", key, during.Metadata.Annotations[key], value)
		}
	}
	if got := during.annotation("next-backend-type"); got != "host-gw" {
		t.Errorf("next-backend-type is %q, want host-gw", got)
	}
	configure(`{"Type":"host-gw"}`)
	eventuallyWithout(t, c.Lab, "flannel.1:")
	after := c.node(1)
	if _, has := after.Metadata.Annotations[annotation("next-backend-type")]; has || after.annotation("backend-type") != "host-gw" {
		t.Errorf("annotations after the migration are %v", after.Metadata.Annotations)
	}
	tr.expectNoLoss(t)
	expectMatrix(t, c.Lab)
}

// TestFlannelctlMigrate makes a migration with the commands of flannelctl migrate. While a host has not
// read the new configuration, the command finish must refuse, because it would cut that host off, and the
// command status must name the host.
func TestFlannelctlMigrate(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, backendConfig("vxlan"))
	reachable := lab.FlanneldOptions{Args: []string{"--follow-config=false", "--statusz-address=0.0.0.0:8287"}}
	startAll(t, l, reachable)
	follow := func(t *testing.T, h *lab.Host) {
		t.Helper()
		expectStop(t, h.Daemon())
		startOne(t, h, reachable)
	}
	h := l.Host(1)
	expect := func(want string, args ...string) {
		t.Helper()
		out, _ := flannelctl(t, h, append([]string{"migrate"}, args...)...)
		if !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("flannelctl migrate %s prints no %q:\n%s", strings.Join(args, " "), want, out)
		}
	}
	socketFlag := "--socket=" + h.Path(socket)
	expect("the network does not migrate", "status")
	expect("both have the device flannel.1: want a NextBackend of another type, or for vxlan with another VNI, which also allows another Port", "plan", `{"Type":"vxlan","Port":4789}`)
	expect(`"NextBackend":{"Type":"host-gw"}`, "plan", `{"Type":"host-gw"}`)
	expect("there is no NextBackend to finish with", "finish", "--yes")
	expect(`+ NextBackend.Type: "host-gw" written`, "start", `{"Type":"host-gw"}`)
	follow(t, h)
	follow(t, l.Host(2))
	eventuallyCarriedBy(t, h, "host-gw", l.Host(2))
	behind := statusOf(t, l.Host(3)).Lease.Key
	expect("hosts with present backend only 1 hosts with both backends 2 hosts with next backend only 0 "+behind+" does not publish data for host-gw", "status")
	expect("this host peers to which it sends by host-gw: 1, by vxlan: 1; MTU of new pods: 1450 "+behind+": it does not publish data for host-gw", "status", socketFlag)
	expect("hosts that do not publish data for host-gw: 1 (flannelctl migrate status names them): add --yes", "finish")
	follow(t, l.Host(3))
	eventuallyMigrated(t, l, "host-gw")
	mute := l.Host(2)
	nft(t, mute.Namespace, "table ip mute { chain input { type filter hook input priority filter ; tcp dport 8287 drop ; } ; }")
	expect(":8287: i/o timeout", "finish", "--timeout=1s")
	expect("1 of 3 hosts still need the present backend, or do not answer: add --yes", "finish", "--timeout=1s")
	nft(t, mute.Namespace, "delete table ip mute")
	expect(`~ Backend.Type: "host-gw" (was "vxlan") - NextBackend.Type: "host-gw" written`, "finish")
	follow(t, h)
	follow(t, l.Host(2))
	expect("to host-gw alone: hosts keep their former devices until the last lease has followed", "status")
	over := make(chan string, 1)
	go func() {
		out, err := flannelctl(t, h, "migrate", "status", "--wait")
		over <- fmt.Sprint(out, err)
	}()
	eventuallyPublishedBy(t, l, "host-gw", "vxlan", h, l.Host(2))
	expect("hosts with both backends 3 hosts with next backend only 0", "status")
	expect(behind+" still publishes data for vxlan", "status")
	follow(t, l.Host(3))
	select {
	case out := <-over:
		t.Errorf("flannelctl migrate status --wait has ended before the migration: %s", out)
	default:
	}
	eventuallyPublished(t, l, 3, "host-gw", "")
	if out := <-over; !strings.Contains(out, "waiting: hosts with present backend only: 0, with both backends: 3, with next backend only: 0") ||
		!strings.Contains(out, "the network does not migrate") || !strings.HasSuffix(out, "<nil>") {
		t.Errorf("flannelctl migrate status --wait: %s", out)
	}
	expect("there is no NextBackend to remove", "abort")
}
