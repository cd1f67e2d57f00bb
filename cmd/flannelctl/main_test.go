// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/version"
)

func run(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	return thisHost().run(t, args...)
}

// run runs flannelctl as on the host h.
func (h host) run(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, progress bytes.Buffer
	root := newRoot(h)
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(&progress)
	err = root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestVersion(t *testing.T) {
	got, err := run(t, "version")
	if want := version.String() + "\n"; got != want || err != nil {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// TestWrongArguments expects that a command with wrong arguments names its usage, and that its exit code is not that
// of a broken path.
func TestWrongArguments(t *testing.T) {
	for _, args := range [][]string{{"reserve"}, {"revoke"}, {"leases", "all"}, {"migrate", "start"}, {"check", "--pears"}, {"status", "-o", "xml"}, {"help", "nonsense"}} {
		out, err := run(t, args...)
		if err == nil || !strings.Contains(err.Error(), "the usage is flannelctl "+args[0]) || exitCode(err) != 2 || out != "" {
			t.Errorf("flannelctl %s: %v, output %q", strings.Join(args, " "), err, out)
		}
	}
}

// TestInterruptedIsNotBroken interrupts commands: their exit code must not be that of a broken path.
func TestInterruptedIsNotBroken(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	root := newRoot(host{socket: t.TempDir() + "/s"})
	root.SetArgs([]string{"status", "--wait"})
	root.SetErr(io.Discard)
	err := execute(ctx, root, io.Discard)
	if err == nil || err.Error() != "interrupted" || exitCode(err) != 2 {
		t.Errorf("%v, exit code %d", err, exitCode(err))
	}
}

// TestFullDisk expects an error if the output cannot be written, as with a full disk, and another exit code than that of
// a broken path, also from a command that returns the error of a write.
func TestFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range [][]string{{"doctor", "--help"}, {"version"}} {
		root := newRoot(thisHost())
		root.SetArgs(args)
		if err := execute(t.Context(), root, full); !errors.Is(err, syscall.ENOSPC) || exitCode(err) != 2 {
			t.Errorf("%s: %v, exit code %d", args, err, exitCode(err))
		}
	}
}

// TestHelpHasExamples checks that every help text has examples, with existing commands
// and flags.
func TestHelpHasExamples(t *testing.T) {
	seen := 0
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			if sub.Name() == "help" || cmd.Name() == "completion" { // cobra's own commands, whose text explains their use
				continue
			}
			walk(sub)
			seen++
			args := strings.Fields(sub.CommandPath() + " --help")[1:]
			if got, err := run(t, args...); err != nil || sub.Example == "" || !strings.Contains(got, sub.Example) {
				t.Errorf("%s: %v, no examples in\n%s", args, err, got)
			}
			for line := range strings.Lines(sub.Example) {
				if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
					continue
				}
				if !strings.Contains(line, sub.CommandPath()) {
					t.Errorf("%s: %q is not an example of the command", sub.CommandPath(), line)
				}
				inspect(t, sub.CommandPath(), "    "+line)
			}
		}
	}
	walk(newRoot(thisHost()))
	if seen < 16 {
		t.Errorf("only %d commands found", seen)
	}
}

func TestArgumentsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"nonsense":      `unknown command "nonsense"`,
		"version x":     `unknown command "x"`,
		"config sett x": `unknown command "sett"`,
		"completion x":  `unknown command "x"`,
	} {
		_, err := run(t, strings.Fields(args)...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want one line with %s", args, err, want)
		}
	}
}

// TestFlagsRefuseNonsense checks that an impossible value of a flag gives an error of one
// line that names the flag, and exit code 2 where 1 says that something is broken.
func TestFlagsRefuseNonsense(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"check --peer=x", `--peer "x" is invalid: expected the public address or the subnet of a peer`},
		{"check --peer=192.0.2.11,10.5.1.0/33", `--peer "10.5.1.0/33" is invalid: expected the public address or the subnet of a peer`},
		{"check --target=10.5.7.2", "--target needs --pod: this host itself only checks peers"},
		{"check --pod --target=x", `--target "x" is invalid: expected an address such as 10.5.7.2, or with a TCP port as in 10.96.0.1:443`},
		{"status --url=x", `--url "x" is invalid: expected a URL such as http://host:port`},
		{"status --url=http://", `--url "http://" is invalid: expected a URL such as http://host:port`},
		{"leases --etcd-endpoints=etcd", `--etcd-endpoints "etcd" is invalid: endpoint 1: expected host:port, or http:// or https:// with host:port`},
		{"config get --net-config-map=x", `--net-config-map "x" is invalid: expected NAMESPACE/NAME, such as kube-flannel/kube-flannel-cfg`},
		{"mesh --statusz-port=0", "--statusz-port 0 is invalid: expected a port from 1 to 65535"},
		{"mesh --statusz-port=70000", `invalid argument "70000" for "--statusz-port"`},
		{"mesh --timeout=0s", "--timeout 0s is invalid: expected a time above zero"},
		{"mesh --interval=-1s", "--interval -1s is invalid: expected at least 1s"},
		{"mesh -w --interval=1ms", "--interval 1ms is invalid: expected at least 1s"},
		{"mesh --namespace=Kube_Flannel", `--namespace "Kube_Flannel" is invalid: expected a name such as kube-flannel`},
		{"mesh --namespace=", `--namespace "" is invalid: expected a name`},
		{"mesh --namespace=a/b", `--namespace "a/b" is invalid`},
		{"mesh --selector=", `--selector "" is invalid: expected labels such as app=flannel`},
		{"mesh --selector=app=flannel,", `--selector "app=flannel," is invalid`},
		{"mesh --selector=a&limit=1", `--selector "a&limit=1" is invalid`},
		{"mesh -o png", `invalid argument "png" for "-o, --output" flag: expected table, json, yaml, wide, svg`},
		{"doctor -o wide", `invalid argument "wide" for "-o, --output" flag: expected table, json, yaml`},
		{"status --wait --timeout=0s", "--timeout 0s is invalid: expected a time above zero"},
		{"status --brief -o json", "if any flags in the group [brief output] are set none of the others can be"},
		{"status -o xml", `invalid argument "xml"`},
	} {
		if _, err := run(t, strings.Fields(tc.args)...); err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", tc.args, err, tc.want)
		} else if command, _, _ := strings.Cut(tc.args, " "); slices.Contains([]string{"check", "status", "mesh"}, command) && strings.Contains(tc.want, " is invalid") && exitCode(err) != 2 {
			t.Errorf("%s: exit code %d, want 2", tc.args, exitCode(err))
		}
	}
}

func TestChosenPeers(t *testing.T) {
	for _, tc := range []struct {
		only []string
		want bool
	}{
		{nil, true},
		{[]string{"192.0.2.11"}, true},
		{[]string{"10.5.1.0/24"}, true},
		{[]string{"10.5.1.7/24"}, true},
		{[]string{"192.0.2.12", "10.5.2.0/24"}, false},
	} {
		only, err := parsePeers(tc.only)
		if err != nil {
			t.Fatal(err)
		}
		if got := chosen(only, netip.MustParsePrefix("10.5.1.0/24"), netip.MustParseAddr("192.0.2.11")); got != tc.want {
			t.Errorf("--peer %v: chosen %v, want %v", tc.only, got, tc.want)
		}
	}
}
