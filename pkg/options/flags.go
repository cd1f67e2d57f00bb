// SPDX-License-Identifier: Apache-2.0

package options

import (
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
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
	set func(text string) error
	get func() any
}

type topic struct {
	title    string
	settings []setting
}

// to returns the binding of a field with the result of parse. If a flag is given several times, the
// last text counts.
func to[T any](field *T, parse func(string) (T, error)) binding {
	return binding{
		set: func(text string) error {
			v, err := parse(text)
			if err != nil {
				return err
			}
			*field = v
			return nil
		},
		get: func() any { return *field },
	}
}

// toList returns the binding of a list, to which every text adds an element that check accepts.
func toList(field *[]string, check func(string) error) binding {
	return to(field, func(text string) ([]string, error) {
		if text == "" {
			return *field, nil // manifests contain --iface=$(IFACE), and IFACE may be empty
		}
		return append(*field, text), check(text)
	})
}

// topics returns all flags in the order of the help text, bound to the fields of o.
func topics(o *Options) []topic {
	return []topic{
		{"Datastore etcd", []setting{
			{
				name: "etcd-endpoints", arg: "ENDPOINT,...", def: "http://127.0.0.1:4001,http://127.0.0.1:2379", binding: to(&o.EtcdEndpoints, endpoints),
				usage: "Addresses of etcd: URLs or host:port, all with the same scheme. https uses TLS.",
			}, {
				name: "etcd-prefix", arg: "KEY", def: "/coreos.com/network", binding: to(&o.EtcdPrefix, text),
				usage: "Prefix of the keys of the configuration (KEY/config) and of the leases (KEY/subnets).",
			}, {
				name: "etcd-cafile", arg: "FILE", binding: to(&o.EtcdCAFile, text),
				usage: "CA bundle for etcd's certificate. Without it: the system's.",
			}, {
				name: "etcd-certfile", arg: "FILE", binding: to(&o.EtcdCertFile, text),
				usage: "TLS client certificate. Needs --etcd-keyfile.",
			}, {
				name: "etcd-keyfile", arg: "FILE", binding: to(&o.EtcdKeyFile, text),
				usage: "Key of the TLS client certificate. Needs --etcd-certfile.",
			}, {
				name: "etcd-username", arg: "NAME", binding: to(&o.EtcdUsername, text),
				usage: "User to log in to etcd. Needs --etcd-password.",
			}, {
				name: "etcd-password", arg: "PASSWORD", binding: to(&o.EtcdPassword, secret),
				usage: "Password of that user. The variable keeps it out of the process list.",
			}, {
				name: "subnet-lease-ttl", arg: "DURATION", def: "24h", binding: to(&o.LeaseTTL, duration(5*time.Second)),
				usage: "Time after which etcd deletes the lease of a failed host: 5s or more, the same on all hosts.",
			}, {
				name: "subnet-lease-renew-margin", arg: "MINUTES", def: "60", binding: to(&o.RenewMargin, whole(time.Minute, "minutes", 1, 1439)),
				usage: "Time before its end at which the lease is renewed: 1 to 1439. Shorter leases are renewed in time too.",
			},
		}},

		{"Datastore Kubernetes", []setting{
			{
				name: "kube-subnet-mgr", def: "false", binding: to(&o.KubeSubnetMgr, boolean),
				usage: "Use the Kubernetes API, and the subnets that it assigns to nodes, instead of etcd.",
			}, {
				name: "kubeconfig-file", arg: "FILE", binding: to(&o.KubeconfigFile, text),
				usage: "Kubeconfig for the API server. Without it and --kube-api-url: the pod's service account.",
			}, {
				name: "kube-api-url", arg: "URL", binding: to(&o.KubeAPIURL, apiURL),
				usage: "URL of the API server, instead of the one in the kubeconfig.",
			}, {
				name: "kube-annotation-prefix", arg: "PREFIX", def: annotation.DefaultPrefix, binding: to(&o.KubeAnnotationPrefix, annotationPrefix),
				usage: "Prefix of the annotations in which nodes publish their addresses and backend data.",
			}, {
				name: "net-config-path", arg: "FILE", def: DefaultNetConfigPath, binding: to(&o.NetConfigPath, filePath),
				usage: "File with the network configuration. With etcd the configuration is in the store.",
			}, {
				name: "set-node-network-unavailable", def: "true", binding: to(&o.SetNodeNetworkUnavailable, boolean),
				usage: "Set the condition NetworkUnavailable of the node to False once its network is up.",
			},
		}},

		{"Several networks", []setting{
			{
				name: "networks", arg: "NAME,...", binding: to(&o.Networks, networkNames),
				usage: "Serve several networks with these names: each has the keys PREFIX/NAME/config and PREFIX/NAME/subnets " +
					"in etcd. A network without a configuration is waited for.",
			}, {
				name: "watch-networks", def: "false", binding: to(&o.WatchNetworks, boolean),
				usage: "Serve all networks below the prefix, or those of --networks, also if they are added later.",
			}, {
				name: "subnet-dir", arg: "DIRECTORY", def: "/run/flannel/networks", binding: to(&o.SubnetDir, path),
				usage: "Directory of the subnet files of several networks: NAME.env.",
			}, {
				name: "masquerade-between-networks", def: "false", binding: to(&o.MasqueradeBetweenNetworks, boolean),
				usage: "With --ip-masq: masquerade packets from a pod of one network to another network as well.",
			},
		}},

		{"External interface", []setting{
			{
				name: "iface", arg: "NAME|IP", binding: toList(&o.Iface, iface),
				usage: "Interface that peers send to, by name or address; node-ip: by the InternalIP of the Node. May be repeated: the first existing one is " +
					"used. The variable sets one. Without any such flag: the interface of the default route.",
			}, {
				name: "iface-regex", arg: "REGEX", binding: toList(&o.IfaceRegex, regex),
				usage: "Use the first interface with a matching address or, if there is none, a matching name. " +
					"May be repeated; tried after --iface. The variable sets one.",
			}, {
				name: "iface-can-reach", arg: "IP", binding: to(&o.IfaceCanReach, destination),
				usage: "Use the interface through which the kernel reaches this address. Tried after --iface-regex.",
			}, {
				name: "iface-wait", arg: "DURATION", def: "60s", binding: to(&o.IfaceWait, duration(0)),
				usage: "Time to wait at the start for the interface and its address. 0s does not wait.",
			}, {
				name: "public-ip", arg: "IP", binding: to(&o.PublicIP, unicast(prefix.IPv4)),
				usage: "IPv4 address that peers send to, if it is not the interface's own, for example behind 1:1 NAT.",
			}, {
				name: "public-ipv6", arg: "IP", binding: to(&o.PublicIPv6, unicast(prefix.IPv6)),
				usage: "The same for IPv6.",
			}, {
				name: "public-endpoint", arg: "NAME[:PORT]", binding: to(&o.PublicEndpoint, publicEndpoint),
				usage: "DNS name of this host, with wireguard only: peers resolve it when they have no session with this host. " +
					"With a port that a NAT forwards, if it is not ListenPort.",
			}, {
				name: "location", arg: "NAME", binding: to(&o.Location, location),
				usage: "Location of this host, with wireguard and its key SameLocation only: the backend of that key, and not " +
					"wireguard, carries the packets between hosts with the same location.",
			}, {
				name: "location-label", arg: "LABEL", binding: to(&o.LocationLabel, label),
				usage: "The same, with the value of this label of the Node, such as topology.kubernetes.io/zone. Needs --kube-subnet-mgr.",
			},
		}},

		{"Routes and traffic rules", []setting{
			{
				name: "ip-masq", def: "false", binding: to(&o.IPMasq, boolean),
				usage: "Masquerade packets from pods to destinations outside of the network.",
			}, {
				name: "ip-masq-fully-random-disable", def: "false", binding: to(&o.IPMasqFullyRandomDisable, boolean),
				usage: "Do not choose random source ports when masquerading.",
			}, {
				name: "iptables-forward-rules", def: "true", binding: to(&o.IPTablesForwardRules, boolean),
				usage: "Accept forwarded packets from and to the network. Applies to nftables too.",
			}, {
				name: "guard-tunnel", def: "true", binding: to(&o.GuardTunnel, boolean),
				usage: "Drop packets from pods to the tunnel ports of hosts, with udp, vxlan and ipip. " +
					"Has no effect if --ip-masq and --iptables-forward-rules are both off.",
			}, {
				name: "iptables-resync", arg: "SECONDS", def: "5", binding: to(&o.IPTablesResync, whole(time.Second, "seconds", 1, 1<<31-1)),
				usage: "Interval at which the traffic rules are checked if the kernel does not announce " +
					"changes, which is the case with legacy iptables: 1 or more. Beside thousands of rules " +
					"they are checked less often.",
			}, {
				name: "firewall", arg: "CHOICE", def: FirewallConfig,
				binding: to(&o.Firewall, oneOf(FirewallConfig, FirewallAuto, FirewallIPTables, FirewallNFTables)),
				usage: "Firewall for the traffic rules: iptables, nftables, config (set by EnableNFTables in the " +
					"network configuration), or auto (nftables if no iptables is installed or kube-proxy uses it).",
			}, {
				name: "ip-blackhole-route", def: "false", binding: to(&o.IPBlackholeRoute, boolean),
				usage: "Refuse packets to unused addresses of this host's subnet. Tunnels always do.",
			}, {
				name: "resync", arg: "DURATION", def: "5m", binding: to(&o.Resync, duration(time.Second)),
				usage: "Interval at which all devices, routes and neighbours are read again, besides following " +
					"their changes: 1s or more.",
			}, {
				name: "follow-config", def: "true", binding: to(&o.FollowConfig, boolean),
				usage: "Change to another network configuration without a restart. Otherwise the log and " +
					"/statusz say that a restart is needed.",
			}, {
				name: "exit-on-config-change", def: "false", binding: to(&o.ExitOnConfigChange, boolean),
				usage: "Exit with code 3 after a valid change of the network configuration, so that a supervisor " +
					"starts flanneld again, instead of following the change.",
			}, {
				name: "probe", def: "false", binding: to(&o.Probe, boolean),
				usage: "Check the paths to all other hosts, with at most 10 probes a second, and report those that do " +
					"not work in the log, on /statusz and as metrics.",
			}, {
				name: "nexthop-objects", arg: "auto|off", def: NexthopsAuto, binding: to(&o.NexthopObjects, oneOf(NexthopsAuto, NexthopsOff)),
				usage: "Whether IPv4 routes use nexthop objects if a device has hundreds of them: " +
					"otherwise adding thousands is slow. ip route then shows nhid.",
			}, {
				name: allowExtension, binding: to(&o.AllowExtensionBackend, boolean),
				usage: "Let the backend extension run the commands of the network configuration, as root. " +
					"Without it: with etcd yes, with the Kubernetes API no.",
			},
		}},

		{"Backend udp", []setting{
			{
				name: "udp-source-check", arg: "strict|network|off", def: string(tunnel.CheckNetwork),
				binding: to(&o.UDPSourceCheck, oneOf(string(tunnel.CheckStrict), string(tunnel.CheckNetwork), string(tunnel.CheckOff))),
				usage: "Which packets in datagrams are accepted. network: from known hosts, with a source in their " +
					"subnet or outside of the network. strict: only with a source in their subnet. off: all.",
			}, {
				name: "udp-persist", def: "false", binding: to(&o.UDPPersist, boolean),
				usage: "Keep the device flannel0 when flanneld ends, so that connections of pods pause during a restart and do not fail.",
			},
		}},

		{"Files", []setting{
			{
				name: "subnet-file", arg: "FILE", def: "/run/flannel/subnet.env", binding: to(&o.SubnetFile, filePath),
				usage: "File that tells the CNI plugin the subnet and MTU of this host.",
			}, {
				name: "state-dir", arg: "DIRECTORY", def: "/var/lib/flannel", binding: to(&o.StateDir, path),
				usage: "Directory of the last known state, which restores the network while the datastore is unavailable.",
			},
		}},

		{"Health", []setting{
			{
				name: "healthz-ip", arg: "IP", def: "0.0.0.0", binding: to(&o.HealthzIP, listenAddress),
				usage: "Address that serves /healthz, /readyz and /metrics.",
			}, {
				name: "healthz-port", arg: "PORT", def: "0", binding: to(&o.HealthzPort, port),
				usage: "Port that serves them. With 0 or a negative number they are not served.",
			}, {
				name: "readyz-datastore-grace", arg: "DURATION", def: "5m", binding: to(&o.ReadyzDatastoreGrace, duration(0)),
				usage: "Time for which the datastore may be unavailable before /readyz fails, capped at half of the remaining lease time. Traffic is not affected.",
			},
		}},

		{"Status", []setting{
			{
				name: "status-socket", arg: "FILE|off", binding: to(&o.StatusSocket, socketText),
				usage: "Local socket for flannelctl status, metrics and the status page, for root only. " +
					"Without it: flanneld.sock beside the subnet file.",
			}, {
				name: "statusz-address", arg: "IP:PORT", binding: to(&o.StatuszAddress, hostPort),
				usage: "Address that serves the status page /statusz and its JSON to any host. " +
					"Without it: only the socket and, for this host, the health port serve them.",
			},
		}},

		{"Logging and information", []setting{
			{
				name: "log-format", arg: "text|json", def: logText, binding: to(&o.LogFormat, oneOf(logText, logJSON)),
				usage: "Format of the log on stderr.",
			}, {
				name: "v", arg: "LEVEL", def: "0", binding: to(&o.Verbosity, verbosity),
				usage: "Verbosity of the log. 4 shows every change of kernel state.",
			}, {
				name: "vmodule", arg: "PATTERN=LEVEL,...", binding: to(&o.VModule, vmodule),
				usage: "Verbosity for source files with matching names.",
			}, {
				name: "log_backtrace_at", arg: "FILE:LINE", binding: to(&o.LogBacktraceAt, backtraceAt),
				usage: "Log a stack trace whenever this line logs. Needs --log-format=text.",
			}, {
				name: "version", def: "false", binding: to(&o.version, boolean),
				usage: "Print version, commit and Go release, and exit.",
			},
		}},
	}
}

func settings(o *Options) []setting {
	var all []setting
	for _, t := range topics(o) {
		all = append(all, t.settings...)
	}
	return all
}

// LogValues returns the given flags and their values as key-value pairs for the logger.
// Secrets are redacted.
func (o Options) LogValues() []any {
	var kv []any
	for _, s := range settings(&o) {
		if _, given := o.sources[s.name]; given {
			kv = append(kv, s.name, s.get())
		}
	}
	return kv
}
