// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func twoHosts() report {
	return report{
		OK: true,
		Hosts: []hostReport{
			{Name: "host1", Flanneld: running, Routes: []string{"10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink"}},
			{Name: "host2", Flanneld: running, Routes: []string{"10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink"}},
		},
		Leases: []leaseReport{
			{Subnet: "10.5.1.0-24", Value: json.RawMessage(`{"PublicIP":"192.168.77.1","BackendType":"vxlan"}`), Seconds: 86399},
			{Subnet: "10.5.2.0-24", Value: json.RawMessage(`{"PublicIP":"192.168.77.2","BackendType":"vxlan"}`)},
			{Subnet: "10.5.3.0-24", Value: json.RawMessage(`"junk"`)},
		},
		Matrix: []cellReport{
			{From: "host1/pod1", To: "host2/pod1", FromAddress: "10.5.1.2", ToAddress: "10.5.2.2", Family: "IPv4", OK: true, RTT: 0.081, Throughput: 8.24e9},
			{From: "host2/pod1", To: "host1/pod1", FromAddress: "10.5.2.2", ToAddress: "10.5.1.2", Family: "IPv4", OK: true, RTT: 1.5, Throughput: 9.4e8},
		},
	}
}

func TestText(t *testing.T) {
	const want = `IPv4 FROM             TO host1/pod1        TO host2/pod1
host1/pod1 10.5.1.2   -                    0.08ms 8.2Gbit/s
host2/pod1 10.5.2.2   1.50ms 940.0Mbit/s   -
2 of 2 reachable, round trip 0.08ms to 1.50ms, throughput 940.0Mbit/s to 8.2Gbit/s

LEASE         PUBLIC IP      BACKEND   EXPIRES
10.5.1.0-24   192.168.77.1   vxlan     in 23h59m59s
10.5.2.0-24   192.168.77.2   vxlan     never
10.5.3.0-24   unreadable

HOST    ROUTES TO OTHER HOSTS' PODS
host1   10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink
host2   10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink
`
	if diff := cmp.Diff(want, trimLines(twoHosts().text())); diff != "" {
		t.Error(diff)
	}
}

// TestTextOfSeveralNetworks checks that the table of leases has a column with the
// network if the lab has several.
func TestTextOfSeveralNetworks(t *testing.T) {
	r := twoHosts()
	for i := range r.Leases {
		r.Leases[i].Network = "red"
	}
	for _, want := range []string{
		"NETWORK   LEASE         PUBLIC IP      BACKEND   EXPIRES\n",
		"red       10.5.2.0-24   192.168.77.2   vxlan     never\n",
	} {
		if got := trimLines(r.text()); !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestTextOfFailures(t *testing.T) {
	r := twoHosts()
	r.Matrix[0].OK, r.Matrix[0].Error = false, "ping 10.5.2.2 from host1/pod1: no answer"
	r.Hosts[1].Flanneld, r.Hosts[1].Routes = "host2 flanneld: exit status 1: lease lost", nil
	got := trimLines(r.text())
	for _, want := range []string{
		"host1/pod1 10.5.1.2   -                    FAIL: no answer\n",
		"1 of 2 reachable, round trip 1.50ms to 1.50ms",
		"FAIL: ping 10.5.2.2 from host1/pod1: no answer\n",
		"host2   flanneld has ended: host2 flanneld: exit status 1: lease lost\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestManyPodsFit(t *testing.T) {
	var r report
	for i := range 50 {
		for j := range 50 {
			if i != j {
				r.Matrix = append(r.Matrix, cellReport{
					From: fmt.Sprintf("host%d/pod1", i), To: fmt.Sprintf("host%d/pod1", j), Family: "IPv4",
					FromAddress: fmt.Sprintf("10.5.%d.2", i), OK: i != 7, Error: "x: no answer",
				})
			}
		}
	}
	got := trimLines(r.text())
	for _, want := range []string{
		"2401 of 2450 reachable", "and 39 more\n",
		"\n1 host0/pod1 10.5.0.2      -      ok     ok ", "\n8 host7/pod1 10.5.7.2      FAIL   FAIL ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestVerdict(t *testing.T) {
	failed := twoHosts()
	failed.Matrix[1].OK = false
	ended := twoHosts()
	ended.Hosts[0].Flanneld = "host1 flanneld: signal: killed: "
	for want, r := range map[string]report{
		"<nil>":                twoHosts(),
		"1 of 2 cells failed":  failed,
		"flanneld has ended: ": ended,
	} {
		if got := fmt.Sprint(r.verdict()); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestFingerprintIgnoresFigures(t *testing.T) {
	a, b := twoHosts(), twoHosts()
	b.Matrix[0].RTT, b.Matrix[0].Throughput, b.Leases[0].Seconds = 7, 7, 7
	if a.fingerprint() != b.fingerprint() {
		t.Error("different figures change the fingerprint")
	}
	b.Hosts[0].Routes = nil
	if a.fingerprint() == b.fingerprint() {
		t.Error("a lost route does not change the fingerprint")
	}
}

// trimLines removes the spaces with which a table pads its last column.
func trimLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}
