// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
)

func TestNeedsShell(t *testing.T) {
	for line, want := range map[string]bool{
		`ip route add $SUBNET via $PUBLIC_IP`:                          false,
		`ip route add ${SUBNET} via ${PUBLIC_IP} metric 5`:             false,
		"  /opt/bin/add\t$SUBNET  ":                                    false,
		`wg set wg0 listen-port 51820 allowed-ips 10.0.0.0/8,fd00::/8`: false,
		`vpn --peer=$PUBLIC_IP`:                                        false,
		`exporter`:                                                     false,
		`ip route add "$SUBNET" via "$PUBLIC_IP"`:                      true,
		`ip link add x type dummy && cat /sys/class/net/x/address`:     true,
		`export VNI=1`:                                                 true,
		`read VTEP`:                                                    true,
		`FOO=bar env`:                                                  true,
		"a\nb":                                                         true,
		"echo `date`":                                                  true,
		`echo $(date)`:                                                 true,
		`echo ${SUBNET%/*}`:                                            true,
		`echo $1`:                                                      true,
		`echo $$`:                                                      true,
		`echo *`:                                                       true,
		`a;b`:                                                          true,
		`a > /tmp/b`:                                                   true,
		`exec ip route add $SUBNET via $PUBLIC_IP`: true,
		`: nothing`: true,
		`ip link del $IF_NAME 2>/dev/null; ip link add $IF_NAME type gre`: true,
	} {
		if got := needsShell(line); got != want {
			t.Errorf("needsShell(%q) = %v", line, got)
		}
	}
}

// mustCommand returns the SubnetAddCommand of a configuration with that line and that value of
// Shell.
func mustCommand(t *testing.T, line string, shell *bool) command {
	t.Helper()
	c, err := newCommand(subnetAdd, line, shell)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRun(t *testing.T) {
	yes, no := true, false
	env := []string{"SUBNET=10.5.1.0/24", "PUBLIC_IP=192.0.2.1", "BLANKS=a  b", "EMPTY=", "SYNTAX=$(touch /nowhere); x"}
	for _, tc := range []struct {
		name, line string
		shell      *bool
		stdin      string
		want       string
	}{
		{name: "direct", line: `echo $SUBNET via ${PUBLIC_IP}.`, want: "10.5.1.0/24 via 192.0.2.1."},
		{name: "direct does not split values", line: `printf <%s> $BLANKS`, shell: &no, want: "<a  b>"},
		{name: "direct keeps quotes", line: `echo "$SUBNET"`, shell: &no, want: `"10.5.1.0/24"`},
		{name: "direct passes empty words", line: `printf [%s] a $EMPTY b`, shell: &no, want: "[a][][b]"},
		{name: "direct does not know the variable", line: `echo a${NO_SUCH_VARIABLE}b`, want: "ab"},
		{name: "values are no syntax", line: `echo $SYNTAX`, want: "$(touch /nowhere); x"},
		{name: "values are no syntax to a shell", line: `echo "$SYNTAX"`, want: "$(touch /nowhere); x"},
		{name: "shell by syntax", line: `echo "$SUBNET" | cut -d/ -f1`, want: "10.5.1.0"},
		{name: "shell on demand", line: `echo $BLANKS`, shell: &yes, want: "a b"},
		{name: "stdin", line: `read a b; echo "$b-$a"`, stdin: "one two", want: "two-one"},
		{name: "stdin ends with a newline", line: `od -An -c`, stdin: "x", want: `x  \n`},
		{name: "no stdin is a newline", line: `od -An -c`, want: `\n`},
		{name: "stdin is not expanded", line: `cat`, stdin: "$SUBNET `id` $(id)", want: "$SUBNET `id` $(id)"},
		{name: "both outputs, trimmed", line: `echo; echo out1; echo err1 >&2; echo`, want: "out1\nerr1"},
		{name: "stdin that the command does not read", line: `true`, stdin: strings.Repeat("x", 1<<20)},
		{name: "much stdin", line: `wc -c`, stdin: strings.Repeat("x", 1<<20), want: "1048577"},
		{name: "not UTF-8", line: `printf 'a\377b'`, want: "a\uFFFDb"},
		{name: "background", line: `sleep 5 & echo started`, want: "started"},
		{name: "nothing", line: "  \t "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := mustCommand(t, tc.line, tc.shell).run(t.Context(), input{Env: env, Stdin: tc.stdin}, patience)
			if err != nil || got != tc.want {
				t.Errorf("run(%q) = %q, %v, want %q", tc.line, got, err, tc.want)
			}
		})
	}
}

func TestRunFails(t *testing.T) {
	for _, tc := range []struct {
		line, want, output string
	}{
		{`false`, "SubnetAddCommand: exit status 1", ""},
		{`echo one; echo "two three" >&2; exit 7`, "SubnetAddCommand: exit status 7: two three", "one\ntwo three"},
		{`/no/such/program x`, "SubnetAddCommand: fork/exec /no/such/program: no such file or directory", ""},
		{`no-such-program-either`, `SubnetAddCommand: exec: "no-such-program-either": executable file not found in $PATH`, ""},
		{`if`, "SubnetAddCommand: exit status 2", "*"},
		{`$NO_SUCH_VARIABLE`, "SubnetAddCommand: exec: no command", ""},
		{`kill -9 $$`, "SubnetAddCommand: signal: killed", ""},
	} {
		output, err := mustCommand(t, tc.line, nil).run(t.Context(), input{}, patience)
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) || tc.output != "*" && output != tc.output {
			t.Errorf("run(%q) = %q, %v, want %q, %s", tc.line, output, err, tc.output, tc.want)
		}
	}
}

func TestOutputIsBounded(t *testing.T) {
	output, err := mustCommand(t, `yes | head -c 1000000`, nil).run(t.Context(), input{}, patience)
	if err != nil || len(output) < maxOutput-2 || len(output) > maxOutput {
		t.Errorf("%d bytes, %v", len(output), err)
	}
}

// TestTimeoutKillsTheGroup checks that the timeout ends a command that hangs in a child of its
// shell, and that the child is killed, too.
func TestTimeoutKillsTheGroup(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pids")
	line := `sleep 1000 & echo $! > ` + pipe + `; echo waiting; wait`
	start := time.Now()
	output, err := mustCommand(t, line, nil).run(t.Context(), input{}, 500*time.Millisecond)
	if !errors.Is(err, errTimeout) || output != "waiting" || time.Since(start) > patience {
		t.Errorf("after %v: %q, %v", time.Since(start), output, err)
	}
	pid, err := os.ReadFile(pipe)
	if err != nil {
		t.Fatal(err)
	}
	stat := filepath.Join("/proc", strings.TrimSpace(string(pid)), "stat")
	for deadline := time.Now().Add(patience); ; {
		text, err := os.ReadFile(stat)
		if err != nil || strings.Contains(string(text), ") Z ") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the child outlives its group: %s", text)
		}
	}
}

func TestEnvironmentOfCommands(t *testing.T) {
	t.Setenv("FLANNELD_ETCD_PASSWORD", "secret")
	t.Setenv("FLANNELD_ETCD_USERNAME", "user")
	t.Setenv("SUBNET", "of the daemon's own environment")
	output, err := mustCommand(t, `echo "[$FLANNELD_ETCD_PASSWORD][$FLANNELD_ETCD_USERNAME][$SUBNET]"`, nil).
		run(t.Context(), input{Env: []string{"SUBNET=x"}}, patience)
	if err != nil || output != "[][user][x]" {
		t.Errorf("%q, %v", output, err)
	}
}

func TestConfig(t *testing.T) {
	for _, tc := range []struct {
		raw      string
		err      string
		warnings []string
	}{
		{raw: `{"Type":"extension"}`},
		{raw: `{"type":"extension","subnetaddcommand":"a","Shell":false,"CommandTimeout":3600}`},
		{raw: `{"Type":"extension","PreStartupCommand":null}`},
		{raw: `{"SubnetAddComand":"a"}`, warnings: []string{`unknown key "SubnetAddComand" is ignored, the nearest known key is "SubnetAddCommand"`}},
		{raw: `{"CommandTimeout":0}`, err: "Backend.CommandTimeout is 0: want 1 to 3600 seconds"},
		{raw: `{"CommandTimeout":3601}`, err: "Backend.CommandTimeout is 3601: want 1 to 3600 seconds"},
		{raw: `{"SubnetAddCommand":["a"]}`, err: "Backend: SubnetAddCommand: want a string, have array"},
		{raw: `{"Shell":"yes"}`, err: "Backend: Shell: want true or false, have string"},
		{raw: `{"PreStartupCommand":"a\u0000b"}`, err: "Backend.PreStartupCommand: want a command line, have one with a NUL character"},
	} {
		_, warnings, err := NewHost(Settings{Allow: true}).New([]byte(tc.raw), backend.Env{})
		if got := errorText(err); got != tc.err {
			t.Errorf("New(%s): %q, want %q", tc.raw, got, tc.err)
		}
		if diff := cmp.Diff(tc.warnings, warnings); tc.err == "" && diff != "" {
			t.Errorf("New(%s): warnings (-want +got):\n%s", tc.raw, diff)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestNotAllowed(t *testing.T) {
	_, _, err := NewHost(Settings{}).New([]byte(`{"Type":"extension"}`), backend.Env{})
	if !errors.Is(err, ErrNotAllowed) || !strings.Contains(err.Error(), "--allow-extension-backend") {
		t.Errorf("New = %v", err)
	}
}

func FuzzNeedsShell(f *testing.F) {
	for _, line := range []string{"a b", `a "$b"`, "a $b ${c}", "export a", "a=b c"} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		c, err := newCommand(subnetAdd, line, nil)
		if err != nil || !c.configured() || c.Shell {
			return
		}
		if words := c.words(nil); len(words) == 0 || strings.ContainsAny(line, "\"'`;|&<>()\\\n") {
			t.Errorf("%q is run as %q", line, words)
		}
	})
}
