// SPDX-License-Identifier: Apache-2.0

package options

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/spell"
)

func TestParseErrors(t *testing.T) {
	dir := t.TempDir()
	file := write(t, "file")
	missing := filepath.Join(dir, "missing")
	const (
		malformed = "expected host:port, or http:// or https:// with host:port"
		userinfo  = "expected no user and password in a URL, but --etcd-username and --etcd-password"
	)
	tests := []struct {
		args, env []string
		want      string
	}{
		// Several networks.
		{args: []string{"--kube-subnet-mgr", "--net-config-path", file, "--networks=red"}, want: "--networks needs etcd: in Kubernetes a Node has one podCIDR for each address family, so there is one network"},
		{args: []string{"--kube-subnet-mgr", "--net-config-path", file, "--watch-networks"}, want: "--watch-networks needs etcd: in Kubernetes a Node has one podCIDR for each address family, so there is one network"},
		{args: []string{"--iface=node-ip"}, want: "--iface node-ip needs --kube-subnet-mgr: with etcd a host has no Node, expected a name or an address"},
		{args: []string{"--exit-on-config-change", "--networks=red"}, want: "--exit-on-config-change is for one network: with --networks changes of networks are followed"},
		{args: []string{"--follow-config=false", "--networks=red"}, want: "--follow-config is for one network: with --networks changes of networks are followed"},
		// Syntax of the command line.
		{args: []string{"--ifcae=eth0"}, want: "unknown flag --ifcae: did you mean --iface?"},
		{args: []string{"-etcd_endpoint", "x"}, want: "unknown flag --etcd_endpoint: did you mean --etcd-endpoints?"},
		{args: []string{"--IP-MASQ"}, want: "unknown flag --IP-MASQ: did you mean --ip-masq?"},
		{args: []string{"--log_dir=/tmp"}, want: "unknown flag --log_dir: see --help"},
		{args: []string{"--ip-masq", "--bogus=secret"}, want: "unknown flag --bogus: see --help"},
		{args: []string{"--iface"}, want: "--iface needs a value"},
		{args: []string{"--iface=10.0.0.1,10.0.0.2"}, want: `--iface "10.0.0.1,10.0.0.2" is invalid: expected an IPv4 and an IPv6 address of one interface, separated by a comma`},
		{args: []string{"--ip-masq", "--v"}, want: "--v needs a value"},
		{args: []string{"---iface=x"}, want: `argument "---iface=x" is not a flag: expected --name or --name=value`},
		{args: []string{"--iface", "eth0", "--=x"}, want: `argument "--=x" is not a flag: expected --name or --name=value`},
		{args: []string{"run"}, want: `unexpected argument "run": expected flags only, see --help`},
		{args: []string{"--ip-masq", "--", "run"}, want: `unexpected argument "run": expected flags only, see --help`},
		{args: []string{"--ip-masq", "-"}, want: `unexpected argument "-": expected flags only, see --help`},
		{args: []string{"--ip-masq", "false", "--v=4"}, want: `unexpected argument "false": expected --ip-masq=false`},
		{args: []string{"--iface", "eth0", "true"}, want: `unexpected argument "true": expected flags only, see --help`},
		{args: []string{"http://u:p@h:1"}, want: `unexpected argument "http://[redacted]@h:1": expected flags only, see --help`},

		// Values, by flag and by variable.
		{args: []string{"--iptables-resync=abc"}, want: `--iptables-resync "abc" is invalid: expected a whole number of seconds from 1 to 2147483647`},
		{env: []string{"FLANNELD_IPTABLES_RESYNC=abc"}, want: `FLANNELD_IPTABLES_RESYNC "abc" is invalid: expected a whole number of seconds from 1 to 2147483647`},
		{args: []string{"--iptables-resync=0"}, want: `--iptables-resync "0" is invalid: expected a whole number of seconds from 1 to 2147483647`},
		{args: []string{"--iptables-resync=99999999999999999999"}, want: `--iptables-resync "99999999999999999999" is invalid: expected a whole number of seconds from 1 to 2147483647`},
		{env: []string{"FLANNELD_SUBNET_LEASE_RENEW_MARGIN=1440"}, want: `FLANNELD_SUBNET_LEASE_RENEW_MARGIN "1440" is invalid: expected a whole number of minutes from 1 to 1439`},
		{args: []string{"--subnet-lease-renew-margin", "0"}, want: `--subnet-lease-renew-margin "0" is invalid: expected a whole number of minutes from 1 to 1439`},
		{args: []string{"--subnet-lease-renew-margin=1h"}, want: `--subnet-lease-renew-margin "1h" is invalid: expected a whole number of minutes from 1 to 1439`},
		{args: []string{"--healthz-port=65536"}, want: `--healthz-port "65536" is invalid: expected a port from 0 to 65535`},
		{args: []string{"--healthz-port=-x"}, want: `--healthz-port "-x" is invalid: expected a port from 0 to 65535`},
		{args: []string{"--healthz-port=1", "--healthz-port=x", "--healthz-port=2"}, want: `--healthz-port "x" is invalid: expected a port from 0 to 65535`},
		{args: []string{"--healthz-ip=localhost"}, want: `--healthz-ip "localhost" is invalid: expected an IP address`},
		{args: []string{"--ip-masq=yes"}, want: `--ip-masq "yes" is invalid: expected true or false`},
		{env: []string{"FLANNELD_KUBE_SUBNET_MGR=on"}, want: `FLANNELD_KUBE_SUBNET_MGR "on" is invalid: expected true or false`},
		{args: []string{"--version=maybe"}, want: `--version "maybe" is invalid: expected true or false`},
		{args: []string{"--public-ip=fd00::1"}, want: `--public-ip "fd00::1" is invalid: expected an IPv4 address that peers can reach`},
		{args: []string{"--public-ip=0.0.0.0"}, want: `--public-ip "0.0.0.0" is invalid: expected an IPv4 address that peers can reach`},
		{args: []string{"--public-ip=10.0.0.1/24"}, want: `--public-ip "10.0.0.1/24" is invalid: expected an IPv4 address that peers can reach`},
		{args: []string{"--public-ip=node7.example.org"}, want: `--public-ip "node7.example.org" is invalid: expected an IPv4 address that peers can reach`},
		{args: []string{"--public-endpoint=node7:0"}, want: `--public-endpoint "node7:0" is invalid: expected NAME or NAME:PORT, such as node7.example.org:51820`},
		{args: []string{"--location=a b"}, want: `--location "a b" is invalid: expected a name of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends`},
		{args: []string{"--location-label=/zone"}, want: `--location-label "/zone" is invalid: expected the key of a label, such as topology.kubernetes.io/zone`},
		{args: []string{"--location-label=zone"}, want: "--location-label needs --kube-subnet-mgr: with etcd, expected --location"},
		{args: []string{"--location-label=zone", "--kube-subnet-mgr", "--net-config-path", file}, env: []string{"FLANNELD_LOCATION=a"}, want: "FLANNELD_LOCATION and --location-label are both set: expected one"},
		{args: []string{"--public-ipv6=10.0.0.1"}, want: `--public-ipv6 "10.0.0.1" is invalid: expected an IPv6 address that peers can reach`},
		{args: []string{"--public-ipv6=ff02::1"}, want: `--public-ipv6 "ff02::1" is invalid: expected an IPv6 address that peers can reach`},
		{args: []string{"--public-ipv6=fe80::1%eth0"}, want: `--public-ipv6 "fe80::1%eth0" is invalid: expected an IPv6 address that peers can reach`},
		{env: []string{"FLANNELD_IFACE_CAN_REACH=example.org"}, want: `FLANNELD_IFACE_CAN_REACH "example.org" is invalid: expected an IP address`},
		{args: []string{"--subnet-file="}, want: `--subnet-file "" is invalid: expected the path of a file`},
		{args: []string{"--resync=0"}, want: `--resync "0" is invalid: expected a duration such as 90s or 5m, at least 1s`},
		{args: []string{"--resync=300"}, want: `--resync "300" is invalid: expected a duration such as 90s or 5m, at least 1s`},
		{args: []string{"--iface-wait=-1s"}, want: `--iface-wait "-1s" is invalid: expected a duration such as 90s or 5m, at least 0s`},
		{args: []string{"--log-format=xml"}, want: `--log-format "xml" is invalid: expected text or json`},
		{args: []string{"--v=-1"}, want: `--v "-1" is invalid: expected a level from 0 to 2147483647`},
		{env: []string{"FLANNELD_V=debug"}, want: `FLANNELD_V "debug" is invalid: expected a level from 0 to 2147483647`},
		{args: []string{"--vmodule=a"}, want: `--vmodule "a" is invalid: expected pattern=level, comma separated`},
		{args: []string{"--vmodule=a=1,=2"}, want: `--vmodule "a=1,=2" is invalid: expected pattern=level, comma separated`},
		{args: []string{"--log_backtrace_at=x:1"}, want: `--log_backtrace_at "x:1" is invalid: expected file.go:line`},
		{args: []string{"--log_backtrace_at=x.go:0"}, want: `--log_backtrace_at "x.go:0" is invalid: expected file.go:line`},
		{args: []string{"--kube-api-url=ftp://x"}, want: `--kube-api-url "ftp://x" is invalid: expected a URL such as https://host:port`},
		{args: []string{"--kube-api-url=https://u:pw@x"}, want: `--kube-api-url "https://[redacted]@x" is invalid: expected no user and password in a URL, but --kubeconfig-file`},

		// etcd endpoints.
		{args: []string{"--etcd-endpoints="}, want: `--etcd-endpoints "" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=a:1,,b:2"}, want: `--etcd-endpoints "a:1,,b:2" is invalid: endpoint 2: ` + malformed},
		{args: []string{"--etcd-endpoints=http://a"}, want: `--etcd-endpoints "http://a" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=a:0"}, want: `--etcd-endpoints "a:0" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=a:65536"}, want: `--etcd-endpoints "a:65536" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=fd00::1:2379"}, want: `--etcd-endpoints "fd00::1:2379" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=http://a:1/v2"}, want: `--etcd-endpoints "http://a:1/v2" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=ftp://a:1"}, want: `--etcd-endpoints "ftp://a:1" is invalid: endpoint 1: ` + malformed},
		{args: []string{"--etcd-endpoints=http://a:1,http://u:p@b:1"}, want: `--etcd-endpoints "http://[redacted]@b:1" is invalid: endpoint 2: ` + userinfo},
		{args: []string{"--etcd-endpoints=u:p@b:1"}, want: `--etcd-endpoints "[redacted]@b:1" is invalid: endpoint 1: ` + malformed},
		{
			args: []string{"--etcd-endpoints=https://a:1,http://b:1"},
			want: `--etcd-endpoints "https://a:1,http://b:1" is invalid: endpoint 1 is https and endpoint 2 is http: expected one scheme for all`,
		},
		{
			env:  []string{"FLANNELD_ETCD_ENDPOINTS=a:1,http://b:1"},
			want: `FLANNELD_ETCD_ENDPOINTS "a:1,http://b:1" is invalid: endpoint 1 is without scheme and endpoint 2 is http: expected one scheme for all`,
		},

		// Pairs and files.
		{args: []string{"--etcd-username=u"}, want: "--etcd-username is set and --etcd-password is not: expected both or neither"},
		{env: []string{"FLANNELD_ETCD_PASSWORD=p"}, want: "FLANNELD_ETCD_PASSWORD is set and --etcd-username is not: expected both or neither"},
		{args: []string{"--etcd-keyfile", file}, want: "--etcd-keyfile is set and --etcd-certfile is not: expected both or neither"},
		{env: []string{"FLANNELD_ETCD_CERTFILE=" + file}, want: "FLANNELD_ETCD_CERTFILE is set and --etcd-keyfile is not: expected both or neither"},
		{args: []string{"--etcd-cafile", missing}, want: `--etcd-cafile "` + missing + `" cannot be read: no such file or directory`},
		{args: []string{"--etcd-cafile", file + "/x"}, want: `--etcd-cafile "` + file + `/x" cannot be read: not a directory`},
		{args: []string{"--etcd-cafile", dir}, want: `--etcd-cafile "` + dir + `" is a directory: expected a file`},
		{args: []string{"--etcd-keyfile", missing, "--etcd-certfile", file}, want: `--etcd-keyfile "` + missing + `" cannot be read: no such file or directory`},
		{args: []string{"--etcd-keyfile", file, "--etcd-certfile", missing}, want: `--etcd-certfile "` + missing + `" cannot be read: no such file or directory`},
		{env: []string{"FLANNELD_KUBECONFIG_FILE=" + missing}, want: `FLANNELD_KUBECONFIG_FILE "` + missing + `" cannot be read: no such file or directory`},
		{args: []string{"--kube-subnet-mgr", "--net-config-path", missing}, want: `--net-config-path "` + missing + `" cannot be read: no such file or directory`},
		{args: []string{"--log-format=json", "--log_backtrace_at=x.go:1"}, want: "--log_backtrace_at works with text logs only: expected --log-format text"},
	}
	for _, tt := range tests {
		t.Run(strings.Join(append(tt.args, tt.env...), " "), func(t *testing.T) {
			_, err := Parse(tt.args, tt.env)
			if err == nil {
				t.Fatalf("no error, want %q", tt.want)
			}
			if err.Error() != tt.want {
				t.Errorf("got  %q\nwant %q", err, tt.want)
			}
		})
	}
}

// TestEveryFlagRefusesNonsense passes impossible texts to each flag and each variable. Parse must
// return an error of one line that contains the flag or variable, the text and the expected value.
func TestEveryFlagRefusesNonsense(t *testing.T) {
	file, dir := write(t, "file"), t.TempDir()
	long := strings.Repeat("x", 200)
	switches := []string{"yes", "2", "on", "tru"}
	addresses := []string{"x", "10.0.0", "10.0.0.256", "10.0.0.1/24", "fe80::1%eth0", "224.0.0.1", "ff02::1", "255.255.255.255"}
	files := []string{dir, file + "/x", dir + "/missing"}
	durations := []string{"x", "5", "-1s", "5 m", "1d", "876001h", "2562047h"}
	nonsense := map[string][]string{
		"etcd-endpoints": {
			"etcd", "etcd:", ":2379", "etcd:x", "etcd:70000", "10.0.0.256:2379", "http://10.0.0.1.2:2379", "a..b:1", "a b:1", long + ":1", "unix://",
			"tcp://a:1", "http:/a:1", "a:1;b:1", "http://[fd00::g]:1", "a:1,", "http://a:1?x", "etcd%:1",
		},
		"etcd-prefix":   nil, // any text is valid
		"etcd-cafile":   files,
		"etcd-certfile": files, "etcd-keyfile": files,
		"etcd-username": nil, "etcd-password": nil, // any text is valid, if both are set or neither
		"subnet-lease-ttl": append(durations, "0s", "4s"), "subnet-lease-renew-margin": {"x", "0", "1440", "1h", "1.5"},
		"kube-subnet-mgr": switches, "kubeconfig-file": files,
		"kube-api-url": {
			"ftp://x", "https://", "https://:6443", "https://a:0", "https://a:70000", "https://a:x", "https://10.0.0.256", "10.0.0.256:6443", "https://a b", "/x", "a..b",
		},
		"kube-annotation-prefix": {"x", "a.b/c/d", "a b.c", "/x", "Ä.b"}, "net-config-path": {"", "/etc/"}, "set-node-network-unavailable": switches,
		"iface": {
			"eth0/1", "eth0:1", "eth 0", " eth0", "eth0\n", "a-name-that-is-too-long", "..", ".", "10.0.0.0/24", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "fd00::g",
		},
		"iface-regex": {"[", "(", "*", "eth(?=0)", "a{1,0}", `\`, "(?P<n", "a**"}, "iface-can-reach": append(addresses, "0.0.0.0", "127.0.0.1", "::1"),
		"networks": {"", ",", "a,b/c", "config", "subnets,a", "..", "a,a", "a b"}, "watch-networks": {"", "no"}, "subnet-dir": {""}, "masquerade-between-networks": {"yes"},
		"iface-wait": durations, "public-ip": append(addresses, "::1", "127.0.0.1", "0.0.0.0"), "public-ipv6": append(addresses, "10.0.0.1", "::1", "::"),
		"public-endpoint": {"a b", "a..b", "node:", "node:0", "node:70000", ":51820", "10.0.0.256", "http://node", "fe80::1%eth0", "127.0.0.1", "224.0.0.1:7", "node," + long},
		"location":        {"a b", "-a", "a.", "a/b", "ä", long}, "location-label": {"/zone", "a/b/c", "A.b/zone", "zone ", "-zone", "x/" + long},
		"ip-masq": switches, "ip-masq-fully-random-disable": switches, "iptables-forward-rules": switches,
		"guard-tunnel":    switches,
		"iptables-resync": {"x", "0", "-1", "5s", "1.5", "2147483648"}, "firewall": {"", "ufw", "IPTABLES"}, "ip-blackhole-route": switches,
		"resync": append(durations, "0s", "999ms"), "follow-config": switches, "exit-on-config-change": switches, "probe": switches, "nexthop-objects": {"", "on", "Auto"}, "allow-extension-backend": switches,
		"udp-source-check": {"", "loose", "on"}, "udp-persist": switches,
		"subnet-file": {"", dir, dir + "/"}, "state-dir": {"", file},
		"healthz-ip": {"x", "localhost", "10.0.0.0/8", "224.0.0.1", "255.255.255.255", "ff02::1"}, "healthz-port": {"x", "65536", "80/tcp", "1.5"},
		"readyz-datastore-grace": durations, "status-socket": {dir, dir + "/", "/run/" + long},
		"statusz-address": {"x", ":8287", "localhost:8287", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "224.0.0.1:80", "[ff02::1]:80"},
		"log-format":      {"", "xml", "JSON"}, "v": {"x", "-1", "1.5", "2147483648"}, "vmodule": {"a", "=1", "a=x", "a=-1", "[=1", "a[=1", "a=1;b=2"},
		"log_backtrace_at": {"x", "x.go", "x.go:0", "x.go:x", ":7", "x:7"}, "version": switches,
	}
	for _, s := range settings(&Options{}) {
		texts, known := nonsense[s.name]
		if !known {
			t.Errorf("--%s: this test has no impossible text for the flag", s.name)
		}
		for _, text := range texts {
			args := []string{"--" + s.name + "=" + text}
			if s.name == "net-config-path" {
				args = append(args, "--kube-subnet-mgr")
			}
			expectRefusal(t, "--"+s.name, text, args, nil)
			if text != "" && s.name != "version" { // --version has no variable
				variable := Variable(s.name)
				expectRefusal(t, variable, text, args[1:], []string{variable + "=" + text})
			}
		}
		delete(nonsense, s.name)
	}
	for name := range nonsense {
		t.Errorf("there is no flag --%s", name)
	}
}

func expectRefusal(t *testing.T, source, text string, args, env []string) {
	t.Helper()
	_, err := Parse(args, env)
	switch {
	case err == nil:
		t.Errorf("%s accepts %q", source, text)
	case strings.ContainsAny(err.Error(), "\r\n"):
		t.Errorf("%s with %q: %q is not one line", source, text, err)
	case !strings.HasPrefix(err.Error(), source+" ") || !strings.Contains(err.Error(), fmt.Sprintf("%q", text)):
		// If only one flag of a pair is set, such as --etcd-keyfile without --etcd-certfile, the error
		// names the flag or the variable that sets it, and the missing flag. It does not contain the value.
		if !strings.HasSuffix(err.Error(), "expected both or neither") {
			t.Errorf("%s with %q: %q, want the flag and the text", source, text, err)
		}
	case !strings.Contains(err.Error(), "expected") && !strings.Contains(err.Error(), "cannot be read"):
		t.Errorf("%s with %q: %q, want what was expected", source, text, err)
	}
}

// TestMeantFlag checks that the right flag is found for a misspelt name, and none for other names.
func TestMeantFlag(t *testing.T) {
	known := names(settings(&Options{}))
	for name, want := range map[string]string{
		"ifaec":             "iface",
		"log-backtrace-at":  "log_backtrace_at",
		"kubeconfig":        "",
		"use-multi-cluster": "",
		"port":              "",
		"x":                 "",
	} {
		if got, ok := spell.Meant(name, known); got != want || ok != (want != "") {
			t.Errorf("--%s means %q, %v, want %q", name, got, ok, want)
		}
	}
}

// FuzzParse checks that Parse returns either an error of one line, or options in which flags with a
// default still have a value. Each warning must be one line.
func FuzzParse(f *testing.F) {
	f.Add("--etcd-endpoints=http://u:p@a:1", "FLANNELD_V=4")
	f.Add("---x", "FLANNELD_IFCAE=1")
	f.Add("--", "=")
	f.Add("-v", "FLANNELD_VMODULE=a=1,")
	f.Add("--log_backtrace_at=a.go:1", "FLANNELD_RESYNC=1h")
	f.Fuzz(func(t *testing.T, arg, variable string) {
		o, err := Parse([]string{arg}, []string{variable})
		if err != nil && strings.ContainsAny(err.Error(), "\r\n") {
			t.Errorf("error is not one line: %q", err)
		}
		if err == nil && (o.Resync <= 0 || o.IPTablesResync <= 0 || o.RenewMargin <= 0 || len(o.EtcdEndpoints) == 0) {
			t.Errorf("a flag was zeroed: %+v", o)
		}
		for _, w := range o.Warnings {
			if strings.ContainsAny(w, "\r\n") {
				t.Errorf("warning is not one line: %q", w)
			}
		}
	})
}
