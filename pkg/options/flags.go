// SPDX-License-Identifier: Apache-2.0

package options

import (
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
)

type setting struct {
	name  string
	arg   string // kind of value, for the help text; empty for a boolean
	def   string // default, as a user would write it; empty for none
	usage string
	binding
}

type binding struct {
	set    func(o *Options, text string) error
	get    func(o Options) any
	toggle bool // the flag without a value means true
}

type topic struct {
	title    string
	settings []setting
}

// to returns the binding of a field with the result of parse. If a flag is given several times, the
// last text counts.
func to[T any](field func(*Options) *T, parse func(string) (T, error)) binding {
	return binding{
		set: func(o *Options, text string) error {
			v, err := parse(text)
			if err != nil {
				return err
			}
			*field(o) = v
			return nil
		},
		get: func(o Options) any { return *field(&o) },
	}
}

func toToggle(field func(*Options) *bool) binding {
	b := to(field, boolean)
	b.toggle = true
	return b
}

// toList returns the binding of a list, to which every text adds an element that check accepts.
func toList(field func(*Options) *[]string, check func(string) error) binding {
	return binding{
		set: func(o *Options, text string) error {
			if text == "" {
				return nil // manifests contain --iface=$(IFACE), and IFACE may be empty
			}
			if err := check(text); err != nil {
				return err
			}
			*field(o) = append(*field(o), text)
			return nil
		},
		get: func(o Options) any { return *field(&o) },
	}
}

// topics returns all flags in the order of the help text.
func topics() []topic {
	return []topic{
		{"Datastore etcd", etcdSettings()},
		{"Datastore Kubernetes", kubeSettings()},
		{"Several networks", networkSettings()},
		{"External interface", interfaceSettings()},
		{"Routes and traffic rules", trafficSettings()},
		{"Backend udp", udpSettings()},
		{"Files", fileSettings()},
		{"Health", healthSettings()},
		{"Status", statusSettings()},
		{"Logging and information", loggingSettings()},
	}
}

func settings() []setting {
	var all []setting
	for _, t := range topics() {
		all = append(all, t.settings...)
	}
	return all
}

func etcdSettings() []setting {
	return []setting{
		{
			name: "etcd-endpoints", arg: "ENDPOINT,...", def: "http://127.0.0.1:4001,http://127.0.0.1:2379",
			usage:   "Addresses of etcd: URLs or host:port, all with the same scheme. https uses TLS.",
			binding: to(func(o *Options) *[]string { return &o.EtcdEndpoints }, endpoints),
		}, {
			name: "etcd-prefix", arg: "KEY", def: "/coreos.com/network",
			usage:   "Prefix of the keys of the configuration (KEY/config) and of the leases (KEY/subnets).",
			binding: to(func(o *Options) *string { return &o.EtcdPrefix }, text),
		}, {
			name: "etcd-cafile", arg: "FILE",
			usage:   "CA bundle for etcd's certificate. Without it: the system's.",
			binding: to(func(o *Options) *string { return &o.EtcdCAFile }, text),
		}, {
			name: "etcd-certfile", arg: "FILE",
			usage:   "TLS client certificate. Needs --etcd-keyfile.",
			binding: to(func(o *Options) *string { return &o.EtcdCertFile }, text),
		}, {
			name: "etcd-keyfile", arg: "FILE",
			usage:   "Key of the TLS client certificate. Needs --etcd-certfile.",
			binding: to(func(o *Options) *string { return &o.EtcdKeyFile }, text),
		}, {
			name: "etcd-username", arg: "NAME",
			usage:   "User to log in to etcd. Needs --etcd-password.",
			binding: to(func(o *Options) *string { return &o.EtcdUsername }, text),
		}, {
			name: "etcd-password", arg: "PASSWORD",
			usage:   "Password of that user. The variable keeps it out of the process list.",
			binding: to(func(o *Options) *Secret { return &o.EtcdPassword }, secret),
		}, {
			name: "subnet-lease-ttl", arg: "DURATION", def: "24h",
			usage:   "Time after which etcd deletes the lease of a failed host: 5s or more, the same on all hosts.",
			binding: to(func(o *Options) *time.Duration { return &o.LeaseTTL }, duration(5*time.Second)),
		}, {
			name: "subnet-lease-renew-margin", arg: "MINUTES", def: "60",
			usage:   "Time before its end at which the lease is renewed: 1 to 1439. Shorter leases are renewed in time too.",
			binding: to(func(o *Options) *time.Duration { return &o.RenewMargin }, whole(time.Minute, "minutes", 1, 1439)),
		},
	}
}

func networkSettings() []setting {
	return []setting{
		{
			name: "networks", arg: "NAME,...",
			usage: "Serve several networks with these names: each has the keys PREFIX/NAME/config and PREFIX/NAME/subnets " +
				"in etcd. A network without a configuration is waited for.",
			binding: to(func(o *Options) *[]string { return &o.Networks }, networkNames),
		}, {
			name: "watch-networks", def: "false",
			usage:   "Serve all networks below the prefix, or those of --networks, also if they are added later.",
			binding: toToggle(func(o *Options) *bool { return &o.WatchNetworks }),
		}, {
			name: "subnet-dir", arg: "DIRECTORY", def: "/run/flannel/networks",
			usage:   "Directory of the subnet files of several networks: NAME.env.",
			binding: to(func(o *Options) *string { return &o.SubnetDir }, path),
		}, {
			name: "masquerade-between-networks", def: "false",
			usage:   "With --ip-masq: masquerade packets from a pod of one network to another network as well.",
			binding: toToggle(func(o *Options) *bool { return &o.MasqueradeBetweenNetworks }),
		},
	}
}

func kubeSettings() []setting {
	return []setting{
		{
			name: "kube-subnet-mgr", def: "false",
			usage:   "Use the Kubernetes API, and the subnets that it assigns to nodes, instead of etcd.",
			binding: toToggle(func(o *Options) *bool { return &o.KubeSubnetMgr }),
		}, {
			name: "kubeconfig-file", arg: "FILE",
			usage:   "Kubeconfig for the API server. Without it and --kube-api-url: the pod's service account.",
			binding: to(func(o *Options) *string { return &o.KubeconfigFile }, text),
		}, {
			name: "kube-api-url", arg: "URL",
			usage:   "URL of the API server, instead of the one in the kubeconfig.",
			binding: to(func(o *Options) *string { return &o.KubeAPIURL }, apiURL),
		}, {
			name: "kube-annotation-prefix", arg: "PREFIX", def: annotation.DefaultPrefix,
			usage:   "Prefix of the annotations in which nodes publish their addresses and backend data.",
			binding: to(func(o *Options) *string { return &o.KubeAnnotationPrefix }, annotationPrefix),
		}, {
			name: "net-config-path", arg: "FILE", def: DefaultNetConfigPath,
			usage:   "File with the network configuration. With etcd the configuration is in the store.",
			binding: to(func(o *Options) *string { return &o.NetConfigPath }, filePath),
		}, {
			name: "set-node-network-unavailable", def: "true",
			usage:   "Set the condition NetworkUnavailable of the node to False once its network is up.",
			binding: toToggle(func(o *Options) *bool { return &o.SetNodeNetworkUnavailable }),
		},
	}
}

func interfaceSettings() []setting {
	return []setting{
		{
			name: "iface", arg: "NAME|IP",
			usage: "Interface that peers send to, by name or address; node-ip: by the InternalIP of the Node. May be repeated: the first existing one is " +
				"used. The variable sets one. Without any such flag: the interface of the default route.",
			binding: toList(func(o *Options) *[]string { return &o.Iface }, iface),
		}, {
			name: "iface-regex", arg: "REGEX",
			usage: "Use the first interface with a matching address or, if there is none, a matching name. " +
				"May be repeated; tried after --iface. The variable sets one.",
			binding: toList(func(o *Options) *[]string { return &o.IfaceRegex }, regex),
		}, {
			name: "iface-can-reach", arg: "IP",
			usage:   "Use the interface through which the kernel reaches this address. Tried after --iface-regex.",
			binding: to(func(o *Options) *string { return &o.IfaceCanReach }, destination),
		}, {
			name: "iface-wait", arg: "DURATION", def: "60s",
			usage:   "Time to wait at the start for the interface and its address. 0s does not wait.",
			binding: to(func(o *Options) *time.Duration { return &o.IfaceWait }, duration(0)),
		}, {
			name: "public-ip", arg: "IP",
			usage:   "IPv4 address that peers send to, if it is not the interface's own, for example behind 1:1 NAT.",
			binding: to(func(o *Options) *netip.Addr { return &o.PublicIP }, unicast(true)),
		}, {
			name: "public-ipv6", arg: "IP",
			usage:   "The same for IPv6.",
			binding: to(func(o *Options) *netip.Addr { return &o.PublicIPv6 }, unicast(false)),
		}, {
			name: "public-endpoint", arg: "NAME[:PORT]",
			usage: "DNS name of this host, with wireguard only: peers resolve it when they have no session with this host. " +
				"With a port that a NAT forwards, if it is not ListenPort.",
			binding: to(func(o *Options) *endpoint.Named { return &o.PublicEndpoint }, publicEndpoint),
		}, {
			name: "location", arg: "NAME",
			usage: "Location of this host, with wireguard and its key SameLocation only: the backend of that key, and not " +
				"wireguard, carries the packets between hosts with the same location.",
			binding: to(func(o *Options) *string { return &o.Location }, location),
		}, {
			name: "location-label", arg: "LABEL",
			usage:   "The same, with the value of this label of the Node, such as topology.kubernetes.io/zone. Needs --kube-subnet-mgr.",
			binding: to(func(o *Options) *string { return &o.LocationLabel }, label),
		},
	}
}

func trafficSettings() []setting {
	const maxSeconds = 1<<31 - 1
	return []setting{
		{
			name: "ip-masq", def: "false",
			usage:   "Masquerade packets from pods to destinations outside of the network.",
			binding: toToggle(func(o *Options) *bool { return &o.IPMasq }),
		}, {
			name: "ip-masq-fully-random-disable", def: "false",
			usage:   "Do not choose random source ports when masquerading.",
			binding: toToggle(func(o *Options) *bool { return &o.IPMasqFullyRandomDisable }),
		}, {
			name: "iptables-forward-rules", def: "true",
			usage:   "Accept forwarded packets from and to the network. Applies to nftables too.",
			binding: toToggle(func(o *Options) *bool { return &o.IPTablesForwardRules }),
		}, {
			name: "guard-tunnel", def: "true",
			usage: "Drop packets from pods to the tunnel ports of hosts, with udp, vxlan and ipip. " +
				"Has no effect if --ip-masq and --iptables-forward-rules are both off.",
			binding: toToggle(func(o *Options) *bool { return &o.GuardTunnel }),
		}, {
			name: "iptables-resync", arg: "SECONDS", def: "5",
			usage: "Interval at which the traffic rules are checked if the kernel does not announce " +
				"changes, which is the case with legacy iptables: 1 or more. Beside thousands of rules " +
				"they are checked less often.",
			binding: to(func(o *Options) *time.Duration { return &o.IPTablesResync },
				whole(time.Second, "seconds", 1, maxSeconds)),
		}, {
			name: "firewall", arg: "CHOICE", def: FirewallConfig,
			usage: "Firewall for the traffic rules: iptables, nftables, config (set by EnableNFTables in the " +
				"network configuration), or auto (nftables if no iptables is installed or kube-proxy uses it).",
			binding: to(func(o *Options) *string { return &o.Firewall },
				oneOf(FirewallConfig, FirewallAuto, FirewallIPTables, FirewallNFTables)),
		}, {
			name: "ip-blackhole-route", def: "false",
			usage:   "Refuse packets to unused addresses of this host's subnet. Tunnels always do.",
			binding: toToggle(func(o *Options) *bool { return &o.IPBlackholeRoute }),
		}, {
			name: "resync", arg: "DURATION", def: "5m",
			usage: "Interval at which all devices, routes and neighbours are read again, besides following " +
				"their changes: 1s or more.",
			binding: to(func(o *Options) *time.Duration { return &o.Resync }, duration(time.Second)),
		}, {
			name: "follow-config", def: "true",
			usage: "Change to another network configuration without a restart. Otherwise the log and " +
				"/statusz say that a restart is needed.",
			binding: toToggle(func(o *Options) *bool { return &o.FollowConfig }),
		}, {
			name: "exit-on-config-change", def: "false",
			usage: "Exit with code 3 after a valid change of the network configuration, so that a supervisor " +
				"starts flanneld again, instead of following the change.",
			binding: toToggle(func(o *Options) *bool { return &o.ExitOnConfigChange }),
		}, {
			name: "probe", def: "false",
			usage: "Check the paths to all other hosts, with at most 10 probes a second, and report those that do " +
				"not work in the log, on /statusz and as metrics.",
			binding: toToggle(func(o *Options) *bool { return &o.Probe }),
		}, {
			name: "nexthop-objects", arg: "auto|off", def: NexthopsAuto,
			usage: "Whether IPv4 routes use nexthop objects if a device has hundreds of them: " +
				"otherwise adding thousands is slow. ip route then shows nhid.",
			binding: to(func(o *Options) *string { return &o.NexthopObjects }, oneOf(NexthopsAuto, NexthopsOff)),
		}, {
			name: allowExtension,
			usage: "Let the backend extension run the commands of the network configuration, as root. " +
				"Without it: with etcd yes, with the Kubernetes API no.",
			binding: toToggle(func(o *Options) *bool { return &o.AllowExtensionBackend }),
		},
	}
}

func udpSettings() []setting {
	return []setting{
		{
			name: "udp-source-check", arg: "strict|network|off", def: string(tunnel.CheckNetwork),
			usage: "Which packets in datagrams are accepted. network: from known hosts, with a source in their " +
				"subnet or outside of the network. strict: only with a source in their subnet. off: all.",
			binding: to(func(o *Options) *string { return &o.UDPSourceCheck },
				oneOf(string(tunnel.CheckStrict), string(tunnel.CheckNetwork), string(tunnel.CheckOff))),
		}, {
			name: "udp-persist", def: "false",
			usage:   "Keep the device flannel0 when flanneld ends, so that connections of pods pause during a restart and do not fail.",
			binding: toToggle(func(o *Options) *bool { return &o.UDPPersist }),
		},
	}
}

func fileSettings() []setting {
	return []setting{
		{
			name: "subnet-file", arg: "FILE", def: "/run/flannel/subnet.env",
			usage:   "File that tells the CNI plugin the subnet and MTU of this host.",
			binding: to(func(o *Options) *string { return &o.SubnetFile }, filePath),
		}, {
			name: "state-dir", arg: "DIRECTORY", def: "/var/lib/flannel",
			usage:   "Directory of the last known state, which restores the network while the datastore is unavailable.",
			binding: to(func(o *Options) *string { return &o.StateDir }, path),
		},
	}
}

func healthSettings() []setting {
	return []setting{
		{
			name: "healthz-ip", arg: "IP", def: "0.0.0.0",
			usage:   "Address that serves /healthz, /readyz and /metrics.",
			binding: to(func(o *Options) *netip.Addr { return &o.HealthzIP }, listenAddress),
		}, {
			name: "healthz-port", arg: "PORT", def: "0",
			usage:   "Port that serves them. With 0 or a negative number they are not served.",
			binding: to(func(o *Options) *uint16 { return &o.HealthzPort }, port),
		}, {
			name: "readyz-datastore-grace", arg: "DURATION", def: "5m",
			usage:   "Time for which the datastore may be unavailable before /readyz fails, capped at half of the remaining lease time. Traffic is not affected.",
			binding: to(func(o *Options) *time.Duration { return &o.ReadyzDatastoreGrace }, duration(0)),
		},
	}
}

func statusSettings() []setting {
	return []setting{
		{
			name: "status-socket", arg: "FILE|off",
			usage: "Local socket for flannelctl status, metrics and the status page, for root only. " +
				"Without it: flanneld.sock beside the subnet file.",
			binding: to(func(o *Options) *string { return &o.StatusSocket }, socketText),
		}, {
			name: "statusz-address", arg: "IP:PORT",
			usage: "Address that serves the status page /statusz and its JSON to any host. " +
				"Without it: only the socket and, for this host, the health port serve them.",
			binding: to(func(o *Options) *string { return &o.StatuszAddress }, hostPort),
		},
	}
}

func loggingSettings() []setting {
	return []setting{
		{
			name: "log-format", arg: "text|json", def: logText,
			usage:   "Format of the log on stderr.",
			binding: to(func(o *Options) *string { return &o.LogFormat }, oneOf(logText, logJSON)),
		}, {
			name: "v", arg: "LEVEL", def: "0",
			usage:   "Verbosity of the log. 4 shows every change of kernel state.",
			binding: to(func(o *Options) *int { return &o.Verbosity }, verbosity),
		}, {
			name: "vmodule", arg: "PATTERN=LEVEL,...",
			usage:   "Verbosity for source files with matching names.",
			binding: to(func(o *Options) *string { return &o.VModule }, vmodule),
		}, {
			name: "log_backtrace_at", arg: "FILE:LINE",
			usage:   "Log a stack trace whenever this line logs. Needs --log-format=text.",
			binding: to(func(o *Options) *string { return &o.LogBacktraceAt }, backtraceAt),
		}, {
			name: "version", def: "false",
			usage:   "Print version, commit and Go release, and exit.",
			binding: toToggle(func(o *Options) *bool { return &o.version }),
		},
	}
}

// LogValues returns the given flags and their values as key-value pairs for the logger.
// Secrets are redacted.
func (o Options) LogValues() []any {
	var kv []any
	for _, t := range topics() {
		for _, s := range t.settings {
			if _, given := o.sources[s.name]; given {
				kv = append(kv, s.name, s.get(o))
			}
		}
	}
	return kv
}
