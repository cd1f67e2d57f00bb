// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/prefix"
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
	leases []any // the values of the leases of all hosts, decoded
	atoms  []any // values that can replace any part of a lease
}

// newHostile returns one that makes values from leases, which are decoded, and from the addresses of pods.
func newHostile(l *lab.Lab, seed uint64, leases []any) *hostile {
	a := &hostile{r: rand.New(rand.NewPCG(seed, 1)), atoms: []any{
		nil, true, -1, 0, 1, 65536, 1e99, "", " ", "x", "\x1b[31m\nrefused", strings.Repeat("9", 70000), []any{}, map[string]any{},
		"0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "192.168.77.255", "192.168.77.254", "::", "::1", "fe80::1", "ff02::1", "fd00:77::ffff",
		"::ffff:192.168.77.1", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", strings.Repeat("A", 43) + "=",
	}}
	a.leases = leases
	for _, value := range leases {
		a.collect(value)
	}
	for _, p := range l.Pods() {
		for _, addr := range p.Addrs() {
			a.atoms = append(a.atoms, addr.String(), addr.Prev().String(), addr.Prev().Prev().String())
		}
	}
	return a
}

// collect adds all parts of a value to the atoms. So each part gets into the place of each other
// one, in a field that did not exist when this was written too.
func (a *hostile) collect(value any) {
	a.atoms = append(a.atoms, value)
	if fields, ok := value.(map[string]any); ok {
		for _, field := range fields {
			a.collect(field)
		}
	}
}

// next returns the next value.
func (a *hostile) next() any {
	value := a.leases[a.r.IntN(len(a.leases))]
	for range a.r.IntN(4) {
		value = a.changed(value)
	}
	return value
}

// value returns the next value of the key.
func (a *hostile) value() string {
	text, _ := json.Marshal(a.next())
	if a.r.IntN(10) == 0 { // no JSON
		text = text[:a.r.IntN(len(text)+1)]
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
		switch a.r.IntN(8) {
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
		pause(t, time.Duration(a.r.IntN(100))*time.Millisecond)
	}
	if _, err := c.Delete(testContext(t), key); err != nil {
		t.Fatal(err)
	}
	return writes
}

// TestHostileHost lets a host with the rights of its own key write values to it that attack the other
// hosts, while flows between the pods of these lose no packet. Afterwards all hosts are like new ones.
//
//stages:rest it repeats TestHostileHostVXLAN with other backends
func TestHostileHost(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		families []prefix.Family
		conf     netConf
		args     []string
	}{
		"vxlan":           {v4, netConf{backend: `{"Type":"vxlan"}`}, nil},
		"direct routing":  {dual, netConf{backend: `{"Type":"vxlan","DirectRouting":true,"MTU":"probe"}`}, nil},
		"host-gw":         {dual, netConf{backend: `{"Type":"host-gw"}`}, nil},
		"udp":             {dual, netConf{backend: backendConfig("udp")}, nil},
		"wireguard":       {dual, netConf{backend: `{"Type":"wireguard","Implementation":"userspace","PersistentKeepaliveInterval":1}`}, nil},
		"wireguard, IPv4": {v4, netConf{backend: backendConfig(userspace)}, []string{"--public-endpoint=ADDRESS"}},
		"wireguard, IPv6": {v6, netConf{backend: backendConfig(userspace)}, nil},
		"with a location": {dual, netConf{backend: `{"Type":"wireguard","Implementation":"userspace","SameLocation":{"Type":"vxlan"}}`}, []string{"--location=here"}},
		"a migration":     {dual, netConf{backend: `{"Type":"vxlan"}`, next: backendConfig(userspace)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			surviveHostileHost(t, tc.families, tc.conf, strongAttack, tc.args...)
		})
	}
}

func TestHostileHostVXLAN(t *testing.T) {
	t.Parallel()
	surviveHostileHost(t, dual, netConf{backend: `{"Type":"vxlan"}`}, attack{hosts: 4, rate: 100, d: 5 * time.Second})
}

// TestVMHostileHost is TestHostileHost with backends that need modules of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMHostileHost(t *testing.T) {
	for name, conf := range map[string]netConf{"ipip": {backend: `{"Type":"ipip"}`}, "wireguard": {backend: `{"Type":"wireguard"}`}} {
		t.Run(name, func(t *testing.T) {
			// With ipip loaded, each new namespace gets the device tunl0, which changes the indexes of others.
			if out, err := exec.CommandContext(testContext(t), "modprobe", name).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			surviveHostileHost(t, v4, conf, attack{hosts: 3, rate: 20, d: 8 * time.Second, unrestricted: true})
		})
	}
}

// attack describes an attack by the last of several hosts.
type attack struct {
	hosts int
	rate  int           // packets per second of each flow
	d     time.Duration // of the attack
	// unrestricted is set if the users of etcd could write more than one key, which the attack does not do.
	// The guest of the VM tests has no etcdctl.
	unrestricted bool
}

var strongAttack = attack{hosts: 4, rate: 100, d: 20 * time.Second}

// seedOf returns the seed of an attack, and logs it.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := seed(t)
	t.Logf("this attack again: -seed %d", seed)
	return seed
}

func surviveHostileHost(t *testing.T, families []prefix.Family, conf netConf, at attack, args ...string) {
	t.Helper()
	seed := seedOf(t)
	for _, f := range families {
		if f == prefix.IPv4 {
			conf.v4 = "10.5.0.0/16"
		} else {
			conf.v6 = "fd00:5::/48"
		}
	}
	l := newLab(t, lab.Config{Hosts: at.hosts, Families: families, Network: json.RawMessage(conf.String())}, "")
	hosts := l.Hosts()
	last := hosts[len(hosts)-1]
	var users, keys []string
	if !at.unrestricted {
		users, keys = giveKeys(t, l)
	}
	options := func(h *lab.Host) (o lab.FlanneldOptions) {
		if users != nil {
			o = lab.FlanneldOptions{Args: []string{"--etcd-username=" + users[slices.Index(hosts, h)]}, Env: []string{"FLANNELD_ETCD_PASSWORD=secret"}}
		}
		for _, arg := range args {
			o.Args = append(o.Args, strings.Replace(arg, "ADDRESS", h.Addr(families[0]).String(), 1))
		}
		return o
	}
	survive(t, l, options, at.rate, func() {
		var values []any
		for _, lease := range leases(t, l) {
			values = append(values, decoded(lease.Value))
		}
		a := newHostile(l, seed, values)
		user, key := "", "/coreos.com/network/subnets/"
		if users == nil {
			key += leaseOf(t, l, last).Key
		} else {
			user, key = users[len(users)-1], keys[len(keys)-1]
		}
		t.Logf("%d values were written", a.attack(t, l, user, key, at.d))
	})
}

// decoded returns the value of a JSON text, or the text if it is none.
func decoded(text string) (value any) {
	if json.Unmarshal([]byte(text), &value) != nil {
		return text
	}
	return value
}

// survive starts a daemon on each host and lets packets flow between the pods of all hosts but the last
// one. It then stops the daemon of that host and calls attack. No packet may be lost, and afterwards all
// hosts must be like new ones.
func survive(t *testing.T, l *lab.Lab, options func(*lab.Host) lab.FlanneldOptions, rate int, attack func()) {
	t.Helper()
	hosts := l.Hosts()
	for _, h := range hosts {
		start(t, h, options(h))
	}
	last := len(hosts) - 1
	for i, h := range hosts {
		expectReady(t, h.Daemon())
		if i == last {
			continue
		}
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
	flows := startFlows(t, l, rate)

	hosts[last].Daemon().Kill()
	attack()

	start(t, hosts[last], options(hosts[last]))
	expectReady(t, hosts[last].Daemon())
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
	for name, backend := range map[string]string{"vxlan": `{"Type":"vxlan"}`, "wireguard": backendConfig(userspace)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, lab.Config{Hosts: strongAttack.hosts, Families: dual}, backend)
			seed := seedOf(t)
			hosts, last := c.Hosts(), len(c.Hosts())
			options := func(h *lab.Host) lab.FlanneldOptions { return c.options(slices.Index(hosts, h) + 1) }
			survive(t, c.Lab, options, strongAttack.rate, func() {
				var values []any
				for i := range hosts {
					notes := map[string]any{}
					for name, text := range c.node(i + 1).Metadata.Annotations {
						notes[name] = decoded(text)
					}
					values = append(values, notes)
				}
				a := newHostile(c.Lab, seed, values)
				t.Logf("%d values were written", a.attackNode(c, last, strongAttack.d))
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
	for end := time.Now().Add(d); time.Now().Before(end); {
		notes := map[string]any{}
		for name := range c.node(n).Metadata.Annotations {
			notes[name] = nil
		}
		next, _ := a.next().(map[string]any)
		for name, value := range next {
			if _, isText := value.(string); !isText && value != nil {
				text, _ := json.Marshal(value)
				value = string(text)
			}
			notes[name] = value
		}
		patch := map[string]any{"metadata": map[string]any{"annotations": notes}}
		if write(http.MethodPatch, "/"+nodeName(n)+"/status", patch) == http.StatusOK {
			writes++
		}
		if status := write(http.MethodPatch, "/"+nodeName(1)+"/status", patch); status != http.StatusForbidden {
			c.t.Errorf("a write to another Node has the status %d", status)
		}
		pause(c.t, time.Duration(a.r.IntN(100))*time.Millisecond)
	}
	return writes
}
