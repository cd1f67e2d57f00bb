// SPDX-License-Identifier: Apache-2.0

package options

import (
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
)

type setting struct {
	name string
	arg  string // kind of value, for the help text; empty for a boolean
	def  string // default, as a user would write it; empty for none
	binding
	usage string
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
			{"etcd-endpoints", "ENDPOINT,...", "http://127.0.0.1:4001,http://127.0.0.1:2379", to(&o.EtcdEndpoints, endpoints),
				"Addresses of etcd: URLs or host:port, all with the same scheme. https uses TLS."},
			{"etcd-prefix", "KEY", "/coreos.com/network", to(&o.EtcdPrefix, text),
				"Prefix of the keys of the configuration (KEY/config) and of the leases (KEY/subnets)."},
			{"etcd-cafile", "FILE", "", to(&o.EtcdCAFile, text),
				"CA bundle for etcd's certificate. Without it: the system's."},
			{"etcd-certfile", "FILE", "", to(&o.EtcdCertFile, text),
				"TLS client certificate. Needs --etcd-keyfile."},
			{"etcd-keyfile", "FILE", "", to(&o.EtcdKeyFile, text),
				"Key of the TLS client certificate. Needs --etcd-certfile."},
			{"etcd-username", "NAME", "", to(&o.EtcdUsername, text),
				"User to log in to etcd. Needs --etcd-password."},
			{"etcd-password", "PASSWORD", "", to(&o.EtcdPassword, secret),
				"Password of that user. The variable keeps it out of the process list."},
			{"subnet-lease-ttl", "DURATION", "24h", to(&o.LeaseTTL, duration(5*time.Second)),
				"Time after which etcd deletes the lease of a failed host: 5s or more, the same on all hosts."},
			{"subnet-lease-renew-margin", "MINUTES", "60", to(&o.RenewMargin, whole(time.Minute, "minutes", 1, 1439)),
				"Time before its end at which the lease is renewed: 1 to 1439. Shorter leases are renewed in time too."},
		}},

		{"Datastore Kubernetes", []setting{
			{"kube-subnet-mgr", "", "false", to(&o.KubeSubnetMgr, boolean),
				"Use the Kubernetes API, and the subnets that it assigns to nodes, instead of etcd."},
			{"kubeconfig-file", "FILE", "", to(&o.KubeconfigFile, text),
				"Kubeconfig for the API server. Without it and --kube-api-url: the pod's service account."},
			{"kube-api-url", "URL", "", to(&o.KubeAPIURL, apiURL),
				"URL of the API server, instead of the one in the kubeconfig."},
			{"kube-annotation-prefix", "PREFIX", annotation.DefaultPrefix, to(&o.KubeAnnotationPrefix, annotationPrefix),
				"Prefix of the annotations in which nodes publish their addresses and backend data."},
			{"net-config-path", "FILE", DefaultNetConfigPath, to(&o.NetConfigPath, filePath),
				"File with the network configuration. With etcd the configuration is in the store."},
			{"set-node-network-unavailable", "", "true", to(&o.SetNodeNetworkUnavailable, boolean),
				"Set the condition NetworkUnavailable of the node to False once its network is up."},
		}},

		{"Several networks", []setting{
			{"networks", "NAME,...", "", to(&o.Networks, networkNames),
				"Serve several networks with these names: each has the keys PREFIX/NAME/config and PREFIX/NAME/subnets " +
					"in etcd. A network without a configuration is waited for."},
			{"watch-networks", "", "false", to(&o.WatchNetworks, boolean),
				"Serve all networks below the prefix, or those of --networks, also if they are added later."},
			{"subnet-dir", "DIRECTORY", "/run/flannel/networks", to(&o.SubnetDir, path),
				"Directory of the subnet files of several networks: NAME.env."},
			{"masquerade-between-networks", "", "false", to(&o.MasqueradeBetweenNetworks, boolean),
				"With --ip-masq: masquerade packets from a pod of one network to another network as well."},
		}},

		{"External interface", []setting{
			{"iface", "NAME|IP", "", toList(&o.Iface, iface),
				"Interface that peers send to, by name or address; node-ip: by the InternalIP of the Node. May be repeated: the first existing one is " +
					"used. The variable sets one. Without any such flag: the interface of the default route."},
			{"iface-regex", "REGEX", "", toList(&o.IfaceRegex, regex),
				"Use the first interface with a matching address or, if there is none, a matching name. " +
					"May be repeated; tried after --iface. The variable sets one."},
			{"iface-can-reach", "IP", "", to(&o.IfaceCanReach, destination),
				"Use the interface through which the kernel reaches this address. Tried after --iface-regex."},
			{"iface-wait", "DURATION", "60s", to(&o.IfaceWait, duration(0)),
				"Time to wait at the start for the interface and its address. 0s does not wait."},
			{"public-ip", "IP", "", to(&o.PublicIP, unicast(prefix.IPv4)),
				"IPv4 address that peers send to, if it is not the interface's own, for example behind 1:1 NAT."},
			{"public-ipv6", "IP", "", to(&o.PublicIPv6, unicast(prefix.IPv6)),
				"The same for IPv6."},
			{"public-endpoint", "NAME[:PORT]", "", to(&o.PublicEndpoint, publicEndpoint),
				"DNS name of this host, with wireguard only: peers resolve it when they have no session with this host. " +
					"With a port that a NAT forwards, if it is not ListenPort."},
			{"location", "NAME", "", to(&o.Location, location),
				"Location of this host, with wireguard and its key SameLocation only: the backend of that key, and not " +
					"wireguard, carries the packets between hosts with the same location."},
			{"location-label", "LABEL", "", to(&o.LocationLabel, label),
				"The same, with the value of this label of the Node, such as topology.kubernetes.io/zone. Needs --kube-subnet-mgr."},
		}},

		{"Routes and traffic rules", []setting{
			{"ip-masq", "", "false", to(&o.IPMasq, boolean),
				"Masquerade packets from pods to destinations outside of the network."},
			{"ip-masq-fully-random-disable", "", "false", to(&o.IPMasqFullyRandomDisable, boolean),
				"Do not choose random source ports when masquerading."},
			{"iptables-forward-rules", "", "true", to(&o.IPTablesForwardRules, boolean),
				"Accept forwarded packets from and to the network. Applies to nftables too."},
			{"guard-tunnel", "", "true", to(&o.GuardTunnel, boolean),
				"Drop packets from pods to the tunnel ports of hosts, with udp, vxlan and ipip. " +
					"Has no effect if --ip-masq and --iptables-forward-rules are both off."},
			{"iptables-resync", "SECONDS", "5", to(&o.IPTablesResync, whole(time.Second, "seconds", 1, 1<<31-1)),
				"Interval at which the traffic rules are checked if the kernel does not announce " +
					"changes, which is the case with legacy iptables: 1 or more. Beside thousands of rules " +
					"they are checked less often."},
			{"firewall", "CHOICE", FirewallConfig, to(&o.Firewall, oneOf(FirewallConfig, FirewallAuto, FirewallIPTables, FirewallNFTables)),
				"Firewall for the traffic rules: iptables, nftables, config (set by EnableNFTables in the " +
					"network configuration), or auto (nftables if no iptables is installed or kube-proxy uses it)."},
			{"ip-blackhole-route", "", "false", to(&o.IPBlackholeRoute, boolean),
				"Refuse packets to unused addresses of this host's subnet. Tunnels always do."},
			{"resync", "DURATION", "5m", to(&o.Resync, duration(time.Second)),
				"Interval at which all devices, routes and neighbours are read again, besides following " +
					"their changes: 1s or more."},
			{"follow-config", "", "true", to(&o.FollowConfig, boolean),
				"Change to another network configuration without a restart. Otherwise the log and " +
					"/statusz say that a restart is needed."},
			{"exit-on-config-change", "", "false", to(&o.ExitOnConfigChange, boolean),
				"Exit with code 3 after a valid change of the network configuration, so that a supervisor " +
					"starts flanneld again, instead of following the change."},
			{"probe", "", "false", to(&o.Probe, boolean),
				"Check the paths to all other hosts, with at most 10 probes a second, and report those that do " +
					"not work in the log, on /statusz and as metrics."},
			{"nexthop-objects", "auto|off", NexthopsAuto, to(&o.NexthopObjects, oneOf(NexthopsAuto, NexthopsOff)),
				"Whether IPv4 routes use nexthop objects if a device has hundreds of them: " +
					"otherwise adding thousands is slow. ip route then shows nhid."},
			{allowExtension, "", "", to(&o.AllowExtensionBackend, boolean),
				"Let the backend extension run the commands of the network configuration, as root. " +
					"Without it: with etcd yes, with the Kubernetes API no."},
		}},

		{"Backend udp", []setting{
			{"udp-source-check", "strict|network|off", string(tunnel.CheckNetwork), to(&o.UDPSourceCheck, oneOf(string(tunnel.CheckStrict), string(tunnel.CheckNetwork), string(tunnel.CheckOff))),
				"Which packets in datagrams are accepted. network: from known hosts, with a source in their " +
					"subnet or outside of the network. strict: only with a source in their subnet. off: all."},
			{"udp-persist", "", "false", to(&o.UDPPersist, boolean),
				"Keep the device flannel0 when flanneld ends, so that connections of pods pause during a restart and do not fail."},
		}},

		{"Files", []setting{
			{"subnet-file", "FILE", "/run/flannel/subnet.env", to(&o.SubnetFile, filePath),
				"File that tells the CNI plugin the subnet and MTU of this host."},
			{"state-dir", "DIRECTORY", "/var/lib/flannel", to(&o.StateDir, path),
				"Directory of the last known state, which restores the network while the datastore is unavailable."},
		}},

		{"Health", []setting{
			{"healthz-ip", "IP", "0.0.0.0", to(&o.HealthzIP, listenAddress),
				"Address that serves /healthz, /readyz and /metrics."},
			{"healthz-port", "PORT", "0", to(&o.HealthzPort, port),
				"Port that serves them. With 0 or a negative number they are not served."},
			{"readyz-datastore-grace", "DURATION", "5m", to(&o.ReadyzDatastoreGrace, duration(0)),
				"Time for which the datastore may be unavailable before /readyz fails, capped at half of the remaining lease time. Traffic is not affected."},
		}},

		{"Status", []setting{
			{"status-socket", "FILE|off", "", to(&o.StatusSocket, socketText),
				"Local socket for flannelctl status, metrics and the status page, for root only. " +
					"Without it: flanneld.sock beside the subnet file."},
			{"statusz-address", "IP:PORT", "", to(&o.StatuszAddress, hostPort),
				"Address that serves the status page /statusz and its JSON to any host. " +
					"Without it: only the socket and, for this host, the health port serve them."},
		}},

		{"Logging and information", []setting{
			{"log-format", "text|json", logText, to(&o.LogFormat, oneOf(logText, logJSON)),
				"Format of the log on stderr."},
			{"v", "LEVEL", "0", to(&o.Verbosity, verbosity),
				"Verbosity of the log. 4 shows every change of kernel state."},
			{"vmodule", "PATTERN=LEVEL,...", "", to(&o.VModule, vmodule),
				"Verbosity for source files with matching names."},
			{"log_backtrace_at", "FILE:LINE", "", to(&o.LogBacktraceAt, backtraceAt),
				"Log a stack trace whenever this line logs. Needs --log-format=text."},
			{"version", "", "false", to(&o.version, boolean),
				"Print version, commit and Go release, and exit."},
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
