// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	os.Exit(m.Run())
}

func run(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, progress bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&progress)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestArgumentsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"x":                                `unknown command "x"`,
		"--bogus":                          "unknown flag: --bogus",
		"--hosts many":                     `invalid argument "many" for "--hosts"`,
		"--ipv6 --dual":                    "--ipv6 and --dual are both given",
		"--hosts 0":                        "--hosts: 0 is not positive",
		"--mtu -1":                         "--mtu: -1 is not positive",
		"--interval 0s":                    "--interval: 0s is not positive",
		"--backend-config []":              `--backend-config: want a JSON object, got "[]"`,
		"--backend-config null":            `--backend-config: want a JSON object, got "null"`,
		`--backend-config {"Type":"udp"}`:  "--backend-config: Type is udp, but --backend says vxlan",
		"--backend vxlan,host-gw":          "--backend: several types need --networks",
		"--flanneld /nowhere":              "/nowhere: no such file",
		"--flanneld /bin/true --hosts 201": "hosts: 201 is not in 1 to 200",
		"--flanneld /bin/true --mtu 1000":  "underlay MTU: 1000 is not in 1280 to 65535",
	} {
		_, err := run(t, strings.Fields(args)...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want one line with %s", args, err, want)
		}
	}
}

var flagText = regexp.MustCompile("(?:^|[ (`])--([a-z][a-z0-9-]+)")

// TestTextsNameExistingFlags checks that the flags exist which the page about the lab, the commands on
// other pages and the help name.
func TestTextsNameExistingFlags(t *testing.T) {
	pages, err := filepath.Glob("../../Documentation/*.md")
	more, _ := filepath.Glob("../../Documentation/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(examples, "\n")
	for _, page := range append(pages, more...) {
		raw, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(raw)) {
			if strings.Contains(line, "flannel-lab ") || filepath.Base(page) == "lab.md" && !strings.Contains(line, "etcdctl") {
				lines = append(lines, line)
			}
		}
	}
	flags := 0
	for _, line := range lines {
		for _, f := range flagText.FindAllStringSubmatch(line, -1) {
			flags++
			if f[1] != "help" && newCommand().Flags().Lookup(f[1]) == nil {
				t.Errorf("flannel-lab has no flag --%s: %s", f[1], line)
			}
		}
	}
	if flags < 30 {
		t.Errorf("only %d flags found", flags)
	}
	if help, err := run(t, "--help"); err != nil || !strings.Contains(help, examples) {
		t.Errorf("%v, no examples in\n%s", err, help)
	}
}

// TestInterruptedLab checks that an interrupted lab counts as a success. With --once it
// must fail, because its output is missing.
func TestInterruptedLab(t *testing.T) {
	for once, want := range map[string]string{"--once": "interrupted: ", "--once=false": ""} {
		ctx, cancel := context.WithCancel(t.Context())
		cmd := newCommand()
		cmd.SetArgs([]string{once, "--hosts", "1", "--flanneld", "/bin/true"})
		cmd.SetErr(writer(func([]byte) { cancel() })) // interrupts the lab when it prints its first step
		err := cmd.ExecuteContext(ctx)
		if want == "" && err != nil || want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", once, err, want)
		}
	}
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(b)
	return len(b), nil
}

// TestFlanneldThatFails checks that the error names the host whose flanneld fails, and
// its exit status.
func TestFlanneldThatFails(t *testing.T) {
	_, err := run(t, "--once", "--hosts", "1", "--flanneld", "/bin/false")
	if err == nil || !strings.Contains(err.Error(), "host1 flanneld: exit status 1") {
		t.Errorf("got %v, want the host and the exit status", err)
	}
}
