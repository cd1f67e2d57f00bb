package app

import (
	"net/netip"
	"time"

	"flanneld/pkg/tunnel"
)

// setting is one flag and the option that it sets.
type setting struct {
	name  string
	arg   string // what the value is, for the help text; empty for a boolean
	def   string // the default as a user would write it; empty for none
	usage string
	binding
}

// binding ties a flag to a field of Options.
type binding struct {
	set    func(o *Options, text string) error
	get    func(o Options) any
	toggle bool // the flag alone means true
}

// topic is a group of settings in the help text.
type topic struct {
	title    string
	settings []setting
}

// to binds a field by the parser of its text. The last text counts.
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

// toToggle binds a boolean field.
func toToggle(field func(*Options) *bool) binding {
	b := to(field, boolean)
	b.toggle = true
	return b
}

// toList binds a field that every text adds to, by the check of one. An empty text
// counts as not given: manifests write --iface=$(IFACE).
func toList(field func(*Options) *[]string, check func(string) error) binding {
	return binding{
		set: func(o *Options, text string) error {
			if text == "" {
				return nil
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

// topics returns every flag there is, in the order of the help text.
func topics() []topic {
	return []topic{
		{"Datastore etcd", etcdSettings()},
		{"Datastore Kubernetes", kubeSettings()},
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
			usage:   "Where etcd is: URLs or host:port, all of one scheme. https uses TLS.",
			binding: to(func(o *Options) *[]string { return &o.EtcdEndpoints }, endpoints),
		}, {
			name: "etcd-prefix", arg: "KEY", def: "/coreos.com/network",
			usage:   "Key below which the configuration (KEY/config) and the leases (KEY/subnets) are.",
			binding: to(func(o *Options) *string { return &o.EtcdPrefix }, text),
		}, {
			name: "etcd-cafile", arg: "FILE",
			usage:   "CA bundle that the certificate of etcd is checked against. Without it: the system's.",
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
			usage:   "How long etcd keeps the lease of a host that is gone: 5s or more, the same on all hosts.",
			binding: to(func(o *Options) *time.Duration { return &o.LeaseTTL }, duration(5*time.Second)),
		}, {
			name: "subnet-lease-renew-margin", arg: "MINUTES", def: "60",
			usage:   "How long before its end the lease is renewed: 1 to 1439. A shorter lease is renewed in time, too.",
			binding: to(func(o *Options) *time.Duration { return &o.RenewMargin }, whole(time.Minute, "minutes", 1, 1439)),
		},
	}
}

func kubeSettings() []setting {
	return []setting{
		{
			name: "kube-subnet-mgr", def: "false",
			usage:   "Use the Kubernetes API, and the subnets that it gives to nodes, instead of etcd.",
			binding: toToggle(func(o *Options) *bool { return &o.KubeSubnetMgr }),
		}, {
			name: "kubeconfig-file", arg: "FILE",
			usage:   "How to reach the API server. Without it and --kube-api-url: the pod's service account.",
			binding: to(func(o *Options) *string { return &o.KubeconfigFile }, text),
		}, {
			name: "kube-api-url", arg: "URL",
			usage:   "The API server, instead of the one that the kubeconfig names.",
			binding: to(func(o *Options) *string { return &o.KubeAPIURL }, apiURL),
		}, {
			name: "kube-annotation-prefix", arg: "PREFIX", def: "flannel.alpha.coreos.com",
			usage:   "Prefix of the annotations in which nodes publish how to reach them.",
			binding: to(func(o *Options) *string { return &o.KubeAnnotationPrefix }, annotationPrefix),
		}, {
			name: "net-config-path", arg: "FILE", def: DefaultNetConfigPath,
			usage:   "The network configuration. With etcd it is in the store instead.",
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
			usage: "Interface that peers send to, by name or address. May be repeated: the first that is there. " +
				"The variable holds one. Without any such flag: the interface of the default route.",
			binding: toList(func(o *Options) *[]string { return &o.Iface }, iface),
		}, {
			name: "iface-regex", arg: "REGEX",
			usage: "The first interface of which an address, or else the name, matches. " +
				"May be repeated; tried after --iface. The variable holds one.",
			binding: toList(func(o *Options) *[]string { return &o.IfaceRegex }, regex),
		}, {
			name: "iface-can-reach", arg: "IP",
			usage:   "The interface through which the kernel reaches this address. Tried after --iface-regex.",
			binding: to(func(o *Options) *string { return &o.IfaceCanReach }, destination),
		}, {
			name: "iface-wait", arg: "DURATION", def: "60s",
			usage:   "How long to wait at the start for the interface and its address. 0s does not wait.",
			binding: to(func(o *Options) *time.Duration { return &o.IfaceWait }, duration(0)),
		}, {
			name: "public-ip", arg: "IP",
			usage:   "IPv4 address that peers send to, if it is not the interface's own, as behind 1:1 NAT.",
			binding: to(func(o *Options) *netip.Addr { return &o.PublicIP }, unicast(true)),
		}, {
			name: "public-ipv6", arg: "IP",
			usage:   "The same for IPv6.",
			binding: to(func(o *Options) *netip.Addr { return &o.PublicIPv6 }, unicast(false)),
		},
	}
}

func trafficSettings() []setting {
	const maxSeconds = 1<<31 - 1
	return []setting{
		{
			name: "ip-masq", def: "false",
			usage:   "Masquerade what pods send to destinations outside the network.",
			binding: toToggle(func(o *Options) *bool { return &o.IPMasq }),
		}, {
			name: "ip-masq-fully-random-disable", def: "false",
			usage:   "Do not pick random source ports when masquerading.",
			binding: toToggle(func(o *Options) *bool { return &o.IPMasqFullyRandomDisable }),
		}, {
			name: "iptables-forward-rules", def: "true",
			usage:   "Accept what is forwarded from and to the network. Applies to nftables as well.",
			binding: toToggle(func(o *Options) *bool { return &o.IPTablesForwardRules }),
		}, {
			name: "guard-tunnel", def: "true",
			usage: "Drop what pods send to the tunnel ports of hosts, with udp, vxlan and ipip. " +
				"Not where --ip-masq and --iptables-forward-rules are both off.",
			binding: toToggle(func(o *Options) *bool { return &o.GuardTunnel }),
		}, {
			name: "iptables-resync", arg: "SECONDS", def: "5",
			usage: "How often the traffic rules are checked where the kernel does not announce " +
				"changes, which is with legacy iptables: 1 or more.",
			binding: to(func(o *Options) *time.Duration { return &o.IPTablesResync },
				whole(time.Second, "seconds", 1, maxSeconds)),
		}, {
			name: "firewall", arg: "CHOICE", def: firewallConfig,
			usage: "What holds the traffic rules: iptables, nftables, config (as EnableNFTables of the " +
				"network configuration says), or auto (nftables if no iptables is installed or kube-proxy uses it).",
			binding: to(func(o *Options) *string { return &o.Firewall },
				oneOf(firewallConfig, firewallAuto, firewallIPTables, firewallNFTables)),
		}, {
			name: "ip-blackhole-route", def: "false",
			usage:   "Drop what is sent to addresses of this host's subnet that no pod has.",
			binding: toToggle(func(o *Options) *bool { return &o.IPBlackholeRoute }),
		}, {
			name: "resync", arg: "DURATION", def: "5m",
			usage: "How often devices, routes and neighbours are read back in full, besides following " +
				"their changes: 1s or more.",
			binding: to(func(o *Options) *time.Duration { return &o.Resync }, duration(time.Second)),
		}, {
			name: "exit-on-config-change", def: "false",
			usage: "Exit with code 3 when the network configuration has become another one that can be read, for " +
				"what supervises flanneld to start it again. Without it: the log and /statusz say that a restart is needed.",
			binding: toToggle(func(o *Options) *bool { return &o.ExitOnConfigChange }),
		}, {
			name: "nexthop-objects", arg: "auto|off", def: nexthopsAuto,
			usage: "Whether IPv4 routes go through nexthop objects where a device has hundreds of them: " +
				"otherwise adding thousands is slow. ip route then shows nhid.",
			binding: to(func(o *Options) *string { return &o.NexthopObjects }, oneOf(nexthopsAuto, nexthopsOff)),
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
			usage: "What is taken from datagrams. network: from known hosts, with a source in their subnet or " +
				"outside the network. strict: with one in their subnet alone. off: everything.",
			binding: to(func(o *Options) *string { return &o.UDPSourceCheck },
				oneOf(string(tunnel.CheckStrict), string(tunnel.CheckNetwork), string(tunnel.CheckOff))),
		}, {
			name: "udp-persist", def: "false",
			usage:   "Keep the device flannel0 when flanneld ends: during a restart connections of pods pause, and do not fail.",
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
			usage:   "Last known state: it brings the network back while the datastore is away.",
			binding: to(func(o *Options) *string { return &o.StateDir }, path),
		},
	}
}

func healthSettings() []setting {
	return []setting{
		{
			name: "healthz-ip", arg: "IP", def: "0.0.0.0",
			usage:   "Address that answers probes at /healthz and /readyz, and scrapes at /metrics.",
			binding: to(func(o *Options) *netip.Addr { return &o.HealthzIP }, listenAddress),
		}, {
			name: "healthz-port", arg: "PORT", def: "0",
			usage:   "Port that answers them. 0 or a negative number answers none.",
			binding: to(func(o *Options) *uint16 { return &o.HealthzPort }, port),
		}, {
			name: "readyz-datastore-grace", arg: "DURATION", def: "5m",
			usage:   "How long the datastore may be away before /readyz says so; half of what is left of the lease, if that is less. Traffic flows meanwhile.",
			binding: to(func(o *Options) *time.Duration { return &o.ReadyzDatastoreGrace }, duration(0)),
		},
	}
}

func statusSettings() []setting {
	return []setting{
		{
			name: "status-socket", arg: "FILE|off",
			usage: "Local socket for flannelctl status, metrics and the status page, for root alone. " +
				"Without it: flanneld.sock beside the subnet file.",
			binding: to(func(o *Options) *string { return &o.StatusSocket }, socketText),
		}, {
			name: "statusz-address", arg: "IP:PORT",
			usage: "Where the status page /statusz and its JSON are shown to other hosts, to anybody. " +
				"Without it: on the socket, and on the health port to this host alone.",
			binding: to(func(o *Options) *string { return &o.StatuszAddress }, hostPort),
		},
	}
}

func loggingSettings() []setting {
	return []setting{
		{
			name: "log-format", arg: "text|json", def: logText,
			usage:   "How log lines on stderr look.",
			binding: to(func(o *Options) *string { return &o.LogFormat }, oneOf(logText, logJSON)),
		}, {
			name: "v", arg: "LEVEL", def: "0",
			usage:   "How much is logged. 4 shows every change of kernel state.",
			binding: to(func(o *Options) *int { return &o.Verbosity }, verbosity),
		}, {
			name: "vmodule", arg: "PATTERN=LEVEL,...",
			usage:   "Another level for source files whose names match.",
			binding: to(func(o *Options) *string { return &o.VModule }, vmodule),
		}, {
			name: "log_backtrace_at", arg: "FILE:LINE",
			usage:   "Log a stack trace whenever this line logs. For --log-format=text.",
			binding: to(func(o *Options) *string { return &o.LogBacktraceAt }, backtraceAt),
		}, {
			name: "version", def: "false",
			usage:   "Print version, commit and Go release, and exit.",
			binding: toToggle(func(o *Options) *bool { return &o.version }),
		},
	}
}
