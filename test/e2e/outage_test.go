// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/lab"
)

// resourceUsage contains what a daemon has used since its start.
type resourceUsage struct {
	lines int           // number of lines of its log
	cpu   time.Duration // CPU time in user and kernel mode
}

func readUsage(t *testing.T, d *lab.Daemon) resourceUsage {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.PID()))
	if err != nil {
		t.Fatal(err)
	}
	// The name of the program may contain spaces, so fields are counted from the end of
	// the name.
	const user, system, tick = 11, 12, time.Second / 100
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	u := resourceUsage{lines: strings.Count(d.Log(), "\n")}
	for _, i := range []int{user, system} {
		ticks, err := strconv.Atoi(fields[i])
		if err != nil {
			t.Fatalf("%s: %v", stat, err)
		}
		u.cpu += time.Duration(ticks) * tick
	}
	return u
}

// TestStoreOutages checks three kinds of outages of the store. No packet may be lost, and
// changes during an outage must arrive after it. During all three outages together, each
// daemon must log 1 to 14 lines and use at most 1% of a CPU.
func TestStoreOutages(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{}, `{"Type":"vxlan"}`)
	c := etcdClient(t, l)
	peers := func(subnet, host, mac string) (key, value string, shown []string) {
		ip := "192.168.77." + host
		return subnets + subnet + "-24", vxlanLease(ip, mac), datapathLines(subnet+"/24", ip, mac)
	}
	goneKey, goneValue, gone := peers("10.5.200.0", "200", "02:00:00:00:00:aa")
	movedKey, movedValue, before := peers("10.5.201.0", "201", "02:00:00:00:00:bb")
	_, newValue, after := peers("10.5.201.0", "202", "02:00:00:00:00:cc")
	addedKey, addedValue, added := peers("10.5.203.0", "203", "02:00:00:00:00:dd")
	everywhere := func(have, lack []string) {
		t.Helper()
		for _, h := range l.Hosts() {
			expectKernel(t, h, have, lack)
		}
	}
	startAll(t, l, lab.FlanneldOptions{})
	if _, err := c.Txn(testContext(t)).Then(clientv3.OpPut(goneKey, goneValue), clientv3.OpPut(movedKey, movedValue)).Commit(); err != nil {
		t.Fatal(err)
	}
	everywhere(slices.Concat(gone, before), nil)

	flows := startFlows(t, l, 100)
	start, used := time.Now(), map[*lab.Host]resourceUsage{}
	for _, h := range l.Hosts() {
		used[h] = readUsage(t, h.Daemon())
	}

	// First outage: the store hangs for longer than the timeout of requests, and for
	// longer than daemons trust a watch that gives no events.
	if err := l.Etcd().Stop(); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		expectLog(t, h.Daemon(), "etcd is not usable")
	}
	pause(t, 5*time.Second)
	if err := l.Etcd().Cont(); err != nil {
		t.Fatal(err)
	}
	putKey(t, c, addedKey, addedValue)
	everywhere(added, nil)

	// Second outage: the store is killed and restarted.
	l.Etcd().Kill()
	pause(t, 3*time.Second)
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	removeKey(t, c, addedKey)
	everywhere(slices.Concat(gone, before), added)

	// Third outage: a firewall cuts off the hosts. The store changes meanwhile, and a
	// compaction removes these changes from its history.
	nft(t, l.Underlay(), `table inet outage {
		chain input {
			type filter hook input priority filter
			iifname != "lo" tcp dport 2379 drop
		}
	}`)
	if err := l.Etcd().Restart(testContext(t)); err != nil {
		t.Fatal(err)
	}
	putKey(t, c, addedKey, addedValue)
	removeKey(t, c, goneKey)
	putKey(t, c, movedKey, newValue)
	r, err := c.Get(testContext(t), movedKey)
	if err == nil {
		_, err = c.Compact(testContext(t), r.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		t.Fatal(err)
	}
	pause(t, 7*time.Second)
	everywhere(slices.Concat(gone, before), append(added, after[1:]...))
	nft(t, l.Underlay(), "delete table inet outage")
	everywhere(slices.Concat(added, after), append(gone, before[1:]...))

	expectNothingLost(t, flows)
	took := time.Since(start)
	for _, h := range l.Hosts() {
		d := h.Daemon()
		if err := d.Ended(); err != nil {
			t.Errorf("%v", err)
			continue
		}
		expectReady(t, d)
		eventually(t, h.Name()+" reports that the store is usable again", func() error {
			if lines := linesWith(d, "etcd is "); !strings.HasSuffix(lines[len(lines)-1], `"etcd is usable again"`) {
				return fmt.Errorf("it has logged %q", lines)
			}
			return nil
		})
		now := readUsage(t, d)
		if lines := now.lines - used[h].lines; lines == 0 || lines >= 15 {
			t.Errorf("%s logged %d lines, want 1 to 14", h.Name(), lines)
		}
		if cpu := now.cpu - used[h].cpu; cpu > took/100 {
			t.Errorf("%s used %v of CPU time in %v, want at most 1%%", h.Name(), cpu, took)
		}
	}
}

// TestStoreStartsAfterDaemon checks a daemon that starts before its store. It must log
// each obstacle once and within seconds, and stay healthy. When the last obstacle is
// gone, it must become ready.
//
//stages:rest TestStoreOutages has a store that comes back
func TestStoreStartsAfterDaemon(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, "")
	h := l.Host(1)
	l.Etcd().Kill()
	d := start(t, h, lab.FlanneldOptions{})
	logged := time.Now()
	step := func(what, text string) {
		t.Helper()
		expectLog(t, d, text)
		if took := time.Since(logged); took > 8*time.Second {
			t.Errorf("%s: logged after %v, want at most 8s", what, took)
		}
		pause(t, 3*time.Second)
		expectOnce(t, d, text)
		if status, body, _ := d.Get(testContext(t), "/readyz"); status != 503 {
			t.Errorf("%s: /readyz: %d %q, want 503", what, status, body)
		}
		if status, body, _ := d.Get(testContext(t), "/healthz"); status != 200 {
			t.Errorf("%s: /healthz: %d %q, want 200", what, status, body)
		}
		logged = time.Now()
	}
	config := func(text string) {
		t.Helper()
		if err := l.PutNetwork(testContext(t), json.RawMessage(text)); err != nil {
			t.Fatal(err)
		}
		logged = time.Now()
	}
	step("no store", `"etcd is not usable, retrying" err="etcd `+h.EtcdEndpoint()+`: dial tcp 192.168.77.254:2379: connect: connection refused"`)
	if err := l.Etcd().Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	logged = time.Now()
	step("no configuration", `no network configuration: etcd key /coreos.com/network/config does not exist`)
	expectOnce(t, d, "etcd is usable again")
	config(`{"Network":`)
	step("invalid JSON", `invalid network configuration: `)
	config(`{"Network":"10.5.0.0/16","SubnetMin":"10.5.9.0","SubnetMax":"10.5.1.0"}`)
	step("bad values", `SubnetM`)
	config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	expectReady(t, d)
	if n := strings.Count(d.Log(), "\n"); n >= 15 {
		t.Errorf("the log has %d lines, want at most 14", n)
	}
}
