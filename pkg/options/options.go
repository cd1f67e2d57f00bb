// SPDX-License-Identifier: Apache-2.0

// Package options contains flanneld's flags: names, variables, defaults, validation, help text
// and the set-up of the log.
package options

import (
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// The values of --nexthop-objects.
const (
	NexthopsAuto = "auto"
	NexthopsOff  = "off"
)

// The values of --firewall.
const (
	FirewallConfig   = "config"
	FirewallAuto     = "auto"
	FirewallIPTables = "iptables"
	FirewallNFTables = "nftables"
)

// allowExtension is the flag whose default depends on another flag.
const allowExtension = "allow-extension-backend"

// Options contains the validated values of all flags and FLANNELD_ variables, and the names of
// this node and pod. Formatting it does not show a secret.
type Options struct {
	// EtcdEndpoints contains the addresses of etcd: host:port or URLs, all with the same
	// scheme.
	EtcdEndpoints []string
	// EtcdPrefix is the prefix of all keys, as given.
	EtcdPrefix string
	// EtcdKeyFile and EtcdCertFile are the TLS client key and certificate. Both are set
	// or none. EtcdCAFile is the CA bundle; if it is empty the system's is used.
	EtcdKeyFile, EtcdCertFile, EtcdCAFile string
	// EtcdUsername and EtcdPassword are both set or both empty.
	EtcdUsername string
	EtcdPassword Secret
	// RenewMargin is the time before the end of the lease at which the lease is renewed at
	// the latest. A short lease has a smaller margin.
	RenewMargin time.Duration
	// LeaseTTL is the time after which etcd deletes a lease that is not renewed.
	LeaseTTL time.Duration

	// Networks are the names of the networks to serve, if the daemon serves several. See
	// WatchNetworks.
	Networks []string
	// WatchNetworks makes the daemon serve several networks: those of Networks or, if
	// Networks is empty, all networks below EtcdPrefix, including those that are added later.
	WatchNetworks bool
	// SubnetDir is the directory with a subnet file for each of several networks.
	SubnetDir string
	// MasqueradeBetweenNetworks masquerades packets from one of several networks to another,
	// if IPMasq is set.
	MasqueradeBetweenNetworks bool

	// KubeSubnetMgr selects the Kubernetes API as the store, instead of etcd.
	KubeSubnetMgr bool
	// KubeAPIURL and KubeconfigFile locate the API server. If both are empty, the pod's
	// service account locates it.
	KubeAPIURL, KubeconfigFile string
	// NodeName is the Node of this host in Kubernetes, from NODE_NAME. If it is empty,
	// the API gives the Node of the pod that PodName and PodNamespace identify, from
	// POD_NAME and POD_NAMESPACE.
	NodeName, PodName, PodNamespace string
	// KubeAnnotationPrefix is the prefix of the node annotations.
	KubeAnnotationPrefix string
	// NetConfigPath is the file with the network configuration, with KubeSubnetMgr only.
	NetConfigPath string
	// SetNodeNetworkUnavailable sets the node's condition NetworkUnavailable to False when
	// its network is up.
	SetNodeNetworkUnavailable bool

	// Iface and IfaceRegex select the interface. The elements of Iface are tried first.
	Iface, IfaceRegex []string
	// IfaceCanReach selects the interface through which the host reaches this IP address; empty
	// if not given. It is tried after IfaceRegex.
	IfaceCanReach string
	// IfaceWait limits the wait for an interface at the start.
	IfaceWait time.Duration
	// PublicIP and PublicIPv6 are the addresses that peers send to; zero if not given.
	PublicIP, PublicIPv6 netip.Addr
	// PublicEndpoint is the name that peers send to; zero if not given.
	PublicEndpoint endpoint.Named
	// Location is the name of the location of this host. LocationLabel is the label of its Node whose
	// value is that name. At most one of the two is set.
	Location, LocationLabel string

	// IPMasq masquerades packets that leave the network, with random ports unless
	// IPMasqFullyRandomDisable is set.
	IPMasq, IPMasqFullyRandomDisable bool
	// IPTablesForwardRules accepts forwarded packets of the network.
	IPTablesForwardRules bool
	// GuardTunnel drops packets from pods to the tunnels of hosts.
	GuardTunnel bool
	// IPTablesResync is the interval at which the traffic rules are checked if the kernel
	// does not announce their changes, as with legacy iptables.
	IPTablesResync time.Duration
	// IPBlackholeRoute maintains an unreachable route for this host's subnet.
	IPBlackholeRoute bool
	// Firewall is "config", "auto", "iptables" or "nftables".
	Firewall string
	// Resync is the interval at which all kernel state is read again.
	Resync time.Duration

	// FollowConfig makes the daemon change to another network configuration without a
	// restart.
	FollowConfig bool
	// Probe checks the paths to all peers.
	Probe bool
	// ExitOnConfigChange ends the daemon after a valid change of the network configuration.
	ExitOnConfigChange bool
	// NexthopObjects is "auto" or "off".
	NexthopObjects string

	// AllowExtensionBackend allows the extension backend to run the commands of the network
	// configuration.
	AllowExtensionBackend bool
	// UDPSourceCheck is "strict", "network" or "off": a tunnel.SourceCheck.
	UDPSourceCheck string
	// UDPPersist keeps the TUN device of the udp backend when the daemon ends.
	UDPPersist bool

	// SubnetFile is the file that is written for the CNI plugin.
	SubnetFile string
	// StateDir is the directory of the last known state.
	StateDir string

	// HealthzIP and HealthzPort are the address that serves /healthz, /readyz and /metrics. The zero
	// address means all addresses. Port 0 means that the daemon does not serve them.
	HealthzIP   netip.Addr
	HealthzPort uint16
	// ReadyzDatastoreGrace is the time for which the store may be unavailable before the
	// daemon is not ready.
	ReadyzDatastoreGrace time.Duration

	// StatusSocket is the path of the local socket. Empty means beside the subnet file,
	// "off" means none.
	StatusSocket string
	// StatuszAddress is the address:port that serves the status page to other hosts.
	// Empty means none.
	StatuszAddress string

	// LogFormat is "text" or "json".
	LogFormat string
	// Verbosity, VModule and LogBacktraceAt are klog's v, vmodule and
	// log_backtrace_at.
	Verbosity               int
	VModule, LogBacktraceAt string

	// Warnings contains one line for each input that was ignored and looks like a
	// mistake.
	Warnings []string

	version bool
	sources map[string]string // form in which each flag was given, by name of the flag; see Source
}

// Source returns the form in which the flag called name was given: "--ip-masq" or
// "FLANNELD_IP_MASQ". For a flag that was not given it returns "--" and the name.
func (o Options) Source(name string) string {
	if s, ok := o.sources[name]; ok {
		return s
	}
	return "--" + name
}

// Several reports whether the daemon serves several networks.
func (o Options) Several() bool { return len(o.Networks) > 0 || o.WatchNetworks }

// Network returns the options for the network called name, if there are several. The
// network has its own prefix of keys, subnet file and state file.
func (o Options) Network(name string) Options {
	o.EtcdPrefix = strings.TrimRight(o.EtcdPrefix, "/") + "/" + name
	o.SubnetFile = filepath.Join(o.SubnetDir, name+".env")
	o.Networks = nil
	o.WatchNetworks = false
	return o
}

// HealthzAddr returns the address:port that serves /healthz, /readyz and /metrics, or "" if the
// daemon does not serve them.
func (o Options) HealthzAddr() string {
	if o.HealthzPort == 0 {
		return ""
	}
	host := ""
	if o.HealthzIP.IsValid() {
		host = o.HealthzIP.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(o.HealthzPort)))
}

// SocketPath returns the path of the local socket, or "" if there is none.
func (o Options) SocketPath() string {
	switch o.StatusSocket {
	case "":
		return status.SocketPath(o.SubnetFile)
	case socketOff:
		return ""
	}
	return o.StatusSocket
}

// StoreKind returns the kind of the datastore: kubernetes or etcd.
func (o Options) StoreKind() string {
	if o.KubeSubnetMgr {
		return "kubernetes"
	}
	return "etcd"
}

// StateName returns the name of the daemon's state file, without the extension. The name depends on
// the keys in the store and on the subnet file, because these differ between several daemons on a
// host.
func (o Options) StateName() string {
	network := o.EtcdPrefix
	if o.KubeSubnetMgr {
		network = "Kubernetes " + o.KubeAnnotationPrefix
	}
	sum := sha256.Sum256([]byte(filepath.Clean(o.SubnetFile) + "\x00" + network))
	return "flanneld-" + hex.EncodeToString(sum[:6])
}

// DefaultNetConfigPath is the default path of the network configuration on Kubernetes,
// where flannel's manifests mount its ConfigMap.
const DefaultNetConfigPath = "/etc/kube-flannel/net-conf.json"
