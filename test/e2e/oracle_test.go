// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// expectLikeFresh checks that every host is in the state in which a new host would be, so that its past has left nothing.
// It waits until the hosts are settled, and then replaces each host by a new one with the same addresses, the daemon of
// which has the given options and finds its lease in the store. The hosts must then have the same state, and the results of
// more must be the same. Afterwards the lab has no pods.
func expectLikeFresh(t *testing.T, l *lab.Lab, options func(*lab.Host) lab.FlanneldOptions, more ...func() []string) {
	t.Helper()
	var walked []string
	eventually(t, "the hosts are settled", func() error {
		for _, h := range l.Hosts() {
			for _, name := range networkNames(t, h) {
				r, err := reportOf(t, h, name)
				if err != nil {
					return err
				}
				if !r.Ready || r.Network.Phase != "serving" {
					return fmt.Errorf("%s: network %q: ready %v %q, phase %q", h.Name(), name, r.Ready, r.Reasons, r.Network.Phase)
				}
			}
		}

		before := endState(t, l, more...) // after the phases: a host that still removes something may do it between two states
		pause(t, 2*time.Second)
		walked = endState(t, l, more...)
		if diff := difference(before, walked); diff != "" {
			return fmt.Errorf("they still change:\n%s", diff)
		}
		return nil
	})

	walkedFiles := stateFiles(t, l)

	for _, h := range l.Hosts() {
		if err := h.Reinstall(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range l.Hosts() {
		start(t, h, options(h))
	}
	for _, h := range l.Hosts() {
		expectReady(t, h.Daemon())
	}
	eventually(t, "the hosts are like new ones (-) after what happened to them (+)", func() error {
		if diff := difference(endState(t, l, more...), walked); diff != "" {
			return fmt.Errorf("they differ:\n%s", diff)
		}
		return nil
	})
	if diff := difference(stateFiles(t, l), walkedFiles); diff != "" {
		t.Errorf("the state files of new hosts (-) and those after what happened to them (+) differ:\n%s", diff)
	}
}

// difference returns the lines of fresh that are not in walked, each after "-", and those of walked that are not in
// fresh, each after "+". The lines are sorted by their text.
func difference(fresh, walked []string) string {
	var lines []string
	for _, line := range linesMissing(fresh, walked) {
		lines = append(lines, line+"\x00-")
	}
	for _, line := range linesMissing(walked, fresh) {
		lines = append(lines, line+"\x00+")
	}
	slices.Sort(lines)

	var text strings.Builder
	for _, line := range lines {
		line, sign, _ := strings.Cut(line, "\x00")
		fmt.Fprintf(&text, "%s %s\n", sign, line)
	}
	return text.String()
}

// stateScript prints all that a daemon may have made on a host. The line that begins with == names what follows. One process
// of nft shows targets of iptables in one family only.
const stateScript = `
echo == link; ip -o -d link
echo == address; ip -o addr
echo == route; ip route show table all; ip -6 route show table all | grep -v "^default dev lo"
echo == rule; ip rule; ip -6 rule
echo == neighbour; ip neigh show nud permanent; ip neigh show proxy
echo == fdb; bridge fdb
echo == nexthop; ip nexthop
echo == fou; ip fou show 2>/dev/null
echo == socket; ss -Hulnp; ss -Htlnp
echo == sysctl; grep -rs . /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf
echo == file; find /run /var/lib -type f -o -type s
echo == firewall; for family in ip ip6 inet; do nft -s list ruleset $family 2>/dev/null; done
`

// arbitrary are the parts of the output of stateScript that do not depend on the daemon.
var arbitrary = []struct {
	match *regexp.Regexp
	by    string
}{
	{regexp.MustCompile(`^\d+: |@if\d+|link-netnsid \d+`), ""},                                                                  // numbers of devices and namespaces count those that there were before
	{regexp.MustCompile(`fe80::[0-9a-f:]{4,}`), "fe80::<random>"},                                                               // the kernel's, on a TUN device
	{regexp.MustCompile(`(192\.168\.77\.\d+|\[fd00:77::\d+\]|\*|0\.0\.0\.0|\[::\]):(3[2-9]|[45]\d|6[0-5])\d{3} `), "$1:<any> "}, // the kernel chooses this port
	{regexp.MustCompile(` state (UP|UNKNOWN) `), " state UP "},                                                                  // the kernel knows the state of a TUN device only after an event of its carrier
	{regexp.MustCompile(`,?fd=\d+|pid=\d+,?`), ""},                                                                              // numbers of a process and of its files
	{regexp.MustCompile(`^(UNCONN|LISTEN)\s+\d+\s+\d+`), ""},                                                                    // bytes that wait in a socket
	{regexp.MustCompile(`valid_lft \w+ preferred_lft \w+|tentative|\\`), ""},                                                    // the kernel checks for a second whether a link-local address is unique
	{regexp.MustCompile(`\s+`), " "},
	// Keys of WireGuard are random, and a new host makes a new one. MAC addresses are random too, but a new host takes
	// those in its lease.
	{regexp.MustCompile(`[A-Za-z0-9+/]{43}=`), "<key>"},
}

func withoutArbitrary(line string) string {
	for _, a := range arbitrary {
		line = a.match.ReplaceAllString(line, a.by)
	}
	return strings.TrimSpace(line)
}

// notOfTheDaemon matches lines about objects that the test, the kernel or other programs have made: the pods and their
// bridge, lo, files of the lab, and what the program iptables never removes: its lock and its chains without rules. A
// host that has used wireguard keeps its key for the next time.
var notOfTheDaemon = regexp.MustCompile(`\b(cni0|br-\w+|pod\d+|lo)\b|^(content of|file) /run/xtables.lock|^(content of|file) /var/lib/flannel/wgkey|stable_secret|` +
	`^firewall table ip6? (filter|mangle|nat) \{ chain [A-Z]+ \{ rule [01]: type `)

// memory matches what a state file keeps of the past on purpose: why the interface is in use, the subnets that the host
// had, so that it gets one of them again, and how often extension was set up, with the sums that contain this number.
var memory = regexp.MustCompile(` state (interface Reason|subnets \d+|setup number|setup post|subnets \S+ hash) = `)

// endState returns the state of all hosts, what they have in etcd, and the results of more as sorted lines, each once.
func endState(t *testing.T, l *lab.Lab, more ...func() []string) (lines []string) {
	t.Helper()
	for _, h := range l.Hosts() {
		out, err := h.Exec(testContext(t), "sh", "-c", stateScript)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		several := len(networkNames(t, h)) > 1
		var of []string
		section, table, chain, number := "", "", "", 0
		for line := range strings.Lines(string(out)) {
			if name, ok := strings.CutPrefix(line, "== "); ok {
				section = strings.TrimSpace(name)
				continue
			}
			line = withoutArbitrary(line)
			switch {
			case line == "":
				continue
			case section != "firewall":
			case strings.HasPrefix(line, "table "):
				table, chain, number = line, "", 0
				continue
			case strings.HasSuffix(line, "{"):
				chain, number = line, 0
				continue
			case line == "}":
				continue
			default:
				if !several { // the rules of several networks are in the order in which the networks started
					number++
				}
				line = fmt.Sprintf("%s %s rule %d: %s", table, chain, number, line)
			}
			if section == "file" {
				of = append(of, contentOf(h, line)...)
			}
			of = append(of, section+" "+line)
		}
		for _, name := range networkNames(t, h) {
			of = append(of, statusLines(t, h, name)...)
		}
		of = append(of, gauges(t, h)...)
		for _, line := range of {
			if !notOfTheDaemon.MatchString(line) {
				lines = append(lines, h.Name()+" "+withoutArbitrary(line))
			}
		}
	}
	stored, err := etcdClient(t, l).Get(testContext(t), lab.Prefix, clientv3.WithPrefix()) // also leases of networks that no host has any more
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range stored.Kvs {
		lines = append(lines, withoutArbitrary(fmt.Sprintf("key %s %s", kv.Key, kv.Value)))
	}
	for _, stored := range more {
		for _, line := range stored() {
			lines = append(lines, withoutArbitrary(line))
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// gauges returns the metrics of a host that say what is, not what has been.
func gauges(t *testing.T, h *lab.Host) (lines []string) {
	t.Helper()
	_, text := getStatus(t, h, "/metrics", "")
	isGauge := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "# TYPE ") {
			isGauge = strings.HasPrefix(line, "# TYPE flannel_") && strings.HasSuffix(line, " gauge\n") && !strings.Contains(line, "_timestamp_seconds")
		} else if isGauge && !strings.HasPrefix(line, "#") {
			lines = append(lines, "metric "+line)
		}
	}
	return lines
}

// contentOf returns the content of a file of the daemon.
func contentOf(h *lab.Host, file string) []string {
	text, err := os.ReadFile(h.Path(file))
	if err != nil {
		return nil // a socket, or a file that another one has just replaced
	}
	if filepath.Ext(file) == ".json" { // see stateFiles
		return nil
	}
	return []string{fmt.Sprintf("content of %s: %q", file, text)}
}

// stateFiles stops all daemons, which write their state files then, and returns the contents of these files as sorted
// lines. See timesAndRevisions. While a daemon runs, its state file may be a minute late.
func stateFiles(t *testing.T, l *lab.Lab) (lines []string) {
	t.Helper()
	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
		files, err := filepath.Glob(h.Path("/var/lib/flannel/*.json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			var content any
			if err == nil {
				err = json.Unmarshal(text, &content)
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			for _, line := range flatten(h.Name()+" "+filepath.Base(file), content) {
				if !memory.MatchString(line) {
					lines = append(lines, withoutArbitrary(line))
				}
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// networkNames returns the names of the networks that a daemon serves: an empty one if there is only one without a name.
func networkNames(t *testing.T, h *lab.Host) []string {
	names := slices.Sorted(maps.Keys(overviewOf(t, h)))
	if len(names) == 0 {
		return []string{""}
	}
	return names
}

// reportOf returns the status of a network on a host.
func reportOf(t *testing.T, h *lab.Host, network string) (r status.Report, err error) {
	_, text, err := h.Daemon().Get(testContext(t), "/statusz.json?network="+network)
	if err == nil {
		err = json.Unmarshal([]byte(text), &r)
	}
	return r, err
}

// statusLines returns the status of a network on a host as lines, without numbers of processes and devices, and without
// times.
func statusLines(t *testing.T, h *lab.Host, network string) []string {
	t.Helper()
	r, err := reportOf(t, h, network)
	if err != nil {
		t.Fatal(err)
	}
	r.PID, r.Version, r.Interface.Index = 0, "", 0 // the program may have been built again since the host was first started
	// The other interfaces are not flanneld's, and a new host has no bridge for pods yet. The reason says what the host
	// has used before.
	r.Interface.Candidates, r.Interface.Reason = nil, ""
	r.Events = nil
	r.Peers = slices.SortedFunc(slices.Values(r.Peers), func(a, b status.Peer) int { return strings.Compare(a.Key, b.Key) })
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var content any
	if err := json.Unmarshal(text, &content); err != nil {
		t.Fatal(err)
	}
	return flatten("status "+network, content)
}

// timesAndRevisions matches the names of JSON fields with values that differ each time: times, and revisions of the store.
var timesAndRevisions = regexp.MustCompile(`(?i)^(started|now|since|lastSync|lastGood|changed|saved|expires|checked|claimed|revision|mark|leaseID|kept)$`)

// flatten returns one line for each value in a JSON document, with its path.
func flatten(path string, value any) []string {
	var lines []string
	switch v := value.(type) {
	case map[string]any:
		for key, field := range v {
			if !timesAndRevisions.MatchString(key) {
				lines = append(lines, flatten(path+" "+key, field)...)
			}
		}
	case []any:
		for i, element := range v {
			lines = append(lines, flatten(fmt.Sprintf("%s %d", path, i), element)...)
		}
	default:
		lines = append(lines, fmt.Sprintf("%s = %#v", path, v))
	}
	return lines
}

// TestOracle checks that difference names what others do not have, and that expectLikeFresh accepts hosts on which nothing
// has happened, and those that lost their state directory while another configuration came: the lease tells what they had.
func TestOracle(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	before := endState(t, l)
	if out, err := l.Host(1).Exec(testContext(t), "ip", "route", "add", "10.5.250.0/24", "via", l.Host(2).Addr(prefix.IPv4).String()); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, want := difference(before, endState(t, l)), "+ host1 route 10.5.250.0/24 via 192.168.77.2 dev eth0\n"; !strings.Contains(got, want) { // the kernel may add link-local addresses
		t.Errorf("the difference is\n%s\nwant it to contain\n%s", got, want)
	}
	if out, err := l.Host(1).Exec(testContext(t), "ip", "route", "del", "10.5.250.0/24"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	for _, h := range l.Hosts() {
		expectStop(t, h.Daemon())
		if err := os.RemoveAll(h.Path("/var/lib/flannel")); err != nil {
			t.Fatal(err)
		}
	}
	putNetwork(t, l, dual, vni7)
	startAll(t, l, lab.FlanneldOptions{})
	expectLikeFresh(t, l, func(*lab.Host) lab.FlanneldOptions { return lab.FlanneldOptions{} })
}
