// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	gocmp "cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
	"github.com/flanneld/flanneld/subnet/subnettest"
	"github.com/flanneld/flanneld/test/lab"
)

// giveKeys gives each host of the lab a user of etcd that can write only one key, as
// Documentation/etcd.md says, and switches authentication on. It returns the name and the key of each
// user. The password of all users is secret.
func giveKeys(t *testing.T, l *lab.Lab) (users, keys []string) {
	t.Helper()
	h := l.Host(1)
	script, err := flannelctl(t, h, "roles", fmt.Sprint(len(l.Hosts())))
	if err != nil {
		t.Fatalf("%v: %s", err, script)
	}
	for line := range strings.Lines(script) {
		if _, key, ok := strings.Cut(line, " readwrite "); ok {
			keys = append(keys, strings.Trim(key, "'\n"))
		}
		if rest, ok := strings.CutPrefix(line, "etcdctl user add "); ok {
			user, _, _ := strings.Cut(rest, " ")
			users = append(users, user)
			script = strings.Replace(script, user+" --no-password", user+":secret", 1)
		}
	}
	script += "etcdctl user add root:secret && etcdctl user grant-role root root && etcdctl auth enable\n"
	out, err := h.Exec(testContext(t), "env", "ETCDCTL_ENDPOINTS="+h.EtcdEndpoint(), "sh", "-ec", script)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	l.Etcd().Login("root", "secret")
	return users, keys
}

// hostile writes to the key of one host what its user may write: values that are made from those of
// all hosts.
type hostile struct {
	r      *rand.Rand
	leases []any    // the values of the leases of all hosts, decoded; its own is the last one
	first  []any    // the values that it writes first
	atoms  []any    // values that can replace any part of a lease
	names  []string // of all fields in a lease
}

// newHostile returns one that makes values from leases, which are decoded, from the examples with which the
// tests of the backends and of the store check what they read, and from the addresses of pods.
func newHostile(t *testing.T, l *lab.Lab, seed uint64, leases []any) *hostile {
	t.Helper()
	a := &hostile{r: rand.New(rand.NewPCG(seed, 1)), atoms: []any{
		nil, true, -1, 0, 1, 65536, 1e99, "", " ", "x", "\x1b[31m\nrefused", strings.Repeat("9", 70000), []any{}, map[string]any{},
		"0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "192.168.77.255", "192.168.77.254", "::", "::1", "fe80::1", "ff02::1", "fd00:77::ffff",
		"::ffff:192.168.77.1", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", strings.Repeat("A", 43) + "=",
	}}
	a.leases = leases
	own := len(leases) - 1
	for _, other := range leases[:own] {
		a.first = append(a.first, exchanged(leases[own], other)...)
	}
	for _, kind := range subnettest.LeaseKinds() {
		for _, example := range subnettest.LeaseData(kind) {
			a.collect(decoded(example))
		}
	}
	known := len(a.names)
	for _, value := range leases {
		a.collect(value)
	}
	for _, name := range a.names[known:] {
		if !strings.Contains(name, "/") { // not the name of an annotation
			t.Errorf("no example of package subnettest has the field %q of a lease", name)
		}
	}
	for _, p := range l.Pods() {
		for _, addr := range p.Addrs() {
			a.atoms = append(a.atoms, addr.String(), addr.Prev().String(), addr.Prev().Prev().String())
		}
	}
	return a
}

// exchanged returns copies of own, each with one part of other in its place: an address or identity of
// another host in the lease of this one.
func exchanged(own, other any) (all []any) {
	have, ok := own.(map[string]any)
	if !ok {
		return nil
	}
	theirs, _ := other.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(theirs)) {
		for _, part := range append(exchanged(have[name], theirs[name]), theirs[name]) {
			with := maps.Clone(have)
			with[name] = part
			all = append(all, with)
		}
	}
	return all
}

// collect adds all parts of a value to the atoms. So each part gets into the place of each other
// one, in a field that did not exist when this was written too.
func (a *hostile) collect(value any) {
	a.atoms = append(a.atoms, value)
	fields, _ := value.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if _, err := wgtypes.ParseKey(name); err != nil && !slices.Contains(a.names, name) {
			a.names = append(a.names, name)
		}
		a.collect(fields[name])
	}
}

// next returns the next value.
func (a *hostile) next() any {
	if len(a.first) > 0 {
		value := a.first[0]
		a.first = a.first[1:]
		return value
	}
	value := a.leases[a.r.IntN(len(a.leases))]
	for range a.r.IntN(4) {
		value = a.changed(value)
	}
	return value
}

// value returns the next value of the key.
func (a *hostile) value() string {
	whole := len(a.first) > 0
	text, _ := json.Marshal(a.next())
	if whole {
		return string(text)
	}
	switch a.r.IntN(20) {
	case 0, 1: // no JSON
		text = text[:a.r.IntN(len(text)+1)]
	case 2: // each field twice
		again, _ := json.Marshal(a.next())
		text = slices.Concat(bytes.TrimSuffix(text, []byte("}")), []byte(","), bytes.TrimPrefix(again, []byte("{")))
	case 3:
		examples := subnettest.LeaseData("lease")
		return examples[a.r.IntN(len(examples))]
	}
	return string(text)
}

// changed returns a copy of value with a change at a random place.
func (a *hostile) changed(value any) any {
	fields, ok := value.(map[string]any)
	if !ok || len(fields) == 0 || a.r.IntN(10) == 0 {
		return a.atoms[a.r.IntN(len(a.atoms))]
	}
	fields = maps.Clone(fields)
	names := slices.Sorted(maps.Keys(fields))
	name := names[a.r.IntN(len(names))]
	switch a.r.IntN(8) {
	case 0:
		delete(fields, name)
	case 1:
		fields[a.names[a.r.IntN(len(a.names))]] = a.atoms[a.r.IntN(len(a.atoms))]
	case 2:
		fields[name] = []any{a.atoms[a.r.IntN(len(a.atoms))], fields[name]}
	default:
		fields[name] = a.changed(fields[name])
	}
	return fields
}

// attack writes to a key for some time, from a program that has the rights of the user. It returns the
// number of writes.
func (a *hostile) attack(t *testing.T, l *lab.Lab, user, key string, d time.Duration) (writes int) {
	t.Helper()
	c, err := l.Etcd().Client(t.Context(), func(cfg *clientv3.Config) {
		if user != "" {
			cfg.Username, cfg.Password = user, "secret"
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	grant, err := c.Grant(testContext(t), 3600)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(d); time.Now().Before(end); writes++ {
		how := a.r.IntN(8)
		if len(a.first) > 0 {
			how = 2 // the key stays older than those of others
		}
		switch how {
		case 0:
			_, err = c.Delete(testContext(t), key)
		case 1: // a reservation
			_, err = c.Put(testContext(t), key, a.value())
		default:
			_, err = c.Put(testContext(t), key, a.value(), clientv3.WithLease(grant.ID))
		}
		if err != nil {
			t.Fatal(err)
		}
		pause(t, time.Duration(a.r.IntN(50))*time.Millisecond)
	}
	if _, err := c.Delete(testContext(t), key); err != nil {
		t.Fatal(err)
	}
	return writes
}

// hostileCase describes a network, and the attack of its first host.
type hostileCase struct {
	attack
	families []prefix.Family
	conf     netConf
	args     []string         // flags of all daemons; ADDRESS stands for an address of the host
	cloud    func() testCloud // the cloud in which the hosts are; nil if they are in none
	reverse  bool             // the first host has the last of the keys, not the first one
}

// attack describes an attack by the first of several hosts. Its lease, or its Node, is the oldest.
type attack struct {
	hosts int
	rate  int           // packets per second of each flow
	d     time.Duration // of the attack
	// unrestricted is set if the users of etcd could write more than one key, which the attack does not do.
	// The guest of the VM tests has no etcdctl.
	unrestricted bool
}

var strongAttack = attack{hosts: 4, rate: 100, d: 10 * time.Second}

// hostileCases returns the networks of TestHostileHost.
func hostileCases() map[string]hostileCase {
	cases := map[string]hostileCase{
		"direct routing":    {families: dual, conf: netConf{backend: `{"Type":"vxlan","DirectRouting":true,"MTU":"probe"}`}},
		"wireguard":         {families: dual, conf: netConf{backend: `{"Type":"wireguard","Implementation":"userspace","PersistentKeepaliveInterval":1}`}},
		"wireguard, IPv4":   {families: v4, conf: netConf{backend: backendConfig(userspace)}, args: []string{"--public-endpoint=ADDRESS"}},
		"wireguard, IPv6":   {families: v6, conf: netConf{backend: backendConfig(userspace)}},
		"with a location":   {families: dual, conf: netConf{backend: `{"Type":"wireguard","Implementation":"userspace","SameLocation":{"Type":"vxlan"}}`}, args: []string{"--location=here"}},
		"a migration":       {families: dual, conf: netConf{backend: `{"Type":"vxlan"}`, next: backendConfig(userspace)}},
		"aws-vpc, overflow": {families: dual, conf: netConf{backend: `{"Type":"aws-vpc","Overflow":"vxlan"}`}, cloud: func() testCloud { return newEC2() }},
		"gce":               {families: dual, conf: netConf{backend: `{"Type":"gce"}`}, cloud: func() testCloud { return newGoogle() }},
		"ali-vpc":           {families: dual, conf: netConf{backend: `{"Type":"ali-vpc"}`}, cloud: func() testCloud { return newAlibaba() }},
		"tencent-vpc":       {families: v4, conf: netConf{backend: `{"Type":"tencent-vpc"}`}, cloud: func() testCloud { return newTencentCloud() }},
		"vxlan, IPv4":       {families: v4, conf: netConf{backend: `{"Type":"vxlan"}`}}, // TestHostileHostVXLAN has both families
	}
	full := netConf{
		v4: "10.5.0.0/22", v6: "fd00:5::/62", backend: `{"Type":"vxlan"}`,
		more: `,"SubnetLen":24,"SubnetMin":"10.5.0.0","IPv6SubnetLen":64,"IPv6SubnetMin":"fd00:5::"`,
	}
	cases["the first subnet"] = hostileCase{families: dual, conf: full}
	cases["the last subnet"] = hostileCase{families: dual, conf: full, reverse: true}
	for _, backend := range []string{hostGW, backendConfig("udp"), alloc, extensionOn("ext0")} {
		for name, families := range map[string][]prefix.Family{"IPv4": v4, "both families": dual} {
			cases[leaseTypeOf(backend)+", "+name] = hostileCase{families: families, conf: netConf{backend: backend}}
		}
	}
	return cases
}

// leaseTypeOf returns the Type of a Backend object.
func leaseTypeOf(backend string) string {
	var b struct{ Type string }
	_ = json.Unmarshal([]byte(backend), &b)
	return b.Type
}

// TestHostileHost lets a host with the rights of its own key write values to it that attack the other
// hosts, while flows between the pods of these lose no packet. Afterwards all hosts are like new ones.
//
//stages:rest it repeats TestHostileHostVXLAN with other backends
func TestHostileHost(t *testing.T) {
	t.Parallel()
	for name, tc := range hostileCases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.attack = strongAttack
			tc.survive(t)
		})
	}
}

func TestHostileHostVXLAN(t *testing.T) {
	t.Parallel()
	hostileCase{attack: attack{hosts: 4, rate: 100, d: 5 * time.Second}, families: dual, conf: netConf{backend: `{"Type":"vxlan"}`}}.survive(t)
}

// vmHostileCases returns the networks of TestVMHostileHost by the module that they need.
func vmHostileCases() map[string]netConf {
	return map[string]netConf{"ipip": {backend: `{"Type":"ipip"}`}, "wireguard": {backend: `{"Type":"wireguard"}`}}
}

// TestVMHostileHost is TestHostileHost with backends that need modules of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMHostileHost(t *testing.T) {
	for name, conf := range vmHostileCases() {
		t.Run(name, func(t *testing.T) {
			// With ipip loaded, each new namespace gets the device tunl0, which changes the indexes of others.
			if out, err := exec.CommandContext(testContext(t), "modprobe", name).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			hostileCase{attack: attack{hosts: 3, rate: 20, d: 8 * time.Second, unrestricted: true}, families: v4, conf: conf}.survive(t)
		})
	}
}

// TestHostileHostHasAllBackends checks that a hostile host attacks the networks of all backends.
func TestHostileHostHasAllBackends(t *testing.T) {
	t.Parallel()
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	attacked := map[string]bool{}
	for _, tc := range hostileCases() {
		attacked[leaseTypeOf(tc.conf.backend)] = true
	}
	for _, conf := range vmHostileCases() {
		attacked[leaseTypeOf(conf.backend)] = true
	}
	for _, backend := range catalog.Registry.Types() {
		if !attacked[backend] {
			t.Errorf("no hostile host attacks the backend %s", backend)
		}
	}
}

// seedOf returns the seed of an attack, and logs it.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := seed(t)
	t.Logf("this attack again: -seed %d", seed)
	return seed
}

// survive starts the network, lets its first host attack the others, and checks that nothing happens to these.
func (tc hostileCase) survive(t *testing.T) {
	t.Helper()
	seed := seedOf(t)
	for _, f := range tc.families {
		if f == prefix.IPv4 {
			tc.conf.v4 = gocmp.Or(tc.conf.v4, "10.5.0.0/16")
		} else {
			tc.conf.v6 = gocmp.Or(tc.conf.v6, "fd00:5::/48")
		}
	}
	cfg := lab.Config{Hosts: tc.hosts, Families: tc.families, Network: json.RawMessage(tc.conf.String())}
	if tc.cloud != nil || !tc.conf.routed() {
		cfg.Segments = tc.hosts
	}
	l := newLab(t, cfg, "")
	hosts := l.Hosts()
	var users, keys []string
	if !tc.unrestricted {
		users, keys = giveKeys(t, l)
	}
	if tc.reverse {
		slices.Reverse(users)
		slices.Reverse(keys)
	}
	var base lab.FlanneldOptions
	var v *cloudBed
	if tc.cloud != nil {
		v = newCloudBedOn(t, l, tc.cloud())
		base = v.options()
	}
	if !tc.conf.routed() {
		routeKeys(t, l, keys)
	}
	installed := map[*lab.Host]*lab.Namespace{}
	for _, h := range hosts {
		installed[h] = h.Namespace
	}
	options := func(h *lab.Host) lab.FlanneldOptions {
		if v != nil && installed[h] != h.Namespace {
			v.serveAgain(h)
			installed[h] = h.Namespace
		}
		o := lab.FlanneldOptions{Args: slices.Clone(base.Args), Env: slices.Clone(base.Env)}
		if users != nil {
			o.Args = append(o.Args, "--etcd-username="+users[slices.Index(hosts, h)])
			o.Env = append(o.Env, "FLANNELD_ETCD_PASSWORD=secret")
		}
		for _, arg := range tc.args {
			o.Args = append(o.Args, strings.Replace(arg, "ADDRESS", h.Addr(tc.families[0]).String(), 1))
		}
		return o
	}
	var routes map[netip.Prefix][]netip.Addr
	settled := func() {
		if v != nil {
			routes = v.forwarding()
		}
		if strings.Contains(tc.conf.backend, "Overflow") { // otherwise the packets would leave the tunnel in the meantime
			v.expectByTunnel(map[int]string{})
			expectMatrix(t, l)
		}
	}
	survive(t, l, options, tc.rate, settled, func() {
		all, err := l.Leases(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		user, key := "", "/coreos.com/network/subnets/"
		if users == nil {
			key += leaseOf(t, l, hosts[0]).Key
		} else {
			user, key = users[0], keys[0]
		}
		var values []any
		var own any
		for _, lease := range all {
			if lease.Key == path.Base(key) {
				own = decoded(lease.Value)
			} else {
				values = append(values, decoded(lease.Value))
			}
		}
		a := newHostile(t, l, seed, append(values, own))
		t.Logf("%d values were written", a.attack(t, l, user, key, tc.d))
	})
	if v == nil {
		return
	}

	if diff := cmp.Diff(routes, v.forwarding(), cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); diff != "" || len(routes) != tc.hosts*len(tc.families) {
		t.Errorf("the cloud has other routes than before the attack (-before +after):\n%s", diff)
	}
}

// routeKeys makes the router of the lab forward packets for the subnets in the keys to the hosts that have
// these keys, as an operator does for the backend alloc.
func routeKeys(t *testing.T, l *lab.Lab, keys []string) {
	t.Helper()
	for i, key := range keys {
		subnets, err := codec.ParseKey(path.Base(key))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range subnets {
			via := l.Host(i + 1).Addr(prefix.FamilyOf(s.Addr()))
			if out, err := l.Underlay().Exec(testContext(t), "ip", "route", "add", s.String(), "via", via.String()); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
	}
}

// decoded returns the value of a JSON text, or the text if it is none.
func decoded(text string) (value any) {
	if json.Unmarshal([]byte(text), &value) != nil {
		return text
	}
	return value
}

// survive starts a daemon on each host, the first one before the others, and lets packets flow between the pods of
// these, after settled has returned. It then stops the daemon of that host and calls attack. No packet may be lost, and afterwards all
// hosts must be like new ones.
func survive(t *testing.T, l *lab.Lab, options func(*lab.Host) lab.FlanneldOptions, rate int, settled, attack func()) {
	t.Helper()
	hosts := l.Hosts()
	start(t, hosts[0], options(hosts[0]))
	expectReady(t, hosts[0].Daemon())
	for _, h := range hosts[1:] {
		start(t, h, options(h))
	}
	for _, h := range hosts[1:] {
		expectReady(t, h.Daemon())
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
	settled()
	flows := startFlows(t, l, rate)

	hosts[0].Daemon().Kill()
	attack()

	start(t, hosts[0], options(hosts[0]))
	expectReady(t, hosts[0].Daemon())
	expectNothingLost(t, flows)
	for _, h := range hosts {
		if err := h.RemovePods(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	expectLikeFresh(t, l, options)
}

// TestKubeHostileNode is TestHostileHost with the rights of a kubelet: it writes the annotations of its
// own Node.
//
//stages:rest it repeats TestHostileHostVXLAN in Kubernetes
func TestKubeHostileNode(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		backend string
		args    []string
	}{
		"vxlan":           {`{"Type":"vxlan"}`, nil},
		"wireguard":       {backendConfig(userspace), nil},
		"with a location": {`{"Type":"wireguard","Implementation":"userspace","SameLocation":{"Type":"vxlan"}}`, []string{"--location=here"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, lab.Config{Hosts: strongAttack.hosts, Families: dual}, tc.backend)
			seed := seedOf(t)
			hosts := c.Hosts()
			options := func(h *lab.Host) lab.FlanneldOptions { return c.options(slices.Index(hosts, h)+1, tc.args...) }
			survive(t, c.Lab, options, strongAttack.rate, func() {}, func() {
				var values []any
				for i := len(hosts); i > 0; i-- {
					notes := map[string]any{}
					for name, text := range c.node(i).Metadata.Annotations {
						notes[name] = decoded(text)
					}
					values = append(values, notes)
				}
				a := newHostile(t, c.Lab, seed, values)
				t.Logf("%d values were written", a.attackNode(c, 1, strongAttack.d))
			})
		})
	}
}

// attackNode writes the annotations of Node n for some time, with the rights of its kubelet. It returns the
// number of writes. Any other write would be refused.
func (a *hostile) attackNode(c *cluster, n int, d time.Duration) (writes int) {
	c.t.Helper()
	write := func(method, path string, body any) int {
		c.t.Helper()
		status, _, err := c.tryAs(nodeName(n), method, nodesPath+path, body, "application/merge-patch+json")
		if err != nil {
			c.t.Fatal(err)
		}
		return status
	}
	withoutNotes := func() map[string]any {
		notes := map[string]any{}
		for name := range c.node(n).Metadata.Annotations {
			notes[name] = nil
		}
		return notes
	}
	patchOf := func(notes map[string]any) any {
		return map[string]any{"metadata": map[string]any{"annotations": notes}}
	}
	for end := time.Now().Add(d); time.Now().Before(end); {
		notes := withoutNotes()
		next, _ := a.next().(map[string]any)
		for name, value := range next {
			if _, isText := value.(string); !isText && value != nil {
				text, _ := json.Marshal(value)
				value = string(text)
			}
			notes[name] = value
		}
		patch := patchOf(notes)
		if write(http.MethodPatch, "/"+nodeName(n)+"/status", patch) == http.StatusOK {
			writes++
		}
		if status := write(http.MethodPatch, "/"+nodeName(n+1)+"/status", patch); status != http.StatusForbidden {
			c.t.Errorf("a write to another Node has the status %d", status)
		}
		pause(c.t, time.Duration(a.r.IntN(50))*time.Millisecond)
	}
	// A host that starts without state believes the older of two Nodes with one identity: see
	// Documentation/security.md. So none may be left.
	if status := write(http.MethodPatch, "/"+nodeName(n)+"/status", patchOf(withoutNotes())); status != http.StatusOK {
		c.t.Errorf("the last write has the status %d", status)
	}
	return writes
}
