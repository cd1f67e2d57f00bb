// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/lab"
)

var (
	walkSeed  = flag.Uint64("seed", 0, "seed of the first walk; 0 picks one")
	walkSteps = flag.Int("steps", 8, "number of steps of one walk")
	walkFor   = flag.Duration("for", 0, "for how long TestWalks starts new walks")
)

// netConf is a network configuration of a walk.
type netConf struct {
	v4, v6  string // the networks, each empty without that family
	more    string // other keys, each after a comma
	backend string // JSON object
	next    string // of the next backend; empty without one
}

func (c netConf) String() string {
	text := fmt.Sprintf(`{"EnableIPv4":%v`, c.v4 != "")
	if c.v4 != "" {
		text += fmt.Sprintf(`,"Network":%q`, c.v4)
	}
	if c.v6 != "" {
		text += fmt.Sprintf(`,"EnableIPv6":true,"IPv6Network":%q`, c.v6)
	}
	text += c.more + `,"Backend":` + c.backend
	if c.next != "" {
		text += `,"NextBackend":` + c.next
	}
	return text + "}"
}

// network returns the network of a family, or "" without that family.
func (c netConf) network(f prefix.Family) string {
	if f == prefix.IPv4 {
		return c.v4
	}
	return c.v6
}

// inUserspace reports whether the daemon carries packets, or may do so.
func (c netConf) inUserspace() bool { return strings.Contains(c.backend+c.next, "userspace") }

// wayOf returns the keys of a backend that two hosts must have in common to reach each other.
func wayOf(backend string) string {
	var keys map[string]any
	if json.Unmarshal([]byte(backend), &keys) != nil {
		return ""
	}
	for _, local := range []string{"MTU", "DirectRouting", "ChecksumOffload", "Learning"} {
		delete(keys, local)
	}
	way, _ := json.Marshal(keys) // sorted by keys
	return string(way)
}

// lossBetween returns why packets of a family may be lost while hosts change from one configuration to the other, as
// Documentation/configuration.md says. It returns "" if none may be lost.
func lossBetween(from, to netConf, f prefix.Family) string {
	a, b := from.network(f), to.network(f)
	present, next := wayOf(from.backend), wayOf(to.backend)
	switch {
	case a == "" || b == "":
		return "the family is not enabled in both"
	case !netip.MustParsePrefix(a).Overlaps(netip.MustParsePrefix(b)): // if they overlap, both contain all subnets
		return "pods have addresses of another network"
	case from.inUserspace() && (from.v4 != to.v4 || from.v6 != to.v6):
		return "the daemon, which carries the packets, opens its tunnel again"
	case next != present && next != wayOf(from.next) && present != wayOf(to.next):
		return "neither configuration has the backends of both"
	}
	return ""
}

// pick returns one of values at random.
func pick(r *rand.Rand, values ...string) string { return values[r.IntN(len(values))] }

// randomBackend returns a random backend that does not use the device of the backend other.
func randomBackend(r *rand.Rand, other string) string {
	for {
		backend := pick(r, `{"Type":"host-gw"}`, `{"Type":"udp","Mode":"userspace"}`, vxlanConf(r), vxlanConf(r))
		if deviceOf(backend) != deviceOf(other) || other == "" {
			return backend
		}
	}
}

func vxlanConf(r *rand.Rand) string {
	return `{"Type":"vxlan"` + pick(r, "", `,"VNI":7`) + pick(r, "", `,"Port":8473`) + pick(r, "", `,"MTU":1400`) +
		pick(r, "", `,"DirectRouting":true`) + pick(r, "", `,"ChecksumOffload":"off"`) + "}"
}

// deviceOf returns the type of a backend and, with vxlan, the VNI, because two backends of which these are equal have the
// same device.
func deviceOf(backend string) string {
	var keys struct {
		Type string
		VNI  int
	}
	_ = json.Unmarshal([]byte(backend), &keys)
	return fmt.Sprint(keys)
}

// edited returns c with one random edit, or with the first or last step of a migration.
func (c netConf) edited(r *rand.Rand) netConf {
	for before := c; ; c = before {
		switch edit := r.IntN(10); {
		case edit < 2 && c.next == "":
			c.next = randomBackend(r, c.backend)
		case edit < 4 && c.next != "":
			c = c.finished(r)
		case edit < 6 && c.next == "":
			c.backend = randomBackend(r, "")
		case edit == 6:
			c.more = pick(r, "", `,"EnableNFTables":true`) + pick(r, "", `,"NonMasqueradeCIDRs":["192.0.2.0/24"]`)
		case edit == 7: // all subnets are in the part that both networks have in common
			c.v4 = pick(r, "10.5.0.0/16", "10.4.0.0/15")
		case edit == 8:
			c.v4, c.v6 = pick(r, "10.5.0.0/16", "10.6.0.0/16"), pick(r, c.v6, "fd00:6::/48")
		case edit == 9:
			c.v4, c.v6 = pick(r, "10.5.0.0/16", c.v4), pick(r, "", "fd00:5::/48")
			if c.v6 != "" {
				c.v4 = pick(r, "", "10.5.0.0/16", c.v4)
			}
		}
		if c.v4 == "10.4.0.0/15" {
			c.more = strings.ReplaceAll(c.more, `,"SubnetMin":"10.5.0.0"`, "") + `,"SubnetMin":"10.5.0.0"`
		} else {
			c.more = strings.ReplaceAll(c.more, `,"SubnetMin":"10.5.0.0"`, "")
		}
		if c != before {
			return c
		}
	}
}

// finished returns c after the end of its migration, or after it has been aborted.
func (c netConf) finished(r *rand.Rand) netConf {
	c.backend, c.next = pick(r, c.backend, c.next), ""
	return c
}

// walk changes the configuration of a lab at random, and causes faults.
type walk struct {
	t     *testing.T
	r     *rand.Rand
	began time.Time
	lab   *lab.Lab
	now   netConf
	flows map[prefix.Family][]flow
}

// walkOptions returns the options of the daemons of a walk.
func walkOptions() lab.FlanneldOptions { return lab.FlanneldOptions{Args: []string{"--ip-masq"}} }

// takeWalk takes random steps. While it does, a flow of 100 packets per second between every two pods loses none, except
// if lossBetween says so. At the end the hosts are like new ones. The same seed takes the same steps.
func takeWalk(t *testing.T, seed uint64, steps int) {
	t.Logf("this walk again: make walk WALKFLAGS='-seed %d -steps %d'", seed, steps)
	w := walk{t: t, r: rand.New(rand.NewPCG(seed, 1)), began: time.Now(), flows: map[prefix.Family][]flow{}}
	w.now = netConf{v4: "10.5.0.0/16", v6: pick(w.r, "", "fd00:5::/48"), backend: randomBackend(w.r, "")}
	w.log("put %s", w.now)
	w.lab = newLab(t, lab.Config{Hosts: 2 + w.r.IntN(2), Families: dual, Network: json.RawMessage(w.now.String())}, "")
	startAll(t, w.lab, walkOptions())
	w.startFlows()
	for range steps {
		w.step()
	}
	if w.now.next != "" { // leftovers of former configurations stay until the migration ends
		w.edit(w.now, w.now.finished(w.r))
	}
	w.stopFlows(prefix.IPv4, prefix.IPv6)
	w.log("compare with new hosts")
	expectLikeFresh(t, w.lab, walkOptions())
}

func (w *walk) log(format string, args ...any) {
	w.t.Logf("%7.3fs %s", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

// step edits the configuration once or several times in a row. It may kill a daemon meanwhile. Then it waits until all
// hosts use the last configuration.
func (w *walk) step() {
	w.t.Helper()
	confs := []netConf{w.now}
	for len(confs) < 2 || len(confs) < 5 && w.r.IntN(2) == 0 {
		confs = append(confs, confs[len(confs)-1].edited(w.r))
	}
	w.edit(confs...)
}

// edit changes the configuration from the first of confs to the last.
func (w *walk) edit(confs ...netConf) {
	w.t.Helper()
	var killed *lab.Host
	if w.r.IntN(4) == 0 {
		killed = w.lab.Host(1 + w.r.IntN(len(w.lab.Hosts())))
	}
	killedAfter, when := 1+w.r.IntN(len(confs)-1), milliseconds(w.r.IntN(300))

	for _, f := range dual {
		if why := w.mayLose(confs, killed != nil, f); why != "" && w.flows[f] != nil {
			w.log("%s may lose packets: %s", f, why)
			w.stopFlows(f)
		}
	}
	for i, c := range confs[1:] {
		if i > 0 {
			pause(w.t, milliseconds(10+w.r.IntN(490)))
		}
		w.log("put %s", c)
		w.put(c.String())
		if killed != nil && killedAfter == i+1 {
			pause(w.t, when)
			w.log("kill the daemon of %s", killed.Name())
			killed.Daemon().Kill()
			start(w.t, killed, walkOptions())
		}
	}
	w.now = confs[len(confs)-1]
	w.settle()
	w.startFlows()
}

// mayLose returns why packets of a family may be lost while hosts change from the first of these configurations to the last.
// A host may not notice one of them before the next one replaces it.
func (w *walk) mayLose(confs []netConf, kill bool, f prefix.Family) string {
	for i, from := range confs {
		if kill && from.inUserspace() {
			return "the daemon that carries packets is killed"
		}
		for _, to := range confs[i+1:] {
			if why := lossBetween(from, to, f); why != "" {
				return why
			}
		}
	}
	return ""
}

func (w *walk) put(config string) {
	w.t.Helper()
	if err := w.lab.PutNetwork(testContext(w.t), json.RawMessage(config)); err != nil {
		w.t.Fatal(err)
	}
}

// settle waits until all hosts serve with the present configuration and have all peers in the kernel.
func (w *walk) settle() {
	w.t.Helper()
	want, err := subnet.ParseConfig([]byte(w.now.String()))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range w.lab.Hosts() {
		eventually(w.t, h.Name()+" uses the last configuration", func() error {
			used, err := usedBy(h)
			if err != nil {
				return err
			}
			if changes := subnet.Changes(used, want); len(changes) > 0 {
				return fmt.Errorf("it needs the changes %q", changes)
			}
			r, err := askReport(w.t, h)
			if err != nil {
				return err
			}
			serves := r.Network.Phase == "serving" || r.Network.Phase == "serving, and removing what a former configuration left"
			if !serves || !r.Ready || r.ConfigRejected != "" || len(r.Peers) != len(w.lab.Hosts())-1 {
				return fmt.Errorf("ready %v %v, phase %q, rejected %q, %d peers", r.Ready, r.Reasons, r.Network.Phase, r.ConfigRejected, len(r.Peers))
			}
			for _, p := range r.Peers {
				if p.State != status.InPlace || p.NextType != want.NextType {
					return fmt.Errorf("peer %s is %s, next backend %q: %s", p.Key, p.State, p.NextType, p.Error)
				}
			}
			return nil
		})
	}
}

// usedBy returns the configuration in the state file of a host. It returns an error if the host has not exactly one such
// file, or if the file cannot be read.
func usedBy(h *lab.Host) (cfg subnet.Config, err error) {
	names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-????????????.json")) // not the files of backends
	if err != nil || len(names) != 1 {
		return cfg, fmt.Errorf("state files %q, %w", names, err)
	}
	text, err := os.ReadFile(names[0])
	if err != nil {
		return cfg, err
	}
	var file struct {
		State struct {
			Config subnet.Config `json:"config"`
		} `json:"state"`
	}
	err = json.Unmarshal(text, &file)
	return file.State.Config, err
}

// startFlows starts a flow between every two pods in each family of the present configuration without flows. Before that
// it replaces the pods if their addresses are not those of the present subnets.
func (w *walk) startFlows() {
	w.t.Helper()
	for _, h := range w.lab.Hosts() {
		if podsFit(w.t, h) {
			continue
		}
		w.stopFlows(prefix.IPv4, prefix.IPv6)
		for _, h := range w.lab.Hosts() {
			if err := h.RemovePods(testContext(w.t)); err != nil {
				w.t.Fatal(err)
			}
		}
		if err := w.lab.AddPods(testContext(w.t)); err != nil {
			w.t.Fatal(err)
		}
		break
	}
	for _, f := range dual {
		if w.flows[f] != nil || w.now.network(f) == "" {
			continue
		}
		for _, from := range w.lab.Pods() {
			for _, to := range w.lab.Pods() {
				if from == to {
					continue
				}
				name := fmt.Sprintf("%s to %s by %s", from.Name(), to.Name(), f)
				eventually(w.t, name, func() error {
					_, err := from.Ping(testContext(w.t), to.Addr(f), ping.Options{})
					return err
				})
				one, err := from.StartFlow(testContext(w.t), to, f, 100)
				if err != nil {
					w.t.Fatal(err)
				}
				w.t.Cleanup(func() { one.Stop() })
				w.flows[f] = append(w.flows[f], flow{one, name})
			}
		}
	}
}

// podsFit reports whether the pods of a host have exactly the addresses that new pods would have.
func podsFit(t *testing.T, h *lab.Host) bool {
	t.Helper()
	subnets := statusOf(t, h).Lease.Subnets
	for _, p := range h.Pods() {
		if len(p.Addrs()) != len(subnets) {
			return false
		}
		for i, s := range subnets {
			if !s.Contains(p.Addrs()[i]) {
				return false
			}
		}
	}
	return true
}

// stopFlows stops the flows of these families, which must not have lost a packet.
func (w *walk) stopFlows(families ...prefix.Family) {
	w.t.Helper()
	for _, f := range families {
		expectNothingLost(w.t, w.flows[f])
		delete(w.flows, f)
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
}

// TestWalk takes short walks: one that is the same each time, and one with a random seed.
func TestWalk(t *testing.T) {
	t.Parallel()
	for _, seed := range []uint64{1, rand.Uint64()} {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			takeWalk(t, seed, *walkSteps)
		})
	}
}

// TestWalks takes walks, one after the other, for the time -for. Only -seed selects the first one.
//
//stages:rest TestWalk takes walks too
func TestWalks(t *testing.T) {
	seed := *walkSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	for began := time.Now(); ; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { takeWalk(t, seed, *walkSteps) })
		if time.Since(began) >= *walkFor {
			return
		}
	}
}

// TestLossBetween checks when packets may be lost while the configuration changes.
func TestLossBetween(t *testing.T) {
	const vxlan, hostgw, udp = `{"Type":"vxlan"}`, `{"Type":"host-gw"}`, `{"Type":"udp","Mode":"userspace"}`
	base := netConf{v4: "10.5.0.0/16", v6: "fd00:5::/48", backend: vxlan}
	change := func(f func(*netConf)) netConf { c := base; f(&c); return c }
	migrating := change(func(c *netConf) { c.next = hostgw })
	for _, tt := range []struct {
		name     string
		from, to netConf
		v4, v6   bool // whether packets of the family may be lost
	}{
		{"MTU", base, change(func(c *netConf) { c.backend = `{"Type":"vxlan","MTU":1400}` }), false, false},
		{"DirectRouting", base, change(func(c *netConf) { c.backend = `{"Type":"vxlan","DirectRouting":true}` }), false, false},
		{"firewall", base, change(func(c *netConf) { c.more = `,"EnableNFTables":true` }), false, false},
		{"wider Network", base, change(func(c *netConf) { c.v4 = "10.4.0.0/15" }), false, false},
		{"another Network", base, change(func(c *netConf) { c.v4 = "10.6.0.0/16" }), true, false},
		{"IPv6 is disabled", base, change(func(c *netConf) { c.v6 = "" }), false, true},
		{"VNI", base, change(func(c *netConf) { c.backend = `{"Type":"vxlan","VNI":7}` }), true, true},
		{"another backend", base, change(func(c *netConf) { c.backend = hostgw }), true, true},
		{"migration starts", base, migrating, false, false},
		{"migration ends", migrating, change(func(c *netConf) { c.backend = hostgw }), false, false},
		{"migration is aborted", migrating, base, false, false},
		{"back to both backends", change(func(c *netConf) { c.backend = hostgw }), migrating, false, false},
		{"migration to a third backend", migrating, change(func(c *netConf) { c.backend = udp }), true, true},
		{"family of udp", change(func(c *netConf) { c.backend, c.v6 = udp, "" }), change(func(c *netConf) { c.backend = udp }), true, true},
	} {
		for f, want := range map[prefix.Family]bool{prefix.IPv4: tt.v4, prefix.IPv6: tt.v6} {
			if why := lossBetween(tt.from, tt.to, f); (why != "") != want {
				t.Errorf("%s: loss of %s %q, want one: %v", tt.name, f, why, want)
			}
		}
	}
}
