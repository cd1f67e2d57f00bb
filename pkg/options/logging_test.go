// SPDX-License-Identifier: Apache-2.0

package options

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
)

// logged sets up logging with o, calls the function do, and returns the lines that it logs.
func logged(t *testing.T, o Options, do func(klog.Logger)) []string {
	t.Helper()
	state := klog.CaptureState()
	defer state.Restore()
	path := filepath.Join(t.TempDir(), "log")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	// klog uses the value of os.Stderr at the time of writing.
	stderr := os.Stderr
	os.Stderr = file
	defer func() { os.Stderr = stderr }()

	if err := o.SetupLogging(); err != nil {
		t.Fatal(err)
	}
	do(klog.FromContext(t.Context()))
	klog.Flush()
	out, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

func logSome(l klog.Logger) {
	l.Info("lease acquired", "subnet", "10.5.1.0/24", "password", Secret("hunter2"))
	l.V(2).Info("shown at 2")
	l.V(4).Info("shown at 4")
	l.WithValues("peer", "a").Error(errors.New("no route"), "sync ends")
}

func TestTextLogs(t *testing.T) {
	lines := logged(t, Options{LogFormat: logText, Verbosity: 2}, logSome)
	want := []string{
		`^I.*\] "lease acquired" subnet="10.5.1.0/24" password="\[redacted\]"$`,
		`^I.*\] "shown at 2"$`,
		`^E.*\] "sync ends" err="no route" peer="a"$`,
	}
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), strings.Join(lines, "\n"))
	}
	for i := range want {
		if !regexp.MustCompile(want[i]).MatchString(lines[i]) {
			t.Errorf("line %q does not match %s", lines[i], want[i])
		}
	}
}

func TestJSONLogs(t *testing.T) {
	// vmodule matches the name of the file that logs, which is this one.
	for name, o := range map[string]Options{
		"v":       {LogFormat: logJSON, Verbosity: 2},
		"vmodule": {LogFormat: logJSON, VModule: "logging_test=2"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []map[string]string
			for _, line := range logged(t, o, logSome) {
				entry := map[string]string{}
				if err := json.Unmarshal([]byte(line), &entry); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				if entry["time"] == "" {
					t.Errorf("no time in %s", line)
				}
				delete(entry, "time")
				got = append(got, entry)
			}
			want := []map[string]string{
				{"level": "INFO", "msg": "lease acquired", "subnet": "10.5.1.0/24", "password": "[redacted]"},
				{"level": "DEBUG", "msg": "shown at 2"},
				{"level": "ERROR", "msg": "sync ends", "err": "no route", "peer": "a"},
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("JSON log (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLogOptionsAreThoseOfKlog(t *testing.T) {
	// These are unusual values that Parse accepts. klog must accept them too.
	for _, args := range [][]string{
		{"--v=0x7"}, {"--v=2147483647"}, {"--vmodule=a=1,b*=2,"}, {"--vmodule=,"}, {"--log_backtrace_at=x.go:7"},
	} {
		o, err := Parse(args, nil)
		if err != nil {
			t.Fatal(err)
		}
		logged(t, o, func(klog.Logger) {})
	}
}
