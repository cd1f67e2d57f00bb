// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// entries is a store that only has these.
type entries struct {
	store
	all []subnet.Entry
}

func (e entries) Entries(context.Context, bool) ([]subnet.Entry, error) { return e.all, nil }

// expectLines compares output with lines whose columns are separated by one space.
func expectLines(t *testing.T, output string, want ...string) {
	t.Helper()
	var got []string
	for line := range strings.Lines(output) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the output differs (-want +got):\n%s", diff)
	}
}

// TestRowsAtOnce checks that rows whose longest cells are known are aligned and printed without those that follow.
func TestRowsAtOnce(t *testing.T) {
	var out bytes.Buffer
	o := output{format: "table"}
	rows := o.table(&out, "SUBNET\t+KEY\tADVICE", "10.5.163.0/24", "", "")
	expect := func(want string) {
		t.Helper()
		if got := out.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		out.Reset()
	}

	expect("SUBNET          ADVICE\n")
	rows.row("", "10.5.7.0/24", "key", "")
	expect("10.5.7.0/24\n")
	rows.row("", "10.5.163.0/24", "key", "no")
	expect("10.5.163.0/24   no\n")
}

// TestFormsOfLeases checks that each form of the list shows the leases, and wide also what does not fit.
func TestFormsOfLeases(t *testing.T) {
	all := entries{all: []subnet.Entry{
		{TTL: time.Hour, Lease: subnet.Lease{Key: "a", BackendType: "vxlan", NextType: "wireguard", Endpoints: []subnet.Endpoint{
			{Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"), Data: []byte("{\"VNI\":\n1}")},
			{Subnet: netip.MustParsePrefix("fd00::/64"), PublicIP: netip.MustParseAddr("2001:db8::1"), Data: []byte("{}")},
		}}},
		{Lease: subnet.Lease{Key: "b", Permanent: true}, Err: errors.New("rubbish")},
	}}
	for _, tc := range []struct {
		format  string
		ofNodes bool
		want    []string
	}{
		{"table", false, []string{"SUBNET PUBLIC IP TYPE EXPIRES ERROR", "10.5.1.0/24,fd00::/64 192.0.2.1,2001:db8::1 vxlan 1h0m0s", "b - - never (reserved) rubbish"}},
		{"table", true, []string{"NODE SUBNET PUBLIC IP TYPE ERROR", "a 10.5.1.0/24,fd00::/64 192.0.2.1,2001:db8::1 vxlan", "b - - - rubbish"}},
		{"wide", false, []string{
			"SUBNET PUBLIC IP TYPE EXPIRES KEY NEXT TYPE DATA ERROR",
			`10.5.1.0/24,fd00::/64 192.0.2.1,2001:db8::1 vxlan 1h0m0s a wireguard {"VNI": 1},{}`, "b - - never (reserved) b - - rubbish",
		}},
		{"wide", true, []string{
			"NODE SUBNET PUBLIC IP TYPE NEXT TYPE DATA ERROR", `a 10.5.1.0/24,fd00::/64 192.0.2.1,2001:db8::1 vxlan wireguard {"VNI": 1},{}`, "b - - - - - rubbish",
		}},
		{"name", false, []string{"a", "b"}},
		{"name", true, []string{"a", "b"}},
	} {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		if err := listLeases(cmd, all, output{format: tc.format}, tc.ofNodes, func(subnet.Entry) bool { return true }); err != nil {
			t.Errorf("%s: %v", tc.format, err)
		}
		expectLines(t, out.String(), tc.want...)
	}
}

// TestFormsOfStatus checks what each form shows of a report.
func TestFormsOfStatus(t *testing.T) {
	at := time.Date(2026, 11, 30, 8, 0, 0, 0, time.UTC)
	peer := func(key, subnet string, s status.State) status.Peer {
		l := status.Lease{Key: key, Subnets: []netip.Prefix{netip.MustParsePrefix(subnet)}, PublicIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Type: "vxlan"}
		return status.Peer{Lease: l, State: s, Changed: at, Objects: []status.Object{{Text: "route", Present: s != status.Missing}}}
	}
	peers := []status.Peer{peer("a", "10.5.1.0/24", status.InPlace), peer("b", "10.5.2.0/24", status.Missing)}
	found := &paths.Outcome{Results: map[string]int{"ok": 1, "mtu": 1}, Worst: []paths.Result{
		{Peer: "b", Path: paths.Path{Subnet: peers[1].Subnets[0], PublicIP: peers[1].PublicIPs[0]}, Since: at, Checked: at, Verdict: paths.Verdict{Broken: "mtu", Largest: 1400, Advice: "look"}},
	}}
	networks := []status.NetworkSummary{{Name: "red", Phase: "serving"}, {Name: "blue", Phase: "refused"}}
	several := status.Report{Reasons: []string{"blue: refused"}, Networks: networks}
	for _, tc := range []struct {
		args   string
		report status.Report
		want   []string // the last lines
	}{
		{"", status.Report{Ready: true, Peers: peers, Paths: found}, []string{
			"", "PATH TO PUBLIC IP RESULT RTT ADVICE", "10.5.2.0/24 192.0.2.1 mtu - look",
			"", "SUBNET PUBLIC IP TYPE STATE ERROR", "10.5.2.0/24 192.0.2.1 vxlan missing", "route MISSING",
		}},
		{"-o wide --peers", status.Report{Ready: true, Peers: peers, Paths: found}, []string{
			"", "PATH TO PUBLIC IP RESULT RTT KEY LARGEST SINCE CHECKED ADVICE", "10.5.2.0/24 192.0.2.1 mtu - b 1400 2026-11-30T08:00:00Z 2026-11-30T08:00:00Z look",
			"", "SUBNET PUBLIC IP TYPE STATE KEY BACKEND CHANGED ERROR", "10.5.1.0/24 192.0.2.1 vxlan in place a - 2026-11-30T08:00:00Z", "route",
			"10.5.2.0/24 192.0.2.1 vxlan missing b - 2026-11-30T08:00:00Z", "route MISSING",
		}},
		{"-o name", status.Report{Ready: true, Peers: peers, Paths: found}, []string{"b"}},
		{"-o name", status.Report{Peers: []status.Peer{peers[1], peer("c", "10.5.3.0/24", status.Reserved)}}, []string{"b"}},
		{"-o name --peers", status.Report{Ready: true, Peers: peers, Paths: found}, []string{"a", "b"}},
		{"-o name", several, []string{"red", "blue"}},
		{"--brief", status.Report{Ready: true, Peers: peers, Paths: found}, []string{"ready; peers: 1 in place, 1 missing; paths: 1 mtu, 1 ok"}},
		{"--brief", status.Report{Reasons: []string{"no answer", "no rules"}}, []string{"not ready: no answer; no rules; peers: none"}},
		{"--brief", several, []string{"not ready: blue: refused; networks: 1 refused, 1 serving"}},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(tc.report) }))
		out, err := run(t, append([]string{"status", "--url=" + server.URL}, strings.Fields(tc.args)...)...)
		server.Close()
		if tc.report.Ready != (err == nil) || err != nil && exitCode(err) != 1 {
			t.Errorf("%s: %v", tc.args, err)
		}
		lines := strings.SplitAfter(out, "\n")
		if tc.args == "" || strings.Contains(tc.args, "wide") { // the rows before are those of the daemon
			lines = lines[max(0, len(lines)-1-len(tc.want)):]
		}
		expectLines(t, strings.Join(lines, ""), tc.want...)
	}
}

// TestUntilReady checks what status --wait prints while it waits, and its exit code.
func TestUntilReady(t *testing.T) {
	type answer struct {
		report status.Report
		err    error
	}
	away := answer{err: awayError{errors.New("no such file")}}
	starts := answer{report: status.Report{Reasons: []string{"no lease", "no rules"}}}
	const waitsForAnswer, waitsForReady = "waiting until flanneld answers: no such file\n", "waiting until flanneld is ready: no lease; no rules\n"
	for name, tc := range map[string]struct {
		answers []answer // the last one stays
		want    string
		code    int
		took    time.Duration
	}{
		"it is ready":              {[]answer{{report: status.Report{Ready: true}}}, "", 0, 0},
		"it starts":                {[]answer{away, away, starts, starts, {report: status.Report{Ready: true}}}, waitsForAnswer + waitsForReady, 0, 4 * readyPause},
		"it does not become so":    {[]answer{away, starts}, waitsForAnswer + waitsForReady, 1, time.Minute},
		"it does not answer":       {[]answer{starts, away}, waitsForReady + waitsForAnswer, 2, time.Minute},
		"it does not answer once":  {nil, "", 2, time.Minute},
		"there is no such network": {[]answer{{err: errors.New("no network blue")}}, "", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var progress bytes.Buffer
				cmd := &cobra.Command{}
				cmd.SetErr(&progress)
				cmd.SetContext(t.Context())
				begin := time.Now()
				next := 0
				r, err := untilReady(cmd, time.Minute, func(ctx context.Context) (status.Report, error) {
					if tc.answers == nil {
						<-ctx.Done()
						return status.Report{}, awayError{ctx.Err()}
					}
					a := tc.answers[min(next, len(tc.answers)-1)]
					next++
					return a.report, a.err
				})
				code := 0
				switch {
				case err != nil:
					code = exitCode(err)
				case !r.Ready:
					code = 1
				}
				if took := time.Since(begin); code != tc.code || took != tc.took || progress.String() != tc.want {
					t.Errorf("exit code %d after %s, %v, and it prints\n%swant %d after %s, and\n%s", code, took, err, &progress, tc.code, tc.took, tc.want)
				}
			})
		})
	}
}

// TestOutputCompletes checks that the shell completes the formats that a command has, and that the help names them.
func TestOutputCompletes(t *testing.T) {
	for args, want := range map[string]string{
		"status": "table json yaml wide name", "leases": "table json yaml wide name", "reservations": "table json yaml wide name", "check": "table json yaml wide name",
		"networks": "table json yaml name", "interface": "table json yaml name", "mesh": "table json yaml wide svg", "connectivity test": "table json yaml wide",
		"doctor": "table json yaml", "migrate status": "table json yaml",
	} {
		out, err := run(t, append(append([]string{"__complete"}, strings.Fields(args)...), "--output", "")...)
		if got := strings.Join(strings.Fields(out), " "); err != nil || got != want+" :4" {
			t.Errorf("%s: %v, %q, want %q", args, err, got, want)
		}
	}
}
