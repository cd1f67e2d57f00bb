// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// TestLeasesWithOnePublicAddress checks that leases with the same public address are all served,
// with each backend that needs no module of the kernel.
func TestLeasesWithOnePublicAddress(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw", "udp", userspace} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			testSharedPublicAddress(t, backendConfig(backend))
		})
	}
	t.Run("extension", func(t *testing.T) {
		t.Parallel()
		testSharedPublicAddress(t, extensionVXLANConfig(t))
	})
}

// TestVMLeasesWithOnePublicAddress is TestLeasesWithOnePublicAddress for the backends
// that need a kernel module.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMLeasesWithOnePublicAddress(t *testing.T) {
	for _, backend := range []string{"ipip", "wireguard"} {
		t.Run(backend, func(t *testing.T) { testSharedPublicAddress(t, backendConfig(backend)) })
	}
}

// testSharedPublicAddress checks that the lease of host 2 and another lease with the same public
// address are both served, whichever of them is older, and also after a restart. This happens
// when a host that is installed anew gets the address of a lease that has not expired yet.
func testSharedPublicAddress(t *testing.T, config string) {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 2}, config)
	c, key := etcdClient(t, l), "10.5.210.0-24"
	d := startOne(t, l.Host(1), lab.FlanneldOptions{})
	twin := func(ip string) string {
		_, value := leaseEntry(t, l, l.Host(1))
		return withOtherIdentity(t, value, ip)
	}
	putKey(t, c, subnets+key, twin("192.168.77.210"))
	startOne(t, l.Host(2), lab.FlanneldOptions{})
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	reach := expectMatrix
	if emulated() { // in an emulated guest a packet may take longer than expectMatrix waits for it
		reach = expectConverged
	}
	reach(t, l)

	younger, _ := leaseEntry(t, l, l.Host(2))
	address := l.Host(2).Addr(prefix.IPv4).String()
	both := func(first, second string, times int) {
		t.Helper()
		line := fmt.Sprintf(`"leases share a public address" publicIP=%q leases=[%q,%q] count=2`, address, first, second)
		eventually(t, line, func() error {
			if lines := linesWith(d, line); len(lines) != times {
				return fmt.Errorf("%d lines, want %d", len(lines), times)
			}
			return expectServed(t, l.Host(1), younger, key)
		})
		want := []status.SharedPublicIP{{PublicIP: l.Host(2).Addr(prefix.IPv4), Leases: []string{first, second}}}
		if got := statusOf(t, l.Host(1)).SharedPublicIPs; !reflect.DeepEqual(got, want) {
			t.Errorf("the status has the shared addresses %+v, want %+v", got, want)
		}
		out, _ := flannelctl(t, l.Host(1), "doctor") // the exit code depends on what else doctor finds
		expectOutput(t, []string{"doctor"}, out, []string{fmt.Sprintf("the leases %s, %s have the public address %s", first, second, address)})
		reach(t, l)
	}
	putKey(t, c, subnets+key, twin(address))
	both(key, younger, 1)
	removeKey(t, c, subnets+key)
	expectLog(t, d, fmt.Sprintf(`"leases no longer share a public address" publicIP=%q`, address))
	if got := statusOf(t, l.Host(1)).SharedPublicIPs; len(got) > 0 {
		t.Errorf("the status has the shared addresses %+v, want none", got)
	}
	reach(t, l)
	putKey(t, c, subnets+key, twin(address))
	both(younger, key, 1)
	// A restarted daemon reads both leases at once. It must serve both, too.
	d.Kill()
	d = startOne(t, l.Host(1), lab.FlanneldOptions{})
	both(younger, key, 1)
	for _, line := range linesWith(d, "lease refused") {
		if strings.Contains(line, "public IP") { // the backend extension may refuse for another reason while its commands run
			t.Errorf("a lease is refused for its address: %q", line)
		}
	}
}

// leaseEntry returns the key and value of the host's lease, or fails the test if there is none.
// The lease may be of any backend.
func leaseEntry(t *testing.T, l *lab.Lab, h *lab.Host) (key, value string) {
	t.Helper()
	all, err := l.Leases(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range all {
		if strings.Contains(one.Value, fmt.Sprintf(`"PublicIP":%q`, h.Addr(prefix.IPv4))) {
			return one.Key, one.Value
		}
	}
	t.Fatalf("no lease of %s among %v", h.Name(), all)
	return "", ""
}

// withOtherIdentity returns the value of a lease with the public address ip, and with another
// MAC or public key if its backend data contains one.
func withOtherIdentity(t *testing.T, value, ip string) string {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal([]byte(value), &v); err != nil {
		t.Fatal(err)
	}
	const mac = "02:00:00:00:00:77"
	v["PublicIP"] = ip
	switch data := v["BackendData"].(type) {
	case string:
		v["BackendData"] = mac
	case map[string]any:
		if _, ok := data["VtepMAC"]; ok {
			data["VtepMAC"] = mac
		}
		if _, ok := data["PublicKey"]; ok {
			data["PublicKey"] = base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))
		}
	}
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// expectServed returns an error unless the host has peers with exactly these keys, and serves
// all of them.
func expectServed(t *testing.T, h *lab.Host, keys ...string) error {
	t.Helper()
	served := map[string]status.State{}
	for _, p := range statusOf(t, h).Peers {
		served[p.Key] = p.State
	}
	for _, key := range keys {
		if served[key] != status.InPlace {
			return fmt.Errorf("%s is %q, want %q", key, served[key], status.InPlace)
		}
	}
	if len(served) != len(keys) {
		return fmt.Errorf("peers are %v, want %v", served, keys)
	}
	return nil
}

// TestValidAndInvalidLeases puts 200 valid leases and 30 invalid ones at the same time, and then
// two that conflict with valid ones. Every valid lease must be served, and every other one must
// cause one line in the log. The valid leases share 20 public addresses.
func TestValidAndInvalidLeases(t *testing.T) {
	t.Parallel()
	const network = `{"Network":"10.5.0.0/16","SubnetMax":"10.5.3.0","Backend":{"Type":"vxlan"}}`
	l := newLab(t, lab.Config{Hosts: 2, Network: json.RawMessage(network)}, "")
	startAll(t, l, lab.FlanneldOptions{})
	h := l.Host(1)
	good := func(i int) string {
		return vxlanLease(fmt.Sprintf("192.168.77.%d", 200+i%20), fmt.Sprintf("02:00:00:00:00:%02x", i))
	}
	all := map[string]string{}
	var want, bad []string
	for i := 10; i < 210; i++ {
		key := fmt.Sprintf("10.5.%d.0-24", i)
		all[key], want = good(i), append(want, fmt.Sprintf("10.5.%d.0/24", i))
	}
	values := []string{
		"", "{", "null", "[]", "7", `"text"`, `{"PublicIP":7}`, `{"PublicIP":"192.168.77.222","BackendType":["vxlan"],"BackendData":{}}`,
		`{"PublicIP":"192.168.77.222","BackendType":"vxlan","BackendData":[]}`, `{"PublicIP":"fd00::1","BackendType":"vxlan"}`,
		vxlanLease("192.168.77.999", "02:00:00:00:01:01"), vxlanLease("192.168.77.222", "ff:ff:ff:ff:ff:ff"), vxlanLease("127.0.0.1", "02:00:00:00:01:02"),
		strings.Replace(good(10), "vxlan", "host-gw", 1), strings.Repeat("\x00\xff", 100),
	}
	for i, value := range values {
		bad = append(bad, fmt.Sprintf("10.5.%d.0-24", 220+i))
		all[bad[i]] = value
	}
	for i, key := range []string{
		"x", "10.5.1-24", "10.5.300.0-24", "10.5.219.0", "10.5.219.0-33", "10.5.219.0-24-24", "10.5.219.0_24", "%31", "fd00::-64", "10.5.219.0-24&x",
		"10.6.0.0-24", "10.5.0.0-16", "0.0.0.0-0", "ü", "10.5.219.0-24/config",
	} {
		bad = append(bad, key)
		all[key] = vxlanLease("192.168.77.222", fmt.Sprintf("02:00:00:00:02:%02x", i))
	}
	putConcurrently(t, etcdClient(t, l), all)
	// If two leases conflict, the older one counts. So these must be younger than the valid
	// ones.
	late := map[string]string{
		"10.5.240.0-24":  vxlanLease("192.168.77.222", "02:00:00:00:00:0a"), // the MAC of a valid lease
		"10.5.10.128-25": vxlanLease("192.168.77.222", "02:00:00:00:02:ff"), // a part of the subnet of the same valid lease
	}
	putConcurrently(t, etcdClient(t, l), late)
	bad = slices.AppendSeq(bad, maps.Keys(late))

	d := h.Daemon()
	eventually(t, "all good leases", func() error { return expectRoutes(t, h, want) })
	eventually(t, "one line for each bad lease", func() error {
		for _, key := range bad {
			if lines := linesWith(d, fmt.Sprintf("%q", key)); len(lines) != 1 {
				return fmt.Errorf("%q: %d lines, want one: %q", key, len(lines), lines)
			}
		}
		return nil
	})
	if lines := linesWith(d, "leases share a public address"); len(lines) != 20 {
		t.Errorf("%d lines about shared addresses, want one for each of 20: %q", len(lines), lines)
	}
	expectMatrix(t, l)

	// A restarted daemon reads all leases at once. It must serve the same ones.
	d.Kill()
	d = startOne(t, h, lab.FlanneldOptions{})
	eventually(t, "all good leases", func() error { return expectRoutes(t, h, want) })
	if lines := linesWith(d, "leases share a public address"); len(lines) != 20 {
		t.Errorf("%d lines about shared addresses after a restart, want one for each of 20: %q", len(lines), lines)
	}
	expectMatrix(t, l)
}

// putConcurrently puts leases in concurrent transactions of up to 50 leases each, because etcd
// limits the size of a transaction.
func putConcurrently(t *testing.T, c *clientv3.Client, all map[string]string) {
	t.Helper()
	var ops []clientv3.Op
	for key, value := range all {
		ops = append(ops, clientv3.OpPut(subnets+key, value))
	}
	ctx := testContext(t)
	var wg sync.WaitGroup
	for some := range slices.Chunk(ops, 50) {
		wg.Go(func() {
			if _, err := c.Txn(ctx).Then(some...).Commit(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// expectRoutes returns an error unless the host has routes through flannel.1 to exactly the
// subnets want. It ignores routes to subnets below 10.5.8.0, which hosts of the lab have.
func expectRoutes(t *testing.T, h *lab.Host, want []string) error {
	t.Helper()
	routes, err := h.Routes(testContext(t))
	if err != nil {
		return err
	}
	var have []string
	for _, r := range routes {
		made := netip.MustParsePrefix("10.5.8.0/21")
		if r.Dev == "flannel.1" && r.Dst.Addr().Compare(made.Addr()) >= 0 {
			have = append(have, r.Dst.String())
		}
	}
	slices.Sort(have)
	want = slices.Sorted(slices.Values(want))
	if !slices.Equal(have, want) {
		return fmt.Errorf("%d routes, want %d: missing %v, unexpected %v", len(have), len(want), linesMissing(want, have), linesMissing(have, want))
	}
	return nil
}
