// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
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

func newHostile(t *testing.T, l *lab.Lab, seed uint64) *hostile {
	t.Helper()
	a := &hostile{r: rand.New(rand.NewPCG(seed, 1)), atoms: []any{
		nil, true, -1, 0, 1, 65536, 1e99, "", " ", "x", "\x1b[31m\nrefused", strings.Repeat("9", 70000), []any{}, map[string]any{},
		"0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "192.168.77.255", "192.168.77.254", "::", "::1", "fe80::1", "ff02::1", "fd00:77::ffff",
		"::ffff:192.168.77.1", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", strings.Repeat("A", 43) + "=",
	}}
	for _, lease := range leases(t, l) {
		var value any
		if err := json.Unmarshal([]byte(lease.Value), &value); err != nil {
			t.Fatal(err)
		}
		a.leases = append(a.leases, value)
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

// value returns the next value of the key.
func (a *hostile) value() string {
	value := a.leases[a.r.IntN(len(a.leases))]
	for range a.r.IntN(4) {
		value = a.changed(value)
	}
	text, _ := json.Marshal(value)
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
	c, err := l.Etcd().Client(t.Context(), func(cfg *clientv3.Config) { cfg.Username, cfg.Password = user, "secret" })
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
		backend  string
		args     []string
	}{
		"vxlan":           {v4, `{"Type":"vxlan"}`, nil},
		"direct routing":  {dual, `{"Type":"vxlan","DirectRouting":true,"MTU":"probe"}`, nil},
		"host-gw":         {dual, `{"Type":"host-gw"}`, nil},
		"udp":             {dual, backendConfig("udp"), nil},
		"wireguard":       {dual, `{"Type":"wireguard","Implementation":"userspace","PersistentKeepaliveInterval":1}`, []string{"--relay"}},
		"wireguard, IPv4": {v4, backendConfig(userspace), []string{"--public-endpoint=ADDRESS"}},
		"wireguard, IPv6": {v6, backendConfig(userspace), nil},
		"with a location": {dual, `{"Type":"wireguard","Implementation":"userspace","SameLocation":{"Type":"vxlan"}}`, []string{"--location=here"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			surviveHostileHost(t, tc.families, tc.backend, 20*time.Second, tc.args...)
		})
	}
}

func TestHostileHostVXLAN(t *testing.T) {
	t.Parallel()
	surviveHostileHost(t, dual, `{"Type":"vxlan"}`, 5*time.Second)
}

func surviveHostileHost(t *testing.T, families []prefix.Family, backend string, d time.Duration, args ...string) {
	t.Helper()
	seed := seed(t)
	t.Logf("this attack again: -seed %d", seed)
	conf := netConf{backend: backend}
	for _, f := range families {
		if f == prefix.IPv4 {
			conf.v4 = "10.5.0.0/16"
		} else {
			conf.v6 = "fd00:5::/48"
		}
	}
	l := newLab(t, lab.Config{Hosts: 4, Families: families, Network: json.RawMessage(conf.String())}, "")
	users, keys := giveKeys(t, l)
	hosts := l.Hosts()
	options := func(h *lab.Host) lab.FlanneldOptions {
		user := users[slices.Index(hosts, h)]
		o := lab.FlanneldOptions{Args: []string{"--etcd-username=" + user}, Env: []string{"FLANNELD_ETCD_PASSWORD=secret"}}
		for _, arg := range args {
			o.Args = append(o.Args, strings.Replace(arg, "ADDRESS", h.Addr(families[0]).String(), 1))
		}
		return o
	}
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
	flows := startFlows(t, l, 100)

	a := newHostile(t, l, seed)
	hosts[last].Daemon().Kill()
	t.Logf("%d values were written", a.attack(t, l, users[last], keys[last], d))

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
