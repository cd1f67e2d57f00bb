// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// subnets is the directory of the leases in etcd.
const subnets = lab.Prefix + "/subnets/"

// etcdClient returns a client of the lab's etcd.
func etcdClient(t *testing.T, l *lab.Lab) *clientv3.Client {
	t.Helper()
	c, err := l.Etcd().Client(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func putKey(t *testing.T, c *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := c.Put(testContext(t), key, value); err != nil {
		t.Fatal(err)
	}
}

func removeKey(t *testing.T, c *clientv3.Client, key string) {
	t.Helper()
	r, err := c.Delete(testContext(t), key)
	if err != nil || r.Deleted != 1 {
		t.Fatalf("delete %s: %d keys, %v", key, r.Deleted, err)
	}
}

// lease is a lease in the store. The fields after Value are keys of Value.
type lease struct {
	Key         string
	Value       string
	PublicIP    string
	BackendData struct{ VtepMAC string }

	NextBackendType string
}

// subnet returns the IPv4 subnet in the key.
func (l lease) subnet() string {
	first, _, _ := strings.Cut(l.Key, "&")
	return strings.ReplaceAll(first, "-", "/")
}

// leases returns the leases in the order of their keys. It leaves out values that are not JSON or do not fit into
// lease, such as BackendData that is not an object.
func leases(t *testing.T, l *lab.Lab) []lease {
	t.Helper()
	all, err := l.Leases(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var ls []lease
	for _, one := range all {
		parsed := lease{Key: one.Key, Value: one.Value}
		if json.Unmarshal([]byte(one.Value), &parsed) == nil {
			ls = append(ls, parsed)
		}
	}
	return ls
}

// leaseOf returns the lease with the host's IPv4 address, or fails the test if there is none.
func leaseOf(t *testing.T, l *lab.Lab, h *lab.Host) lease {
	t.Helper()
	ls := leases(t, l)
	i := slices.IndexFunc(ls, func(one lease) bool { return one.PublicIP == h.Addr(4).String() })
	if i < 0 {
		t.Fatalf("no lease of %s among %v", h.Name(), ls)
	}
	return ls[i]
}

// vxlanLease returns the value of a lease as a daemon with the backend vxlan, the public address ip and
// this MAC writes it.
func vxlanLease(ip, mac string) string {
	return fmt.Sprintf(`{"PublicIP":%q,"PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":%q}}`, ip, mac)
}

// vxlanKernelState returns the routes, neighbours and FDB entries of a host as ip(8) and bridge(8)
// print them.
func vxlanKernelState(ctx context.Context, h *lab.Host) (string, error) {
	out, err := h.Exec(ctx, "sh", "-c", "ip route show; ip -6 route show; ip neigh show; bridge fdb show")
	return string(out), err
}

// expectKernel waits until vxlanKernelState contains all texts in have and no text in lack. Each text
// is a part of a line.
func expectKernel(t *testing.T, h *lab.Host, have, lack []string) {
	t.Helper()
	eventually(t, "kernel of "+h.Name(), func() error {
		state, err := vxlanKernelState(t.Context(), h)
		if err != nil {
			return err
		}
		for _, line := range have {
			if !strings.Contains(state, line) {
				return fmt.Errorf("no %q in:\n%s", line, state)
			}
		}
		for _, line := range lack {
			if strings.Contains(state, line) {
				return fmt.Errorf("unexpected %q in:\n%s", line, state)
			}
		}
		return nil
	})
}

// datapathLines returns a part of each line of vxlanKernelState about a peer: of its route, its neighbour and
// its FDB entry.
func datapathLines(subnet, ip, mac string) []string {
	vtep := netip.MustParsePrefix(subnet).Addr()
	return []string{
		fmt.Sprintf("%s via %s dev flannel.1", subnet, vtep),
		fmt.Sprintf("%s dev flannel.1 lladdr %s PERMANENT", vtep, mac),
		fmt.Sprintf("%s dev flannel.1 dst %s self permanent", mac, ip),
	}
}

// TestFiftyDaemonsGetFiftySubnets starts fifty daemons at the same time. Each must get exactly one
// lease.
func TestFiftyDaemonsGetFiftySubnets(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 50}, `{"Type":"alloc"}`)
	if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{}); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for _, one := range leases(t, l) {
		if other, taken := seen[one.PublicIP]; taken {
			t.Errorf("%s has the leases %s and %s, want one", one.PublicIP, other, one.Key)
		}
		seen[one.PublicIP] = one.Key
	}
	if len(seen) != 50 {
		t.Errorf("%d hosts have a lease, want 50", len(seen))
	}
}

// TestPoolThatIsTooSmall checks hosts for which no subnet is left. They must log that once and not be
// ready. As soon as a lease is deleted, one of them must get its subnet.
//
//stages:rest TestRestartIntoAFullNetwork has a pool without a free subnet
func TestPoolThatIsTooSmall(t *testing.T) {
	t.Parallel()
	const hosts, pool = 20, 16
	l := newLab(t, lab.Config{
		Hosts:   hosts,
		Network: json.RawMessage(`{"Network":"10.5.0.0/20","SubnetLen":24,"SubnetMin":"10.5.0.0","Backend":{"Type":"alloc"}}`),
	}, "")
	ctx := testContext(t)
	for _, h := range l.Hosts() {
		if _, err := h.StartFlanneld(ctx, lab.FlanneldOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// ready returns the hosts that are ready, and the others that have logged that no subnet is left.
	ready := func() (with, without []*lab.Host) {
		for _, h := range l.Hosts() {
			if status, _, err := h.Daemon().Get(ctx, "/readyz"); err == nil && status == 200 {
				with = append(with, h)
			} else if strings.Contains(h.Daemon().Log(), "out of subnets") {
				without = append(without, h)
			}
		}
		return with, without
	}
	eventually(t, "16 leases", func() error {
		if with, without := ready(); len(with) != pool || len(without) != hosts-pool {
			return fmt.Errorf("%d daemons are ready, and %d have logged that no subnet is left", len(with), len(without))
		}
		return nil
	})
	if n := len(leases(t, l)); n != pool {
		t.Errorf("%d leases, want %d", n, pool)
	}
	with, without := ready()
	for _, h := range without {
		if n := strings.Count(h.Daemon().Log(), "out of subnets"); n != 1 {
			t.Errorf("%s has logged %d times that no subnet is left, want once", h.Name(), n)
		}
	}
	gone := leaseOf(t, l, with[0])
	with[0].Daemon().Kill()
	removeKey(t, etcdClient(t, l), subnets+gone.Key)
	eventually(t, "a waiting host gets the free subnet", func() error {
		for _, h := range without {
			if status, _, err := h.Daemon().Get(ctx, "/readyz"); err == nil && status == 200 {
				return nil
			}
		}
		return fmt.Errorf("no waiting host is ready")
	})
}

// TestNetworkIsWidenedWhileHostsWait checks hosts for which no subnet was left. They must use a new
// configuration as soon as it has subnets for them, with all of its keys.
func TestNetworkIsWidenedWhileHostsWait(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Network: json.RawMessage(`{"Network":"10.5.0.0/22","SubnetLen":24,"Backend":{"Type":"vxlan"}}`)}, "")
	for n := 1; n <= 3; n++ {
		putKey(t, etcdClient(t, l), subnets+fmt.Sprintf("10.5.%d.0-24", n), vxlanLease(fmt.Sprintf("192.168.77.%d", 200+n), fmt.Sprintf("02:00:00:00:01:%02x", n)))
	}
	for _, h := range l.Hosts() {
		expectLog(t, start(t, h, lab.FlanneldOptions{}), "out of subnets")
	}
	if err := l.PutNetwork(testContext(t), json.RawMessage(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}`)); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectReady(t, h.Daemon())
		if env := readSubnetFile(t, h); !strings.Contains(env, "FLANNEL_NETWORK=10.5.0.0/16\n") {
			t.Errorf("subnet.env of %s is\n%swant the new network", h.Name(), env)
		}
	}
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
}

// TestNoSubnetForTheLastKnownState checks a host that restarts while its subnet belongs to another
// host, and no subnet is free. The host must serve its former subnet only until the store answers,
// and then wait for a free subnet.
func TestNoSubnetForTheLastKnownState(t *testing.T) {
	t.Parallel()
	const why = "is not this host's any more"
	l := newLab(t, lab.Config{Hosts: 1, Network: json.RawMessage(`{"Network":"10.5.0.0/22","SubnetLen":24,"Backend":{"Type":"vxlan"}}`)}, "")
	c, h := etcdClient(t, l), l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	had := leaseOf(t, l, h)
	expectStop(t, h.Daemon())
	removeKey(t, c, subnets+had.Key)
	keys := takeSubnets(t, c, "10.5")
	l.Etcd().Kill()

	d := start(t, h, lab.FlanneldOptions{})
	expectLog(t, d, "going on from the last known state")
	expectLog(t, d, "is not usable")
	if env := readSubnetFile(t, h); !strings.Contains(env, had.subnet()[:len(had.subnet())-4]) {
		t.Errorf("subnet.env before the store has answered is\n%swant %s", env, had.subnet())
	}
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectLog(t, d, `"the subnet of the last known state was left" err="`)
	eventually(t, "reasons", func() error {
		code, body, _ := d.Get(testContext(t), "/readyz")
		if code != 503 || !strings.Contains(body, "subnet: ") || !strings.Contains(body, why) || !strings.Contains(body, "out of subnets") {
			return fmt.Errorf("/readyz: %d %q, want 503 with %q", code, body, why)
		}
		return nil
	})
	if code, body, err := d.Get(testContext(t), "/healthz"); err != nil || code != 200 {
		t.Errorf("/healthz: %d %q, %v, want 200", code, body, err)
	}
	if _, err := os.Stat(h.Path("/run/flannel/subnet.env")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("subnet.env still exists: %v", err)
	}
	if r := statusOf(t, h); len(r.Lease.Subnets) > 0 {
		t.Errorf("the status has the subnets %v, want none", r.Lease.Subnets)
	}
	expectOnce(t, d, "the subnet of the last known state was left")

	removeKey(t, c, subnets+keys[1])
	expectReady(t, d)
	if now := leaseOf(t, l, h); now.Key != keys[1] {
		t.Errorf("the lease is %s, want %s, which was free", now.Key, keys[1])
	}
}

// takeSubnets gives all three subnets of a /22 network to other hosts and returns the keys of their
// leases. begin is the first two bytes of the network, such as "10.5".
func takeSubnets(t *testing.T, c *clientv3.Client, begin string) (keys []string) {
	t.Helper()
	for i := 1; i <= 3; i++ {
		keys = append(keys, fmt.Sprintf("%s.%d.0-24", begin, i))
		putKey(t, c, subnets+keys[i-1], vxlanLease(fmt.Sprintf("192.168.77.%d", 98+i), fmt.Sprintf("02:00:00:00:00:%02x", i)))
	}
	return keys
}

// TestRestartIntoAFullNetwork restarts a host while the store has another Network, in which no subnet
// is free. The host must go on with the former configuration without losing a packet, and give the
// reason. All hosts must use the new Network when subnets become free.
func TestRestartIntoAFullNetwork(t *testing.T) {
	t.Parallel()
	config := func(begin string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"Network":"%s.0.0/22","SubnetLen":24,"Backend":{"Type":"vxlan"}}`, begin))
	}
	l := newLab(t, lab.Config{Hosts: 2, Network: config("10.5")}, "")
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	c, h := etcdClient(t, l), l.Host(1)
	had := leaseOf(t, l, h)
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
	flow, err := l.Pods()[0].StartFlow(testContext(t), l.Pods()[1], prefix.IPv4, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Stop()
	keys := takeSubnets(t, c, "10.6")
	expectStop(t, h.Daemon())
	if err := l.PutNetwork(testContext(t), config("10.6")); err != nil {
		t.Fatal(err)
	}
	d := startOne(t, h, lab.FlanneldOptions{})
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" goes on with the former configuration", func() error {
			r := statusOf(t, h)
			if !r.Ready || r.Network.Phase != "serving" || !strings.Contains(r.ConfigRejected, "out of subnets") {
				return fmt.Errorf("ready %v %v, phase %q, rejected %q", r.Ready, r.Reasons, r.Network.Phase, r.ConfigRejected)
			}
			return nil
		})
	}
	if now := leaseOf(t, l, h); now.Key != had.Key {
		t.Errorf("the lease is %s, want %s", now.Key, had.Key)
	}
	expectOnce(t, d, "the network configuration cannot be used")
	if st := flow.Stop(); len(st.Lost) > 0 || st.Sent == 0 {
		t.Errorf("%d of %d packets were lost", len(st.Lost), st.Sent)
	}
	removeKey(t, c, subnets+keys[0])
	removeKey(t, c, subnets+keys[1])
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" uses the new network", func() error {
			if r := statusOf(t, h); !r.Ready || r.ConfigRejected != "" || !strings.HasPrefix(fmt.Sprint(r.Lease.Subnets), "[10.6.") {
				return fmt.Errorf("ready %v %v, rejected %q, subnets %v", r.Ready, r.Reasons, r.ConfigRejected, r.Lease.Subnets)
			}
			return nil
		})
		if env := readSubnetFile(t, h); !strings.Contains(env, "FLANNEL_NETWORK=10.6.0.0/22\n") {
			t.Errorf("subnet.env of %s is\n%swant network 10.6.0.0/22", h.Name(), env)
		}
	}
}

// TestRestartKeepsTheSubnet checks that a restarted host gets its subnet again from any of three
// sources alone: the lease with its public IP, its subnet file, or its state file. It must not get the
// subnet if that belongs to another host by then.
func TestRestartKeepsTheSubnet(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	c, h := etcdClient(t, l), l.Host(1)
	d := startOne(t, h, lab.FlanneldOptions{})
	before := leaseOf(t, l, h)

	restart := func(while func()) lease {
		t.Helper()
		d.Kill()
		while()
		d = startOne(t, h, lab.FlanneldOptions{})
		return leaseOf(t, l, h)
	}
	forget := func(path string) {
		t.Helper()
		if out, err := h.Exec(testContext(t), "rm", "-r", path); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for name, while := range map[string]func(){
		"at once":       func() {},
		"by public IP":  func() { forget("/run/flannel"); forget("/var/lib/flannel") },
		"by subnet.env": func() { forget("/var/lib/flannel"); removeKey(t, c, subnets+before.Key) },
		"by its state":  func() { forget("/run/flannel"); removeKey(t, c, subnets+before.Key) },
	} {
		if after := restart(while); after.Key != before.Key || after.Value != before.Value {
			t.Errorf("%s: %s %s, want %s %s", name, after.Key, after.Value, before.Key, before.Value)
		}
	}

	taken := vxlanLease("192.168.77.99", "02:00:00:00:00:99")
	after := restart(func() {
		removeKey(t, c, subnets+before.Key)
		putKey(t, c, subnets+before.Key, taken)
	})
	if after.Key == before.Key {
		t.Errorf("the host has taken the subnet from its new owner: %s", after.Value)
	}
	r, err := c.Get(testContext(t), subnets+before.Key)
	if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != taken {
		t.Errorf("the new owner's lease is %v (%v), want %s", r.Kvs, err, taken)
	}
}

// TestStaleEntriesAreRemovedForeignOnesStay checks that a restarted daemon removes the entries of peers
// that are gone, and other entries in the network on its device. Routes of other programs must stay:
// those on its device to other networks, and those on other devices.
func TestStaleEntriesAreRemovedForeignOnesStay(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	c, h := etcdClient(t, l), l.Host(1)
	const gone, stays = "02:00:00:00:00:aa", "02:00:00:00:00:bb"
	putKey(t, c, subnets+"10.5.200.0-24", vxlanLease("192.168.77.200", gone))
	putKey(t, c, subnets+"10.5.201.0-24", vxlanLease("192.168.77.201", stays))
	d := startOne(t, h, lab.FlanneldOptions{})
	expectKernel(t, h, slices.Concat(datapathLines("10.5.200.0/24", "192.168.77.200", gone), datapathLines("10.5.201.0/24", "192.168.77.201", stays)), nil)
	d.Kill()

	removeKey(t, c, subnets+"10.5.200.0-24")
	foreign := []string{
		"172.30.0.0/16 via 10.5.201.0 dev flannel.1",
		"10.5.250.0/24 via 192.168.77.254 dev eth0",
	}
	for _, args := range []string{
		"ip route add 10.5.222.0/24 via 10.5.222.0 dev flannel.1 onlink",
		"ip neigh add 10.5.222.0 lladdr 02:00:00:00:00:cc dev flannel.1 nud permanent",
		"bridge fdb add 02:00:00:00:00:cc dev flannel.1 dst 192.168.77.222",
		"ip route add " + foreign[0] + " onlink",
		"ip route add " + foreign[1],
	} {
		if out, err := h.Exec(testContext(t), "sh", "-c", args); err != nil {
			t.Fatalf("%s: %v: %s", args, err, out)
		}
	}
	startOne(t, h, lab.FlanneldOptions{})
	expectKernel(t, h, slices.Concat(datapathLines("10.5.201.0/24", "192.168.77.201", stays), foreign),
		[]string{gone, "10.5.200.0", "10.5.222.0", "02:00:00:00:00:cc"})
}

// TestChangedPeerIsReplaced checks that the entries of a peer are replaced when its MAC, its address or
// both change, and removed with its lease. No entry may have a former MAC.
func TestChangedPeerIsReplaced(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c, h := etcdClient(t, l), l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	for _, p := range []struct{ ip, mac string }{
		{"192.168.77.200", "02:00:00:00:00:aa"},
		{"192.168.77.200", "02:00:00:00:00:bb"},
		{"192.168.77.201", "02:00:00:00:00:bb"},
		{"192.168.77.202", "02:00:00:00:00:cc"},
	} {
		putKey(t, c, subnets+"10.5.200.0-24", vxlanLease(p.ip, p.mac))
		want := datapathLines("10.5.200.0/24", p.ip, p.mac)
		lack := slices.DeleteFunc([]string{"02:00:00:00:00:aa", "02:00:00:00:00:bb", "02:00:00:00:00:cc"}, func(mac string) bool { return mac == p.mac })
		expectKernel(t, h, want, lack)
	}
	removeKey(t, c, subnets+"10.5.200.0-24")
	expectKernel(t, h, nil, []string{"10.5.200.0", "02:00:00:00:00:cc"})
}

// TestGarbageInTheStore checks that each invalid key or value among the leases causes one line in the
// log, and that valid leases are still served.
func TestGarbageInTheStore(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	c, h := etcdClient(t, l), l.Host(1)
	d := h.Daemon()
	own, ofHost2 := leaseOf(t, l, h).subnet(), leaseOf(t, l, l.Host(2)).subnet()
	// log is a text that exactly one line of the log must contain.
	garbage := map[string]struct{ value, log string }{
		"garbage":         {"x", "garbage"},
		"10.5.210.0-24":   {"{", "10.5.210.0-24"},
		"10.5.211.0-24":   {`{"PublicIP":"192.168.77.211","PublicIPv6":null,"BackendType":"vxlan"}`, "no backend data"},
		"10.5.212.0-24":   {vxlanLease("192.168.77.212", "01:00:5e:00:00:01"), "01:00:5e:00:00:01 is not a unicast address"},
		"10.5.213.0-24":   {strings.Replace(vxlanLease("192.168.77.213", "x"), `"x"`, "null", 1), "without a VtepMAC"},
		"10.5.214.0-24":   {vxlanLease("192.168.77.1", "02:00:00:00:00:14"), "which is our own"},
		"10.6.0.0-24":     {vxlanLease("192.168.77.215", "02:00:00:00:00:15"), "10.6.0.0/24 is outside the Network"},
		"0.0.0.0-1":       {vxlanLease("192.168.77.216", "02:00:00:00:00:16"), "0.0.0.0/1 is outside the Network"},
		"127.0.0.0-8":     {vxlanLease("192.168.77.217", "02:00:00:00:00:17"), "127.0.0.0/8 is outside the Network"},
		"192.168.77.0-24": {vxlanLease("192.168.77.218", "02:00:00:00:00:18"), "192.168.77.0/24 is outside the Network"},
		"10.5.0.0-16":     {vxlanLease("192.168.77.219", "02:00:00:00:00:19"), "10.5.0.0/16 overlaps"},
		"10.5.220.0-24":   {strings.Repeat("a", 1<<20), "10.5.220.0-24"},
		"10.5.221.0-24":   {vxlanLease("", "02:00:00:00:00:21"), "10.5.221.0-24"},
	}
	for key, g := range garbage {
		putKey(t, c, subnets+key, g.value)
	}
	// After these invalid leases, the daemon must write the route, neighbour and FDB entry of a valid one.
	putKey(t, c, subnets+"10.5.230.0-24", vxlanLease("192.168.77.230", "02:00:00:00:00:30"))
	expectKernel(t, h, datapathLines("10.5.230.0/24", "192.168.77.230", "02:00:00:00:00:30"), []string{
		"10.5.210.0", "10.5.211.0", "10.5.212.0", "10.5.213.0", "10.5.214.0", "10.6.0.0", "0.0.0.0/1", "127.0.0.0/8", "10.5.0.0/16 via", "10.5.220.0",
	})
	expectMatrix(t, l)
	for key, g := range garbage {
		lines := slices.DeleteFunc(strings.Split(d.Log(), "\n"), func(line string) bool { return !strings.Contains(line, g.log) })
		if len(lines) != 1 {
			t.Errorf("%s: %d lines in the log with %q, want one:\n%s", key, len(lines), g.log, strings.Join(lines, "\n"))
		}
	}
	if n := len(d.Log()); n > 20000 {
		t.Errorf("the log has %d bytes, want at most 20000", n)
	}
	if !strings.Contains(fmt.Sprint(h.Routes(t.Context())), ofHost2) {
		t.Errorf("the route to the other host's %s is gone", ofHost2)
	}
	// One of the leases above has the address of host 1. Still the hosts must keep their own leases.
	if now := statusOf(t, h).Lease.Subnets[0].String(); now != own {
		t.Errorf("host1 has %s, had %s", now, own)
	}
	if !slices.ContainsFunc(leases(t, l), func(one lease) bool { return one.subnet() == own }) {
		t.Errorf("the lease %s of host1 is gone", own)
	}
	if now := leaseOf(t, l, l.Host(2)).subnet(); now != ofHost2 {
		t.Errorf("host2 has %s, had %s", now, ofHost2)
	}
}
