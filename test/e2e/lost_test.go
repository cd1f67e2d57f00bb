// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

func milliseconds(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// expectLeases waits until the store contains leases with exactly these keys, in this
// order.
func expectLeases(t *testing.T, l *lab.Lab, want []string) {
	t.Helper()
	eventually(t, "leases", func() error {
		if have := keys(t, l); !slices.Equal(have, want) {
			return fmt.Errorf("have %q, want %q", have, want)
		}
		return nil
	})
}

func keys(t *testing.T, l *lab.Lab) []string {
	t.Helper()
	var ks []string
	for _, one := range leases(t, l) {
		ks = append(ks, one.Key)
	}
	return ks
}

// TestStoreOutageLongerThanALease checks two outages that last twice as long as the lease time. In
// the first one etcd is frozen, so all leases expire. In the second one etcd is killed. No packet
// may be lost, and afterwards every host must have its subnet again.
//
//stages:rest it waits for several lease times
func TestStoreOutageLongerThanALease(t *testing.T) {
	t.Parallel()
	const ttl = 5 * time.Second
	l := newLab(t, lab.Config{Families: dual}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--subnet-lease-ttl=" + ttl.String()}})
	before := keys(t, l)
	flows := startFlows(t, l, 100)

	if err := l.Etcd().Stop(); err != nil {
		t.Fatal(err)
	}
	pause(t, 2*ttl)
	if err := l.Etcd().Cont(); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), "this host's lease was gone, taken again")
	}
	expectLeases(t, l, before)

	l.Etcd().Kill()
	pause(t, 2*ttl)
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	pause(t, ttl)
	expectLeases(t, l, before)
	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestStoreWiped checks that no packet is lost and every host keeps its subnet if the store
// loses all data. One host is down when this happens, and starts before the store has a
// configuration again.
func TestStoreWiped(t *testing.T) {
	t.Parallel()
	network, err := lab.NetworkConfig(dual, json.RawMessage(`{"Type":"vxlan"}`))
	if err != nil {
		t.Fatal(err)
	}
	l := newLab(t, lab.Config{Families: dual, Network: network}, "")
	startAll(t, l, lab.FlanneldOptions{})
	before := keys(t, l)
	flows := startFlows(t, l, 100)
	down := l.Host(3)
	expectPeersProgrammed(t, l)
	expectSaved(t, down)
	down.Daemon().Kill()
	if err := l.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts()[:2] {
		expectLog(t, h.Daemon(), "this host's lease was gone, taken again")
		expectLog(t, h.Daemon(), "the store has forgotten peers")
	}
	// The store does not even contain a configuration yet.
	d := start(t, down, lab.FlanneldOptions{})
	expectLog(t, d, "no network configuration")
	pause(t, time.Second)
	if err := l.PutNetwork(testContext(t), network); err != nil {
		t.Fatal(err)
	}
	expectReady(t, d)
	expectLeases(t, l, before)
	for _, h := range l.Hosts()[:2] {
		expectLog(t, h.Daemon(), "no peer is kept any more")
	}
	pause(t, time.Second)
	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestStoreRestoredFromBackup restores the store from a backup. The backup was made before host 3
// and a peer had leases. It contains a lease of another peer that was deleted after the backup.
// Host 3 must take its lease again, and all hosts must serve both peers. No packet between the pods
// of the hosts may be lost.
func TestStoreRestoredFromBackup(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{}, `{"Type":"vxlan"}`)
	c := etcdClient(t, l)
	old := vxlanLease("192.168.77.200", "02:00:00:00:00:aa")
	putKey(t, c, subnets+"10.5.200.0-24", old)
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	startOne(t, l.Host(2), lab.FlanneldOptions{})

	backup := filepath.Join(t.TempDir(), "backup")
	l.Etcd().Kill()
	if err := os.CopyFS(backup, os.DirFS(l.Etcd().Dir())); err != nil {
		t.Fatal(err)
	}
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	startOne(t, l.Host(3), lab.FlanneldOptions{})
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	removeKey(t, c, subnets+"10.5.200.0-24")
	newer := vxlanLease("192.168.77.201", "02:00:00:00:00:bb")
	putKey(t, c, subnets+"10.5.201.0-24", newer)
	for _, h := range l.Hosts() {
		expectKernel(t, h, datapathLines("10.5.201.0/24", "192.168.77.201", "02:00:00:00:00:bb"), []string{"10.5.200.0"})
	}
	own := map[*lab.Host]string{}
	for _, h := range l.Hosts() {
		own[h] = leaseOf(t, l, h).Key
	}
	flows := startFlows(t, l, 100)

	l.Etcd().Kill()
	if err := os.RemoveAll(l.Etcd().Dir()); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(l.Etcd().Dir(), os.DirFS(backup)); err != nil {
		t.Fatal(err)
	}
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectLog(t, l.Host(3).Daemon(), "this host's lease was gone, taken again")
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), "the store has forgotten peers")
		// Hosts keep a peer whose lease is not in the backup, and also serve one whose
		// lease is only in the backup.
		expectKernel(t, h, slices.Concat(datapathLines("10.5.201.0/24", "192.168.77.201", "02:00:00:00:00:bb"),
			datapathLines("10.5.200.0/24", "192.168.77.200", "02:00:00:00:00:aa")), nil)
		if now := leaseOf(t, l, h).Key; now != own[h] {
			t.Errorf("%s has the lease %s, want %s as before", h.Name(), now, own[h])
		}
	}
	// The held peer is dropped when another host gets its subnet.
	putKey(t, c, subnets+"10.5.201.0-24", vxlanLease("192.168.77.202", "02:00:00:00:00:cc"))
	for _, h := range l.Hosts() {
		expectKernel(t, h, datapathLines("10.5.201.0/24", "192.168.77.202", "02:00:00:00:00:cc"), []string{"02:00:00:00:00:bb"})
	}
	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestOwnLeaseDeleted checks that a daemon takes its lease again, with the same key and
// value, after the lease was deleted or has expired.
func TestOwnLeaseDeleted(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	c, h := etcdClient(t, l), l.Host(1)
	own := leaseOf(t, l, h)
	key := subnets + own.Key
	for what, goes := range map[string]func(){
		"deleted": func() { removeKey(t, c, key) },
		"expired": func() {
			r, err := c.Get(testContext(t), key)
			if err == nil {
				_, err = c.Revoke(testContext(t), clientv3.LeaseID(r.Kvs[0].Lease))
			}
			if err != nil {
				t.Fatal(err)
			}
		},
	} {
		since := time.Now()
		goes()
		eventually(t, what, func() error {
			if now := leases(t, l); len(now) != 2 || !slices.Contains(now, own) {
				return fmt.Errorf("leases are %v, want %v among them", now, own)
			}
			return nil
		})
		t.Logf("%s: taken again after %v", what, time.Since(since))
		expectConverged(t, l)
	}
	if err := h.Daemon().Ended(); err != nil {
		t.Error(err)
	}
}

// rebootTime is the time after the start of the daemon in which a booted host must have its
// subnet file and the entries of its peers. It is less than the five seconds for which the
// daemon waits for an answer of its store, and several times what a busy machine needs.
const rebootTime = 4500 * time.Millisecond

// TestLastKnownLeaseExpires checks a host that starts without its store. It must use the
// last known state until its lease expires, counted from the last renewal, and not longer.
//
//stages:rest it waits for several lease times
func TestLastKnownLeaseExpires(t *testing.T) {
	t.Parallel()
	const ttl, goesOn = 15 * time.Second, "going on from the last known state"
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h, o := l.Host(1), lab.FlanneldOptions{Args: []string{"--subnet-lease-ttl=" + ttl.String()}}
	d := startOne(t, h, o)
	file := readSubnetFile(t, h)
	first := statusOf(t, h).Lease.Expires
	var last time.Time
	eventually(t, "renewal", func() error {
		if last = statusOf(t, h).Lease.Expires; last.Before(first.Add(ttl)) {
			return fmt.Errorf("the lease expires at %v, and did at %v at first", last, first)
		}
		return nil
	})
	expectStop(t, d)
	l.Etcd().Kill()
	d = start(t, h, o)
	expectLog(t, d, goesOn)
	expectStop(t, d)

	pause(t, time.Until(last)+ttl/3) // the lease may have been renewed once more after the test has read last
	if err := os.Remove(h.Path(lab.SubnetFile)); err != nil {
		t.Fatal(err)
	}
	d = start(t, h, o)
	expectLog(t, d, "is not usable") // the daemon logs this after it has decided about the last known state
	pause(t, time.Second)
	if _, err := os.Stat(h.Path(lab.SubnetFile)); err == nil || len(linesWith(d, goesOn)) > 0 {
		t.Errorf("the daemon uses an expired lease: %q, %v", linesWith(d, goesOn), err)
	}
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectReady(t, d)
	if now := readSubnetFile(t, h); now != file {
		t.Errorf("subnet file %q, want %q as before", now, file)
	}
}

// expectSaved waits until the state file of a host has its lease and all peers in its status.
func expectSaved(t *testing.T, h *lab.Host) {
	t.Helper()
	r := statusOf(t, h)
	eventually(t, "state file of "+h.Name(), func() error {
		err := stateHas(h, r.Lease.Key)
		for _, p := range r.Peers {
			err = errors.Join(err, stateHas(h, p.Key))
		}
		return err
	})
}

// TestRebootDuringStoreOutage checks a host that boots while the store does not answer.
// Within rebootTime it must get its subnet file and all kernel entries from its disk. The
// test deletes the devices and /run/flannel, as a boot does.
func TestRebootDuringStoreOutage(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*lab.Etcd) error{
		"frozen": (*lab.Etcd).Stop,
		"dead":   func(e *lab.Etcd) error { e.Kill(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Families: dual}, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			h := l.Host(1)
			file := readSubnetFile(t, h)
			before := vxlanObjects(t, h)
			expectSaved(t, h)
			expectStop(t, h.Daemon())
			if out, err := h.Exec(testContext(t), "sh", "-c", "ip link del flannel.1; ip link del flannel-v6.1; rm -r /run/flannel"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := away(l.Etcd()); err != nil {
				t.Fatal(err)
			}

			started := time.Now()
			start(t, h, lab.FlanneldOptions{})
			for {
				text, err := os.ReadFile(h.Path(lab.SubnetFile))
				if err == nil && string(text) == file {
					break
				}
				if time.Since(started) > patience {
					t.Fatalf("subnet file %q (%v), want %q", text, err, file)
				}
				<-time.After(time.Millisecond)
			}
			took := time.Since(started)
			eventually(t, "kernel entries as before", func() error {
				if now := vxlanObjects(t, h); now != before {
					return fmt.Errorf("they are\n%swant\n%s", now, before)
				}
				return nil
			})
			t.Logf("subnet file after %v, all kernel entries after at most %v", took, time.Since(started))
			if all := time.Since(started); all > rebootTime {
				t.Errorf("the subnet file and the kernel entries took %v, want at most %v", all, rebootTime)
			}
			expectMatrix(t, l)
		})
	}
}

// TestRebootBeforeTheAddresses checks a host that boots while the store is away, and whose
// interface gets its addresses one after the other, after the daemon has started. The
// daemon must still use the last known state.
//
//stages:rest TestRebootDuringStoreOutage reboots, and TestInterfaceWithoutAddress waits for an address
func TestRebootBeforeTheAddresses(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, "vxlan", dual)
	h := p.host
	file, before := readSubnetFile(t, h), vxlanObjects(t, h)
	expectStop(t, h.Daemon())
	p.lab.Etcd().Kill()
	p.run(t, "ip link del flannel.1; ip link del flannel-v6.1; rm -r /run/flannel; ip addr flush dev eth0")

	d := start(t, h, lab.FlanneldOptions{})
	expectLog(t, d, `"the last known state cannot be used yet" err="no external interface: default route: no IPv4 default route`)
	expectLog(t, d, "etcd is not usable")
	p.run(t, p.restoreScript(func(f prefix.Family) netip.Addr { return h.Addr(f) }))
	eventually(t, "subnet file and kernel", func() error {
		if text, _ := os.ReadFile(h.Path(lab.SubnetFile)); string(text) != file {
			return fmt.Errorf("subnet file %q, want %q", text, file)
		}
		if now := vxlanObjects(t, h); now != before {
			return fmt.Errorf("the kernel contains\n%swant\n%s", now, before)
		}
		return nil
	})
	expectMatrix(t, p.lab)
	if err := p.lab.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectReady(t, d)
}

// TestClonedDisk checks a host with a copy of another host's state directory. It must not
// use the peers in the copied state, because the state belongs to another host. Here it
// also belongs to another store.
func TestClonedDisk(t *testing.T) {
	t.Parallel()
	network, err := lab.NetworkConfig(v4, json.RawMessage(`{"Type":"vxlan"}`))
	if err != nil {
		t.Fatal(err)
	}
	l := newLab(t, lab.Config{Network: network}, "")
	original, clone := l.Host(1), l.Host(3)
	for _, h := range l.Hosts()[:2] {
		startOne(t, h, lab.FlanneldOptions{})
	}
	eventually(t, "the peer", func() error {
		if n := len(statusOf(t, original).Peers); n != 1 {
			return fmt.Errorf("%d peers, want 1", n)
		}
		return nil
	})
	for _, h := range l.Hosts()[:2] {
		expectStop(t, h.Daemon())
	}
	const disk = "/var/lib/flannel"
	if err := os.RemoveAll(clone.Path(disk)); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(clone.Path(disk), os.DirFS(original.Path(disk))); err != nil {
		t.Fatal(err)
	}
	if err := l.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := l.PutNetwork(testContext(t), network); err != nil {
		t.Fatal(err)
	}
	d := startOne(t, clone, lab.FlanneldOptions{})
	if r := statusOf(t, clone); len(r.Peers) != 0 {
		t.Errorf("peers are %+v, want none", r.Peers)
	}
	expectOnce(t, d, `"the last known state cannot be used yet" err="it is of a host with [192.168.77.1], this one has [192.168.77.3]"`)
}

// vxlanObjects returns the devices of flannel's in the host's kernel, with their addresses,
// routes, neighbours and FDB entries, as sorted lines. It omits the numbers of devices and
// link-local addresses.
func vxlanObjects(t *testing.T, h *lab.Host) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "sh", "-c", `{ ip -o link show type vxlan | sed 's/^[0-9]*//; s/ qlen.*//'
		ip -o addr show | grep flannel | grep -v ' fe80' | sed 's/^[0-9]*//; s/ tentative//'
		ip route; ip -6 route; ip neigh show nud permanent; bridge fdb; } | grep flannel | grep -v fe80 | sort`)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// fillDisk mounts a file system of 64 kB on a directory of the host and fills it. room
// deletes the file that fills it.
func fillDisk(t *testing.T, h *lab.Host, dir string) (room func()) {
	t.Helper()
	filler := filepath.Join(dir, "filler")
	err := h.Do(testContext(t), func() error {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("lab", dir, "tmpfs", 0, "size=64k"); err != nil {
			return err
		}
		if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("write of 1 MB to a disk of 64 kB: %w, want no space left", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(h.Path(filler)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFullDisk checks that a daemon works although it cannot save its state, and is not
// ready if it cannot write its subnet file. As soon as the disk has room, it must write
// them.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{}, `{"Type":"vxlan"}`)
	state, run := l.Host(1), l.Host(2)
	room := fillDisk(t, state, "/var/lib/flannel")
	d := startOne(t, state, lab.FlanneldOptions{})
	expectOnce(t, d, "no space left on device")
	d.Kill()
	d = startOne(t, state, lab.FlanneldOptions{})
	room()
	eventually(t, "state file", func() error {
		names, err := filepath.Glob(state.Path("/var/lib/flannel/*.json"))
		if err == nil && len(names) == 0 {
			err = fmt.Errorf("no state file; log:\n%s", d.Log())
		}
		return err
	})
	expectOnce(t, d, "no space left on device")

	room = fillDisk(t, run, "/run/flannel")
	d = start(t, run, lab.FlanneldOptions{})
	expectLog(t, d, "no space left on device")
	pause(t, time.Second)
	expectOnce(t, d, "no space left on device")
	if status, body, _ := d.Get(testContext(t), "/readyz"); status != 503 || !strings.Contains(body, "no space left") {
		t.Errorf("/readyz: %d %q, want 503 with the reason", status, body)
	}
	room()
	expectReady(t, d)
	names, err := filepath.Glob(run.Path("/run/flannel/.*"))
	if err != nil || len(names) > 0 {
		t.Errorf("temporary files left: %q, %v", names, err)
	}

	startOne(t, l.Host(3), lab.FlanneldOptions{})
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
}

// TestStateFile checks that the state file contains the peers. The daemon must write it
// when something has changed, and when another program has removed or truncated it, but not
// in every round.
func TestStateFile(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--resync=1s"}})
	h := l.Host(1)
	known := leaseOf(t, l, l.Host(2)).Key
	var file string
	var written os.FileInfo
	expectWritten := func(what string) {
		t.Helper()
		eventually(t, what, func() error {
			names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-*.json"))
			if err != nil {
				return err
			}
			if len(names) != 1 {
				return fmt.Errorf("state files %q, want one", names)
			}
			file = names[0]
			text, err := os.ReadFile(file)
			if err == nil && !strings.Contains(string(text), known) {
				err = fmt.Errorf("no %s in %s", known, text)
			}
			if err == nil {
				written, err = os.Stat(file)
			}
			return err
		})
	}
	expectQuiet := func() {
		t.Helper()
		expectWritten("a state file with the peer")
		for range 2 { // twice, because a change just before may be written in the first pause
			before := written
			pause(t, 4*time.Second)
			expectWritten("a state file with the peer")
			if os.SameFile(before, written) && before.ModTime().Equal(written.ModTime()) {
				return
			}
		}
		t.Errorf("the state file was written without a change, the last time at %s", written.ModTime())
	}
	expectQuiet()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	expectWritten("a new state file after the old one was removed")
	if err := os.Truncate(file, 100); err != nil {
		t.Fatal(err)
	}
	expectWritten("a new state file after the old one was truncated")
	known = "10.5.200.0-24"
	putKey(t, etcdClient(t, l), subnets+known, vxlanLease("192.168.77.200", "02:00:00:00:00:aa"))
	expectWritten("a new peer in the state file")
	expectQuiet()
}

// TestReadOnlyStateDirectory checks that a daemon that cannot write its state logs that
// once and works without it. Its status and metrics must still show the renewals of its
// lease. No packet may be lost when it restarts.
func TestReadOnlyStateDirectory(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	err := l.Host(1).Do(testContext(t), func() error {
		return unix.Mount("lab", "/var/lib", "tmpfs", unix.MS_RDONLY, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--subnet-lease-ttl=15s"}})
	d := l.Host(1).Daemon()
	expectOnce(t, d, "read-only file system")
	expectOnce(t, d, "going on without a state directory")
	const expiry = "flannel_lease_expiry_timestamp_seconds"
	first, firstExpiry := statusOf(t, l.Host(1)).Lease.Expires, metric(t, l.Host(1), expiry)
	eventually(t, "the lease is renewed", func() error {
		if now := statusOf(t, l.Host(1)).Lease.Expires; !now.After(first) || metric(t, l.Host(1), expiry) <= firstExpiry {
			return fmt.Errorf("the lease still expires at %s", now)
		}
		return nil
	})
	flows := startFlows(t, l, 100)
	d.Kill()
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	expectNothingLost(t, flows)
}

// second contains the arguments of a second daemon on a host, which serves another network.
var second = []string{"--etcd-prefix=/second/network", "--subnet-file=/run/second/subnet.env", "--healthz-port=0"}

// TestTwoNetworksOnOneHost checks that two daemons on each host, for different networks, do
// not disturb each other, even when they restart.
func TestTwoNetworksOnOneHost(t *testing.T) {
	t.Parallel()
	for name, backend := range map[string]string{"vxlan": `{"Type":"vxlan","VNI":2}`, "host-gw": `{"Type":"host-gw"}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual}, strings.Replace(backend, "2", "1", 1))
			putKey(t, etcdClient(t, l), "/second/network/config", string(network("10.6.0.0/16", "fd00:6::/48", backend)))
			startAll(t, l, lab.FlanneldOptions{})
			flows := startFlows(t, l, 100)
			var firsts, seconds []*lab.Daemon
			for _, h := range l.Hosts() {
				firsts = append(firsts, h.Daemon())
				d := start(t, h, lab.FlanneldOptions{Args: second})
				expectLog(t, d, "flannel is ready")
				seconds = append(seconds, d)
			}
			both := func() {
				t.Helper()
				for _, h := range l.Hosts() {
					eventually(t, h.Name(), func() error {
						routes, err := h.Routes(t.Context())
						if err != nil {
							return err
						}
						n := map[string]int{}
						for _, r := range routes {
							if r.Protocol == ownProtocol && !r.Refuses {
								n[strings.SplitN(strings.ReplaceAll(r.Dst.String(), ":", "."), ".", 3)[1]]++
							}
						}
						if n["5"] != 2 || n["6"] != 2 {
							return fmt.Errorf("routes are %v, want two in each network", routes)
						}
						return nil
					})
				}
			}
			both()
			// When one daemon restarts, it finds the entries of the other one.
			for i, h := range l.Hosts() {
				seconds[i].Kill()
				seconds[i] = start(t, h, lab.FlanneldOptions{Args: second})
				expectLog(t, seconds[i], "flannel is ready")
			}
			both()
			for i, h := range l.Hosts() {
				firsts[i].Kill()
				startOne(t, h, lab.FlanneldOptions{})
			}
			both()
			expectNothingLost(t, flows)
			for _, h := range l.Hosts() {
				text, err := os.ReadFile(h.Path("/run/second/subnet.env"))
				if err != nil || !strings.HasPrefix(string(text), "FLANNEL_NETWORK=10.6.0.0/16\n") {
					t.Errorf("%s: second subnet file %q, %v", h.Name(), text, err)
				}
			}
			for _, d := range seconds {
				if err := d.Ended(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestTwoDaemonsOnOneDevice checks that a second daemon exits if the first one uses the
// device that it needs, because each would replace the other's settings. When the first
// daemon has changed to another device, the second one must be able to start.
func TestTwoDaemonsOnOneDevice(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	putKey(t, etcdClient(t, l), "/second/network/config", `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	first := startOne(t, l.Host(1), lab.FlanneldOptions{})
	before := vxlanObjects(t, l.Host(1))
	d := start(t, l.Host(1), lab.FlanneldOptions{Args: second})
	expectFailure(t, d, "another flanneld has device flannel.1")
	if after := vxlanObjects(t, l.Host(1)); after != before {
		t.Errorf("the kernel contains\n%swant\n%s", after, before)
	}
	if err := first.Ended(); err != nil {
		t.Error(err)
	}
	// The device is free after the first daemon has switched to another one.
	if err := l.PutNetwork(testContext(t), json.RawMessage(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":3}}`)); err != nil {
		t.Fatal(err)
	}
	expectLog(t, first, "removed what a former configuration had left")
	expectLog(t, start(t, l.Host(1), lab.FlanneldOptions{Args: second}), "flannel is ready")
	if all := kernelObjects(t, l.Host(1)); !strings.Contains(all, "flannel.1:") || !strings.Contains(all, "flannel.3:") {
		t.Errorf("want both devices in:\n%s", all)
	}
}

// TestKilledWhileStarting kills daemons at random moments of their starts, many times and
// with changing configurations. After the next start that is not interrupted, everything
// must be right again.
//
//stages:rest it kills a daemon at many moments
func TestKilledWhileStarting(t *testing.T) {
	t.Parallel()
	const runs, every = 100, 20
	seed := seed(t)
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	configs := []json.RawMessage{
		network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan"}`),
		network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan","VNI":7}`),
		network("10.5.0.0/16", "fd00:5::/48", `{"Type":"host-gw"}`),
	}
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: configs[0]}, "")
	c, h := etcdClient(t, l), l.Host(1)
	for i := range 20 {
		for _, backend := range []string{"vxlan", "host-gw"} {
			value := fmt.Sprintf(`{"PublicIP":"192.168.77.%[1]d","PublicIPv6":"fd00:77::%[1]d","BackendType":%[2]q,`+
				`"BackendData":{"VtepMAC":"02:00:00:00:00:%02[1]d"},"BackendV6Data":{"VtepMAC":"02:00:00:00:01:%02[1]d"}}`, i+30, backend)
			putKey(t, c, fmt.Sprintf("%s10.5.%[2]d.0-24&fd00:5:0:%[2]d::-64", subnets, 20*len(backend)+i), value)
		}
	}
	startOne(t, h, lab.FlanneldOptions{})
	own := leaseOf(t, l, h).Key
	h.Daemon().Kill()
	for run := range runs {
		if run%every == 0 {
			if err := l.PutNetwork(testContext(t), configs[random.IntN(len(configs))]); err != nil {
				t.Fatal(err)
			}
		}
		d := start(t, h, lab.FlanneldOptions{})
		pause(t, milliseconds(random.IntN(50)))
		d.Kill()
		if random.IntN(10) == 0 {
			if err := os.RemoveAll(h.Path("/run/flannel")); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, config := range []json.RawMessage{configs[2], configs[0]} {
		if err := l.PutNetwork(testContext(t), config); err != nil {
			t.Fatal(err)
		}
		startOne(t, h, lab.FlanneldOptions{})
		devices := 2 * strings.Count(string(config), "vxlan")
		eventually(t, "all in place", func() error {
			routes, err := h.Routes(t.Context())
			if err != nil {
				return err
			}
			routes = slices.DeleteFunc(routes, func(r lab.Route) bool { return r.Protocol != ownProtocol || r.Refuses })
			all := kernelObjects(t, h)
			if n := strings.Count(all, "vxlan id "); n != devices || len(routes) != 40 {
				return fmt.Errorf("%d vxlan devices and %d routes, want %d and 40:\n%s", n, len(routes), devices, all)
			}
			return nil
		})
		h.Daemon().Kill()
	}
	if now := leaseOf(t, l, h).Key; now != own {
		t.Errorf("the host has the lease %s, want %s as before", now, own)
	}
	if n := len(keys(t, l)); n != 41 {
		t.Errorf("%d leases, want 41", n)
	}
}
