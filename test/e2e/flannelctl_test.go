// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// flannelctl runs flannelctl on h with the etcd of its lab. It returns the output, also that on
// stderr.
func flannelctl(t *testing.T, h *lab.Host, args ...string) (out string, err error) {
	t.Helper()
	text, err := h.Exec(testContext(t), "env", append([]string{"FLANNELD_ETCD_ENDPOINTS=" + h.EtcdEndpoint(), built("flannelctl")}, args...)...)
	return string(text), err
}

// watchFlannelctl runs flannelctl until the test ends. Then it sends SIGINT, and the test fails
// unless flannelctl exits with code 0. The result expect waits until flannelctl has printed a
// line that ends with sign and the texts of want, separated by spaces. Before them such a line
// has only a time. Each call of expect looks only at the lines after the one that the previous
// call has found.
func watchFlannelctl(t *testing.T, h *lab.Host, args ...string) (expect func(sign string, want ...string)) {
	t.Helper()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(built("flannelctl"), args...)
	cmd.Env = []string{"FLANNELD_ETCD_ENDPOINTS=" + h.EtcdEndpoint()}
	cmd.Stdout, cmd.Stderr = out, out
	if err := h.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Errorf("flannelctl %s ended before the test: %v", strings.Join(args, " "), err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("flannelctl %s after SIGINT: %v", strings.Join(args, " "), err)
		}
	})
	seen := 0
	return func(sign string, want ...string) {
		t.Helper()
		line := " " + strings.Join(append([]string{sign}, want...), " ") + "\n"
		eventually(t, fmt.Sprintf("flannelctl %s prints %q", strings.Join(args, " "), line), func() error {
			text, err := os.ReadFile(out.Name())
			if err != nil {
				return err
			}
			at := strings.Index(string(text[seen:]), line)
			if at < 0 {
				return fmt.Errorf("the output is\n%s\nwhose new part is\n%s", text, text[seen:])
			}
			seen += at + len(line)
			return nil
		})
	}
}

// expectFlannelctl runs flannelctl and returns its output. The test fails unless flannelctl
// succeeds and the output contains all of want.
func expectFlannelctl(t *testing.T, h *lab.Host, args []string, want ...string) string {
	t.Helper()
	out, err := flannelctl(t, h, args...)
	if err != nil {
		t.Fatalf("flannelctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	expectOutput(t, args, out, want)
	return out
}

// expectFlannelctlFails runs flannelctl and checks that its exit code is 1 and that its output
// contains all of want.
func expectFlannelctlFails(t *testing.T, h *lab.Host, args []string, want ...string) {
	t.Helper()
	expectFlannelctlExits(t, h, 1, args, want...)
}

// expectFlannelctlExits is expectFlannelctlFails for any exit code other than 0.
func expectFlannelctlExits(t *testing.T, h *lab.Host, code int, args []string, want ...string) {
	t.Helper()
	out, err := flannelctl(t, h, args...)
	if failure := (*exec.ExitError)(nil); !errors.As(err, &failure) || failure.ExitCode() != code {
		t.Errorf("flannelctl %s: %v, want exit code %d\n%s", strings.Join(args, " "), err, code, out)
	}
	expectOutput(t, args, out, want)
}

// expectOutput checks that the output of flannelctl contains all of want.
func expectOutput(t *testing.T, args []string, out string, want []string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("flannelctl %s does not print %q:\n%s", strings.Join(args, " "), w, out)
		}
	}
}

// TestFlannelctlOnLeases checks the commands leases, reserve, reservations, unreserve and
// revoke, and their effect on hosts.
func TestFlannelctlOnLeases(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	a, b := l.Host(1), l.Host(2)
	startOne(t, a, lab.FlanneldOptions{})
	own := statusOf(t, a).Lease
	key, ip := own.Key, a.Addr(v4[0]).String()

	expectFlannelctl(t, a, []string{"leases"}, own.Subnets[0].String(), ip, "vxlan", "23h59m")
	var listed []struct {
		Key        string
		TTLSeconds int
	}
	if err := json.Unmarshal([]byte(expectFlannelctl(t, a, []string{"leases", "-o", "json"})), &listed); err != nil || len(listed) != 1 || listed[0].Key != key || listed[0].TTLSeconds == 0 {
		t.Errorf("leases -o json: %+v, %v; want the lease %s with its TTL", listed, err, key)
	}
	expectFlannelctl(t, a, []string{"leases", "-o", "yaml"}, "key: "+key)
	expectFlannelctl(t, a, []string{"leases", "-o", "wide"}, "NEXT TYPE", " "+key+" ", `"VtepMAC":`)
	if out := expectFlannelctl(t, a, []string{"leases", "-o", "name"}); out != key+"\n" {
		t.Errorf("leases -o name prints %q, want %s", out, key)
	}

	expectLine := watchFlannelctl(t, a, "leases", "-w")
	expectLine("+", key, ip, "vxlan")

	// A host gets the subnet that is reserved for it.
	bIP := b.Addr(v4[0]).String()
	reserved, reservedKey := freeSubnet(t, a)
	expectFlannelctl(t, a, []string{"reserve", reserved, bIP}, reservedKey+" is reserved for "+bIP)
	expectFlannelctl(t, a, []string{"reservations"}, reserved, "never (reserved)")
	expectFlannelctl(t, a, []string{"reservations", "-o", "name"}, reservedKey+"\n")
	expectLine("+", reservedKey, bIP, "-")
	expectFlannelctlFails(t, a, []string{"reserve", reserved, "192.0.2.9"}, "belongs to "+bIP)
	expectFlannelctlFails(t, a, []string{"reserve", own.Subnets[0].String(), "192.0.2.9"}, "belongs to "+ip)
	expectFlannelctl(t, a, []string{"status"}, "1 leased, 1 reserved")
	if got := metric(t, a, `flannel_pool_subnets{state="reserved"}`); got != 1 {
		t.Errorf("flannel_pool_subnets counts %v reserved subnets, want 1", got)
	}
	startOne(t, b, lab.FlanneldOptions{})
	if got := statusOf(t, b).Lease; got.Key != reservedKey || !got.Permanent {
		t.Errorf("the lease of host 2 is %+v, want its reservation", got)
	}
	expectLine("~", reservedKey, bIP, "vxlan")

	// If a reservation is deleted, its running host takes the subnet again with a lease that
	// expires.
	expectFlannelctlFails(t, a, []string{"revoke", reserved}, "is a reservation")
	expectFlannelctl(t, a, []string{"unreserve", reserved}, "is no longer reserved")
	eventually(t, "host 2 takes its subnet again", func() error {
		if out := expectFlannelctl(t, a, []string{"leases"}); !strings.Contains(out, reserved) || strings.Contains(out, "never") {
			return fmt.Errorf("leases are\n%s\nwant %s, to expire", out, reserved)
		}
		return nil
	})

	expectFlannelctlFails(t, a, []string{"revoke", bIP}, bIP+" is an address: expected a subnet, such as "+reserved)
	expectFlannelctlFails(t, a, []string{"revoke", key}, "its host has taken it again: stop flanneld there first")
	expectLine("-", key, ip, "vxlan")
	expectLine("+", key, ip, "vxlan")

	// Revoking the lease of a dead host removes its routes from the other hosts.
	b.Daemon().Kill()
	expectFlannelctl(t, a, []string{"revoke", reserved}, "is revoked")
	expectLine("-", reservedKey, bIP, "vxlan")
	putKey(t, etcdClient(t, l), subnets+"10.5.210.0-24", "rubbish")
	expectLine("!", "10.5.210.0-24", "cannot be read")
	removeKey(t, etcdClient(t, l), subnets+"10.5.210.0-24")
	expectLine("-", "10.5.210.0-24", "- -")
	eventually(t, "the peer is removed", func() error {
		if n := len(statusOf(t, a).Peers); n != 0 {
			return fmt.Errorf("%d peers are left", n)
		}
		return nil
	})
	expectFlannelctlFails(t, a, []string{"revoke", reserved}, "no lease has "+reserved)
	expectFlannelctlFails(t, a, []string{"leases", "--etcd-endpoints", "http://127.0.0.1:1"}, "connection refused")
}

// freeSubnet returns a subnet that a host can get, such as 10.5.77.0/24, and its key. None of the
// given hosts has this subnet. Hosts choose subnets at random, so a fixed subnet could belong to
// a host already.
func freeSubnet(t *testing.T, hosts ...*lab.Host) (subnet, key string) {
	t.Helper()
	var taken []string
	for _, h := range hosts {
		taken = append(taken, statusOf(t, h).Lease.Key)
	}
	for third := 77; ; third++ {
		key = fmt.Sprintf("10.5.%d.0-24", third)
		if !slices.Contains(taken, key) {
			return strings.Replace(key, "-", "/", 1), key
		}
	}
}

// TestFlannelctlMovesAHost checks that a running host keeps its subnet if another subnet is
// reserved for it, and takes the reserved subnet at its next start.
//
//stages:rest TestFlannelctlOnLeases changes leases
func TestFlannelctlMovesAHost(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	startOne(t, l.Host(2), lab.FlanneldOptions{})
	h := l.Host(2)
	had, ip := statusOf(t, h).Lease.Key, h.Addr(v4[0]).String()
	reserved, reservedKey := freeSubnet(t, l.Hosts()...)
	expectFlannelctl(t, h, []string{"reserve", reserved, ip}, reservedKey+" is reserved for "+ip)
	pause(t, 2*time.Second) // enough time for the daemon to change its subnet, which would be wrong
	if now := statusOf(t, h).Lease.Key; now != had {
		t.Errorf("the running host has moved from %s to %s", had, now)
	}
	expectStop(t, h.Daemon())
	startOne(t, h, lab.FlanneldOptions{})
	if now := statusOf(t, h).Lease; now.Key != reservedKey || !now.Permanent {
		t.Errorf("after the restart the lease is %+v, want the reservation", now)
	}
	if out := expectFlannelctl(t, h, []string{"leases"}); strings.Contains(out, strings.Replace(had, "-", "/", 1)) {
		t.Errorf("the former lease %s is still there:\n%s", had, out)
	}
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, l)
}

// TestFlannelctlReservesWhatHostsCanGet checks that reserve refuses a subnet that no host could
// get under the configuration, and that without a configuration it accepts any subnet.
//
//stages:rest TestFlannelctlOnLeases reserves a subnet
func TestFlannelctlReservesWhatHostsCanGet(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: json.RawMessage(
		`{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0","EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"vxlan"}}`)}, "")
	h, etcd := l.Host(1), etcdClient(t, l)
	const ips, six = "192.0.2.9,2001:db8::9", ",fd00:5:0:7::/64"
	for _, tc := range []struct{ subnets, ips, want string }{
		{"10.9.7.0/24" + six, ips, "10.9.7.0/24 is not one of the subnets from 10.5.1.0/24 to 10.5.9.0/24"},
		{"10.5.10.0/24" + six, ips, "10.5.10.0/24 is not one of the subnets from"},
		{"10.5.0.0/24" + six, ips, "10.5.0.0/24 is not one of the subnets from"},
		{"10.5.7.0/25" + six, ips, "10.5.7.0/25 is not one of the subnets from"},
		{"10.5.7.0/24,fd00:6::/64", ips, "fd00:6::/64 is not one of the subnets from"},
		{"10.5.7.0/24", "192.0.2.9", "it has no IPv6 subnet"},
	} {
		expectFlannelctlFails(t, h, []string{"reserve", tc.subnets, tc.ips}, "flannelctl: reserve "+tc.subnets+": "+tc.want)
	}
	const config = lab.Prefix + "/config"
	putKey(t, etcd, config, `{"Network":"10.5.0.0/16","SubnetMin":"10.6.0.0"}`)
	expectFlannelctlFails(t, h, []string{"reserve", "10.5.7.0/24", "192.0.2.9"}, "SubnetMin is not in the range of the Network")
	if out := expectFlannelctl(t, h, []string{"reservations"}); strings.Contains(out, "10.") {
		t.Errorf("a refused subnet is reserved:\n%s", out)
	}
	putKey(t, etcd, config, `{"Network":"10.5.0.0/16"}`)
	expectFlannelctl(t, h, []string{"reserve", "10.5.7.0/24", "192.0.2.9"}, "10.5.7.0-24 is reserved")
	removeKey(t, etcd, config)
	expectFlannelctl(t, h, []string{"reserve", "10.9.7.0/25", "192.0.2.8"}, "10.9.7.0-25 is reserved")
}

// TestFlannelctlOnConfiguration checks the commands config get, validate and set. set must write
// nothing invalid, and ask before a change that invalidates leases.
func TestFlannelctlOnConfiguration(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	file := func(config string) string {
		t.Helper()
		path := "/run/net-conf.json"
		if err := os.WriteFile(h.Path(path), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	expectFlannelctl(t, h, []string{"config", "get"}, `"Network":"10.5.0.0/16"`)
	expectFlannelctl(t, h, []string{"config", "validate"}, "valid: network 10.5.0.0/16, backend vxlan")
	expectFlannelctl(t, h, []string{"config", "validate", file(`{"Network":"10.5.0.0/16"}`)}, "warning: without a Type in Backend the backend is udp", "backend udp")
	expectFlannelctlFails(t, h, []string{"config", "validate", file(`{"Network":"10.5.0.0/99"}`)}, "10.5.0.0/99")
	expectFlannelctlFails(t, h, []string{"config", "set", file(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":99999}}`)}, "Backend.Port is 99999")
	expectFlannelctlFails(t, h, []string{"config", "validate", file(`{"Network":"169.254.0.0/16"}`)}, "link-local")
	expectFlannelctlFails(t, h, []string{"config", "validate", file(`{"Network":"192.168.0.0/16","Backend":{"Type":"vxlan"}}`)}, "an address of this host")
	expectFlannelctlFails(t, h, []string{"config", "validate", file(`{"Netwrok":"10.5.0.0/16"}`)}, "please define a correct Network", `unknown key "Netwrok" is ignored, the nearest known key is "Network"`)
	expectFlannelctlFails(t, h, []string{"config", "set", file(`{"Network":"192.168.0.0/16","Backend":{"Type":"vxlan"}}`)}, "an address of the host with the lease 10.5.")
	expectFlannelctl(t, h, []string{"config", "validate", file(`{"Network":"192.168.0.0/16","SubnetMin":"192.168.128.0","Backend":{"Type":"vxlan"}}`)})
	expectFlannelctl(t, h, []string{"config", "validate", file(`{"Network":"10.5.0.0/16","SubnetLn":24,"Backend":{"Type":"vxlan"}}`)}, "warning:", "SubnetLn")
	expectFlannelctl(t, h, []string{"config", "set", file(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":4789}}`)}, "+ Backend.Port: 4789", "- SubnetMax", "written")
	expectFlannelctl(t, h, []string{"config", "set", file(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":4789}}`)}, "nothing changes")

	// flannelctl asks before a change that invalidates a lease. Here its input is empty, which
	// counts as no.
	moved := file(`{"Network":"10.9.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectFlannelctlFails(t, h, []string{"config", "set", moved}, "~ Network: \"10.9.0.0/16\" (was \"10.5.0.0/16\")", "is not one of the subnets from", "nothing was written")
	expectFlannelctl(t, h, []string{"config", "get"}, "10.5.0.0/16")
	expectFlannelctl(t, h, []string{"config", "set", "--yes", moved}, "written")
	expectFlannelctl(t, h, []string{"config", "get"}, "10.9.0.0/16")
}

// TestFlannelctlStatus checks the output of status when no daemon runs, for a ready daemon, for a
// daemon on another host, and for a daemon without etcd.
func TestFlannelctlStatus(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	a, b := l.Host(1), l.Host(2)
	expectFlannelctlExits(t, a, 2, []string{"status"}, "ask flanneld for its status", "no such file")
	expectFlannelctlExits(t, a, 2, []string{"status", "--wait", "--timeout=1s"}, "waiting until flanneld answers: ", "ask flanneld for its status", "no such file")
	start(t, a, lab.FlanneldOptions{})
	expectFlannelctl(t, a, []string{"status", "--wait", "--brief"}, "ready; peers: none\n")
	startOne(t, b, lab.FlanneldOptions{Args: []string{"--statusz-address=0.0.0.0:8099"}})
	eventually(t, "they know each other", func() error {
		if r := statusOf(t, a); len(r.Peers) != 1 || r.Peers[0].State != status.InPlace {
			return fmt.Errorf("%+v", r.Peers)
		}
		return nil
	})
	expectFlannelctl(t, a, []string{"status"}, "ready, version", "vxlan, network 10.5.0.0/16, mtu 1450", "etcd connected since", "1 in place", "route 2/2", "firewall    iptables\n")
	if out := expectFlannelctl(t, a, []string{"status", "--brief"}); out != "ready; peers: 1 in place\n" {
		t.Errorf("status --brief prints %q", out)
	}
	if out := expectFlannelctl(t, a, []string{"status", "--peers", "-o", "name"}); out != statusOf(t, b).Lease.Key+"\n" {
		t.Errorf("status --peers -o name prints %q, want %s", out, statusOf(t, b).Lease.Key)
	}
	expectFlannelctl(t, a, []string{"status", "--peers"}, "route "+statusOf(t, b).Lease.Subnets[0].String(), b.Addr(v4[0]).String())
	expectFlannelctl(t, a, []string{"status", "--url", "http://" + b.Addr(v4[0]).String() + ":8099"}, statusOf(t, b).Lease.Key)
	var r status.Report
	if err := json.Unmarshal(bytes.TrimSpace([]byte(expectFlannelctl(t, a, []string{"status", "-o", "json"}))), &r); err != nil || len(r.Peers) != 1 {
		t.Errorf("status -o json: %v, %+v; want one peer", err, r)
	}
	l.Etcd().Kill()
	a.Daemon().Kill()
	d := start(t, a, lab.FlanneldOptions{})
	expectLog(t, d, "going on from the last known state")
	expectFlannelctlFails(t, a, []string{"status"}, "not ready", "away")
	expectFlannelctlFails(t, a, []string{"status", "--wait", "--timeout=1s"}, "waiting until flanneld is ready: ", "not ready, version", "flannelctl: flanneld is not ready")
}

// TestCheckPrintsAtOnce checks that the result of a peer that answers is there while others are still waited for.
func TestCheckPrintsAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	a := l.Host(1)
	putKey(t, etcdClient(t, l), subnets+"10.5.210.0-24", vxlanLease("192.168.77.210", "02:00:00:00:00:77"))
	eventually(t, "the peer that does not answer is known", func() error {
		if n := len(statusOf(t, a).Peers); n != 2 {
			return fmt.Errorf("%d peers", n)
		}
		return nil
	})

	cmd := exec.Command(built("flannelctl"), "check")
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	cmd.Stdout = write
	if err := a.Start(cmd); err != nil {
		t.Fatal(err)
	}
	_ = write.Close()

	lines := bufio.NewScanner(read)
	for lines.Scan() && !strings.Contains(lines.Text(), " ok ") {
		continue
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil { // it has not ended yet
		t.Errorf("%q is printed at the end: %v", lines.Text(), err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 2 {
		t.Errorf("an interrupted check: %v, want exit code 2", err)
	}
}

// TestFlannelctlCheck checks that the command check reports no fault if nothing is dropped, and
// names the layer that does not work if packets are dropped.
func TestFlannelctlCheck(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		rules string // nftables rules on host 2 that break the network; empty for none
		want  string
	}{
		{"nothing is dropped", "", "ok"},
		{"tunnel is dropped", "udp dport 8472 drop", "network"},
		{"big packets are dropped", "meta length 1450-1600 drop", "mtu"},
		{"all packets are dropped", "drop", "underlay"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			a, b := l.Host(1), l.Host(2)
			subnet := statusOf(t, b).Lease.Subnets[0].String()
			if tc.rules == "" {
				expectFlannelctl(t, a, []string{"check"}, subnet, "ok")
				expectFlannelctl(t, a, []string{"check", "--peer", subnet, "-o", "json"}, `"ok": true`)
				expectFlannelctl(t, a, []string{"check", "-o", "wide"}, " KEY ", statusOf(t, b).Lease.Key)
				expectFlannelctlFails(t, a, []string{"check", "--peer", "192.0.2.99"}, "there is no peer to check")
				return
			}
			nft(t, b.Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; "+tc.rules+" ; } ; }")
			expectFlannelctlFails(t, a, []string{"check"}, subnet, tc.want+" ", "1 of 1 ways are broken")
			if out, _ := flannelctl(t, a, "check", "--failed", "-o", "name"); !strings.HasPrefix(out, subnet+"\nflannelctl: ") {
				t.Errorf("check --failed -o name prints %q, want %s", out, subnet)
			}
		})
	}
	t.Run("host-gw", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"host-gw"}`)
		a, b := l.Host(1), l.Host(2)
		startOne(t, a, lab.FlanneldOptions{})
		startOne(t, b, lab.FlanneldOptions{})
		eventually(t, "they know each other", func() error {
			if r := statusOf(t, a); len(r.Peers) != 1 || r.Peers[0].State != status.InPlace {
				return fmt.Errorf("%+v", r.Peers)
			}
			return nil
		})
		subnets := statusOf(t, b).Lease.Subnets
		first := subnets[0].Addr().Next().String()
		if out := expectFlannelctl(t, a, []string{"check"}, subnets[0].String(), "unknown ", "the host answers, "+first+" does not: no pods have a bridge there yet"); strings.Contains(out, "UDP") {
			t.Errorf("the output names a tunnel, which host-gw does not have:\n%s", out)
		}
		expectFlannelctl(t, a, []string{"check", "-o", "json"}, `"ok": false`)
		if err := l.AddPods(testContext(t)); err != nil {
			t.Fatal(err)
		}
		expectConverged(t, l)
		if out := expectFlannelctl(t, a, []string{"check"}, subnets[0].String(), subnets[1].String()); strings.Count(out, " ok ") != len(subnets) {
			t.Errorf("with pods the output is\n%s\nwant %d times ok", out, len(subnets))
		}
		nft(t, b.Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; meta length 1450-1600 drop ; } ; }")
		expectFlannelctlFails(t, a, []string{"check"}, "mtu ", "those of 1500 bytes do not", "2 of 2 ways are broken")
		nft(t, b.Namespace, "add rule netdev broken in drop")
		expectFlannelctlFails(t, a, []string{"check"}, "underlay ", "2 of 2 ways are broken")
	})
	t.Run("tunnel with another port is dropped", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan","Port":4789}`)
		startAll(t, l, lab.FlanneldOptions{})
		expectConverged(t, l)
		nft(t, l.Host(2).Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; udp dport 4789 drop ; } ; }")
		expectFlannelctlFails(t, l.Host(1), []string{"check"}, "network ", "(vxlan: UDP 4789)")
	})
	t.Run("TCP is rejected, then dropped", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan"}`)
		startAll(t, l, lab.FlanneldOptions{})
		expectConverged(t, l)
		b := l.Host(2).Namespace
		for _, code := range []string{"admin-prohibited", "no-route", "host-unreachable", "port-unreachable"} {
			nft(t, b, "table inet broken { chain in { type filter hook input priority 0 ; meta l4proto tcp reject with icmpx type "+code+" ; } ; }")
			if out := expectFlannelctl(t, l.Host(1), []string{"check"}); strings.Count(out, " ok ") != len(dual) {
				t.Errorf("with TCP rejected (%s) the output is\n%s\nwant ok for both families", code, out)
			}
			nft(t, b, "delete table inet broken")
		}
		nft(t, b, "table inet broken { chain in { type filter hook input priority 0 ; meta l4proto tcp drop ; } ; }")
		expectFlannelctl(t, l.Host(1), []string{"check"}, "unknown ", "a firewall there drops those to its own addresses")
		nft(t, b, "delete table inet broken")
		nft(t, b, "table inet broken { chain early { type filter hook prerouting priority -300 ; meta l4proto tcp drop ; } ; }")
		expectFlannelctlFails(t, l.Host(1), []string{"check"}, "checksum ", "ChecksumOffload", "2 of 2 ways are broken")
	})
}

// TestFlannelctlDoctor checks that doctor reports a host without flanneld, and one that does not
// forward packets, with a fix for each problem.
func TestFlannelctlDoctor(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := l.Host(1)
	expectFlannelctlFails(t, h, []string{"doctor"}, "PROBLEM", "no flanneld answers", "no such file")
	startOne(t, h, lab.FlanneldOptions{})
	var findings []struct{ Problem, Fix string }
	if out := expectFlannelctl(t, h, []string{"doctor", "-o", "json"}); json.Unmarshal([]byte(out), &findings) != nil {
		t.Errorf("doctor -o json prints no JSON: %s", out)
	}
	for _, f := range findings {
		if f.Problem == "" || f.Fix == "" {
			t.Errorf("finding %+v, want a problem and a fix", f)
		}
	}
	if out, err := h.Exec(testContext(t), "sysctl", "-w", "net.ipv4.ip_forward=0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFlannelctlFails(t, h, []string{"doctor"}, "IPv4 is not forwarded", "sysctl -w net.ipv4.ip_forward=1")
}
