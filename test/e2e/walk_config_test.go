// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/lab"
)

// edit is a network configuration that a test has chosen at random.
type edit struct {
	network string // IPv4 network
	more    string // further keys of the configuration
	backend string // keys of the backend
	path    string // the type of the backend, and VNI and port of vxlan; a change of it without a migration may lose packets
}

// config returns the configuration as JSON. If next is given, its backend is the NextBackend.
func (e edit) config(next ...edit) string {
	text := fmt.Sprintf(`{"Network":%q%s,"Backend":{%s}`, e.network, e.more, e.backend)
	for _, n := range next {
		text += `,"NextBackend":{` + n.backend + "}"
	}
	return text + "}"
}

// inUserspace reports whether the daemon carries the packets with this configuration.
func (e edit) inUserspace() bool { return e.path == "udp" }

// lossless reports whether no packet may be lost when hosts change from e to another configuration
// without a migration.
func (e edit) lossless(to edit) bool {
	if e.inUserspace() && e.network != to.network { // the daemon must start the backend again, and carries nothing meanwhile
		return false
	}
	return e.path == to.path
}

// device returns the device of the backend, or "" if the backend has none.
func (e edit) device() string {
	switch {
	case e.typeOf() == "host-gw":
		return ""
	case e.typeOf() == "udp":
		return "flannel0"
	case strings.Contains(e.path, "VNI"):
		return "flannel.7"
	}
	return "flannel.1"
}

// typeOf returns the type of the backend.
func (e edit) typeOf() string {
	name, _, _ := strings.Cut(e.path, ",")
	return name
}

// randomEdit returns a random configuration that differs from the one in before.
func randomEdit(r *rand.Rand, before edit) edit {
	pick := func(values ...string) string { return values[r.IntN(len(values))] }
	for {
		more := pick("", `,"EnableNFTables":true`) + pick("", `,"NonMasqueradeCIDRs":["192.0.2.0/24"]`) + pick("", `,"SubnetMin":"10.5.0.0"`)
		e := edit{network: pick("10.5.0.0/16", "10.4.0.0/15"), more: more}
		switch backend := pick("vxlan", "vxlan", "vxlan", "vxlan", "host-gw", "udp"); backend {
		case "vxlan":
			e.path = pick("", `,"VNI":7`) + pick("", `,"Port":8473`)
			e.backend = `"Type":"vxlan"` + e.path + pick("", `,"MTU":1400`, `,"MTU":1300`) + pick("", `,"DirectRouting":true`) + pick("", `,"ChecksumOffload":"off"`)
			e.path = "vxlan" + e.path
		case "udp":
			e.backend, e.path = `"Type":"udp","Mode":"userspace"`, backend
		default:
			e.backend, e.path = `"Type":"host-gw"`, backend
		}
		if e.config() != before.config() {
			return e
		}
	}
}

// randomNext returns a random configuration to which a network can migrate from before. The two differ
// only in their backends, and their backends have different devices.
func randomNext(r *rand.Rand, before edit) edit {
	for {
		next := randomEdit(r, before)
		next.network, next.more = before.network, before.more
		if next.device() != before.device() {
			return next
		}
	}
}

// usedBy returns the configuration in the state file of a host. It returns an error if the host has not
// exactly one such file, or if the file cannot be read.
func usedBy(h *lab.Host) (cfg subnet.Config, err error) {
	names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-????????????.json")) // the pattern excludes the files of backends
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

// eventuallyUsed waits until all hosts serve with the given configuration and have routes to all peers.
func eventuallyUsed(t *testing.T, l *lab.Lab, config string) {
	t.Helper()
	want, _, err := subnet.ParseConfig([]byte(config))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" uses "+config, func() error {
			used, err := usedBy(h)
			if err != nil {
				return err
			}
			if changes := subnet.Changes(used, want); len(changes) > 0 {
				return fmt.Errorf("it needs the changes %q", changes)
			}
			r := statusOf(t, h)
			serves := r.Network.Phase == "serving" || r.Network.Phase == "serving, and removing what a former configuration left"
			if !serves || !r.Ready || r.ConfigRejected != "" {
				return fmt.Errorf("ready %v %v, phase %q, rejected %q", r.Ready, r.Reasons, r.Network.Phase, r.ConfigRejected)
			}
			return nil
		})
	}
	expectPeersProgrammed(t, l)
}

// configWalk changes the configuration of a lab at random.
type configWalk struct {
	t     *testing.T
	r     *rand.Rand
	lab   *lab.Lab
	flows []flow
}

// walkRate is the number of packets per second of each flow of a configWalk.
const walkRate = 200

// walkOptions returns the options of the daemons of a configWalk.
func walkOptions() lab.FlanneldOptions { return lab.FlanneldOptions{Args: []string{"--ip-masq"}} }

// walkEdits changes the configuration at random. steps is the number of changes. If migrations is set, about
// one in four changes is a migration, which is finished or aborted. During some changes walkEdits kills a
// daemon. At the end all pods must reach each other. Packets may be lost only in three cases: a change without
// a migration gives them another path, a migration is finished before all hosts may have read of it, or the
// daemon carries the packets, and the daemon or its backend starts again.
func walkEdits(t *testing.T, hosts, steps int, migrations bool) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	now := edit{network: "10.5.0.0/16", backend: `"Type":"vxlan"`, path: "vxlan"}
	w := configWalk{t: t, r: rand.New(rand.NewPCG(seed, 1))}
	w.lab = newLab(t, lab.Config{Hosts: hosts, Network: json.RawMessage(now.config())}, "")
	startAll(t, w.lab, walkOptions())
	w.flows = startFlows(t, w.lab, walkRate)
	for range steps {
		step := w.edit
		if migrations && w.r.IntN(4) == 0 {
			step = w.migrate
		}
		before := now
		if now = step(before); t.Failed() {
			t.Fatalf("after %s and %s", before.config(), now.config())
		}
	}
	expectNothingLost(t, w.flows)
	expectMatrix(t, w.lab)
	for _, h := range w.lab.Hosts() {
		for _, p := range statusOf(t, h).Peers {
			if p.State != status.InPlace {
				t.Errorf("%s: peer %v is %s", h.Name(), p.Lease, p.State)
			}
		}
		expectNoFormer(t, h)
	}
}

// edit changes the configuration, which the parameter now contains, to a random one, which it returns. It waits
// until all hosts use the new one.
func (w *configWalk) edit(now edit) edit {
	next := randomEdit(w.r, now)
	if w.r.IntN(4) == 0 { // write an invalid configuration first
		text := next.config()
		w.put(text[:len(text)-1])
	}
	crash := w.r.IntN(10) == 0
	w.through(now.lossless(next) && (!crash || !now.inUserspace()), func() {
		w.put(next.config())
		if crash {
			w.crash()
		}
		eventuallyUsed(w.t, w.lab, next.config())
	})
	return next
}

// The moments at which configWalk.migrate ends a migration.
const (
	anyMoment     = iota // after at most 0.3 s: some hosts may not have read of the migration yet
	whenPublished        // when all hosts have published data for both backends
	whenMigrated         // when all hosts send by the next backend
	moments
)

// migrate starts a migration of the configuration, which the parameter now contains, and finishes or aborts it.
// It returns the resulting configuration when all hosts use it.
func (w *configWalk) migrate(now edit) edit {
	next, moment, finish, crash := randomNext(w.r, now), w.r.IntN(moments), w.r.IntN(2) == 0, w.r.IntN(4) == 0
	end := now
	if finish {
		end = next
	}
	// If a migration ends too early, hosts that have finished it cannot reach those that have not read
	// of it.
	lossless := !now.inUserspace() && !next.inUserspace() && (moment != anyMoment || !finish)
	w.through(lossless, func() {
		w.put(now.config(next))
		if crash {
			w.crash()
		}
		switch moment {
		case anyMoment:
			pause(w.t, milliseconds(w.r.IntN(300)))
		case whenPublished:
			eventuallyPublished(w.t, w.lab, len(w.lab.Hosts()), now.typeOf(), next.typeOf())
		case whenMigrated:
			eventuallyMigrated(w.t, w.lab, next.typeOf())
		}
		w.put(end.config())
		eventuallyUsed(w.t, w.lab, end.config())
	})
	if w.t.Failed() {
		w.t.Logf("migration from %s to %s, moment %d, finished %v, crash %v", now.config(), next.config(), moment, finish, crash)
	}
	return end
}

// put writes a configuration, which may be invalid.
func (w *configWalk) put(config string) {
	w.t.Helper()
	if err := w.lab.PutNetwork(testContext(w.t), json.RawMessage(config)); err != nil {
		w.t.Fatal(err)
	}
}

// crash waits up to 60 ms, kills the daemon of a random host, and starts it again.
func (w *configWalk) crash() {
	w.t.Helper()
	h := w.lab.Host(1 + w.r.IntN(len(w.lab.Hosts())))
	pause(w.t, milliseconds(w.r.IntN(60)))
	h.Daemon().Kill()
	startOne(w.t, h, walkOptions())
}

// through makes a change. If it is lossless, the flows go on meanwhile. Otherwise through stops them before the
// change, checks that nothing was lost until then, and starts new flows after it.
func (w *configWalk) through(lossless bool, change func()) {
	w.t.Helper()
	if !lossless {
		expectNothingLost(w.t, w.flows)
	}
	change()
	if !lossless {
		w.flows = startFlows(w.t, w.lab, walkRate)
	}
}

// TestConfigurationWalk makes 24 random changes of the configuration. See walkEdits.
//
//stages:rest it walks for a minute; TestConfigurationFollowedInPlace changes each key once
func TestConfigurationWalk(t *testing.T) {
	t.Parallel()
	walkEdits(t, 3, 24, false)
}

// TestConfigurationLongWalk is a longer TestConfigurationWalk on more hosts, with migrations.
//
//stages:rest it repeats TestConfigurationWalk in a longer form
func TestConfigurationLongWalk(t *testing.T) {
	t.Parallel()
	walkEdits(t, 4, 100, true)
}
