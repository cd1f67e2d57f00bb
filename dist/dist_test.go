// SPDX-License-Identifier: Apache-2.0

// Package dist_test tests the scripts, units, packages and releases that users install.
package dist_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const sample = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n"

func TestMkDockerOpts(t *testing.T) {
	const (
		bip, mtu = `DOCKER_OPT_BIP="--bip=10.1.74.1/24"` + "\n", `DOCKER_OPT_MTU="--mtu=1472"` + "\n"
		masq     = `DOCKER_OPT_IPMASQ="--ip-masq=true"` + "\n"
		all      = ` --bip=10.1.74.1/24 --ip-masq=true --mtu=1472"` + "\n"
	)
	for _, shell := range []string{"dash", "bash"} {
		for _, tc := range []struct {
			name, file string
			args, env  []string
			want       string
			fails      string // expected text on standard error; empty: success is expected
		}{
			{name: "as it is", file: sample, want: bip + masq + mtu + `DOCKER_OPTS="` + all},
			{name: "individual", file: sample, args: []string{"-i"}, want: bip + masq + mtu},
			{name: "combined", file: sample, args: []string{"-c"}, want: `DOCKER_OPTS="` + all},
			{name: "both", file: sample, args: []string{"-i", "-c"}, want: bip + masq + mtu + `DOCKER_OPTS="` + all},
			{name: "another key", file: sample, args: []string{"-c", "-k", "OPTS"}, want: `OPTS="` + all},
			{name: "options that are there", file: sample, args: []string{"-c"}, env: []string{"DOCKER_OPTS=-D"}, want: `DOCKER_OPTS="-D ` + all},
			{name: "options of others", file: sample, args: []string{"-i"}, env: []string{"DOCKER_OPT_DNS=--dns=192.0.2.53"}, want: bip + `DOCKER_OPT_DNS="--dns=192.0.2.53"` + "\n" + masq + mtu},
			{name: "no masquerading", file: sample, args: []string{"-c", "-m"}, want: `DOCKER_OPTS=" --bip=10.1.74.1/24 --mtu=1472"` + "\n"},
			{name: "flannel masquerades", file: strings.Replace(sample, "false", "true", 1), args: []string{"-i"}, want: bip + strings.Replace(masq, "true", "false", 1) + mtu},
			{name: "no file", args: []string{"-c"}, want: `DOCKER_OPTS=""` + "\n"},
			{name: "IPv6 beside it", file: sample + "FLANNEL_IPV6_SUBNET=fd00::1/64\n", args: []string{"-i"}, want: bip + masq + mtu},
			{name: "damaged", file: strings.Replace(sample, "false", "perhaps", 1), fails: "FLANNEL_IPMASQ is perhaps"},
			{name: "bad option", file: sample, args: []string{"-x"}, fails: "usage:"},
			{name: "help", file: sample, args: []string{"-h"}, fails: "usage:"},
			{name: "an argument", file: sample, args: []string{"x"}, fails: "usage:"},
			{name: "bad key", file: sample, args: []string{"-k", "A;reboot"}, fails: "not the name of a variable"},
		} {
			t.Run(shell+"/"+tc.name, func(t *testing.T) {
				dir := t.TempDir()
				in, out := filepath.Join(dir, "subnet.env"), filepath.Join(dir, "docker.env")
				if tc.file != "" {
					if err := os.WriteFile(in, []byte(tc.file), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				cmd := exec.CommandContext(t.Context(), shell, append([]string{"mk-docker-opts.sh", "-f", in, "-d", out}, tc.args...)...)
				cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, tc.env...)
				var stderr strings.Builder
				cmd.Stderr = &stderr
				err := cmd.Run()
				if tc.fails != "" {
					if err == nil || !strings.Contains(stderr.String(), tc.fails) {
						t.Errorf("%v, %q; want a failure with %q", err, stderr.String(), tc.fails)
					}
					return
				}
				got, readErr := os.ReadFile(out)
				if err != nil || readErr != nil || stderr.Len() > 0 {
					t.Fatalf("%v, %v: %s", err, readErr, &stderr)
				}
				if diff := cmp.Diff(tc.want, string(got)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

func dropIns(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("systemd/flanneld-*.conf")
	if err != nil || len(names) == 0 {
		t.Fatalf("no drop-ins: %v", err)
	}
	return names
}

// TestDropIns checks that systemd accepts each drop-in with the unit, and that each one allows
// the device /dev/net/tun: systemd's own evaluation must say so, because a later line could
// undo an earlier one.
func TestDropIns(t *testing.T) {
	unit, err := os.ReadFile("systemd/flanneld.service")
	if err != nil {
		t.Fatal(err)
	}
	unit = regexp.MustCompile(`(?m)^ExecStart=\S+`).ReplaceAll(unit, []byte("ExecStart=/bin/true"))
	for _, name := range dropIns(t) {
		t.Run(name, func(t *testing.T) {
			raw, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range []string{"PrivateDevices=no", "DevicePolicy=closed", "DeviceAllow=/dev/net/tun rw"} {
				if !strings.Contains(string(raw), "\n"+line+"\n") {
					t.Errorf("no line %s", line)
				}
			}
			service := filepath.Join(t.TempDir(), "flanneld.service")
			if err := os.Mkdir(service+".d", 0o700); err != nil {
				t.Fatal(err)
			}
			for path, text := range map[string][]byte{service: unit, filepath.Join(service+".d", filepath.Base(name)): raw} {
				if err := os.WriteFile(path, text, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", service).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("systemd-analyze: %v: %s", err, out)
			}
			out, err := exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--json=short", service).Output()
			if err != nil {
				t.Fatalf("systemd-analyze security: %v: %s", err, out)
			}
			var checks []struct {
				Field string `json:"json_field"`
				Text  string `json:"description"`
				Set   bool
			}
			if err := json.Unmarshal(out, &checks); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			devices := ""
			for _, c := range checks {
				switch {
				case c.Field == "DeviceAllow":
					devices = c.Text
				case c.Field == "PrivateDevices" && c.Set:
					t.Error("the device is hidden: PrivateDevices is set")
				}
			}
			if !strings.Contains(devices, " /dev/net/tun:rw") {
				t.Errorf("the allowed devices are %q, want /dev/net/tun among them", devices)
			}
		})
	}
}

// TestUnitLoadsModules checks that the unit loads the modules of iptables-legacy before the
// daemon, with full rights, and ignores failures. In its sandbox the daemon's iptables-legacy
// cannot load modules, and without rules flanneld never becomes ready.
func TestUnitLoadsModules(t *testing.T) {
	unit, err := os.ReadFile("systemd/flanneld.service")
	if err != nil {
		t.Fatal(err)
	}
	load := regexp.MustCompile(`(?m)^ExecStartPre=-\+/sbin/modprobe -qab (.*)$`).FindSubmatch(unit)
	if load == nil || string(load[1]) != "ip_tables ip6_tables" {
		t.Errorf("modules that the unit loads with full rights, ignoring failures: %q", load)
	}
}

// TestMkDockerOptsNoticesAForeignRoute checks that the script fails if the subnet in
// subnet.env is routed to another host: this means that it no longer belongs to this host.
func TestMkDockerOptsNoticesAForeignRoute(t *testing.T) {
	for name, tc := range map[string]struct {
		route   string // as printed by ip -o
		foreign bool
	}{
		"of flanneld":           {"10.1.74.0/24 via 10.1.74.0 dev flannel.1 onlink", true},
		"by a next hop object":  {"10.1.74.0/24 nhid 7 via 192.0.2.2 dev eth0 proto bgp", true},
		"by several next hops":  {`10.1.74.0/24 proto bgp \	nexthop via 192.0.2.2 dev eth0 weight 1 \	nexthop via 192.0.2.3 dev eth0 weight 1`, true},
		"own":                   {"10.1.74.0/24 dev docker0 proto kernel scope link src 10.1.74.1", false},
		"own, of an odd device": {"10.1.74.0/24 dev octavia proto kernel scope link src 10.1.74.1", false},
		"of another subnet":     {"110.1.74.0/24 via 110.1.74.0 dev flannel.1 onlink", false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "ip"), []byte("#!/bin/sh\n[ $1 = -o ] && cat <<'EOF'\n"+tc.route+"\nEOF\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			in, out := filepath.Join(dir, "subnet.env"), filepath.Join(dir, "docker.env")
			if err := os.WriteFile(in, []byte(sample), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "dash", "mk-docker-opts.sh", "-f", in, "-d", out)
			cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
			text, err := cmd.CombinedOutput()
			if said := strings.Contains(string(text), "10.1.74.0/24 is routed to another host"); said != tc.foreign || (err != nil) != tc.foreign {
				t.Errorf("%v: %q", err, text)
			}
		})
	}
}
