// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
)

// stopTime is the longest time that tests allow from the signal to the end of the process. The
// daemon itself takes at most 2 s. If the kernel is busy with the namespaces of other tests, it
// takes seconds more to close the sockets of the process.
const stopTime = 6 * time.Second

// expectStop asks the daemon to stop. If the daemon does not exit within stopTime with code 0,
// the test fails and expectStop kills the daemon.
func expectStop(t *testing.T, d *lab.Daemon) {
	t.Helper()
	ctx, cancel := context.WithTimeout(testContext(t), stopTime)
	defer cancel()
	if code, err := d.Stop(ctx); err != nil || code != 0 {
		t.Errorf("exit code %d, %v, want 0; its log:\n%s", code, err, d.Log())
		d.Kill()
	}
}

// datapath returns those of the texts in wanted that vxlanKernelState contains. If flannel.1
// exists, datapath appends a text with the number of the device, which would differ if the device
// was created again.
func datapath(t *testing.T, h *lab.Host, wanted []string) []string {
	t.Helper()
	state, err := vxlanKernelState(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	have := slices.DeleteFunc(slices.Clone(wanted), func(line string) bool { return !strings.Contains(state, line) })
	if dev, err := h.Exec(testContext(t), "ip", "-o", "link", "show", "flannel.1"); err == nil {
		number, _, _ := strings.Cut(string(dev), ":")
		have = append(have, "device "+number)
	}
	return have
}

// TestStopAtAnyMoment starts and stops one daemon after another. Each daemon runs a bit longer than
// the one before. None may remove an entry that an earlier daemon has written to the kernel.
//
//stages:rest it stops a daemon at many moments
func TestStopAtAnyMoment(t *testing.T) {
	t.Parallel()
	const step, last = 10 * time.Millisecond, 400 * time.Millisecond
	const mac = "02:00:00:00:00:aa"
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	putKey(t, etcdClient(t, l), subnets+"10.5.200.0-24", vxlanLease("192.168.77.200", mac))
	h, wanted := l.Host(1), datapathLines("10.5.200.0/24", "192.168.77.200", mac)
	var before []string
	for delay := time.Duration(0); delay <= last; delay += step {
		if delay/step%2 == 0 { // every other start is without a last known state
			for _, dir := range []string{"/var/lib/flannel", "/run/flannel"} {
				if err := os.RemoveAll(h.Path(dir)); err != nil {
					t.Fatal(err)
				}
			}
		}
		d := start(t, h, lab.FlanneldOptions{})
		expectLog(t, d, "flanneld starts")
		pause(t, delay)
		expectStop(t, d)
		now := datapath(t, h, wanted)
		for _, line := range before {
			if !slices.Contains(now, line) {
				t.Fatalf("a daemon that was stopped %v after its start has removed %q; its log:\n%s", delay, line, d.Log())
			}
		}
		before = now
	}
	if len(before) != len(wanted)+1 {
		t.Errorf("no run has programmed all entries, only %q", before)
	}
}

// TestStopWhileTheStoreHangs checks that daemons stop in time although their store does not
// answer, or is not there.
func TestStopWhileTheStoreHangs(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	if err := l.Etcd().Stop(); err != nil {
		t.Fatal(err)
	}
	d := start(t, l.Host(2), lab.FlanneldOptions{})
	expectLog(t, d, "flanneld starts")
	pause(t, time.Second)
	expectStop(t, d)
	expectStop(t, l.Host(1).Daemon())

	l.Etcd().Kill()
	d = start(t, l.Host(2), lab.FlanneldOptions{})
	expectLog(t, d, "etcd is not usable")
	expectStop(t, d)
	d = start(t, l.Host(1), lab.FlanneldOptions{}) // this host has a last known state
	expectLog(t, d, "last known state")
	expectStop(t, d)
}

// supervisor receives the notifications of a host's daemons in the place of systemd.
type supervisor struct {
	conn *net.UnixConn
	path string
}

func newSupervisor(t *testing.T, h *lab.Host, socket string) supervisor {
	t.Helper()
	s := supervisor{path: "/run/" + socket}
	err := h.Do(testContext(t), func() (err error) {
		s.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path, Net: "unixgram"})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.conn.Close() })
	return s
}

func (s supervisor) env(more ...string) []string { return append(more, "NOTIFY_SOCKET="+s.path) }

// fill fills the queue of the socket, so that no message of a daemon has room.
func (s supervisor) fill(t *testing.T, h *lab.Host) {
	t.Helper()
	var conn *net.UnixConn
	err := h.Do(testContext(t), func() (err error) {
		conn, err = net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.path, Net: "unixgram"})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for err == nil {
		if err = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)); err == nil {
			_, err = conn.Write([]byte("full"))
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
}

// next returns the next notification, such as READY=1, or an empty string if there is none within
// the time wait.
func (s supervisor) next(t *testing.T, wait time.Duration) string {
	t.Helper()
	if err := s.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 256)
	n, err := s.conn.Read(buf)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	return string(buf[:n])
}

func (s supervisor) expect(t *testing.T, want string) {
	t.Helper()
	if got := s.next(t, patience); got != want {
		t.Errorf("notification %q, want %q", got, want)
	}
}

// TestStopRightAfterReady stops daemons right after READY=1, or a few milliseconds later. By then
// they must have written their routes and entries to the kernel, and their subnet file: READY=1
// must not come too early.
//
//stages:rest it stops a daemon again and again
func TestStopRightAfterReady(t *testing.T) {
	t.Parallel()
	const mac = "02:00:00:00:00:aa"
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	putKey(t, etcdClient(t, l), subnets+"10.5.200.0-24", vxlanLease("192.168.77.200", mac))
	h, wanted := l.Host(1), datapathLines("10.5.200.0/24", "192.168.77.200", mac)
	s := newSupervisor(t, h, "notify")
	for _, ms := range []int{0, 0, 1, 2, 5, 10, 20} {
		delay := time.Duration(ms) * time.Millisecond
		d := start(t, h, lab.FlanneldOptions{Env: s.env()})
		s.expect(t, "READY=1")
		pause(t, delay)
		expectStop(t, d)
		s.expect(t, "STOPPING=1")
		if have := datapath(t, h, wanted); len(have) != len(wanted)+1 {
			t.Errorf("%v after READY=1 the kernel contains only %q", delay, have)
		}
		if _, err := os.Stat(h.Path(lab.SubnetFile)); err != nil {
			t.Errorf("%v after READY=1: %v", delay, err)
		}
	}
}

// TestWatchdog checks that the median pause between two WATCHDOG=1 is at most three quarters of
// the watchdog's interval. On a busy machine single notifications are late, so the test does not
// check each pause.
func TestWatchdog(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	s := newSupervisor(t, l.Host(1), "notify")
	const interval = 400 * time.Millisecond
	d := start(t, l.Host(1), lab.FlanneldOptions{Env: s.env(fmt.Sprintf("WATCHDOG_USEC=%d", interval.Microseconds()))})
	notified := map[string]int{}
	var pauses []time.Duration // before each WATCHDOG=1; the first pause includes the start
	last := time.Now()
	for deadline := last.Add(patience); (notified["READY=1"] == 0 || len(pauses) < 9) && time.Now().Before(deadline); {
		n := s.next(t, patience)
		notified[n]++
		if n == "WATCHDOG=1" {
			now := time.Now()
			pauses, last = append(pauses, now.Sub(last)), now
		}
	}
	slices.Sort(pauses)
	if notified["READY=1"] != 1 || len(notified) != 2 || len(pauses) < 9 || pauses[len(pauses)/2] > interval*3/4 {
		t.Errorf("notifications %v, want one READY=1, and a WATCHDOG=1 in %v: the pauses were %v", notified, interval*3/4, pauses)
	}
	expectStop(t, d)
}

// blocking is a backend whose main loop blocks after the call of block.
const blocking = `{"Type":"wireguard","Implementation":"userspace","PSKFile":"` + pskFile + `"}`

// startBlocking starts a daemon with the backend blocking, and waits until it is ready.
func startBlocking(t *testing.T, h *lab.Host, o lab.FlanneldOptions) *lab.Daemon {
	t.Helper()
	o.Args = append(o.Args, "--resync=1s")
	key := strings.Repeat("A", 43) + "=" // 32 bytes
	if err := errors.Join(os.RemoveAll(h.Path(pskFile)), os.WriteFile(h.Path(pskFile), []byte(key), 0o600)); err != nil {
		t.Fatal(err)
	}
	return startOne(t, h, o)
}

// block replaces the file of the preshared key by a FIFO without a writer. Each pass of the main loop
// opens the file, which then blocks.
func block(t *testing.T, h *lab.Host) {
	t.Helper()
	if err := errors.Join(os.Remove(h.Path(pskFile)), unix.Mkfifo(h.Path(pskFile), 0o600)); err != nil {
		t.Fatal(err)
	}
	pause(t, 2*time.Second) // the next pass is a second later
}

// TestDeafSupervisor checks that a daemon does its work and stops in time although the supervisor
// never reads from its socket, whose queue is full.
func TestDeafSupervisor(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("udp"))
	for _, h := range l.Hosts() {
		deaf := newSupervisor(t, h, "notify")
		deaf.fill(t, h)
		d := start(t, h, lab.FlanneldOptions{Env: deaf.env("WATCHDOG_USEC=10000")})
		expectReady(t, d)
	}
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
	putConfig(t, l, `{"Type":"udp","Port":7}`)
	for _, h := range l.Hosts() {
		eventually(t, h.Name()+" uses the other port", func() error {
			if devices := fmt.Sprint(statusOf(t, h).Network.Devices); len(linesWith(h.Daemon(), followed)) != 1 {
				return fmt.Errorf("devices %s, and the change was not followed once", devices)
			}
			return nil
		})
	}
	expectMatrix(t, l)
	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
		expectOnce(t, h.Daemon(), "systemd does not keep the device")
	}
}

// TestMainLoopHangs checks that /healthz reports a main loop that makes no progress, so that a
// liveness probe can restart the daemon.
//
//stages:rest it waits for the watchdog
func TestMainLoopHangs(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, blocking)
	const most = time.Minute + 2*time.Second // with this resync, the main loop counts as healthy for this time after its last round
	begin := time.Now()
	d := startBlocking(t, l.Host(1), lab.FlanneldOptions{})
	block(t, l.Host(1))
	within(t, most+patience, "/healthz", func() error {
		status, body, _ := d.Get(testContext(t), "/healthz")
		if status != http.StatusServiceUnavailable || !strings.Contains(body, "main loop stands still") {
			return fmt.Errorf("%d %q", status, body)
		}
		return nil
	})
	if took := time.Since(begin); took < most {
		t.Errorf("reported after %v, want at least %v", took, most)
	}
	d.Kill()
}

// TestSecondSignalKills checks that a daemon stops in time although one of its goroutines blocks,
// and that a second signal kills it at once.
func TestSecondSignalKills(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, blocking)
	blocked := func() *lab.Daemon {
		t.Helper()
		d := startBlocking(t, l.Host(1), lab.FlanneldOptions{})
		block(t, l.Host(1))
		return d
	}
	d := blocked()
	expectStop(t, d)
	expectOnce(t, d, "not everything has ended in time")

	d = blocked()
	if err := d.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	pause(t, 300*time.Millisecond)
	if err := d.Ended(); err != nil {
		t.Fatalf("the daemon has ended after the first signal: %v", err)
	}
	second := time.Now()
	if err := d.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	code, err := d.Wait(testContext(t))
	if took := time.Since(second); err != nil || code != -1 || took > 3*time.Second {
		t.Errorf("exit code %d after %v (%v), want -1 at once", code, took, err)
	}
}

// former is the path of a flanneld of another version, for tests of an upgrade. It is empty if hosts are to run
// this version only.
var former = flag.String("former", "", "path of a flanneld of another version that hosts run in turns with this one")

// TestRestartsUnderTraffic checks that no packet is lost while daemons are killed or
// stopped and start again.
func TestRestartsUnderTraffic(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw"} {
		t.Run(backend, func(t *testing.T) { testRestartsUnderTraffic(t, backend) })
	}
}

// testRestartsUnderTraffic restarts the daemons of two hosts in turns. With -former both start with the former
// version, and change to the other version with each restart. They end with this version, as after an upgrade
// that was rolled back once.
func testRestartsUnderTraffic(t *testing.T, backend string) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(backend))
	startAll(t, l, lab.FlanneldOptions{Path: *former})
	flows := startFlows(t, l, 100)

	kills := 4
	if emulated() { // a start takes ten seconds there
		kills = 2
	}
	for i := range kills + 1 {
		version := ""
		if i%2 == 1 {
			version = *former
		}
		for _, h := range l.Hosts() {
			if i < kills {
				h.Daemon().Kill()
			} else {
				expectStop(t, h.Daemon())
			}
			pause(t, 200*time.Millisecond)
			startOne(t, h, lab.FlanneldOptions{Path: version})
		}
	}

	expectNothingLost(t, flows)
	expectMatrix(t, l)
}

// TestRefusesToRun checks that a daemon with invalid settings exits with one line that names the
// setting, and leaves neither a device nor a subnet file.
func TestRefusesToRun(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"carrier-pigeon"}`)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args, env []string
		want      string
	}{
		{args: []string{"--ifcae=eth0"}, want: "unknown flag --ifcae: did you mean --iface?"},
		{args: []string{"--healthz-port=http"}, want: `--healthz-port "http" is invalid: expected a port from 0 to 65535`},
		{env: []string{"FLANNELD_RESYNC=-5m"}, want: `FLANNELD_RESYNC "-5m" is invalid`},
		{args: []string{"start"}, want: `unexpected argument "start"`},
		{args: []string{"--etcd-cafile=/missing"}, want: `--etcd-cafile "/missing" cannot be read: no such file or directory`},
		{args: []string{"--etcd-cafile=" + file}, want: file + " holds no certificate"},
		{args: []string{"--firewall=ufw"}, want: `--firewall "ufw" is invalid: expected config or auto or iptables or nftables`},
		{args: []string{"--iface=eth7", "--iface-wait=0s"}, want: "eth7"},
		{want: `unknown backend type \"carrier-pigeon\": Backend.Type must be one of ali-vpc, `},
	} {
		t.Run(strings.Join(append(tt.args, tt.env...), " "), func(t *testing.T) {
			expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: tt.args, Env: tt.env}), tt.want)
		})
	}
	if links, err := l.Host(1).Exec(testContext(t), "ip", "-o", "link"); err != nil || strings.Contains(string(links), "flannel") {
		t.Errorf("%v, want no flannel device among the links:\n%s", err, links)
	}
	if _, err := os.Stat(l.Host(1).Path(lab.SubnetFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("subnet file: %v, want none", err)
	}
}

// TestHelpAndVersion checks that the flags for help and version print to stderr and not to
// stdout, as flannel does.
func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	for arg, want := range map[string]string{
		"--help":    `^flanneld gives every host(?s:.*)--etcd-endpoints=(?s:.*)FLANNELD_ETCD_ENDPOINTS`,
		"-h":        `^flanneld gives every host`,
		"--version": `^\S+ commit \S+ go1\.\S+ linux/\w+\n$`,
		"-version":  `^\S+ commit \S+ go1\.\S+ linux/\w+\n$`,
	} {
		var stdout, stderr bytes.Buffer
		cmd := exec.CommandContext(testContext(t), flanneld(), arg)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil {
			t.Errorf("%s: %v", arg, err)
		}
		if !regexp.MustCompile(want).Match(stderr.Bytes()) || stdout.Len() > 0 {
			t.Errorf("%s: got %q on stderr and %q on stdout, want %s on stderr", arg, &stderr, &stdout, want)
		}
	}
}

// TestStdoutIsEmpty checks that a daemon never writes to stdout, also while the store is
// away.
func TestStdoutIsEmpty(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	l.Etcd().Kill()
	h, ctx := l.Host(1), testContext(t)
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, flanneld(), "--etcd-endpoints="+h.EtcdEndpoint())
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { // the thread that starts the process must also wait for it, because the kernel sends Pdeathsig to the process when that thread ends
		done <- h.Do(ctx, func() error {
			err := cmd.Start()
			close(started)
			return errors.Join(err, cmd.Wait())
		})
	}()
	<-started
	pause(t, 2*time.Second)
	if err := l.Etcd().Start(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "subnet file", func() error {
		_, err := os.Stat(h.Path(lab.SubnetFile))
		return err
	})
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || stdout.Len() > 0 {
		t.Errorf("%v, stdout %q, stderr:\n%s", err, &stdout, &stderr)
	}
}

// TestLeaseLostToAnotherNode checks that the daemon ends if its subnet belongs to another
// host, because its pods would have the addresses of that host's pods.
func TestLeaseLostToAnotherNode(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	d := startOne(t, l.Host(1), lab.FlanneldOptions{})
	own := leaseOf(t, l, l.Host(1))
	taken := vxlanLease("192.168.77.99", "02:00:00:00:00:99")
	putKey(t, etcdClient(t, l), subnets+own.Key, taken)
	expectFailure(t, d, "subnet lease lost", own.Key, "192.168.77.99")
	if now := leases(t, l); len(now) != 1 || now[0].Value != taken {
		t.Errorf("leases are %v, want only the new owner's", now)
	}
}
