// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/lab"
)

var (
	walkSeed  = flag.Uint64("seed", 0, "seed of the first walk; 0 picks one for this version")
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
func (c netConf) inUserspace() bool {
	return strings.Contains(c.backend+c.next, "userspace") || strings.Contains(c.backend+c.next, `"udp"`)
}

// routed reports whether packets get from one host to others.
func (c netConf) routed() bool { return c.backend != alloc }

// The backends without other keys.
const (
	alloc  = `{"Type":"alloc"}`
	hostGW = `{"Type":"host-gw"}`
)

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
	case !from.routed() || !to.routed():
		return "the backend alloc leaves the routes to others"
	case strings.Contains(from.backend+from.next, `"udp"`) && (from.v4 != to.v4 || from.v6 != to.v6):
		return "udp opens its tunnel again"
	case strings.Contains(from.backend, `"extension"`) && (from.v4 != to.v4 || from.v6 != to.v6):
		return "the commands of extension run again"
	case next != present && next != wayOf(from.next) && present != wayOf(to.next):
		return "neither configuration has the backends of both"
	}
	return ""
}

// extensionOn returns a backend whose commands make a device, and routes like those of host-gw. Any of them may have run
// before: they are killed together with the daemon.
func extensionOn(device string) string {
	text, _ := json.Marshal(map[string]string{
		"Type":                "extension",
		"PreStartupCommand":   "ip link show " + device + " >/dev/null 2>&1 || ip tuntap add mode tun name " + device,
		"PostStartupCommand":  "ip link set " + device + " up",
		"SubnetAddCommand":    `[ -z "$SUBNET" ] || ip route replace $SUBNET via $PUBLIC_IP; [ -z "$IPV6SUBNET" ] || ip route replace $IPV6SUBNET via $PUBLIC_IPV6`,
		"SubnetRemoveCommand": `[ -z "$SUBNET" ] || ip route del $SUBNET; [ -z "$IPV6SUBNET" ] || ip route del $IPV6SUBNET; true`,
		"ShutdownCommand":     "ip link del " + device,
	})
	return string(text)
}

// pick returns one of values at random.
func pick(r *rand.Rand, values ...string) string { return values[r.IntN(len(values))] }

// randomBackend returns a random backend for network number i that does not use the device of the backend other. Backends
// of networks with different numbers do not clash.
func randomBackend(r *rand.Rand, i int, other string) string {
	for {
		vxlan := `{"Type":"vxlan"` + pick(r, fmt.Sprintf(`,"VNI":%d`, 1+i), fmt.Sprintf(`,"VNI":%d`, 7+i)) + pick(r, "", `,"Port":8473`) +
			pick(r, "", `,"MTU":1400`) + pick(r, "", `,"DirectRouting":true`) + pick(r, "", `,"ChecksumOffload":"off"`) + "}"
		backend := pick(r, hostGW, hostGW, alloc, extensionOn(fmt.Sprintf("ext%d", i)), vxlan, vxlan, vxlan,
			fmt.Sprintf(`{"Type":"udp","Port":%d}`, 8285+i),
			fmt.Sprintf(`{"Type":"wireguard","Implementation":"userspace","ListenPort":%d,"ListenPortV6":%d}`, 51820+2*i, 51821+2*i))
		if other == "" || deviceOf(backend) != deviceOf(other) && isNext(backend) && isNext(other) {
			return backend
		}
	}
}

// isNext reports whether a backend can be the next one, or have one.
func isNext(backend string) bool {
	return backend != alloc && !strings.Contains(backend, `"extension"`)
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

// edited returns c, a configuration of network number i, with one random edit, or with the first or last step of a
// migration.
func (c netConf) edited(r *rand.Rand, i int) netConf {
	five, six := fmt.Sprintf("10.%d.0.0/16", 5+10*i), fmt.Sprintf("10.%d.0.0/16", 6+10*i)
	wide, least := fmt.Sprintf("10.%d.0.0/15", 4+10*i), fmt.Sprintf(`,"SubnetMin":"10.%d.0.0"`, 5+10*i)
	five6, six6 := fmt.Sprintf("fd00:%d::/48", 5+10*i), fmt.Sprintf("fd00:%d::/48", 6+10*i)
	for before := c; ; c = before {
		c.more = strings.ReplaceAll(c.more, least, "")
		switch edit := r.IntN(10); {
		case edit < 2 && c.next == "" && isNext(c.backend):
			c.next = randomBackend(r, i, c.backend)
		case edit < 4 && c.next != "":
			c = c.finished(r)
		case edit < 6 && c.next == "":
			c.backend = randomBackend(r, i, "")
		case edit == 6:
			c.more = pick(r, "", `,"EnableNFTables":true`) + pick(r, "", `,"NonMasqueradeCIDRs":["192.0.2.0/24"]`)
		case edit == 7:
			c.v4 = pick(r, five, wide)
		case edit == 8:
			c.v4, c.v6 = pick(r, five, six), pick(r, c.v6, six6)
		case edit == 9:
			c.v4, c.v6 = pick(r, five, cmp.Or(c.v4, five)), pick(r, "", five6)
			if c.v6 != "" {
				c.v4 = pick(r, "", five, c.v4)
			}
		}
		if c.v4 == wide { // so that all subnets are in the part that it has in common with the other network
			c.more += least
		}
		if c != before {
			return c
		}
	}
}

// finished returns c after the end of its migration, or after it has been aborted.
func (c netConf) finished(r *rand.Rand) netConf {
	if r.IntN(2) == 0 {
		return c.migrated()
	}
	c.next = ""
	return c
}

// migrated returns c with the next backend alone.
func (c netConf) migrated() netConf {
	c.backend, c.next = c.next, ""
	return c
}

// walk changes the configurations of a lab at random.
type walk struct {
	t     *testing.T
	r     *rand.Rand
	began time.Time
	lab   *lab.Lab
	kube  *cluster // of the lab; nil with etcd
	nets  []*walkedNetwork
	other []*walkedNetwork // those that the hosts served, or nil, before the last change between one network and several
	away  *lab.Host        // a host whose daemon does not run; nil without one
	acts  int              // number of edits, kills and faults
}

// walkedNetwork is a network of a walk.
type walkedNetwork struct {
	*walk
	name  string // empty unless there are several
	now   netConf
	past  []netConf // configurations that the store has had, the oldest first
	flows map[prefix.Family][]flow
}

// options returns the options of the daemon of a host.
func (w *walk) options(h *lab.Host) lab.FlanneldOptions {
	if w.kube == nil {
		return lab.FlanneldOptions{Args: []string{"--ip-masq", "--statusz-address=[::]:8287"}}
	}
	return w.kube.options(slices.Index(w.lab.Hosts(), h)+1, "--ip-masq", "--allow-extension-backend", "--net-config-path="+w.file(h))
}

// file returns the path of the file from which a host reads its network configuration in a cluster of Kubernetes.
func (w *walk) file(h *lab.Host) string { return filepath.Join(w.kube.dir, h.Name()+".json") }

// etcds are the programs that run the stores of walks. The empty one is that of other labs.
var etcds = []string{"", "/usr/bin/etcd", "../../bin/tools/etcd-3.5", "../../bin/tools/etcd-3.6"}

func newWalk(t *testing.T, seed uint64) *walk {
	return &walk{t: t, r: rand.New(rand.NewPCG(seed, 1)), began: time.Now()}
}

// add adds a network with a random first configuration.
func (w *walk) add(name string) *walkedNetwork {
	i := len(w.nets)
	first := netConf{v4: fmt.Sprintf("10.%d.0.0/16", 5+10*i), backend: randomBackend(w.r, i, "")}
	n := &walkedNetwork{walk: w, name: name, now: first, past: []netConf{first}, flows: map[prefix.Family][]flow{}}
	w.nets = append(w.nets, n)
	w.log("put %s %s", name, first)
	return n
}

// several are the names of the networks of a walk that does not have only one.
var several = []string{"green", "red"}

// walkWithEtcd makes a lab with one or two networks, and takes random steps. The same seed takes the same steps.
func walkWithEtcd(t *testing.T, seed uint64, steps int) {
	t.Logf("this walk again: make walk WALKFLAGS='-seed %d -steps %d'", seed, steps)
	w := newWalk(t, seed)
	cfg := lab.Config{Hosts: 2 + w.r.IntN(2), Families: dual, Etcd: lab.EtcdOptions{Program: etcds[seed%uint64(len(etcds))]}}
	w.log("the store is etcd %q", cfg.Etcd.Program)
	if w.r.IntN(3) > 0 {
		cfg.Network = json.RawMessage(w.add("").now.String())
	} else {
		for _, name := range several {
			cfg.Networks = append(cfg.Networks, lab.Network{Name: name, Config: json.RawMessage(w.add(name).now.String())})
		}
	}
	w.lab = newLab(t, cfg, "")
	w.take(steps)
}

// take starts the daemons and takes random steps. While it does, a flow of 100 packets per second between every two pods
// loses none, except if lossBetween says so. At the end the hosts are like new ones.
func (w *walk) take(steps int) {
	for _, h := range w.lab.Hosts() {
		start(w.t, h, w.options(h))
	}
	for _, h := range w.lab.Hosts() {
		expectReady(w.t, h.Daemon())
		w.try(h.AddPods(testContext(w.t)))
	}
	w.startFlows()

	if len(w.lab.Hosts()) > 2 && w.r.IntN(3) == 0 {
		w.stopFlows()
		w.away = w.lab.Host(3)
		w.log("the daemon of %s ends", w.away.Name())
		w.away.Daemon().Kill()
		w.startFlows()
	}
	for range steps {
		if w.kube == nil && w.r.IntN(2*steps) == 0 {
			w.changeMode()
			continue
		}
		n := w.nets[w.r.IntN(len(w.nets))]
		n.edit(n.burst()...)
	}
	for _, n := range w.nets {
		if n.now.next != "" { // leftovers of former configurations stay until the migration ends
			n.edit(n.now.finished(w.r))
		}
	}
	w.stopFlows()
	if h := w.away; h != nil {
		w.log("the daemon of %s starts", h.Name())
		w.away = nil
		start(w.t, h, w.options(h))
		w.settle()
		w.startFlows()
		w.stopFlows()
	}
	w.expectFewLines()
	w.log("compare with new hosts")
	expectLikeFresh(w.t, w.lab, w.options, w.nodes)
}

// expectFewLines expects that no host has logged the same line more than ten times for each act of the walk.
func (w *walk) expectFewLines() {
	w.t.Helper()
	number := regexp.MustCompile(`[0-9a-f]*[0-9][0-9a-f.:]*`)
	for _, h := range w.lab.Hosts() {
		count := map[string]int{}
		for _, d := range h.Daemons() {
			for line := range strings.Lines(d.Log()) {
				count[number.ReplaceAllString(line, "#")]++
			}
		}
		for line, n := range count {
			if n > 10*w.acts {
				w.t.Errorf("%s has logged %d times: %s", h.Name(), n, line)
			}
		}
	}
}

// nodes returns the annotations and conditions of the Nodes that a daemon sets.
func (w *walk) nodes() (lines []string) {
	if w.kube == nil {
		return nil
	}
	for i := range w.lab.Hosts() {
		n := w.kube.node(i + 1)
		lines = append(lines, n.Metadata.Name+" NetworkUnavailable "+n.networkUnavailable())
		for key, value := range n.Metadata.Annotations {
			lines = append(lines, fmt.Sprintf("%s %s = %s", n.Metadata.Name, key, value))
		}
	}
	return lines
}

// changeMode restarts the daemons with several networks in place of one, or the other way round.
func (w *walk) changeMode() {
	w.t.Helper()
	w.stopFlows()
	for _, h := range w.lab.Hosts() {
		w.try(h.RemovePods(testContext(w.t)))
	}

	w.nets, w.other = w.other, w.nets
	var names []string
	if w.other[0].name == "" {
		names = several
	}
	w.log("change to networks %q", names)
	w.lab.SetNetworks(names...)
	if w.nets == nil && names == nil {
		w.add("")
	} else if w.nets == nil {
		for _, name := range names {
			w.add(name)
		}
	}
	for _, n := range w.nets {
		n.put(n.now) // it may have been wiped
	}

	for _, i := range w.r.Perm(len(w.hosts())) {
		h := w.hosts()[i]
		w.pause(0, 1000)
		if w.r.IntN(2) == 0 {
			h.Daemon().Kill()
		} else {
			expectStop(w.t, h.Daemon())
		}
		start(w.t, h, w.options(h))
	}
	w.settle()
	w.startFlows()
}

func (w *walk) log(format string, args ...any) {
	w.acts++
	w.t.Logf("%7.3fs %s", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

// pause waits for a random number of milliseconds in a range.
func (w *walk) pause(from, to int) { pause(w.t, milliseconds(from+w.r.IntN(to-from))) }

func (w *walk) try(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// hosts returns the hosts of which the daemons run.
func (w *walk) hosts() []*lab.Host {
	return slices.DeleteFunc(w.lab.Hosts(), func(h *lab.Host) bool { return h == w.away })
}

// burst returns one or several random configurations that follow the present one. About one in three is a former one.
func (n *walkedNetwork) burst() []netConf {
	var confs []netConf
	for last := n.now; len(confs) == 0 || len(confs) < 4 && n.r.IntN(2) == 0; confs = append(confs, last) {
		past := slices.DeleteFunc(append(slices.Clone(n.past), confs...), func(c netConf) bool { return c == last })
		if len(past) > 0 && n.r.IntN(3) == 0 {
			last = past[max(0, len(past)-1-n.r.IntN(5))]
		} else {
			last = last.edited(n.r, slices.Index(n.nets, n))
			for n.kube != nil && !n.hasPodCIDRs(last) {
				last = n.now.edited(n.r, 0)
			}
		}
	}
	return confs
}

// hasPodCIDRs reports whether the networks of a configuration contain the podCIDRs of the Nodes.
func (n *walkedNetwork) hasPodCIDRs(c netConf) bool {
	return !strings.HasPrefix(c.v4, "10.6.") && !strings.HasPrefix(c.v6, "fd00:6:")
}

// edit puts configurations in a row. It may kill a daemon meanwhile, or cause a fault of the store. Then it waits until
// all hosts use the last one.
func (n *walkedNetwork) edit(confs ...netConf) {
	n.t.Helper()
	var kill, stop, freeze, fault func()
	if n.r.IntN(4) == 0 {
		if n.r.IntN(4) > 0 {
			kill = n.killDaemon
		} else {
			stop = n.stepClock
		}
	} else if n.r.IntN(6) == 0 {
		freeze = n.freezeDaemon
	}
	if n.kube == nil && n.r.IntN(6) == 0 {
		fault = n.fault()
	}
	when := n.r.IntN(len(confs))

	for _, o := range n.nets {
		next := []netConf{}
		if o == n {
			next = confs
		}
		for _, f := range dual {
			if why := o.mayLose(next, kill != nil || stop != nil || freeze != nil, stop != nil, f); why != "" && o.flows[f] != nil {
				n.log("%s %s may lose packets: %s", o.name, f, why)
				o.stopFlows(f)
			}
		}
	}
	for i, c := range confs {
		if i > 0 {
			n.pause(10, 500)
		}
		n.log("put %s %s", n.name, c)
		n.put(c)
		for _, act := range []func(){kill, stop, freeze, fault} {
			if act != nil && when == i {
				n.pause(0, 300)
				act()
			}
		}
	}
	n.settle()
	n.startFlows()
}

// put makes c the present configuration. In a cluster of Kubernetes each host gets it at another moment.
func (n *walkedNetwork) put(c netConf) {
	n.t.Helper()
	switch {
	case n.kube != nil:
		for _, i := range n.r.Perm(len(n.lab.Hosts())) {
			n.pause(0, 3000)
			n.kube.write(filepath.Base(n.file(n.lab.Hosts()[i])), []byte(c.String()))
		}
	case n.now.next != "" && c == n.now.migrated() && n.r.IntN(2) == 0:
		n.migrateFinish()
	default:
		putKey(n.t, etcdClient(n.t, n.lab), path.Join(lab.Prefix, n.name, "config"), c.String())
	}
	n.now = c
	n.past = append(n.past, c)
}

// migrateFinish ends a migration by flannelctl. A host whose daemon does not run would hold it up.
func (n *walkedNetwork) migrateFinish() {
	n.t.Helper()
	args := []string{"migrate", "finish", "--network=" + n.name}
	if n.away != nil {
		args = append(args, "--yes")
	}
	eventually(n.t, "flannelctl finishes the migration", func() error {
		out, err := flannelctl(n.t, n.lab.Host(1), args...)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	n.log("flannelctl %s", strings.Join(args, " "))
}

// killDaemon kills the daemon of a random host and starts it again.
func (w *walk) killDaemon() {
	h := w.hosts()[w.r.IntN(len(w.hosts()))]
	w.log("kill the daemon of %s", h.Name())
	h.Daemon().Kill()
	start(w.t, h, w.options(h))
}

// stepClock stops the daemon of a random host and starts it with another time, as after a boot without a real-time
// clock.
func (w *walk) stepClock() {
	h := w.hosts()[w.r.IntN(len(w.hosts()))]
	step := time.Duration(w.r.Int64N(int64(48*time.Hour))) - 24*time.Hour
	w.log("step the clock of %s by %s", h.Name(), step)
	expectStop(w.t, h.Daemon())
	w.try(stepClock(h, step))
	start(w.t, h, w.options(h))
}

// freezeDaemon freezes the daemon of a random host for up to five seconds.
func (w *walk) freezeDaemon() {
	h, duration := w.hosts()[w.r.IntN(len(w.hosts()))], milliseconds(w.r.IntN(5000))
	w.log("freeze the daemon of %s for %s", h.Name(), duration)
	w.try(h.Daemon().Signal(syscall.SIGSTOP))
	pause(w.t, duration)
	w.try(h.Daemon().Signal(syscall.SIGCONT))
}

// fault returns a function that causes a random fault of the store and ends it.
func (w *walk) fault() func() {
	e, duration := w.lab.Etcd(), milliseconds(w.r.IntN(2000))
	return []func(){
		func() {
			w.log("kill etcd for %s", duration)
			e.Kill()
			pause(w.t, duration)
			if e.Program == etcds[2] {
				w.log("upgrade etcd to %s", etcds[3])
				e.Program = etcds[3]
			}
			w.try(e.Start(testContext(w.t)))
		},
		func() {
			w.log("freeze etcd for %s", duration)
			w.try(e.Stop())
			pause(w.t, duration)
			w.try(e.Cont())
		},
		func() {
			w.log("etcd has no space for %s", duration)
			c := etcdClient(w.t, w.lab)
			_, err := etcdserverpb.NewMaintenanceClient(c.ActiveConnection()).Alarm(testContext(w.t),
				&etcdserverpb.AlarmRequest{Action: etcdserverpb.AlarmRequest_ACTIVATE, Alarm: etcdserverpb.AlarmType_NOSPACE})
			w.try(err)
			pause(w.t, duration)
			_, err = c.AlarmDisarm(testContext(w.t), &clientv3.AlarmMember{})
			w.try(err)
		},
		func() {
			w.log("compact etcd")
			c := etcdClient(w.t, w.lab)
			now, err := c.Get(testContext(w.t), lab.Prefix)
			w.try(err)
			_, err = c.Compact(testContext(w.t), now.Header.Revision, clientv3.WithCompactPhysical())
			w.try(err)
		},
		func() {
			w.log("wipe etcd")
			w.try(e.Wipe(testContext(w.t)))
			for _, n := range w.nets {
				n.put(n.now)
			}
		},
	}[w.r.IntN(5)]
}

// mayLose returns why packets of a family may be lost while hosts change from the present configuration to the last of
// confs. A host may not notice one of them before the next one replaces it. killed is set if a daemon does not run or act
// for some time, and stopped if that begins with a stop.
func (n *walkedNetwork) mayLose(confs []netConf, killed, stopped bool, f prefix.Family) string {
	confs = append([]netConf{n.now}, confs...)
	for i, from := range confs {
		if stopped && strings.Contains(from.backend+from.next, `"extension"`) {
			return "extension runs its ShutdownCommand, and all commands again"
		}
		if killed && from.inUserspace() {
			return "the daemon that carries packets is killed or frozen"
		}
		for _, to := range confs[i+1:] {
			if why := lossBetween(from, to, f); why != "" {
				return why
			}
		}
	}
	return ""
}

// settle waits until all hosts serve with the present configurations and have all peers in the kernel.
func (w *walk) settle() {
	w.t.Helper()
	for _, n := range w.nets {
		want, err := subnet.ParseConfig([]byte(n.now.String()))
		w.try(err)
		for _, h := range w.hosts() {
			eventually(w.t, h.Name()+" uses the last configuration "+n.name, func() error { return n.settled(h, want) })
		}
	}
}

func (n *walkedNetwork) settled(h *lab.Host, want subnet.Config) error {
	used, err := n.usedBy(h)
	if err != nil {
		return err
	}
	if n.away != nil { // its peers keep the former backend for it, see subnet.Finished
		used = used.Goal()
	}
	if changes := subnet.Changes(used, want); len(changes) > 0 {
		return fmt.Errorf("it needs the changes %q", changes)
	}
	r, err := reportOf(n.t, h, n.name)
	if err != nil {
		return err
	}
	serves := r.Network.Phase == "serving" || r.Network.Phase == "serving, and removing what a former configuration left"
	if !serves || !r.Ready || r.ConfigRejected != "" {
		return fmt.Errorf("ready %v %v, phase %q, rejected %q", r.Ready, r.Reasons, r.Network.Phase, r.ConfigRejected)
	}
	peers := slices.DeleteFunc(r.Peers, func(p status.Peer) bool { return n.isAway(p.Lease) })
	if len(peers) != len(n.hosts())-1 {
		return fmt.Errorf("%d peers, want %d", len(peers), len(n.hosts())-1)
	}
	for _, p := range peers {
		if p.State != status.InPlace || n.away == nil && p.NextType != want.NextType {
			return fmt.Errorf("peer %s is %s, next backend %q: %s", p.Key, p.State, p.NextType, p.Error)
		}
	}
	return nil
}

// isAway reports whether a lease is that of the host whose daemon does not run.
func (w *walk) isAway(l status.Lease) bool {
	return w.away != nil && slices.ContainsFunc(dual, func(f prefix.Family) bool { return slices.Contains(l.PublicIPs, w.away.Addr(f)) })
}

// usedBy returns the configuration in the state file of a host for a network. It returns an error if the host has not
// exactly one such file, or if the file cannot be read.
func (n *walkedNetwork) usedBy(h *lab.Host) (cfg subnet.Config, err error) {
	names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-????????????.json")) // not the files of backends
	if err != nil {
		return cfg, err
	}
	found := 0
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return cfg, err
		}
		var file struct {
			State struct {
				Name   string        `json:"name"`
				Config subnet.Config `json:"config"`
			} `json:"state"`
		}
		if err := json.Unmarshal(text, &file); err != nil {
			return cfg, err
		}
		if file.State.Name == n.name {
			cfg = file.State.Config
			found++
		}
	}
	if found != 1 {
		return cfg, fmt.Errorf("%d of the state files %q are those of network %q", found, names, n.name)
	}
	return cfg, nil
}

// pod returns the pod of the network on a host.
func (n *walkedNetwork) pod(h *lab.Host) *lab.Pod { return h.Pods()[slices.Index(n.nets, n)] }

// podFits reports whether the pod of a host has exactly the addresses that a new pod would have.
func (n *walkedNetwork) podFits(h *lab.Host) bool {
	n.t.Helper()
	r, err := reportOf(n.t, h, n.name)
	n.try(err)
	if len(h.Pods()) != len(n.nets) {
		return false
	}
	addrs := n.pod(h).Addrs()
	if len(addrs) != len(r.Lease.Subnets) {
		return false
	}
	for i, s := range r.Lease.Subnets {
		if !s.Contains(addrs[i]) {
			return false
		}
	}
	return true
}

// startFlows starts a flow between every two pods of a network, in each family without flows. Before that it replaces the
// pods if their addresses are not those of the present subnets.
func (w *walk) startFlows() {
	w.t.Helper()
	misfit := func(n *walkedNetwork) bool {
		return slices.ContainsFunc(w.hosts(), func(h *lab.Host) bool { return !n.podFits(h) })
	}
	if slices.ContainsFunc(w.nets, misfit) {
		w.stopFlows()
		for _, h := range w.hosts() {
			w.try(h.RemovePods(testContext(w.t)))
			w.try(h.AddPods(testContext(w.t)))
		}
	}
	for _, n := range w.nets {
		for _, f := range dual {
			if n.flows[f] == nil && n.now.network(f) != "" && n.now.routed() {
				n.startFlowsOf(f)
			}
		}
	}
}

func (n *walkedNetwork) startFlowsOf(f prefix.Family) {
	n.t.Helper()
	for _, a := range n.hosts() {
		for _, b := range n.hosts() {
			if a == b {
				continue
			}
			from, to := n.pod(a), n.pod(b)
			name := fmt.Sprintf("%s to %s by %s", from.Name(), to.Name(), f)
			eventually(n.t, name, func() error {
				_, err := from.Ping(testContext(n.t), to.Addr(f), lab.Echo{})
				return err
			})
			one, err := from.StartFlow(testContext(n.t), to, f, 100)
			n.try(err)
			n.t.Cleanup(func() { one.Stop() })
			n.flows[f] = append(n.flows[f], flow{one, name})
		}
	}
}

// stopFlows stops all flows, which must not have lost a packet.
func (w *walk) stopFlows() {
	w.t.Helper()
	for _, n := range w.nets {
		n.stopFlows(prefix.IPv4)
		n.stopFlows(prefix.IPv6)
	}
}

func (n *walkedNetwork) stopFlows(f prefix.Family) {
	n.t.Helper()
	expectNothingLost(n.t, n.flows[f])
	delete(n.flows, f)
	if n.t.Failed() {
		n.t.FailNow()
	}
}

// seed returns the seed of a random test: that of the flag, or see versionSeed.
func seed(t *testing.T) uint64 {
	t.Helper()
	if *walkSeed != 0 {
		return *walkSeed
	}
	return versionSeed(t)
}

// versionSeed returns a seed of a random test: each version of the daemon gets another one, but one version
// always gets the same, so that a failure comes back until its cause is mended.
func versionSeed(t *testing.T) uint64 {
	t.Helper()
	version, err := exec.CommandContext(t.Context(), flanneld(), "--version").Output()
	if err != nil {
		t.Fatalf("ask flanneld for its version: %v", err)
	}

	h := fnv.New64a()
	h.Write(version)
	h.Write([]byte(t.Name()))
	return h.Sum64()
}

// TestWalk takes short walks: one that is the same each time, and one that each version takes in another way.
func TestWalk(t *testing.T) {
	t.Parallel()
	for _, seed := range []uint64{1, versionSeed(t) &^ 2} { // make test does not build the etcds of other seeds
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			walkWithEtcd(t, seed, *walkSteps)
		})
	}
}

// TestWalks takes walks, one after the other, for the time -for. Only -seed selects the first one.
//
//stages:rest TestWalk takes walks too
func TestWalks(t *testing.T) {
	seed := seed(t)
	for began := time.Now(); ; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { walkWithEtcd(t, seed, *walkSteps) })
		if time.Since(began) >= *walkFor {
			return
		}
	}
}

// TestKubeWalk takes a walk in a cluster of Kubernetes.
//
//stages:rest the daemons read the file of the configuration every ten seconds
func TestKubeWalk(t *testing.T) {
	t.Parallel()
	seed := seed(t)
	t.Logf("seed %d", seed)
	w := newWalk(t, seed)
	n := w.add("")
	w.kube = newCluster(t, lab.Config{Hosts: 2, Families: dual}, n.now.backend)
	w.lab = w.kube.Lab
	for _, h := range w.lab.Hosts() {
		w.kube.write(filepath.Base(w.file(h)), []byte(n.now.String()))
	}
	w.take(4)
}

// TestKilledInUserspace kills a daemon that has left wireguard in user space, but still has its devices, because the
// lease of another host is for them. The devices, their control sockets and their ports must not stay.
func TestKilledInUserspace(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(userspace))
	startAll(t, l, lab.FlanneldOptions{})
	l.Host(2).Daemon().Kill()
	putNetwork(t, l, dual, hostGW)
	expectLog(t, l.Host(1).Daemon(), followed)
	l.Host(1).Daemon().Kill()
	for _, h := range l.Hosts() {
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectPeersProgrammed(t, l)
	expectLikeFresh(t, l, func(*lab.Host) lab.FlanneldOptions { return lab.FlanneldOptions{} })
}

// TestLossBetween checks when packets may be lost while the configuration changes.
func TestLossBetween(t *testing.T) {
	const vxlan, udp = `{"Type":"vxlan"}`, `{"Type":"udp"}`
	base := netConf{v4: "10.5.0.0/16", v6: "fd00:5::/48", backend: vxlan}
	change := func(f func(*netConf)) netConf { c := base; f(&c); return c }
	migrating := change(func(c *netConf) { c.next = hostGW })
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
		{"another backend", base, change(func(c *netConf) { c.backend = hostGW }), true, true},
		{"migration starts", base, migrating, false, false},
		{"migration ends", migrating, change(func(c *netConf) { c.backend = hostGW }), false, false},
		{"migration is aborted", migrating, base, false, false},
		{"back to both backends", change(func(c *netConf) { c.backend = hostGW }), migrating, false, false},
		{"migration to a third backend", migrating, change(func(c *netConf) { c.backend = udp }), true, true},
		{"to alloc", base, change(func(c *netConf) { c.backend = alloc }), true, true},
		{"away from alloc", change(func(c *netConf) { c.backend = alloc }), base, true, true},
		{"family of udp", change(func(c *netConf) { c.backend, c.v6 = udp, "" }), change(func(c *netConf) { c.backend = udp }), true, true},
	} {
		for f, want := range map[prefix.Family]bool{prefix.IPv4: tt.v4, prefix.IPv6: tt.v6} {
			if why := lossBetween(tt.from, tt.to, f); (why != "") != want {
				t.Errorf("%s: loss of %s %q, want one: %v", tt.name, f, why, want)
			}
		}
	}
}
