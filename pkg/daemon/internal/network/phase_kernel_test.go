// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// inNamespace is set in a process that has a network namespace of its own.
const inNamespace = "DAEMON_TEST_IN_NAMESPACE"

// TestKernelPhases leads a network through all phases in which it is in use, by all ways of the diagram
// in design.md between these phases and by no others. It runs in a network namespace with the real kernel.
// The store is in memory.
func TestKernelPhases(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)

	// The store is empty, then its range of subnets is used up, then it gets a wider range.
	stop := w.start()
	w.expect(PhaseNoConfiguration)
	w.store.Put(peerOn("10.5.1.0/24", "192.0.2.9"))
	w.store.SetConfig(`{"Network": "10.5.0.0/23", "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0", "Backend": {"Type": "vxlan"}}`)
	w.expect(PhaseNoInterface)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	w.expect(PhaseNoLease)
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`)
	w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseServing)
	w.mtu(1400)
	w.expect(PhaseMoving, PhaseServing)

	// The configuration changes: another port of the same device, another device, another network, the
	// first configuration again.
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "Port": 8473}}`)
	w.expect(PhaseChanging, PhaseServing)
	for _, config := range []string{
		`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}`, `{"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}}`,
		`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`,
	} {
		w.store.SetConfig(config)
		w.expect(PhaseChanging, PhaseRetiring, PhaseServing)
	}

	// The store does not send leases. So the objects of the former configuration stay, while the interface
	// and the configuration change.
	w.watch.set(true)
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}`)
	w.expect(PhaseChanging, PhaseRetiring)
	w.mtu(1390)
	w.expect(PhaseMoving, PhaseRetiring)
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`)
	w.expect(PhaseChanging, PhaseRetiring)
	w.watch.set(false)
	w.expect(PhaseServing)

	// Only the traffic rules change. Then the network ends, as after a failure, and the daemon opens it
	// again.
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}, "EnableNFTables": true}`)
	stop()
	w.progress.Stopped()
	w.expect(PhaseNoConfiguration)
	stop = w.open(w.progress)
	w.expect(PhaseLastKnown, PhaseServing)
	stop()

	// After a restart the store does not answer, and then has another backend.
	w.away(true)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown)
	w.mtu(1380)
	w.expect(PhaseMoving, PhaseLastKnown)
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}`)
	w.away(false)
	w.expect(PhaseRetiring, PhaseServing)
	stop()

	// After a restart the store has another network, which has no free subnet at first.
	w.store.Put(peerOn("10.6.1.0/24", "192.0.2.9"))
	w.store.SetConfig(`{"Network": "10.6.0.0/23", "SubnetMin": "10.6.1.0", "SubnetMax": "10.6.1.0", "Backend": {"Type": "host-gw"}}`)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseServing)
	w.expectNoSubnets()
	w.store.Delete("10.6.1.0/24")
	w.expect(PhaseChanging, PhaseRetiring, PhaseServing)
	stop()

	// After a restart another host has the subnet, and there is no other one.
	w.store.Put(peerOn("10.6.1.0/25", "192.0.2.9"))
	w.away(true)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown)
	w.away(false)
	w.expect(PhaseNoLease)
	w.store.Delete("10.6.1.0/25")
	w.expect(PhaseServing)
	w.store.SetConfig(`{"Network": "10.6.0.0/23", "Backend": {"Type": "vxlan"}}`)
	w.expect(PhaseChanging, PhaseServing)
	stop()

	// After a restart another program has the VNI when the interface changes, so the session of the last known
	// state does not start again. Then the MTU is too small for that state, and the store has a configuration
	// without a free subnet.
	w.away(true)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown)
	w.occupyVNI()
	w.mtu(1370)
	w.expect(PhaseMoving)
	w.mtu(100)
	w.store.Put(peerOn("10.7.1.0/25", "192.0.2.9"))
	w.store.SetConfig(`{"Network": "10.7.0.0/23", "SubnetMin": "10.7.1.0", "SubnetMax": "10.7.1.0", "Backend": {"Type": "host-gw"}}`)
	w.away(false)
	w.expect(PhaseNoLease)
	w.store.Delete("10.7.1.0/25")
	w.expect(PhaseRetiring, PhaseServing)
	w.link("other", netlink.LinkDel)
	w.mtu(1500)
	w.expect(PhaseMoving, PhaseServing)
	stop()

	// After a restart the interface has no address, and the store has a configuration that also needs an
	// IPv6 address. The last known state needs only the IPv4 address.
	w.address(netlink.AddrDel, "192.0.2.1/24")
	w.store.SetConfig(`{"Network": "10.7.0.0/23", "EnableIPv6": true, "IPv6Network": "fd00:7::/48", "Backend": {"Type": "vxlan"}}`)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	w.expect(PhaseLastKnown)
	w.address(netlink.AddrAdd, "2001:db8::1/64")
	w.expect(PhaseServing)
	stop()

	for before, all := range following() {
		for _, now := range all {
			// TestMemberPhases of the package daemon goes the ways to and from other phases.
			if outer(before) == inUse && outer(now) == inUse && !w.walked[[2]Phase{before, now}] {
				t.Errorf("no network went from %q to %q", before, now)
			}
		}
	}
}

// TestKernelStartWithoutAFreeSubnet restarts a network while neither the changed configuration nor the
// former one has a subnet for this host. The network must wait, and use the first free subnet of the
// changed configuration.
func TestKernelStartWithoutAFreeSubnet(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	config := func(n int) string {
		return fmt.Sprintf(`{"Network": "10.%[1]d.0.0/23", "SubnetMin": "10.%[1]d.1.0", "SubnetMax": "10.%[1]d.1.0", "Backend": {"Type": "host-gw"}}`, n)
	}
	w.store.SetConfig(config(5))
	stop := w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseServing)
	stop()
	w.store.Put(peerOn("10.5.1.0/25", "192.0.2.9"))
	w.store.Put(peerOn("10.6.1.0/25", "192.0.2.10"))
	w.store.SetConfig(config(6))
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseNoLease)
	w.store.Delete("10.6.1.0/25")
	w.expect(PhaseRetiring, PhaseServing)
	stop()
}

// TestKernelStartWaitsForAFormerSubnet restarts a network while the configuration in the store has an
// unknown backend, and the former configuration has no free subnet. The network must wait for a subnet of
// the former configuration, and follow the next usable configuration.
func TestKernelStartWaitsForAFormerSubnet(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	const rest = `"Network": "10.5.0.0/23", "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0"`
	w.store.SetConfig(`{` + rest + `, "Backend": {"Type": "host-gw"}}`)
	for _, next := range []string{
		"", // the subnet is free again
		`{"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}}`,
	} {
		stop := w.start()
		if w.walked[[2]Phase{PhaseLastKnown, PhaseNoLease}] {
			w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseServing)
		} else {
			w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseServing)
		}
		stop()
		w.store.Put(peerOn("10.5.1.0/25", "192.0.2.9"))
		w.store.SetConfig(`{` + rest + `, "Backend": {"Type": "carrier-pigeon"}}`)
		stop = w.start()
		w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseNoLease)
		if next == "" {
			w.store.Delete("10.5.1.0/25")
			w.expect(PhaseServing)
		} else {
			w.store.SetConfig(next)
			w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseRetiring, PhaseServing)
		}
		stop()
		w.store.SetConfig(`{` + rest + `, "Backend": {"Type": "host-gw"}}`)
	}
}

// TestKernelStopWhileStarting stops a network while its start waits for the configuration, for the
// interface, and for a subnet. Run must return nil each time: a daemon with several networks would
// otherwise wait before it removes a network that was deleted meanwhile.
func TestKernelStopWhileStarting(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)
	w.away(true)
	stop := w.start()
	w.expect(PhaseNoConfiguration)
	stop()
	w.away(false)
	w.store.SetConfig(`{"Network": "10.5.0.0/23", "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0", "Backend": {"Type": "host-gw"}}`)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface)
	stop()
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	w.store.Put(peerOn("10.5.1.0/24", "192.0.2.9"))
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease)
	stop()
}

// TestKernelClaims changes the device of a network twice, the second time with a restart. The network
// must claim each former device until it has removed that device.
func TestKernelClaims(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`)
	stop := w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseServing)
	w.expectClaims("[[flannel.1]]")
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}`)
	w.expect(PhaseChanging, PhaseRetiring, PhaseServing)
	w.expectClaims("[[flannel.7 flannel.1 flannel.1] [flannel.7 flannel.1] [flannel.7]]")
	stop()

	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 8}}`)
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseRetiring, PhaseServing)
	w.expectClaims("[[flannel.7] [flannel.8 flannel.7 flannel.7] [flannel.8 flannel.7] [flannel.8]]")
	stop()
}

// TestKernelStartWithAnUnusableConfiguration restarts a network while the store has a configuration that
// cannot be used. The network must use the former configuration, and follow the next usable one.
func TestKernelStartWithAnUnusableConfiguration(t *testing.T) {
	if os.Getenv(inNamespace) == "" {
		repeatInNamespace(t)
		return
	}
	w := newWalk(t)
	w.address(netlink.AddrAdd, "192.0.2.1/24")
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`)
	stop := w.start()
	w.expect(PhaseNoConfiguration, PhaseNoInterface, PhaseNoLease, PhaseServing)
	stop()
	for _, config := range []string{
		`{"Network": "10.5.0.0/16"`,
		`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlam"}}`,
	} {
		w.store.SetConfig(config)
		stop = w.start()
		w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseServing)
		stop()
	}
	stop = w.start()
	w.expect(PhaseNoConfiguration, PhaseLastKnown, PhaseServing)
	w.store.SetConfig(`{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}`)
	w.expect(PhaseChanging, PhaseRetiring, PhaseServing)
	stop()
}

// claims records the devices of all that the network claims. It implements Config.Claims.
func (w *walk) claims(all []Claimed) error {
	var devices []string
	for _, c := range all {
		devices = append(devices, c.Description.Scope.Devices...)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.claimed = append(w.claimed, devices)
	return nil
}

// expectClaims compares the devices of each call of claims since the last expectClaims with want.
func (w *walk) expectClaims(want string) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := fmt.Sprint(w.claimed); got != want {
		w.t.Errorf("the network has claimed %s, want %s", got, want)
	}
	w.claimed = nil
}

// repeatInNamespace runs the calling test again, in a new process with a network namespace.
func repeatInNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes a network namespace: run it as root")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=1m")
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
}

// walk is a host whose network changes its phase.
type walk struct {
	t        *testing.T
	store    *memoryStore
	dir      string
	phases   chan Phase
	last     Phase             // "" before the first
	walked   map[[2]Phase]bool // arrows of the drawing
	gate     gate              // of the configuration
	watch    gate              // of leases
	progress *Progress         // of the last start
	network  *Network          // of the last start
	claimed  [][]string        // the claimed devices, for each call of claims
	mu       sync.Mutex        // guards claimed
}

func newWalk(t *testing.T) *walk {
	w := &walk{t: t, store: newMemoryStore(), dir: t.TempDir(), phases: make(chan Phase, 100), walked: map[[2]Phase]bool{}}
	w.gate.set(false)
	w.watch.set(false)
	// A veth pair has a carrier. A dummy device may be missing from the kernel.
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", MTU: 1500}, PeerName: "far"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lo", "far", "eth0"} {
		w.link(name, netlink.LinkSetUp)
	}
	return w
}

func (w *walk) link(name string, change func(netlink.Link) error) {
	w.t.Helper()
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = change(l)
	}
	if err != nil {
		w.t.Fatalf("%s: %v", name, err)
	}
}

// address adds an address to eth0, or deletes it, by change.
func (w *walk) address(change func(netlink.Link, *netlink.Addr) error, addr string) {
	w.t.Helper()
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.link("eth0", func(l netlink.Link) error { return change(l, a) })
}

func (w *walk) mtu(mtu int) {
	w.t.Helper()
	w.link("eth0", func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
}

// occupyVNI renames the device of vxlan, so that it counts as one of another program. Before Linux 6.2 only a device
// that is down can be renamed, and the network sets it up again.
func (w *walk) occupyVNI() {
	w.t.Helper()
	w.link("flannel.1", func(l netlink.Link) (err error) {
		for range 100 {
			if err = errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "other")); err == nil {
				return nil
			}
		}
		return err
	})
}

// away makes the store stop answering, or answer again.
func (w *walk) away(away bool) { w.gate.set(away) }

// start starts a daemon's network. The returned function stops it and waits for its end.
func (w *walk) start() (stop func()) {
	w.t.Helper()
	w.last, w.progress = "", &Progress{entered: func(now Phase) { w.phases <- now }}
	return w.open(w.progress)
}

// open is start for a daemon that has opened the network before.
func (w *walk) open(progress *Progress) (stop func()) {
	w.t.Helper()
	opts, err := options.Parse([]string{
		"--iface=eth0", "--state-dir=" + filepath.Join(w.dir, "state"), "--subnet-file=" + filepath.Join(w.dir, "subnet.env"),
		"--firewall=nftables", "--status-socket=off",
	}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Background()))
	var background sync.WaitGroup
	h := NewHost(status.NewJournal(1), nil)
	n, err := Open(ctx, Config{
		Host: h, Options: opts, Backends: builtin.New, Claims: w.claims, Progress: progress,
		OpenStore: func(etcd.Config) (Store, error) { return gatedStore{w.store.Manager(), &w.gate, &w.watch}, nil },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.network = n
	background.Go(func() { _ = h.Firewall.Run(ctx) })
	done := make(chan error, 1)
	go func() {
		done <- n.Run(ctx)
		background.Wait()
		n.Close()
		close(done)
	}()
	return func() {
		w.t.Helper()
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("the network ended with %v", err)
		}
		<-done
	}
}

// expectNoSubnets waits until Refusal says that the configuration in the store cannot be used because
// no subnet is free.
func (w *walk) expectNoSubnets() {
	w.t.Helper()
	waittest.Eventually(w.t, 10*time.Second, "the configuration is refused", func() error {
		if why := w.network.Refusal(); !strings.Contains(why, subnet.ErrNoSubnets.Error()) {
			return fmt.Errorf("it is refused because of %q, want that no subnet is free", why)
		}
		return nil
	})
}

// expect waits until the network has gone through exactly these phases, in this order.
func (w *walk) expect(phases ...Phase) {
	w.t.Helper()
	for _, want := range phases {
		select {
		case now := <-w.phases:
			if now != want {
				w.t.Fatalf("after %q the phase is %q, want %q", w.last, now, want)
			}
			if !follows(w.last, now) {
				w.t.Fatalf("the drawing has no way from %q to %q", w.last, now)
			}
			arrow := [2]Phase{w.last, now}
			if !slices.Contains(following()[w.last], now) {
				arrow = [2]Phase{outer(w.last), outer(now)}
			}
			w.last, w.walked[arrow] = now, true
		case <-time.After(10 * time.Second):
			w.t.Fatalf("after %q the network does not reach %q", w.last, want)
		}
	}
}

// gate lets calls through or makes them wait.
type gate struct {
	mu   sync.Mutex
	open chan struct{} // closed while calls may pass
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case shut:
		g.open = make(chan struct{})
	case g.open == nil:
		g.open = make(chan struct{})
		close(g.open)
	default:
		select {
		case <-g.open:
		default:
			close(g.open)
		}
	}
}

func (g *gate) pass(ctx context.Context) error {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gatedStore is a store that can be unavailable.
type gatedStore struct {
	*memoryManager
	gate, watch *gate
}

// Watch implements subnet.Manager.
func (s gatedStore) Watch(ctx context.Context, sink func(subnet.Update)) error {
	if err := s.watch.pass(ctx); err != nil {
		return err
	}
	return s.memoryManager.Watch(ctx, sink)
}

// Config implements subnet.Manager.
func (s gatedStore) Config(ctx context.Context) (subnet.Config, error) {
	if err := s.gate.pass(ctx); err != nil {
		return subnet.Config{}, err
	}
	return s.memoryManager.Config(ctx)
}

// Reconnect implements Store.
func (gatedStore) Reconnect() {}

// Close implements Store.
func (gatedStore) Close() error { return nil }

// peerOn returns the lease of another host.
func peerOn(prefix, public string) subnet.Lease {
	return subnet.Lease{Key: prefix, BackendType: "vxlan", Expires: time.Now().Add(time.Hour), Endpoints: []subnet.Endpoint{
		{Subnet: netip.MustParsePrefix(prefix), PublicIP: netip.MustParseAddr(public)},
	}}
}
