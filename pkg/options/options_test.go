// SPDX-License-Identifier: Apache-2.0

package options

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
)

var compareOptions = cmp.Options{
	cmpopts.IgnoreUnexported(Options{}),
	cmpopts.EquateComparable(netip.Addr{}),
}

// defaults returns the result of Parse for an empty command line.
func defaults() Options {
	return Options{
		EtcdEndpoints:             []string{"http://127.0.0.1:4001", "http://127.0.0.1:2379"},
		EtcdPrefix:                "/coreos.com/network",
		RenewMargin:               time.Hour,
		LeaseTTL:                  24 * time.Hour,
		KubeAnnotationPrefix:      "flannel.alpha.coreos.com",
		NetConfigPath:             "/etc/kube-flannel/net-conf.json",
		SetNodeNetworkUnavailable: true,
		IfaceWait:                 time.Minute,
		IPTablesForwardRules:      true,
		GuardTunnel:               true,
		IPTablesResync:            5 * time.Second,
		Resync:                    5 * time.Minute,
		FollowConfig:              true,
		NexthopObjects:            "auto",
		Firewall:                  "config",
		AllowExtensionBackend:     true,
		UDPSourceCheck:            "network",
		SubnetFile:                "/run/flannel/subnet.env",
		SubnetDir:                 "/run/flannel/networks",
		StateDir:                  "/var/lib/flannel",
		HealthzIP:                 netip.IPv4Unspecified(),
		ReadyzDatastoreGrace:      5 * time.Minute,
		LogFormat:                 "text",
	}
}

func TestDefaults(t *testing.T) {
	got, err := Parse(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(defaults(), got, compareOptions); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
	if kv := got.LogValues(); len(kv) != 0 {
		t.Errorf("LogValues() = %v, want nothing: no flag was given", kv)
	}
}

// TestEveryFlag compares the flags with those that other daemons and their manifests use,
// and with the flags that this daemon adds.
func TestEveryFlag(t *testing.T) {
	compatible := map[string]string{
		"etcd-endpoints": "http://127.0.0.1:4001,http://127.0.0.1:2379", "etcd-prefix": "/coreos.com/network",
		"etcd-keyfile": "", "etcd-certfile": "", "etcd-cafile": "", "etcd-username": "", "etcd-password": "",
		"iface": "", "iface-regex": "", "iface-can-reach": "", "subnet-file": "/run/flannel/subnet.env",
		"public-ip": "", "public-ipv6": "", "subnet-lease-renew-margin": "60", "ip-masq": "false",
		"ip-masq-fully-random-disable": "false", "kube-subnet-mgr": "false", "kube-api-url": "",
		"kube-annotation-prefix": "flannel.alpha.coreos.com", "kubeconfig-file": "", "version": "false",
		"healthz-ip": "0.0.0.0", "healthz-port": "0", "iptables-resync": "5", "iptables-forward-rules": "true",
		"ip-blackhole-route": "false", "net-config-path": "/etc/kube-flannel/net-conf.json",
		"set-node-network-unavailable": "true",
		"v":                            "0", "vmodule": "", "log_backtrace_at": "",
	}
	if len(compatible) != 31 {
		t.Fatalf("%d compatible flags, want 31", len(compatible))
	}
	own := map[string]string{
		"subnet-lease-ttl": "24h", "iface-wait": "60s", "resync": "5m", "nexthop-objects": "auto", "firewall": "config", "allow-extension-backend": "", "udp-source-check": "network", "udp-persist": "false", "follow-config": "true", "exit-on-config-change": "false", "probe": "false", "status-socket": "", "statusz-address": "",
		"state-dir": "/var/lib/flannel", "guard-tunnel": "true",
		"public-endpoint": "", "location": "", "location-label": "", "networks": "", "watch-networks": "false", "subnet-dir": "/run/flannel/networks", "masquerade-between-networks": "false",
		"readyz-datastore-grace": "5m", "log-format": "text",
	}
	want := map[string]string{}
	for _, m := range []map[string]string{compatible, own} {
		maps.Copy(want, m)
	}
	got := map[string]string{}
	for _, s := range settings(&Options{}) {
		if _, twice := got[s.name]; twice {
			t.Errorf("--%s is defined twice", s.name)
		}
		got[s.name] = s.def
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("flags and their defaults (-want +got):\n%s", diff)
	}
}

// TestAllowExtensionBackend checks the default that depends on the store.
func TestAllowExtensionBackend(t *testing.T) {
	conf := "--net-config-path=" + write(t, "net-conf.json")
	for _, tc := range []struct {
		args []string
		want bool
	}{
		{nil, true},
		{[]string{"--allow-extension-backend=false"}, false},
		{[]string{"--kube-subnet-mgr", conf}, false},
		{[]string{"--kube-subnet-mgr", conf, "--allow-extension-backend"}, true},
	} {
		o, err := Parse(tc.args, nil)
		if err != nil || o.AllowExtensionBackend != tc.want {
			t.Errorf("Parse(%q) allows the extension backend: %v, %v", tc.args, o.AllowExtensionBackend, err)
		}
	}
}

// write creates a file and returns its path.
func write(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestParseEveryValue(t *testing.T) {
	key, cert, ca := write(t, "key"), write(t, "cert"), write(t, "ca")
	kubeconfig, netconf := write(t, "kubeconfig"), write(t, "net-conf.json")
	given := map[string]string{
		"etcd-endpoints": " https://[fd00::1]:2379/ , HTTPS://etcd:2379", "etcd-prefix": "net/a",
		"etcd-keyfile": key, "etcd-certfile": cert, "etcd-cafile": ca, "etcd-username": "root", "etcd-password": "pw",
		"iface": "eth0", "iface-regex": "^e[tn]", "iface-can-reach": "10.0.0.1", "iface-wait": "0s",
		"public-ip": "::ffff:192.0.2.1", "public-ipv6": "2001:db8::1", "public-endpoint": "node7.example.org:4500", "location": "fra1", "subnet-lease-renew-margin": "0x59f",
		"ip-masq": "T", "ip-masq-fully-random-disable": "1", "kube-subnet-mgr": "true", "kube-api-url": "api:6443",
		"kube-annotation-prefix": "x.y", "kubeconfig-file": kubeconfig, "net-config-path": netconf,
		"set-node-network-unavailable": "false", "healthz-ip": "::", "healthz-port": "65535",
		"iptables-resync": "1_0", "iptables-forward-rules": "F", "guard-tunnel": "false", "ip-blackhole-route": "TRUE",
		"resync": "1s", "follow-config": "0", "nexthop-objects": "off", "udp-source-check": "strict", "udp-persist": "true", "readyz-datastore-grace": "0s", "subnet-file": "a", "state-dir": "b",
		"v": "4", "vmodule": "a=1,b*=2,", "log_backtrace_at": "x.go:7",
	}
	want := Options{
		EtcdEndpoints: []string{"https://[fd00::1]:2379/", "HTTPS://etcd:2379"}, EtcdPrefix: "net/a",
		EtcdKeyFile: key, EtcdCertFile: cert, EtcdCAFile: ca, EtcdUsername: "root", EtcdPassword: "pw",
		RenewMargin:   1439 * time.Minute,
		LeaseTTL:      24 * time.Hour,
		KubeSubnetMgr: true, KubeAPIURL: "api:6443", KubeAnnotationPrefix: "x.y", KubeconfigFile: kubeconfig,
		NetConfigPath: netconf,
		Iface:         []string{"eth0"}, IfaceRegex: []string{"^e[tn]"}, IfaceCanReach: "10.0.0.1",
		PublicIP: netip.MustParseAddr("192.0.2.1"), PublicIPv6: netip.MustParseAddr("2001:db8::1"),
		PublicEndpoint: endpoint.Named{Host: "node7.example.org", Port: 4500},
		Location:       "fra1",
		IPMasq:         true, IPMasqFullyRandomDisable: true, IPTablesResync: 10 * time.Second, IPBlackholeRoute: true,
		Resync: time.Second, NexthopObjects: "off", Firewall: "config", UDPSourceCheck: "strict", UDPPersist: true, SubnetFile: "a", SubnetDir: "/run/flannel/networks", StateDir: "b",
		HealthzIP: netip.IPv6Unspecified(), HealthzPort: 65535,
		LogFormat: "text", Verbosity: 4, VModule: "a=1,b*=2,", LogBacktraceAt: "x.go:7",
	}
	for _, dash := range []string{"-", "--"} {
		var args []string
		for name, value := range given {
			args = append(args, dash+name+"="+value)
		}
		got, err := Parse(args, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, compareOptions); diff != "" {
			t.Errorf("flags with %s (-want +got):\n%s", dash, diff)
		}
	}
	var env []string
	for name, value := range given {
		env = append(env, "FLANNELD_"+strings.ToUpper(strings.ReplaceAll(name, "-", "_"))+"="+value)
	}
	got, err := Parse(nil, env)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, compareOptions); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
}

func TestParse(t *testing.T) {
	ca := write(t, "ca")
	with := func(change func(*Options)) Options {
		o := defaults()
		change(&o)
		return o
	}
	tests := map[string]struct {
		args, env []string
		want      Options
	}{
		"value as the next argument": {
			[]string{"-iptables-resync", "7", "--ip-masq"}, nil,
			with(func(o *Options) { o.IPTablesResync, o.IPMasq = 7*time.Second, true }),
		},
		"a flag has precedence over its variable, even with the default value": {
			[]string{"--iptables-resync=5"}, []string{"FLANNELD_IPTABLES_RESYNC=9"}, defaults(),
		},
		"a variable is ignored if its flag is given": {
			[]string{"--iptables-resync=5"}, []string{"FLANNELD_IPTABLES_RESYNC=abc"}, defaults(),
		},
		"an empty variable is not set": {
			nil, []string{"FLANNELD_IPTABLES_RESYNC=", "FLANNELD_IP_MASQ="}, defaults(),
		},
		"the last of a repeated flag counts": {
			[]string{"--healthz-port=1", "--healthz-port=2"}, nil,
			with(func(o *Options) { o.HealthzPort = 2 }),
		},
		"lists collect": {
			[]string{"--iface=b", "--iface=a,c", "--iface-regex=x"}, nil,
			with(func(o *Options) { o.Iface, o.IfaceRegex = []string{"b", "a,c"}, []string{"x"} }),
		},
		"the variable of a list is one element": {
			nil, []string{"FLANNELD_IFACE=a,b"}, with(func(o *Options) { o.Iface = []string{"a,b"} }),
		},
		"empty arguments have no effect": {
			[]string{"--ip-masq", "", "", "--iface=a", ""}, nil, with(func(o *Options) { o.IPMasq, o.Iface = true, []string{"a"} }),
		},
		"both addresses of an interface": {
			[]string{"--iface=10.0.0.1,fd00::1"}, nil, with(func(o *Options) { o.Iface = []string{"10.0.0.1,fd00::1"} }),
		},
		"empty elements of lists are not given": {
			[]string{"--iface=", "--iface=a", "--iface", "", "--iface-regex="}, nil, with(func(o *Options) { o.Iface = []string{"a"} }),
		},
		"empty variables of lists are not given": {
			nil, []string{"FLANNELD_IFACE=", "FLANNELD_IFACE_REGEX="}, defaults(),
		},
		"an empty element has precedence over the variable": {
			[]string{"--iface="}, []string{"FLANNELD_IFACE=b"}, defaults(),
		},
		"flags replace the variable of a list": {
			[]string{"--iface=a"}, []string{"FLANNELD_IFACE=b"}, with(func(o *Options) { o.Iface = []string{"a"} }),
		},
		"empty text where none is the default": {
			[]string{"--public-ip=", "--public-ipv6", "", "--public-endpoint=", "--etcd-cafile=", "--kube-api-url=", "--vmodule="}, nil, defaults(),
		},
		"a negative port for probes is none": {[]string{"--healthz-port=1", "--healthz-port=-1"}, nil, defaults()},
		"empty address for probes is every address": {
			[]string{"--healthz-ip="}, nil, with(func(o *Options) { o.HealthzIP = netip.Addr{} }),
		},
		"a CA alone": {
			[]string{"--etcd-cafile", ca, "--etcd-endpoints=https://a:1"}, nil,
			with(func(o *Options) { o.EtcdCAFile, o.EtcdEndpoints = ca, []string{"https://a:1"} }),
		},
		"endpoints without scheme": {
			[]string{"--etcd-endpoints=a:1,[::1]:2"}, nil,
			with(func(o *Options) { o.EtcdEndpoints = []string{"a:1", "[::1]:2"} }),
		},
		"TLS files that http does not use": {
			[]string{"--etcd-cafile", ca}, nil,
			with(func(o *Options) {
				o.EtcdCAFile = ca
				o.Warnings = []string{"the TLS files for etcd are not used: --etcd-endpoints contains http endpoints"}
			}),
		},
		"with etcd the file of the network configuration need not exist": {
			[]string{"--net-config-path=/missing"}, nil, with(func(o *Options) { o.NetConfigPath = "/missing" }),
		},
		"variables that ask for text are ignored": {
			nil, []string{"FLANNELD_VERSION=true", "FLANNELD_HELP=true"}, defaults(),
		},
		"variables of others are ignored": {
			nil, []string{"FLANNELD_SERVICE_HOST=10.0.0.1", "FLANNELD_PORT_80_TCP=x", "FLANNEL_IFACE=x", "IFACE=x", "junk"},
			defaults(),
		},
		"misspelt variables": {
			nil, []string{"FLANNELD_IFCAE=eth0", "FLANNELD_iface=eth1", "FLANNELD_ETCD_ENDPOINT=a:1"},
			with(func(o *Options) {
				o.Warnings = []string{
					"FLANNELD_IFCAE is ignored: did you mean FLANNELD_IFACE?",
					"FLANNELD_iface is ignored: did you mean FLANNELD_IFACE?",
					"FLANNELD_ETCD_ENDPOINT is ignored: did you mean FLANNELD_ETCD_ENDPOINTS?",
				}
			}),
		},
		"the end of flags": {[]string{"--ip-masq", "--"}, nil, with(func(o *Options) { o.IPMasq = true })},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(tt.args, tt.env)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, compareOptions); diff != "" {
				t.Errorf("Parse (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseRequests(t *testing.T) {
	for _, tt := range []struct {
		args, env []string
		want      error
	}{
		{[]string{"--help"}, nil, ErrHelp},
		{[]string{"-h"}, nil, ErrHelp},
		{[]string{"--ip-masq", "-help"}, []string{"FLANNELD_V=x"}, ErrHelp},
		{[]string{"--version"}, nil, ErrVersion},
		{[]string{"-version", "--etcd-cafile=/missing"}, []string{"FLANNELD_V=x"}, ErrVersion},
	} {
		if _, err := Parse(tt.args, tt.env); !errors.Is(err, tt.want) {
			t.Errorf("Parse(%q, %q) = %v, want %v", tt.args, tt.env, err, tt.want)
		}
	}
	if _, err := Parse([]string{"--version=false"}, nil); err != nil {
		t.Error(err)
	}
}

func TestSourceAndLogValues(t *testing.T) {
	o, err := Parse(
		[]string{"-ip-masq", "--etcd-password=hunter2", "--etcd-username=u"},
		[]string{"FLANNELD_IPTABLES_RESYNC=9"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"ip-masq": "--ip-masq", "iptables-resync": "FLANNELD_IPTABLES_RESYNC", "iface": "--iface",
	} {
		if got := o.Source(name); got != want {
			t.Errorf("Source(%q) = %q, want %q", name, got, want)
		}
	}
	want := []any{
		"etcd-username", "u", "etcd-password", Secret("hunter2"), "ip-masq", true, "iptables-resync", 9 * time.Second,
	}
	if diff := cmp.Diff(want, o.LogValues()); diff != "" {
		t.Errorf("LogValues (-want +got):\n%s", diff)
	}
	if s := fmt.Sprint(o.LogValues()...); strings.Contains(s, "hunter2") {
		t.Errorf("LogValues shows the password: %s", s)
	}
}

func TestHealthzAddr(t *testing.T) {
	for want, args := range map[string][]string{
		"":             {"--healthz-port=0"},
		"0.0.0.0:8081": {"--healthz-port=8081"},
		"[::1]:1":      {"--healthz-port=1", "--healthz-ip=::1"},
		":1":           {"--healthz-port=1", "--healthz-ip="},
	} {
		o, err := Parse(args, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := o.HealthzAddr(); got != want {
			t.Errorf("%q: HealthzAddr() = %q, want %q", args, got, want)
		}
	}
}

func TestFormattingHidesThePassword(t *testing.T) {
	o, err := Parse([]string{"--etcd-username=u", "--etcd-password=hunter2"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.EtcdPassword.Reveal() != "hunter2" {
		t.Fatalf("Reveal() = %q", o.EtcdPassword.Reveal())
	}
	hex := fmt.Sprintf("%x", "hunter2")
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x", "%X", "%t", "%10.3s"} {
		for _, v := range []any{o, &o, o.EtcdPassword, []Secret{o.EtcdPassword}} {
			got := fmt.Sprintf(verb, v)
			if strings.Contains(got, "hun") || strings.Contains(strings.ToLower(got), hex[:6]) {
				t.Errorf("%s of %T shows the password: %s", verb, v, got)
			}
		}
	}
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), "hunter2") {
		t.Errorf("JSON shows the password: %s", b)
	}
	if got := Secret("").String(); got != "" {
		t.Errorf("an empty secret is shown as %q", got)
	}
}
