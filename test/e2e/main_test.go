// SPDX-License-Identifier: Apache-2.0

// Package e2e tests real daemons on the hosts of a lab, with a real etcd or Kubernetes
// API server and real traffic. It checks what operators and pods notice.
package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// patience limits the waits of tests, unless they give another limit. It is much longer than anything
// normally takes.
const patience = 60 * time.Second

// TestMain runs the tests. It exits with code 1 if the user is not root or a binary is missing,
// because all tests would fail. In a process that a lab has started, it runs the lab's store instead.
func TestMain(m *testing.M) {
	lab.RunChild()
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make network namespaces: run them as root")
		os.Exit(1)
	}
	for _, name := range []string{"flanneld", "flannelctl", "flannel-lab"} {
		if _, err := os.Stat(built(name)); err != nil {
			fmt.Fprintln(os.Stderr, "no program to test (make build):", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// flanneld returns the path of the binary under test.
func flanneld() string { return built("flanneld") }

// built returns the absolute path of a binary that make build builds.
func built(name string) string {
	path, err := filepath.Abs(filepath.Join("../../bin", name))
	if err != nil {
		return ""
	}
	return path
}

// writeProgram writes a file that may be executed at once. Meanwhile it prevents other tests from
// starting a process: that process would inherit the open file, and the kernel does not execute a
// file that a process has open for writing.
func writeProgram(path string, text []byte, mode os.FileMode) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, mode)
}

// The address families of a lab.
var (
	v4   = []prefix.Family{prefix.IPv4}
	v6   = []prefix.Family{prefix.IPv6}
	dual = []prefix.Family{prefix.IPv4, prefix.IPv6}
)

func familiesName(families []prefix.Family) string {
	switch {
	case len(families) == 2:
		return "dual"
	case families[0] == prefix.IPv6:
		return "IPv6"
	default:
		return "IPv4"
	}
}

// testContext returns a context that ends with the test, or after patience if that is earlier.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// userspace is the argument of backendConfig for wireguard in user space.
const userspace = "wireguard in userspace"

// backendConfig returns the value of the key Backend of a network configuration. backend is
// a type or userspace.
func backendConfig(backend string) string {
	if backend == userspace {
		return `{"Type":"wireguard","Implementation":"userspace"}`
	}
	return fmt.Sprintf(`{"Type":%q}`, backend)
}

// newLab builds a lab, and writes a network configuration to the store: cfg.Network, or one with the
// JSON object backend if there is none. If both are empty, the store stays empty. newLab starts no
// daemons. When the test ends, it fails the test if a daemon has crashed. If the test has failed, it
// also prints the logs of all daemons.
func newLab(t *testing.T, cfg lab.Config, backend string) *lab.Lab {
	t.Helper()
	if cfg.Families == nil {
		cfg.Families = v4
	}
	if backend != "" && cfg.Network == nil {
		network, err := lab.NetworkConfig(cfg.Families, json.RawMessage(backend))
		if err != nil {
			t.Fatal(err)
		}
		cfg.Network = reserveSubnetsFrom200(t, network)
	}
	cfg.Flanneld = flanneld()
	cfg.Etcd.Program = cmp.Or(cfg.Etcd.Program, built("flannel-lab"))
	// The store has little to do. With several threads, most of its CPU time would be spent on waking
	// them.
	cfg.Etcd.Env = []string{"GOMAXPROCS=1"}
	l, err := lab.New(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	t.Cleanup(func() {
		for _, h := range l.Hosts() { // traffic alone does not show a crash, because the kernel still forwards
			for _, d := range h.Daemons() {
				if log := d.Log(); strings.Contains(log, "panic: ") || strings.Contains(log, "fatal error: ") {
					t.Errorf("flanneld on %s has crashed:\n%s", h.Name(), log)
				}
			}
		}
		if !t.Failed() {
			return
		}
		for _, h := range l.Hosts() {
			for i, d := range h.Daemons() {
				t.Logf("log of daemon %d of %s:\n%s", i+1, h.Name(), d.Log())
			}
		}
	})
	return l
}

// putNetwork replaces the lab's network configuration by one for these address families. backend is
// the JSON object of its key Backend.
func putNetwork(t *testing.T, l *lab.Lab, families []prefix.Family, backend string) {
	t.Helper()
	network, err := lab.NetworkConfig(families, json.RawMessage(backend))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.PutNetwork(testContext(t), network); err != nil {
		t.Fatal(err)
	}
}

// reserveSubnetsFrom200 returns the network configuration with a SubnetMax that keeps hosts from the
// IPv4 subnets from 10.5.200.0/24 on. Tests give these to peers that they add to the store. A
// configuration without IPv4 stays as it is.
func reserveSubnetsFrom200(t *testing.T, network json.RawMessage) json.RawMessage {
	t.Helper()
	var keys map[string]any
	if err := json.Unmarshal(network, &keys); err != nil {
		t.Fatal(err)
	}
	if _, ok := keys["Network"]; ok {
		keys["SubnetMax"] = "10.5.199.0"
	}
	network, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	return network
}

// startAll starts a daemon on every host and waits until all are ready. Then it adds a pod on every
// host, in each network of the lab.
func startAll(t *testing.T, l *lab.Lab, o lab.FlanneldOptions) {
	t.Helper()
	ctx := testContext(t)
	if err := l.StartFlanneld(ctx, o); err != nil {
		t.Fatal(err)
	}
	if err := l.AddPods(ctx); err != nil {
		t.Fatal(err)
	}
}

// startOne starts a daemon on h and waits until it is ready.
func startOne(t *testing.T, h *lab.Host, o lab.FlanneldOptions) *lab.Daemon {
	t.Helper()
	ctx := testContext(t)
	d, err := h.StartFlanneld(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return d
}

// start starts a daemon on h and does not wait until it is ready.
func start(t *testing.T, h *lab.Host, o lab.FlanneldOptions) *lab.Daemon {
	t.Helper()
	d, err := h.StartFlanneld(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// expectReady waits until the daemon is ready.
func expectReady(t *testing.T, d *lab.Daemon) {
	t.Helper()
	if err := d.Ready(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

// expectLog waits until the daemon's log contains text.
func expectLog(t *testing.T, d *lab.Daemon, text string) {
	t.Helper()
	if err := d.WaitLog(testContext(t), text); err != nil {
		t.Fatal(err)
	}
}

// linesWith returns the lines of the daemon's log that contain text.
func linesWith(d *lab.Daemon, text string) []string {
	var found []string
	for line := range strings.Lines(d.Log()) {
		if strings.Contains(line, text) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// expectOnce waits until a line of a daemon's log contains text, and fails the test unless exactly one
// line does. It waits because the test reads the log through a pipe, which may be later than the answer to
// a request.
func expectOnce(t *testing.T, d *lab.Daemon, text string) {
	t.Helper()
	eventually(t, text, func() error {
		if len(linesWith(d, text)) == 0 {
			return errors.New("no line of the log contains it")
		}
		return nil
	})
	if lines := linesWith(d, text); len(lines) != 1 {
		t.Errorf("%d lines with %q, want one: %q", len(lines), text, lines)
	}
}

// expectFailure waits until the daemon ends. The test fails unless its exit code is 1, and one line
// of its log gives the reason and contains all of why.
func expectFailure(t *testing.T, d *lab.Daemon, why ...string) {
	t.Helper()
	code, err := d.Wait(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	lines := append(linesWith(d, "flanneld stops"), linesWith(d, "flanneld: ")...)
	if len(lines) != 1 {
		t.Errorf("%d lines with the reason of the exit, want one: %q", len(lines), lines)
	}
	for _, text := range why {
		if !strings.Contains(strings.Join(lines, "\n"), text) {
			t.Errorf("reason of the exit: %q, want it to contain %q", lines, text)
		}
	}
}

// pause waits for d, most often so that the test can check that something does not happen in this
// time.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
		t.Fatal(t.Context().Err())
	}
}

// flow is a steady stream of packets, none of which may be lost.
type flow struct {
	*lab.Flow
	name string
}

// startFlows waits until all pods reach each other. Then it starts a flow between every two pods, in
// both directions and in every family. Each flow sends rate packets per second, or fewer if all flows
// together would exceed what a small machine carries beside other tests.
func startFlows(t *testing.T, l *lab.Lab, rate int) []flow {
	t.Helper()
	const most = 2400 // packets per second of all flows together
	pods := len(l.Pods())
	return startFlowsAt(t, l, min(rate, most/(pods*(pods-1)*len(l.Families()))))
}

// startFlowsAt is startFlows without the limit for all flows together. Each flow sends rate packets
// per second.
func startFlowsAt(t *testing.T, l *lab.Lab, rate int) []flow {
	t.Helper()
	expectConverged(t, l)
	var flows []flow
	for _, from := range l.Pods() {
		for _, to := range l.Pods() {
			if from == to {
				continue
			}
			for _, f := range l.Families() {
				one, err := from.StartFlow(testContext(t), to, f, rate)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { one.Stop() })
				flows = append(flows, flow{one, fmt.Sprintf("%s to %s by %s", from.Name(), to.Name(), f)})
			}
		}
	}
	return flows
}

// expectNothingLost stops the flows. The test fails if a flow has lost a packet or sent none. It
// stops all flows at once, because each may wait for late packets.
func expectNothingLost(t *testing.T, flows []flow) {
	t.Helper()
	for i, s := range stopFlows(flows) {
		if len(s.Lost) > 0 || s.Sent == 0 {
			const clock = "15:04:05.000"
			t.Errorf("%s: %d of %d packets were lost, the first at %s, the last at %s, longest gap %v, last error: %v%s",
				flows[i].name, len(s.Lost), s.Sent, s.Begin.UTC().Format(clock), s.End.UTC().Format(clock), s.Gap, s.Err,
				droppedBetween(s.Begin, s.End.Add(time.Second)))
		}
	}
}

// stopFlows stops the flows and returns their statistics.
func stopFlows(flows []flow) []lab.FlowStats {
	results := make([]lab.FlowStats, len(flows))
	var stopping sync.WaitGroup
	for i, f := range flows {
		stopping.Go(func() { results[i] = f.Stop() })
	}
	stopping.Wait()
	return results
}

// nft runs commands of nft(8) in a namespace, such as those that add or delete a table.
func nft(t *testing.T, n *lab.Namespace, rules string) {
	t.Helper()
	if out, err := n.Exec(testContext(t), "nft", rules); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// expectConverged waits until every pod gets an answer from every other. It is needed after a start,
// because hosts may learn of each other after they are ready. It fails the test if there are less
// than two pods.
func expectConverged(t *testing.T, l *lab.Lab) {
	t.Helper()
	if len(l.Pods()) < 2 {
		t.Fatal("the lab has less than two pods")
	}
	eventually(t, "every pod reaches every other", func() error {
		for _, from := range l.Pods() {
			for _, to := range l.Pods() {
				for _, a := range to.Addrs() {
					if _, err := from.Ping(testContext(t), a, lab.Echo{}); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// expectPeersProgrammed waits until every daemon reports that its kernel has all entries for all
// other hosts of the lab. Unlike expectConverged it needs no pods.
func expectPeersProgrammed(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, h := range l.Hosts() {
		eventually(t, "the peers of "+h.Name(), func() error {
			peers := statusOf(t, h).Peers
			for _, p := range peers {
				if p.State != status.InPlace {
					return fmt.Errorf("%s is %s", p.Subnets, p.State)
				}
			}
			if want := len(l.Hosts()) - 1; len(peers) != want {
				return fmt.Errorf("%d peers, want %d", len(peers), want)
			}
			return nil
		})
	}
}

// expectMatrix first does what expectConverged does. Then it tests once how every pod reaches every
// other, by ping and by TCP. The test fails if any of that fails.
func expectMatrix(t *testing.T, l *lab.Lab) {
	t.Helper()
	expectConverged(t, l)
	expectMatrixOf(t, l, l.Families()...)
}

// expectMatrixOf expects that all pods reach each other by the given families.
func expectMatrixOf(t *testing.T, l *lab.Lab, families ...prefix.Family) {
	t.Helper()
	begin := time.Now()
	for _, c := range l.Matrix(testContext(t), families, 0) {
		if c.Err != nil {
			t.Errorf("%s to %s by %s: %v%s%s", c.From.Name(), c.To.Name(), c.Family, c.Err, sessions(t, l), droppedBetween(begin, time.Now()))
		}
	}
}

// eventually calls check again and again until it returns nil. If patience is over before, the test fails with
// the last error. The parameter what names the expected result in the message.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	within(t, patience, what, check)
}

// within is eventually with the given limit in place of patience.
func within(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		<-time.After(pollInterval())
	}
}
